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


def precision_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Three panels of a run against its steps, shaded where weights were fake-quantized: reward, mismatch, and codes that moved.

    Mismatch is the mean and the largest |log p_trainer - log p_sampler| of a step's reply tokens. Of the codes, bars show the share
    that a step changed and the line the share that is no longer where it was when quantization began.
    """
    steps = [r["step"] for r in history]
    quantized = [r for r in history if "codes_moved" in r]
    with themed(LIGHT) as theme:
        figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.7), layout="constrained", sharex=True)
        axes[0].plot(steps, [r["reward"] for r in history], color=theme.bits[8])
        axes[0].set(title="mean reward (at most 1.1)", ylim=(0, None))
        for name, style in (("mismatch_mean", "-"), ("mismatch_max", ":")):
            label = name.removeprefix("mismatch_")
            axes[1].plot(steps, [r[name] for r in history], style, color=theme.bits[8], label=label)
        axes[1].set(title="sampler against trainer, nats", yscale="log")
        axes[1].legend()
        axes[2].set(title="share of codes" if quantized else "share of codes: nothing is quantized")
        if quantized:
            at = [r["step"] for r in quantized]
            axes[2].bar(at, [r["codes_changed"] for r in quantized], color=theme.bits[4], label="changed by the step")
            axes[2].plot(at, [r["codes_moved"] for r in quantized], ".-", color=theme.bits[8], label="moved in all")
            axes[2].set_ylim(bottom=0)
            axes[2].legend()
        for axis in axes:
            axis.set_xlabel("step")
            if 0 < len(quantized) < len(history):
                axis.axvspan(quantized[0]["step"] - 0.5, quantized[-1]["step"] + 0.5, color=theme.faint, alpha=0.2)
    return shown_once(figure)


def qat_curves(history: Sequence[Mapping[str, float]], reference: float | None = None, smooth: int = 10) -> Figure:
    """Three panels of a QAT run against its steps: loss (dots, and a running mean over `smooth` steps), accuracy on watched
    problems (the teacher's as a dashed line at `reference`), and the share of codes that have left where they began.
    """
    with themed(LIGHT) as theme:
        figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.7), layout="constrained", sharex=True)
        panels = {"loss": "loss, nats a reply token", "accuracy": "accuracy", "codes_moved": "share of codes moved"}
        for axis, (name, title) in zip(axes, panels.items(), strict=True):
            rows = [(r["step"], r[name]) for r in history if name in r]
            axis.set(title=title if rows else f"{title}: not measured", xlabel="step")
            if rows and name == "loss":
                steps, values = np.array(rows).T
                axis.plot(steps, values, ".", color=theme.bits[8], alpha=0.35, markersize=4)
                if len(values) >= 2 * smooth:
                    mean = np.convolve(values, np.ones(smooth) / smooth, "valid")
                    axis.plot(steps[smooth - 1 :], mean, color=theme.bits[8])
            elif rows:
                axis.plot(*np.array(rows).T, ".-", color=theme.bits[8])
            axis.set_ylim(bottom=0)
        if reference is not None:
            axes[1].axhline(reference, color=theme.ink, linestyle="--", linewidth=1)
            axes[1].annotate("teacher", (0, reference), (2, 3), textcoords="offset points", fontsize=8)
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
    """Relative error of the outputs of each quantized layer, in the model's order."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(7.2, 0.16 * len(names) + 1.0), layout="constrained")
        axis.barh(range(len(names)), errors, color=theme.bits[8], height=0.7)
        axis.set_yticks(range(len(names)), [n.removeprefix("model.layers.") for n in names], fontsize=7)
        axis.invert_yaxis()
        axis.set(xlabel="|W'x - Wx| / |Wx|, on held-out text", title=title)
        axis.grid(axis="y", visible=False)
    return shown_once(figure)


Bars = Mapping[str, tuple[float, float, float]]  # label -> (value, low, high), 95 %


def _spans(rows: Sequence[tuple[float, float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """(values, distances down and up to the ends of their intervals)."""
    values, low, high = np.array(rows, dtype=float).reshape(-1, 3).T
    return values, np.clip([values - low, high - values], 0, None)


def by_kind(kl: Bars, shares: Mapping[str, tuple[float, float]], entropies: Mapping[str, Bars], title: str) -> Figure:
    """Three panels by kind of token: KL a token; each kind's share of all tokens and of all KL; entropy of each model."""
    with themed(LIGHT) as theme:
        figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.9), layout="constrained", sharey=True)
        places = np.arange(len(kl))
        values, spans = _spans(list(kl.values()))
        axes[0].barh(places, values, xerr=spans, color=theme.bits[8], ecolor=theme.ink, capsize=3, height=0.6)
        axes[0].set(xlabel="KL, nats a token", title=title)
        pairs = np.array([shares[kind] for kind in kl]).T
        for offset, share, colour, label in zip(
            (-0.2, 0.2), pairs, (theme.faint, theme.bits[8]), ("tokens", "KL"), strict=True
        ):
            axes[1].barh(places + offset, share, height=0.36, color=colour, label=f"of all {label}")
        axes[1].set(xlabel="share", xlim=(0, 1))
        for index, (label, bars) in enumerate(entropies.items()):
            values, spans = _spans([bars[kind] for kind in kl])
            axes[2].errorbar(
                values, places + 0.24 * index - 0.12, xerr=spans, fmt="os"[index], capsize=3, label=label, markersize=5,
                color=(theme.ink, theme.bits[2])[index],
            )  # fmt: skip
        axes[2].set_xlabel("entropy, nats a token")
        axes[0].set_yticks(places, list(kl))
        axes[0].invert_yaxis()
        for axis in axes:
            axis.grid(axis="y", visible=False)
        for axis in axes[1:]:
            axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return shown_once(figure)


def by_place(kl: Bars, title: str) -> Figure:
    """KL a token in each part of a reply (labels `part1`, `part2`, ...), with the band of its intervals."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(5.4, 2.8), layout="constrained")
        parts = [int(label.removeprefix("part")) for label in kl]
        values, low, high = np.array(list(kl.values())).T
        axis.fill_between(parts, low, high, color=theme.bits[8], alpha=0.2, linewidth=0)
        axis.plot(parts, values, "o-", color=theme.bits[8], markersize=4)
        axis.set(xlabel="tenth of the reply", ylabel="KL, nats a token", ylim=(0, None), title=title)
        axis.set_xticks(parts)
    return shown_once(figure)


def partings(tokens: Mapping[str, Sequence[int]], never: int, title: str) -> Figure:
    """Histogram of the token at which greedy replies part, stacked by its kind; `never` is how many do not part."""
    with themed(LIGHT) as theme:
        figure, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
        rows = {kind: list(places) for kind, places in tokens.items() if places}
        last = max((max(places) for places in rows.values()), default=1)
        if rows:  # two models may write the same replies throughout
            axis.hist(
                list(rows.values()), bins=np.linspace(0.5, last + 0.5, min(last, 30) + 1), stacked=True, label=list(rows),
                color=[dict(zip(tokens, (theme.bits[b] for b in (8, 3, 4, 2)), strict=True))[kind] for kind in rows],
            )  # fmt: skip
            axis.legend(title="the full model wrote", fontsize=8, title_fontsize=8)
        axis.set(
            xlabel="first token that differs (the first is 1)", ylabel="replies", title=f"{title}; {never} never part"
        )
        axis.yaxis.get_major_locator().set_params(integer=True)
    return shown_once(figure)


def kl_by_layer(kl: Bars, title: str, most: int = 60) -> Figure:
    """KL a token when one block (a label without a dot) or one layer alone is quantized; layers if there are at most `most`."""
    blocks = {label: bar for label, bar in kl.items() if "." not in label}
    layers = {label: bar for label, bar in kl.items() if "." in label}
    panels = [blocks, layers] if 0 < len(layers) <= most else [blocks]
    with themed(LIGHT) as theme:
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(7.2, 0.17 * sum(map(len, panels)) + 0.7 + 0.7 * len(panels)), layout="constrained",
            squeeze=False, height_ratios=[len(bars) + 2 for bars in panels],
        )  # fmt: skip
        for axis, bars, colour, what in zip(
            axes[:, 0], panels, (theme.ink, theme.bits[8]), ("block", "layer"), strict=False
        ):
            values, spans = _spans(list(bars.values()))
            axis.barh(range(len(bars)), values, xerr=spans, color=colour, ecolor=theme.faint, capsize=2, height=0.7)
            axis.set_yticks(range(len(bars)), list(bars), fontsize=7)
            axis.set_ylim(len(bars) - 0.4, -0.6)
            axis.set(title=f"One {what} alone; {title}")
            axis.grid(axis="y", visible=False)
        axis.set_xlabel("KL, nats a token")
    return shown_once(figure)
