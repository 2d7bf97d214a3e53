"""Compare two models on the same problems.

With one greedy reply each, only the problems on which the two disagree carry information: `gained` that the second alone
solves and `lost` that the first alone solves. McNemar's exact test asks whether `lost` against `gained` is a fair coin.
The interval of the difference is Agresti and Min's (2005): Wald's after half a problem is added to each of the four cells, so that
it has a width where nothing differed. A table of comparisons is corrected with Holm's step-down rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import pandas as pd
from scipy import stats

from helpers.errors import UserError
from helpers.runs import Metric, Result


@dataclass(frozen=True)
class Comparison:
    """Second minus first, in shares of problems."""

    difference: float
    low: float
    high: float
    gained: int
    lost: int
    n: int
    p_value: float


def compare(first: Metric, second: Metric) -> Comparison:
    """Paired comparison of two `accuracy` metrics.

    Errors: `UserError` where a metric keeps no marks, has k > 1, or was measured on other problems.
    """
    for metric in (first, second):
        if metric.k != 1 or "correct" not in metric.detail:
            raise UserError(
                f"{metric.metric} with k = {metric.k} cannot be paired: give accuracy with k = 1 over the whole task."
            )
    if first.detail["problems"] != second.detail["problems"]:
        raise UserError(
            f"the problems differ ({first.detail['problems']}, {second.detail['problems']}): evaluate both with the same task, n, "
            "levels and problem seed."
        )
    pairs = list(zip(first.detail["correct"], second.detail["correct"], strict=True))
    gained, lost, n = pairs.count(("0", "1")), pairs.count(("1", "0")), len(pairs)
    difference = (gained - lost) / n
    more, less, total = gained + 0.5, lost + 0.5, n + 2
    centre = (more - less) / total
    half = stats.norm.ppf(0.975) * sqrt(more + less - (more - less) ** 2 / total) / total
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return Comparison(difference, max(-1.0, centre - half), min(1.0, centre + half), gained, lost, n, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def comparisons(evaluations: Sequence[Result], task: str) -> pd.DataFrame:
    """Each evaluated model against the one that it was made from, on the same problems, corrected for the number of rows.

    The verdict is `higher` or `lower` where Holm's p is below 0.05, else `noise`.
    """
    scored = {}  # (id of the evaluated model, its problems) -> (description, seed, accuracy)
    for result in evaluations:
        metric = next((m for m in result.metrics if m.metric == "accuracy" and m.benchmark == task), None)
        if metric is not None:
            scored[result.parents[0], metric.detail["problems"]] = result.model, result.seed, metric
    rows = []
    for (_, problems), (about, seed, metric) in scored.items():
        if before := scored.get((about.get("made_from"), problems)):
            rows.append((about["name"], about["recipe"], about["scheme"], seed, compare(before[2], metric)))
    adjusted = holm([c.p_value for *_, c in rows])
    verdicts = [
        "noise" if p >= 0.05 else "higher" if c.difference > 0 else "lower"
        for (*_, c), p in zip(rows, adjusted, strict=True)
    ]
    return pd.DataFrame(
        {
            "model": [r[0] for r in rows],
            "step": [" > ".join(r[1].split(" > ")[-2:]) for r in rows],
            "scheme": [r[2] for r in rows],
            "seed": [r[3] for r in rows],
            "difference": [f"{r[4].difference:+.3f}" for r in rows],
            "95 % interval": [f"{r[4].low:+.3f} to {r[4].high:+.3f}" for r in rows],
            "gained, lost": [f"{r[4].gained}, {r[4].lost} of {r[4].n}" for r in rows],
            "p (Holm)": [f"{p:.2g}" for p in adjusted],
            "verdict": verdicts,
        }
    ).set_index(["model", "step", "scheme", "seed"])
