"""Tell a left side that only names what is asked (`x`, `f(n)`, `\\angle ABC`, `S_1 : S_2`) from one that says
something (`x + y`).
"""

import re
from collections.abc import Sequence

from helpers.grading import trees
from helpers.grading.brackets import bare, has, partner, split
from helpers.grading.tokens import Token, Unreadable
from helpers.grading.trees import CONSTANTS, Node

PROBABILITIES = (("name", "P"), ("name", "E"))
LETTERS = re.compile(r"(?:[A-Z](?:_\w+)?'*)+(?:/(?:[A-Z](?:_\w+)?'*)+)?")  # points: AB, A_1B, NO/BO


def head(tokens: Sequence[Token]) -> tuple[str, ...]:
    """The name that a left side is, or () where it says something: x_1, f(n), \\angle ABC, |AB|, (x, y), NO/BO,
    S_1:S_2, Area.
    """
    tokens = bare(tokens)
    if not tokens or tokens[0][0] in ("num", "env"):
        return ()
    if all(kind == "text" for kind, _ in tokens):
        return (" ".join(str(value) for _, value in tokens).casefold(),)
    if tokens[0][0] == "text":
        tokens = tokens[1:]
    if tokens[0][1] in (r"\angle", r"\triangle") or tokens[:2] == [("name", "m"), ("op", r"\angle")]:
        rest = [t for t in tokens if t[1] not in (r"\angle", r"\triangle")]
        if any(kind not in ("name", "num", "op") for kind, _ in rest):
            return ()
        return ("".join(str(value) for _, value in rest if value not in ("{", "}")),)
    if len(tokens) > 2 and tokens[0] == ("op", "(") and partner(tokens, 0) == len(tokens) - 1:
        parts, _ = split(tokens[1:-1], (",",))
        found = [head(part) for part in parts]
        return ("(" + ",".join(name[0] for name in found) + ")",) if len(parts) > 1 and all(found) else ()
    if has(tokens, (":",)):
        found = [head(part) for part in split(tokens, (":",))[0]]
        return (":".join(name[0] for name in found),) if all(found) else ()
    if tokens[0] == ("op", "|") and tokens[-1] == ("op", "|") and len(tokens) > 2:
        inner = head(tokens[1:-1])
        return (f"|{inner[0]}|",) if inner and inner[0].isupper() and len(inner[0]) > 1 else ()
    if tokens[0][0] == "func" and len(tokens) == 2 and tokens[1][0] == "name":
        return (f"{tokens[0][1]} {tokens[1][1]}",)
    if tokens[0] in PROBABILITIES and tokens[1:2] == [("op", "(")] and partner(tokens, 1) == len(tokens) - 1:
        return ("".join(str(value) for _, value in tokens),)
    if len(tokens) == 1 and tokens[0][1] in CONSTANTS:
        return ()
    try:
        tree = trees.parse(tokens)
    except Unreadable:
        return _applied(tokens)
    return _named(tree) or _applied(tokens)


def _applied(tokens: list[Token]) -> tuple[str, ...]:
    """f(x, y) with names or numbers as arguments."""
    at = next((i for i, token in enumerate(tokens) if token == ("op", "(")), None)
    if not at or partner(tokens, at) != len(tokens) - 1:
        return ()
    try:
        function = trees.parse(tokens[:at])
        arguments = [trees.parse(part) for part in split(tokens[at + 1 : -1], (",",))[0]]
    except Unreadable:
        return ()
    if function[0] == "^" and function[1][0] == "name" and function[2] == ("neg", ("num", 1)):
        function = ("name", f"{function[1][1]}^-1")
    if function[0] != "name" or any(argument[0] not in ("name", "num") for argument in arguments):
        return ()
    if len(arguments) == 1 and arguments[0] == ("name", function[1]):
        return ()
    return (function[1], *(str(argument[1]) for argument in arguments))


def _named(tree: Node) -> tuple[str, ...]:
    if tree[0] == "name":
        return (tree[1],)
    if tree[0] == "apply":
        return (tree[1], str(tree[2][1]))
    if tree[0] == "*" or tree[0] == "/":
        sides = [_named(part) for part in tree[1:]]
        if all(len(side) == 1 and LETTERS.fullmatch(side[0]) for side in sides):
            return (("/" if tree[0] == "/" else "").join(side[0] for side in sides),)
    return ()
