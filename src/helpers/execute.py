"""Execute a stage template with parameters: one run, once.

Parameters are checked before a kernel starts, the run id is computed, and a run that is already there is not made
again. Otherwise, under the lock of that id, papermill executes a copy of the template in a staging folder. If every
cell ran and the notebook called `run.finish()`, the folder is published; if not, the notebook moves to
`runs/.failed/<run_id>/` with an `error.json`, and one sentence says what went wrong.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from helpers import kernel, params, processes, project, runs
from helpers.errors import UserError
from helpers.records import (
    Context,
    DiskFull,
    Draft,
    FailedRun,
    Interrupted,
    disk_errors,
    ensure_space,
    says_disk_full,
    write_json,
    write_text,
)
from helpers.staging import CONTEXT, DRAFT, SOCKETS, publish_staged, stage_folder, unfinished_folder


@dataclass(frozen=True)
class Outcome:
    run_id: str
    path: Path
    state: str  # done | skipped


def execute(
    stage: str, given: dict[str, Any], study: str = "local", name: str = "", out: TextIO | None = None, expect: str = ""
) -> Outcome:
    """Make a run, or find it made. The notebook prints to `out` (the terminal); `expect` is the id that was planned."""
    out = out or sys.stdout
    template = project.template(stage)
    context, _ = runs.describe(stage, params.validate(params.template(template), given, stage), study, name)
    run_id = context.run_id
    if expect and run_id != expect:
        raise runs.RunError(
            f"{name} is now {run_id}, not {expect}: code or parents changed since the study began; start it again."
        )
    if path := runs.done(run_id):
        return Outcome(run_id, path, "skipped")
    ensure_space(project.runs_dir())
    with disk_errors(project.runs_dir()), runs.lock(run_id, lambda: print(f"waiting for the other {run_id}", file=out)):
        if path := runs.done(run_id):  # the one that we waited for made it
            return Outcome(run_id, path, "skipped")
        return Outcome(run_id, _run(context, template, out), "done")


def _run(context: Context, template: Path, out: TextIO) -> Path:
    began = time.perf_counter()
    staging = stage_folder(context.run_id)
    failed = project.runs_dir() / ".failed" / context.run_id
    try:
        write_json(staging / CONTEXT, context.model_dump(mode="json"))
        _papermill(context, template, staging, out)
        draft = _draft(staging)
        _scrub(staging / "run.ipynb", template)
        path = publish_staged(staging, runs.complete(context, draft, time.perf_counter() - began))
        for folder in (failed, unfinished_folder(context.run_id)):
            shutil.rmtree(folder, ignore_errors=True)
        return path
    except KeyboardInterrupt:
        raise Interrupted(f"{context.run_id} was interrupted: nothing was published.") from None
    except Exception as error:
        ename, evalue, cell, failure = _explain(error, context, failed / "run.ipynb")
        if told := processes.failure(staging):
            evalue, failure = told, FailedRun(f"{context.run_id} failed: {told}")
        details = {"run_id": context.run_id, "study": context.study, "name": context.name, "command": context.command}
        details |= {"ename": ename, "evalue": evalue, "cell": cell, "sentence": str(failure)}
        _keep(staging, failed, details)
        raise failure from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _papermill(context: Context, template: Path, staging: Path, out: TextIO) -> None:
    import papermill

    folder = kernel.socket_folder()
    (staging / SOCKETS).symlink_to(folder)
    env = {
        "LOWBIT_STAGING": str(staging),
        "LOWBIT_HOME": str(project.root()),
        "LOWBIT_RUNS": str(project.runs_dir()),
        "TMPDIR": str(folder),  # what a killed kernel leaves goes with the folder
        **settings(),
        **processes.environment(context.stage),
    }
    try:
        papermill.execute_notebook(
            _literal(template),
            _literal(staging / "run.ipynb"),
            context.parameters,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            stdout_file=out,
            stderr_file=out,
            kernel_manager_class=kernel.manager(folder, env),
            shutdown_kernel="immediate",
        )
    finally:
        (staging / SOCKETS).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def settings() -> dict[str, str]:
    """What every kernel's environment says about how to compute."""
    return {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_MIXED_PRECISION": "no",  # a trainer reads it, so the same run id could mean another precision
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
    }


def _literal(path: Path) -> str:
    """A path for papermill, which fills parameters into the braces of a path."""
    return str(path).replace("{", "{{").replace("}", "}}")


class _Unfinished(Exception):
    """The notebook ended, and is no run."""


def _draft(staging: Path) -> Draft:
    """What the notebook recorded; every code cell must have run (`sys.exit(0)` ends a notebook without an error)."""
    for number, cell in enumerate(params.code_cells(staging / "run.ipynb"), start=1):
        if params.source(cell).strip() and cell["execution_count"] is None:
            raise _Unfinished(f"it stopped before its code cell {number}")
    if not (staging / DRAFT).is_file():
        raise _Unfinished("it ended without run.finish()")
    return Draft.model_validate_json((staging / DRAFT).read_text())


def _scrub(notebook: Path, template: Path) -> None:
    """Drop this machine's paths from the metadata that papermill adds."""
    content = json.loads(notebook.read_text())
    content["metadata"]["papermill"] |= {"input_path": template.name, "output_path": notebook.name}
    write_text(notebook, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _explain(error: Exception, context: Context, notebook: Path) -> tuple[str, str, int | None, UserError]:
    """(exception, message, cell, the sentence for the user) of a failure."""
    cell = getattr(error, "exec_count", None)
    ename = getattr(error, "ename", type(error).__name__)
    evalue = getattr(error, "evalue", str(error))
    where = f"cell {cell} of {runs.shown(notebook)}" if cell else runs.shown(notebook)
    if isinstance(error, UserError):
        return ename, evalue, cell, error
    if ename == DiskFull.__name__:
        return ename, evalue, cell, DiskFull(evalue)
    if says_disk_full(evalue):
        message = f"{context.run_id} failed: no space is left on the disk ({where}); make space and run it again."
        return ename, evalue, cell, DiskFull(message)
    if getattr(error, "traceback", None) == [evalue]:  # a UserError of the notebook: see errors.py
        return ename, evalue, cell, UserError(evalue)
    if isinstance(error, _Unfinished):
        message = f"{context.run_id} failed: {evalue} ({where})."
    elif ename == "OutOfMemoryError":
        from helpers import estimate  # which plans studies, and is needed here alone

        advice = estimate.after_the_fact(context.stage, context.parameters, evalue)
        message = f"{context.run_id} failed ({where}): {advice}."
    elif ename == "DeadKernelError":
        message = f"{context.run_id} failed: its kernel died, most likely for want of memory ({where})."
    else:
        lines = evalue.strip().splitlines()
        message = f"{context.run_id} failed in {where}: {ename}: {lines[0][:300] if lines else 'no message'}"
    return ename, evalue, cell, FailedRun(message)


def _keep(staging: Path, failed: Path, details: dict[str, Any]) -> None:
    """Keep the notebook of a failed run. On a full disk this may fail too, and must not hide the reason."""
    try:
        shutil.rmtree(failed, ignore_errors=True)
        failed.mkdir(parents=True)
        for name in ("run.ipynb", "metrics.jsonl"):
            if (staging / name).exists():
                os.rename(staging / name, failed / name)
        write_json(failed / "error.json", details)
    except OSError:
        shutil.rmtree(failed, ignore_errors=True)
