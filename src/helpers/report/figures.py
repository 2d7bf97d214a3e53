"""The small figures of the stage notebooks. Each takes plain data, gives a `Figure`, and says in its docstring what it shows."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.report.style import LIGHT, themed

CURVES = {  # name in the history -> panel title
    "reward": "mean reward (at most 1.1)",
    "reply_tokens": "reply length, tokens",
    "clipped": "share of replies cut off",
    "no_advantage": "share of groups without advantage",
    "entropy": "entropy, nats a token",
    "kl": "KL to the start, nats a token",
}


def shown_once(figure: Figure) -> Figure:
    """Take a figure out of pyplot's hands: a notebook shows what a cell returns, and would show an open figure again."""
    plt.close(figure)
    return figure


def losses(history: Sequence[Mapping[str, float]]) -> Figure:
    """Pre-training loss in nats a reply token against steps."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(5.2, 2.8), layout="constrained")
        axis.plot([r["step"] for r in history], [r["loss"] for r in history], color=theme.bits[8])
        axis.set(xlabel="step", ylabel="loss, nats a reply token", title="Pre-training")
    return shown_once(figure)


def training_curves(history: Sequence[Mapping[str, float]], smooth: int = 5) -> Figure:
    """Six panels of a GRPO run against its steps: dots are single steps, lines a running mean over `smooth` steps."""
    with themed(LIGHT) as theme:
        figure, axes = plt.subplots(2, 3, figsize=(9.6, 4.6), layout="constrained", sharex=True)
        for axis, (name, title) in zip(axes.flat, CURVES.items(), strict=True):
            rows = [(r["step"], r[name]) for r in history if name in r]
            axis.set_title(title if rows else f"{title}: not measured")
            if not rows:
                continue
            steps, values = np.array(rows).T
            axis.plot(steps, values, ".", color=theme.bits[8], alpha=0.35, markersize=4)
            if len(values) >= 2 * smooth:
                axis.plot(
                    steps[smooth - 1 :], np.convolve(values, np.ones(smooth) / smooth, "valid"), color=theme.bits[8]
                )
            else:
                axis.plot(steps, values, color=theme.bits[8])
            axis.set_ylim(bottom=0)
        for axis in axes[-1]:
            axis.set_xlabel("step")
    return shown_once(figure)


def by_level(scores: Mapping[str, Sequence[tuple[float, float, float]]], title: str, top: float = 1.0) -> Figure:
    """Scores against the level of a problem; `scores` maps a label to (value, low, high) for levels 1, 2, ... with 95 % bars."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(5.4, 3.0), layout="constrained")
        colours = [theme.bits[b] for b in (8, 3, 4, 2, 16)]
        for index, (label, rows) in enumerate(scores.items()):
            values, low, high = np.array(rows).T
            levels = np.arange(1, len(rows) + 1) + 0.06 * (index - (len(scores) - 1) / 2)
            bars = [np.clip(values - low, 0, None), np.clip(high - values, 0, None)]
            axis.errorbar(
                levels, values, bars, fmt="o-", capsize=3, color=colours[index % 5], label=label, markersize=4
            )
        axis.set(xlabel="level (steps that a problem needs)", ylim=(0, top * 1.02), title=title)
        axis.set_xticks(range(1, len(rows) + 1))
        axis.legend()
    return shown_once(figure)


def rounding(weights: np.ndarray, restored: np.ndarray, title: str) -> Figure:
    """Histogram of one layer's weights, and the grid points that they were moved to (height: how many landed there)."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(5.4, 2.8), layout="constrained")
        axis.hist(weights, bins=80, color=theme.faint, alpha=0.6, label="before")
        points, counts = np.unique(restored, return_counts=True)
        width = 0.6 * np.median(np.diff(points)) if len(points) > 1 else 0.01
        axis.bar(points, counts, width=width, color=theme.bits[2], alpha=0.55, label="after")
        axis.set(xlabel="weight", ylabel="weights", title=title)
        axis.legend()
    return shown_once(figure)


def layer_errors(names: Sequence[str], errors: Sequence[float], title: str) -> Figure:
    """Relative error of each quantized layer, in the model's order."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(7.2, 0.16 * len(names) + 1.0), layout="constrained")
        axis.barh(range(len(names)), errors, color=theme.bits[8], height=0.7)
        axis.set_yticks(range(len(names)), [n.removeprefix("model.layers.") for n in names], fontsize=7)
        axis.invert_yaxis()
        axis.set(xlabel="|W - W'| / |W|", title=title)
        axis.grid(axis="y", visible=False)
    return shown_once(figure)
