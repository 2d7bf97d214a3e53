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
    """A mean over problems with Student's t interval, cut to [0, `top`]; one value alone has the whole range."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        return Score(float(array.mean()), 0.0, top)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))
    centre = float(array.mean())
    return Score(centre, max(0.0, centre - half), min(top, centre + half))


def problems_hash(problems: Sequence[Problem]) -> str:
    """A short name for exactly these problems in this order."""
    return hashlib.sha256("\n".join(p.prompt for p in problems).encode()).hexdigest()[:12]


def summarize(
    problems: Sequence[Problem], replies: Sequence[Reply], verdicts: Sequence[Verdict], k: int, task: str
) -> list[Metric]:
    """Give the metrics of one decoding: `k` consecutive replies and verdicts a problem.

    Metrics: `accuracy` (k = 1) or `avg@k`, `reward`, and the shares of `boxed` and `finished` replies; the first two also by level,
    as benchmark `task/level3`. Names end in `@k` where k > 1.
    """
    n = len(problems)
    correct = np.array([v.outcome == "equal" for v in verdicts]).reshape(n, k)
    rewards = np.array([reward(v) for v in verdicts]).reshape(n, k)
    lengths = np.array([len(r.ids) for r in replies]).reshape(n, k)
    suffix = "" if k == 1 else f"@{k}"
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
    groups = {task: everything}
    groups |= {
        f"{task}/level{level}": np.array([i for i in everything if problems[i].level == level])
        for level in sorted({p.level for p in problems})
    }
    for benchmark, rows in groups.items():
        marks = correct[rows].mean(axis=1)
        score = share(int(marks.sum()), len(rows)) if k == 1 else mean(marks, 1.0)
        detail = {}
        if benchmark == task:
            detail = {"problems": problems_hash(problems), "correct": "".join(str(int(x)) for x in correct.sum(axis=1))}
        add("accuracy" if k == 1 else f"avg@{k}", score, benchmark, rows, detail)
        add(f"reward{suffix}", mean(rewards[rows].mean(axis=1), MAX_REWARD), benchmark, rows)
    boxed = np.array([v.answer is not None for v in verdicts]).reshape(n, k)
    finished = np.array([r.finished for r in replies]).reshape(n, k)
    for metric, marks in (("boxed", boxed), ("finished", finished)):
        score = share(int(marks.sum()), n) if k == 1 else mean(marks.mean(axis=1), 1.0)
        add(f"{metric}{suffix}", score, task, everything)
    return metrics
