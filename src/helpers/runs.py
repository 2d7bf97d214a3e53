"""Runs: what a notebook is given when it begins, and what it leaves when it has finished. Knows nothing of machine
learning.

A finished run lies in `runs/<study>/<stage>/<run_id>/`; published copies lie in `book/runs/<study>/<name>/`, and base
models that come with the package in `helpers/models/shipped/<name>/`. In a notebook:

    run = runs.begin("ptq", params.check())
    ...                                    # files go to run.path, rows of progress to run.log(step=1, loss=0.5)
    run.finish(model={...}, metrics=[...])

Under `lowbit run` the runner owns the folder of the run (LOWBIT_STAGING) and publishes it after the last cell; in
Jupyter or plain papermill, `finish` publishes. What is public here lives in `records` (result.json), `lookup`
(finding), `staging` (publishing) and `identity` (run ids).
"""

import json
import math
import os
import shlex
import sys
import textwrap
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from helpers import identity as ids
from helpers import params, processes, project
from helpers.lookup import RunRef, done, expand, find, known, load_parent, planned_id, shown
from helpers.records import (
    Context,
    DiskFull,
    Draft,
    FailedRun,
    Memory,
    Metric,
    Result,
    RunError,
    disk_errors,
    ensure_space,
    read,
    write_json,
)
from helpers.staging import CONTEXT, DRAFT, lock, publish_staged, session_folder, unfinished_folder, write_result

__all__ = [
    "DiskFull",
    "FailedRun",
    "Memory",
    "Metric",
    "Result",
    "Run",
    "RunError",
    "RunRef",
    "begin",
    "done",
    "ensure_space",
    "expand",
    "find",
    "known",
    "load_parent",
    "lock",
    "planned_id",
    "publish_staged",
    "read",
    "shown",
]

SECONDS_BETWEEN_LINES = 10.0  # of progress
PACKAGES = ("torch", "transformers", "trl", "peft", "papermill", "numpy")


@dataclass
class Run:
    """The run of this notebook; write files below `path`."""

    path: Path
    context: Context
    parent: RunRef | None
    teacher: RunRef | None
    parents: list[RunRef]
    managed: bool
    began: float = field(default_factory=time.perf_counter)
    spoke: float = float("-inf")
    first_cell: int = 0  # where in the session's history this run began

    @property
    def id(self) -> str:
        """The run id (a session whose cells were edited gets another one when it finishes)."""
        return self.context.run_id

    @property
    def unfinished(self) -> Path | None:
        """Where to keep what a later attempt can go on from, if this one is killed.

        None in a session: its cells may be edited, and a run of the template must not go on from what they made.
        """
        return unfinished_folder(self.id) if self.managed else None

    @property
    def changed(self) -> dict[str, Any]:
        """The parameters that differ from the template's defaults."""
        declared = params.template(project.template(self.context.stage))
        return params.changed(declared, self.context.parameters)

    def log(self, **row: Any) -> None:
        """Append a row to metrics.jsonl (a number that is not finite as null), and print one now and then.

        So long work shows its progress, and the executed notebook stays small.
        """
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        with disk_errors(self.path), (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")  # default: scalars of numpy and torch
        if time.perf_counter() - self.spoke >= SECONDS_BETWEEN_LINES:
            self.spoke = time.perf_counter()
            shown = " ".join(f"{k} {v:.3g}," if isinstance(v, float) else f"{k} {v}," for k, v in row.items())
            print(textwrap.shorten(shown, 76, placeholder=" ..."), flush=True)

    def finish(
        self,
        *,
        model: dict[str, Any] | None = None,
        metrics: list[Metric | dict] = (),
        memory: Memory | dict | None = None,
        timings: dict[str, float] | None = None,
        device: str = "cpu",
    ) -> Result:
        """Record the run; without it a run has failed."""
        given = {
            "model": model or {},
            "metrics": list(metrics),
            "memory": memory,
            "timings": timings or {},
            "device": device,
        }
        try:
            draft = Draft.model_validate(given)
            json.dumps(draft.model_dump(), allow_nan=False)  # also what `model` and `detail` hold
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RunError(f"run.finish() cannot record {where} = {first['input']!r}: {first['msg']}.") from None
        except (ValueError, TypeError) as error:
            raise RunError(f"run.finish() cannot record what it was given: {error}.") from None
        result = complete(self.context, draft, time.perf_counter() - self.began)
        if self.managed:
            with disk_errors(self.path):
                write_json(self.path / DRAFT, draft.model_dump(mode="json"))
            return result
        return self._publish(result)

    def _publish(self, result: Result) -> Result:
        code = ids.combine(result.code, _deviation(result.stage, _history()[self.first_cell :]))
        run_id = ids.run_id(result.stage, result.parameters, result.parents, code)
        result = result.model_copy(update={"run_id": run_id, "code": code})
        with lock(run_id):
            made = done(run_id)
            if made and "run.ipynb" in read(made).files:  # a session has no executed notebook to offer in its place
                print(f"{run_id} was there already and is kept, in {shown(made)}")
                return read(made)
            if self.path.parent.name == ".staging":
                self.path = publish_staged(self.path, result, replace=True)
            else:  # the last cell was run again
                with disk_errors(self.path):
                    write_result(self.path, result)
        print(f"{run_id} is in {shown(self.path)}")
        return read(self.path)


def begin(stage: str, parameters: dict[str, Any]) -> Run:
    """Start the run of this notebook; `parameters` come from `params.check()`."""
    staging = os.environ.get("LOWBIT_STAGING")
    context, refs = describe(stage, parameters)
    if staging:
        context = Context.model_validate_json((Path(staging) / CONTEXT).read_text())
        if (stage, parameters) != (context.stage, context.parameters):
            raise RunError(
                f"The notebook began {stage} with other parameters than the runner gave to {context.run_id}."
            )
        processes.start(Path(staging))
    else:
        ensure_space(project.runs_dir())
    with disk_errors(project.runs_dir()):
        path = Path(staging) if staging else session_folder()
    waiting = iter(refs)
    parent, teacher = (next(waiting) if parameters.get(name) else None for name in ids.SINGLE)
    return Run(path, context, parent, teacher, refs, managed=bool(staging), first_cell=max(0, len(_history()) - 1))


def _history() -> list[str]:
    """The cells that ran in this Jupyter session, in order; none outside Jupyter."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return [ids.normal(cell) for cell in shell.history_manager.input_hist_raw if cell.strip()] if shell else []


def _deviation(stage: str, ran: list[str]) -> list[str]:
    """What ran since `begin()`, if it is not the template's cells in their order: such a run must not pass for one of the template.

    The last cell may have run several times.
    """
    while len(ran) > 1 and ran[-1] == ran[-2]:
        ran = ran[:-1]
    template = ids.cells_of(project.template(stage))
    return [] if ran == template[: len(ran)] else ran


def describe(
    stage: str, parameters: dict[str, Any], study: str = "local", name: str = ""
) -> tuple[Context, list[RunRef]]:
    """What is known of a run before it starts, and its parents; `parameters` are complete and checked."""
    template = project.template(stage)
    if parameters.get("parent") == "":
        raise RunError(f"parent is empty for {stage}: give a run id, study/name, a shipped name, a folder or a hub id.")
    single = {key: load_parent(parameters[key], key) for key in ids.SINGLE if parameters.get(key)}
    parents = [load_parent(ref) for given in parameters.get("parents", []) for ref in expand(given)]
    parameters = dict(parameters)
    labels = dict(parameters)
    for key, ref in single.items():
        parameters[key], labels[key] = ref.ref, ref.label
    if parents:
        parameters["parents"], labels["parents"] = [ref.ref for ref in parents], [ref.label for ref in parents]
    refs = [*single.values(), *parents]
    code = ids.code_version(template)
    commit, dirty = project.commit()
    changed = params.changed(params.template(template), parameters)
    words = ["lowbit", "run", stage, *(word for key in changed for word in ("-p", f"{key}={params.text(labels[key])}"))]
    context = Context(
        run_id=ids.run_id(stage, parameters, [ref.id for ref in refs], code),
        study=study,
        name=name,
        stage=stage,
        parameters=parameters,
        parents=[ref.id for ref in refs],
        code=code,
        command=shlex.join(words),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        dirty=dirty,
    )
    return context, refs


def complete(context: Context, draft: Draft, wall_s: float) -> Result:
    """The record of a run, but for its files."""
    return Result(
        **context.model_dump(),
        **draft.model_dump(exclude={"timings"}),
        timings={**draft.timings, "wall_s": round(wall_s, 3)},
        seed=context.parameters.get("seed"),
        versions=versions(),
        files={},
    )


def versions() -> dict[str, str]:
    """Versions of what a result depends on, without importing any of it."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
