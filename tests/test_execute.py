"""Executing a template: once, all or nothing, and one sentence when it fails. Kernels are real."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import params, project, runs
from helpers.errors import UserError
from helpers.execute import execute
from helpers.records import DiskFull, FailedRun
from machinery import gone, kernel_at_work, published, staged, wait_for

slow = pytest.mark.slow
RUN = [sys.executable, "-m", "helpers.cli", "run", "base"]


def failure(home: Path) -> dict:
    (file,) = (home / "runs" / ".failed").glob("*/error.json")
    assert (file.parent / "run.ipynb").is_file()
    return json.loads(file.read_text())


@slow
def test_a_run_is_executed_once_and_leaves_its_template_alone(home, capsys):
    template = home / "notebooks" / "01_base.ipynb"
    before = template.read_bytes()
    first = execute("base", {"size": "s", "value": "0.25"})
    assert "working on s" in capsys.readouterr().out
    second = execute("base", {"size": "s", "value": 0.25})
    assert (first.state, second.state) == ("done", "skipped")
    assert first.path == second.path
    result = runs.read(first.path)
    assert result.metrics[0].value == 0.25
    assert sorted(result.files) == ["metrics.jsonl", "model/model.safetensors", "run.ipynb"]
    assert str(home) not in (first.path / "run.ipynb").read_text()
    assert template.read_bytes() == before
    assert not staged(home)


@slow
def test_the_kernel_is_this_python_with_its_own_folder_and_one_thread(home):
    content = json.loads((home / "notebooks" / "07_pareto.ipynb").read_text())
    content["cells"][2]["source"] = (
        "import os, sys\n"
        "run.finish(model={'python': sys.executable, 'ipython': get_ipython().ipython_dir,"
        " 'threads': os.environ['OMP_NUM_THREADS'], 'connection': get_ipython().kernel.parent.transport})"
    )
    (home / "notebooks" / "07_pareto.ipynb").write_text(json.dumps(content))
    model = runs.read(execute("pareto", {}).path).model
    assert (model["python"], model["threads"], model["connection"]) == (sys.executable, "1", "ipc")
    assert not Path(model["ipython"]).exists()  # it was private, and is gone with the kernel


@slow
def test_a_rerun_with_the_same_seed_has_equal_metrics(home, monkeypatch):
    base = execute("base", {}).path.name
    first = runs.read(execute("eval", {"parent": base, "seed": 3}).path)
    monkeypatch.setenv("LOWBIT_RUNS", str(home / "elsewhere"))
    execute("base", {})
    second = runs.read(execute("eval", {"parent": base, "seed": 3}).path)
    assert first.run_id == second.run_id
    assert first.metrics == second.metrics


@pytest.mark.parametrize(
    ("stage", "given", "sentence"),
    [
        ("bass", {}, "bass is not a stage; did you mean base? Or choose one of base, eval, pareto."),
        (
            "base",
            {"sise": "s"},
            "sise is not a parameter of base; did you mean size? It takes: size, seed, value, fault.",
        ),
        ("base", {"size": "xl"}, "size = 'xl' is not allowed for base: choose one of xs, s."),
        ("eval", {"parent": "base-xs"}, "The parent base-xs is unknown: give a run id, study/name, "),
    ],
)
def test_bad_input_stops_before_a_kernel_starts(home, stage, given, sentence):
    with pytest.raises(UserError) as error:
        execute(stage, given)
    assert str(error.value).startswith(sentence)
    assert error.value.exit_code == 2
    assert not (home / "runs").exists()


@slow
@pytest.mark.parametrize(
    ("fault", "sentence", "code"),
    [
        ("error", "failed in cell 5 of runs/.failed/{id}/run.ipynb: ValueError: broken on purpose", 1),
        ("full", "{id} failed: no space is left on the disk (cell 5 of runs/.failed/{id}/run.ipynb); make space", 1),
        ("user", "The task is not there.", 2),
        ("die", "{id} failed: its kernel died", 1),
        ("exit", "{id} failed: it stopped before its code cell 6", 1),
        ("unfinished", "{id} failed: it ended without run.finish()", 1),
    ],
)
def test_a_failed_notebook_publishes_nothing_and_says_why(home, fault, sentence, code):
    with pytest.raises(UserError) as error:
        execute("base", {"fault": fault})
    details = failure(home)
    assert sentence.format(id=details["run_id"]) in str(error.value)
    assert "\n" not in str(error.value)
    assert (error.value.exit_code, details["sentence"]) == (code, str(error.value))
    assert not published(home)
    assert not staged(home)
    with pytest.raises(UserError, match=f"The parent {details['run_id']} failed: .*See runs/.failed/"):
        execute("eval", {"parent": details["run_id"]})


@slow
def test_a_run_that_failed_can_be_repaired_and_a_corrupt_result_is_made_again(home):
    template = home / "notebooks" / "07_pareto.ipynb"
    good = template.read_text()
    template.write_text(good.replace("run.finish(metrics", "run.finnish(metrics"))
    with pytest.raises(FailedRun, match="AttributeError"):
        execute("pareto", {})
    template.write_text(good)
    path = execute("pareto", {}).path
    (path / "result.json").write_text('{"run_id": ')
    again = execute("pareto", {})
    assert (again.state, again.path) == ("done", path)
    assert runs.read(path).metrics[0].value == 0


def test_a_full_disk_stops_a_run_before_it_starts(home, monkeypatch):
    monkeypatch.setattr("helpers.records.shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20})())
    with pytest.raises(DiskFull, match="Only 1 MiB are free"):
        execute("base", {})
    assert not (home / "runs").exists()


def test_a_disk_that_fills_up_under_the_runner_is_one_sentence(home, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("papermill.execute_notebook", full)
    with pytest.raises(DiskFull, match="no space is left on the disk") as error:
        execute("base", {})
    assert error.value.exit_code == 1
    assert not published(home)
    assert not staged(home)


@slow
def test_a_killed_runner_leaves_no_kernel_and_no_run_and_the_rerun_works(home, hold):
    process = subprocess.Popen(RUN, stdout=subprocess.DEVNULL)
    kernel = kernel_at_work(home)
    sockets = (staged(home)[0] / ".sockets").readlink()
    process.kill()
    process.wait()
    wait_for(lambda: gone(kernel), 3)
    assert not published(home)
    assert staged(home)  # what it left is invisible, and goes with the rerun
    hold.unlink()
    assert execute("base", {}).state == "done"
    assert not staged(home)
    assert not sockets.exists()


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_runner_ends_its_kernel_and_says_so(home, hold, number):
    process = subprocess.Popen(RUN, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    kernel = kernel_at_work(home)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    (run_id,) = [path.stem for path in (home / "runs" / ".locks").iterdir()]
    assert errors == f"{run_id} was interrupted: nothing was published.\n"
    wait_for(lambda: gone(kernel), 3)
    assert not published(home)
    assert not staged(home)


@slow
def test_of_two_simultaneous_runs_one_executes_and_the_other_waits(home, hold):
    first, second = (subprocess.Popen(RUN, stdout=subprocess.PIPE, text=True) for _ in range(2))
    kernel_at_work(home)
    time.sleep(1)
    assert len(staged(home)) == 1
    hold.unlink()
    outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert sorted("already done" in output for output in outputs) == [False, True]
    assert sum("working on" in output for output in outputs) == 1
    assert sum("waiting for the other" in output for output in outputs) == 1


@slow
def test_plain_papermill_works_from_another_folder(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOWBIT_RUNS")
    template = home / "notebooks" / "01_base.ipynb"

    def papermill(*arguments):
        command = [sys.executable, "-m", "papermill", str(template), "out.ipynb", "--no-progress-bar", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert papermill("-p", "value", "1e-1").returncode == 0
    (path,) = (home / "runs" / "local" / "base").iterdir()
    parameters = params.validate(params.template(template), {"value": 0.1})
    assert path.name == runs.describe("base", parameters)[0].run_id  # the id that `lowbit run` would give it
    assert runs.read(path).metrics[0].value == 0.1
    bad = papermill("-p", "sise", "s")
    assert bad.returncode != 0
    assert "sise is not a parameter of this notebook; did you mean size?" in bad.stderr
    assert "helpers/params.py" not in bad.stderr  # the sentence, not our traceback
    assert len(list((home / "runs" / "local" / "base").iterdir())) == 1
    assert execute("base", {"value": 0.1}).state == "skipped"


@slow
def test_a_notebook_that_was_edited_does_not_pass_for_its_template(home):
    import papermill

    content = json.loads((home / "notebooks" / "01_base.ipynb").read_text())
    content["cells"][4]["source"] = content["cells"][4]["source"].replace('"value": value', '"value": 1.0')
    edited = home / "edited.ipynb"
    edited.write_text(json.dumps(content))
    papermill.execute_notebook(edited, home / "out.ipynb", progress_bar=False)
    (path,) = (home / "runs" / "local" / "base").iterdir()
    parameters = params.validate(params.template(project.template("base")), {})
    assert path.name != runs.describe("base", parameters)[0].run_id
    assert os.path.exists(path / "result.json")
