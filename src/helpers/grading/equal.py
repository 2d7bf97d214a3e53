"""Decide whether an answer equals the gold, and by which rule.

The rules of `RULES` are tried from the plainest to the strongest. The first that finds equality gives its name, and
`different` is said only by a rule that read both sides. An empty gold equals nothing, and what no rule can read is
`unparsed`.
"""

import re
from fractions import Fraction
from functools import lru_cache

from helpers.grading import reader, same, units
from helpers.grading.normalize import clean, readings, trim
from helpers.grading.operators import has_operator, operator_equal
from helpers.grading.shapes import Shape, alike
from helpers.grading.tokens import MAX_LENGTH, Unreadable, tokenize

RULES = {
    "string": "the same characters, once Unicode, spacing, fonts and decoration are set alike",
    "label": "the same option letter: `(C)` is `C: some text`",
    "text": "the same words, whatever their case and the punctuation of sentences",
    "number": "the same rational number, exactly: `0.75`, `3/4`, `75\\%`, `7.5e-1`; never rounded",
    "expression": "the same value to 60 of 100 digits, wherever the names are given values: `2\\sin x\\cos x` is `\\sin 2x`",
    "list": "the same members in any order; `\\pm` makes two",
    "set": "the same, in braces",
    "tuple": "the same members in the same order within the same brackets",
    "region": "the same set of real numbers: `x > 5` is `(5, \\infty)`",
    "matrix": "the same entries",
    "ratio": "the same terms: `3:4` is not `6:8`",
    "based": "the same digits in the same base; without its base a number is another: `52_8` is not `42`",
    "equation": "the same sides up to a constant factor; only a name makes it a value: `x = 5` is `5`, `x + y = 5` is not",
    "relation": "the same inequality by a positive factor",
    "either": "one of two approximate values: `1/3 \\approx 0.333`",
    "operator": "integrals, sums, limits and derivatives: what math-verify accepts, if the names agree",
}

LABEL = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+|final\s+)?(?:option|choice|answer)(?:\s+is)?:?\s+)?"
    r"(?:\(\s*([A-J])\s*\)|([A-J])(?=$|[:.)]\s|[:)]$))",
    re.IGNORECASE,
)
MORE_LABELS = re.compile(  # behind a label: another one, a lone capital, a judgement
    r"\(\s*[A-Ja-j]\s*\)|(?<![\w(\\])[a-j][).](?!\w)|(?<![\w\\])[A-HJ](?!\w)|\b(?:or|and)\b|"
    r"(?i:\b(?:" + "|".join(sorted(units.JUDGEMENTS)) + r")\b)"
)
PLAIN = re.compile(r"[\w\s,.;:'\"!?&-]*")


@lru_cache(maxsize=50_000)
def equal(gold: str, answer: str) -> tuple[str, str]:
    """(outcome, rule) of a bare answer. Never raises; the caller bounds time and memory."""
    if max(len(gold), len(answer)) > 5 * MAX_LENGTH:
        return ("equal", "string") if gold.strip() and gold == answer else ("unparsed", "length")
    g, a = clean(gold), clean(answer)
    if not g or not a:
        return "unparsed", "no gold" if not g else "empty"
    if _squeezed(g) == _squeezed(a):
        return "equal", "string"
    if len(g) > MAX_LENGTH or len(a) > MAX_LENGTH:
        return "unparsed", "length"
    labels = _label(g), _label(a)
    if labels[0] and labels[1] and (_bare_label(g) or _bare_label(a)):
        return "equal" if labels[0] == labels[1] else "different", "label"
    if has_operator(g) or has_operator(a):
        return operator_equal(g, a)
    try:
        return _by_shape(g, a)
    except (Unreadable, RecursionError, ArithmeticError, ValueError):
        return "unparsed", "unread"


def _by_shape(gold: str, answer: str) -> tuple[str, str]:
    golds = _shapes(gold)
    answers = _shapes(answer)
    words = _words(gold), _words(answer)
    if "text" in (golds[0].kind, answers[0].kind) and all(map(PLAIN.fullmatch, words)):
        keys = [units.text_key(text) for text in words]
        if keys[0] == keys[1]:
            return "equal", "text"
    problem: Unreadable | None = None
    for g in golds:
        for a in answers:
            try:
                if alike(g, a):
                    return "equal", _rule(g, a)
            except Unreadable as error:
                problem = error
    if problem:
        raise problem
    return "different", _rule(golds[0], answers[0])


def _shapes(text: str) -> list[Shape]:
    """The shapes of all readings of an answer that can be read; at least one, or `Unreadable`."""
    found, problem = [], Unreadable("no reading")
    for reading in readings(text):
        try:
            found.append(reader.read(tokenize(reading)))
        except Unreadable as error:
            problem = error
    if not found:
        raise problem
    return found


def _rule(gold: Shape, answer: Shape) -> str:
    if gold.kind == answer.kind == "scalar":
        try:
            exact = all(isinstance(same.constant(s.parts[0]), Fraction) for s in (gold, answer))
        except Unreadable:
            exact = False
        return "number" if exact else "expression"
    return gold.kind if gold.kind == answer.kind or gold.kind != "scalar" else answer.kind


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\w) | (?!\w)", "", text)


def _words(text: str) -> str:
    """The text with its text commands opened."""
    return trim(re.sub(r"\s+", " ", re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("\\ ", " ")))


def _label(text: str) -> str:
    """The option letter that an answer begins with, or ""."""
    words = _words(text)
    match = LABEL.match(words)
    if not match or MORE_LABELS.search(words, match.end()):
        return ""
    letter, rest = match[1] or match[2], words[match.end() :].strip()
    if (match[2] and match[2].islower()) or re.match(r"[-+*/^=_(\\]", rest):
        return ""
    return letter.upper()


def _bare_label(text: str) -> bool:
    return bool(re.fullmatch(r"\(?\s*[A-Ja-j]\s*\)?", _words(text)))


def is_number(gold: str) -> bool:
    """Whether a gold is a plain rational number, so that the last number of a reply may answer it."""
    try:
        shapes = _shapes(clean(gold))
    except (Unreadable, RecursionError, ArithmeticError, ValueError):
        return bool(re.fullmatch(r"\d+", gold))
    return shapes[0].kind == "scalar" and _rule(shapes[0], shapes[0]) == "number"
