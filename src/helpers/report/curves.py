"""Figures of training curves over seeds: how fast a start converges, what RL does to a low-bit policy, what a shock does.

A curve lies in the detail of a run's metric (`train_accuracy`, `train_reward`, ...). A line is the mean over training seeds,
its band the smallest and the largest of them; each figure has a CSV of the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from helpers.records import Result
from helpers.report.figures import shown_once
from helpers.report.style import DARK, LIGHT, Theme, themed

ORDER = (8, 2, 4, 3)  # bits whose colours the lines of a panel take, one after another
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Panel:
    """One axis: `lines` maps a label to the name of an arm; `metric` is drawn, in `unit`."""

    title: str
    metric: str
    unit: str
    lines: Mapping[str, str]


@dataclass(frozen=True)
class Chart:
    """A figure of some panels side by side, drawn from one study; `smooth` steps are averaged."""

    study: str
    panels: Sequence[Panel]
    smooth: int = 1
    shade: tuple[int, int] | None = None  # steps
    colours: Sequence[int] = ORDER  # those of these bits


INITS = {"full precision": "full", "RTN": "rtn", "GPTQ": "gptq", "AWQ": "awq"}
RL = {
    f"{label} ({bits} bits)": f"{arm}{bits}-s"
    for bits in (2, 3)
    for label, arm in (("RL", "zerorl"), ("KD, RL", "rl-kd"))
}
SHOCKS = {"8 bits": "shock8", "3 bits": "shock3", "2 bits": "shock2"}
CHARTS = {
    "convergence": Chart(
        "recover",
        [
            Panel(f"learning rate {lr}", "train_accuracy", "accuracy on watched problems", {
                label: f"init-{init}-lr{lr}-s" for label, init in INITS.items()
            })
            for lr in ("0.0005", "0.002", "0.008")
        ],
    ),
    "low-bit-rl": Chart(
        "recover",
        [
            Panel("reward", "train_reward", "mean reward (at most 1.1)", RL),
            Panel("length", "train_reply_tokens", "tokens a reply", RL),
            Panel("entropy", "train_entropy", "nats a token", RL),
        ],
        smooth=5,
    ),
    "shock": Chart(
        "beyond",
        [
            Panel("reward", "train_reward", "mean reward (at most 1.1)", SHOCKS),
            Panel("entropy", "train_entropy", "nats a token", SHOCKS),
        ],
        shade=(41, 60),
        colours=(8, 3, 2),
    ),
}  # fmt: skip


def rows(results: Sequence[Result], chart: Chart) -> pd.DataFrame:
    """panel, line, seed, step, value: the curves of a chart as they were recorded; empty where nothing was run."""
    named = {}
    for result in results:
        base, _, seed = result.name.rpartition("-seed")
        if result.study == chart.study and base:
            named.setdefault(base, []).append((int(seed), result))
    found = []
    for panel in chart.panels:
        for label, arm in panel.lines.items():
            for seed, result in named.get(arm, ()):
                for metric in result.metrics:
                    if metric.metric == panel.metric and metric.detail.get("steps"):
                        points = zip(metric.detail["steps"], metric.detail["values"], strict=True)
                        found += [(panel.title, label, seed, step, value) for step, value in points]
    return pd.DataFrame(found, columns=["panel", "line", "seed", "step", "value"])


def write(results: Sequence[Result], folder: Path) -> list[str]:
    """Write `<name>.svg`, `<name>-dark.svg` and `<name>.csv` of each chart that there are runs for; gives their names."""
    names = []
    for name, chart in CHARTS.items():
        found = rows(results, chart)
        if found.empty:
            continue
        found.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
        for theme, suffix in ((DARK, "-dark.svg"), (LIGHT, ".svg")):
            with themed(theme):
                figure = draw(found, chart, theme)
                figure.savefig(folder / f"{name}{suffix}", metadata={"Date": None})
                shown_once(figure)
        names.append(name)
    return names


def draw(found: pd.DataFrame, chart: Chart, theme: Theme) -> Figure:
    """The figure in one theme."""
    figure, axes = plt.subplots(1, len(chart.panels), figsize=(9.6, 3.2), layout="constrained", squeeze=False)
    same = len({panel.unit for panel in chart.panels}) == 1
    for axis, panel in zip(axes[0], chart.panels, strict=True):
        for index, label in enumerate(panel.lines):
            own = found[(found["panel"] == panel.title) & (found["line"] == label)]
            if own.empty:
                continue
            seeds = own.pivot(index="step", columns="seed", values="value").rolling(chart.smooth, min_periods=1).mean()
            colour = theme.bits[chart.colours[index]]
            axis.plot(seeds.index, seeds.mean(axis=1), STYLES[index], color=colour, label=label)
            axis.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.18, linewidth=0)
        axis.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        axis.set_ylim(bottom=0, top=1 if same else None)
        if chart.shade:
            axis.axvspan(chart.shade[0] - 0.5, chart.shade[1] + 0.5, color=theme.faint, alpha=0.2, linewidth=0)
    axes[0, 0].legend(fontsize=8)
    return figure
