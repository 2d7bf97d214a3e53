"""Tables of the chapter on quantization during RL: what the arms earned while they were trained, and how far their codes moved."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from helpers.records import Result
from helpers.report import recovery
from helpers.report.pages import table
from helpers.report.verdicts import STUDY, mean_over_seeds

STICKY = "sticky"
SIZES = ("xs", "s", "m", "l")


def advantages(rewards: Sequence[float] = (1.1, 0.1, 0.1, 0.0)) -> str:
    """The advantages of one group by hand: a right reply, two wrong ones in a box, one without a box."""
    r = np.array(rewards)
    centred = r - r.mean()
    scaled = centred / (r.std(ddof=1) + 1e-4)
    names = ["right, boxed", "wrong, boxed", "wrong, boxed", "no box"]
    lines = [[n, f"{x:.1f}", f"{a:+.3f}", f"{b:+.3f}"] for n, x, a, b in zip(names, r, scaled, centred, strict=True)]
    return table(["reply", "reward", "advantage, GRPO", "advantage, Dr.GRPO"], lines)


def ends(df: pd.DataFrame) -> str:
    """One row a size: where the curves of RL in full precision ended, mean over seeds."""
    found = {"groups without advantage": "no_advantage", "cut off": "clipped", "reply tokens": "reply_tokens",
             "entropy, nats": "entropy", "KL to the start, nats": "kl", "reward": "reward"}  # fmt: skip
    rows = df[(df["study"] == STUDY) & (df["recipe"] == "base > grpo") & (df["benchmark"] == "training")]
    lines = []
    for size in SIZES:
        own = rows[rows["model"] == size]
        values = [own[own["metric"] == f"train_{name}"]["value"] for name in found.values()]
        if all(map(len, values)):
            lines.append([size, *map(mean_over_seeds, values)])
    return table(["model", *found], lines) if lines else "Not run yet: `lowbit study arms`.\n"


def rewards(df: pd.DataFrame) -> str:
    """One row an arm, one column a size: mean reward over the last steps of training, over seeds."""
    rows = df[(df["study"] == STUDY) & (df["metric"] == "train_reward")]
    if rows.empty:
        return "Not run yet: `lowbit study arms`.\n"
    sizes = [size for size in SIZES if size in set(rows["model"])]
    lines = []
    for (recipe, scheme), arm in rows.groupby(["recipe", "scheme"], sort=False):
        by_size = dict(iter(arm.groupby("model")))
        cells = [mean_over_seeds(by_size[size]["value"]) if size in by_size else "–" for size in sizes]
        lines.append([recipe.removeprefix("base > "), scheme, *cells])
    return table(["arm", "scheme", *sizes], lines)


def sticky(results: Sequence[Result]) -> str:
    """One row a learning rate: final reward in full precision and with each grid, and the share of codes that left their start."""
    found: dict[float, dict[str, Result]] = {}
    for result in results:
        if result.study == STICKY and result.stage == "grpo":
            arm = result.name.partition("-lr")[0]
            found.setdefault(result.parameters["lr"], {})[arm] = result
    if not found:
        return "Not run yet: `lowbit study sticky`.\n"
    arms = list(dict.fromkeys(arm for row in found.values() for arm in row))
    lines = [[f"{lr:g}", *(_cell(found[lr].get(arm)) for arm in arms)] for lr in sorted(found, reverse=True)]
    return table(["learning rate", *arms], lines)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    values = {metric.metric: metric.value for metric in result.metrics}
    moved = values.get("train_codes_moved")
    share = "" if moved is None else f" ({100 * moved:.1f} % of codes moved)"
    return f"{values['train_reward']:.3f}{share}"


BEYOND: dict[str, recovery.Cells] = {
    "shock": {
        "full precision all along": {"accuracy": "arms/grpo-s"},
        **{f"{bits} bits in the middle": {"accuracy": f"beyond/shock{bits}"} for bits in (8, 3, 2)},
    },
    "qlora-rates": {
        "QLoRA": {
            "lr 0.0003": "beyond/qlora-lr0.0003", "lr 0.001": "beyond/qlora-lr0.001", "lr 0.003": "arms/qlora-s",
            "lr 0.01": "beyond/qlora-lr0.01",
        },
        "full precision, all weights": {"lr 0.0003": "arms/grpo-s"},
    },
    "qaft-bits": {
        "QAFT, all linear layers": {"3 bits": "beyond/qaft3-all", "2 bits": "beyond/qaft2-all"},
        "QAFT, the attention's layers alone": {"3 bits": "beyond/qaft3-attention", "2 bits": "beyond/qaft2-attention"},
        "RL in full precision, then RTN": {"3 bits": "recover/rtn3-s", "2 bits": "recover/rtn2-s"},
        "RL in full precision, then GPTQ": {"3 bits": "recover/gptq3-s", "2 bits": "recover/gptq2-s"},
    },
}  # fmt: skip


def limits(df: pd.DataFrame) -> str:
    """Accuracy by the limit on replies in training (rows) and in evaluation (columns), tokens."""
    arms = {24: "beyond/limit24", 48: "beyond/limit48", 96: "arms/grpo-s"}
    lines = []
    for trained, arm in arms.items():
        found = [recovery.accuracies(df, arm, prefix) for prefix in ("short24", "short48", "eval")]
        if len(found[-1]):
            lines.append([trained, *(mean_over_seeds(values) if len(values) else "–" for values in found)])
    return table(["trained with at most", "24 tokens", "48 tokens", "96 tokens"], lines) if lines else recovery.NOT_RUN
