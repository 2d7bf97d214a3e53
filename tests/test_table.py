"""results.csv: its columns, what stands in them, and that equal runs give equal files."""

import json

import pandas as pd
import pytest

from helpers import runs
from helpers.report import table
from machinery import make, planned

DESIGN = (
    "study, run_id, stage, model, params, method, scheme, bits, group_size, effective_bits, memory_bytes, packed, "
    "source, task, benchmark, metric, value, ci_low, ci_high, n, k, seed, reply_tokens, wall_s, commit, command"
)


def with_record(run, **changes):
    """Rewrite what a run recorded."""
    data = json.loads((run.path / "result.json").read_text())
    (run.path / "result.json").write_text(json.dumps(data | changes))
    return runs.read(run.path)


def test_a_row_holds_model_memory_and_metric(home):
    metric = {
        "metric": "accuracy",
        "task": "arithmetic",
        "benchmark": "arithmetic/level1",
        "value": 0.5,
        "n": 100,
        "k": 1,
    }
    model = {"name": "rtn-s", "parameters": 790272, "method": "rtn", "scheme": "w4g64", "bits": 4, "group_size": 64}
    memory = {"parts": {"codes": 9}, "total_bytes": 9, "effective_bits": 4.5, "packed": False}
    more = {"ci_low": 0.4, "ci_high": 0.6, "reply_tokens": 20.5, "detail": {"correct": "10"}}
    result = with_record(make(), model=model, memory=memory, metrics=[metric | more, metric])
    frame = table.rows([result])
    assert ", ".join(frame.columns) == f"{DESIGN}, recipe, name"  # ours, for figures and verdicts
    row = frame.iloc[0].to_dict()
    expected = metric | model | {"params": 790272, "memory_bytes": 9, "effective_bits": 4.5, "packed": False}
    expected |= {
        "model": "rtn-s",
        "name": result.name,
        "source": "run",
        "ci_low": 0.4,
        "ci_high": 0.6,
        "seed": 0,
        "reply_tokens": 20.5,
    }
    expected = {name: value for name, value in expected.items() if name in frame.columns}
    assert {name: row[name] for name in expected} == expected
    assert len(frame) == 2


def test_whole_numbers_that_are_missing_stay_whole_numbers(home):
    text = table.rows([runs.read(make().path)]).to_csv(index=False)
    assert ",16.0," not in text
    assert ",9,1,0," in text  # n, k, seed


def test_the_table_lists_planned_and_lone_runs_in_a_fixed_order(home):
    lone = make(seed=1)
    old = make(study="micro", name="gone", seed=2)  # not in the plan any more
    s, xs = make(study="micro", name="base-s", size="s"), make(study="micro", name="base-xs")
    planned(home, "micro", **{"base-s": s.context.run_id, "base-xs": xs.context.run_id})
    planned(home, "again", **{"first": xs.context.run_id})  # the same run, in another study too
    planned(home, "unborn", **{"first": "base-0000000000"})
    path = table.write()
    frame = pd.read_csv(path)
    assert [*zip(frame["study"], frame["run_id"], strict=True)] == [
        ("again", xs.context.run_id),
        ("micro", s.context.run_id),
        ("micro", xs.context.run_id),
        ("local", lone.context.run_id),
    ]
    assert old.context.run_id not in set(frame["run_id"])
    before = path.read_bytes()
    assert table.write().read_bytes() == before


def test_rewards_by_level_stay_in_the_records(home):
    metric = {"task": "arithmetic", "value": 0.5, "n": 100, "k": 1}
    names = [
        ("accuracy", "arithmetic"),
        ("accuracy", "arithmetic/level1"),
        ("reward", "arithmetic"),
        ("reward@4", "arithmetic/level1"),
    ]
    metrics = [metric | {"metric": name, "benchmark": benchmark} for name, benchmark in names]
    frame = table.rows([with_record(make(), metrics=metrics, commit="0123456789abcdef")])
    assert [*zip(frame["metric"], frame["benchmark"], strict=True)] == names[:3]
    assert set(frame["commit"]) == {"0123456789ab"}


def test_an_empty_table_is_a_sentence(home):
    with pytest.raises(runs.RunError, match="No finished run"):
        table.write()


def test_a_broken_run_is_left_out(home):
    good, bad = make(), make(seed=1)
    (bad.path / "result.json").write_text("{")
    table.write()
    assert set(pd.read_csv(home / "runs" / "results.csv")["run_id"]) == {good.context.run_id}
