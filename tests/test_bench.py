"""Benchmarks: the form of a measurement, its target, and the command."""

import json
import sys

import pytest

from helpers import bench, cli
from helpers.bench import kd, measure, rollout

KEYS = {
    "work",
    "shape",
    "unit",
    "ours",
    "peers",
    "limit",
    "target",
    "better",
    "ratio",
    "error",
    "spread",
    "device",
    "versions",
    "commit",
}


@pytest.mark.slow
def test_a_rollout_is_measured(tmp_path):
    (row,) = rollout.rows("base-xs", "w4g64", replies=2, tokens=3, repeats=1)
    assert set(row) == KEYS
    assert row["target"] == pytest.approx(1.1 * row["peers"]["full precision"])
    assert row["ours"] > 0
    assert "base-xs at w4g64, 2 replies of 3 tokens" in bench.as_text(row)
    json.dumps(row)


def test_the_distillation_loss_in_chunks_is_compared_with_the_plain_one():
    (row,) = kd.rows(tokens=50, vocabulary=40, width=8, repeats=1)
    assert set(row) == KEYS
    assert row["error"] < 1e-5


def test_targets():
    row = measure.row("w", "s", "ms", {"mine": [2.0], "theirs": [1.0]}, "mine", target=1.5)
    assert not bench.within(row)
    assert row["ratio"] == 0.5
    assert row["peers"] == {"theirs": 1.0}
    assert row["spread"] == {"ours": [2.0, 2.0], "theirs": [1.0, 1.0]}
    assert "not reached" in bench.as_text(row)
    assert bench.within(row | {"better": "higher"})
    assert bench.within(row | {"target": None})


def test_medians_of_alternating_calls_without_the_first():
    calls = []
    found = measure.timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


def test_the_command_adds_to_a_file_and_says_whether_the_target_is_reached(tmp_path, monkeypatch, capsys):
    made = measure.row("w", "s", "ms", {"mine": [2.0], "theirs": [1.0]}, "mine", target=1.5)
    monkeypatch.setitem(bench.BENCHMARKS, "rollout", lambda repeats: [made])
    out = tmp_path / "speed.json"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["lowbit", "bench", "rollout", "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 1
    assert json.loads(out.read_text()) == [made, made]
    monkeypatch.setattr(sys, "argv", ["lowbit", "bench", "rolout"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "work = 'rolout' is unknown: choose one of rollout, kd, grade." in capsys.readouterr().err
