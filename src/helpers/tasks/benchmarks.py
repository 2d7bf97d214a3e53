"""Benchmarks and training sets that other people made, from a folder or from the Hugging Face hub.

`LOWBIT_DATA` names a folder of JSON lines, `{"id", "problem", "answer", "level"[, "meta", "solution"]}`; without it the
hub is asked. The files and repositories are those of `SETS`. Of MATH levels 3 to 5, rows from MATH's own test split and
rows with several boxed answers are left out. A training problem whose letters and digits are those of an evaluation
problem is left out too, so that nothing is measured on what was trained on.

A training set has all three splits: its `test` is the benchmark that it prepares for, and one problem in twenty, by the
hash of its prompt, is in `calibration` and not in `train`.

How often and how each set is sampled unless told otherwise follows the paper that used it. Paper 1 took one sample at
temperature 1 and tried limits of 512 and 1,024 tokens; paper 2 three at temperature 0.6, top_p 0.95, 32,768 tokens.
AMC 2023 alone is in neither: as paper 1.
"""

import json
import os
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.tasks.problem import SPLITS, Problem, TaskError, split_of

PAPERS = "papers"  # the five of paper 1 together: 30 + 83 + 500 + 272 + 675 = 1,560 problems


@dataclass(frozen=True)
class Decoding:
    """`k` sampled replies a problem, and how."""

    k: int
    temperature: float
    top_p: float
    max_new_tokens: int


PAPER_1 = Decoding(k=1, temperature=1.0, top_p=1.0, max_new_tokens=1024)
PAPER_2 = Decoding(k=3, temperature=0.6, top_p=0.95, max_new_tokens=32_768)


@dataclass(frozen=True)
class Set:
    """Where a set lies: `file` in a folder, or a `repository` of the hub with its configuration, split and fields."""

    file: str
    rows: int
    repository: str
    config: str | None
    hub_split: str
    problem: str
    answer: str
    grading: str = "maths"
    test: str = ""  # of a training set: the benchmark that its test split is
    decoding: Decoding = PAPER_1
    solution: str = "solution"  # the field of a training set's worked text


SETS = {
    "aime24": Set("aime24", 30, "HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "amc23": Set("amc23", 40, "math-ai/amc23", None, "test", "question", "answer"),
    "amc83": Set("amc_2022_2023_83", 83, "AI-MO/aimo-validation-amc", None, "train", "problem", "answer"),
    "math500": Set("math500", 500, "HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "minerva": Set("minerva", 272, "math-ai/minervamath", None, "test", "question", "answer"),
    "olympiadbench": Set("olympiadbench", 675, "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", "question", "final_answer"),
    "gsm8k": Set("gsm8k_test", 1_319, "openai/gsm8k", "main", "test", "question", "answer", "number", decoding=PAPER_2),
    "math_l3to5": Set("math_l3to5", 8_884, "nlile/hendrycks-MATH-benchmark", None, "train", "problem", "answer", test="math500"),
    "gsm8k_train": Set(
        "gsm8k_train", 7_473, "openai/gsm8k", "main", "train", "question", "answer", "number", "gsm8k", PAPER_2, "answer"
    ),
    "openr1_math": Set(
        "openr1_math", 93_733, "open-r1/OpenR1-Math-220k", "default", "train", "problem", "answer", "maths", "math500", PAPER_2,
        "messages",
    ),
    "numina_math": Set("numina_math", 896_215, "AI-MO/NuminaMath-1.5", None, "train", "problem", "answer", test="math500"),
}  # fmt: skip
GROUPS = {PAPERS: ("aime24", "amc83", "math500", "minerva", "olympiadbench")}
EVALUATION = [name for name, one in SETS.items() if not one.test]
TRAINING = [name for name, one in SETS.items() if one.test]
NAMES = (*SETS, *GROUPS)


def load(name: str, split: str, n: int, seed: int = 0) -> list[Problem]:
    """At most `n` problems of a set, or of each set of a group, in the set's order; which ones follows from `seed`.

    Errors: `TaskError` for another split than `test` of a benchmark, for a set that leaves no problem, and where the set is
    neither in LOWBIT_DATA nor to be had from the hub.
    """
    if name in GROUPS:
        return [problem for member in GROUPS[name] for problem in load(member, split, n, seed)]
    if split not in SPLITS:
        raise TaskError(f"split = {split!r} is unknown: choose one of {', '.join(SPLITS)}.")
    if name in TRAINING and split == "test":
        return load(SETS[name].test, split, n, seed)
    if name in EVALUATION and split != "test":
        raise TaskError(f"split = {split!r} is not allowed for {name}: it is a test set.")
    problems = [problem for row in _rows(name) if (problem := _problem(name, row))]
    if name in TRAINING:
        held_out = [split_of(problem.prompt) == "calibration" for problem in problems]
        problems = [p for p, held in zip(problems, held_out, strict=True) if held == (split == "calibration")]
        problems = clean(problems, (row["problem"] for other in EVALUATION for row in _rows(other)))
    if not problems:
        raise TaskError(f"{name} has no problem for split = {split!r}: its file or its repository holds too little.")
    chosen = sorted(random.Random(f"{name}/{seed}").sample(range(len(problems)), min(n, len(problems))))
    return [problems[i] for i in chosen]


def decoding(name: str) -> Decoding:
    """How a set is sampled unless told otherwise. Errors: `TaskError` for a micro task, whose settings are the
    notebook's.
    """
    if name not in NAMES:
        raise TaskError(f"decoding = 'paper' is not allowed for {name}: no paper has it.")
    return SETS[GROUPS[name][0] if name in GROUPS else name].decoding


def clean(problems: Iterable[Problem], evaluation: Iterable[str]) -> list[Problem]:
    """The problems whose letters and digits are not those of an evaluation prompt."""
    taken = set(map(fingerprint, evaluation))
    return [problem for problem in problems if fingerprint(problem.prompt) not in taken]


def fingerprint(prompt: str) -> str:
    """What stays of a text however it is set: its letters and digits, without case, spacing, LaTeX commands and
    signs.
    """
    return re.sub(r"\\[A-Za-z]+|[\W_]", "", prompt).casefold()


def _problem(name: str, row: Mapping[str, Any]) -> Problem | None:
    meta = row.get("meta") or {}
    if name == "math_l3to5" and (meta.get("split") == "test" or meta.get("all_boxed")):
        return None
    solution = row.get("solution") or ""
    return Problem(row["id"], row["problem"], row["answer"], _level(row), SETS[name].grading, name, solution)


def _level(row: Mapping[str, Any]) -> int:
    """3 for 3, 3.0, "3" and "Level 3"; 0 where a row says none."""
    number = re.search(r"\d+", str(row.get("level") or ""))
    return int(number[0]) if number else 0


def _rows(name: str) -> list[dict[str, Any]]:
    if folder := os.environ.get("LOWBIT_DATA"):
        return _from_folder(name, Path(folder))
    return _from_hub(name)


def _from_folder(name: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / f"{SETS[name].file}.jsonl"
    if not path.is_file():
        raise TaskError(f"LOWBIT_DATA = {folder} has no {path.name}, which {name} is read from.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise TaskError(f"{path}, line {number} is not JSON.") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("id", "problem", "answer")):
            raise TaskError(f"{path}, line {number} lacks id, problem or answer as a string.")
        if not isinstance(row.get("solution") or "", str) or not isinstance(row.get("meta") or {}, dict):
            raise TaskError(f"{path}, line {number} has a solution that is no string, or a meta that is no object.")
        rows.append(row)
    return rows


def _from_hub(name: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    one = SETS[name]
    try:
        data = load_dataset(one.repository, one.config, split=one.hub_split)
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise TaskError(
            f"{name} cannot be had: set LOWBIT_DATA to a folder with {one.file}.jsonl, or go online for {one.repository} "
            f"({reason})."
        ) from None
    try:
        return [row for i, found in enumerate(data) if (row := _mapped(name, one, i, found))]
    except KeyError as error:
        raise TaskError(f"{one.repository} has no field {error}, which {name} is read from.") from None
    except (TypeError, AttributeError, IndexError) as error:
        raise TaskError(f"{one.repository} has rows of another form than {name} is read from ({error}).") from None


def _mapped(name: str, one: Set, index: int, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row of the hub as a row of a folder."""
    answer, solution = found[one.answer], found[one.solution] if one.test else ""
    if isinstance(solution, list):  # OpenR1-Math's chat: the problem, and a reply that was checked
        solution = solution[-1]["content"]
    if isinstance(answer, list):  # OlympiadBench has one string an answer
        answer = ", ".join(map(str, answer))
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    answer = str(answer)
    if name.startswith("gsm8k"):
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    level = _level(found)
    meta: dict[str, Any] = {}
    if name == "math_l3to5":
        boxes = set(re.findall(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", solution or ""))
        meta = {
            "split": (found.get("unique_id") or "train").split("/")[0],
            "all_boxed": sorted(boxes) if len(boxes) > 1 else None,
        }
        if level < 3:
            return None
    row = {"id": f"{name}/{index}", "problem": found[one.problem], "answer": answer, "level": level, "meta": meta}
    return row | {"solution": solution}
