"""Benchmarks: the form of a measurement, its target, and the command."""

import json
import sys
import warnings

import pytest

from helpers import bench, cli, params, project, records
from helpers.bench import decode, kd, measure, rollout
from helpers.errors import UserError
from helpers.quant import fake

KEYS = {
    *("work", "shape", "unit", "ours", "peers", "limit", "target", "reached", "better", "ratio", "error", "spread"),
    *("error_unit", "moved", "repeats", "left_out", "device", "versions", "commit"),
}


SMALL = {  # work -> arguments with which it takes a second or two on a CPU; grading needs data
    "linear": {"shrink": 64},
    "rollout": {"ref": "base-xs", "replies": 2, "tokens": 3},
    "decode": {"sizes": ("xs",), "sequences": (2,), "tokens": 2},
    "qat": {"layers": 1, "length": 16},
    "kd": {"tokens": 50, "vocabulary": 40, "width": 8},
    "gptq": {"texts": 16, "length": 32},
    "grpo": {"ref": "base-xs", "steps": 2, "rounds": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("work", [name for name in SMALL if name in bench.BENCHMARKS])
def test_every_work_gives_rows_of_one_form(work):
    rows = bench.BENCHMARKS[work](**SMALL[work], repeats=1)
    assert rows
    for row in rows:
        assert set(row) == KEYS
        assert row["ours"] > 0
        assert row["device"] == measure.models.device_name()
        assert bench.as_text(row).startswith(f"{row['work']}: {row['shape']}")
    json.dumps(rows, allow_nan=False)


def test_the_distillation_loss_in_chunks_is_compared_with_the_plain_one():
    (row,) = kd.rows(tokens=50, vocabulary=40, width=8, repeats=1)
    assert set(row) == KEYS
    assert row["error"] < 1e-5


def test_a_quantized_rollout_has_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr(rollout, "difference", lambda model, prompts, tokens: float(len(fake.layers(model))))
    monkeypatch.setattr(rollout, "speeds", lambda contenders, tokens, repeats: {name: [1.0] for name in contenders})
    full, quantized = rollout.micro("base-xs", 2, 3, 1)
    assert full["error"] == 0
    assert quantized["error"] > 0


def test_targets():
    row = measure.row("w", "s", "ms", {"mine": [2.0], "theirs": [1.0]}, "mine", target=1.5)
    assert row["reached"] is False
    assert row["ratio"] == 0.5
    assert row["peers"] == {"theirs": 1.0}
    assert row["spread"] == {"ours": [2.0, 2.0], "theirs": [1.0, 1.0]}
    assert "not reached" in bench.as_text(row)
    assert measure.row("w", "s", "ms", {"mine": [2.0]}, "mine", target=1.5, better="higher")["reached"]
    assert measure.row("w", "s", "ms", {"mine": [2.0]}, "mine")["reached"] is None


def test_what_an_error_means_and_which_peer_does_not_run_are_said():
    row = measure.row("w", "s", "ms", {"mine": [2.0]}, "mine", error=1e-3, left_out={"theirs": "no such kernel"})
    told = bench.as_text(row)
    assert "error 1.0e-03 (relative)" in told
    assert "does not run here: no such kernel" in told
    assert "error 1.0e-03 nats" in bench.as_text(row | {"error_unit": "nats"})


def test_bytes_are_named_like_the_values_and_a_row_is_a_metric():
    times, moved = {"mine": [2.0, 3.0, 4.0], "theirs": [1.0]}, {"mine": 5, "theirs": 20}
    row = measure.row("w", "s", "ms", times, "mine", moved=moved)
    assert row["moved"] == {"ours": 5, "theirs": 20}
    metric = records.Metric(**bench.as_metric(row))
    assert (metric.metric, metric.benchmark, metric.value, metric.n) == ("w", "s", 3.0, 3)
    assert metric.detail == row


@pytest.mark.slow
def test_decoding_is_measured_at_each_width():
    rows = decode.rows(("xs",), (2,), tokens=2, repeats=1)
    assert [row["shape"].split(", ")[1] for row in rows] == ["fp32", *decode.SCHEMES]
    for row in rows:
        assert row["error"] == 0
        assert 0 < row["ours"] < row["limit"]
    assert rows[1]["peers"] == {"full precision": rows[0]["ours"]}


def test_the_stage_and_the_command_know_the_same_works(monkeypatch):
    choices = params.template(project.template("speed"))["work"].choices
    assert set(bench.BENCHMARKS) <= set(choices) - {"all"}
    assert set(bench.usual()) == set(bench.BENCHMARKS) - {"grade", "linear"}
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: True)
    assert set(bench.usual()) == set(bench.BENCHMARKS) - {"grade"}
    bench.needs("gpu")
    with pytest.raises(UserError, match="device = cpu cannot be measured here"):
        bench.needs("cpu")


def test_medians_of_alternating_calls_without_the_first():
    calls = []
    found = measure.timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`lowbit bench ...` with a work that is made up: (exit code, output, errors)."""
    monkeypatch.setenv("LOWBIT_RUNS", str(tmp_path / "runs"))

    def made(repeats):
        print("what a library says")
        return [measure.row("w", "s", "ms", {"mine": [2.0] * repeats, "theirs": [1.0]}, "mine", target=1.5)]

    monkeypatch.setitem(bench.BENCHMARKS, "rollout", made)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowbit", "bench", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return (ended.code or 0, *capsys.readouterr())
        return (0, *capsys.readouterr())

    return call


def test_the_command_says_whether_the_target_is_reached_and_does_not_fail(command):
    code, output, errors = command("rollout", "--repeats", "1")
    assert code == 0  # on a slower machine a target may well be missed
    assert output.startswith("w: s, cpu")
    assert "not reached" in output
    assert "what a library says" not in output + errors


def test_the_command_as_json_and_into_a_file(command, tmp_path):
    out = tmp_path / "speed.json"
    rows = [json.loads(command("rollout", "--json", "--repeats", "2", "--out", str(out))[1])[0] for _ in range(2)]
    assert [row["repeats"] for row in rows] == [2, 2]
    assert json.loads(out.read_text()) == rows


@pytest.mark.parametrize("content", ["no JSON", '{"rows": []}'])
def test_a_file_that_rows_cannot_be_added_to_is_refused_before_measuring(command, tmp_path, monkeypatch, content):
    out = tmp_path / "speed.json"
    out.write_text(content)
    monkeypatch.setitem(bench.BENCHMARKS, "rollout", lambda repeats: pytest.fail("it measured"))
    code, _, errors = command("rollout", "--out", str(out))
    assert (code, out.read_text()) == (2, content)
    assert "is no JSON list that rows could be added to" in errors


def test_a_speed_without_the_graph_is_not_published(command, monkeypatch):
    monkeypatch.setitem(
        bench.BENCHMARKS, "rollout", lambda repeats: warnings.warn(f"{bench.engine.NO_GRAPH}: why", stacklevel=1)
    )
    code, output, errors = command("rollout")
    assert (code, output) == (2, "")
    assert errors.startswith("rollout was not measured: no CUDA graph of a decoding step: why.")


def test_an_unknown_work_is_one_sentence(command):
    code, output, errors = command("rolout")
    assert (code, output) == (2, "")
    assert errors.startswith(f"work = 'rolout' is unknown: choose one of {', '.join(bench.BENCHMARKS)}.")
    assert errors.count("\n") == 1
