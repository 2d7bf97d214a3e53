"""The figures of the speed chapter and of the speed stage, from rows of speed.json."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from helpers.report.figures import shown_once
from helpers.report.speed import SEQUENCES, Row, bits_of, count_of, least
from helpers.report.style import DARK, LIGHT, Theme, themed

PARTS = (8, 3, 4, 16)  # bits whose colours the parts of a GRPO step take, one after another
PEERS = ("o", "s", "^", "D")  # markers
LINES = ("-", "--", "-.", ":")


def linear(rows: Sequence[Row]) -> pd.DataFrame:
    """m (rows of x), shape, name, bits (0: a peer), megabytes, microseconds, limit: each contender of the linear layers once."""
    found = {}
    for row in rows:
        m = count_of(row, r"(\d+) rows?$")
        if "linear" in row["work"] and row.get("moved") and m:
            shape, scheme = row["shape"].split(", ")[:2]
            for name, value in {"ours": row["ours"], **row["peers"]}.items():
                own = name == "ours"
                label = f"ours, {scheme}" if own else name
                mb = row["moved"][name] / 1e6
                bits = bits_of(row) if own else 0
                found.setdefault((m, shape, label), (m, shape, label, bits, mb, value, least(row, name)))
    return pd.DataFrame(found.values(), columns=["m", "shape", "name", "bits", "megabytes", "microseconds", "limit"])


def roofline(found: pd.DataFrame, theme: Theme = LIGHT) -> Figure:
    """Time of a linear layer against the bytes it has to move, a panel for each number of input rows; the line is the bandwidth."""
    most = found["shape"].value_counts().index[0]
    found = found[found["shape"] == most]
    panels = sorted(set(found["m"]))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.3 * len(panels) + 1.6, 3.2), layout="constrained", sharex=True, sharey=True, squeeze=False
    )  # fmt: skip
    peers = list(dict.fromkeys(found[found["bits"] == 0]["name"]))
    ends = found["megabytes"].min() * 0.8, found["megabytes"].max() * 1.25
    slope = (found["limit"] / found["megabytes"]).median()
    for axis, m in zip(axes[0], panels, strict=True):
        axis.plot(ends, [slope * end for end in ends], color=theme.faint, lw=1.2, label="bandwidth")
        for row in found[found["m"] == m].itertuples():
            marker = "*" if row.bits else PEERS[peers.index(row.name) % len(PEERS)]
            colour = theme.bits[row.bits] if row.bits else theme.faint
            axis.plot(row.megabytes, row.microseconds, marker, color=colour, ms=11 if row.bits else 6, label=row.name)
        axis.set(title=f"{m} row{'s' * (m > 1)} of x", xlabel="MB moved", xscale="log", yscale="log")
        plain(axis.xaxis)
        plain(axis.yaxis)
    axes[0, 0].set_ylabel(f"microseconds, {most}")
    _legend(figure, axes[0])
    return figure


def tokens(rows: Sequence[Row]) -> pd.DataFrame:
    """panel, line, bits, tokens_per_second, limit: decoding on the first device, where more than one width was measured."""
    found = []
    for row in (row for row in rows if row["device"] == rows[0]["device"]):
        sequences = count_of(row, SEQUENCES)
        if row["unit"] != "tokens/s" or not sequences or "fake" in row["work"]:
            continue
        model, many = row["shape"].partition(",")[0], f"{sequences} sequence{'s' * (sequences > 1)}"
        panel, line = (f"micro, {many}", model) if "micro" in row["work"] else (model, many)
        found.append((f"{panel}\n{row['device']}", line, bits_of(row), row["ours"], row.get("limit")))
    found = pd.DataFrame(found, columns=["panel", "line", "bits", "tokens_per_second", "limit"])
    return found[found.groupby("panel")["bits"].transform("nunique") > 1]


def tokens_by_bits(found: pd.DataFrame, theme: Theme = LIGHT) -> Figure:
    """Decoded tokens a second against the bits of a weight, a panel for each model or number of sequences; limits are faint."""
    panels = list(dict.fromkeys(found["panel"]))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.4 * len(panels) + 1.6, 3.2), layout="constrained", squeeze=False, sharex=True
    )  # fmt: skip
    for axis, panel in zip(axes[0], panels, strict=True):
        own = found[found["panel"] == panel]
        for index, (line, points) in enumerate(own.groupby("line", sort=False)):
            points = points.sort_values("bits")
            colour = theme.bits[(8, 2, 4, 3)[index % 4]]
            axis.plot(points["bits"], points["tokens_per_second"], f"o{LINES[index % 4]}", color=colour, label=line)
            if "micro" not in panel:
                axis.plot(points["bits"], points["limit"], ":", color=colour, alpha=0.5)
        axis.set(xlabel="bits of a weight", xscale="log", yscale="log")
        axis.set_title(panel, fontsize=9)
        plain(axis.yaxis)
        axis.set_xticks([2, 3, 4, 8, 16], ["2", "3", "4", "8", "16"], minor=False)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("tokens a second")
    return figure


def parts(rows: Sequence[Row]) -> pd.DataFrame:
    """panel, who, part, value, unit: where the time of a GRPO step goes."""
    found = []
    for row in rows:
        part = row["work"].partition("GRPO step: ")[2]
        if part:
            for who, value in {"ours": row["ours"], **row["peers"]}.items():
                found.append((f"{row['shape']}\n{row['device']}", who, part, value, row["unit"]))
    return pd.DataFrame(found, columns=["panel", "who", "part", "value", "unit"])


def step_by_part(found: pd.DataFrame, theme: Theme = LIGHT) -> Figure:
    """Time of one GRPO step by part, ours and the peer's, a panel for each shape and device."""
    panels = list(dict.fromkeys(found["panel"]))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7.6, 1.5 * len(panels) + 0.7), layout="constrained", squeeze=False
    )  # fmt: skip
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        own = found[found["panel"] == panel]
        bars = own.pivot_table(index="who", columns="part", values="value", sort=False).fillna(0.0)
        left = 0
        for part, colour in zip(bars, PARTS, strict=False):
            axis.barh(bars.index, bars[part], left=left, color=theme.bits[colour], label=part, height=0.6)
            left = left + bars[part]
        axis.set(xlabel=f"{own['unit'].iloc[0]} a step")
        axis.set_title(panel.replace("\n", ", "), fontsize=9)
        axis.grid(axis="y", visible=False)
    _legend(figure, axes[:, 0])
    return figure


def plain(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, 20, ..."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, beside them."""
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=8)


FIGURES: dict[str, tuple[Callable[[Sequence[Row]], pd.DataFrame], Callable[..., Figure]]] = {
    "speed-roofline": (linear, roofline),
    "speed-tokens": (tokens, tokens_by_bits),
    "speed-grpo": (parts, step_by_part),
}


def shown(name: str, rows: Sequence[Row]) -> Figure | None:
    """One of `FIGURES` for a notebook."""
    data, draw = FIGURES[name]
    if (found := data(rows)).empty:
        return None
    with themed(LIGHT) as theme:
        return shown_once(draw(found, theme))


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write `<name>.svg`, `<name>-dark.svg` and `<name>.csv` of each figure that there are rows for."""
    for name, (data, draw) in FIGURES.items():
        if not (found := data(rows)).empty:
            save(folder / name, found, draw)


def save(stem: Path, found: pd.DataFrame, draw: Callable[[pd.DataFrame, Theme], Figure]) -> None:
    """A figure in both themes, and the numbers that it shows."""
    found.to_csv(stem.with_suffix(".csv"), index=False, lineterminator="\n", float_format="%.6g")
    for theme, suffix in ((DARK, "-dark.svg"), (LIGHT, ".svg")):
        with themed(theme):  # saving needs the theme too: it seeds the ids inside the SVG
            figure = draw(found, theme)
            figure.savefig(stem.parent / f"{stem.name}{suffix}", metadata={"Date": None})
            shown_once(figure)
