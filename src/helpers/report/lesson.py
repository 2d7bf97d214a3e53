"""A stage template as a lesson: its copy for class, its buttons, and its prose on the pages of executed copies.

The **copy for class** (`notebooks/class/`, made by `lowbit lesson`) has the template's headings and its code, no prose, no
solutions. Above the parameters stands one cell that installs the project where it is missing, on Colab say, and does
nothing where it is there. What runs before `runs.begin()` is no part of a run, so a copy makes the run that its template
makes, with the same id.

**Prose** is no part of a run either. A page shows an executed notebook's own code and outputs with the text of today's template
around them, as long as the template has the same code cells, by their ids: so exercises fit the commands that readers have.

The repository is `repository-code` of CITATION.cff. While there is none, nothing can be opened from it and no button is shown.
"""

from pathlib import Path

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers import project
from helpers.errors import UserError
from helpers.report import clean

FOLDER = "notebooks/class"
BRANCH = "main"
COLAB, BINDER = "https://colab.research.google.com/github", "https://mybinder.org/v2/gh"
INSTALL = """\
# Installs the project where it is missing; does nothing where it is there.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("helpers") is None:
    source = "{repository}"
    subprocess.run(
        ["git", "clone", "--depth", "1", source, "low-bit"], check=True
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    packages = "low-bit/notebooks/class/requirements.txt"
    subprocess.run([*pip, "-r", packages], check=True)
    sys.path.insert(0, "low-bit/src")
"""
UNKNOWN = """\
# Says where the project is missing; does nothing where it is there.
import importlib.util

if importlib.util.find_spec("helpers") is None:
    raise ModuleNotFoundError("Install the project: see its README.")
"""


def repository() -> str:
    """The address of the project's repository on GitHub, or "" where CITATION.cff names none.

    Errors: UserError where it is not `https://github.com/OWNER/NAME`: Colab and Binder are asked for nothing else.
    """
    citation = yaml.safe_load((project.root() / "CITATION.cff").read_text())
    found = citation.get("repository-code", "").rstrip("/").removesuffix(".git")
    if found and (not found.startswith("https://github.com/") or found.count("/") != 4):
        raise UserError(f"repository-code of CITATION.cff is {found}: it must be https://github.com/OWNER/NAME.")
    return found


def for_class(template: Path) -> nbformat.NotebookNode:
    """The headings and the code of a template, below a cell that installs the project where it is missing."""
    found = clean.read(template)
    source = repository()
    install = INSTALL.format(repository=source) if source else UNKNOWN
    first = new_code_cell(install.rstrip(), id="install")
    cells = []
    for cell in found.cells:
        if cell.cell_type == "code":
            cells.append(new_code_cell(cell.source, id=cell.id, metadata=cell.metadata))
        elif lines := [line for line in _outside_fences(cell.source) if line.startswith("#")]:
            cells.append(new_markdown_cell("\n\n".join(lines), id=cell.id))
    return new_notebook(cells=[cells[0], first, *cells[1:]], metadata=found.metadata)


def _outside_fences(text: str) -> list[str]:
    kept, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            kept.append(line)
    return kept


def write() -> list[Path]:
    """Write the copies for class of all stages; gives their paths."""
    folder = project.root() / FOLDER
    folder.mkdir(exist_ok=True)
    paths = []
    for template in project.templates().values():
        paths.append(folder / template.name)
        text = nbformat.writes(for_class(template))
        paths[-1].write_text(text if text.endswith("\n") else text + "\n")
    return paths


def with_prose(executed: nbformat.NotebookNode, template: Path) -> nbformat.NotebookNode:
    """`executed` with the text cells of `template`, in place; unchanged where the two have other code cells."""
    now = clean.read(template)
    ran = {cell.id: cell for cell in executed.cells if cell.cell_type == "code" and _counts(cell)}
    if list(ran) != [cell.id for cell in now.cells if cell.cell_type == "code" and _counts(cell)]:
        return executed
    parameters = [cell for cell in executed.cells if cell.cell_type == "code" and not _counts(cell)]
    cells = []
    for cell in now.cells:
        if cell.cell_type == "markdown":
            cells.append(cell)
        else:
            cells += [ran[cell.id]] if _counts(cell) else parameters
    executed.cells = cells
    return executed


def _counts(cell: nbformat.NotebookNode) -> bool:
    """Whether a code cell is more than parameters, declared or injected, also after `clean` gave them other tags."""
    return not {"parameters", "injected-parameters", "remove-cell", "hide-input"} & set(cell.metadata.get("tags", []))


def buttons(stage: str) -> str:
    """Where to take a stage's lesson from: its copy for class, and Colab and Binder where the repository is known."""
    name = project.template(stage).name
    found = [f"{{download}}`the copy for class </class/{name}>` (headings and code alone)"]
    if source := repository():
        slug = source.removeprefix("https://github.com/")
        found.append(f"[open it in Colab]({COLAB}/{slug}/blob/{BRANCH}/{FOLDER}/{name})")
        found.append(f"[open it in Binder]({BINDER}/{slug}/{BRANCH}?labpath={FOLDER}/{name})")
    return f"Teach it: {', '.join(found)}."
