"""Look into a token sequence from the outside: what is within brackets counts as one thing."""

from collections.abc import Sequence

from helpers.grading.tokens import Token

BRACKETS = {(a, b) for a in "([" for b in ")]"} | {("{{", "}}"), (r"\langle", r"\rangle"), ("]", "["), ("]", "]")}
OPENING, CLOSING = (
    {"(", "[", "{", "{{", r"\lfloor", r"\lceil", r"\langle"},
    {")", "]", "}", "}}", r"\rfloor", r"\rceil", r"\rangle"},
)


def step(token: Token) -> int:
    kind, value = token
    if kind == "env":
        return 1 if str(value).startswith("begin") else -1
    return (value in OPENING) - (value in CLOSING) if kind == "op" else 0


def partner(tokens: Sequence[Token], at: int) -> int | None:
    """Where the bracket that opens at `at` closes; intervals may close with another bracket."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += step(tokens[i])
        if depth <= 0:
            return i
    return None


def split(tokens: Sequence[Token], signs: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """The parts between these signs outside all brackets, and the signs."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        depth += step(token)
        if depth == 0 and token[0] == "op" and token[1] in signs:
            found.append(str(token[1]))
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def has(tokens: Sequence[Token], signs: tuple[str, ...]) -> bool:
    return len(split(tokens, signs)[0]) > 1


def bare(tokens: Sequence[Token]) -> list[Token]:
    """Without braces around the whole, and without what ends a sentence."""
    tokens = list(tokens)
    while True:
        if tokens and tokens[-1][0] == "op" and tokens[-1][1] in (",", ";", ".", r"\\", ":", "and", "or"):
            tokens = tokens[:-1]
        elif tokens and tokens[0][0] == "op" and tokens[0][1] in (",", ";", "=", ":", r"\\", "and", "or"):
            tokens = tokens[1:]
        elif inner := _unwrapped(tokens):
            tokens = inner
        else:
            return tokens


def _unwrapped(tokens: list[Token]) -> list[Token] | None:
    """Without the braces around the whole, and with one pair of brackets in place of several; None where nothing goes."""
    partners: dict[int, int] = {}
    stack: list[int] = []
    for i, token in enumerate(tokens):
        if step(token) > 0:
            stack.append(i)
        elif step(token) < 0 and stack:
            partners[stack.pop()] = i
    last, layers = len(tokens) - 1, 0
    while tokens[layers : layers + 1] in ([("op", "{")], [("op", "(")]) and partners.get(layers) == last - layers:
        layers += 1
    brackets = ("op", "(") in tokens[:layers]
    if layers - brackets <= 0:
        return None
    inner = tokens[layers : len(tokens) - layers]
    return [("op", "("), *inner, ("op", ")")] if brackets else inner
