"""The stage templates: their form, and each one executed at its smallest setting on the models that ship."""

import ast
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from helpers import errors, params, project, records, runs
from helpers.execute import execute

TEMPLATES = project.templates()
SMALLEST = {  # stage -> parameters; 07 compares the evaluations made here, 08 has a test of its own
    "base": {"size": "xs", "steps": 10, "batch_size": 50},
    "grpo": {"parent": "base-xs", "steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
    "ptq": {"parent": "base-xs", "bits": 2},
    "qat": {
        **{"parent": "base-xs", "calibration_texts": 40, "texts": 8, "batch_size": 4, "steps": 2, "lr": 1e-3},
        **{"grids": "learned", "watched": 5, "watch_every": 1},
    },
    "eval": {"parent": "base-xs", "n": 5, "k": 2, "max_new_tokens": 8},
}


@pytest.mark.parametrize("stage", TEMPLATES)
def test_form(stage):
    notebook = json.loads(TEMPLATES[stage].read_text())
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert code[0]["metadata"]["tags"] == ["parameters"]
    assert "params.check()" in params.source(code[1])
    assert all(len(params.source(cell).splitlines()) <= 20 for cell in code[1:]), "one idea a cell"
    assert all(param.help for param in params.template(TEMPLATES[stage]).values())
    assert params.source(cells[0]).startswith("# ")
    assert "**Question.**" in params.source(cells[0])
    assert any("## Change one thing" in params.source(cell) for cell in cells)


@pytest.mark.parametrize("stage", TEMPLATES)
def test_every_parameter_is_used(stage):
    first, *rest = params.code_cells(TEMPLATES[stage])
    names = {
        node.id for cell in rest for node in ast.walk(ast.parse(params.source(cell))) if isinstance(node, ast.Name)
    }
    declared = set(params.declared(params.source(first)))
    # parents reach the notebook through the run; a seed may be there to be recorded
    assert declared - names <= {"parent", "teacher", "parents"}


@pytest.fixture
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.mark.slow
def test_all_stages_at_their_smallest(own_runs, tmp_path):
    made = {stage: execute(stage, given, out=(tmp_path / "out").open("w")) for stage, given in SMALLEST.items()}
    results = {stage: runs.read(outcome.path) for stage, outcome in made.items()}
    assert results["base"].model["recipe"] == "base"
    assert results["grpo"].model["recipe"] == "base > grpo"
    assert results["ptq"].model["recipe"] == "base > gptq"
    assert results["ptq"].model["scheme"] == "w2g64"
    assert results["ptq"].memory.total_bytes < results["grpo"].memory.total_bytes / 3
    assert results["ptq"].memory.packed
    assert results["qat"].model["recipe"] == "base > gptq > qat_kd"
    assert results["qat"].model["method"] == "qat_kd"
    assert results["qat"].memory.total_bytes == results["ptq"].memory.total_bytes
    found = {m.metric: m for m in results["qat"].metrics}
    assert found["train_accuracy"].detail["steps"] == [0, 1, 2]
    assert found["train_codes_moved"].value < 0.1
    assert "model/latent/model.safetensors" in results["qat"].files
    assert {m.metric for m in results["eval"].metrics} >= {"accuracy", "reward", "avg@2", "reward@2"}
    assert len(results["grpo"].files) >= 5
    rows = (made["grpo"].path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    lower = execute("eval", SMALLEST["eval"] | {"parent": results["ptq"].run_id}, out=(tmp_path / "out").open("a"))
    assert runs.read(lower.path).memory == results["ptq"].memory
    together = execute("pareto", {"parents": [made["eval"].run_id, lower.run_id]}, out=(tmp_path / "out").open("a"))
    assert {"pareto.svg", "pareto-dark.svg", "pareto.csv"} <= {path.name for path in together.path.iterdir()}


@pytest.mark.slow
def test_the_speed_stage_keeps_each_measurement_whole(own_runs, tmp_path):
    result = runs.read(execute("speed", {"work": "decode", "repeats": 1}, out=(tmp_path / "out").open("w")).path)
    assert len(result.metrics) == 2 * 2 * 5  # sizes, numbers of sequences, widths
    assert all(metric.detail["ours"] == metric.value for metric in result.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "qat", "eval"])
def test_the_same_seed_gives_the_same_metrics(stage, own_runs, tmp_path):
    found = []
    for attempt in ("first", "second"):
        outcome = execute(stage, SMALLEST[stage], out=(tmp_path / "out").open("w"))
        assert outcome.state == "done"
        result = runs.read(outcome.path)
        found.append((result.metrics, {name: digest for name, digest in result.files.items() if name != "run.ipynb"}))
        own_runs.rename(tmp_path / attempt)
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_killed_qat_run_goes_on_and_is_the_run_that_was_not_killed(own_runs, tmp_path):
    given = {"init": "rtn", "grids": "learned", "replies": "gold", "texts": 40, "batch_size": 8, "steps": 60}
    given |= {"save_every": 5, "watched": 5, "watch_every": 10}
    words = [word for name, value in given.items() for word in ("-p", f"{name}={value}")]
    command = [sys.executable, "-m", "helpers.cli", "run", "qat", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + 120
    while not list(own_runs.glob(".unfinished/*/checkpoint-*/rows.pt")) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (kept,) = own_runs.glob(".unfinished/*")
    time.sleep(1)  # its kernel ends by itself
    found = []
    for attempt in ("resumed", "undisturbed"):
        outcome = execute("qat", given, out=(tmp_path / attempt).open("w"))
        assert outcome.run_id == kept.name
        result = runs.read(outcome.path)
        found.append((result.metrics, {name: digest for name, digest in result.files.items() if name != "run.ipynb"}))
        assert not list(own_runs.glob(".unfinished/*"))
        own_runs.rename(tmp_path / f"runs-{attempt}")
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("replies", ["gold", "student"])
def test_qat_at_16_bits_and_on_its_own_replies(replies, own_runs, tmp_path):
    given = SMALLEST["qat"] | {"init": "full", "bits": 16, "replies": replies, "grids": "fixed"}
    given |= {"teacher": "base-s", "max_new_tokens": 24, "activation_bits": 8, "cache_bits": 8}
    del given["calibration_texts"]
    result = runs.read(execute("qat", given, out=(tmp_path / "out").open("w")).path)
    assert (result.model["recipe"], result.model["scheme"]) == ("base > kd", "bf16a8kv8")
    assert len(result.parents) == 2
    assert not result.memory.packed


@pytest.mark.slow
def test_the_chain_of_the_second_paper(own_runs, tmp_path):
    """GRPO, then 2-bit GPTQ, KD from its codes, and RL from the latent weights; the teacher is the one in full precision."""
    small = {"texts": 8, "batch_size": 4, "steps": 2, "watched": 5, "watch_every": 0}
    grid = {"bits": 2, "granularity": "group", "symmetric": False}
    out = (tmp_path / "out").open("w")
    grpo = execute("grpo", SMALLEST["grpo"], out=out).run_id
    gptq = execute("ptq", {"parent": grpo, "bits": 2}, out=out).run_id
    qat = execute("qat", small | {"parent": gptq, "init": "parent", "replies": "gold"}, out=out)
    assert f"teacher {grpo}," in (tmp_path / "out").read_text()
    rl = runs.read(execute("grpo", SMALLEST["grpo"] | grid | {"parent": qat.run_id, "policy": "qaft"}, out=out).path)
    assert rl.model["recipe"] == "base > grpo > gptq > qat_kd > qaft"
    assert rl.model["scheme"] == "w2g64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"init": "full", "calibration": "corpus"}, "init = full does not read calibration"),
        ({"teacher": "nobody"}, "The teacher nobody is unknown"),
        ({"init": "parent"}, "init = parent needs a parent with packed codes"),
        ({"bits": 16}, "init = gptq does not fit bits = 16"),
        ({"texts": 3}, "batch_size = 4 is more than the 3 texts that there are"),
        ({"replies": "student", "domain": "corpus"}, "choose domain = arithmetic or recall"),
    ],
)
def test_qat_that_cannot_be_is_one_sentence(given, sentence, own_runs, tmp_path):
    given = {"texts": 8, "batch_size": 4, "watched": 5, "replies": "gold"} | given
    with pytest.raises(errors.UserError, match=sentence) as error:
        execute("qat", given, out=(tmp_path / "out").open("w"))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_plain_papermill_from_another_folder(own_runs, tmp_path):
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(TEMPLATES["ptq"]),
        "out.ipynb",
        "-p",
        "parent",
        "base-xs",
        "-p",
        "bits",
        "3",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = own_runs.glob("local/ptq/*/result.json")
    assert runs.read(path).parameters["bits"] == 3
    # a run that has its executed notebook is not replaced by one that has none
    path.unlink()
    kept = execute("ptq", {"parent": "base-xs", "bits": 3}, out=(tmp_path / "out").open("w"))
    assert "run.ipynb" in runs.read(kept.path).files
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert "run.ipynb" in runs.read(kept.path).files


def test_shipped_runs_are_as_they_were_made():
    for name in ("base-xs", "base-s"):
        folder = project.SHIPPED / name
        assert records.hash_files(folder) == runs.read(folder).files


@pytest.mark.slow
def test_plain_papermill_stops_at_a_misspelt_parameter(own_runs, tmp_path):
    command = [sys.executable, "-m", "papermill", str(TEMPLATES["ptq"]), "out.ipynb", "-p", "bitz", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    notebook = json.loads((tmp_path / "out.ipynb").read_text())
    errors = [
        output for cell in notebook["cells"] for output in cell.get("outputs", []) if output["output_type"] == "error"
    ]
    assert errors[0]["evalue"].startswith("bitz is not a parameter of this notebook; did you mean bits?")
    assert not list(own_runs.glob("local/ptq/*"))
