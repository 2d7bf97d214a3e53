"""From a reply to a verdict: extract the answer, decide whether it equals the gold, turn verdicts into rewards.

Micro tasks are graded on the spot (`extract`, `grade`). Benchmarks go through workers (`pool`, `worker`), in which a
reply becomes an answer (`find`), a clean text (`normalize`), tokens (`tokens`), a shape (`reader`, `shapes`) and a
verdict (`equal`); `operators` asks math-verify. Depends on nothing else here; `training` and `evaluation` use it.
"""

from helpers.grading.extract import extract
from helpers.grading.grade import METHODS, OUTCOMES, Verdict, grade, grade_one
from helpers.grading.pool import GradingError
from helpers.grading.rewards import CORRECT, FORMAT, MAX_REWARD, reward

__all__ = [
    "CORRECT",
    "FORMAT",
    "MAX_REWARD",
    "METHODS",
    "OUTCOMES",
    "GradingError",
    "Verdict",
    "extract",
    "grade",
    "grade_one",
    "reward",
]
