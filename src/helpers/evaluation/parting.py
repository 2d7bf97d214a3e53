"""Where greedy replies of two models part: the first token that differs. After it the two read different texts.

Greedy decoding hides small changes of a distribution until one of them swaps the two likeliest tokens; the place where that
first happens, and what the full-precision model wrote there, say what kind of step the quantized model gets wrong first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from transformers import PreTrainedTokenizerBase

from helpers.errors import UserError
from helpers.evaluation.diagnose import KINDS, kinds
from helpers.evaluation.scores import CONFIDENCE, share
from helpers.runs import Metric
from helpers.sampling import Reply


@dataclass(frozen=True)
class Parting:
    """Of one problem: the `place` of the first token that differs (None: none), its `kind`, and the `length` of the full reply."""

    place: int | None
    length: int
    kind: str = ""


def partings(full: Sequence[Reply], low: Sequence[Reply], tokenizer: PreTrainedTokenizerBase) -> list[Parting]:
    """One a problem. A reply cut off at the limit parts where the other goes on.

    Errors: `UserError` where the two are not replies to the same problems.
    """
    if [r.problem_id for r in full] != [r.problem_id for r in low]:
        raise UserError("the replies are to different problems: ask both models the same, in the same order.")
    found = []
    for one, other in zip(full, low, strict=True):
        a, b = one.ids, other.ids
        place = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        if place == len(a) == len(b):
            found.append(Parting(None, len(a)))
        else:
            token = (a if place < len(a) else b)[place]
            found.append(Parting(place, len(a), kinds(tokenizer, [token])[token]))
    return found


def by_kind(found: Sequence[Parting]) -> tuple[dict[str, list[int]], int]:
    """(kind -> number of the token at which each of its replies part, how many never part)."""
    places = {kind: [p.place + 1 for p in found if p.kind == kind] for kind in KINDS}
    return places, sum(p.place is None for p in found)


def parting_metrics(found: Sequence[Parting], task: str) -> list[Metric]:
    """`parted`: share of replies that part at all (by kind of token: of those that part), and where: token, and share of the reply.

    Shares have Wilson's interval, places Student's t.
    """
    parted = [p for p in found if p.place is not None]
    metrics = [_share("parted", len(parted), len(found), task)]
    if parted:
        for kind in KINDS:
            metrics.append(_share("parted", sum(p.kind == kind for p in parted), len(parted), task, f"{task}/{kind}"))
        metrics.append(_mean("parted_token", [p.place + 1 for p in parted], task))
        metrics.append(_mean("parted_place", [p.place / max(p.length, 1) for p in parted], task))
    return metrics


def _share(metric: str, count: int, n: int, task: str, benchmark: str = "") -> Metric:
    s = share(count, n)
    return Metric(
        metric=metric, value=s.value, n=n, ci_low=s.low, ci_high=s.high, task=task, benchmark=benchmark or task
    )


def _mean(metric: str, values: Sequence[float], task: str) -> Metric:
    array, n = np.asarray(values, dtype=float), len(values)
    spread = float(array.std(ddof=1)) if n > 1 else 0.0
    half = (
        float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * spread / n**0.5 if spread else None
    )  # equal values tell nothing
    value = float(array.mean())
    low, high = (None, None) if half is None else (value - half, value + half)
    return Metric(metric=metric, value=value, n=n, ci_low=low, ci_high=high, task=task, benchmark=task)
