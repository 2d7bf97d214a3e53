"""The files around the code: lock, environments, Makefile, hooks, README."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

from helpers import params, project

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name(text: str) -> str:
    """The package that a requirement is about, spelled as registries compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", text)[0]).lower()


def pins(file: str) -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    return {name(line): line.split("==")[1] for line in lines if line and not line.startswith("#")}


def run(*command: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **more)


def test_the_lock_pins_everything_exactly():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a plain name==version a line"
    assert pins("requirements.lock")["torch"] == "2.13.0"
    assert name(PYPROJECT["project"]["name"]) not in pins("requirements.lock")
    assert len(lines) == len(pins("requirements.lock"))


def test_the_lock_holds_every_direct_dependency():
    lock, direct = pins("requirements.lock"), pins("requirements.in")
    assert {package: lock[package] for package in direct} == direct
    declared = PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["dev"]
    assert {name(text) for text in declared} <= lock.keys()


def test_environments_come_from_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert {"pip": ["-r requirements.lock", "-e ."]} in environment["dependencies"]
    assert "-r requirements.lock" in (ROOT / "Makefile").read_text()


def test_hooks_use_the_locked_tools_and_keep_tags(tmp_path):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = {hook["id"]: hook for hook in config["repos"][0]["hooks"]}
    assert all(hook["language"] == "system" for hook in hooks.values())

    cell = nbformat.v4.new_code_cell("x: int = 1  # a number", metadata={"tags": ["parameters"]}, execution_count=3)
    cell.outputs = [nbformat.v4.new_output("stream", text="1")]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {}}), path)
    done = run("sh", "-c", f"{hooks['nbstripout']['entry']} {path}")
    assert done.returncode == 0, done.stderr
    stripped = nbformat.read(path, as_version=4)
    assert (stripped.cells[0].outputs, stripped.cells[0].execution_count) == ([], None)
    assert (stripped.cells[0].metadata.tags, stripped.cells[0].id) == (["parameters"], cell.id)
    assert "papermill" not in stripped.metadata


def test_make_without_a_supported_python_says_so(tmp_path):
    done = run("make", "install", f"VENV={tmp_path / 'venv'}", "PYTHONS=no-such-python python2")
    assert done.returncode != 0
    assert "needs Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_without_ensurepip_says_so(tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    fake.chmod(0o755)
    done = run("make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHONS={fake}")
    assert done.returncode != 0
    assert "python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_installs_once(tmp_path):
    (tmp_path / ".installed").touch()
    done = run("make", "--no-print-directory", "install", f"VENV={tmp_path}")
    assert (done.returncode, "pip" in done.stdout) == (0, False)


@pytest.mark.parametrize("target", ["study", "test", "book"])
def test_make_targets_use_the_environment(target, tmp_path):
    (tmp_path / ".installed").touch()
    done = run("make", "--no-print-directory", "-n", target, f"VENV={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{tmp_path}/bin/") for line in done.stdout.splitlines())


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "make test" in script.read_text()
    assert run("bash", "-n", str(script)).returncode == 0


def test_workflows_run_what_ci_runs_and_publish_the_book():
    files = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    flows = {name: yaml.safe_load(text) for name, text in files.items()}
    assert set(flows) == {"test", "book"}
    for text in files.values():
        used = re.findall(r"uses: (\S+)", text)
        assert used
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+", action) for action in used)
        assert "secrets." not in text
    test, book = flows["test"]["jobs"]["test"], flows["book"]["jobs"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PYPROJECT["project"]["requires-python"]).groups()
    assert test["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]
    assert test["env"]["PYTHON"] == "python${{ matrix.python }}"
    assert test["steps"][-1] == {"run": ".ci/run"}
    build = book["build"]["steps"]
    assert {"run": "make book"} in build
    assert build[-1]["with"] == {"path": "_build/html"}
    assert all(flow["permissions"] == {"contents": "read"} for flow in flows.values())  # more only where pages are put
    assert book["publish"]["permissions"] == {"pages": "write", "id-token": "write"}
    assert (book["publish"]["needs"], book["publish"]["if"]) == ("build", "github.ref == 'refs/heads/main'")


def test_binder_makes_the_environment_of_the_copies_for_class():
    environment = yaml.safe_load((ROOT / ".binder" / "environment.yml").read_text())
    packages = environment["dependencies"][-1]["pip"][-1].removeprefix("-r ")
    assert (ROOT / ".binder" / packages).resolve() == ROOT / "notebooks" / "class" / "requirements.txt"
    script = ROOT / ".binder" / "postBuild"
    assert script.stat().st_mode & 0o100
    assert "pip install --no-deps --editable ." in script.read_text()


def test_make_takes_python_from_the_environment(tmp_path):
    done = run("make", "-n", "install", f"VENV={tmp_path}", env=os.environ | {"PYTHON": "python3.12"})
    assert f"python3.12 -m venv {tmp_path}" in done.stdout


def test_ci_goes_on_without_a_browser(tmp_path):
    """With no Chromium and none to be had, CI says so and runs the tests all the same."""
    folder, tools = tmp_path / "project", tmp_path / "tools"
    for place in (folder / ".ci", folder / ".venv" / "bin", tools):
        place.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    makes = {tools / "make": 'echo "make $*"', tools / "apt-get": "exit 100"}
    makes |= {folder / ".venv" / "bin" / name: "exit 1" for name in ("python", "playwright")}
    for path, line in makes.items():
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["make cluster", "make test", ""])
    assert "the tests of the book's pages are skipped" in done.stderr


def test_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert citation["license"] == PYPROJECT["project"]["license"] == "Apache-2.0"
    assert f"## {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert "TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("path", ["README.md", "book/rerun.md"])
def test_commands_in_the_text_exist(path):
    from typer.main import get_command

    from helpers.cli import app

    known = get_command(app).commands
    text = (ROOT / path).read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    for word in re.findall(r"(?<![\w.-])lowbit (\w+)", blocks):
        assert word in known
    makefile = (ROOT / "Makefile").read_text()
    for word in re.findall(r"(?<![\w.-])make (\w+)", blocks):
        assert re.search(rf"^{word}:", makefile, flags=re.MULTILINE)
    commands = re.findall(r"lowbit run ([a-z]+)((?: -p \w+=\S+)+)", blocks)
    commands += re.findall(r"papermill notebooks/\d+_(\w+)\.ipynb \S+((?: -p \w+ \S+)+)", blocks)
    assert commands
    for stage, given in commands:
        values = dict(re.findall(r" -p (\w+)[= ](\S+)", given))
        if values != {"parent": "base-s", "bits": "77"}:  # the one that is there to fail
            params.validate(params.template(project.templates()[stage]), values, stage)
    for file in re.findall(r"(?:notebooks|book|src)/[\w/.-]+\.\w+", blocks):
        assert (ROOT / file).exists()
