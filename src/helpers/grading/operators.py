"""Integrals, sums, products, limits and derivatives: what our reader has no rules for goes to math-verify, behind
guards.

math-verify 0.9.0 is strong on these and weak elsewhere: it takes a trailing letter for a unit, folds case, rounds to
six decimals, and accepts an equation for a value. So it is asked only where one side holds such an operator, both
sides are scalars (no comma, no relation, no word), and both use the same free names with the same case; and it must
be run in a worker, because some inputs never return.
"""

import re

OPERATOR = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|det|frac\s*\{\s*d\s*\}|frac\s*\{\s*\\partial\s*\})(?![A-Za-z])")
GUARDED = re.compile(r"[,;=<>]|\\(?:text|le|ge|ne|leq|geq|in|cup|approx)(?![A-Za-z])")
HUGE = re.compile(r"\d{4}|\^\s*\{?[^{}]*\^")


def has_operator(text: str) -> bool:
    """Whether an answer holds an operator that acts on an expression."""
    return bool(OPERATOR.search(text))


def operator_equal(gold: str, answer: str) -> tuple[str, str]:
    """(outcome, rule) of two clean answers; only what math-verify accepts within the guards is equal."""
    bodies = [re.sub(r"_\s*\{[^{}]*\}|_\s*\w", "", text) for text in (gold, answer)]  # k = 1 below a sum is no equation
    if any(map(GUARDED.search, bodies)) or any(map(HUGE.search, (gold, answer))):
        return "unparsed", "operator"
    if _free(gold) != _free(answer):
        return "unparsed", "operator"
    return ("equal" if alone(gold, rf"\boxed{{{answer}}}") else "different"), "operator"


def _free(text: str) -> set[str]:
    """The one-letter names that an answer is a function of: without those that a sum, a limit or a definite integral
    binds.
    """
    bound = set(re.findall(r"_\s*\{?\s*([A-Za-z])\s*(?:=|\\to)", text))
    if re.search(r"\\int\s*_", text):
        bound |= set(re.findall(r"d\s*([A-Za-z])(?![A-Za-z])", text))
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text))) - bound - {"d", "e"}


def alone(gold: str, reply: str) -> bool:
    """What math-verify itself says of a reply, the gold boxed as it needs it. Only in a worker: it may not return."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    options = {"parsing_timeout": None, "raise_on_error": False}
    return bool(verify(parse(rf"\boxed{{{gold}}}", **options), parse(reply, **options), timeout_seconds=None))
