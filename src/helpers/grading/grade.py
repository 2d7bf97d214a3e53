"""Decide whether a reply's answer equals the gold.

How a task is graded is part of the task. `exact` is for micro tasks, whose answers are integers or plain strings: the
same integer, however it is written (`07`, `+7`), or the same characters, decided on the spot. `maths` is for
benchmarks with boxed answers and `number` for those with plain numbers: extraction (`find`) and equality (`equal`)
run in worker processes that can be killed (`pool`).

Only `equal` counts as correct. An answer that is not there or cannot be read is `unparsed`, one that took too long or
too much memory is a `timeout`, and neither is the same as `different`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.grading import pool
from helpers.grading.extract import extract

OUTCOMES = ("equal", "different", "unparsed", "timeout")
METHODS = ("exact", "maths", "number")
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class Verdict:
    """What a reply was worth and why; `rule` is what decided, `found` is how the answer was found, `answer` is None
    without one.
    """

    outcome: str
    rule: str
    answer: str | None
    found: str = "box"

    @property
    def boxed(self) -> bool:
        """Whether the reply has a finished box: the format part of the reward."""
        return self.answer is not None and self.found in ("box", "boxes")


def grade_one(reply: str, gold: str, how: str = "exact") -> Verdict:
    """Grade one reply against its gold; never raises on any text."""
    if how != "exact":
        return grade([reply], [gold], how)[0]
    answer = extract(reply)
    if answer is None:
        return Verdict("unparsed", "no-box", None)
    if INTEGER.fullmatch(answer) and INTEGER.fullmatch(gold):
        return Verdict("equal" if int(answer) == int(gold) else "different", "integer", answer)
    return Verdict("equal" if answer == gold.strip() else "different", "string", answer)


def grade(replies: Sequence[str], golds: Sequence[str], how: str = "exact") -> list[Verdict]:
    """Grade replies in order against as many golds, all in one way (`METHODS`)."""
    pairs = list(zip(replies, golds, strict=True))
    if how == "exact":
        return [grade_one(reply, gold) for reply, gold in pairs]
    return [Verdict(*verdict) for verdict in pool.shared().map([(reply, gold, how) for reply, gold in pairs])]
