"""The findings of paper 2, arXiv 2601.14888, each with its verdict; rows and judgement are those of paper 1 (`verdicts`).

A pair is two arms of the study `recover` with one training seed, on the same problems. Arms are named as there. Quantities:

    accuracy    share of test problems solved
    lost        accuracy that rounding took, on the task behind the @: the full-precision model's less the arm's
    early       accuracy on watched problems at step 20 of the distillation: how fast it converges
    tokens      mean length of the greedy replies
    entropy     of the policy at the end of RL, nats a token, for the second arm at its beginning
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from helpers.records import Result
from helpers.report import recovery
from helpers.report.numbers import TASK
from helpers.report.verdicts import COLUMNS, judged

EARLY = 20  # steps
MAIN_EVAL = "eval"


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
    Finding(
        "Below 4 bits reasoning loses more than recall (GPTQ, 2 and 3 bits)", "reasoning far more",
        ("gptq2-s@arithmetic", "gptq3-s@arithmetic"), ("gptq2-s@recall", "gptq3-s@recall"), quantity="lost",
    ),
    Finding(
        "Below 4 bits reasoning loses more than recall (RTN, 2 and 3 bits)", "reasoning far more",
        ("rtn2-s@arithmetic", "rtn3-s@arithmetic"), ("rtn2-s@recall", "rtn3-s@recall"), quantity="lost",
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
        ("texts-traces-arithmetic-s", "texts-recall-recall-s"), ("texts-recall-arithmetic-s", "texts-traces-recall-s"),
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


def findings(results: Sequence[Result], found: Sequence[Finding] = FINDINGS) -> pd.DataFrame:
    """One row a finding, with the columns of verdicts.csv."""
    own = [result for result in results if result.study == recovery.STUDY]
    return pd.DataFrame([_row(own, finding) for finding in found], columns=COLUMNS)


def _row(results: list[Result], finding: Finding) -> dict:
    pairs = []
    for first, second in zip(finding.first, finding.second, strict=True):
        a, b = (_values(results, arm, finding.quantity, side) for side, arm in enumerate((first, second)))
        pairs.append(a.merge(b, on="seed", suffixes=("_a", "_b")))
    frame = pd.concat(pairs) if pairs else pd.DataFrame()
    of = finding.quantity if finding.quantity != "early" else f"accuracy at step {EARLY}"
    return judged(("2", finding.claim, finding.reported), frame, finding.expected, of, finding.why)


def _values(results: list[Result], arm: str, quantity: str, side: int) -> pd.DataFrame:
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


def _metric(results: list[Result], name: str, metric: str, benchmark: str, take=lambda m: m.value) -> pd.DataFrame:
    rows = []
    for result in results:
        base, _, seed = result.name.rpartition("-seed")
        if base != name:
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
