"""Cases for `lowbit grade`: lines of `{"id", "gold", "pred", "form"}`, where `form` says whether `pred` is a bare
answer or a whole reply.

    {"id": "a1", "gold": "\\\\frac{1}{2}", "pred": "0.5", "form": "answer"}
    {"id": "a2", "gold": "72", "pred": "So it is \\\\boxed{72}.", "form": "response"}

A `response` is extracted from as a benchmark's reply is; its last number counts where the gold is a number.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.errors import UserError
from helpers.grading import pool

FORMS = ("answer", "response")


class CaseError(UserError):
    """A case that cannot be graded, named by its line."""


@dataclass(frozen=True)
class Case:
    id: Any
    gold: str
    pred: str
    form: str


def read(path: Path) -> list[Case]:
    """The cases of a file, one JSON object a line; blank lines do not count.

    Errors: `CaseError` naming the file and line, or the file if it holds none.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}.") from None
    cases = [_case(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not cases:
        raise CaseError(f"{path} holds no case: give lines of id, gold, pred and form.")
    return cases


def _case(line: bytes, where: str) -> Case:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise CaseError(f"{where} is not UTF-8.") from None
    except (ValueError, RecursionError):
        raise CaseError(f"{where} is not JSON: give an object with id, gold, pred and form.") from None
    if not isinstance(row, dict):
        raise CaseError(f"{where} is no JSON object: give one with id, gold, pred and form.")
    for name in ("id", "gold", "pred", "form"):
        if name not in row:
            raise CaseError(f"{where} has no {name}: give id, gold, pred and form.")
    for name in ("gold", "pred"):
        if not isinstance(row[name], str):
            raise CaseError(f"{where} has {name} = {json.dumps(row[name])[:60]}: give a string.")
    if row["form"] not in FORMS:
        raise CaseError(f"{where} has form = {json.dumps(row['form'])[:60]}: choose one of {', '.join(FORMS)}.")
    return Case(row["id"], row["gold"], row["pred"], row["form"])


def grade(cases: list[Case]) -> list[dict[str, Any]]:
    """`{"id", "outcome", "rule"}` of each case, in order."""
    with pool.Pool() as workers:
        verdicts = workers.map([(case.pred, case.gold, case.form) for case in cases])
    return [
        {"id": case.id, "outcome": outcome, "rule": rule}
        for case, (outcome, rule, *_) in zip(cases, verdicts, strict=True)
    ]
