"""What the base models read: prompts of the training split with replies of several habits, some of them wrong.

Reinforcement learning can only make a habit likelier that the base model already has. So the corpus mixes direct answers,
boxed chains of thought and chains that forget the box; a base model answers in each manner, most often straight away, and RL
finds which one pays.
"""

import random
import re

from helpers.tasks import arithmetic, recall
from helpers.tasks.problem import LEVELS, Problem, TaskError, split_of

RECALL_SHARE = 0.15
DIRECT, BOXED, UNBOXED = 0.56, 0.28, 0.16  # shares of the habits among arithmetic documents
WRONG_DIRECT = 0.25  # of direct answers are off
WRONG_CHAIN = 0.10  # of chains hold one wrong step, carried on faithfully


def document(rng: random.Random) -> tuple[str, str]:
    """One (prompt, reply)."""
    while True:
        level = rng.choice(LEVELS)
        if rng.random() < RECALL_SHARE:
            prompt, gold = recall.prompt(rng, level)
            reply = rf"\boxed{{{gold}}}"
        else:
            tree = arithmetic.expression(rng, level)
            prompt, reply = arithmetic.text(tree), arithmetic_reply(rng, tree)
        if split_of(prompt) == "train":
            return prompt, reply


def arithmetic_reply(rng: random.Random, tree: arithmetic.Tree) -> str:
    """A reply in one of the three habits, now and then with a slip."""
    habit = rng.choices(("direct", "boxed", "unboxed"), (DIRECT, BOXED, UNBOXED))[0]
    if habit == "direct":
        answer = arithmetic.value(tree) + (slip(rng) if rng.random() < WRONG_DIRECT else 0)
        return rf"\boxed{{{max(0, answer)}}}"
    length = len(arithmetic.chain(tree))
    slips = {rng.randrange(length): slip(rng)} if rng.random() < WRONG_CHAIN else {}
    steps = arithmetic.chain(tree, slips)
    answer = rf"\boxed{{{steps[-1]}}}" if habit == "boxed" else steps[-1]
    return f"<think>{'='.join(steps)}</think>{answer}"


def solution(problem: Problem) -> str:
    """The reply that a model should give: every step written out in micro arithmetic, just the answer in recall, boxed.

    Of a training set: its own worked text, without GSM8K's marks of a calculator, and the answer boxed at the end unless the text
    has a box itself. Errors: `TaskError` where it has no text.
    """
    if problem.benchmark:
        if not problem.solution.strip():
            raise TaskError(f"{problem.id} has no solution to learn from: choose replies = teacher, or another set.")
        text = re.sub(r"<<.*?>>", "", problem.solution).partition("\n####")[0].rstrip()
        return text if r"\boxed" in text else f"{text}\n\\boxed{{{problem.gold}}}"
    if problem.id.startswith("recall"):
        return rf"\boxed{{{problem.gold}}}"
    steps = arithmetic.chain(arithmetic.parse(problem.prompt))
    return rf"<think>{'='.join(steps)}</think>\boxed{{{problem.gold}}}"


def slip(rng: random.Random) -> int:
    """How far a wrong result is off: a unit, a few, a ten or a hundred."""
    return rng.choice((1, 2, 10, 20, 100)) * rng.choice((-1, 1))


def documents(n: int, seed: int = 0, part: int = 0) -> list[tuple[str, str]]:
    """Give the `n` documents of one part of the corpus; parts are independent, so workers can make them in any order."""
    rng = random.Random(f"corpus/{seed}/{part}")
    return [document(rng) for _ in range(n)]
