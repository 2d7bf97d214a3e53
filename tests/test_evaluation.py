"""Scores and comparisons against hand-computed and published values."""

import gzip
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import evaluation, tasks
from helpers.errors import UserError
from helpers.evaluation.scores import mean, share
from helpers.grading import grade
from helpers.sampling import Reply


def evaluate(right: list[int], k: int = 1, n: int = 10, as_sampled: bool = False):
    """Metrics of `n` problems of which problem i has right[i] right replies of k."""
    problems = tasks.load("arithmetic", "test", n, seed=0)
    texts = [rf"\boxed{{{p.gold}}}" if j < r else "no" for p, r in zip(problems, right, strict=True) for j in range(k)]
    replies = [Reply(problems[i // k].id, text, tuple(range(4)), True) for i, text in enumerate(texts)]
    verdicts = grade(texts, [p.gold for p in problems for _ in range(k)])
    sampled = 0 if k == 1 and not as_sampled else k
    return problems, replies, verdicts, evaluation.summarize(problems, replies, verdicts, "arithmetic", sampled)


def test_wilson_interval_as_published():
    score = share(81, 263)  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert (round(score.low, 4), round(score.high, 4)) == (0.2553, 0.3662)


def test_t_interval_by_hand():
    score = mean([0.0, 0.5, 1.0], top=1.0)  # 0.5 +- 4.3027 * 0.5 / sqrt(3), cut to [0, 1]
    assert (score.value, score.low, score.high) == (0.5, 0.0, 1.0)
    score = mean([0.4, 0.5, 0.6], top=1.0)
    assert score.low == pytest.approx(0.5 - 4.30265 * 0.1 / 3**0.5, abs=1e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_value(values):
    score = mean(values, 1.0)
    assert 0 <= score.low <= score.value + 1e-12
    assert score.value - 1e-12 <= score.high <= 1


def test_greedy_scores_by_level():
    *_, metrics = evaluate([1, 1, 1, 0, 0, 1, 0, 1, 0, 0])
    found = {(m.metric, m.benchmark): m for m in metrics}
    assert found["accuracy", "arithmetic"].value == 0.5
    assert found["accuracy", "arithmetic/level1"].value == 1.0
    assert found["accuracy", "arithmetic/level5"].value == 0.0
    assert found["accuracy", "arithmetic/level1"].n == 2
    assert found["reward", "arithmetic"].value == pytest.approx(0.55)
    assert found["boxed", "arithmetic"].value == 0.5
    assert found["finished", "arithmetic"].value == 1.0
    assert found["accuracy", "arithmetic"].reply_tokens == 4
    assert found["accuracy", "arithmetic"].detail["correct"] == "1110010100"


def test_avg_at_k_counts_problems_not_replies():
    *_, metrics = evaluate([4, 4, 4, 4, 4, 0, 0, 0, 0, 0], k=4)
    score = next(m for m in metrics if m.metric == "avg@4" and m.benchmark == "arithmetic")
    assert (score.value, score.n, score.k) == (0.5, 10, 4)
    assert score.ci_high - score.ci_low > 0.7  # ten problems, whatever the number of replies
    assert score.detail["correct"] == "4444400000"


def test_one_sampled_reply_is_not_greedy_accuracy():
    *_, metrics = evaluate([1, 1, 1, 0, 0, 1, 0, 1, 0, 0], as_sampled=True)
    assert {m.metric for m in metrics} == {"avg@1", "reward@1", "boxed@1", "finished@1"}
    *_, greedy = evaluate([1, 1, 1, 0, 0, 1, 0, 1, 0, 0])
    assert [len(rows) for rows in evaluation.levels([*greedy, *metrics], "arithmetic").values()] == [5, 5]


def test_equal_values_still_leave_doubt():
    score = mean([1.1] * 100, top=1.1)  # 1.1 - 1.1 * (1 - 0.025 ** 0.01)
    assert score.high == 1.1
    assert score.low == pytest.approx(1.1 * 0.025**0.01)


def accuracy(right):
    return evaluate(right)[3][0]


def test_mcnemar_by_hand():
    # 1 lost, 5 gained: two-sided exact p = 2 * (C(6,0) + C(6,1)) / 64
    first, second = accuracy([1, 0, 0, 0, 0, 0, 1, 1, 0, 0]), accuracy([0, 1, 1, 1, 1, 1, 1, 1, 0, 0])
    found = evaluation.compare(first, second)
    assert (found.gained, found.lost, found.n) == (5, 1, 10)
    assert found.difference == pytest.approx(0.4)
    assert found.p_value == pytest.approx(2 * 7 / 64)
    same = evaluation.compare(first, first)
    assert same.p_value == 1.0
    # Agresti and Min: (0.5 - 0.5) / 12 +- 1.96 * sqrt(0.5 + 0.5) / 12
    assert (same.low, same.high) == pytest.approx((-1.95996 / 12, 1.95996 / 12), abs=1e-5)


def test_holm_by_hand():
    assert evaluation.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert evaluation.holm([]) == []


def test_other_problems_cannot_be_paired():
    first = accuracy([1] * 10)
    second = first.model_copy(update={"detail": {"problems": "other", "correct": "1" * 10}})
    with pytest.raises(UserError, match="the problems differ"):
        evaluation.compare(first, second)
    with pytest.raises(UserError, match="cannot be paired"):
        evaluation.compare(first, evaluate([4] * 10, k=4)[3][0])


def test_replies_are_stored_whole_and_repeatably(tmp_path):
    problems, replies, verdicts, _ = evaluate([1, 0] * 5)
    for name in ("a", "b"):
        evaluation.store(tmp_path / name, problems, replies, verdicts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in gzip.decompress((tmp_path / "a").read_bytes()).decode().splitlines()]
    assert len(rows) == 10
    assert [r["outcome"] for r in rows[:2]] == ["equal", "unparsed"]
    assert rows[0]["reply"] == replies[0].text


def test_tables():
    problems, replies, verdicts, metrics = evaluate([1, 1, 1, 0, 0, 1, 0, 1, 0, 0])
    assert list(evaluation.outcomes(problems, verdicts).columns) == ["equal", "different", "unparsed"]
    assert evaluation.outcomes(problems, verdicts).to_numpy().sum() == 10
    assert list(evaluation.table(metrics, "arithmetic").index) == ["accuracy", "reward", "boxed", "finished"]
    levels = evaluation.by_level(metrics, "arithmetic")
    assert list(levels["accuracy"]) == ["1.000", "0.500", "1.000", "0.000", "0.000"]
    assert list(levels["n"]) == [2] * 5
    assert [len(rows) for rows in evaluation.levels(metrics, "arithmetic").values()] == [5]
    assert evaluation.habits(problems, replies)["share"].sum() == pytest.approx(1.0)


def result(run_id, parent, recipe, made_from, right):
    model = {"name": "s", "recipe": recipe, "scheme": "bf16"} | ({"made_from": made_from} if made_from else {})
    return SimpleNamespace(run_id=run_id, parents=[parent], seed=0, model=model, metrics=[accuracy(right)])


def test_models_are_compared_with_the_one_they_were_made_from():
    base, worse, better = [0] * 8 + [1, 1], [0] * 10, [1] * 10
    found = evaluation.comparisons(
        [
            result("e0", "base-1", "base", None, base),
            result("e1", "grpo-1", "base > grpo", "base-1", better),
            result("e2", "grpo-2", "base > grpo", "base-1", worse),  # the same arm with another learning rate
            result("e3", "rtn-1", "base > grpo > rtn", "grpo-1", worse),
            result("e4", "rtn-9", "base > grpo > rtn", "grpo-9", worse),  # its parent was not evaluated
        ],
        "arithmetic",
    )
    assert list(found["difference"]) == ["+0.800", "-0.200", "-1.000"]
    assert list(found["verdict"]) == ["higher", "noise", "lower"]
