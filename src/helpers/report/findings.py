"""Claims that compare runs by name: the findings of paper 2, arXiv 2601.14888, and some of paper 1's.

Rows and judgement are those of `verdicts`. A pair is two arms with one training seed, on the same problems. Arms are named as
in the study `recover`, others with their study (`beyond/limit24`). Quantities:

    accuracy    share of test problems solved
    lost        accuracy that rounding took, on the task behind the @: the full-precision model's less the arm's
    early       accuracy on watched problems at step 20 of the distillation: how fast it converges
    tokens      mean length of the greedy replies
    entropy     of the policy at the end of RL, nats a token, for the second arm at its beginning
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from helpers.records import Result
from helpers.report import recovery
from helpers.report.numbers import TASK
from helpers.report.verdicts import COLUMNS, judged, verdicts

EARLY = 20  # steps
MAIN_EVAL = "eval"
SIZES = ("xs", "s", "m", "l")


@dataclass(frozen=True)
class Finding:
    """`first` is said to be lower or higher than `second`: as many arms, compared pair by pair in their order."""

    claim: str
    reported: str
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    expected: str = "higher"
    quantity: str = "accuracy"
    why: str = ""


def rates(start: str) -> tuple[str, ...]:
    """The arms of one start, at each learning rate."""
    return tuple(f"init-{start}-lr{rate}-s" for rate in recovery.RATES)


WORKFLOW = ("rl-kd2-s", "rl-kd3-s", "rl-kd2-xs")
DISTILLED = ("kd2-s", "kd3-s", "kd2-xs")
FINDINGS = (
    *(
        Finding(
            f"At {bits} bits reasoning loses more than recall ({method.upper()})", "below 4 bits reasoning loses far more",
            (f"{method}{bits}-s@arithmetic",), (f"{method}{bits}-s@recall",), quantity="lost",
        )
        for method in ("gptq", "rtn") for bits in (3, 2)
    ),
    Finding(
        "KD beats SFT on the teacher's replies, RL-trained teacher", "56.45 against 55.27 (R1-Qwen-1.5B, 3 bits)",
        ("kd2-s", "kd3-s"), ("sft2-teacher-s", "sft3-teacher-s"),
    ),
    Finding(
        "KD beats SFT on written-out solutions, RL-trained teacher", "SFT costs 21.4 points (Qwen3-4B)",
        ("kd2-s", "kd3-s"), ("sft2-gold-s", "sft3-gold-s"),
    ),
    Finding(
        "KD beats SFT on the teacher's replies, SFT-trained teacher", "holds for both kinds of teacher",
        ("kd2-tuned",), ("sft2-teacher-tuned",),
    ),
    Finding(
        "A GPTQ start ends better than a full-precision start, each at its best rate", "better",
        ("init-gptq@best",), ("init-full@best",),
    ),
    Finding(
        "A GPTQ start ends better than an RTN start, each at its best rate", "better", ("init-gptq@best",), ("init-rtn@best",),
    ),
    Finding(
        "A GPTQ start ends better than a full-precision start, over all rates", "better", rates("gptq"), rates("full"),
    ),
    Finding(
        "A GPTQ start converges faster than a full-precision start", "faster", rates("gptq"), rates("full"), quantity="early",
    ),
    Finding(
        "Zero-RL ends below RL after a KD cold start, 2 bits", "zero-RL collapses",
        ("zerorl2-s", "zerorl2-xs"), ("rl-kd2-s", "rl-kd2-xs"), "lower",
    ),
    Finding("Zero-RL ends below RL after a KD cold start, 3 bits", "zero-RL collapses", ("zerorl3-s",), ("rl-kd3-s",), "lower"),
    Finding("RL after KD raises accuracy", "56.45 to 58.51 (R1-Qwen-1.5B, 3 bits)", WORKFLOW, DISTILLED),
    Finding("RL after KD cuts the length of replies", "shorter", WORKFLOW, DISTILLED, "lower", "tokens"),
    Finding("RL after KD cuts entropy", "lower", WORKFLOW, WORKFLOW, "lower", "entropy"),
    Finding(
        "Calibration on the training domain converges faster than on another", "mismatch needs 5k+ steps",
        ("texts-traces-arithmetic-s", "texts-traces-corpus-s"), ("texts-recall-arithmetic-s", "texts-recall-corpus-s"),
        quantity="early",
    ),
    Finding(
        "The workflow beats GPTQ at equal bytes, 2 and 3 bits", "+44.53 points (Qwen3-0.6B, 3 bits, MATH-500)",
        WORKFLOW, ("gptq2-s", "gptq3-s", "gptq2-xs"),
    ),
    Finding(
        "The workflow beats AWQ at equal bytes, 2 and 3 bits", "31.67 against 8.40 (Qwen3-0.6B, 3 bits, average)",
        WORKFLOW, ("awq2-s", "awq3-s", "awq2-xs"),
    ),
    Finding(
        "The workflow beats RTN at equal bytes, 2 and 3 bits", "not in the summaries",
        WORKFLOW, ("rtn2-s", "rtn3-s", "rtn2-xs"),
    ),
    Finding("Which of these holds at 32,768 tokens of reply", "all of them there", why="needs models that reason at that length"),
)  # fmt: skip


BEYOND = (  # of paper 1, arXiv 2511.15694
    Finding(
        "QLoRA needs a higher learning rate (ten times that of full training, against the same)", "1e-4 against 1e-6",
        ("arms/qlora-s",), ("beyond/qlora-lr0.0003",),
    ),
    Finding(
        "A longer limit on replies raises the score (96 tokens against 24)", "4B: 0.487 to 0.555",
        ("arms/grpo-s",), ("beyond/limit24",),
    ),
    *(
        Finding(
            f"A larger model at 4 bits beats a smaller one in full precision ({large} at 4 bits, {small})",
            "8B at 4 bits 0.57 to 0.58, 4B 0.555", (f"arms/awq4-grpo-{large}",), (f"arms/grpo-{small}",),
        )
        for small, large in pairwise(SIZES)
    ),
    *(
        Finding(
            f"Quantization shock: 20 steps at {bits} bits in the middle of RL lower the final accuracy", "a hypothesis",
            (f"beyond/shock{bits}",), ("arms/grpo-s",), "lower",
        )
        for bits in (8, 3, 2)
    ),
    Finding(
        "8-bit QAFT is worse than RL in full precision", "1.7B to 8B: 0.33 to 0.50 against 0.42 to 0.59",
        tuple(f"arms/qaft-{size}" for size in SIZES), tuple(f"arms/grpo-{size}" for size in SIZES), "lower",
    ),
)  # fmt: skip


def findings(results: Sequence[Result], found: Sequence[Finding] = FINDINGS, paper: str = "2") -> pd.DataFrame:
    """One row a finding, with the columns of verdicts.csv."""
    return pd.DataFrame([_row(results, finding, paper) for finding in found], columns=COLUMNS)


def paper_1(df: pd.DataFrame, results: Sequence[Result]) -> pd.DataFrame:
    """Every claim of the first paper with its verdict: those on arms first."""
    return pd.concat([verdicts(df), findings(results, BEYOND, "1")], ignore_index=True)


def all_verdicts(df: pd.DataFrame, results: Sequence[Result]) -> pd.DataFrame:
    """verdicts.csv: the claims of both papers."""
    return pd.concat([paper_1(df, results), findings(results)], ignore_index=True)


def _row(results: Sequence[Result], finding: Finding, paper: str) -> dict:
    pairs = []
    for first, second in zip(finding.first, finding.second, strict=True):
        a, b = (_values(results, arm, finding.quantity, side) for side, arm in enumerate((first, second)))
        pairs.append(a.merge(b, on="seed", suffixes=("_a", "_b")))
    frame = pd.concat(pairs) if pairs else pd.DataFrame()
    of = finding.quantity if finding.quantity != "early" else f"accuracy at step {EARLY}"
    return judged((paper, finding.claim, finding.reported), frame, finding.expected, of, finding.why)


def _values(results: Sequence[Result], arm: str, quantity: str, side: int) -> pd.DataFrame:
    """seed, value, run_id and n of an arm."""
    arm, _, rest = arm.partition("@")
    if rest == "best":
        tried = [_values(results, f"{arm}-lr{rate}-s", quantity, side) for rate in recovery.RATES]
        return max(tried, key=lambda frame: frame["value"].mean() if len(frame) else -1)
    if quantity == "lost":
        prefix = MAIN_EVAL if rest == TASK else "recall"
        full, low = (_metric(results, f"{prefix}-{name}", "accuracy", rest) for name in ("grpo-s", arm))
        both = full.merge(low, on="seed", suffixes=("_full", ""))
        return both.assign(value=both["value_full"] - both["value"])[["seed", "value", "run_id", "n"]]
    if quantity == "early":
        return _metric(results, arm, "train_accuracy", "training", lambda m: _at(m.detail, EARLY))
    if quantity == "entropy":
        return _metric(results, arm, "train_entropy", "training", (lambda m: m.value) if side == 0 else _began)
    take = (lambda m: m.reply_tokens) if quantity == "tokens" else (lambda m: m.value)
    return _metric(results, f"{MAIN_EVAL}-{arm}", "accuracy", TASK, take)


def _metric(results: Sequence[Result], name: str, metric: str, benchmark: str, take=lambda m: m.value) -> pd.DataFrame:
    """One row a seed of the runs called `name`, or `study/name`."""
    prefix, study, arm = re.fullmatch(r"(eval-|recall-|)(?:(\w+)/)?(.+)", name).groups()
    rows = []
    for result in results:
        base, _, seed = result.name.rpartition("-seed")
        if (result.study, base) != (study or recovery.STUDY, prefix + arm):
            continue
        for m in result.metrics:
            if m.metric == metric and m.benchmark == benchmark:
                rows.append({"seed": int(seed), "value": take(m), "run_id": result.run_id, "n": m.n})
    return pd.DataFrame(rows, columns=["seed", "value", "run_id", "n"]).dropna(subset="value")


def _at(curve: dict, step: int) -> float | None:
    return dict(zip(curve.get("steps", ()), curve.get("values", ()), strict=True)).get(step)


def _began(metric) -> float | None:
    """The mean over the first ten steps of a curve."""
    values = metric.detail.get("values", ())[:10]
    return sum(values) / len(values) if values else None
