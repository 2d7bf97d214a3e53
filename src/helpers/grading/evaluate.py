"""The value of a tree at a point, where each name has a value that SHA-256 draws from it."""

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from mpmath import mp, mpc, mpf

from helpers.grading import arithmetic
from helpers.grading.arithmetic import Undefined, Value
from helpers.grading.tokens import Unreadable
from helpers.grading.trees import TRIG, Node

MAX_FACTORIAL = 3_000
ELEMENTARY = TRIG | {"asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "exp"}
REAL_POINTS, INTEGER_POINTS = range(16), range(30)


@lru_cache(maxsize=10_000)
def point(name: str, index: int) -> Value:
    """The value of a name at a point: positive at 0 to 3, negative at 4 and 5, and then of either sign; of a name
    that begins with #, a positive integer.
    """
    digest = hashlib.sha256(f"{name}/{index}".encode()).digest()
    if name[0] == "#":
        return Fraction(1 + int.from_bytes(digest[2:4]) % (6, 40, 500)[index % 3])
    value = mpf(int.from_bytes(digest)) / 2**256
    value = value if index % 2 else 1 + 2 * value
    return -value if index in (4, 5) or (index > 5 and digest[1] % 2) else value


def evaluate(tree: Node, index: int = 0, log: str = "ln", trig: bool = False) -> Value:
    """The value of a tree at a point; `log` says what `\\log` means. Errors: `Unreadable`, `Undefined`."""
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind == "name":
        constants = {"e": mp.e, "i": mpc(0, 1), r"\pi": mp.pi}
        return +constants[tree[1]] if tree[1] in constants else point(tree[1], index)
    if kind == "inf":
        return mp.inf
    inner: Callable[[Node], Value] = lambda part: evaluate(part, index, log, trig)  # noqa: E731
    if kind == "apply":
        return point(f"{tree[1]}({mp.nstr(arithmetic.inexact(inner(tree[2])), 50)})", index % len(REAL_POINTS))
    if kind == "neg":
        return -inner(tree[1])
    if kind == "%":
        return arithmetic.divide(inner(tree[1]), Fraction(100))
    if kind == "deg":
        return arithmetic.multiply(inner(tree[1]), +mp.pi / 180) if trig else inner(tree[1])
    if kind == "call":
        return _call(tree[1], [evaluate(part, index, log, trig or tree[1] in TRIG) for part in tree[2]], log)
    a, b = inner(tree[1]), inner(tree[2])
    if kind == "+":
        return arithmetic.add(a, b)
    if kind == "-":
        return arithmetic.add(a, -b)
    if kind == "*":
        return arithmetic.multiply(a, b)
    if kind == "/":
        return arithmetic.divide(a, b)
    if kind == "^":
        return arithmetic.power(a, b)
    raise Unreadable(kind)


def _call(name: str, values: list[Value], log: str) -> Value:
    a = values[0]
    if any(map(arithmetic.infinite, values)):
        raise Unreadable("a function of infinity")
    if name in ("gcd", "lcm", "mod"):
        return _integers(name, values)
    if name in ("max", "min"):
        return (max if name == "max" else min)(values, key=lambda v: v if isinstance(v, Fraction) else mp.re(v))
    if name == "abs":
        return abs(a)
    if name in ("floor", "ceil"):
        if isinstance(a, Fraction):
            return Fraction(a.__floor__() if name == "floor" else a.__ceil__())
        if abs(a) > 10**40:
            raise Unreadable("too large")
        return Fraction(int(mp.floor(a) if name == "floor" else mp.ceil(a)))
    if name == "root":
        return _root(a, values[1])
    if name in ("factorial", "binom"):
        return _factorial(name, values)
    if name in ("ln", "log", "lg"):
        base = (
            values[1] if len(values) > 1 else Fraction(10) if name == "lg" or (name == "log" and log == "lg") else None
        )
        return _logarithm(a) if base is None else arithmetic.divide(_logarithm(a), _logarithm(base))
    x = arithmetic.inexact(a)
    if abs(x) > 10**6:
        raise Unreadable("a function of a huge number")
    name = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}.get(name, name)
    if len(values) > 1 or name not in ELEMENTARY:
        raise Unreadable(name)
    if name in ("cot", "csc", "coth", "acot") and x == 0:
        raise Undefined
    result = getattr(mp, name)(x)
    if isinstance(result, mpc) and not isinstance(x, mpc):
        raise Undefined
    return Fraction(0) if name in TRIG and abs(result) < arithmetic.SAME else arithmetic.checked(result)


def _logarithm(a: Value) -> Value:
    if a == 0:
        raise Undefined
    if isinstance(a, Fraction) and a > 0:
        if a == 1:
            return Fraction(0)
        if arithmetic.bits(a) > 10**5:
            raise Unreadable("too large")
        return mp.log(a.numerator) - mp.log(a.denominator)
    if not isinstance(a, mpc) and a < 0:
        raise Undefined
    return mp.log(a)


def _root(a: Value, index: Value) -> Value:
    """The real root, also of a negative number where the index is odd; the square root of a negative number is
    imaginary.
    """
    if isinstance(index, Fraction) and index.denominator == 1 and index != 0 and not isinstance(a, mpc) and a < 0:
        if index.numerator % 2:
            return -arithmetic.power(-a, 1 / index)
        if isinstance(a, Fraction) and index == 2:
            return arithmetic.multiply(arithmetic.power(-a, Fraction(1, 2)), mpc(0, 1))
        raise Undefined
    return arithmetic.power(a, arithmetic.divide(Fraction(1), index))


def _factorial(name: str, values: list[Value]) -> Value:
    """n! and the binomial coefficient; of what is not an integer, through the gamma function."""
    if all(isinstance(v, Fraction) and v.denominator == 1 for v in values):
        numbers = [int(v) for v in values]
        if min(numbers) < 0 or max(numbers) > MAX_FACTORIAL:
            raise Undefined
        return Fraction((math.factorial if name == "factorial" else math.comb)(*numbers))
    x = [arithmetic.inexact(v) for v in values]
    if any(abs(v) > 1000 for v in x):
        raise Undefined
    return arithmetic.checked(mp.gamma(x[0] + 1) if name == "factorial" else mp.binomial(*x))


def _integers(name: str, values: list[Value]) -> Value:
    if not all(isinstance(v, Fraction) and v.denominator == 1 for v in values):
        raise Undefined
    numbers = [int(v) for v in values]
    if any(number.bit_length() > arithmetic.MAX_COMMON_BITS for number in numbers):
        raise Unreadable("a number with too many digits")
    if name == "mod":
        if numbers[1] == 0:
            raise Undefined
        return Fraction(numbers[0] % numbers[1])
    return Fraction((math.gcd if name == "gcd" else math.lcm)(*numbers))
