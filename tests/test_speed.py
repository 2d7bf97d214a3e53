"""The speed chapter: speed.json from published runs, its tables and numbers, its figures, and the Pareto panel of speed."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest

import synthetic_runs
import synthetic_speed as synthetic
from helpers.report import pareto_speed, publish, speed, speed_figures, table
from helpers.report.pages import NOT_MEASURED, SPEED_CHARTS

RESULTS = synthetic_runs.CHECKOUT / "book" / "results"


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    monkeypatch.setenv("LOWBIT_HOME", str(tmp_path))
    monkeypatch.delenv("LOWBIT_RUNS", raising=False)
    return tmp_path


def test_published_runs_make_the_file_the_gpu_first_and_the_later_of_two(home):
    on_cpu = synthetic.row("rollout", "base-s", "s", 3.0, device="cpu")
    gpu = synthetic.rows()
    again = [gpu[0] | {"ours": 1.0}]
    ids = [
        synthetic.run(home, "cpu", [on_cpu]),
        synthetic.run(home, "again", again, started="2026-01-03T00:00:00+00:00"),
        synthetic.run(home, "gpu", gpu),
    ]
    publish.publish(ids)
    results = home / "book" / "results"
    rows = json.loads((results / "speed.json").read_text())
    assert rows == [*again, *gpu[1:], on_cpu]
    assert pd.read_csv(results / "results.csv").empty  # a time is no score
    for name in speed_figures.FIGURES:
        for suffix in (".svg", "-dark.svg"):
            ElementTree.parse(results / f"{name}{suffix}")
        assert len(pd.read_csv(results / f"{name}.csv"))


def test_without_speed_runs_publishing_leaves_the_file(home):
    (home / "book" / "results").mkdir()
    (home / "book" / "results" / "speed.json").write_text("[]\n")
    publish.publish([synthetic_runs.run(home, "mine", "ptq", "s", "rtn", 4, 0.7, study="local")["run_id"]])
    assert (home / "book" / "results" / "speed.json").read_text() == "[]\n"


def test_the_published_file_is_what_the_published_runs_say():
    results = list(publish.published(synthetic_runs.CHECKOUT / "book" / "runs").values())
    if not (rows := speed.merged(results)):
        pytest.skip("no speed run is published yet")
    assert json.loads((RESULTS / "speed.json").read_text()) == rows


def test_what_the_speed_chapter_says_is_so():
    rows = [row for row in speed.read(RESULTS / "speed.json") if row["device"] != "cpu" and "moved" in row]
    if not rows:
        pytest.skip("no GPU is measured yet")
    linear = {
        speed.count_of(row, r"(\d+) rows?$"): row
        for row in rows
        if "linear" in row["work"] and row["shape"].startswith(speed.LAYER)
    }
    assert linear[1]["peers"]["bf16"] < 1.1 * speed.least(linear[1], "bf16")
    others = {name for name in linear[16]["peers"] if name != "bf16"}
    assert others  # at least one of them was there
    assert all(linear[1]["peers"][name] < linear[1]["peers"]["bf16"] for name in others)
    assert all(linear[16]["peers"][name] > linear[16]["peers"]["bf16"] for name in others)
    assert all(linear[m]["ours"] < linear[m]["peers"]["bf16"] for m in (1, 16))
    decoding = [row for row in rows if row["work"].startswith("decoding") and speed.bits_of(row) < 16]
    assert decoding
    assert all(row["ratio"] < 1.1 for row in decoding)  # low bits buy no time at this size


def test_what_a_row_is_about():
    row = synthetic.linear(16, 4, 20.0)
    assert (speed.bits_of(row), speed.count_of(row, r"(\d+) rows?$")) == (4, 16)
    assert speed.bits_of({"work": "rollout, fake-quantized", "shape": "Qwen3-0.6B shape, w4g128"}) == 16
    assert speed.bits_of({"work": "rollout", "shape": "Qwen3-0.6B shape"}) == 16
    assert speed.reached_share(row) == pytest.approx(row["limit"] / 20)
    assert speed.reached_share(synthetic.decode("xs", "bf16", 1, 1e6)) == 0.1
    assert speed.reached_share({"limit": None}) is None


def test_tables():
    rows = synthetic.rows()
    text = speed.measurements(rows)
    assert text.count("\n| ") == len(rows) + 2
    assert "17, reached" in text
    assert "17, **missed**" in text
    assert speed.measurements(rows, "qat").count("QAT step") == 1
    late = speed.missed(rows)
    assert late.count("Some GPU") == 1
    assert "16 rows" in late
    assert speed.missed([row for row in rows if row["reached"] is not False]).startswith("Every target")
    assert "`c0ffeec0ff`" in speed.devices(rows)
    for made in (speed.measurements, speed.missed, speed.devices):
        assert made([]) == NOT_MEASURED


@pytest.mark.slow
def test_what_kernel_tests_ran_is_recorded_and_shown(tmp_path):
    (tmp_path / "conftest.py").write_text((synthetic_runs.CHECKOUT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): assert 0\n")
    evidence = tmp_path / "kernel-tests.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    paths = os.pathsep.join([str(synthetic_runs.CHECKOUT / part) for part in ("src", "tests")])
    environment = os.environ | {"LOWBIT_EVIDENCE": str(evidence), "PYTHONPATH": paths}
    subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path)
    assert json.loads(evidence.read_text())["files"] == {"test_it.py": {"passed": 1, "failed": 1}}
    assert "| `test_it.py` | 1 | 1 | 0 | 0 |" in speed.tests(evidence)
    assert speed.tests(tmp_path / "none").startswith("Not run")


def test_numbers_of_the_prose():
    nothing = speed.numbers([])
    assert set(nothing.values()) == {speed.UNKNOWN}
    some = speed.numbers(synthetic.rows())
    assert set(some) == set(nothing)
    assert some["speed_bandwidth"] == "4.00 TB/s"
    assert some["speed_linear_1"] == "16.2 µs"
    assert some["speed_rollout"] == "20,613 tokens/s"
    assert some["speed_generate"] == "868 tokens/s"
    assert some["speed_fake"] == "97 %"
    assert some["speed_packed_64"] == "2.2"
    assert some["speed_linear_128"] == speed.UNKNOWN
    assert [speed.number(x) for x in (20_613.4, 16.25, 0.002134)] == ["20,613", "16.2", "0.00213"]


def test_a_row_of_an_older_form_is_shown():
    old = {k: v for k, v in synthetic.row("KD loss", "shape", "s", 0.1).items() if k not in ("target", "reached")}
    old = {k: v for k, v in old.items() if k not in ("ratio", "error", "spread", "moved", "repeats")}
    assert "KD loss" in speed.measurements([old])
    assert speed.missed([old]).startswith("Every target")
    speed.numbers([old])


def test_an_error_has_the_unit_of_its_work():
    row = synthetic.row("rollout, packed", "shape", "tokens/s", 0.1)
    assert "0.001 nats" in speed.measurements([row])
    assert "0.001 of the tokens" in speed.measurements([row | {"work": "decoding, micro models"}])
    assert "0.001 |" in speed.measurements([row | {"work": "QAT step"}])
    assert "0.001 |" in speed.measurements([row | {"error_unit": ""}])
    assert "theirs: does not run" in speed.measurements([row | {"left_out": {"theirs": "why"}}])


def test_figures_of_rows_that_are_not_there():
    assert all(speed_figures.shown(name, []) is None for name in speed_figures.FIGURES)
    assert {*speed_figures.FIGURES, pareto_speed.STEM} == set(SPEED_CHARTS)


def test_the_roofline_has_each_contender_once():
    found = speed_figures.linear(synthetic.rows())
    one = found[found["m"] == 1].set_index("name")
    assert list(one.index) == ["ours, w4g128", "bf16", "bitsandbytes NF4", "ours, w2g128"]
    assert one.loc["bf16", "limit"] == pytest.approx(2 * synthetic.N * synthetic.K / synthetic.BANDWIDTH * 1e6)


def test_tokens_by_bits_only_where_there_are_several_widths():
    found = speed_figures.tokens(synthetic.rows())
    assert [panel.partition("\n")[0] for panel in dict.fromkeys(found["panel"])] == [
        *("Qwen3-8B shape", "micro, 1 sequence", "micro, 64 sequences"),
    ]


def accuracy(model, recipe, method, bits, seed, value, study="arms"):
    scheme = "bf16" if bits == 16 else f"w{bits}g64"
    row = {"study": study, "model": model, "recipe": recipe, "method": method, "scheme": scheme, "bits": bits}
    row |= {"seed": seed, "value": value, "ci_low": value - 0.1, "ci_high": value + 0.1, "n": 100, "k": 1}
    return row | {"metric": "accuracy", "task": "arithmetic", "benchmark": "arithmetic", "source": "run"}


def test_the_panel_joins_size_and_bits_and_finds_the_frontier():
    results = pd.DataFrame(
        [
            *(accuracy("s", "base > grpo", "grpo", 16, seed, 0.8) for seed in (0, 1)),
            *(accuracy("s", "base > grpo > awq", "awq", 4, seed, 0.7) for seed in (0, 1)),
            accuracy("s", "base > grpo > gptq", "gptq", 4, 0, 0.75, study="micro"),  # fewer seeds
            *(accuracy("l", "base > grpo > gptq", "gptq", 4, seed, 0.9) for seed in (0, 1)),
            *(accuracy("l", "base > grpo > awq", "awq", 4, seed, 0.95) for seed in (0, 1)),
            accuracy("xs", "base > qlora", "qlora", 4, 0, 0.5),  # another arm
        ],
        columns=table.COLUMNS,
    )
    found = pareto_speed.joined(results, synthetic.rows())
    one = found[found["sequences"] == 1].set_index(["model", "bits"])
    assert one["value"].to_dict() == {("s", 16): 0.8, ("s", 4): 0.7, ("l", 4): 0.9}
    assert one["frontier"].to_dict() == {("s", 16): True, ("s", 4): False, ("l", 4): True}
    assert one.loc[("s", 16), "tokens_per_second"] == 3000.0


def test_the_panel_is_drawn(tmp_path):
    results = pd.DataFrame([accuracy("s", "base > grpo", "grpo", 16, 0, 0.8)], columns=table.COLUMNS)
    pareto_speed.write(results, synthetic.rows(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"pareto-speed{end}" for end in (".svg", "-dark.svg", ".csv")}
    pareto_speed.write(results[:0], synthetic.rows(), tmp_path / "none")
    pareto_speed.write(results, [], tmp_path / "none")
    assert not (tmp_path / "none").exists()
