"""Several processes for one training: the same steps as in one, one sentence when one of them fails, and none left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import share
from helpers import models, processes, project, runs
from helpers.errors import UserError
from helpers.execute import execute
from helpers.sampling import training_texts
from helpers.training import parallel, qat
from machinery import write_notebook

GRPO = [
    """
fault: str = "none"  # in none, user, error, killed, first: who fails, and how
seed: int = 0  # 0..: seed
""",
    'import os, time\nfrom helpers import errors, params, runs\nrun = runs.begin("grpo", params.check())',
    """
rank = int(os.environ["LOWBIT_RANK"])
if rank:
    (run.path.parents[1] / "pid").write_text(str(os.getpid()))
(run.path / f"pid-{rank}").write_text(str(os.getpid()))
while not all((run.path / f"pid-{n}").exists() for n in range(2)):
    time.sleep(0.01)
if rank and fault == "user":
    raise errors.UserError("The task is not there.")
if rank and fault == "error":
    raise ValueError("broken on purpose")
if rank and fault == "killed":
    os.kill(os.getpid(), 9)
if rank == 0 and fault == "first":
    raise errors.UserError("The first has failed.")
""",
    """
if fault != "none":
    time.sleep(60)
if rank:
    raise SystemExit(0)
run.finish(metrics=[{"metric": "loss", "value": seed, "n": 1}])
""",
]


@pytest.fixture
def two(home, monkeypatch):
    write_notebook(home / "notebooks" / "02_grpo.ipynb", GRPO)
    monkeypatch.setenv(processes.COUNT, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return home


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


# --- the training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What share.py found in one process and in two, by (processes, rank)."""
    folder = tmp_path_factory.mktemp("share")
    started = []
    for count in (1, 2):
        for rank in range(count):
            told = {processes.COUNT: str(count), processes.RANK: str(rank), "LOWBIT_STAGING": str(folder)}
            env = {**os.environ, **told, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, share.__file__, str(folder)]
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for process in started:
        told = process.communicate(timeout=300)[1]
        assert process.returncode == 0, told.decode()[-2000:]
    return {
        (count, rank): torch.load(folder / f"{count}-{rank}.pt", weights_only=False)
        for count in (1, 2)
        for rank in range(count)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*share.GRPO, *share.QAT])
def test_two_processes_take_the_steps_of_one(found, name):
    alone, first, second = (found[key][name] for key in ((1, 0), (2, 0), (2, 1)))
    assert len(alone["rows"]) == len(first["rows"]) == 2
    assert second["rows"] == []
    for one, other in zip(alone["rows"], first["rows"], strict=True):
        assert one.keys() == other.keys()
        one.pop("entropy", None) if name == "in parts" else None  # TRL's is a mean of micro-batches' means
        assert {key: other[key] for key in one} == pytest.approx(one, rel=2e-4, abs=1e-6)
    assert len(alone["gradients"]) == len(first["gradients"]) == 2
    assert max(g.norm() for g in alone["gradients"][0].values()) > 1e-3
    for parameter, gradient in alone["gradients"][0].items():  # later ones are of weights that rounding has moved
        for other in (first, second):
            assert torch.allclose(other["gradients"][0][parameter], gradient, rtol=1e-4, atol=1e-6), parameter
    assert all(torch.equal(first["weights"][n], w) for n, w in second["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "kd"])
def test_each_has_its_share_and_not_the_whole(found, name):
    first, second = (found[2, rank][name]["shares"][0] for rank in range(2))
    largest = max(first, key=lambda parameter: float(first[parameter].norm()))
    assert not torch.allclose(first[largest], second[largest], rtol=0.1)
    mean = (first[largest] + second[largest]) / 2
    assert torch.allclose(mean, found[1, 0][name]["gradients"][0][largest], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setenv(processes.COUNT, "3")
    assert parallel.share("batch_size", 64) == 64  # a session is one process
    monkeypatch.setenv(processes.RANK, "0")
    assert parallel.share("batch_size", 63) == 21
    with pytest.raises(UserError, match="batch_size = 64 cannot be shared by 3 processes"):
        parallel.share("batch_size", 64)


def test_one_process_uses_one_of_two_gpus(monkeypatch):
    """transformers would wrap the model in `DataParallel`, which has no weights of its own to train."""
    model, tokenizer = models.load("base-xs")
    lessons = training_texts("gold", "arithmetic", model, tokenizer, 8)

    def with_two(**given):
        arguments = TrainingArguments(**given)
        assert arguments.device.type in ("cpu", "cuda")
        arguments._n_gpu = 2
        return arguments

    monkeypatch.setattr(qat, "TrainingArguments", with_two)
    history = qat.train(model, tokenizer, lessons, objective="sft", steps=2, batch_size=4)
    assert history[-1]["step"] == 2


# --- the processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_two_processes_is_the_run_of_one(two):
    outcome = execute("grpo", {})
    assert outcome.state == "done"
    assert {path.name for path in outcome.path.iterdir()} >= {"pid-0", "pid-1", "run.ipynb", "result.json"}
    assert gone(int((two / "runs" / "pid").read_text()))
    os.environ[processes.COUNT] = "1"
    assert execute("grpo", {}) == type(outcome)(outcome.run_id, outcome.path, "skipped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("user", "process 1 of the run failed: The task is not there."),
        ("error", "process 1 of the run failed: ValueError: broken on purpose."),
        ("killed", "process 1 of the run failed: its process was killed, most likely for want of memory."),
        ("first", "The first has failed."),
    ],
)
def test_a_process_that_fails_ends_the_run_in_one_sentence(two, fault, sentence):
    began = time.perf_counter()
    with pytest.raises(UserError) as error:
        execute("grpo", {"fault": fault})
    assert str(error.value).endswith(sentence)
    assert time.perf_counter() - began < 40  # the others would have slept for a minute
    assert gone(int((two / "runs" / "pid").read_text()))
    assert not list((two / "runs" / ".staging").iterdir())
    assert runs.done(error.value.args[0].split()[0]) is None


@pytest.mark.parametrize(
    ("visible", "count", "told"),
    [
        ("0,1", "2", {processes.GPUS: "0,1", "CUDA_VISIBLE_DEVICES": "0"}),
        ("GPU-a, GPU-b,GPU-c", "2", {processes.GPUS: "GPU-a,GPU-b,GPU-c", "CUDA_VISIBLE_DEVICES": "GPU-a"}),
        ("0,1", "1", {}),
        ("", "2", {}),
    ],
)
def test_each_process_sees_a_gpu_of_its_own(monkeypatch, visible, count, told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(processes.COUNT, count)
    assert processes.environment("grpo") == {processes.COUNT: count, processes.RANK: "0"} | told
    assert processes.environment("eval") == {processes.COUNT: "1", processes.RANK: "0"}


@pytest.mark.parametrize(
    ("visible", "count", "sentence"),
    [
        ("0", "2", "2 processes need a GPU each, and 1 of them are visible here"),
        ("", "0", "processes = 0 is not allowed: it must be a number from 1 to 64"),
        ("", "two", "processes = two is not allowed"),
    ],
)
def test_processes_that_cannot_be(monkeypatch, visible, count, sentence):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(processes.COUNT, count)
    with pytest.raises(UserError, match=sentence):
        processes.environment("qat")


def test_only_stages_that_train_have_several(monkeypatch):
    monkeypatch.setenv(processes.COUNT, "1")
    with pytest.raises(UserError, match="processes = 2 is not allowed for ptq: only grpo and qat train in several"):
        processes.ask(2, "ptq")
    processes.ask(2, "grpo")
    assert os.environ[processes.COUNT] == "2"
    assert set(processes.STAGES) <= set(project.templates())
