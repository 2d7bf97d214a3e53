"""Are the runs what they say they are? `lowbit check --runs` asks this of every local, published and shipped run.

Of each: its result.json follows the schema; its files are there and have the hashes that it lists (of a published run, those that
the book keeps); its id is the hash of its own parameters, parents and code; its parents are there, or come from outside
(a hub, a package, a folder); its notebook, where it has one, ran to its end. Weights larger than `records.LARGE` are looked
for, not hashed. Nobody can forge a run by editing it; whoever writes a new one with matching hashes is trusted.
"""

from collections.abc import Iterator
from pathlib import Path

from helpers import identity, project, records
from helpers.errors import UserError
from helpers.records import Result, RunError
from helpers.report import clean

OUTSIDE = ("folder:", "pypi/")


def broken() -> tuple[int, list[str]]:
    """(how many runs there are, one sentence for each thing that is wrong with one)."""
    folders = [*_folders()]
    results: dict[Path, Result] = {}
    found = []
    for folder, whole in folders:
        try:
            results[folder] = records.read(folder)
        except RunError as error:
            found.append(str(error))
        else:
            found += _files(folder, results[folder], whole)
    known = {result.run_id for result in results.values()}
    for folder, result in results.items():
        found += _identity(folder, result)
        for parent in result.parents:
            if parent not in known and "/" not in parent and not parent.startswith(OUTSIDE):
                found.append(f"{_where(folder)} was made from {parent}, which is not here.")
    return len(folders), found


def _folders() -> Iterator[tuple[Path, bool]]:
    """(folder of a run, whether all its files must be there)."""
    for path in sorted(project.runs_dir().glob("[!.]*/*/*/result.json")):
        yield path.parent, True
    for path in sorted((project.root() / "book" / "runs").glob("*/*/result.json")):
        yield path.parent, False
    for path in sorted(project.SHIPPED.glob("*/result.json")):
        yield path.parent, True


def _files(folder: Path, result: Result, whole: bool) -> Iterator[str]:
    where, again = _where(folder), f"make it again with `{result.command}`"
    lost = [name for name in result.files if not (folder / name).is_file()]
    if lost and whole:
        yield f"{where} lacks {len(lost)} of its {len(result.files)} files, {lost[0]} first: {again}."
    for name, digest in result.files.items():
        file = folder / name
        if name not in lost and file.stat().st_size <= records.LARGE and records.sha256(file) != digest:
            yield f"{where} is not what it was: {name} has been changed; {again}."
    page = folder / "run.ipynb" if whole else folder.with_name(f"{folder.name}.ipynb")
    if page.is_file() and (reason := _unproven(page)):
        yield f"{where} has a notebook that proves nothing: {reason}."


def _unproven(page: Path) -> str | None:
    try:
        return clean.problem(clean.read(page))
    except UserError:
        return "it is no readable notebook"


def _identity(folder: Path, result: Result) -> Iterator[str]:
    where = _where(folder)
    if not result.run_id.endswith(identity.digest(result.stage, result.parameters, result.parents, result.code)):
        yield f"{where} is not the run {result.run_id} that it says it is: its parameters, parents or code were edited."
    if project.runs_dir() in folder.parents and folder.name != result.run_id:
        yield f"{where} holds the run {result.run_id}: the folder was renamed."


def _where(folder: Path) -> str:
    for root in (project.runs_dir().parent, project.root(), project.PACKAGE):
        if folder.is_relative_to(root):
            return str(folder.relative_to(root))
    return str(folder)
