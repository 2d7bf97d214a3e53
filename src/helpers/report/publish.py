"""Copy checked runs into the book.

A published run is `book/runs/<study>/<name>/{result.json, metrics.jsonl}` and the executed notebook, cleaned by `clean.py`,
`book/runs/<study>/<name>.ipynb`; one that its study gives no page is its result.json alone. Models are never published: whoever
wants one runs the command in its result.json. Then results.csv, speed.json and the figures are made again from all published runs.

A call publishes everything or nothing: all of it is made in a copy under `_build/`, and two renames put that in place.
"""

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pandas as pd
from filelock import FileLock

from helpers import project, records, runs
from helpers.errors import UserError
from helpers.records import Result
from helpers.report import clean, findings, numbers, speed, table, verdicts

COPIED = ("result.json", "metrics.jsonl")
SHOWN = ("run.ipynb", "metrics.jsonl")  # must be there, unchanged


class PublishError(UserError):
    """A run that must not be published."""


@dataclass(frozen=True)
class Candidate:
    """A run, the study and name under which the book shows it, and whether it has a page there."""

    path: Path
    study: str
    name: str
    result: Result
    page: bool


def publish(refs: list[str]) -> list[str]:
    """Publish runs (ids, `micro/grpo-s`, whole studies such as `micro`); give "study/name" of each.

    Errors: `PublishError` or `RunError` for the first run that is unknown, incomplete, changed since it finished, or
    not fit to be shown; the book is then as it was.
    """
    if not refs:
        raise PublishError("Nothing to publish: name runs, such as micro/grpo-s, or a whole study, such as micro.")
    chosen, whole = [], set()
    for ref in refs:
        if plan := _plan(ref):
            whole.add(ref)
        chosen += [_candidate(name, *entry) for name, *entry in plan] if plan else [_candidate(ref, *_one(ref))]
    checked = [(candidate, _checked_notebook(candidate)) for candidate in chosen]

    book, build = project.root() / "book", project.root() / "_build"
    build.mkdir(exist_ok=True)
    with FileLock(build / ".publish.lock"), tempfile.TemporaryDirectory(prefix=".publish-", dir=build) as work:
        new = Path(work) / "new"
        for part in ("runs", "results"):
            if (book / part).is_dir():
                shutil.copytree(book / part, new / part)
            (new / part).mkdir(parents=True, exist_ok=True)
        for study in whole:  # what a study no longer lists leaves the book with it
            shutil.rmtree(new / "runs" / study, ignore_errors=True)
        for candidate, notebook in checked:
            _copy(candidate, notebook, new / "runs")
        write_results(published(new / "runs"), new / "results")
        _swap(new, book, Path(work) / "old")
    return [f"{candidate.study}/{candidate.name}" for candidate in chosen]


def published(folder: Path | None = None) -> dict[str, Result]:
    """All published runs: "study/name" -> result, in the order of their names; study and name are those of the book."""
    folder = folder or project.root() / "book" / "runs"
    found = {}
    for path in sorted(folder.glob("*/*/result.json")):
        study, name = path.parts[-3:-1]
        found[f"{study}/{name}"] = records.read(path).model_copy(update={"study": study, "name": name})
    return found


def write_results(results: dict[str, Result], folder: Path) -> None:
    """Write results.csv and speed.json, and the figures where there is something to draw."""
    df = table.rows(list(results.values()))
    records.write_text(folder / "results.csv", as_csv(table.beside(df)))
    (folder / "verdicts.csv").unlink(missing_ok=True)
    if verdicts.STUDY in set(df["study"]):
        found = findings.all_verdicts(df, list(results.values()))
        records.write_text(folder / "verdicts.csv", as_csv(found))
    for old in {*folder.glob("*.svg"), *folder.glob("pareto*"), *folder.glob("speed-*")}:
        old.unlink()
    if not numbers.headline(df).empty:
        draw(df[df["study"] == numbers.STUDY], folder / "pareto")
    draw_curves(list(results.values()), folder)
    draw_speed(df, speed.write(list(results.values()), folder), folder)


def as_csv(df: pd.DataFrame) -> str:
    """A table as it is published: six digits, which is more than any interval here knows."""
    return df.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def draw(df: pd.DataFrame, stem: Path) -> None:
    """Write the Pareto figure and its CSV; nothing opens a window, whatever back end the user has."""
    import matplotlib  # a second to import, and most commands need none of it

    matplotlib.use("Agg")
    from helpers.report.pareto import pareto

    pareto(df, stem)


def draw_curves(results: list[Result], folder: Path) -> None:
    """Write the figures of training curves, each with its CSV, where there are runs for them."""
    import matplotlib

    matplotlib.use("Agg")
    from helpers.report import curves

    curves.write(results, folder)


def draw_speed(df: pd.DataFrame, rows: list[speed.Row], folder: Path) -> None:
    """Write the figures of the speed chapter, each with its CSV, where there are rows for them."""
    import matplotlib

    matplotlib.use("Agg")
    from helpers.report import pareto_speed, speed_figures

    speed_figures.write(rows, folder)
    pareto_speed.write(df, rows, folder)


def _plan(ref: str) -> list[tuple[str, Path | None, str, str, bool]]:
    """The runs of a whole study, as its last `lowbit study` planned them; [] where `ref` is not a study."""
    path = project.runs_dir() / ref / "plan.json"
    if not re.fullmatch(r"\w[\w.-]*", ref) or not path.is_file():
        return []
    jobs = json.loads(path.read_text())["jobs"]
    return [(f"{ref}/{job['name']}", _folder(job["run_id"]), ref, job["name"], job.get("page", True)) for job in jobs]


def _folder(run_id: str) -> Path | None:
    """Where a finished run lies, also where its weights were left on the machine that made it."""
    records_of = sorted(project.runs_dir().glob(f"[!.]*/*/{run_id}/result.json"))
    return runs.done(run_id) or next((path.parent for path in records_of), None)


def _one(ref: str) -> tuple[Path | None, str, str, bool]:
    """A single run; one that is named by its study keeps that name, and has a page if the study gives it one."""
    planned = next((entry for name, *entry in _plan(ref.partition("/")[0]) if name == ref), None)
    path = planned[0] if planned else runs.find(ref)
    if path is None and not planned:
        raise PublishError(
            f"{ref} is not a run: name a run id, a run such as micro/grpo-s, or a study that has been run."
        )
    if path and project.SHIPPED in path.parents:
        raise PublishError(f"{ref} ships with the package and the book shows it already: it needs no publishing.")
    if path and project.root() / "book" in path.parents:
        raise PublishError(f"{ref} is published already, and there is no local run of it to publish again.")
    if planned:
        return tuple(planned)
    result = records.read(path)
    return path, result.study, result.name or result.run_id, True


def _candidate(ref: str, path: Path | None, study: str, name: str, page: bool = True) -> Candidate:
    if path is None:
        raise PublishError(f"{ref} has no complete result yet: `lowbit study {study}` makes it.")
    return Candidate(path, study, name, records.read(path), page)


def _checked_notebook(candidate: Candidate) -> nbformat.NotebookNode | None:
    """The cleaned notebook of a run that passes every check; None where it has no page."""
    path, result, ref = candidate.path, candidate.result, f"{candidate.study}/{candidate.name}"
    for name, expected in result.files.items():
        if not (path / name).is_file():
            if name in SHOWN and candidate.page:
                raise PublishError(f"{ref} is incomplete: {name} is missing from {path}.")
            continue  # weights and replies may have stayed on the machine that made them; the book shows neither
        if records.sha256(path / name) != expected:
            raise PublishError(
                f"{ref} was changed after it finished: {name} differs from what its result.json records."
            )
    if result.dirty:
        raise PublishError(
            f"{ref} was made with uncommitted changes: commit them, delete {runs.shown(path)}, and run it again."
        )
    if "run.ipynb" not in result.files:
        raise PublishError(f"{ref} has no executed notebook: run it with `lowbit run` or `lowbit study`, not by hand.")
    text = (path / "result.json").read_text()
    for place in clean.machine_paths():
        if f"{place}/" in text:
            raise PublishError(
                f"{ref} names {place}, which only this machine has: give its parent as a run, not as a folder."
            )
    for name in COPIED if candidate.page else COPIED[:1]:
        if (path / name).is_file() and (told := clean.secret((path / name).read_text())):
            raise PublishError(f"{ref} cannot be published: its {name} holds {told}.")
    if not candidate.page:
        return None
    notebook = clean.read(path / "run.ipynb")
    if told := clean.secret(nbformat.writes(notebook)):
        raise PublishError(f"{ref} cannot be published: its notebook holds {told}.")
    if reason := clean.problem(notebook):
        raise PublishError(f"{ref} cannot be published: {reason}.")
    return clean.clean(notebook)


def _copy(candidate: Candidate, notebook: nbformat.NotebookNode | None, folder: Path) -> None:
    target = folder / candidate.study / candidate.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    page = target.with_name(f"{target.name}.ipynb")
    page.unlink(missing_ok=True)
    for name in COPIED if notebook else COPIED[:1]:
        if (candidate.path / name).is_file():
            shutil.copyfile(candidate.path / name, target / name)
    if notebook:
        nbformat.write(notebook, page)


def _swap(new: Path, book: Path, old: Path) -> None:
    """Put new/runs and new/results in the place of the book's, both or neither."""
    old.mkdir()
    done: list[str] = []
    try:
        for part in ("runs", "results"):
            if (book / part).exists():
                os.rename(book / part, old / part)
            done.append(part)
            os.rename(new / part, book / part)
    except BaseException:
        for part in done:
            shutil.rmtree(book / part, ignore_errors=True)
            if (old / part).exists():
                os.rename(old / part, book / part)
        raise
