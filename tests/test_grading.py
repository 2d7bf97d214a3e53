"""Grading: which answer counts, when it is equal, and what it earns."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.grading import extract, grade, grade_one, reward


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"<think>1+1=2</think>\boxed{2}", "2"),
        (r"<think>\boxed{3}</think>\boxed{4}", "4"),
        (r"<think>\boxed{3}</think>4", None),
        (r"<think>\boxed{3}", None),  # still thinking: not an answer
        (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),  # the unfinished one does not count
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", ""),
        ("42", None),
        ("", None),
    ],
)
def test_extract(reply, answer):
    assert extract(reply) == answer


@pytest.mark.parametrize(
    ("reply", "gold", "outcome", "rule", "earned"),
    [
        (r"\boxed{42}", "42", "equal", "integer", 1.1),
        (r"\boxed{042}", "42", "equal", "integer", 1.1),
        (r"\boxed{41}", "42", "different", "integer", 0.1),
        (r"\boxed{ab3}", "ab3", "equal", "string", 1.1),
        (r"\boxed{AB3}", "ab3", "different", "string", 0.1),
        (r"\boxed{4 2}", "42", "different", "string", 0.1),
        (r"\boxed{}", "0", "different", "string", 0.1),
        ("42", "42", "unparsed", "no-box", 0.0),
        (r"\boxed{42", "42", "unparsed", "no-box", 0.0),
        (r"\boxed{" + "9" * 5000 + "}", "9", "different", "string", 0.1),  # no huge integers are built
    ],
)
def test_grade_and_reward(reply, gold, outcome, rule, earned):
    verdict = grade_one(reply, gold)
    assert (verdict.outcome, verdict.rule) == (outcome, rule)
    assert reward(verdict) == pytest.approx(earned)


@given(st.text(alphabet=r"\boxed{}<think>/0123456789", max_size=80), st.text(max_size=5))
def test_grading_never_raises(reply, gold):
    assert 0 <= reward(grade_one(reply, gold)) <= 1.1


def test_lists_must_match():
    assert [v.outcome for v in grade([r"\boxed{1}", "no"], ["1", "2"])] == ["equal", "unparsed"]
    with pytest.raises(ValueError, match="zip"):
        grade([], ["1"])


def test_micro_tasks_need_neither_mpmath_nor_sympy():
    code = "import sys; from helpers.grading import grade_one; grade_one('\\\\boxed{7}', '7'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sympy", "mpmath", "math_verify", "torch"} & set(loaded)
