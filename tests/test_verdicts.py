"""Verdicts: pairs by size and seed, the t test, what an interval says of a claim, and claims that nothing here can test."""

import pandas as pd
import pytest
from scipy import stats

from helpers.report import verdicts
from helpers.report.verdicts import MARGIN, Arm, Claim, judge


def rows(arms):
    """{(recipe, bits): {(size, seed): accuracy}} as rows of results.csv."""
    return pd.DataFrame(
        [
            {
                "study": "arms", "metric": "accuracy", "benchmark": "arithmetic", "recipe": recipe, "bits": bits, "scheme": "x",
                "model": size, "seed": seed, "value": value, "n": 1000, "run_id": f"{recipe}-{bits}-{size}-{seed}",
            }
            for (recipe, bits), values in arms.items()
            for (size, seed), value in values.items()
        ]
    )  # fmt: skip


QAFT = {("s", 0): 0.80, ("s", 1): 0.79, ("m", 0): 0.70, ("m", 1): 0.72}
AFTER = {("s", 0): 0.84, ("s", 1): 0.85, ("m", 0): 0.75, ("m", 1): 0.75, ("l", 0): 0.9}
CLAIM = Claim("worse", "0.1", Arm("base > qaft", 8), Arm("base > grpo > awq", 8), "lower")


def test_each_size_is_a_row_and_the_test_is_scipy_s():
    df = rows({("base > qaft", 8): QAFT, ("base > grpo > awq", 8): AFTER, ("base > qaft", 4): {("s", 0): 0.1}})
    found = verdicts.verdicts(df, [CLAIM])
    assert list(found["claim"]) == ["worse (s)", "worse (m)"]  # one run of l makes no pair
    row = found.iloc[1]
    d = [-0.05, -0.03]
    assert row["p_value"] == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    interval = stats.t.interval(0.95, 1, sum(d) / 2, stats.sem(d))
    assert row["ours"] == f"0.710 against 0.750: -0.0400 [{interval[0]:+.4f}, {interval[1]:+.4f}]"
    assert row["test"] == "paired t over 2 seeds (accuracy)"
    assert (row["n"], row["seeds"], row["verdict"]) == (1000, 2, "inconclusive")
    assert len(row["run_ids"].split(" base > ")) == 4


def test_several_pairs_of_one_seed_are_one_observation():
    pairs = pd.DataFrame(
        {
            "seed": [0, 0, 1, 1],
            "value_a": [0.9, 0.7, 0.8, 0.8],
            "value_b": [0.5, 0.5, 0.6, 0.4],
            "n_a": 9,
            "run_id_a": "a",
            "run_id_b": "b",
        }
    )
    row = verdicts.judged(("1", "c", ""), pairs, "higher")
    assert row["seeds"] == 2
    assert row["ours"].startswith("0.800 against 0.500: +0.3000 [+0.3000, +0.3000]")


def test_p_values_are_corrected_for_all_rows():
    found = pd.DataFrame({"p_value": [0.01, None, 0.04]})
    assert verdicts.corrected(found)["p_holm"].tolist()[::2] == [0.02, 0.04]


@pytest.mark.parametrize(
    ("low", "high", "expected", "verdict"),
    [
        (-0.05, -0.01, "lower", "holds"),
        (0.01, 0.05, "lower", "contradicted"),
        (-0.01, 0.05, "lower", "inconclusive"),
        (0.01, 0.05, "higher", "holds"),
        (-0.05, -0.01, "higher", "contradicted"),
        (-0.01, 0.02, "lower", "no difference"),  # about equal is not worse
        (-0.02, -0.01, "lower", "holds"),  # a small difference, but beyond chance
        (-MARGIN / 2, MARGIN / 2, "equal", "holds"),
        (-2 * MARGIN, MARGIN / 2, "equal", "inconclusive"),
        (-3 * MARGIN, -2 * MARGIN, "equal", "contradicted"),
        (-0.02, -0.01, "equal", "holds"),  # a difference beyond chance may still be a small one
    ],
)
def test_what_an_interval_says(low, high, expected, verdict):
    assert judge(low, high, expected) == verdict


def test_what_cannot_be_tested_says_why():
    df = rows({("base > qaft", 8): {("s", 0): 0.8}})
    claims = [Claim("needs 8B", "x", why="needs a model of that size"), CLAIM]
    found = verdicts.verdicts(df, claims)
    assert list(found["verdict"]) == ["untestable here"] * 2
    assert list(found["ours"]) == ["needs a model of that size", "fewer than two seeds"]
    assert list(found.columns) == verdicts.COLUMNS
    assert "**untestable here**" in verdicts.verdict_page(found)


def test_arms_are_means_over_seeds():
    page = verdicts.arms_page(rows({("base > qaft", 8): QAFT, ("base > grpo > awq", 8): {("l", 0): 0.9}}))
    assert "| base > qaft | x | 0.795 ± 0.064 (2) | 0.710 ± 0.127 (2) | – |" in page
    assert "0.900 (1 seed)" in page
