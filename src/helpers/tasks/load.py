"""The one door to problems: generated ones by seed, and benchmarks from a folder or the hub."""

from collections.abc import Sequence

from helpers.tasks import benchmarks
from helpers.tasks.problem import LEVELS, TASKS, Problem, TaskError, generate


def load(task: str, split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Problem]:
    """`n` distinct problems of a micro task, or at most `n` of a benchmark (of each, for a group), the same for the
    same arguments.

    Errors: `TaskError` for an unknown task, split or level, and where the problems cannot be had.
    """
    if task in benchmarks.NAMES:
        return benchmarks.load(task, split, n, seed)
    if task not in TASKS:
        raise TaskError(f"task = {task!r} is unknown: choose one of {', '.join((*TASKS, *benchmarks.NAMES))}.")
    return generate(task, split, n, seed, levels)
