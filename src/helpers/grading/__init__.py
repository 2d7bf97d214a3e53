"""From a reply to a verdict: extract the answer, decide whether it equals the gold, turn verdicts into rewards.

Depends on nothing else here; `training` and `evaluation` use it.
"""

from helpers.grading.extract import extract
from helpers.grading.grade import OUTCOMES, Verdict, grade, grade_one
from helpers.grading.rewards import CORRECT, FORMAT, MAX_REWARD, reward

__all__ = ["CORRECT", "FORMAT", "MAX_REWARD", "OUTCOMES", "Verdict", "extract", "grade", "grade_one", "reward"]
