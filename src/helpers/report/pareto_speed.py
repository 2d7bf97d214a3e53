"""The Pareto panel of speed: what accuracy a decoded token a second buys.

Accuracy comes from evaluations after RL, speed from the speed runs, joined by the model's size and the bits of a weight: a packed
layer computes at the same speed whatever chose its codes. Of several quantizers at one width the panel takes the one with most
seeds, GPTQ before AWQ. A point is dominated when another is no slower and at least as accurate (and better in one of the two).
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from helpers.report.pareto import points
from helpers.report.speed import SEQUENCES, Row, bits_of, count_of
from helpers.report.speed_figures import plain, save
from helpers.report.style import Theme

STEM = "pareto-speed"
STUDIES = ("arms", "recover", "micro")
RECIPES = {"base > grpo": "bf16", "base > grpo > gptq": "w{bits}g64", "base > grpo > awq": "w{bits}g64"}
MARKERS = {"xs": "o", "s": "s", "m": "^", "l": "D"}


def joined(results: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """One row a size, width and number of sequences: accuracy with its interval, tokens a second, and whether on the frontier.

    Speeds are those of the first device among the rows, the GPU where there is one.
    """
    rows = [row for row in rows if row["work"].startswith("decoding")]
    rows = [row for row in rows if row["device"] == rows[0]["device"]]
    found = []
    for arm in best(results).to_dict("records"):
        for row in rows:
            if row["shape"].split(",")[0] == arm["model"] and bits_of(row) == arm["bits"]:
                speed = {"sequences": count_of(row, SEQUENCES), "tokens_per_second": row["ours"]}
                found.append(arm | speed | {"device": row["device"]})
    table = pd.DataFrame(found)
    if table.empty:
        return table
    table = table.sort_values(["sequences", "tokens_per_second", "value"], ascending=[True, False, False])
    before = table.groupby("sequences")["value"].transform(lambda v: v.cummax().shift(fill_value=-np.inf))
    return table.assign(frontier=table["value"] > before).reset_index(drop=True)


def best(results: pd.DataFrame) -> pd.DataFrame:
    """One row a size and width: the arm that speaks for it."""
    wanted = results[results["study"].isin(STUDIES) & results["recipe"].isin(RECIPES)]
    on_grid = [RECIPES[recipe].format(bits=bits) for recipe, bits in zip(wanted["recipe"], wanted["bits"], strict=True)]
    wanted = wanted[wanted["scheme"] == on_grid]
    there = (wanted["metric"] == "accuracy") & (wanted["benchmark"] == "arithmetic")
    if not there.any():
        return pd.DataFrame(columns=["model", "bits"])
    arms = points(wanted)
    order = {name: place for place, name in enumerate((*RECIPES, *STUDIES))}
    arms = arms.assign(recipe_place=arms["recipe"].map(order), study_place=arms["study"].map(order))
    arms = arms.sort_values(["seeds", "recipe_place", "study_place"], ascending=[False, True, True])
    kept = ["model", "bits", "method", "scheme", "study", "value", "ci_low", "ci_high", "n", "seeds"]
    return arms.drop_duplicates(["model", "bits"]).sort_values(["model", "bits"])[kept]


def write(results: pd.DataFrame, rows: Sequence[Row], folder: Path) -> None:
    """Write `pareto-speed.svg`, `pareto-speed-dark.svg` and `pareto-speed.csv` where accuracies and speeds meet."""
    if not (table := joined(results, rows)).empty:
        save(folder / STEM, table, draw)


def draw(table: pd.DataFrame, theme: Theme) -> Figure:
    """Accuracy against tokens a second, a panel for each number of sequences; colour is bits, the marker the model's size."""
    panels = sorted(set(table["sequences"]))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels) + 1.2, 3.6), layout="constrained", squeeze=False, sharey=True
    )  # fmt: skip
    for axis, count in zip(axes[0], panels, strict=True):
        own = table[table["sequences"] == count]
        edge = own[own["frontier"]]
        # from right to left: faster is to the right, so the step falls where speed does
        axis.step([*edge["tokens_per_second"], own["tokens_per_second"].min()], [*edge["value"], edge["value"].iloc[-1]],
                  where="post", color=theme.ink, lw=1.2, zorder=2)  # fmt: skip
        for row in own.itertuples():
            bars = [[max(0.0, row.value - row.ci_low)], [max(0.0, row.ci_high - row.value)]]
            axis.errorbar(row.tokens_per_second, row.value, bars, fmt=MARKERS[row.model], color=theme.bits[row.bits],
                          alpha=1.0 if row.frontier else 0.4, markersize=7, capsize=2.5, elinewidth=1.0, zorder=3)  # fmt: skip
        axis.set(xlabel="decoded tokens a second", xscale="log", title=f"{count} sequence{'s' * (count > 1)} at a time")
        plain(axis.xaxis)
    axes[0, 0].set_ylabel("accuracy on arithmetic")
    handles = [Patch(color=theme.bits[b], label=f"{b} bit") for b in sorted(set(table["bits"]), reverse=True)]
    handles += [
        Line2D([], [], marker=MARKERS[m], ls="", color=theme.ink, label=f"model {m}")
        for m in MARKERS
        if m in set(table["model"])
    ]
    figure.legend(
        handles=[*handles, Line2D([], [], color=theme.ink, lw=1.2, label="frontier")], loc="outside right center"
    )
    return figure
