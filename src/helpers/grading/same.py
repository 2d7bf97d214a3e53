"""Decide whether two trees are the same function of their names.

They are if they have the same value wherever they are evaluated: at sixteen points drawn from the names, with 100
digits. Distinct formulas of the size that answers have agree at such a point with a probability that can be neglected
(for polynomials this is the Schwartz-Zippel lemma), and no simplification can loop. Points where a root or logarithm
leaves the real numbers decide nothing, since its branch is a convention there. Floor, ceiling, gcd and mod are
compared at thirty integers, factorials and (-1)^n at those or at the others.
"""

from collections.abc import Callable, Sequence

from mpmath import mpc

from helpers.grading import arithmetic
from helpers.grading.arithmetic import Undefined, Value
from helpers.grading.evaluate import INTEGER_POINTS, REAL_POINTS, evaluate
from helpers.grading.tokens import Unreadable
from helpers.grading.trees import Node, contains, names

REAL_NAMES = {"x", "y", "z", "t"}  # by custom; other names below a floor are integers
STEPS = {"floor", "ceil", "gcd", "lcm", "mod"}  # constant on stretches, or of integers only: looked at on integers


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
        return any(_agree(a, b, arithmetic.close, log) for log in readings)
    except Unreadable:
        if _congruent(a, b):
            return True
        raise


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
    ratios: list[Value] = []

    def keeps(x: Value, y: Value) -> bool:
        if x == 0 or y == 0:
            return bool(x == y)
        ratios.append(arithmetic.divide(x, y))
        return arithmetic.close(ratios[0], ratios[-1]) and (not positive or ratios[-1] > 0)

    return names(a) == names(b) and _agree(a, b, keeps) and bool(ratios)


def _agree(a: Node, b: Node, test: Callable[[Value, Value], bool], log: str = "ln") -> bool:
    free = bool(names(a) | names(b)) or contains(a, {"apply"}) or contains(b, {"apply"})
    if not free:
        points = [range(1)]
    elif contains(a, STEPS) or contains(b, STEPS):
        real = REAL_NAMES & (names(a) | names(b))
        points = [(*INTEGER_POINTS, *REAL_POINTS) if real else INTEGER_POINTS]
    elif contains(a, {"max", "min"}) or contains(b, {"max", "min"}):
        points = [(*REAL_POINTS, *INTEGER_POINTS)]
    elif contains(a, {"factorial", "binom"}) or contains(b, {"factorial", "binom"}) or _alternates(a) or _alternates(b):
        points = [REAL_POINTS, INTEGER_POINTS]
    else:
        points = [REAL_POINTS]
    decided = [_tests(a, b, test, some, log) for some in points]
    enough = 3 if free else 1
    if all(len(verdicts) < enough and all(verdicts) for verdicts in decided):
        raise Unreadable("no point decides")
    return any(len(verdicts) >= enough and all(verdicts) for verdicts in decided)


def _alternates(tree: Node) -> bool:
    """Whether a power of a negative number, such as (-1)^n, occurs."""
    if tree[0] == "^" and tree[1][0] == "neg" and not names(tree[1]):
        return True
    parts = tree[2] if tree[0] == "call" else [part for part in tree[1:] if isinstance(part, tuple)]
    return any(map(_alternates, parts))


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
