"""The smoke variant of a study: every run of its file, end to end, on tiny random models and a few made-up problems.

It takes minutes on a laptop, needs no hub, and says nothing about quantization: it finds runs that cannot work before a study of
weeks of GPU time does. What `models` of the study file names is replaced by a random checkpoint (`models.tiny`), the parameters by
those of `smoke`, and benchmarks by made-up files of the same names. Runs that are the same now, since the sizes of a
model no longer differ, are made once.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from helpers.identity import SINGLE
from helpers.study import Job, Study, StudyError, variant

ROWS = {"train": 240, "test": 3}  # problems of a set; one of twenty of a training set is for calibration
ARCHITECTURES = {"smollm": "llama", "r1-distill-qwen": "qwen2"}  # part of a model's name -> its kind; else Qwen3


def prepare(study: Study, folder: Path) -> tuple[Study, Path]:
    """(the study's smoke variant, its folder of data); its models and data are made in `folder`.

    Errors: those of `variant`.
    """
    models = {name: str(folder / "models" / f"tiny-{kind_of(ref)}") for name, ref in study.models.items()}
    found = variant(study, models)
    from helpers.models import seed_everything, tiny  # the command line starts without machine learning

    seed_everything(0)  # also quiets the libraries
    for kind in sorted({kind_of(ref) for ref in study.models.values()}):
        tiny.save(kind, folder / "models" / f"tiny-{kind}")
    write_data(folder / "data")
    return found, folder / "data"


def kind_of(ref: str) -> str:
    """The architecture of a model, by its name."""
    return next((kind for part, kind in ARCHITECTURES.items() if part in ref.lower()), "qwen3")


def write_data(folder: Path) -> None:
    """One file for each benchmark and training set: sums, with worked solutions."""
    from helpers.tasks.benchmarks import SETS, TRAINING

    folder.mkdir(parents=True, exist_ok=True)
    for name, one in SETS.items():
        rng = random.Random(name)
        lines = []
        for i in range(ROWS["train" if name in TRAINING else "test"]):
            a, b = rng.randint(1, 999), rng.randint(1, 999)
            problem = f"{name} {i}: what is ${a} + {b}$?"
            solution = f"We add ${a}$ and ${b}$. The sum is $\\boxed{{{a + b}}}$."
            row = {"id": f"{name}/{i}", "problem": problem, "answer": str(a + b), "level": 3}
            lines.append(json.dumps(row | {"solution": solution, "meta": {"split": "train"}}))
        (folder / f"{one.file}.jsonl").write_text("\n".join(lines) + "\n")


def distinct(jobs: list[Job]) -> list[Job]:
    """The first job of each run id, whose parents are first ones too.

    Errors: `StudyError` for a job that starts from a model of a hub, which is one that `models` does not name.
    """
    for job in jobs:
        for ref in filter(None, map(job.parameters.get, SINGLE)):
            if "/" in ref and not Path(ref).exists():
                raise StudyError(
                    f"Run {job.name} starts from {ref}, which a smoke variant does not replace: name it under `models`."
                )
    first: dict[str, Job] = {}
    for job in jobs:
        first.setdefault(job.run_id, job)
    ids = {job.name: job.run_id for job in jobs}
    return [replace(job, parents=[first[ids[name]].name for name in job.parents]) for job in first.values()]
