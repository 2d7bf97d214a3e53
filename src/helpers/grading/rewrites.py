"""Replies made from golds by rule, whose verdict is known without a grader: the gold written otherwise, and near
misses of it.

Each rewriting takes a gold and gives an answer, or None where it does not apply. Those of `EQUAL` keep the value,
those of `DIFFERENT` change it, by construction. A comparison of graders on such replies shows which rewritings a
grader gets wrong, not how often a model writes so: models mostly write the gold itself.
"""

import re
from collections.abc import Callable
from fractions import Fraction

Rewrite = Callable[[str], str | None]

INTEGER = re.compile(r"-?\d+")
RATIO = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")
DECIMAL = re.compile(r"-?\d*\.\d+")
PAIR = re.compile(r"(?:\\left)?\s*\(([^()\[\],]+),([^()\[\],]+?)(?:\\right)?\s*\)")
MEMBERS = re.compile(r"[^(){}\[\],]+(?:,[^(){}\[\],]+)+")
GROUPED = re.compile(r",(?:\\!)?\s*\d{3}(?!\d)|=|[A-Za-z]{3}")  # may be one number, names values, or holds words
PLAIN = re.compile(r"[^=<>,:]*[A-Za-z0-9}][^=<>,:]*")


def bare(gold: str) -> str:
    """The gold without dollars around it."""
    return gold.strip().strip("$").strip() if gold.count("$") in (0, 2) else gold


def _integer(change: Callable[[int], str | None]) -> Rewrite:
    return lambda gold: change(int(gold)) if INTEGER.fullmatch(gold) and len(gold) < 16 else None


def _ratio(change: Callable[[Fraction], str | None]) -> Rewrite:
    def rewrite(gold: str) -> str | None:
        match = RATIO.fullmatch(gold)
        return change(Fraction(int(match[1] + match[2]), int(match[3]))) if match and int(match[3]) else None

    return rewrite


def _scalar(change: Callable[[str], str | None]) -> Rewrite:
    """For golds without separators, relations and words."""
    return lambda gold: change(gold) if PLAIN.fullmatch(gold) and "text" not in gold and "mbox" not in gold else None


def _exact_decimal(value: Fraction) -> str | None:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return f"{float(value):.10f}".rstrip("0") if rest == 1 and value.denominator < 1000 else None


def _mixed(value: Fraction) -> str | None:
    whole, part = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    return rf"{sign}{whole}\frac{{{part.numerator}}}{{{part.denominator}}}" if whole and part else None


def _swapped_pair(gold: str) -> str | None:
    match = PAIR.fullmatch(gold)
    return f"({match[2].strip()}, {match[1].strip()})" if match and match[1].strip() != match[2].strip() else None


def _closed_pair(gold: str) -> str | None:
    match = PAIR.fullmatch(gold)
    return f"[{match[1]},{match[2]}]" if match and "infty" not in gold else None


def _reversed_members(gold: str) -> str | None:
    return ", ".join(gold.split(",")[::-1]) if MEMBERS.fullmatch(gold) and not GROUPED.search(gold) else None


def _without_last(gold: str) -> str | None:
    return gold.rpartition(",")[0] if MEMBERS.fullmatch(gold) and not GROUPED.search(gold) else None


def _nudged(gold: str) -> str | None:
    if not DECIMAL.fullmatch(gold):
        return None
    return gold[:-1] + str((int(gold[-1]) + 1) % 10)


def _named(gold: str) -> str | None:
    return None if re.search(r"[=<>,:]|\\(?:text|mbox|in|le|ge|cup|pm)", gold) else f"x = {gold}"


EQUAL: dict[str, Rewrite] = {
    "the gold itself": lambda gold: gold,
    "digits in groups: 12{,}500": _integer(lambda n: f"{n:,}".replace(",", "{,}") if abs(n) > 999 else None),
    "thin spaces: 12\\,500": _integer(lambda n: f"{n:,}".replace(",", r"\,") if abs(n) > 999 else None),
    "a trailing point: 12.": _integer(lambda n: f"{n}."),
    "a decimal zero: 12.0": _integer(lambda n: f"{n}.0"),
    "a slash: 3/4": _ratio(lambda q: f"{q.numerator}/{q.denominator}" if q.denominator > 1 else None),
    "an exact decimal: 0.75": _ratio(_exact_decimal),
    "a mixed number: 1\\frac{3}{4}": _ratio(_mixed),
    "a named value: x = 12": _named,
    "a unit: 12\\text{ units}": _integer(lambda n: rf"{n}\text{{ units}}"),
    "full-width digits: １２": _integer(lambda n: str(n).translate({48 + i: 0xFF10 + i for i in range(10)})),
    "a list in another order": _reversed_members,
    "in bold": _scalar(lambda gold: rf"\mathbf{{{gold}}}"),
    "in colour": _scalar(lambda gold: rf"\color{{blue}}{{{gold}}}"),
}
DIFFERENT: dict[str, Rewrite] = {
    "one more: 13 for 12": _integer(lambda n: str(n + 1)),
    "the other sign: -12": _integer(lambda n: str(-n) if n else None),
    "a letter that is no unit: 12t": _integer(lambda n: f"{n}t" if n else None),
    "an equation that a sum has: x + y = 12": _integer(lambda n: f"x + y = {n}"),
    "a hedge: 12 or 13": _integer(lambda n: rf"{n} \text{{ or }} {n + 1}"),
    "an interval around it": _integer(lambda n: f"[{n - 1}, {n + 1}]"),
    "upside down: 4/3": _ratio(lambda q: rf"\frac{{{q.denominator}}}{{{q.numerator}}}" if q and abs(q) != 1 else None),
    "rounded: 0.67": _ratio(lambda q: f"{float(q):.2f}" if Fraction(f"{float(q):.2f}") != q else None),
    "off in the last digit": _nudged,
    "too small by orders: 1e-9 for 2e-9": lambda gold: "2" + gold[1:] if re.fullmatch(r"1\.\d+e-\d+", gold) else None,
    "a pair the other way round": _swapped_pair,
    "closed for open": _closed_pair,
    "a list without its last": _without_last,
    "one more, of any formula": _scalar(lambda gold: f"{gold} + 1"),
    "twice, of any formula": _scalar(lambda gold: rf"2\left({gold}\right)" if gold not in ("0", r"\infty") else None),
}  # fmt: skip


def replies(gold: str) -> list[tuple[str, bool, str]]:
    """(name of the rewriting, whether the answer is equal, the answer) for each that applies to a gold."""
    gold = bare(gold)
    made = [
        (name, expected, rewrite(gold))
        for rules, expected in ((EQUAL, True), (DIFFERENT, False))
        for name, rewrite in rules.items()
    ]
    return [(name, expected, answer) for name, expected, answer in made if answer is not None]
