"""Tables of the chapters on the second paper: what comes back by objective, start, texts and RL, mean over training seeds.

Runs are found by the names that the study `recover` gives them: `eval-<arm>-seed<n>` holds the accuracy of an arm.
"""

import re
from collections.abc import Mapping

import pandas as pd

from helpers.report.numbers import TASK
from helpers.report.pages import table
from helpers.report.verdicts import mean_over_seeds

STUDY = "recover"
NOT_RUN = "Not run yet.\n"
BITS = (8, 4, 3, 2)
RATES = ("0.0005", "0.001", "0.002", "0.004", "0.008")
INITS = {"full": "full precision", "rtn": "RTN", "gptq": "GPTQ", "awq": "AWQ"}
DOMAINS = ("arithmetic", "recall", "corpus")

Cells = Mapping[str, Mapping[str, str]]  # row -> column -> arm

OBJECTIVES: Cells = {
    "none: GPTQ alone": {"RL, 2 bits": "gptq2-s", "RL, 3 bits": "gptq3-s", "SFT, 2 bits": "gptq2-tuned"},
    "SFT on written-out solutions": {
        "RL, 2 bits": "sft2-gold-s", "RL, 3 bits": "sft3-gold-s", "SFT, 2 bits": "sft2-gold-tuned",
    },
    "SFT on the teacher's replies": {
        "RL, 2 bits": "sft2-teacher-s", "RL, 3 bits": "sft3-teacher-s", "SFT, 2 bits": "sft2-teacher-tuned",
    },
    "KD, forward KL": {"RL, 2 bits": "kd2-s", "RL, 3 bits": "kd3-s", "SFT, 2 bits": "kd2-tuned"},
    "KD, half and half": {"RL, 2 bits": "kd2-reverse0.5-s"},
    "KD, reverse KL": {"RL, 2 bits": "kd2-reverse1.0-s"},
    "KD, on-policy": {"RL, 2 bits": "kd2-onpolicy-s"},
    "the teacher itself": {"RL, 2 bits": "grpo-s", "RL, 3 bits": "grpo-s", "SFT, 2 bits": "tuned-s"},
}  # fmt: skip
REINFORCED: Cells = {
    "RTN": {"s, 2 bits": "rtn2-s", "s, 3 bits": "rtn3-s", "xs, 2 bits": "rtn2-xs"},
    "AWQ": {"s, 2 bits": "awq2-s", "s, 3 bits": "awq3-s", "xs, 2 bits": "awq2-xs"},
    "GPTQ": {"s, 2 bits": "gptq2-s", "s, 3 bits": "gptq3-s", "xs, 2 bits": "gptq2-xs"},
    "GPTQ, then RL (zero-RL)": {"s, 2 bits": "zerorl2-s", "s, 3 bits": "zerorl3-s", "xs, 2 bits": "zerorl2-xs"},
    "GPTQ, then KD": {"s, 2 bits": "kd2-s", "s, 3 bits": "kd3-s", "xs, 2 bits": "kd2-xs"},
    "GPTQ, then KD, then RL": {"s, 2 bits": "rl-kd2-s", "s, 3 bits": "rl-kd3-s", "xs, 2 bits": "rl-kd2-xs"},
    "base model: GPTQ, KD, then RL": {"s, 2 bits": "rl-first2-s"},
    "full precision (16 bits)": {"s, 2 bits": "grpo-s", "s, 3 bits": "grpo-s", "xs, 2 bits": "grpo-xs"},
}
STARTS: Cells = {label: {f"lr {lr}": f"init-{init}-lr{lr}-s" for lr in RATES} for init, label in INITS.items()}
TEXTS: Cells = {
    f"calibrated on {calibration}": {f"trained on {domain}": f"texts-{calibration}-{domain}-s" for domain in DOMAINS}
    for calibration in ("traces", "recall", "corpus")
}
MORE: Cells = {
    "scales fixed": {"2 bits": "kd2-s"},
    "scales found again at each step": {"2 bits": "grids-step-s"},
    "scales learned (LSQ)": {"2 bits": "grids-learned-s"},
    **{f"{n:,} texts": {"2 bits": f"amount-{n}-s"} for n in (100, 400)},
    "2,000 texts": {"2 bits": "kd2-s"},
    "8,000 texts": {"2 bits": "amount-8000-s"},
    "3 bits everywhere, GPTQ": {"3 bits": "gptq3-s"},
    "3 bits on average, GPTQ": {"3 bits": "mixed3-s"},
    "3 bits everywhere, KD": {"3 bits": "kd3-s"},
    "3 bits on average, KD": {"3 bits": "kd-mixed3-s"},
}
SMALL: Cells = {
    f"{bits} bits": {"GPTQ alone": f"followup/gptq{bits}"}
    | {f"KD, lr {lr}": f"followup/kd{bits}-lr{lr}" for lr in ("0.0001", "0.0003", "0.001")}
    for bits in (4, 3)
}
RL_RATES: Cells = {
    "GPTQ": {"before RL": "followup/gptq-s-2bit"}
    | {f"RL, lr {lr}": f"followup/zerorl-lr{lr}" for lr in ("0.001", "0.003")},
    "GPTQ, then KD": {"before RL": "followup/kd-s-2bit"}
    | {f"RL, lr {lr}": f"followup/rl-lr{lr}" for lr in ("0.001", "0.003")},
}
TABLES = {
    "rates": SMALL, "rlrates": RL_RATES, "objectives": OBJECTIVES, "workflow": REINFORCED, "starts": STARTS, "texts": TEXTS,
    "more": MORE,
}  # fmt: skip


def accuracies(
    df: pd.DataFrame, arm: str, prefix: str = "eval", task: str = TASK, metric: str = "accuracy", column: str = "value"
) -> pd.Series:
    """A metric of an arm, or of one of another study (`beyond/shock2`), by training seed; `column`: another of its columns."""
    study, arm = arm.split("/") if "/" in arm else (STUDY, arm)
    rows = df[(df["study"] == study) & (df["metric"] == metric) & (df["benchmark"] == task)]
    start = f"{prefix}-{arm}" if prefix else arm
    return rows[rows["name"].str.fullmatch(re.escape(start) + r"(-seed\d+)?")].set_index("seed")[column]


def cells(df: pd.DataFrame, found: Cells, corner: str = "") -> str:
    """The table of some arms: mean accuracy over seeds, with Student's 95 % interval and the number of seeds."""
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    lines = [
        [label, *(_mean(accuracies(df, row[c])) if c in row else "–" for c in columns)] for label, row in found.items()
    ]
    return _table([corner, *columns], lines)


def by_bits(df: pd.DataFrame) -> str:
    """Accuracy lost by rounding, in points of the full-precision model's, on the reasoning task and on recall."""
    lines = []
    for method in ("rtn", "gptq"):
        for prefix, task in (("eval", TASK), ("recall", "recall")):
            full = accuracies(df, "grpo-s", prefix, task)
            lost = [100 * (full - accuracies(df, f"{method}{bits}-s", prefix, task)).dropna() for bits in BITS]
            lines.append([method.upper(), task, _mean(full), *(_points(values) for values in lost)])
    return _table(["method", "task", "16 bits", *(f"{bits} bits: points lost" for bits in BITS)], lines)


def kept(df: pd.DataFrame) -> str:
    """What GPTQ keeps at 2 bits, by the texts that it was calibrated on."""
    lines = []
    for texts, label in (("traces", "its replies to arithmetic"), ("recall", "its replies to recall")):
        arm = f"followup/gptq2-{texts}"
        lines.append([label, _mean(accuracies(df, arm)), _mean(accuracies(df, arm, "recall", "recall"))])
    return _table(["GPTQ, 2 bits, calibrated on", TASK, "recall"], lines)


def order(df: pd.DataFrame) -> str:
    """RL first and distillation after it, and the other way round, at 2 bits."""
    lines = []
    for label, arms in (
        ("RL in 16 bits, GPTQ, KD, then RL at 2 bits", ("kd2-s", "rl-kd2-s")),
        ("GPTQ, KD, then RL at 2 bits", ("first2-s", "rl-first2-s")),
    ):
        moved = accuracies(df, arms[1], "", "training", "train_codes_moved")
        lines.append([label, *(_mean(accuracies(df, arm)) for arm in arms), _mean(moved, 4)])
    return _table(
        ["order, from the base model on", "before RL at 2 bits", "after", "share of codes moved by it"], lines
    )


def simulated(df: pd.DataFrame) -> str:
    """4-bit weights alone, and with 4-bit activations and cache."""
    arms = {"RTN": "rtn4-s", "GPTQ": "gptq4-s", "KD": "kd4-s", "KD with all three": "kd-w4a4kv4-s"}
    lines = [[label, _mean(accuracies(df, arm)), _mean(accuracies(df, arm, "w4a4kv4"))] for label, arm in arms.items()]
    return _table(["", "W4", "W4A4KV4"], lines)


def rl_effects(df: pd.DataFrame) -> str:
    """What RL does to a low-bit model, with and without distillation before it."""
    lines = []
    for bits in (2, 3):
        for label, arm, before in (("zero-RL", "zerorl", "gptq"), ("after KD", "rl-kd", "kd")):
            named = [f"{name}{bits}-s" for name in (before, arm)]
            measured = [_mean(accuracies(df, name)) for name in named]
            lengths = [_mean(accuracies(df, name, column="reply_tokens"), 1) for name in named]
            moved, entropy = (
                _mean(accuracies(df, named[1], "", "training", f"train_{m}"), 4) for m in ("codes_moved", "entropy")
            )
            lines.append([f"{bits} bits, {label}", *measured, moved, *lengths, entropy])
    header = [
        "",
        "accuracy before",
        "after",
        "share of codes moved",
        "reply tokens before",
        "after",
        "entropy at the end, nats",
    ]
    return _table(header, lines)


def _table(header: list[str], lines: list[list[str]]) -> str:
    """The table, unless there is nothing in it."""
    known = any(any(map(str.isdigit, cell)) for line in lines for cell in line[1:])
    return table(header, lines) if known else NOT_RUN


def _mean(values: pd.Series, digits: int = 3) -> str:
    return mean_over_seeds(values, digits) if len(values) else "–"


def _points(values: pd.Series) -> str:
    return _mean(values, 1)
