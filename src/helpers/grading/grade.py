"""Decide whether a reply's answer equals the gold.

Micro tasks have answers that are integers or plain strings, so equality is exact: the same integer, however it is written
(`07`, `+7`), or the same characters. An answer that is not there is `unparsed`, which is not the same as `different`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.grading.extract import extract

OUTCOMES = ("equal", "different", "unparsed")
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class Verdict:
    """What a reply was worth and why; `rule` is what decided: integer, string, or no-box."""

    outcome: str
    rule: str
    answer: str | None


def grade_one(reply: str, gold: str) -> Verdict:
    """Grade one reply against its gold; never raises on any text."""
    answer = extract(reply)
    if answer is None:
        return Verdict("unparsed", "no-box", None)
    if INTEGER.fullmatch(answer) and INTEGER.fullmatch(gold):
        return Verdict("equal" if int(answer) == int(gold) else "different", "integer", answer)
    return Verdict("equal" if answer == gold.strip() else "different", "string", answer)


def grade(replies: Sequence[str], golds: Sequence[str]) -> list[Verdict]:
    """Grade replies in order against as many golds."""
    return [grade_one(reply, gold) for reply, gold in zip(replies, golds, strict=True)]
