"""Read a scalar expression into a tree, by recursive descent.

Sums of products of powers, with `2x` a product, `2\\frac{1}{2}` a mixed number, `\\sin 2t` a function of the factors
that follow it, `\\frac12` a fraction of single digits, and `f(x)` with one name or number inside an unknown function
of it. A node is a tuple: its kind (num, name, inf, apply, call, neg, deg, %, +, -, *, /, ^, \\pm, \\mp), then its
parts.
"""

from collections.abc import Sequence
from fractions import Fraction

from helpers.grading.tokens import Token, Unreadable

Node = tuple
MAX_DEPTH = 600
CONSTANTS = ("e", "i", r"\pi")
OPEN = {"(": ")", "[": "]", "{": "}", "{{": "}}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
TRIG = {"sin", "cos", "tan", "cot", "sec", "csc"}
INVERSE = {
    "sin": "arcsin",
    "cos": "arccos",
    "tan": "arctan",
    "cot": "arccot",
    "sinh": "asinh",
    "cosh": "acosh",
    "tanh": "atanh",
}
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
                if self.peek()[0] == "num" and self.tokens[self.at + 1 : self.at + 2] != [("op", "^")]:
                    raise Unreadable("a number behind a factor")
                tree = ("*", tree, self.power())
            else:
                return tree

    def signed_factor(self) -> Node:
        if self.sign("-"):
            return ("neg", self.signed_factor())
        self.sign("+")
        return self.power()

    def mixed(self, whole: Fraction) -> Fraction | None:
        """The proper fraction that follows an integer: `1 1/4` or `1\\frac{1}{4}`."""
        if whole.denominator != 1:
            return None
        after = self.tokens[self.at : self.at + 7]
        kinds, values = [t[0] for t in after], [t[1] for t in after]
        if (
            values[:2] == [r"\frac", "{"]
            and kinds[2:3] == ["num"]
            and values[3:5] == ["}", "{"]
            and kinds[5:6] == ["num"]
        ):
            part, length = (values[2], values[5]), 7
            if values[6:7] != ["}"]:
                return None
        elif kinds[:3] == ["num", "op", "num"] and values[1] == "/":
            part, length = (values[0], values[2]), 3
        elif values[:1] == [r"\frac"] and kinds[1:3] == ["num", "num"]:
            part, length = (values[1], values[2]), 3
        elif (
            values[:1] == [r"\frac"]
            and kinds[1:2] == ["num"]
            and isinstance(values[1], Fraction)
            and 9 < values[1] < 100
        ):
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
            value in OPEN
            or value in (r"\frac", r"\binom", r"\sqrt", r"\infty")
            or value in MARKS
            or (value == "|" and not self.bars)
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
        if [t[1] for t in window[::2]] == ["(", ")"] and window[1][0] in ("num", "name") and name not in CONSTANTS:
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
        while self.peek()[0] not in ("func", "num") and self.begins():
            tree = ("*", tree, self.power())
        return [tree]


def names(tree: Node) -> set[str]:
    """The variables of a tree."""
    if tree[0] == "name":
        return set() if tree[1] in CONSTANTS else {tree[1]}
    if tree[0] == "call":
        return set().union(*map(names, tree[2]))
    return set().union(*(names(part) for part in tree[1:] if isinstance(part, tuple)))


def rename(tree: Node, names: dict[str, str]) -> Node:
    """A tree with other names."""
    if tree[0] == "name":
        return ("name", names.get(tree[1], tree[1]))
    if tree[0] == "call":
        return ("call", tree[1], [rename(part, names) for part in tree[2]])
    return (tree[0], *(rename(part, names) if isinstance(part, tuple) else part for part in tree[1:]))


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
    return (
        signs.get(tree[0], tree[0]),
        *(_choose(part, signs) if isinstance(part, tuple) else part for part in tree[1:]),
    )
