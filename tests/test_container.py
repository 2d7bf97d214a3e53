"""The container image, as far as it can be tried without building it: which files it gets, and that they are enough."""

import os
import subprocess
import sys
import tomllib

import pytest

from helpers import project

ROOT = project.PACKAGE.parents[1]
COPIED = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


@pytest.mark.slow
def test_what_the_image_gets_is_enough_to_plan_every_study(tmp_path):
    for pattern in COPIED:
        found = list(ROOT.glob(pattern))
        assert found, f".dockerignore keeps {pattern}, which is not there"
        for path in found:
            (tmp_path / path.name).symlink_to(path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT_")}
    env |= {"PYTHONPATH": str(tmp_path / "src"), "LOWBIT_RUNS": str(tmp_path / "runs"), "LOWBIT_COMMIT": "abc"}
    command = [sys.executable, "-m", "helpers.cli", "check"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "All is well.\n", done.stderr
    about = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert all((tmp_path / name).is_file() for name in (about["readme"], *about["license-files"]))


def test_the_image_is_made_from_the_lock_files():
    lines = (ROOT / "Dockerfile").read_text()
    installed = [
        word for line in lines.splitlines() if "pip install" in line for word in line.split() if ".lock" in word
    ]
    assert installed == ["requirements.lock", "requirements-cluster.lock"]
    python = next(line.split(":")[1][:4] for line in lines.splitlines() if line.startswith("FROM python:"))
    assert python in (ROOT / "requirements.lock").read_text().splitlines()[0]
