"""Parameters: what a cell may declare, what a value may be, and what a notebook is told when it is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import params
from helpers.params import ParameterError

CELL = """
# What to quantize
parent: str = "base-s"  # a run id, a folder or a hub id
bits: int = 4  # in 2, 3, 4, 8: width of a weight
lr: float = 1e-5  # 1e-8..1: learning rate
steps: int = 1  # 1..100_000: updates
seed: int = 0  # 0..: seed
act_order: bool = False  # columns by importance, "as in" the paper
tasks: list[str] = ["arithmetic"]  # in arithmetic, recall: what to evaluate
levels: list[int] = [1, 2]  # 1..5: difficulty
"""
DECLARED = params.declared(CELL)


def test_declarations_are_read_in_full():
    assert list(DECLARED) == ["parent", "bits", "lr", "steps", "seed", "act_order", "tasks", "levels"]
    assert DECLARED["bits"].choices == (2, 3, 4, 8)
    assert (DECLARED["lr"].low, DECLARED["lr"].high) == (1e-8, 1)
    assert (DECLARED["steps"].low, DECLARED["steps"].high) == (1, 100_000)
    assert (DECLARED["seed"].low, DECLARED["seed"].high) == (0, None)
    assert DECLARED["act_order"].help == 'columns by importance, "as in" the paper'
    assert DECLARED["levels"].default == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "bits = 4",
        "bits: int",
        "bits: int | None = 4",
        "bits: Literal[2, 4] = 4",
        "bits: int = 2 + 2",
        "bits: int = '4'",
        "bits: int = 4.0",
        "bits: int = True",
        "bits: int = 5  # in 2, 3, 4, 8: width",
        "bits: int = 0  # 1..8: width",
        "bits: int = 4  # in 2, four: width",
        "bits: int = 4  # 1..8 bits",
        "bits: int = 4  # in 2, 4",
        "lr: float = float('nan')",
        "name: str = 'a=b'",
        "name: str = 'a'  # 1..2: text has no range",
        "bits: int = 4; lr: float = 1.0",
        "levels: list[int] = [1,",
        "levels: list = [1]",
        "levels: list[int] = ['1']",
        "print('hello')",
    ],
)
def test_a_malformed_line_is_named(line):
    with pytest.raises(ParameterError) as error:
        params.declared(f"{line}\n")
    assert line in str(error.value)


def test_a_name_is_declared_once():
    with pytest.raises(ParameterError, match="bits is declared twice"):
        params.declared("bits: int = 4\nbits: int = 8")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bits", "3", 3),
        ("bits", 3.0, 3),
        ("lr", "1e-6", 1e-6),
        ("lr", 1, 1.0),
        ("act_order", "false", False),
        ("act_order", "True", True),
        ("tasks", "arithmetic,recall", ["arithmetic", "recall"]),
        ("tasks", '["recall"]', ["recall"]),
        ("tasks", "['recall']", ["recall"]),
        ("tasks", "[arithmetic, recall]", ["arithmetic", "recall"]),
        ("tasks", "", []),
        ("levels", "[1, 2]", [1, 2]),
        ("levels", "3", [3]),
        ("levels", [4.0], [4]),
    ],
)
def test_text_becomes_the_declared_type(name, value, expected):
    result = params.validate(DECLARED, {name: value})[name]
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", 77),
        ("bits", "77"),
        ("bits", "three"),
        ("bits", 3.5),
        ("bits", True),
        ("bits", None),
        ("bits", [4]),
        ("lr", "nan"),
        ("lr", float("inf")),
        ("lr", 0),
        ("lr", 2),
        ("lr", "fast"),
        ("steps", 0),
        ("seed", -1),
        ("act_order", "maybe"),
        ("act_order", 2),
        ("parent", 7),
        ("tasks", ["arithmetic", "algebra"]),
        ("levels", "1,six"),
        ("levels", [0]),
        ("levels", 3),
        ("levels", {"a": 1}),
    ],
)
def test_a_bad_value_is_one_sentence_with_what_is_allowed(name, value):
    with pytest.raises(ParameterError) as error:
        params.validate(DECLARED, {name: value}, "ptq")
    sentence = str(error.value)
    assert sentence.startswith(f"{name} = ")
    assert DECLARED[name].allowed in sentence
    assert "\n" not in sentence
    assert error.value._render_traceback_() == [sentence]


def test_the_sentences_read_well():
    def sentence(**given):
        with pytest.raises(ParameterError) as error:
            params.validate(DECLARED, given, "ptq")
        return str(error.value)

    assert sentence(bits="77") == "bits = 77 is not allowed for ptq: choose one of 2, 3, 4, 8."
    assert sentence(steps="x") == "steps = 'x' is not allowed for ptq: it must be a whole number from 1 to 100000."
    assert sentence(seed=-1) == "seed = -1 is not allowed for ptq: it must be a whole number of at least 0."
    assert sentence(bitz=3).startswith("bitz is not a parameter of ptq; did you mean bits? It takes: parent, bits, ")


def same(declarations, values):
    return params.validate(declarations, {name: params.text(value) for name, value in values.items()}) == values


@given(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_scalars_survive_the_command_line(text, integer, number, flag):
    declarations = params.declared("a: str = ''\nb: int = 0\nc: float = 0.0\nd: bool = False")
    assert same(declarations, {"a": text, "b": integer, "c": number, "d": flag})


@given(st.lists(st.text()), st.lists(st.integers()), st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_lists_survive_the_command_line(texts, integers, numbers):
    declarations = params.declared("a: list[str] = []\nb: list[int] = []\nc: list[float] = []")
    assert same(declarations, {"a": texts, "b": integers, "c": numbers})


# --- check(), called by the second cell -------------------------------------------------------------------------------


def session(*cells: str) -> dict:
    """The namespace of a kernel in which these cells ran."""
    namespace: dict = {"In": [""]}
    for cell in cells:
        namespace["In"].append(cell)
        exec(cell, namespace)
    namespace["In"].append("params.check()")
    return namespace


def test_check_without_an_injected_cell_gives_the_defaults():
    assert params.check(session(CELL)) == {name: param.default for name, param in DECLARED.items()}


def test_check_converts_what_papermill_injected():
    namespace = session(CELL, '# Parameters\nlr = "1e-6"\nact_order = "false"\n')
    assert params.check(namespace)["lr"] == 1e-6
    assert namespace["lr"] == 1e-6
    assert namespace["act_order"] is False


def test_check_sees_a_misspelt_injected_name():
    with pytest.raises(ParameterError, match="bitz is not a parameter of this notebook; did you mean bits"):
        params.check(session(CELL, "# Parameters\nbitz = 3\n"))


def test_check_sees_a_bad_value():
    with pytest.raises(ParameterError, match="bits = 77 is not allowed: choose one of"):
        params.check(session(CELL, "# Parameters\nbits = 77\n"))


def test_check_follows_cells_that_were_edited_and_run_again():
    namespace = session(CELL, "# Parameters\nbitz = 3\n", "x = 1", "# Parameters\nbits = 3\n")
    assert params.check(namespace)["bits"] == 3
    again = session(CELL, "# Parameters\nbitz = 3\n", CELL.replace("bits: int = 4", "bits: int = 8"))
    assert params.check(again)["bits"] == 8
    again["bits"] = "2"  # set by hand in a cell of its own
    assert params.check(again)["bits"] == 2


def test_check_uses_the_callers_globals():
    namespace = session("bits: int = 4")
    namespace["params"] = params
    exec("result = params.check()", namespace)
    assert namespace["result"] == {"bits": 4}


def test_check_needs_a_parameters_cell():
    with pytest.raises(ParameterError, match="finds no parameters cell"):
        params.check(session("x = 1"))


def test_check_names_a_malformed_line():
    with pytest.raises(ParameterError, match="`lr = 3`"):
        params.check(session("bits: int = 4\nlr = 3"))
