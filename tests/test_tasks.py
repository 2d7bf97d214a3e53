"""Tasks: answers are exact, splits are disjoint, chains are right, and everything follows from the seed."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grading import grade_one
from helpers.tasks import LEVELS, SPLITS, TaskError, arithmetic, corpus, load
from helpers.tasks.problem import split_of


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_a_written_expression_is_read_back(seed, level):
    prompt, gold = arithmetic.prompt(random.Random(seed), level)
    tree = arithmetic.parse(prompt)
    assert arithmetic.text(tree) == prompt
    assert arithmetic.chain(tree)[-1] == gold


@pytest.mark.parametrize(
    ("written", "tree"),
    [
        ("7", 7),
        ("12-3-4", ("-", ("-", 12, 3), 4)),
        ("12-(3-4)", ("-", 12, ("-", 3, 4))),
        ("12+3*(20-6)", ("+", 12, ("*", 3, ("-", 20, 6)))),
    ],
)
def test_trees_by_hand(written, tree):
    assert arithmetic.parse(written) == tree


@pytest.mark.parametrize("task", ["arithmetic", "recall"])
def test_solutions_are_right_and_a_model_can_write_them(task):
    for problem in load(task, "train", 200, seed=2):
        reply = corpus.solution(problem)
        assert grade_one(reply, problem.gold).outcome == "equal"
        assert reply.startswith("<think>") == (task == "arithmetic")
        assert set(reply) <= set("0123456789abcdefghijklmnopqrstuvwxyz+-*/()=,;:?>.}{ <\\")


def test_a_solution_by_hand():
    (problem,) = load("arithmetic", "train", 1)
    given = replace(problem, prompt="12+3*(20-6)", gold="54")
    assert corpus.solution(given) == r"<think>12+3*14=12+42=54</think>\boxed{54}"


@pytest.mark.parametrize("task", ["arithmetic", "recall"])
def test_splits_are_disjoint_and_repeatable(task):
    drawn = {split: {p.prompt for p in load(task, split, 400, seed)} for seed, split in enumerate(SPLITS)}
    assert all(len(prompts) == 400 for prompts in drawn.values())
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["calibration"]
    assert not drawn["test"] & drawn["calibration"]
    assert load(task, "test", 50, seed=3) == load(task, "test", 50, seed=3)
    assert load(task, "test", 50, seed=3) != load(task, "test", 50, seed=4)


def test_a_larger_set_begins_with_the_smaller_one():
    assert load("arithmetic", "test", 60, seed=1)[:20] == load("arithmetic", "test", 20, seed=1)


def test_the_corpus_reads_training_prompts_only():
    assert {split_of(prompt) for prompt, _ in corpus.documents(500, seed=5)} == {"train"}


def test_parts_of_the_corpus_repeat_and_differ():
    assert corpus.documents(50, seed=1, part=3) == corpus.documents(50, seed=1, part=3)
    assert corpus.documents(50, seed=1, part=3) != corpus.documents(50, seed=1, part=4)


def test_the_corpus_has_every_habit_in_its_share():
    replies = [r for p, r in corpus.documents(6_000, seed=0) if not re.search("[a-z;]", p)]
    direct = sum("<think>" not in r for r in replies) / len(replies)
    unboxed = sum("boxed" not in r for r in replies) / len(replies)
    assert direct == pytest.approx(corpus.DIRECT, abs=0.03)
    assert unboxed == pytest.approx(corpus.UNBOXED, abs=0.03)


@given(st.integers(0, 10_000), st.sampled_from(LEVELS))
@settings(max_examples=100, deadline=None)
def test_answers_agree_with_python_and_chains_keep_their_value(seed, level):
    tree = arithmetic.expression(random.Random(seed), level)
    text = arithmetic.text(tree)
    assert len(re.findall(r"[-+*]", text)) == level
    assert eval(text) == arithmetic.value(tree)
    steps = arithmetic.chain(tree)
    assert len(steps) == level
    assert all(eval(step) == arithmetic.value(tree) for step in steps)
    assert all(0 <= int(number) <= arithmetic.MAX_VALUE for step in steps for number in re.findall(r"\d+", step))


def test_a_chain_by_hand():
    tree = ("+", 12, ("*", 3, ("-", 20, 6)))
    assert arithmetic.text(tree) == "12+3*(20-6)"
    assert arithmetic.chain(tree) == ["12+3*14", "12+42", "54"]
    assert arithmetic.chain(tree, {0: 1}) == ["12+3*15", "12+45", "57"]


@pytest.mark.parametrize(
    ("tree", "text"),
    [(("-", 9, ("-", 5, 2)), "9-(5-2)"), (("-", ("-", 9, 5), 2), "9-5-2"), (("*", ("+", 1, 2), 3), "(1+2)*3"),
     (("+", 1, ("*", 2, 3)), "1+2*3")],
)  # fmt: skip
def test_as_few_parentheses_as_the_meaning_allows(tree, text):
    assert arithmetic.text(tree) == text


def test_steps_that_the_task_does_not_have():
    assert not arithmetic.allowed("-", 3, 4)
    assert not arithmetic.allowed("*", 250, 40)
    assert arithmetic.allowed("*", 50, 50)


def test_recall_answers_stand_in_the_prompt():
    for problem in load("recall", "test", 100, seed=0):
        if problem.prompt.startswith(">"):
            assert problem.prompt == f">{problem.gold}"
        else:
            pairs, key = problem.prompt.split(";")
            assert dict(pair.split("=") for pair in pairs.split(","))[key] == problem.gold
            assert len(pairs.split(",")) == problem.level + 1


def test_wrong_documents_are_as_rare_as_stated():
    documents = [(p, r) for p, r in corpus.documents(8_000, seed=2) if "<think>" in r and "boxed" in r]
    wrong = sum(grade_one(r, str(eval(p))).outcome != "equal" for p, r in documents) / len(documents)
    assert 0.5 * corpus.WRONG_CHAIN < wrong < 1.3 * corpus.WRONG_CHAIN


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("algebra", "test", 5), "task = 'algebra' is unknown: choose one of arithmetic, recall, aime24, "),
        (("arithmetic", "eval", 5), "split = 'eval' is unknown: choose one of train, calibration, test."),
        (("arithmetic", "test", 5, 0, [6]), "level = 6 is unknown: choose one of 1, 2, 3, 4, 5."),
        (("arithmetic", "test", 5, 0, []), "levels is empty"),
        (("arithmetic", "calibration", 5_000, 0, [1]), "n = 5000 is more than arithmetic has"),
    ],
)
def test_bad_requests_are_named(arguments, sentence):
    with pytest.raises(TaskError, match=re.escape(sentence)):
        load(*arguments)
