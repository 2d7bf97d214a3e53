"""`lowbit bench grpo`: a GRPO step, ours against TRL's own trainer with the `generate` of transformers, and where its time goes.

On a CPU the micro study's stage; on a GPU also a model of Qwen3-0.6B shape with random weights. Contenders train one after the
other, in `rounds` (on a GPU one), each on a copy of the same model; the first step of a training does not count, nor a short
training before all, in which libraries compile what both use. At the larger shape one step of the peer counts. Parts of a step:
`rollout`, `grading`, `training` (forward and backward of the loss), and `other` (optimizer, logging, what TRL does between).
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer

from helpers import models, tasks
from helpers.bench import measure
from helpers.bench.rollout import qwen3
from helpers.sampling.backends import SWITCH
from helpers.training import grpo, rollout

MICRO, LARGE = 2.0, 5.0  # times faster than TRL
PARTS = ("rollout", "grading", "training", "other")
PEER = "TRL with generate"


class Plain(GRPOTrainer):
    """TRL's trainer as it is."""

    def __init__(self, *args: Any, truncate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def mismatch(self) -> dict[str, float]:
        return {}


def rows(ref: str = "base-s", steps: int = 8, rounds: int = 2, repeats: int = 9) -> list[dict[str, Any]]:
    """The step of the micro study's GRPO stage; on a GPU also at Qwen3-0.6B shape. At most `repeats` steps of a contender count."""
    model, tokenizer = models.load(ref)
    settings = {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 96}
    shape = f"{ref}, 16 prompts of 8 replies, at most 96 tokens"
    if torch.cuda.is_available():  # where the peer takes seconds a step
        steps, rounds = min(steps, 4), 1
    count = min(steps, repeats + 1)
    found = measured(model, tokenizer, {"ours": count, PEER: count}, rounds, settings, shape, MICRO)
    if torch.cuda.is_available():
        settings = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 128}
        shape = "Qwen3-0.6B shape, 8 prompts of 8 replies, 128 tokens"
        model = qwen3("Qwen3-0.6B")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        found += measured(model, tokenizer, {"ours": min(8, repeats + 1), PEER: 2}, 1, settings, shape, LARGE)
    return found


def measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    steps: dict[str, int],
    rounds: int,
    settings: dict[str, int],
    shape: str,
    times: float,
) -> list[dict[str, Any]]:
    """A row for the whole step and one for each part."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    train(copy.deepcopy(model), tokenizer, min(3, *steps.values()), False, settings)
    for _ in range(rounds):
        for name, count in steps.items():
            taken[name] += train(copy.deepcopy(model), tokenizer, count, name == PEER, settings)[1:]
    whole = {name: [sum(step.values()) for step in found] for name, found in taken.items()}
    rows = [measure.row("GRPO step", shape, "s", whole, "ours", target=median(whole[PEER]) / times)]
    for part in PARTS:
        seconds = {name: [step[part] for step in found] for name, found in taken.items()}
        rows.append(measure.row(f"GRPO step: {part}", shape, "s", seconds, "ours"))
    return rows


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, plain: bool, settings: dict[str, int]
) -> list[dict[str, float]]:
    """Seconds of each part of each step."""
    trainer = Plain if plain else rollout.Trainer
    problems = tasks.load("arithmetic", "train", steps * settings["prompts_per_step"], seed=0)
    taken: list[dict[str, float]] = []
    begun = [0.0]

    def before_step(step: int) -> None:
        begun[0] = measure.now()
        taken.append({"rollout": 0.0, "drawn and graded": 0.0, "grading": 0.0, "step": 0.0})

    def log(**row: float) -> None:
        taken[-1]["whole"] = measure.now() - begun[0]

    with (
        patch.dict(os.environ, {SWITCH: "hf" if plain else "graph"}),
        patch.object(grpo, "Trainer", trainer),
        clocked(trainer, "_generate_single_turn", taken, "rollout"),
        clocked(trainer, "_generate_and_score_completions", taken, "drawn and graded"),
        clocked(trainer, "training_step", taken, "step"),
        clocked(grpo, "rewards", taken, "grading"),
    ):
        grpo.train(model, tokenizer, problems, steps=steps, kl_every=0, before_step=before_step, log=log, **settings)
    return [
        {
            "rollout": step["rollout"],
            "grading": step["grading"],
            "training": step["step"] - step["drawn and graded"],
            "other": step["whole"] - step["step"] + step["drawn and graded"] - step["rollout"] - step["grading"],
        }
        for step in taken
    ]


@contextmanager
def clocked(owner: Any, name: str, taken: list[dict[str, float]], part: str) -> Iterator[None]:
    """Add the seconds of each call of `owner.name` to this part of the last step."""
    work: Callable = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = measure.now()
        try:
            return work(*args, **kwargs)
        finally:
            taken[-1][part] += measure.now() - start

    with patch.object(owner, name, timed):
        yield
