"""Decide whether two trees are the same function of their names.

They are if they have the same value wherever they are evaluated: at sixteen points drawn from the names, with 100
digits, confirmed with 400. Distinct formulas of the size that answers have agree at such a point with a probability
that can be neglected (for polynomials this is the Schwartz-Zippel lemma), and no simplification can loop. Points where
a root or logarithm leaves the real numbers decide nothing, since its branch is a convention there. Names that the gold
makes integers, such as n in (-1)^n, are also given thirty integers; an answer alone makes no name an integer.
"""

import re
from collections.abc import Callable, Sequence

from mpmath import mpc

from helpers.grading import arithmetic
from helpers.grading.arithmetic import Undefined, Value
from helpers.grading.evaluate import INTEGER_POINTS, REAL_POINTS, evaluate
from helpers.grading.tokens import Unreadable
from helpers.grading.trees import Node, contains, names, rename

WHOLE = {"floor", "ceil", "factorial", "binom"}
STEPS = {"floor", "ceil", "gcd", "lcm", "mod", "max", "min"}  # looked at on integers too


def constant(tree: Node) -> Value:
    """The value of a tree without variables. Errors: `Unreadable`."""
    if names(tree) or contains(tree, {"apply"}):
        raise Unreadable("not a constant")
    try:
        return evaluate(tree)
    except Undefined:
        raise Unreadable("not real") from None


def exceeds_one(tree: Node) -> bool:
    """Whether a constant is a real number above 1 or below -1."""
    value = constant(tree)
    return not isinstance(value, mpc) and bool(abs(value) > 1)


def same(a: Node, b: Node) -> bool:
    """Whether two trees are the same function of their variables. Errors: `Unreadable` where no point could decide."""
    if a == b:
        return True
    readings = ("ln", "lg") if contains(a, {"log"}) or contains(b, {"log"}) else ("ln",)
    try:
        return any(_confirmed(lambda log=log: _agree(a, b, arithmetic.close, log)) for log in readings)
    except Unreadable:
        if _congruent(a, b):
            return True
        raise


def _confirmed(check: Callable[[], bool]) -> bool:
    """Whether a check that holds with 100 digits holds with 400 too: tanh 100 is not 1."""
    if not check():
        return False
    with arithmetic.precise():
        return check()


def _congruent(a: Node, b: Node) -> bool:
    """Whether two trees are the same operation on the same operands: 9^(9^9) and 9^387420489, which nobody can
    compute.
    """
    if a[0] != b[0] or len(a) != len(b) or a[0] in ("num", "name", "inf", "apply"):
        return a == b
    pairs = zip(a[2], b[2], strict=False) if a[0] == "call" else zip(a[1:], b[1:], strict=True)
    try:
        return (a[0] != "call" or (a[1] == b[1] and len(a[2]) == len(b[2]))) and all(same(x, y) for x, y in pairs)
    except Unreadable:
        return False


def proportional(a: Node, b: Node, positive: bool = False) -> bool:
    """Whether one tree is a constant multiple of the other, as the two sides of one equation are; `positive`: by a
    positive factor.
    """

    def check() -> bool:
        ratios: list[Value] = []

        def keeps(x: Value, y: Value) -> bool:
            if x == 0 or y == 0:
                return bool(x == y)
            ratios.append(arithmetic.divide(x, y))
            return arithmetic.close(ratios[0], ratios[-1]) and (not positive or ratios[-1] > 0)

        return _agree(a, b, keeps) and bool(ratios)

    return names(a) == names(b) and _confirmed(check)


def _agree(a: Node, b: Node, test: Callable[[Value, Value], bool], log: str = "ln") -> bool:
    """Whether two trees pass a test at all points that decide; `a` is the gold, which alone says which names are
    integers.
    """
    free = names(a) | names(b)
    if not free and not contains(a, {"apply"}) and not contains(b, {"apply"}):
        return _passes(a, b, test, range(1), log, 1)
    whole = {name: f"#{name}" for name in _integers(a)}
    if whole:
        try:
            if _passes(rename(a, whole), rename(b, whole), test, INTEGER_POINTS, log):
                return True
        except Unreadable:
            pass
    if not _passes(a, b, test, REAL_POINTS, log):
        return False
    whole = {name: f"#{name}" for name in free}
    stepped = contains(a, STEPS) or contains(b, STEPS)  # a step may be only there
    return not stepped or _passes(rename(a, whole), rename(b, whole), test, INTEGER_POINTS, log)


def _integers(tree: Node) -> set[str]:
    """The names that a tree makes integers: within gcd, lcm and mod, and if they are i to n by name also within a
    floor, a factorial, or the exponent of a negative number.
    """
    parts = tree[2] if tree[0] == "call" else [part for part in tree[1:] if isinstance(part, tuple)]
    within = names(tree)
    if tree[0] == "call" and tree[1] in ("gcd", "lcm", "mod"):
        return within
    if (tree[0] == "call" and tree[1] in WHOLE) or (tree[0] == "^" and tree[1][0] == "neg" and not names(tree[1])):
        found = {name for name in within if re.fullmatch(r"[i-n](_.*)?", name)}
    else:
        found = set()
    return found.union(*map(_integers, parts))


def _passes(
    a: Node, b: Node, test: Callable[[Value, Value], bool], points: Sequence[int], log: str, enough: int = 3
) -> bool:
    """Whether a test holds wherever both have a value. Errors: `Unreadable` where too few points decide."""
    verdicts = _tests(a, b, test, points, log)
    if len(verdicts) < enough and all(verdicts):
        raise Unreadable("no point decides")
    return all(verdicts)


def _tests(a: Node, b: Node, test: Callable[[Value, Value], bool], points: Sequence[int], log: str) -> list[bool]:
    """The verdicts of the points that decide something, up to the first difference."""
    verdicts: list[bool] = []
    for index in points:
        try:
            verdicts.append(test(evaluate(a, index, log), evaluate(b, index, log)))
        except Undefined:
            continue
        if not verdicts[-1]:
            break
    return verdicts
