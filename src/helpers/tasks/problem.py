"""A problem and where it comes from.

Micro problems are generated, never stored. Splits are disjoint by construction: a prompt's SHA-256 decides, for ever
and on every machine, whether it belongs to training, calibration or evaluation, and the generator of a split keeps
only its own prompts. Pre-training, reinforcement learning and distillation draw from `train`; post-training
quantizers calibrate on `calibration`; every reported number is measured on `test`.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.errors import UserError
from helpers.tasks import arithmetic, recall

LEVELS = (1, 2, 3, 4, 5)
TASKS = {"arithmetic": arithmetic.prompt, "recall": recall.prompt}
SPLITS = {"train": range(0, 80), "calibration": range(80, 85), "test": range(85, 100)}  # of 100 hash buckets
TRIES_PER_PROBLEM = 2_000  # before a split is called exhausted: rejection keeps at least one draw in twenty


class TaskError(UserError):
    """An unknown task, split or level, or more distinct problems than the task has."""


@dataclass(frozen=True)
class Problem:
    """One question with its answer.

    `level` is the number of steps that a written-out solution takes; of a benchmark its own level, or 0 where it has
    none. `grading` is one of `grading.METHODS`; `benchmark` is empty for micro tasks. `solution` is the worked text of a
    training set's problem.
    """

    id: str
    prompt: str
    gold: str
    level: int
    grading: str = "exact"
    benchmark: str = ""
    solution: str = ""


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def generate(task: str, split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Problem]:
    """Give `n` distinct problems of `split`, levels in turn, the same for the same arguments.

    Errors: `TaskError` for an unknown split or level, and where the split holds fewer than `n` distinct problems.
    """
    for name, value, allowed in [("split", split, SPLITS), *(("level", x, LEVELS) for x in levels)]:
        if value not in allowed:
            raise TaskError(f"{name} = {value!r} is unknown: choose one of {', '.join(map(str, allowed))}.")
    if not levels:
        raise TaskError(f"levels is empty: give at least one of {', '.join(map(str, LEVELS))}.")
    make = TASKS[task]
    rng = random.Random(f"{task}/{split}/{seed}")
    found: dict[str, Problem] = {}
    for index in range(n):
        level = levels[index % len(levels)]
        for _ in range(TRIES_PER_PROBLEM):
            prompt, gold = make(rng, level)
            if prompt not in found and split_of(prompt) == split:
                found[prompt] = Problem(f"{task}-{split}-{seed}-{index}", prompt, gold, level)
                break
        else:
            raise TaskError(
                f"n = {n} is more than {task} has: level {level} of split {split!r} ended at {index} problems."
            )
    return list(found.values())
