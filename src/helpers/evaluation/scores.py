"""Scores of a model on a set of problems, with 95 % intervals.

Greedy decoding gives one reply a problem: accuracy is a share of `n` independent trials and gets Wilson's interval. With `k`
sampled replies a problem, avg@k averages within each problem first, and the interval is Student's t over the `n` problem
means: replies to one problem are not independent, so they must not be counted as `n * k` trials. The mean reward is treated in
the same way.

Every score keeps what a paired test needs: a mark for each problem, in order, and a hash of the problems.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from helpers.grading import MAX_REWARD, Verdict, reward
from helpers.runs import Metric
from helpers.sampling import Reply
from helpers.tasks import Problem

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Score:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def share(successes: int, n: int) -> Score:
    """A share of `n` independent trials, with Wilson's interval."""
    interval = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    return Score(successes / n, float(interval.low), float(interval.high))


def mean(values: Sequence[float], top: float) -> Score:
    """A mean over problems with Student's t interval, cut to [0, `top`]; one value alone has the whole range.

    Where all values are equal, nothing is known of their spread: a problem with another value may still come up with a
    probability of up to 1 - 0.025^(1/n) (the exact form of the rule of three), and the interval allows for that.
    """
    array = np.asarray(values, dtype=float)
    n = len(array)
    if n < 2:
        return Score(float(array.mean()), 0.0, top)
    if np.ptp(array) == 0:
        half = top * (1 - ((1 - CONFIDENCE) / 2) ** (1 / n))
    else:
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * array.std(ddof=1) / np.sqrt(n))
    centre = float(array.mean())
    return Score(centre, max(0.0, centre - half), min(top, centre + half))


def macro(scores: Sequence[Score], top: float) -> Score:
    """The mean of the scores of independent benchmarks, each counting once; half-widths add up as standard errors do."""
    centre = float(np.mean([s.value for s in scores]))
    half = float(np.sqrt(np.sum([((s.high - s.low) / 2) ** 2 for s in scores]))) / len(scores)
    return Score(centre, max(0.0, centre - half), min(top, centre + half))


def problems_hash(problems: Sequence[Problem]) -> str:
    """A short name for exactly these problems in this order."""
    return hashlib.sha256("\n".join(p.prompt for p in problems).encode()).hexdigest()[:12]


def summarize(
    problems: Sequence[Problem], replies: Sequence[Reply], verdicts: Sequence[Verdict], task: str, sampled: int = 0
) -> list[Metric]:
    """Give the metrics of one decoding: greedy, one reply a problem, or `sampled` consecutive replies a problem.

    Greedy decoding gives `accuracy`, `reward`, and the shares of `boxed` and `finished` replies; sampling gives `avg@k`,
    `reward@k`, `boxed@k`, `finished@k`. Accuracy and reward come by level too, as benchmark `task/level3`; where problems come from
    several benchmarks they come by benchmark instead, and the whole has both averages of them: `micro accuracy` over the problems,
    in which a large benchmark counts for more, and `macro accuracy` over the benchmarks.
    """
    n, k = len(problems), sampled or 1
    correct = np.array([v.outcome == "equal" for v in verdicts]).reshape(n, k)
    rewards = np.array([reward(v) for v in verdicts]).reshape(n, k)
    lengths = np.array([len(r.ids) for r in replies]).reshape(n, k)
    suffix = f"@{k}" if sampled else ""
    metrics = []

    def add(metric: str, score: Score, benchmark: str, rows: np.ndarray, detail: dict | None = None) -> None:
        metrics.append(
            Metric(
                metric=metric,
                value=score.value,
                n=len(rows),
                k=k,
                ci_low=score.low,
                ci_high=score.high,
                task=task,
                benchmark=benchmark,
                reply_tokens=float(lengths[rows].mean()),
                detail=detail or {},
            )
        )

    everything = np.arange(n)
    members = list(dict.fromkeys(p.benchmark for p in problems))
    if len(members) > 1:
        groups = {name: np.array([i for i in everything if problems[i].benchmark == name]) for name in members}
    else:
        groups = {task: everything}
        groups |= {
            f"{task}/level{level}": np.array([i for i in everything if problems[i].level == level])
            for level in sorted({p.level for p in problems} - {0})
        }
    name = f"avg@{k}" if sampled else "accuracy"
    parts: dict[str, list[Score]] = {name: [], f"reward{suffix}": []}
    for benchmark, rows in groups.items():
        marks = correct[rows].mean(axis=1)
        score = mean(marks, 1.0) if sampled else share(int(marks.sum()), len(rows))
        detail = {}
        if "/level" not in benchmark:
            detail = {
                "problems": problems_hash([problems[i] for i in rows]),
                "correct": "".join(str(int(x)) for x in correct[rows].sum(axis=1)),
            }
        add(name, score, benchmark, rows, detail)
        add(f"reward{suffix}", mean(rewards[rows].mean(axis=1), MAX_REWARD), benchmark, rows)
        for metric, values, top in ((name, marks, 1.0), (f"reward{suffix}", rewards[rows].mean(axis=1), MAX_REWARD)):
            parts[metric].append(mean(values, top))
    if len(members) > 1:
        for metric, values, top in ((name, correct, 1.0), (f"reward{suffix}", rewards, MAX_REWARD)):
            add(f"micro {metric}", mean(values.mean(axis=1), top), task, everything)
            add(f"macro {metric}", macro(parts[metric], top), task, everything)
    boxed = np.array([v.boxed for v in verdicts]).reshape(n, k)
    finished = np.array([r.finished for r in replies]).reshape(n, k)
    for metric, marks in (("boxed", boxed), ("finished", finished)):
        score = mean(marks.mean(axis=1), 1.0) if sampled else share(int(marks.sum()), n)
        add(f"{metric}{suffix}", score, task, everything)
    return metrics
