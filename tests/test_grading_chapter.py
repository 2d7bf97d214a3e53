"""What the chapter on grading says is what the code and the committed comparison say."""

import pandas as pd

from helpers import project
from helpers.evaluation import graders
from helpers.grading import equal, find, rewrites
from helpers.report import grading
from helpers.tasks import Problem

CSV = project.PACKAGE.parents[1] / "book" / "results" / "grading.csv"


def test_every_rule_is_in_the_table():
    text = grading.rules()
    assert all(f"`{rule}`" in text["grading-find"] for rule in find.RULES)
    assert all(f"`{rule}`" in text["grading-equal"] for rule in equal.RULES)
    answers = {
        "12": "13",
        r"\frac12": "0.5",
        "1,2": "2,1",
        "x>5": "x<5",
        "(C)": "C",
        "x+y=1": "y=1-x",
        "dog": "cat",
        "3:4": "3",
    }
    assert {equal.equal(gold, answer)[1] for gold, answer in answers.items()} <= set(equal.RULES)


def test_rewritings_by_hand():
    made = {name.partition(":")[0]: (right, answer) for name, right, answer in rewrites.replies(r"$\frac{7}{4}$")}
    assert made["a mixed number"] == (True, r"1\frac{3}{4}")
    assert made["an exact decimal"] == (True, "1.75")
    assert made["upside down"] == (False, r"\frac{4}{7}")
    made = {name.partition(":")[0]: (right, answer) for name, right, answer in rewrites.replies("12500")}
    assert made["digits in groups"] == (True, "12{,}500")
    assert made["one more"] == (False, "12501")
    assert made["a letter that is no unit"] == (False, "12500t")


def test_two_graders_on_the_same_replies():
    found = graders.compare([Problem("a/1", "?", "1200", 0, "maths", "a"), Problem("a/2", "?", "7", 0, "maths", "a")])
    rows = found.set_index("rewriting")
    assert rows.loc["the gold itself", ["replies", "math_verify", "ours"]].tolist() == [2, 2, 2]
    assert rows.loc["thin spaces: 12\\,500", ["replies", "ours"]].tolist() == [1, 1]
    letter = rows.loc["a letter that is no unit: 12t"]
    assert (letter["math_verify"], letter["ours"], letter["right"]) == (2, 0, False)


def test_what_the_prose_says_of_the_comparison_is_so():
    rows = pd.read_csv(CSV)
    itself = rows[rows["rewriting"] == "the gold itself"]
    assert itself["replies"].sum() == 1560
    assert (itself["math_verify"] == itself["replies"]).all()
    assert (rows["ours"] == rows["replies"].where(rows["right"], 0)).all()
    share = rows.groupby("rewriting")[["replies", "math_verify"]].sum()
    share = share["math_verify"] / share["replies"]
    assert share["a trailing point: 12."] == share["thin spaces: 12\\,500"] == 0
    assert share["a letter that is no unit: 12t"] == share["an equation that a sum has: x + y = 12"] == 1
    assert (500 + 675) / 1560 > 0.75
    assert set(rows["benchmark"]) == {"aime24", "amc83", "math500", "minerva", "olympiadbench"}
