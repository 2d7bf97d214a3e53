"""Make an executed notebook fit to be shown: on any machine, years later, in a book that loads nothing from elsewhere.

- `parameters` becomes `remove-cell` and `injected-parameters` becomes `hide-input`: the values show on request, the
  defaults not at all.
- What papermill notes about time and place goes; so do widget outputs, which need scripts from another host.
- A picture that a cell shows twice is shown once.
- Paths of this machine become relative ones, and a carriage return leaves only the last state of a progress line.

A notebook with an error, with an output that loads from another host or could run code there, or with a secret, is refused, and
never repaired.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat

from helpers import project
from helpers.errors import UserError

RETAG = {"parameters": "remove-cell", "injected-parameters": "hide-input"}
TRANSIENT = ("papermill", "execution", "widgets", "ExecuteTime")  # cell metadata about one moment
WIDGETS = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
LOADS = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(\s*["']?https?:""",
    re.IGNORECASE,
)
ACTIVE = re.compile(  # what could run in a reader's browser
    r"<\s*(?:script|iframe|object|embed|form|meta|base)\b|<[^>]*\son\w+\s*=|\bjavascript:", re.IGNORECASE
)
# Tokens as they are commonly written, and the names of variables that hold one
SECRET = re.compile(r"\b(?:hf_\w{30,}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{36,}|sk-[\w-]{32,})")
SECRETIVE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
SHOWABLE = ("text/plain", "text/html", "image/png", "image/jpeg", "image/svg+xml")
NOISE = (  # of tqdm without widgets, of torchao's docstrings, of bitsandbytes on a CPU
    *("IProgress not found", "SyntaxWarning: invalid escape", "Failed to load CPU gemm_4bit_forward"),
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook. Errors: UserError where it is not one."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a readable notebook: {(str(error) or repr(error)).splitlines()[0]}.") from None


def problem(notebook: nbformat.NotebookNode) -> str | None:
    """Say why this notebook must not be shown, or None where it may be."""
    for number, cell in enumerate(notebook.cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"cell {number} ended with {output.ename}: {output.evalue}"
            data = {kind: value for kind, value in output.get("data", {}).items() if kind not in WIDGETS}
            if odd := [kind for kind in data if kind not in SHOWABLE]:
                return f"an output of cell {number} is {odd[0]}, and a page shows text, tables and pictures"
            for text in (_text(data.get(kind, "")) for kind in ("text/html", "image/svg+xml")):
                if LOADS.search(text):
                    return f"an output of cell {number} loads something from another host"
                if ACTIVE.search(text):
                    return f"an output of cell {number} would run code in the reader's browser"
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            return f"cell {number} was never executed"
    return None


def secret(text: str) -> str | None:
    """What in a text is a secret of whoever runs this: the name of an environment variable, or how a token begins."""
    held = {name: value for name, value in os.environ.items() if SECRETIVE.search(name) and len(value) >= 8}
    if name := next((name for name, value in held.items() if value in text), None):
        return f"the value of {name}"
    found = SECRET.search(text)
    return f"what looks like a token, {found[0][:6]}..." if found else None


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Clean `notebook` in place and give it back. Cleaning twice changes nothing more."""
    notebook.metadata = nbformat.from_dict(METADATA)
    paths = machine_paths()
    for cell in notebook.cells:
        kept = {key: value for key, value in cell.metadata.items() if key not in TRANSIENT}
        kept["tags"] = [RETAG.get(tag, tag) for tag in kept.get("tags", [])]
        cell.metadata = nbformat.from_dict({key: value for key, value in kept.items() if value != []})
        cell.source = _shorten(cell.source, paths)
        if cell.cell_type == "code":
            cell.outputs = _once(output for output in cell.outputs if not _is_widget(output) and not _is_noise(output))
            for output in cell.outputs:
                _clean_output(output, paths)
    return notebook


def _once(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Drop a picture that its cell shows already: a figure that is both open and returned is drawn twice."""
    kept, seen = [], set()
    for output in outputs:
        picture = output.get("data", {}).get("image/png")
        if picture is None or picture not in seen:
            kept.append(output)
            seen.add(picture)
    return kept


def machine_paths() -> dict[str, str]:
    """Folders of this machine and what stands for them, longest first so that the most specific one wins."""
    here = {
        str(project.runs_dir()): "runs",
        str(project.root()): ".",
        sys.prefix: "python",
        str(Path.home()): "~",
    }
    return {path: here[path] for path in sorted(here, key=len, reverse=True) if path not in ("/", "/usr")}


def _is_widget(output: nbformat.NotebookNode) -> bool:
    return any(kind in output.get("data", {}) for kind in WIDGETS)


def _is_noise(output: nbformat.NotebookNode) -> bool:
    """What a package says of itself when it is first imported says nothing about the run."""
    return output.get("name") == "stderr" and any(noise in _text(output.text) for noise in NOISE)


def _clean_output(output: nbformat.NotebookNode, paths: dict[str, str]) -> None:
    output.pop("transient", None)
    if output.output_type == "stream":
        lines = _text(output.text).split("\n")
        output.text = _shorten("\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines), paths)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") or kind == "image/svg+xml":
            output.data[kind] = _shorten(_text(value), paths)


def _text(value: str | list[str]) -> str:
    return "".join(value)


def _shorten(text: str, paths: dict[str, str]) -> str:
    for path, short in paths.items():
        text = text.replace(f"{path}/", "" if short == "." else f"{short}/")
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", short, text)
    return text
