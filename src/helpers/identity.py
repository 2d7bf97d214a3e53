"""What makes two runs the same run.

A run id is `<stage>-<what differs from the defaults>-<10 hex digits>`, for example `ptq-bits3-gptq-0a1b2c3d4e`. The
digits hash the stage, every parameter, what each parent is, and the code: the template's code cells and the helper
modules that they import, directly or through others. Comments and blank lines do not count. Neither do the modules that
start, record and schedule runs, because they cannot change a metric.
"""

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from helpers import params
from helpers.project import PACKAGE, template

MACHINERY = {
    *("errors", "project", "params", "values", "records", "identity", "lookup", "staging", "runs", "kernel", "execute"),
    *("processes", "warm", "study", "smoke", "estimate", "schedule", "checks", "integrity", "cli"),
    *("report.figures", "report.style"),  # the pictures beside a run; what report.pareto draws is a run's result
}
SINGLE = ("parent", "teacher")  # parameters that name one other run
PARENTS = (*SINGLE, "parents")


def run_id(stage: str, parameters: dict[str, Any], parents: list[str], code: str) -> str:
    """The id of a run; `parents` are the ids of its parents."""
    digits = digest(stage, parameters, parents, code)
    slug = _slug(params.changed(params.template(template(stage)), parameters))
    return "-".join(part for part in (stage, slug, digits) if part)


def digest(stage: str, parameters: dict[str, Any], parents: list[str], code: str) -> str:
    """The end of a run id: what the run is made from."""
    own = {name: value for name, value in parameters.items() if name not in PARENTS}
    return _hash(json.dumps([stage, own, parents, code], sort_keys=True))[:10]


def _slug(values: dict[str, Any], limit: int = 32) -> str:
    words = []
    for name, value in values.items():
        if name in PARENTS:
            continue
        items = value if isinstance(value, list) else [value]
        label = "" if items and isinstance(items[0], str) else name  # gptq, but bits3
        word = re.sub(r"[^a-z0-9.]+", "-", (label + "-".join(map(str, items))).lower()).strip("-.")
        if word and len("-".join([*words, word])) <= limit:
            words.append(word)
    return "-".join(words)


def code_version(template_path: Path) -> str:
    """Hash of all code that a template runs, but for the machinery and third-party packages."""
    cells = cells_of(template_path)
    modules: dict[str, str] = {}
    waiting = sorted(set().union(*(_imports(cell, "") for cell in cells))) if cells else []
    while waiting:
        module = waiting.pop()
        if module in modules or module in MACHINERY:
            continue
        text = _file(module).read_text()
        modules[module] = normal(text)
        package = module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
        waiting += sorted(_imports(text, package))
    return _hash(json.dumps([cells, sorted(modules.items())]))[:16]


def cells_of(template_path: Path) -> list[str]:
    """The code cells that count: all but the parameters, which are hashed by value."""
    cells = params.code_cells(template_path)
    return [normal(params.source(cell)) for cell in cells if "parameters" not in cell["metadata"].get("tags", [])]


def normal(code: str) -> str:
    """Code without comment lines and blank lines."""
    lines = [line.rstrip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def combine(code: str, edits: list[str]) -> str:
    """The code version of a session whose cells were edited."""
    return _hash(json.dumps([code, edits]))[:16] if edits else code


def _imports(code: str, package: str) -> set[str]:
    """Modules below `helpers` that some code imports: {"models", "quant.rtn"}; `package` is where the code lives."""
    code = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in code.splitlines())
    found: set[str] = set()
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a cell in another language, or one that fails when it runs
        return found
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["helpers", *filter(None, package.split("."))]
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith("helpers."):
                parts = name.split(".")[1:]
                found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return {module for module in found if _file(module)}


def _file(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
