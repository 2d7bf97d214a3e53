"""Tables, verdicts and curves that find runs by name."""

import pandas as pd
import pytest

from helpers.records import Result
from helpers.report import curves, findings, recovery, table


def made(name, value, study="recover", metric="accuracy", benchmark="arithmetic", **more):
    metric = {"metric": metric, "value": value, "n": 1000, "k": 1, "task": "arithmetic", "benchmark": benchmark, **more}
    seed = int(name.rpartition("-seed")[2])
    about = {
        "stage": "eval",
        "parameters": {"seed": seed},
        "parents": [],
        "code": "c",
        "command": "lowbit run",
        "commit": "0" * 40,
    }
    return Result(
        run_id=f"{study}-{name}", study=study, name=name, metrics=[metric], seed=seed, dirty=False, files={}, versions={},
        started="2026-01-01T00:00:00+00:00", model={"name": "s"}, memory=None, timings={"wall_s": 1.0}, device="cpu", **about,
    )  # fmt: skip


def arm(name, values, **more):
    return [made(f"{name}-seed{seed}", value, **more) for seed, value in enumerate(values)]


def test_an_arm_is_found_by_its_whole_name():
    df = table.rows(
        [*arm("eval-kd2-s", [0.7, 0.8]), *arm("eval-rl-kd2-s", [0.1]), *arm("eval-kd2-s", [0.5], study="other")]
    )
    assert recovery.accuracies(df, "kd2-s").to_dict() == {0: 0.7, 1: 0.8}
    assert recovery.accuracies(df, "other/kd2-s").to_dict() == {0: 0.5}
    assert recovery.accuracies(df, "kd2").empty


def test_a_table_of_arms():
    df = table.rows(arm("eval-a", [0.7, 0.8, 0.9]))
    text = recovery.cells(df, {"row": {"one": "a", "two": "b"}})
    assert "0.800 ± 0.248 (3)" in text
    assert recovery.cells(df, {"row": {"one": "b"}}) == recovery.NOT_RUN


def test_pairs_of_a_finding_are_of_one_seed():
    results = [*arm("eval-x", [0.9, 0.8, 0.7]), *arm("eval-y", [0.8, 0.6])]
    row = findings.findings(results, [findings.Finding("x beats y", "there", ("x",), ("y",))]).iloc[0]
    assert row["ours"].startswith("0.850 against 0.700: +0.1500")
    assert (row["paper"], row["seeds"], row["n"], row["verdict"]) == ("2", 2, 1000, "inconclusive")


def test_the_best_rate_is_chosen_by_the_watched_problems():
    def tried(init, watched, tested):
        for rate, w, t in zip(recovery.RATES, watched, tested, strict=True):
            name = f"init-{init}-lr{rate}-s"
            yield from arm(name, [w, w], metric="train_accuracy", benchmark="training")
            yield from arm(f"eval-{name}", [t, t])

    results = [
        *tried("gptq", (0.1, 0.5, 0.9, 0.2, 0.3), (0.9, 0.5, 0.7, 0.2, 0.3)),
        *tried("full", (0.4,) * 5, (0.4,) * 5),
    ]
    row = findings.findings(results, [findings.Finding("", "", ("init-gptq@best",), ("init-full@best",))]).iloc[0]
    assert row["ours"].startswith("0.700 against 0.400")


def test_what_came_back_is_a_share_of_what_was_lost():
    results = [*arm("eval-grpo-s", [0.9, 0.9]), *arm("eval-gptq2-s", [0.5, 0.4]), *arm("eval-back-s", [0.8, 0.8])]
    row = findings.findings(results, [findings.Finding("", "", ("back-s@gptq2-s",), ("",), quantity="recovered")]).iloc[
        0
    ]
    assert row["ours"].startswith("0.775 against 0.500")  # 3 of 4, 4 of 5


def test_what_rounding_took_is_taken_from_full_precision():
    results = [
        *arm("eval-grpo-s", [0.9, 0.9]), *arm("eval-gptq2-s", [0.6, 0.5]),
        *arm("recall-grpo-s", [1.0, 1.0], benchmark="recall"), *arm("recall-gptq2-s", [0.9, 0.9], benchmark="recall"),
    ]  # fmt: skip
    found = findings.Finding("", "", ("gptq2-s@arithmetic",), ("gptq2-s@recall",), quantity="lost")
    assert findings.findings(results, [found]).iloc[0]["ours"].startswith("0.350 against 0.100: +0.2500")


def test_how_fast_a_start_converges_is_read_off_its_curve():
    def curve(name, at_20):
        detail = {"steps": [0, 20, 40], "values": [0.1, at_20, 0.9]}
        return arm(name, [0.9, 0.9], metric="train_accuracy", benchmark="training", detail=detail)

    found = findings.Finding("", "", ("a",), ("b",), quantity="early")
    row = findings.findings([*curve("a", 0.5), *curve("b", 0.3)], [found]).iloc[0]
    assert row["ours"].startswith("0.500 against 0.300")


def test_a_finding_without_runs_says_so():
    assert set(findings.findings([])["verdict"]) == {"untestable here"}


@pytest.mark.parametrize("name", curves.CHARTS)
def test_a_chart_draws_each_line_and_writes_its_points(name, tmp_path):
    chart = curves.CHARTS[name]
    detail = {"steps": [1, 2, 3], "values": [0.2, 0.4, 0.6]}
    results = [
        made(f"{arm}-seed{seed}", 0.6, chart.study, panel.metric, "training", detail=detail)
        for panel in chart.panels for arm in panel.lines.values() for seed in (0, 1)
    ]  # fmt: skip
    assert name in curves.write(results, tmp_path)
    points = pd.read_csv(tmp_path / f"{name}.csv")
    assert len(points) == 6 * sum(len(panel.lines) for panel in chart.panels)
    for label in chart.panels[0].lines:
        assert label in (tmp_path / f"{name}.svg").read_text()
    assert curves.write([], tmp_path) == []
