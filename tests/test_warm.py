"""Kernels forked from a server: what a run sees and gives is what it would be without one, and nothing outlives its owner."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import kernel, runs, warm
from helpers.execute import execute, settings
from helpers.records import FailedRun
from machinery import gone, kernel_at_work, published, staged, wait_for

pytestmark = pytest.mark.slow
RUN = [sys.executable, "-m", "helpers.cli", "run", "base"]
SEEN = """
import os, random, sys, tempfile
import numpy as np
before = sorted(name for name in sys.modules if name.startswith(("helpers", "matplotlib.pyplot")))
import matplotlib.pyplot as plt
own = ("TMPDIR", "IPYTHONDIR", "LOWBIT_RUNS", "LOWBIT_STAGING", "LOWBIT_WARM", "JPY_PARENT_PID", "JPY_SESSION_NAME")
run.finish(model={
    "path": sys.path, "argv": [sys.argv[0], *sys.argv[1:2]], "cwd": os.getcwd(), "safe": sys.flags.safe_path,
    "environ": {name: value for name, value in os.environ.items() if name not in own}, "modules": before,
    "tmp": tempfile.gettempdir() == os.environ["TMPDIR"], "code": runs.__file__, "backend": plt.get_backend(),
    "formatter": plt.Figure in get_ipython().display_formatter.formatters["image/png"].type_printers,
    "parent": os.getppid(), "random": [random.random(), np.random.rand()], "leader": os.getpgrp() == os.getpid(),
})
"""


def start(log):
    return warm.server({**os.environ, **settings()}, log, Path(log.name).with_name("link"))


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    with (tmp_path_factory.mktemp("warm") / "log").open("w") as log, start(log) as environ:
        yield environ


@pytest.fixture
def served(environ, monkeypatch):
    """Runs of this test take their kernels from the server."""
    monkeypatch.setenv(kernel.WARM, environ[kernel.WARM])


def test_a_forked_kernel_is_like_one_of_its_own(home, environ, monkeypatch):
    content = json.loads((home / "notebooks" / "07_pareto.ipynb").read_text())
    content["cells"][2]["source"] = SEEN
    (home / "notebooks" / "07_pareto.ipynb").write_text(json.dumps(content))

    def seen(folder, **variables):
        with monkeypatch.context() as patch:
            patch.setenv("LOWBIT_RUNS", str(home / folder))
            for name, value in variables.items():
                patch.setenv(name, value)
            return runs.read(execute("pareto", {}).path).model

    first = seen("first", LOWBIT_WARM=environ[kernel.WARM], LEAK="of the first alone")
    second = seen("second", LOWBIT_WARM=environ[kernel.WARM])
    cold = seen("cold")
    assert first["parent"] == second["parent"] != cold["parent"] == os.getpid()
    assert not set(first.pop("random")) & set(second.pop("random"))
    assert first["environ"].pop("LEAK") == "of the first alone"
    for forked in (first, second):
        assert {**forked, "parent": 0} == {
            key: value for key, value in {**cold, "parent": 0}.items() if key != "random"
        }


def test_two_forked_kernels_work_side_by_side_and_print_to_their_own_runner(home, hold, served):
    processes = [
        subprocess.Popen([*RUN, "-p", f"size={size}"], stdout=subprocess.PIPE, text=True) for size in ("xs", "s")
    ]
    wait_for(lambda: len(list((home / "runs" / ".staging").glob("*/metrics.jsonl"))) == 2)
    hold.unlink()
    outputs = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert ["working on xs" in output for output in outputs] == [True, False]
    assert ["working on s\n" in output for output in outputs] == [False, True]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_forked_kernel_ends_with_its_runner(home, hold, served, number):
    process = subprocess.Popen(RUN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = kernel_at_work(home)
    process.send_signal(number)
    process.wait(20)
    wait_for(lambda: gone(pid), 3)
    assert not published(home)
    hold.unlink()
    assert execute("base", {}).state == "done"
    assert not staged(home)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("die", "failed: its kernel died"), ("exit", "it stopped before its code cell 6"), ("error", "broken on purpose")],
)
def test_a_fault_in_a_forked_kernel_is_the_same_sentence(home, served, fault, sentence):
    with pytest.raises(FailedRun, match=sentence):
        execute("base", {"fault": fault})
    assert not published(home)


def test_a_server_that_is_gone_or_dies_early_leaves_kernels_that_start_by_themselves(home, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel.WARM, str(tmp_path / "nowhere"))
    assert execute("base", {}).state == "done"
    with (tmp_path / "log").open("w") as log, start(log) as environ:
        wait_for(lambda: os.path.exists(environ[kernel.WARM]))
        monkeypatch.setenv(kernel.WARM, environ[kernel.WARM])
        process = subprocess.Popen([*RUN, "-p", "size=s"], stdout=subprocess.PIPE, text=True)
        time.sleep(1)  # it waits now for a server that still imports
    assert "working on s" in process.communicate(timeout=30)[0]
    assert process.returncode == 0


def test_a_server_takes_its_kernels_along(home, hold, monkeypatch, tmp_path):
    with (tmp_path / "log").open("w") as log, start(log) as environ:
        monkeypatch.setenv(kernel.WARM, environ[kernel.WARM])
        process = subprocess.Popen(RUN, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        pid = kernel_at_work(home)
    wait_for(lambda: gone(pid), 3)
    assert "its kernel died" in process.communicate(timeout=30)[1]


def test_metrics_and_weights_are_the_same_to_the_bit(environ, monkeypatch, tmp_path):
    monkeypatch.delenv("LOWBIT_HOME", raising=False)
    paths = []
    for folder, address in (("cold", None), ("warm", environ[kernel.WARM])):
        monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / folder))
        if address:
            monkeypatch.setenv(kernel.WARM, address)
        given = {"parent": "base-xs", "steps": 2, "prompts_per_step": 4, "policy": "qlora", "lr": 0.003}
        with (tmp_path / "out").open("w") as out:
            paths.append(execute("grpo", given, out=out).path)
    cold, forked = paths
    assert runs.read(cold).metrics == runs.read(forked).metrics
    assert (cold / "metrics.jsonl").read_bytes() == (forked / "metrics.jsonl").read_bytes()
    names = sorted(path.relative_to(cold) for path in cold.glob("model/**/*.safetensors"))
    assert names
    assert all((cold / name).read_bytes() == (forked / name).read_bytes() for name in names)


def test_the_server_does_without_the_package_that_starts_the_gpu(tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("import os; open(os.environ['MARK'], 'w').close()")
    (tmp_path / "torchao-0.18.0.dist-info").mkdir()
    (tmp_path / "torchao-0.18.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "MARK": str(tmp_path / "mark"),
    }
    code = "import os; from helpers import warm; warm.preload(); assert not os.path.exists(os.environ['MARK']); import torchao"
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert (tmp_path / "mark").exists()
