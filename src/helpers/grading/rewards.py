"""The reward of paper 1: 1.0 for a correct answer plus 0.1 for any finished box, so at most 1.1. It is not an accuracy."""

from helpers.grading.grade import Verdict

CORRECT = 1.0
FORMAT = 0.1
MAX_REWARD = CORRECT + FORMAT


def reward(verdict: Verdict) -> float:
    """The reward of one verdict."""
    return CORRECT * (verdict.outcome == "equal") + FORMAT * verdict.boxed
