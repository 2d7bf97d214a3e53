"""What `lowbit check` looks at: versions, stage templates, studies and disk space."""

import json
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from helpers import params, project
from helpers.errors import UserError
from helpers.records import ensure_space
from helpers.study import load, plan


def problems() -> list[str]:
    """One sentence for each thing that is wrong."""
    found = [*_versions(project.root() / "requirements.lock")]
    for stage, path in project.templates().items():
        found += _template(stage, path)
    if not project.templates():
        found.append(f"{project.root()}/notebooks holds no stage templates.")
    if not found:  # a study cannot be planned from broken templates
        for path in project.studies().values():
            try:
                plan(load(path))
            except UserError as error:
                found.append(str(error))
    try:
        ensure_space(project.runs_dir())
    except UserError as error:
        found.append(str(error))
    return found


def _versions(lock: Path) -> list[str]:
    if not lock.is_file():
        return [f"{lock} is missing, so versions cannot be checked."]
    found = []
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        found.append(f"Python is {sys.version.split()[0]}, and the project needs 3.11 or 3.12.")
    for line in lock.read_text().splitlines():
        text = line.split(" --hash")[0].split(" #")[0].strip(" \\")
        if not text or text.startswith(("#", "-")):
            continue
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            found.append(f"{lock.name} has a line that is no requirement: {text}.")
            continue
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            installed = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found.append(f"{wanted.name} is not installed, and {lock.name} has {wanted.specifier}.")
            continue
        # 2.13.0+cpu and 2.13.0+cu130 are the same release built for other machines
        if not wanted.specifier.contains(Version(installed).public, prereleases=True):
            found.append(f"{wanted.name} is {installed}, and {lock.name} has {wanted.specifier}.")
    return found


def _template(stage: str, path: Path) -> list[str]:
    """Parameters parse, kernel python3, no outputs."""
    found = []
    try:
        params.template(path)
        content = json.loads(path.read_text())
    except UserError as error:
        return [f"{stage}: {error}"]
    if (name := content["metadata"].get("kernelspec", {}).get("name")) != "python3":
        found.append(f"{stage}: {path.name} has the kernel {name}, and must have python3.")
    if any(cell.get("outputs") or cell.get("execution_count") for cell in params.code_cells(path)):
        found.append(f"{stage}: {path.name} has outputs: clear them, templates are committed without.")
    return found
