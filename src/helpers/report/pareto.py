"""The Pareto figure: what accuracy a byte buys.

A point is dominated when another needs no more memory and is at least as accurate (and better in one of the two). Memory counts
what the low-bit model stores: full precision at 2 bytes a weight, quantized layers at their codes, scales and zero points.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from scipy import stats

from helpers.errors import UserError
from helpers.report.figures import shown_once
from helpers.report.numbers import memory
from helpers.report.style import DARK, LIGHT, MARKERS, OTHER_MARKER, Theme, themed

ARM = ["study", "model", "recipe", "method", "scheme", "bits"]
OFFSETS = [
    (8, -13),
    (8, 6),
    (-8, 8),
    (-8, -14),
    (0, 12),
    (0, -18),
    (14, -26),
    (-14, 22),
]  # where a label may stand, in points


def points(results: pd.DataFrame, metric: str = "accuracy", task: str = "arithmetic") -> pd.DataFrame:
    """One row an arm: memory_bytes, value, its 95 % interval, n, k, seeds, and whether it is on the frontier.

    With one seed the interval is the evaluation's own, over problems; with several the value is their mean, and the interval is
    Student's t over the seeds. Two runs with the same arm and seed (another learning rate, say) are two points.
    """
    rows = results[(results["metric"] == metric) & (results["benchmark"] == task) & (results["source"] == "run")]
    if rows.empty:
        there = ", ".join(sorted(set(results["metric"])))
        raise UserError(f"no evaluation has {metric} on {task}: the metrics there are {there}.")
    rows = rows.assign(variant=rows.groupby([*ARM, "seed"], dropna=False).cumcount())
    table = pd.DataFrame([_point(arm, group) for arm, group in rows.groupby([*ARM, "variant"], dropna=False)])
    table = table.sort_values(["memory_bytes", "value"], ascending=[True, False], ignore_index=True)
    table["frontier"] = table["value"] > table["value"].cummax().shift(fill_value=-np.inf)
    return table


def _point(arm: tuple, rows: pd.DataFrame) -> dict:
    value, seeds = rows["value"].mean(), len(rows)
    low, high = rows["ci_low"].iloc[0], rows["ci_high"].iloc[0]
    if seeds > 1:
        half = float(stats.t.ppf(0.975, seeds - 1) * rows["value"].std(ddof=1) / np.sqrt(seeds))
        low, high = value - half, value + half
    sizes = {name: rows[name].mean() for name in ("memory_bytes", "effective_bits")}
    return {**dict(zip(ARM, arm, strict=False)), **sizes, "value": value, "ci_low": low, "ci_high": high,
            "n": rows["n"].max(), "k": rows["k"].max(), "seeds": seeds}  # fmt: skip


def pareto(results: pd.DataFrame, stem: Path, metric: str = "accuracy", task: str = "arithmetic") -> Figure:
    """Draw the figure, write `<stem>.svg`, `<stem>-dark.svg` and `<stem>.csv`, and give the light one."""
    table = points(results, metric, task)
    stem.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(stem.with_suffix(".csv"), index=False, lineterminator="\n")
    for theme, suffix in ((DARK, "-dark.svg"), (LIGHT, ".svg")):
        with themed(theme):  # saving needs the theme too: it seeds the ids inside the SVG
            figure = draw(table, theme, metric, task)
            figure.savefig(stem.parent / f"{stem.name}{suffix}", metadata={"Date": None})
            shown_once(figure)
    return figure


def draw(table: pd.DataFrame, theme: Theme, metric: str, task: str) -> Figure:
    """The figure in one theme."""
    figure, axis = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
    for (_, _scheme, bits), group in table.groupby(["recipe", "scheme", "bits"]):
        style = "--" if bits == 16 else "-"
        axis.plot(group["memory_bytes"], group["value"], style, color=theme.bits[bits], lw=0.9, alpha=0.45, zorder=1)
    edge = table[table["frontier"]]
    axis.step(
        [*edge["memory_bytes"], table["memory_bytes"].max() * 1.15], [*edge["value"], edge["value"].iloc[-1]],
        where="post", color=theme.ink, lw=1.2, zorder=2,
    )  # fmt: skip
    for row in table.itertuples():
        colour, alpha = theme.bits[row.bits], 1.0 if row.frontier else 0.4
        bars = [[max(0.0, row.value - row.ci_low)], [max(0.0, row.ci_high - row.value)]]
        axis.errorbar(
            row.memory_bytes, row.value, bars, fmt=MARKERS.get(row.method, OTHER_MARKER), color=colour, alpha=alpha,
            markersize=7, capsize=2.5, elinewidth=1.0, zorder=3,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: memory(x)))
    sizes = (table["n"].max(), table["k"].max(), table["seeds"].max())
    axis.set(
        xlabel="effective memory: packed codes, scales, zero points; 16 bits for the rest",
        ylabel=f"{metric} on {task}",
        ylim=(-0.03, max(1.0, 1.03 * table["ci_high"].max())),
        title=f"{metric} on {task}, n = {sizes[0]}, k = {sizes[1]}, seeds = {sizes[2]}, 95 % intervals",
    )
    axis.margins(x=0.08)
    axis.legend(handles=_legend(table, theme), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.canvas.draw()
    _label(axis, table[table["frontier"]], table, theme)
    return figure


def _legend(table: pd.DataFrame, theme: Theme) -> list[Line2D | Patch]:
    bits = [Patch(color=theme.bits[b], label=f"{b} bit") for b in sorted(set(table["bits"]), reverse=True)]
    methods = [
        Line2D([], [], marker=MARKERS.get(m, OTHER_MARKER), ls="", color=theme.ink, label=m)
        for m in dict.fromkeys(table["method"])
    ]
    return [*bits, *methods, Line2D([], [], color=theme.ink, lw=1.2, label="frontier")]


def _label(axis: Axes, rows: pd.DataFrame, all_rows: pd.DataFrame, theme: Theme) -> None:
    """Name the frontier's points, each at the first offset where its text touches no other text and no point."""
    renderer = axis.figure.canvas.get_renderer()
    taken = [
        (x - 6, y - 6, x + 6, y + 6)
        for x, y in axis.transData.transform(all_rows[["memory_bytes", "value"]].to_numpy(dtype=float))
    ]
    frame = axis.get_window_extent(renderer)
    for row in rows.itertuples():
        name = f"{row.model} {row.method} {row.bits} bit"
        for dx, dy in OFFSETS:
            label = axis.annotate(
                name, (row.memory_bytes, row.value), (dx, dy), textcoords="offset points", fontsize=8, color=theme.ink,
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
            )  # fmt: skip
            box = label.get_window_extent(renderer).extents
            free = all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken)
            if free and frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1:
                taken.append(tuple(box))
                break
            label.remove()
