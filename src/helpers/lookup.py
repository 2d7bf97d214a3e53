"""Find a run, and say what a parent is.

A parent is written as a run id, `study/name`, a shipped name, a folder or a hub id. Whichever is used, `load_parent`
gives the same id, so the id of a run does not depend on how its parents are spelled.
"""

import difflib
import fnmatch
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from helpers import project
from helpers.records import LARGE, Result, RunError, is_complete, read, sha256

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class RunRef:
    """A parent: `id` is what it contributes to a run id, `ref` how to name it to `load_parent` again."""

    id: str
    ref: str
    path: Path | None = None
    result: Result | None = None

    @property
    def model_path(self) -> str:
        """What to hand to `models.load`: a folder, or a hub id."""
        if self.path is None:
            return self.ref
        if self.result is None:
            return str(self.path)
        if not (self.path / "model").is_dir():
            hint = f" Make it with `{self.result.command}`." if self.result.model else ""
            raise RunError(f"The run {self.id} has no model in {shown(self.path)}.{hint}")
        return str(self.path / "model")

    @property
    def label(self) -> str:
        """The most readable way to write it: `study/name` where that leads here."""
        if self.result and self.result.name:
            named = f"{self.result.study}/{self.result.name}"
            if find(named) == self.path:
                return named
        return self.ref


def find(ref: str) -> Path | None:
    """The folder of a run, by run id, `study/name`, shipped name or path; local ones before published and shipped."""
    if planned := planned_id(ref):
        return find(planned)
    if re.fullmatch(r"\w[\w.-]*", ref):
        local = sorted(path.parent for path in project.runs_dir().glob(f"[!.]*/*/{ref}/result.json"))
        if local:
            return next(filter(is_complete, local), local[0])
        if (project.SHIPPED / ref / "result.json").is_file():
            return project.SHIPPED / ref
        for path in (*_published("*/*"), *sorted(project.SHIPPED.glob("*/result.json"))):
            if json.loads(path.read_text()).get("run_id") == ref:
                return path.parent
    elif HUB_ID.fullmatch(ref) and (published := _published(ref)):
        return published[0].parent
    path = Path(ref).expanduser()
    for folder in (path, path.parent) if path.name == "model" else (path,):
        if (folder / "result.json").is_file():
            return folder.resolve()
    return None


def planned_id(ref: str) -> str | None:
    """The run id that the study of `study/name` gives to this name, run or not."""
    study, _, name = ref.partition("/")
    plan = project.runs_dir() / study / "plan.json"
    if not (name and re.fullmatch(r"\w[\w.-]*", study) and plan.is_file()):
        return None
    return next((job["run_id"] for job in json.loads(plan.read_text())["jobs"] if job["name"] == name), None)


def done(run_id: str) -> Path | None:
    """The folder of a complete local run, in whatever study it was made."""
    return next((p for p in sorted(project.runs_dir().glob(f"[!.]*/*/{run_id}")) if is_complete(p)), None)


def load_parent(ref: str, what: str = "parent") -> RunRef:
    """Find a parent; RunError if it is unknown, not run yet, failed, or changed since. `what` it is called in sentences."""
    if folder := find(ref):
        result = read(folder)
        refuse_changed(folder, result, f"The {what} {ref}")
        if folder.parent == project.SHIPPED:
            return RunRef(result.run_id, folder.name, folder, result)
        return RunRef(result.run_id, result.run_id if find(result.run_id) == folder else str(folder), folder, result)
    folder = Path(ref).expanduser()
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")):
            raise RunError(f"The folder {ref} cannot be used: it holds neither a result.json nor safetensors files.")
        files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json", ".jinja", ".txt"))
        digest = hashlib.sha256("".join(f"{file.name} {sha256(file)}\n" for file in files).encode()).hexdigest()
        return RunRef(f"folder:{digest}", str(folder.resolve()), folder.resolve())
    run_id = planned_id(ref) or ref
    if "/" not in run_id and (failed := project.runs_dir() / ".failed" / run_id / "error.json").is_file():
        raise RunError(
            f"The {what} {ref} failed: {json.loads(failed.read_text())['sentence']} See {shown(failed.parent)}."
        )
    study = ref.partition("/")[0]
    if planned_id(ref):
        raise RunError(f"The {what} {ref} has not been run yet: `lowbit study {study}` makes it.")
    if HUB_ID.fullmatch(ref) and study not in _study_names():
        return RunRef(ref, ref)
    near = difflib.get_close_matches(ref, known(), n=3)
    hint = f" (is it {' or '.join(near)}?)" if near else ""
    raise RunError(
        f"The {what} {ref} is unknown{hint}: give a run id, study/name, a shipped name, a folder or a hub id."
    )


def refuse_changed(folder: Path, result: Result, what: str) -> None:
    """Raise `RunError` where a file of the run is not the one that its result lists: what it says would not be true of it.

    Published runs lack files, large ones would take seconds, and the notebook changes when someone looks at it in Jupyter.
    """
    for name, digest in result.files.items():
        file = folder / name
        if name != "run.ipynb" and file.is_file() and file.stat().st_size <= LARGE and sha256(file) != digest:
            raise RunError(
                f"{what} has been changed since it was made ({shown(file)}): make it again with `{result.command}`."
            )


def expand(ref: str) -> list[str]:
    """A parent as a list; one with a `*`, such as `micro/eval-*`, stands for all runs whose names match."""
    if "*" not in ref:
        return [ref]
    found = fnmatch.filter(known(), ref)
    if not found:
        raise RunError(f"No run matches {ref}: give names such as micro/eval-base-s, or run the study first.")
    return found


def known() -> list[str]:
    """Every name by which a run can be found."""
    local = [path.parent.name for path in project.runs_dir().glob("[!.]*/*/*/result.json")]
    plans = sorted(project.runs_dir().glob("[!.]*/plan.json"))
    planned = [f"{path.parent.name}/{job['name']}" for path in plans for job in json.loads(path.read_text())["jobs"]]
    published = [f"{path.parts[-3]}/{path.parts[-2]}" for path in _published("*/*")]
    shipped = [path.parent.name for path in project.SHIPPED.glob("*/result.json")]
    return sorted({*local, *planned, *published, *shipped})


def _published(pattern: str) -> list[Path]:
    return sorted((project.root() / "book" / "runs").glob(f"{pattern}/result.json"))


def _study_names() -> set[str]:
    book = project.root() / "book" / "runs"
    return {*project.studies(), *(path.parent.name for path in project.runs_dir().glob("[!.]*/plan.json")), "local"} | {
        path.name for path in (book.iterdir() if book.is_dir() else ())
    }


def shown(path: Path) -> str:
    """A path for people: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
