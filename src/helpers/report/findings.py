"""Claims that compare runs by name: the findings of paper 2, arXiv 2601.14888, and some of paper 1's.

Rows and judgement are those of `verdicts`. A pair is two arms with one training seed, on the same problems. Arms are named as
in the study `recover`, others with their study (`beyond/limit24`). Quantities:

    accuracy    share of test problems solved
    lost        accuracy that rounding took, on the task behind the @: the full-precision model's less the arm's
    early       accuracy on watched problems at step 20 of the distillation: how fast it converges
    recovered   (arm - low) / (full - low), low being the arm behind the @, against one half
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
from helpers.report.verdicts import COLUMNS, MARGIN, SIZES, corrected, judged, verdicts

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


TEACHERS = {
    "RL-trained teacher, 2 bits": "2-s", "RL-trained teacher, 3 bits": "3-s", "SFT-trained teacher, 2 bits": "2-tuned",
}  # fmt: skip
PLACES = {"s, 2 bits": "2-s", "s, 3 bits": "3-s", "xs, 2 bits": "2-xs"}
FINDINGS = (
    *(
        Finding(
            f"At {bits} bits reasoning loses more than recall ({method.upper()})", "below 4 bits reasoning loses far more",
            (f"{method}{bits}-s@arithmetic",), (f"{method}{bits}-s@recall",), quantity="lost",
        )
        for method in ("gptq", "rtn") for bits in (3, 2)
    ),
    *(
        Finding(
            f"KD beats SFT on the teacher's replies ({label})", "56.45 against 55.27 (R1-Qwen-1.5B, 3 bits)",
            (f"kd{arm}",), (f"sft{arm.replace('-', '-teacher-')}",),
        )
        for label, arm in TEACHERS.items()
    ),
    *(
        Finding(
            f"KD beats SFT on written-out solutions ({label})", "SFT costs 21.4 points (Qwen3-4B)",
            (f"kd{arm}",), (f"sft{arm.replace('-', '-gold-')}",),
        )
        for label, arm in TEACHERS.items()
    ),
    *(
        Finding(
            f"A GPTQ start ends better than {name}, each at its best rate", "better", ("init-gptq@best",), (f"init-{init}@best",),
        )
        for init, name in (("full", "a full-precision start"), ("rtn", "an RTN start"), ("awq", "an AWQ start"))
    ),
    Finding(
        "A GPTQ start ends better than a full-precision start, mean over five rates", "better", rates("gptq"), rates("full"),
    ),
    Finding(
        "A GPTQ start converges faster than a full-precision start, mean over five rates", "faster", rates("gptq"), rates("full"),
        quantity="early",
    ),
    *(
        Finding(
            f"Zero-RL ends below RL after a KD cold start ({place})", "zero-RL collapses",
            (f"zerorl{arm}",), (f"rl-kd{arm}",), "lower",
        )
        for place, arm in PLACES.items()
    ),
    *(
        Finding(
            f"RL after KD raises accuracy ({place})", "56.45 to 58.51 (R1-Qwen-1.5B, 3 bits)", (f"rl-kd{arm}",), (f"kd{arm}",),
        )
        for place, arm in PLACES.items()
    ),
    *(
        Finding(
            f"RL after KD cuts the length of replies ({place})", "shorter", (f"rl-kd{arm}",), (f"kd{arm}",), "lower", "tokens",
        )
        for place, arm in PLACES.items()
    ),
    *(
        Finding(f"RL after KD cuts entropy ({place})", "lower", (f"rl-kd{arm}",), (f"rl-kd{arm}",), "lower", "entropy")
        for place, arm in PLACES.items()
    ),
    Finding(
        "Calibration on the training domain converges faster than on another", "mismatch needs 5k+ steps",
        ("texts-traces-arithmetic-s", "texts-traces-corpus-s"), ("texts-recall-arithmetic-s", "texts-recall-corpus-s"),
        quantity="early",
    ),
    *(
        Finding(
            f"The workflow beats {method.upper()} at equal bytes ({place})", reported, (f"rl-kd{arm}",), (f"{method}{arm}",),
        )
        for method, reported in (
            ("gptq", "+44.53 points (Qwen3-0.6B, 3 bits, MATH-500)"), ("awq", "31.67 against 8.40 (Qwen3-0.6B, 3 bits, average)"),
            ("rtn", "not in the summaries"),
        )
        for place, arm in PLACES.items()
    ),
    *(
        Finding(
            f"The workflow recovers more than half of what {method.upper()} loses ({size}, 2 bits)", "most of it",
            (f"rl-kd2-{size}@{method}2-{size}",), ("",), quantity="recovered",
        )
        for method in ("gptq", "rtn") for size in ("s", "xs")
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
        "8-bit QAFT is worse than RL in full precision (mean over four sizes)", "1.7B to 8B: 0.33 to 0.50 against 0.42 to 0.59",
        tuple(f"arms/qaft-{size}" for size in SIZES), tuple(f"arms/grpo-{size}" for size in SIZES), "lower",
    ),
    *(
        Finding(
            f"8-bit QAFT is worse than RL in full precision ({size})", "1.7B to 8B: 0.33 to 0.50 against 0.42 to 0.59",
            (f"arms/qaft-{size}",), (f"arms/grpo-{size}",), "lower",
        )
        for size in SIZES
    ),
)  # fmt: skip


def findings(results: Sequence[Result], found: Sequence[Finding] = FINDINGS, paper: str = "2") -> pd.DataFrame:
    """One row a finding, with the columns of verdicts.csv."""
    return pd.DataFrame([_row(results, finding, paper) for finding in found], columns=COLUMNS)


def paper_1(df: pd.DataFrame, results: Sequence[Result]) -> pd.DataFrame:
    """Every claim of the first paper with its verdict: those on arms first."""
    return corrected(_together(verdicts(df), findings(results, BEYOND, "1")))


def paper_2(results: Sequence[Result]) -> pd.DataFrame:
    """Every finding of the second paper with its verdict."""
    return corrected(findings(results))


def all_verdicts(df: pd.DataFrame, results: Sequence[Result]) -> pd.DataFrame:
    """verdicts.csv: the claims of both papers."""
    return _together(paper_1(df, results), paper_2(results))


def _together(*frames: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([frame.astype(object) for frame in frames], ignore_index=True)


def _row(results: Sequence[Result], finding: Finding, paper: str) -> dict:
    pairs = []
    for first, second in zip(finding.first, finding.second, strict=True):
        a = _values(results, first, finding.quantity, 0)
        b = a.assign(value=0.5) if finding.quantity == "recovered" else _values(results, second, finding.quantity, 1)
        pairs.append(a.merge(b, on="seed", suffixes=("_a", "_b")))
    frame = pd.concat(pairs) if pairs else pd.DataFrame()
    what = finding.quantity if finding.quantity != "early" else f"accuracy at step {EARLY}"
    margin = None if finding.quantity in ("tokens", "entropy", "recovered") else MARGIN
    return judged((paper, finding.claim, finding.reported), frame, finding.expected, what, margin, finding.why)


def _values(results: Sequence[Result], arm: str, quantity: str, side: int) -> pd.DataFrame:
    """seed, value, run_id and n of an arm."""
    arm, _, rest = arm.partition("@")
    if rest == "best":  # by the problems watched in training, which are not those of the test
        tried = {
            f"{arm}-lr{rate}-s": _metric(results, f"{arm}-lr{rate}-s", "train_accuracy", "training")
            for rate in recovery.RATES
        }
        best = max(tried, key=lambda name: tried[name]["value"].mean() if len(tried[name]) else -1)
        return _values(results, best, quantity, side)
    if quantity == "lost":
        prefix = MAIN_EVAL if rest == TASK else "recall"
        full, low = (_metric(results, f"{prefix}-{name}", "accuracy", rest) for name in ("grpo-s", arm))
        both = full.merge(low, on="seed", suffixes=("_full", ""))
        return both.assign(value=both["value_full"] - both["value"])[["seed", "value", "run_id", "n"]]
    if quantity == "recovered":
        full, low, own = (
            _metric(results, f"{MAIN_EVAL}-{name}", "accuracy", TASK)
            for name in (f"grpo-{rest.rpartition('-')[2]}", rest, arm)
        )
        both = own.merge(full, on="seed", suffixes=("", "_full")).merge(low, on="seed", suffixes=("", "_low"))
        share = (both["value"] - both["value_low"]) / (both["value_full"] - both["value_low"])
        return both.assign(value=share)[["seed", "value", "run_id", "n"]]
    if quantity == "early":
        return _metric(results, arm, "train_accuracy", "training", lambda m: _at(m.detail, EARLY))
    if quantity == "entropy":  # its n counts steps, not problems
        found = _metric(results, arm, "train_entropy", "training", (lambda m: m.value) if side == 0 else _began)
        return found.assign(n=0)
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
