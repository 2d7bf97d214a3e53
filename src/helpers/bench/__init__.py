"""Benchmarks: what low-bit work costs. A module a work, whose `rows(..., repeats)` gives its measurements (see `measure`)."""

from helpers.bench import grade, grpo, kd, rollout
from helpers.bench.measure import as_text, within

BENCHMARKS = {"rollout": rollout.rows, "grpo": grpo.rows, "kd": kd.rows, "grade": grade.rows}

__all__ = ["BENCHMARKS", "as_text", "within"]
