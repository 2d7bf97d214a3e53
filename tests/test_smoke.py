"""The papers' study, every run of it, end to end on tiny random models: nothing in it is code that never ran."""

import json

import pytest

from helpers import project, runs, study
from helpers.report import table
from helpers.schedule import run_study
from helpers.smoke import distinct, kind_of, prepare


@pytest.fixture
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("LOWBIT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "runs"


def test_every_line_of_the_studies_is_in_their_smoke_variants(own_runs):
    for name in ("qwen3", "smollm2"):
        whole = study.load(name)
        small, data = prepare(whole, own_runs / ".smoke")
        assert set(small.models) == set(whole.models)
        assert [job.name for job in study.plan(small)] == [job.name for job in study.plan(whole)]
        assert (data / "math_l3to5.jsonl").is_file()
        changed = {stage: set(values) for stage, values in whole.smoke.items()}
        for one, full in zip(study.plan(small), study.plan(whole), strict=True):
            differ = {key for key in full.parameters if one.parameters[key] != full.parameters[key]}
            assert differ <= {"parent", "parents"} | changed.get(full.stage, set())
    kinds = {kind_of(ref) for ref in study.load("qwen3").models.values()}
    assert kinds == {"qwen3", "qwen2"}
    assert kind_of("pypi/SmolLM2-135M-Instruct") == "llama"


def test_a_dry_run_writes_nothing_and_has_the_same_ids(own_runs, capfd):
    assert run_study("smollm2", dry_run=True, smoke=True)
    assert not own_runs.exists()
    told = capfd.readouterr().out
    jobs = distinct(study.plan(prepare(study.load("smollm2"), own_runs / ".smoke")[0]))
    assert [line.split()[-1] for line in told.splitlines() if line.startswith("would run")] == [j.run_id for j in jobs]


@pytest.mark.slow
def test_the_papers_study_runs_end_to_end(own_runs, capfd):
    """Every run of one Qwen3, since all sizes are the same tiny model, and of R1's Qwen2."""
    assert run_study("qwen3", jobs=2, smoke=True), capfd.readouterr().out
    jobs = distinct(study.plan(prepare(study.load("qwen3"), own_runs / ".smoke")[0]))
    planned = json.loads((own_runs / "qwen3-smoke" / "plan.json").read_text())["jobs"]
    assert [job["run_id"] for job in planned] == [job.run_id for job in jobs]
    assert {job.stage for job in jobs} == set(project.templates()) & {"grpo", "ptq", "qat", "eval", "pareto"}
    results = [runs.read(runs.done(job.run_id)) for job in jobs]
    assert all(result.metrics for result in results if result.stage == "eval")
    frame = table.rows(results)
    assert set(frame["benchmark"]) >= {"papers", "aime24", "amc83", "math500", "minerva", "olympiadbench", "gsm8k"}
    assert {"base > gptq > qat_kd > qaft", "base > qlora > merge", "base > grpo > awq"} <= set(frame["recipe"])
