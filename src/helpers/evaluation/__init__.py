"""Scores with their uncertainty, paired comparisons, and tables of them. Uses grading and `runs`; the report stands above it.

`diagnose`, `parting`, `layers` and `survival` are imported by name: an evaluation's id must not change with the quantizers' code.
"""

from helpers.evaluation.compare import Comparison, compare, comparisons, holm
from helpers.evaluation.scores import Score, summarize
from helpers.evaluation.tables import by_level, habits, kept, levels, outcomes, restore, store, table
from helpers.evaluation.training import final_loss, qat_metrics, training_metrics

__all__ = [
    "Comparison",
    "Score",
    "by_level",
    "compare",
    "comparisons",
    "final_loss",
    "habits",
    "holm",
    "kept",
    "levels",
    "outcomes",
    "qat_metrics",
    "restore",
    "store",
    "summarize",
    "table",
    "training_metrics",
]
