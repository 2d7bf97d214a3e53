"""Studies: expansion, checks before anything starts, and what happens when runs fail or are stopped."""

import json
import signal
import subprocess
import sys
import time

import pytest
import yaml

from helpers import estimate, project, runs, schedule
from helpers.execute import execute
from helpers.schedule import run_study
from helpers.smoke import distinct
from helpers.study import StudyError, load, plan, variant
from machinery import TAUGHT, gone, kernel_at_work, published, wait_for, write_notebook

slow = pytest.mark.slow
BASES = {"name": "base-{size}", "stage": "base", "matrix": {"size": ["xs", "s"]}, "params": {"size": "{size}"}}
EVALS = {"name": "eval-{parent}", "stage": "eval", "parent": ["base-*"]}
PARETO = {"name": "pareto", "stage": "pareto", "parents": ["eval-*"]}


def write(home, *entries, **more):
    (home / "notebooks" / "studies" / "tiny.yml").write_text(
        yaml.safe_dump({"name": "tiny", "runs": list(entries), **more}, sort_keys=False)
    )


def names(jobs):
    return [job.name for job in jobs]


# --- planning ---------------------------------------------------------------------------------------------------------


def test_a_matrix_a_list_of_parents_and_a_pattern_make_runs(home):
    write(home, BASES, EVALS, PARETO)
    jobs = plan("tiny")
    assert names(jobs) == ["base-xs", "base-s", "eval-base-xs", "eval-base-s", "pareto"]
    by_name = {job.name: job for job in jobs}
    assert by_name["eval-base-s"].parents == ["base-s"]
    assert by_name["eval-base-s"].parameters["parent"] == by_name["base-s"].run_id
    assert by_name["pareto"].parameters["parents"] == [by_name["eval-base-xs"].run_id, by_name["eval-base-s"].run_id]
    assert by_name["base-s"].path == home / "runs" / "tiny" / "base" / by_name["base-s"].run_id
    assert plan("tiny") == plan(home / "notebooks" / "studies" / "tiny.yml") == jobs


def test_a_planned_id_changes_with_what_its_ancestors_are_made_from(home):
    write(home, BASES, EVALS, PARETO)
    before = {job.name: job.run_id for job in plan("tiny")}
    write(home, {**BASES, "params": {"size": "{size}", "value": 0.25}}, EVALS, PARETO)
    after = {job.name: job.run_id for job in plan("tiny")}
    assert all(before[name] != after[name] for name in before)
    write(home, {**BASES, "params": {"size": "{size}", "value": 0.25}}, {**EVALS, "params": {"n": 3}}, PARETO)
    later = {job.name: job.run_id for job in plan("tiny")}
    assert later["base-s"] == after["base-s"]
    assert later["pareto"] != after["pareto"]


def test_several_seeds_make_a_chain_each_and_meet_where_there_is_no_seed(home):
    write(home, BASES, {"name": "eval-{parent}", "stage": "eval", "parent": ["base-s"]}, PARETO, seeds=[0, 1])
    jobs = {job.name: job for job in plan("tiny")}
    assert list(jobs) == [
        *("base-xs-seed0", "base-xs-seed1", "base-s-seed0", "base-s-seed1"),
        *("eval-base-s-seed0", "eval-base-s-seed1", "pareto"),
    ]
    assert jobs["eval-base-s-seed1"].parents == ["base-s-seed1"]
    assert jobs["eval-base-s-seed1"].parameters["seed"] == 1
    assert jobs["pareto"].parents == ["eval-base-s-seed0", "eval-base-s-seed1"]


def test_one_seed_is_passed_on_without_a_suffix(home):
    write(home, BASES, seeds=[7])
    assert [(job.name, job.parameters["seed"]) for job in plan("tiny")] == [("base-xs", 7), ("base-s", 7)]


def test_the_order_of_a_file_is_free(home):
    write(home, {"name": "eval", "stage": "eval", "parent": "base-s"}, BASES)
    assert names(plan("tiny")) == ["eval", "base-xs", "base-s"]


@pytest.fixture
def taught(home):
    write_notebook(home / "notebooks" / "04_taught.ipynb", TAUGHT)
    return home


PUPIL = {"name": "pupil", "stage": "taught", "parent": "base-xs", "params": {"teacher": "base-s"}}


def test_a_run_waits_for_its_teacher_as_for_its_parent(taught):
    write(taught, PUPIL, BASES, {"name": "next", "stage": "taught", "parent": "pupil", "params": {"teacher": "base-s"}})
    jobs = {job.name: job for job in plan("tiny")}
    pupil = jobs["pupil"]
    assert pupil.parents == ["base-xs", "base-s"]
    assert pupil.parameters["teacher"] == jobs["base-s"].run_id
    assert jobs["next"].parents == ["pupil", "base-s"]
    write(taught, {**PUPIL, "params": {}}, BASES)
    alone = {job.name: job for job in plan("tiny")}["pupil"]
    assert alone.parents == ["base-xs"]
    assert alone.run_id != pupil.run_id


def test_a_teacher_has_the_seed_of_its_pupil(taught):
    write(taught, BASES, PUPIL, seeds=[0, 1])
    jobs = {job.name: job for job in plan("tiny")}
    assert jobs["pupil-seed1"].parents == ["base-xs-seed1", "base-s-seed1"]
    assert jobs["pupil-seed0"].parameters["teacher"] == jobs["base-s-seed0"].run_id


def test_a_teacher_may_be_named_by_the_matrix(taught):
    write(taught, BASES, PUPIL | {"name": "by-{t}", "matrix": {"t": ["xs", "s"]}, "params": {"teacher": "base-{t}"}})
    jobs = {job.name: job for job in plan("tiny")}
    assert jobs["by-s"].parents == ["base-xs", "base-s"]
    assert jobs["by-xs"].parameters["teacher"] == jobs["by-xs"].parameters["parent"] == jobs["base-xs"].run_id
    assert jobs["by-s"].run_id != jobs["by-xs"].run_id


@slow
def test_a_planned_id_with_a_teacher_is_that_of_the_run(taught, tmp_path):
    write(taught, BASES, PUPIL)
    jobs = {job.name: job for job in plan("tiny")}
    for name in ("base-xs", "base-s"):
        with (tmp_path / "out").open("w") as out:
            execute("base", jobs[name].parameters, "tiny", name, out=out)
    context, _ = runs.describe("taught", jobs["pupil"].parameters)
    assert context.run_id == jobs["pupil"].run_id
    assert {job.name: job for job in plan("tiny")}["pupil"].run_id == context.run_id


def test_a_wrong_teacher_is_one_sentence(taught):
    for teacher, sentence in (
        ("bose", "run pupil: The teacher bose is unknown"),
        ("pupil", "these runs wait for each other: pupil"),
    ):
        write(taught, BASES, {**PUPIL, "params": {"teacher": teacher}})
        with pytest.raises(StudyError, match=sentence):
            plan("tiny")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([{"name": "a", "stage": "bass"}], "bass is not a stage; did you mean base?"),
        ([{"name": "a", "stage": "base", "params": {"sise": 1}}], "run a: sise is not a parameter of base"),
        ([{"name": "a", "stage": "base", "params": {"value": "1e"}}], "run a: value = '1e' is not allowed for base"),
        ([{"name": "a", "stage": "eval", "parent": "bose"}], "run a: The parent bose is unknown"),
        ([{"name": "a", "stage": "eval", "parent": "base-*"}], "run a: no earlier run is called base-*"),
        ([{"name": "a", "stage": "pareto", "parent": "b/c"}], "run a: parent is not a parameter of pareto"),
        ([{"name": "a", "stage": "base"}, {"name": "a", "stage": "base"}], "has two runs called a"),
        ([{"name": "a-{bits}", "stage": "base"}], "'a-{bits}' cannot be filled in from its matrix, which has nothing"),
        ([{"name": "a b", "stage": "base"}], "the run name 'a b' is not allowed"),
        ([{"name": "$(reboot)", "stage": "base"}], "is not allowed"),
        ([{"name": "a", "stage": "base", "gpu": 1}], "runs.0.gpu: that key is unknown: choose one of name, stage,"),
        ([{"name": "a", "stage": "base", "parnt": "b"}], "runs.0.parnt: that key is unknown; did you mean parent?"),
        ([{"stage": "base"}], "runs.0.name: Field required"),
        ([], "runs and seeds need at least one item"),
        (
            [{"name": "a", "stage": "eval", "parent": "b"}, {"name": "b", "stage": "eval", "parent": "a"}],
            "these runs wait for each other: a, b",
        ),
    ],
)
def test_a_wrong_study_is_one_sentence_before_anything_starts(home, entries, sentence):
    write(home, *entries)
    with pytest.raises(StudyError) as error:
        run_study("tiny")
    assert sentence in str(error.value)
    assert "tiny" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (home / "runs").exists()


def test_an_unknown_study_and_broken_yaml_are_one_sentence(home):
    write(home, BASES)
    with pytest.raises(StudyError, match="tinny is neither a study nor a file; did you mean tiny"):
        load("tinny")
    (home / "notebooks" / "studies" / "tiny.yml").write_text("name: tiny\nruns: [")
    with pytest.raises(StudyError, match=r"tiny\.yml is not valid YAML in line 2"):
        load("tiny")
    write(home, BASES)
    (home / "notebooks" / "studies" / "tiny.yml").rename(home / "notebooks" / "studies" / "small.yml")
    with pytest.raises(StudyError, match=r"small\.yml: its name is 'tiny', and must be that of the file, 'small'"):
        load("small")


def test_a_dry_run_says_what_would_run_and_writes_nothing(home, capsys):
    write(home, BASES, EVALS)
    assert run_study("tiny", dry_run=True)
    assert "tiny: 4 of 4 runs to do." in capsys.readouterr().out
    assert not (home / "runs").exists()


MODELS = {"small": "base-xs", "large": "some/model"}


def test_a_model_is_named_in_one_place(home):
    entry = {"name": "eval-{parent}", "stage": "eval", "parent": ["small", "large"]}
    write(home, {"name": "base-xs", "stage": "base"}, entry, models=MODELS | {"small": "other/model"})
    jobs = {job.name: job for job in plan("tiny")}
    assert jobs["eval-large"].parameters["parent"] == "some/model"
    assert jobs["eval-small"].parameters["parent"] == "other/model"
    write(home, {"name": "small", "stage": "base"}, entry, models=MODELS)
    with pytest.raises(StudyError, match="calls both a model and a run small: give one of them another name"):
        plan("tiny")
    write(home, entry, models={"small": "some/model"})
    with pytest.raises(StudyError, match="run eval-large: The parent large is unknown"):
        plan("tiny")


def test_the_smoke_variant_has_every_run_with_other_models_and_parameters(home):
    entry = {"name": "eval-{parent}", "stage": "eval", "parent": ["small", "large"], "params": {"n": 100, "seed": 3}}
    write(home, entry, models=MODELS, smoke={"eval": {"n": 2}}, seeds=[1])
    (folder := home / "m").mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    small = variant(load("tiny"), {"small": str(folder), "large": str(folder)})
    jobs = plan(small)
    assert small.name == "tiny-smoke"
    assert [(job.name, job.parameters["parent"], job.parameters["n"], job.parameters["seed"]) for job in jobs] == [
        ("eval-small", str(folder), 2, 3),
        ("eval-large", str(folder), 2, 3),
    ]
    assert names(distinct(jobs)) == ["eval-small"]
    for smoke, sentence in (({}, "has no smoke variant"), ({"base": {"value": 0.1}}, "smoke has base, and no run")):
        write(home, entry, models=MODELS, smoke=smoke)
        with pytest.raises(StudyError, match=sentence):
            run_study("tiny", smoke=True)
    write(home, entry, models=MODELS, smoke={"eval": {"m": 1}})
    with pytest.raises(StudyError, match="m is not a parameter of eval"):
        plan(variant(load("tiny"), MODELS))


def test_a_smoke_variant_starts_from_no_model_of_a_hub(home):
    entry = {"name": "eval-{parent}", "stage": "eval", "parent": ["large", "Qwen/Qwen3-0.6B"]}
    write(home, entry, models={"large": "Qwen/Qwen3-8B"}, smoke={"eval": {"n": 2}})
    with pytest.raises(
        StudyError, match=r"Run eval-Qwen3-0.6B starts from Qwen/Qwen3-0.6B, which a smoke variant does not replace"
    ):
        run_study("tiny", smoke=True, dry_run=True)


def test_runs_that_are_the_same_are_made_once_with_their_parents(home):
    write(home, BASES | {"params": {}}, EVALS, PARETO)
    jobs = distinct(plan("tiny"))
    assert [(job.name, job.parents) for job in jobs] == [
        ("base-xs", []),
        ("eval-base-xs", ["base-xs"]),
        ("pareto", ["eval-base-xs", "eval-base-xs"]),
    ]


def test_a_dry_run_says_what_runs_take_and_which_do_not_fit(capsys):
    assert run_study("qwen3", dry_run=True, gpu_gib=100)
    lines = capsys.readouterr().out.splitlines()
    (large,) = [line for line in lines if " grpo-qwen3-8b " in line and "GiB, and" not in line]
    assert "GiB" in large
    assert " h " in large
    assert any(line.split()[:3] == ["grpo", "48", "runs"] and "GPU hours" in line for line in lines)
    assert [line for line in lines if "grpo-qwen3-8b needs" in line and "a GPU has 100: policy = qlora" in line]
    assert not [line for line in lines if "qlora-qwen3-8b needs" in line]


def test_only_takes_the_runs_of_such_names_and_what_they_are_made_from(home, capsys):
    write(home, BASES, EVALS, PARETO)
    assert run_study("tiny", dry_run=True, only=["eval-*-s", "base-s"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("would run")] == ["base-s", "eval-base-s"]
    with pytest.raises(StudyError, match=r"Study tiny has no run called x-\*\."):
        run_study("tiny", dry_run=True, only=["x-*"])


def test_the_longest_chain_goes_first_and_memory_is_counted(home, monkeypatch):
    write(home, BASES, EVALS, PARETO)
    shape = (estimate.SHAPES["s"], 32.0)
    hours = {"base-xs": 1 / 60, "base-s": 2 / 60, "eval-base-xs": 3 / 60, "eval-base-s": 4 / 60}
    known = {name: estimate.Estimate(each, 10.0, shape) for name, each in hours.items()} | {"pareto": None}
    monkeypatch.setattr(estimate, "of_study", lambda jobs, gib: known)
    ahead = schedule._ahead(plan("tiny"), 80)
    last = estimate.START  # of a run without an estimate
    assert {name: own["chain_s"] for name, own in ahead.items()} == {
        "base-xs": 60 + 180 + last, "base-s": 120 + 240 + last, "eval-base-xs": 180 + last, "eval-base-s": 240 + last,
        "pareto": last,
    }  # fmt: skip
    context = round(1024 * schedule.CONTEXT_GIB)
    assert ahead["base-s"]["gpu_mib"] == 10 * 1024 + context
    assert ahead["pareto"]["gpu_mib"] == context


# --- running ----------------------------------------------------------------------------------------------------------


@slow
def test_a_failure_stops_its_descendants_only_and_a_second_call_resumes(home, capfd):
    parts = [{"name": "base-xs", "stage": "base"}, {"name": "base-s", "stage": "base", "params": {"size": "s"}}]
    broken = {**parts[1], "params": {"size": "s", "fault": "error"}}
    write(home, parts[0], broken, EVALS, PARETO)
    assert run_study("tiny") is False
    output = capfd.readouterr().out
    assert "tiny: 2 ran, 0 were done, 1 failed, 2 not run" in output
    assert "base-xs: started\n" in output
    assert "eval-base-xs: done after " in output
    assert "ValueError: broken on purpose" in output
    assert "eval-base-s was not run, because base-s failed." in output
    assert "pareto was not run, because base-s failed." in output
    assert "working on" not in output  # what notebooks print is in their logs
    assert "working on xs" in (home / "runs" / "tiny" / "logs" / "base-xs.log").read_text()
    with pytest.raises(runs.RunError, match="The parent tiny/base-s failed"):
        runs.load_parent("tiny/base-s")

    write(home, *parts, EVALS, PARETO)
    assert run_study("tiny") is True
    assert "tiny: 3 ran, 2 were done, 0 failed, 0 not run" in capfd.readouterr().out
    result = runs.read(runs.find("tiny/pareto"))
    assert (result.study, result.name, result.metrics[0].value) == ("tiny", "pareto", 2)
    assert result.command == "lowbit run pareto -p parents=tiny/eval-base-xs,tiny/eval-base-s"

    began = time.perf_counter()
    assert run_study("tiny") is True
    assert time.perf_counter() - began < 1  # Snakemake did not even start
    assert "tiny: 0 ran, 5 were done" in capfd.readouterr().out
    assert sorted(path.name for path in home.iterdir()) == ["notebooks", "runs"]  # the checkout is not dirtied
    assert not (home / "runs" / "tiny" / ".work").exists()


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_study_that_is_stopped_leaves_nothing_running_and_can_go_on(home, hold, capfd, number):
    write(home, {"name": "one", "stage": "base"}, {"name": "two", "stage": "eval", "parent": "one"})
    command = [sys.executable, "-m", "helpers.cli", "study", "tiny"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    kernel = kernel_at_work(home)
    with pytest.raises(StudyError, match="The study tiny is being run by another process"):
        run_study("tiny")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    wait_for(lambda: gone(kernel), 5)
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert errors == "The study tiny was interrupted; start it again to go on from the finished runs.\n"
    assert not [path for path in published(home) if path.name == "result.json"]
    hold.unlink()
    assert run_study("tiny") is True
    assert "tiny: 2 ran, 0 were done, 0 failed" in capfd.readouterr().out


@slow
def test_a_run_that_another_study_made_is_not_made_again(home, capfd):
    write(home, BASES)
    run_study("tiny")
    text = (home / "notebooks" / "studies" / "tiny.yml").read_text()
    (home / "notebooks" / "studies" / "other.yml").write_text(text.replace("tiny", "other"))
    assert run_study("other")
    assert "other: 0 ran, 2 were done" in capfd.readouterr().out
    assert runs.find("other/base-s") == runs.find("tiny/base-s")
    assert json.loads((project.runs_dir() / "other" / "plan.json").read_text())["study"] == "other"


@slow
def test_a_template_that_changes_during_a_study_stops_its_runs(home, capfd):
    write(home, {"name": "one", "stage": "base"})
    jobs = plan("tiny")
    template = home / "notebooks" / "01_base.ipynb"
    template.write_text(template.read_text().replace("working on", "busy with"))
    with pytest.raises(runs.RunError, match=r"one is now base-.*, not base-.*: code or parents changed"):
        execute("base", jobs[0].parameters, "tiny", "one", expect=jobs[0].run_id)


@pytest.mark.parametrize("entry", [{**EVALS, "parent": []}, {**BASES, "matrix": {"size": []}}])
def test_an_empty_list_is_an_error_not_no_runs(home, entry):
    write(home, BASES, entry)
    with pytest.raises(StudyError, match="is not a study"):
        load("tiny")


def test_a_key_that_stands_twice_is_an_error(home):
    (home / "notebooks" / "studies" / "tiny.yml").write_text("name: tiny\nruns: []\nruns: []\n")
    with pytest.raises(StudyError, match="the key runs stands there twice"):
        load("tiny")


@slow
def test_runs_that_do_not_fit_the_gpu_are_named_before_anything_starts(home, monkeypatch, capfd):
    write(
        home,
        {"name": "eval-large", "stage": "eval", "parent": "large", "params": {"n": 4}},
        models={"large": "Qwen/Qwen3-8B"},
    )
    big = estimate.Estimate(1.0, 194.0, (estimate.SHAPES["Qwen3-8B"], 32.0))
    monkeypatch.setattr(estimate, "of_study", lambda jobs, gib: {job.name: big for job in jobs})
    assert run_study("tiny", gpu_gib=80)  # a template of the tests, which needs no GPU
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "  eval-large needs 194 GiB, and a GPU has 80: it takes a GPU of 194 GiB or a smaller model."
    assert "tiny: 1 ran" in lines[-1]


@slow
def test_what_only_leaves_out_is_not_made_and_not_missed(home, capfd):
    write(home, BASES, EVALS)
    assert run_study("tiny", only=["eval-base-s"])
    assert "tiny: 2 ran, 0 were done, 0 failed, 0 not run" in capfd.readouterr().out
    made = {job.name: runs.done(job.run_id) is not None for job in plan("tiny")}
    assert made == {"base-xs": False, "base-s": True, "eval-base-xs": False, "eval-base-s": True}


@slow
def test_runs_may_lie_in_a_folder_with_an_awkward_name(home, monkeypatch):
    monkeypatch.setenv("LOWBIT_RUNS", str(home / "r{s} #1: 'x'"))
    write(home, {"name": "one", "stage": "base"})
    assert run_study("tiny")
