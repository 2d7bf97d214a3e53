"""A throw-away project to run things in."""

import os
import shutil
from pathlib import Path

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # said before anything imports Triton, whose own functions are made for one way or the other
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import project
from machinery import BASE, EVAL, PARETO, write_notebook


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
