"""Problems, prompts and gold answers.

`load(task, split, n, seed)` is the one door: it gives `Problem`s, whatever the task is made of. Depends on nothing
else here.
"""

from helpers.tasks.benchmarks import GROUPS, PAPERS, TRAINING, decoding
from helpers.tasks.load import load
from helpers.tasks.problem import LEVELS, SPLITS, TASKS, Problem, TaskError
from helpers.tasks.prompts import STYLES, messages

__all__ = [
    "GROUPS",
    "LEVELS",
    "PAPERS",
    "SPLITS",
    "STYLES",
    "TASKS",
    "TRAINING",
    "Problem",
    "TaskError",
    "decoding",
    "load",
    "messages",
]
