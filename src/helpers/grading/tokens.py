"""Split a clean answer into tokens: numbers, names, functions, words, and signs.

The one judgement made here is what a run of letters is. After a backslash it is a command; otherwise it is a function
(`sin`), a Greek letter (`pi`), a word (`apples`, `Evelyn`), a unit (`cm`), or a product of one-letter names (`lwh`).
Words become one token that maths cannot take apart, so `dog` is not `god`, while `ab` is `ba`.

A token is (kind, value): num (a `Fraction`, or digits too many to convert), name, func, text, unit, env, op.
"""

import re
from fractions import Fraction

from helpers.grading.normalize import GREEK

Token = tuple[str, object]


class Unreadable(Exception):
    """An answer that the reader has no rules for; it can still equal another as a string."""


MAX_LENGTH = 20_000  # characters of an answer
MAX_DIGITS = 4_000  # of one number
MAX_EXPONENT = 5_000  # of e-notation

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth",
    "asin", "acos", "atan", "ln", "log", "lg", "exp", "sqrt", "gcd", "lcm", "max", "min", "det", "abs", "floor",
    "ceil",
}  # fmt: skip
FUNCTION_AND_NAME = re.compile(
    r"(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(pi|theta|alpha|beta|[a-z])"
)
UNITS = {
    "cm", "mm", "km", "nm", "um", "ft", "yd", "mi", "lb", "lbs", "oz", "kg", "mg", "ml", "mL", "dL", "hr", "hrs",
    "sec", "secs", "min", "mins", "mph", "kph", "rpm", "Hz", "kHz", "MHz", "GHz", "eV", "keV", "MeV", "GeV", "pc",
    "kpc", "Mpc", "ly", "AU", "amu", "mol", "kJ", "MJ", "kW", "MW", "kWh", "Pa", "kPa", "MPa", "atm", "cc", "deg",
    "rad", "rads", "yr", "yrs", "USD", "sq", "in", "am", "pm", "AM", "PM",
}  # fmt: skip
SHORT_WORDS = {"and", "or", "to", "is", "of", "no", "if"}  # `at`, `by` and the like are more often products of names
BEFORE_BRACKETS = {"and", "or", "to", "is", "point", "points"}
COMMANDS = {
    r"\times": "*", r"\cdot": "*", r"\ast": "*", r"\div": "/", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=",
    r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!=",
    r"\approx": "~", r"\simeq": "~", r"\colon": ":", r"\mid": "|", r"\vert": "|", r"\lvert": "|", r"\rvert": "|",
    r"\|": "|", r"\lbrace": "{{", r"\rbrace": "}}", r"\{": "{{", r"\}": "}}", r"\lbrack": "[", r"\rbrack": "]",
    r"\backslash": r"\setminus", r"\smallsetminus": r"\setminus", r"\varnothing": r"\emptyset", r"\ldots": "...",
    r"\dots": "...", r"\cdots": "...", r"\dotsc": "...", r"\%": "%", r"\prime": "'", r"\lparen": "(", r"\deg": r"\degree",
    r"\rparen": ")", r"\land": "and", r"\wedge": "and", r"\lor": "or", r"\vee": "or", r"\&": "&", r"\_": "_",
}  # fmt: skip
SIGNS = {"<=": "<=", ">=": ">=", "!=": "!=", "=<": "<=", "=>": "=>", "==": "=", "...": "..."}
OPERATORS = {  # commands that act but are no name: the reader of expressions knows some, the rest make an answer unreadable
    r"\frac", r"\binom", r"\sqrt", r"\over", r"\pm", r"\mp", r"\cup", r"\cap", r"\setminus", r"\in", r"\infty",
    r"\emptyset", r"\circ", r"\degree", r"\mathbb", r"\overline", r"\bar", r"\dot", r"\ddot", r"\hat", r"\tilde",
    r"\vec", r"\widehat", r"\overrightarrow", r"\lfloor", r"\rfloor", r"\lceil", r"\rceil", r"\langle", r"\rangle",
    r"\bmod", r"\mod", r"\pmod", r"\angle", r"\triangle", r"\int", r"\iint", r"\oint", r"\sum", r"\prod", r"\lim",
    r"\partial", r"\nabla", r"\to", r"\rightarrow", r"\Rightarrow", r"\implies", r"\forall", r"\exists", r"\notin",
    r"\subset", r"\subseteq", r"\not", r"\neg", r"\equiv", r"\sim", r"\propto", r"\perp", r"\parallel", r"\because",
    r"\therefore",
}  # fmt: skip

NUMBER = re.compile(r"(?:\d+(?:\.(?!\.)\d*)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z\d]))?")
REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\}|((?:\\dot\s*(?:\{\d\}|\d)\d*)+))")
DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*(d|\\partial)\s*(\^\s*\{?\s*\d\s*\}?)?\s*(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*\}\s*"
    r"\{\s*\1\s*(\\?[A-Za-z])\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*\}"
)


def tokenize(text: str) -> list[Token]:
    """The tokens of a clean answer, in order; adjacent words are one."""
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    found: list[Token] = []
    at = 0
    while at < len(text):
        at = _next(text, at, found)
    return [connector(token) for token in _joined(found)]


def _joined(tokens: list[Token]) -> list[Token]:
    """Adjacent words as one, and a name with its subscript as one name: `x_{1}` -> x_1, `\\lambda_{\\text{red}}` ->
    \\lambda_red.
    """
    joined: list[Token] = []
    at = 0
    while at < len(tokens):
        kind, value = tokens[at]
        if kind == "text" and joined and joined[-1][0] == "text" and not {value, joined[-1][1]} & {"and", "or"}:
            joined[-1] = ("text", f"{joined[-1][1]} {value}")
        elif (kind, value) == ("op", "_") and joined and joined[-1][0] == "name" and at + 1 < len(tokens):
            end = _group_end(tokens, at + 1)
            below = "".join(
                str(v).replace(" ", "") for k, v in tokens[at + 1 : end + 1] if (k, v) not in (("op", "{"), ("op", "}"))
            )
            joined[-1] = ("name", f"{joined[-1][1]}_{below}")
            at = end
        else:
            joined.append((kind, value))
        at += 1
    return joined


def _group_end(tokens: list[Token], at: int) -> int:
    """Where the group, or the one token, that begins at `at` ends."""
    depth = 0
    for end in range(at, len(tokens)):
        depth += (tokens[end] == ("op", "{")) - (tokens[end] == ("op", "}"))
        if depth <= 0:
            return end
    return len(tokens) - 1


def connector(token: Token) -> Token:
    """The words `and`, `or`, `is` and `to` between formulas are signs."""
    if token[0] == "text":
        word = re.sub(r"[\s,;]+", " ", str(token[1])).strip().casefold()
        if word in ("and", "or", "is", "equals", "to"):
            return "op", {"and": "and", "or": "or", "is": "=", "equals": "=", "to": ":"}[word]
    return token


def _next(text: str, at: int, found: list[Token]) -> int:
    """Append the token that begins at `at` and return where the next one begins."""
    c = text[at]
    if c == " ":
        return at + 1
    if match := REPEATING.match(text, at):
        found.append(("num", _repeating(match)))
        return match.end()
    if match := NUMBER.match(text, at):
        found.append(("num", number(match[0])))
        return match.end()
    if c == "\\":
        return _command(text, at, found)
    if c.isalpha():
        end = at
        while end < len(text) and text[end].isalpha():
            end += 1
        if (
            text.startswith("(", end)
            and is_word(text[at:end])
            and text[at:end].casefold() not in BEFORE_BRACKETS | FUNCTIONS
        ):
            raise Unreadable("a call")
        found += letters(text[at:end], found)
        return end
    for sign in (text[at : at + 3], text[at : at + 2]):
        if sign in SIGNS:
            found.append(("op", SIGNS[sign]))
            return at + len(sign)
    found.append(("op", c))
    return at + 1


def _command(text: str, at: int, found: list[Token]) -> int:
    if text.startswith("\\frac", at) and (match := DERIVATIVE.match(text, at)):
        found.append(("name", re.sub(r"\s|[{}]", "", match[0])))
        return match.end()
    match = re.compile(r"\\(?:[A-Za-z]+|.)|\\$").match(text, at)
    name, end = match[0], match.end()
    if name == r"\text":
        return _text(text, end, found)
    if name in (r"\begin", r"\end"):
        environment = re.compile(r"\s*\{([A-Za-z]+)\*?\}(?:\s*\{[lcr|\s]*\})?").match(text, end)
        if not environment:
            raise Unreadable(name)
        found.append(("env", f"{name[1:]} {environment[1]}"))
        return environment.end()
    if name in COMMANDS:
        found.append(("op", COMMANDS[name]))
    elif name == r"\\":
        found.append(("op", name))
    elif name[1:] in FUNCTIONS:
        found.append(("func", name[1:]))
    elif name in OPERATORS:
        found.append(("op", name))
    elif name[1:].startswith("var") and name[4:] in GREEK:
        found.append(("name", "\\" + name[4:]))
    else:
        found.append(("name", name))
    return end


def _text(text: str, at: int, found: list[Token]) -> int:
    """The argument of `\\text`: words as one token, anything else as maths."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at == len(text) or text[at] != "{":
        return at
    depth, end = 1, at + 1
    while end < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    content = text[at + 1 : end - 1 if not depth else end].strip()
    if content.casefold() in ("infinity", "infinite"):
        found.append(("op", r"\infty"))
    elif content in ("min", "sec") and found and found[-1][0] == "num":
        found.append(("text", content))
    elif content in FUNCTIONS or content in ("e", "i", "d"):
        found.append(("func" if content in FUNCTIONS else "name", content))
    elif re.search(r"\\|^[^A-Za-z]*\d|^[A-Za-z]\s*=", content) or not re.search(r"[^\W\d_]", content):
        found += tokenize(content)
    elif content:
        found.append(("text", content))
    return end


def letters(run: str, before: list[Token]) -> list[Token]:
    """What a run of letters without a backslash is."""
    if run in FUNCTIONS and not (run in ("min", "sec") and before and before[-1][0] == "num"):
        return [("func", run)]
    if run in GREEK:
        return [("name", "\\" + run)]
    if run.casefold() in ("infinity", "infty", "inf"):
        return [("op", r"\infty")]
    if match := FUNCTION_AND_NAME.fullmatch(run):
        return [("func", match[1]), *letters(match[2], [])]
    if len(run) == 1:
        return [("name", run)]
    if is_word(run) or (
        run in UNITS and before and (before[-1][0] in ("num", "text") or before[-1][1] in ("}", "/", r"\pi", "^"))
    ):
        return [("text", run)]
    if match := re.fullmatch(r"(.+?)(pi|theta|alpha|beta|sqrt|sin|cos)", run):
        return [*letters(match[1], before), *letters(match[2], [])]
    return [("name", c) for c in run]


def is_word(run: str) -> bool:
    """Whether a run of two or more letters is a word and no product of names."""
    if run in SHORT_WORDS or run == "day" or not run.isascii():
        return True
    if len(run) < 3:
        return False
    if run.isupper():
        return len(run) >= 4 and bool(re.search("[AEIOU]", run))
    return bool(re.search("[aeiouy]", run[1:] if run[0] in "xyz" else run.lower())) and not set(run) <= set("abcdxyz")


def number(text: str) -> object:
    """A decimal or e-notation number as a `Fraction`; one with too many digits stays a string."""
    digits, _, exponent = re.sub("[E]", "e", text).partition("e")
    if len(digits) > MAX_DIGITS:
        return digits
    if len(exponent) > 9 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unreadable("exponent")
    return Fraction(text.rstrip(".") if not exponent else f"{digits.rstrip('.')}e{exponent}")


def _repeating(match: re.Match) -> Fraction:
    """0.1\\overline{6} -> 1/6; dots stand over the first and the last digit of the period."""
    whole, fixed = match[1] or "0", match[2]
    period = match[3] or re.sub(r"\D", "", match[4])
    if len(whole + fixed + period) > MAX_DIGITS:
        raise Unreadable("too long")
    head = Fraction(int(whole + fixed), 10 ** len(fixed))
    return head + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
