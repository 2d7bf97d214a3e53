"""Read a scalar expression, and decide whether two of them are the same function.

Tokens become a tree by recursive descent: sums of products of powers, with `2x` a product, `2\\frac{1}{2}` a mixed number, `\\sin 2t` a
function of the factors that follow, and `f(x)` with one name or number inside an unknown function of it. Two trees are equal if they
have the same value wherever they are evaluated: at sixteen points drawn from the names by SHA-256, with 100 digits. Distinct formulas of the
size that answers have agree at such a point with a probability that can be neglected (the Schwartz-Zippel lemma is the case of
polynomials), and no simplification can loop. Points where a root or logarithm leaves the real numbers decide nothing, since its
branch is a convention there. Floor, ceiling, gcd and mod are compared at thirty integers, factorials and (-1)^n at those or the others.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from mpmath import mp, mpc, mpf

from helpers.grading import arithmetic
from helpers.grading.arithmetic import Undefined, Value
from helpers.grading.tokens import Token, Unreadable

Node = tuple
MAX_DEPTH = 600
MAX_FACTORIAL = 3_000
REAL_POINTS, INTEGER_POINTS = range(16), range(16, 46)
OPEN = {"(": ")", "[": "]", "{": "}", "{{": "}}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
TRIG = {"sin", "cos", "tan", "cot", "sec", "csc"}
INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh"}
MARKS = {r"\dot", r"\ddot", r"\hat", r"\tilde", r"\bar", r"\overline", r"\vec", r"\widehat", r"\overrightarrow"}


def parse(tokens: Sequence[Token]) -> Node:
    """The tree of a whole token sequence. Errors: `Unreadable`."""
    if not tokens:
        raise Unreadable("empty")
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.at < len(tokens):
        raise Unreadable(f"{tokens[reader.at]}")
    return tree


class _Reader:
    """A position in the tokens; each method reads one kind of phrase from there."""

    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.at, self.depth, self.bars = list(tokens), 0, 0, 0

    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def sign(self, *values: str) -> str | None:
        """Take the operator that stands here if it is one of these."""
        kind, value = self.peek()
        if kind == "op" and value in values:
            self.at += 1
            return value
        return None

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        tree = self.signed()
        while sign := self.sign("+", "-", r"\pm", r"\mp"):
            tree = ({"+": "+", "-": "-"}.get(sign, sign), tree, self.signed())
        if self.sign(r"\over"):
            tree = ("/", tree, self.sum())
        if self.sign(r"\bmod", r"\mod"):
            tree = ("call", "mod", [tree, self.signed()])
        self.depth -= 1
        return tree

    def signed(self) -> Node:
        signs = []
        while sign := self.sign("+", "-", r"\pm", r"\mp"):
            signs.append(sign)
        tree = self.product()
        for sign in reversed(signs):
            if sign != "+":
                tree = ("neg", tree) if sign == "-" else (sign, ("num", Fraction(0)), tree)
        return tree

    def product(self) -> Node:
        tree = self.power()
        if tree[0] == "num" and (part := self.mixed(tree[1])):
            tree = ("num", tree[1] + part)
        while True:
            if self.sign("*"):
                tree = ("*", tree, self.signed_factor())
            elif self.sign("/"):
                tree = ("/", tree, self.signed_factor())
            elif self.begins():
                if self.peek()[0] == "num" and self.tokens[self.at - 1][0] == "num":
                    raise Unreadable("two numbers side by side")
                tree = ("*", tree, self.power())
            else:
                return tree

    def signed_factor(self) -> Node:
        if self.sign("-"):
            return ("neg", self.signed_factor())
        self.sign("+")
        return self.power()

    def mixed(self, whole: Value) -> Fraction | None:
        """The proper fraction that follows an integer: `1 1/4` or `1\\frac{1}{4}`."""
        if whole.denominator != 1:
            return None
        after = self.tokens[self.at : self.at + 7]
        kinds, values = [t[0] for t in after], [t[1] for t in after]
        if values[:2] == [r"\frac", "{"] and kinds[2:3] == ["num"] and values[3:5] == ["}", "{"] and kinds[5:6] == ["num"]:
            part, length = (values[2], values[5]), 7
            if values[6:7] != ["}"]:
                return None
        elif kinds[:3] == ["num", "op", "num"] and values[1] == "/":
            part, length = (values[0], values[2]), 3
        elif values[:1] == [r"\frac"] and kinds[1:3] == ["num", "num"]:
            part, length = (values[1], values[2]), 3
        elif values[:1] == [r"\frac"] and kinds[1:2] == ["num"] and isinstance(values[1], Fraction) and 9 < values[1] < 100:
            part, length = (Fraction(values[1] // 10), values[1] % 10), 2
        else:
            return None
        if not all(isinstance(n, Fraction) and n.denominator == 1 for n in part) or not 0 < part[0] < part[1]:
            return None
        self.at += length
        return Fraction(part[0], part[1])

    def begins(self) -> bool:
        """Whether a factor begins here."""
        kind, value = self.peek()
        if kind in ("num", "name", "func"):
            return True
        return kind == "op" and (
            value in OPEN or value in (r"\frac", r"\binom", r"\sqrt", r"\infty") or value in MARKS or (value == "|" and not self.bars)
        )

    def power(self) -> Node:
        tree = self.base()
        while True:
            kind, value = self.peek()
            if kind != "op":
                return tree
            if value == "^":
                self.at += 1
                tree = self.raised(tree)
            elif value == "!":
                self.at += 1
                tree = ("call", "factorial", [tree])
            elif value == "%":
                self.at += 1
                tree = ("%", tree)
            elif value == r"\degree":
                self.at += 1
                tree = ("deg", tree)
            else:
                return tree

    def raised(self, tree: Node) -> Node:
        after = [t[1] for t in self.tokens[self.at : self.at + 3]]
        if after[:1] in ([r"\circ"], [r"\degree"]):
            self.at += 1
            return ("deg", tree)
        if after[:1] == ["{"] and after[1:] in ([r"\circ", "}"], [r"\degree", "}"]):
            self.at += 3
            return ("deg", tree)
        return ("^", tree, self.exponent())

    def exponent(self) -> Node:
        """What stands after `^`: a group, or one sign, name or number (`2^10` is taken as it was meant)."""
        if self.sign("-"):
            return ("neg", self.exponent())
        self.sign("+")
        tree = self.base()
        return ("^", tree, self.exponent()) if self.sign("^") else tree

    def group(self, opening: str) -> Node:
        tree = self.sum()
        if not self.sign(OPEN[opening]):
            raise Unreadable(f"{opening} is not closed")
        return tree

    def argument(self) -> Node:
        """The argument of a command: a group, or one token, which of a number is one digit."""
        if self.sign("{"):
            return self.group("{")
        kind, value = self.peek()
        if kind == "num" and isinstance(value, Fraction) and value.denominator == 1 and value >= 10:
            first, rest = str(value)[0], str(value)[1:]
            self.tokens[self.at : self.at + 1] = [("num", Fraction(first)), ("num", Fraction(rest))]
        if kind == "op" and value == "-":
            raise Unreadable("a sign without a group")
        return self.base()

    def base(self) -> Node:
        kind, value = self.peek()
        self.at += 1
        if kind == "num":
            if self.peek() == ("op", "_") or not isinstance(value, Fraction):
                raise Unreadable("a number in another base, or too long")
            return ("num", value)
        if kind == "name":
            return self.name(str(value))
        if kind == "func":
            return self.function(str(value))
        if kind == "op":
            if value == r"\frac":
                return ("/", self.argument(), self.argument())
            if value == r"\binom":
                return ("call", "binom", [self.argument(), self.argument()])
            if value == r"\infty":
                return ("inf",)
            if value in MARKS:
                return self.name(f"{value} {self.subscript()}")
            if value in (r"\lfloor", r"\lceil"):
                return ("call", "floor" if value == r"\lfloor" else "ceil", [self.group(str(value))])
            if value in ("(", "[", "{"):
                return self.group(str(value))
            if value == "|":
                self.bars += 1
                tree = self.sum()
                self.bars -= 1
                if not self.sign("|"):
                    raise Unreadable("| is not closed")
                return ("call", "abs", [tree])
        raise Unreadable(f"{value}")

    def subscript(self) -> str:
        """The characters of one token or group, without spaces."""
        if not self.sign("{"):
            kind, value = self.peek()
            self.at += 1
            if kind not in ("num", "name", "text", "func", "unit"):
                raise Unreadable("a subscript")
            return str(value)
        parts, depth = [], 1
        while depth:
            kind, value = self.peek()
            if kind == "end":
                raise Unreadable("{ is not closed")
            self.at += 1
            depth += (value == "{") - (value == "}") if kind == "op" else 0
            parts.append("" if kind == "op" and value in "{}" else str(value).replace(" ", ""))
        return "".join(parts)

    def name(self, name: str) -> Node:
        """A name with its subscript and primes, and with its argument where it looks like a function's."""
        while True:
            after = [t[1] for t in self.tokens[self.at : self.at + 4]]
            if self.sign("_"):
                name += "_" + self.subscript()
            elif self.sign("'"):
                name += "'"
            elif after[:2] in (["^", "'"], ["^", "*"]):
                self.at += 2
                name += str(after[1])
            elif after[:3] == ["^", "{", "'"]:
                self.at += 2
                while self.sign("'"):
                    name += "'"
                if not self.sign("}"):
                    raise Unreadable("a prime in a power")
            else:
                break
        window = self.tokens[self.at : self.at + 3]
        if [t[1] for t in window[::2]] == ["(", ")"] and window[1][0] in ("num", "name") and name not in ("e", r"\pi", "i"):
            self.at += 3
            return ("apply", name, parse(window[1:2]))
        return ("name", name)

    def function(self, name: str) -> Node:
        raised = self.exponent() if self.sign("^") else None
        low = None
        if self.sign("_"):
            low = self.argument()
        if raised is None and self.sign("^"):
            raised = self.exponent()
        if name == "sqrt":
            index = None
            if self.sign("["):
                index = self.group("[")
            body = self.argument() if self.peek()[1] != "(" else self.base()
            tree = ("call", "root", [body, index or ("num", Fraction(2))])
        else:
            tree = ("call", name, [*self.arguments(), *([low] if low else [])])
        if raised == ("neg", ("num", Fraction(1))) and name in INVERSE:
            return ("call", INVERSE[name], tree[2])
        if raised and raised[0] == "neg" and name in TRIG:
            raise Unreadable("an inverse or a reciprocal")
        return ("^", tree, raised) if raised else tree

    def arguments(self) -> list[Node]:
        """A bracketed list, or the factors up to the next sign or function."""
        for opening in ("(", "{", "["):
            if self.sign(opening):
                found = [self.sum()]
                while self.sign(","):
                    found.append(self.sum())
                if not self.sign(OPEN[opening]):
                    raise Unreadable(f"{opening} is not closed")
                return found
        if not self.begins():
            raise Unreadable("a function of nothing")
        tree = self.power()
        while self.peek()[0] != "func" and self.begins():
            tree = ("*", tree, self.power())
        return [tree]


def names(tree: Node) -> set[str]:
    """The variables of a tree."""
    if tree[0] == "name":
        return set() if tree[1] in ("e", "i", r"\pi") else {tree[1]}
    if tree[0] == "call":
        return set().union(*map(names, tree[2]))
    return set().union(*(names(part) for part in tree[1:] if isinstance(part, tuple)))


def contains(tree: Node, kinds: set[str]) -> bool:
    """Whether a node of one of these kinds, or a call or name of one of these names, occurs."""
    if tree[0] in kinds or (tree[0] in ("call", "name") and tree[1] in kinds):
        return True
    parts = tree[2] if tree[0] == "call" else [part for part in tree[1:] if isinstance(part, tuple)]
    return any(contains(part, kinds) for part in parts)


def branches(tree: Node) -> list[Node]:
    """A tree with `\\pm` as the two that it stands for: all upper signs, all lower signs."""
    if not contains(tree, {r"\pm", r"\mp"}):
        return [tree]
    return [_choose(tree, {r"\pm": upper, r"\mp": lower}) for upper, lower in (("+", "-"), ("-", "+"))]


def _choose(tree: Node, signs: dict[str, str]) -> Node:
    if tree[0] == "call":
        return ("call", tree[1], [_choose(part, signs) for part in tree[2]])
    return (signs.get(tree[0], tree[0]), *(_choose(part, signs) if isinstance(part, tuple) else part for part in tree[1:]))


@lru_cache(maxsize=10_000)
def point(name: str, index: int) -> Value:
    """The value of a name at a point: positive at 0 to 3, negative at 4 and 5, of either sign up to 15, and a positive integer from 16 on."""
    digest = hashlib.sha256(f"{name}/{index}".encode()).digest()
    if index in INTEGER_POINTS:
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
        base = values[1] if len(values) > 1 else Fraction(10) if name == "lg" or (name == "log" and log == "lg") else None
        return _logarithm(a) if base is None else arithmetic.divide(_logarithm(a), _logarithm(base))
    x = arithmetic.inexact(a)
    if abs(x) > 10**6:
        raise Unreadable("a function of a huge number")
    name = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}.get(name, name)
    if len(values) > 1 or name not in {*TRIG, *"asin acos atan acot sinh cosh tanh coth asinh acosh atanh exp".split()}:
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
    """The real root, also of a negative number where the index is odd; the square root of a negative number is imaginary."""
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
    if name == "mod":
        if numbers[1] == 0:
            raise Undefined
        return Fraction(numbers[0] % numbers[1])
    return Fraction((math.gcd if name == "gcd" else math.lcm)(*numbers))


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
    """Whether two trees are the same operation on the same operands: 9^(9^9) and 9^387420489, which nobody can compute."""
    if a[0] != b[0] or len(a) != len(b) or a[0] in ("num", "name", "inf", "apply"):
        return a == b
    pairs = zip(a[2], b[2], strict=False) if a[0] == "call" else zip(a[1:], b[1:], strict=True)
    try:
        return (a[0] != "call" or (a[1] == b[1] and len(a[2]) == len(b[2]))) and all(same(x, y) for x, y in pairs)
    except Unreadable:
        return False


def proportional(a: Node, b: Node, positive: bool = False) -> bool:
    """Whether one tree is a constant multiple of the other, as the two sides of one equation are; `positive`: by a positive factor."""
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
        points = [INTEGER_POINTS]
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
