"""What the tests of the run machinery share: throw-away notebooks that take a second, and ways to watch them run."""

import json
import time
from pathlib import Path

import pytest

from helpers import params, project, runs

BASE = [
    """
size: str = "xs"  # in xs, s: size of the model
seed: int = 0  # 0..: seed
value: float = 0.5  # 0..1: what the run measures
fault: str = "none"  # in none, error, user, full, exit, die, unfinished: what goes wrong
""",
    """
import os, sys, time
from pathlib import Path
from helpers import errors, params, runs
run = runs.begin("base", params.check())
""",
    """
print("working on", size)
(run.path / "model").mkdir()
(run.path / "model" / "model.safetensors").write_bytes(size.encode())
run.log(step=1, pid=os.getpid())
while Path(os.environ.get("TEST_HOLD", "/nowhere")).exists():
    time.sleep(0.05)
""",
    """
if fault == "error":
    raise ValueError("broken on purpose")
if fault == "user":
    raise errors.UserError("The task is not there.")
if fault == "full":
    raise OSError(28, "No space left on device", "model.safetensors")
if fault == "exit":
    sys.exit(0)
if fault == "die":
    os.kill(os.getpid(), 9)
""",
    """
if fault != "unfinished":
    run.finish(model={"name": size, "method": "base", "bits": 16}, metrics=[{"metric": "loss", "value": value, "n": 9}])
""",
]
EVAL = [
    """
parent: str = ""  # a run id, study/name, a shipped name, a folder or a hub id
tasks: list[str] = ["arithmetic"]  # in arithmetic, recall: what to evaluate
n: int = 4  # 1..500: problems
seed: int = 0  # 0..: seed
""",
    'from helpers import params, runs\nrun = runs.begin("eval", params.check())',
    """
import random
share = random.Random(seed).random()
scores = [{"metric": "accuracy", "task": task, "value": share, "n": n, "ci_low": 0, "ci_high": 1} for task in tasks]
""",
    "run.finish(model=run.parent.result.model if run.parent.result else {}, metrics=scores)",
]
TAUGHT = [  # two lines of descent
    """
parent: str = ""  # a run id, study/name, a shipped name, a folder or a hub id
teacher: str = ""  # a run id and the like
seed: int = 0  # 0..: seed
""",
    'from helpers import params, runs\nrun = runs.begin("taught", params.check())',
    'print("taught by", run.teacher.id if run.teacher else None)',
    'run.finish(metrics=[{"metric": "loss", "value": 0.5, "n": 9}])',
]
PARETO = [
    "parents: list[str] = []  # runs to compare",
    'from helpers import params, runs\nrun = runs.begin("pareto", params.check())',
    'run.finish(metrics=[{"metric": "points", "value": len(run.parents), "n": len(run.parents)}])',
]


def write_notebook(path: Path, cells: list[str]) -> None:
    """A stage template of code cells; the first is the parameters cell."""
    code = [
        {
            "cell_type": "code",
            "id": f"cell{index}",
            "metadata": {"tags": ["parameters"]} if index == 0 else {},
            "source": source.strip(),
            "outputs": [],
            "execution_count": None,
        }
        for index, source in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {"cells": code, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(content, indent=1))


def make(stage="base", study="local", name="", **given) -> runs.Run:
    """A finished run, made in this process."""
    parameters = params.validate(params.template(project.template(stage)), given, stage)
    run = runs.begin(stage, parameters)
    run.context = run.context.model_copy(update={"study": study, "name": name})
    (run.path / "model").mkdir()
    (run.path / "model" / "model.safetensors").write_bytes(b"weights of " + run.context.run_id.encode())
    run.log(step=1, loss=0.5)
    run.finish(model={"name": "xs"}, metrics=[runs.Metric(metric="loss", value=0.5, n=9)], timings={"train_s": 1.0})
    return run


def planned(home, study, **names):
    """A plan.json that gives these names to run ids."""
    folder = home / "runs" / study
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [{"name": name, "run_id": run_id} for name, run_id in names.items()]
    (folder / "plan.json").write_text(json.dumps({"study": study, "jobs": jobs}))


def published(home: Path) -> list[Path]:
    """Everything that a reader of runs/ can see."""
    return [path for path in (home / "runs").glob("[!.]*/**/*") if path.is_file()]


def staged(home: Path) -> list[Path]:
    return list((home / "runs" / ".staging").glob("*"))


def wait_for(condition, seconds: float = 20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail("it did not happen in time")


def kernel_at_work(home: Path) -> int:
    """The process id of a kernel that is held in its third cell."""

    def pid():
        files = list((home / "runs" / ".staging").glob("*/metrics.jsonl"))
        return json.loads(files[0].read_text())["pid"] if files and files[0].read_text().endswith("\n") else None

    return wait_for(pid)


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
