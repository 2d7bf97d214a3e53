"""Problems, prompts and gold answers.

`load(task, split, n, seed)` is the one door: it gives `Problem`s, whatever the task is made of. Depends on nothing else here.
"""

from helpers.tasks.problem import LEVELS, SPLITS, TASKS, Problem, TaskError, load, messages

__all__ = ["LEVELS", "SPLITS", "TASKS", "Problem", "TaskError", "load", "messages"]
