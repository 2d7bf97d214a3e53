"""Intervals by resampling whole texts, or whole problems.

The tokens of one text resemble one another, so texts are drawn again, not tokens. A mean per token is then a ratio of two sums
over texts, sum of x_i / sum of n_i, and so is the share of a gain that survives, sum of kept_i / sum of gained_i.
Source: Efron and Tibshirani (1993), bias-corrected and accelerated (BCa) intervals, as SciPy has them.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from scipy import stats

from helpers.evaluation.scores import CONFIDENCE

RESAMPLES = 1999


def ratio(tops: Sequence[float], bottoms: Sequence[float], seed: int = 0) -> tuple[float, float | None, float | None]:
    """(sum of `tops` / sum of `bottoms`, low, high) over paired texts; no interval from fewer than two, nor where it has no end."""
    top, bottom = (np.asarray(x, dtype=float) for x in (tops, bottoms))
    value = float(top.sum() / bottom.sum())
    if len(top) < 2:
        return value, None, None
    if np.ptp(top - value * bottom) < 1e-12:  # every text has this very ratio: nothing to resample
        return value, value, value
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore")  # of degenerate resamples, which end as an interval that is not finite
        found = stats.bootstrap(
            (top, bottom),
            lambda a, b, axis: a.sum(axis) / b.sum(axis),
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            paired=True,
            vectorized=True,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (value, min(low, value), max(high, value)) if np.isfinite(low + high) else (value, None, None)
