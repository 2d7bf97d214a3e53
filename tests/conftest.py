"""A throw-away project to run things in, and a record of the tests that ran.

`LOWBIT_EVIDENCE=book/results/kernel-tests.json pytest tests/test_fused_*.py` writes how many tests of each file passed, and where.
"""

import os
import shutil
from collections import Counter
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # before anything imports Triton, whose own functions are made for one way or the other
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import project, records, runs
from machinery import BASE, EVAL, PARETO, write_notebook


def pytest_terminal_summary(terminalreporter) -> None:
    if not (path := os.environ.get("LOWBIT_EVIDENCE")):
        return
    files: dict[str, Counter] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            files.setdefault(report.nodeid.partition("::")[0], Counter())[outcome] += 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = runs.versions()
    with suppress(metadata.PackageNotFoundError):
        versions["triton"] = metadata.version("triton")
    where = {"device": device, "versions": versions, "commit": project.commit()[0]}
    records.write_json(Path(path), where | {"files": files})


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A project folder with the stages base, eval and pareto, the real workflow, and no runs."""
    folder = tmp_path / "project"
    (folder / "notebooks" / "studies").mkdir(parents=True)
    for name, cells in {"01_base": BASE, "05_eval": EVAL, "07_pareto": PARETO}.items():
        write_notebook(folder / "notebooks" / f"{name}.ipynb", cells)
    checkout = project.PACKAGE.parents[1]
    shutil.copytree(checkout / "notebooks" / "workflow", folder / "notebooks" / "workflow")
    monkeypatch.setenv("LOWBIT_HOME", str(folder))
    monkeypatch.setenv("LOWBIT_RUNS", str(folder / "runs"))
    monkeypatch.delenv("LOWBIT_STAGING", raising=False)
    monkeypatch.setattr(project, "SHIPPED", tmp_path / "shipped")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def hold(tmp_path, monkeypatch) -> Path:
    """While this file is there, a run of `base` stays in its third cell."""
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("TEST_HOLD", str(path))
    return path


@pytest.fixture(scope="session")
def full(tmp_path_factory) -> Path:
    """The pages of a book of made-up runs; like the two below, built once for all tests."""
    import built

    return built.build(tmp_path_factory.mktemp("full"), built.made_up)


@pytest.fixture(scope="session")
def empty(tmp_path_factory) -> Path:
    """The pages of a book without any run."""
    import built

    return built.build(tmp_path_factory.mktemp("empty"), built.nothing)


@pytest.fixture(scope="session")
def real(tmp_path_factory) -> Path:
    """The pages of the book as it is published."""
    import built

    return built.build(tmp_path_factory.mktemp("real"), published=True)
