"""The kinds of answers, and when two answers of some kinds are the same.

Lists and sets have no order, tuples do; brackets count, so an open interval is not a closed one, and an interval
equals the region that an inequality describes. A name on one side alone is dropped, two different names make two
different answers; the argument of a function is only a name (`f(n) = n + 1` is `f(x) = x + 1`) unless it
is a number. A unit on one side
alone is dropped, two measures that differ contradict each other. A percent sign is a factor of 1/100, but a number
above 1 may leave it out (`60` for `60\\%`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from helpers.grading import same, trees
from helpers.grading.regions import Region
from helpers.grading.tokens import Unreadable
from helpers.grading.trees import Node
from helpers.grading.units import contradict


@dataclass(frozen=True)
class Shape:
    """An answer: its `kind`, `parts` whose meaning the kind says, the `name` that it was given, and its `unit`.

    scalar (tree, and for `y = 2x` the tree of y - 2x) · text (key) · list, set (members) · tuple (brackets, members)
    · region (set of reals) · matrix (rows) · ratio (terms) · based (value and base) · equation (tree that is zero) ·
    relation (sign and tree against zero) · either (readings).
    """

    kind: str
    parts: tuple
    name: tuple[str, ...] = ()
    unit: str = ""


def alike(a: Shape, b: Shape) -> bool:
    """Whether two shapes are the same answer. Errors: `Unreadable` where that cannot be decided."""
    if "either" in (a.kind, b.kind):
        a, b = (a, b) if a.kind == "either" else (b, a)
        return any(alike(part, b) for part in a.parts)
    if contradict(a.unit, b.unit):
        return False
    kinds = {a.kind, b.kind}
    if kinds <= {"equation", "scalar"} and (kinds != {"scalar"} or _other_name(a, b)):
        zeros = [shape.parts[0 if shape.kind == "equation" else 1 :] for shape in (a, b)]
        return all(zeros) and same.proportional(zeros[0][0], zeros[1][0])
    if kinds == {"scalar"}:
        return _scalars(a, b)
    if kinds <= {"list", "set"}:
        return _unordered(a.parts, b.parts)
    if kinds == {"set", "scalar"}:
        return len(a.parts) == len(b.parts) == 1 and alike(*(s.parts[0] if s.kind == "set" else s for s in (a, b)))
    if "region" in kinds:
        regions = [region_of(shape) for shape in (a, b)]
        return None not in regions and not (a.name and b.name and a.name != b.name) and regions[0].same(regions[1])
    if len(kinds) > 1 or _other_name(a, b):
        return False
    if a.kind == "tuple":
        return a.parts[0] == b.parts[0] and _ordered(a.parts[1:], b.parts[1:])
    if a.kind == "ratio":
        return _ordered(a.parts, b.parts)
    if a.kind == "matrix":
        return len(a.parts) == len(b.parts) and all(map(_ordered, a.parts, b.parts))
    if a.kind == "relation":
        return len(a.parts) == len(b.parts) and all(map(_relations, a.parts, b.parts))
    return a.parts == b.parts


def region_of(shape: Shape) -> Region | None:
    """A shape as a set of real numbers: a region, an interval of constants, or a set of constants; else None."""
    if shape.kind == "region":
        return shape.parts[0]
    scalars = [
        part for part in shape.parts[shape.kind == "tuple" :] if isinstance(part, Shape) and part.kind == "scalar"
    ]
    try:
        values = [same.constant(part.parts[0]) for part in scalars]
        if (
            shape.kind == "tuple"
            and len(values) == 2 == len(shape.parts) - 1
            and shape.parts[0] in ("()", "(]", "[)", "[]")
        ):
            return Region.interval(shape.parts[0][0], *values, shape.parts[0][1])
        if shape.kind == "set" and len(values) == len(shape.parts):
            return Region.points(values)
    except Unreadable:
        pass
    return None


def _other_name(a: Shape, b: Shape) -> bool:
    """Whether two names differ; a number that a function is applied to is a part of its name."""
    if not a.name or not b.name:
        return False
    keys = [(name[0], *(part if re.match(r"-?\d", part) else "" for part in name[1:])) for name in (a.name, b.name)]
    return keys[0] != keys[1] if len(keys[0]) == len(keys[1]) else keys[0][0] != keys[1][0]


def _scalars(a: Shape, b: Shape) -> bool:
    x, y = a.parts[0], b.parts[0]
    if a.name != b.name and len(a.name) == len(b.name) > 1:
        variables = zip(a.name[1:], b.name[1:], strict=True)
        places = {old: f"@{i}" for i, (old, _) in enumerate(variables)}
        others = {old: f"@{i}" for i, old in enumerate(b.name[1:])}
        x, y = trees.rename(x, places), trees.rename(y, others)
    if bool(a.unit) != bool(b.unit):
        x, y = (x, _without(y, a.unit)) if a.unit else (_without(x, b.unit), y)
    if (x[0] == "%") != (y[0] == "%"):
        bare, marked = (y, x) if x[0] == "%" else (x, y)
        if a.unit or b.unit:
            return False
        if not trees.names(bare) and same.same(bare, marked[1]):
            return same.exceeds_one(bare)
    return same.same(x, y)


def _without(tree: Node, unit: str) -> Node:
    """A tree without the one-letter unit at its end: `5 m` where the other side says `5 \\text{ m}`."""
    letter, _, power = unit.partition("^")
    end = ("^", ("name", letter), ("num", Fraction(power))) if power.isdigit() else ("name", letter)
    return tree[1] if tree[0] == "*" and tree[2] == end else tree


def _ordered(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    return len(a) == len(b) and all(map(alike, a, b))


def _unordered(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    """As multisets; where one side names its members (`a = 1, b = 2`) and the other does not, in order."""
    if len(a) != len(b):
        return False
    named = [len({shape.name for shape in side if shape.name}) > 1 for side in (a, b)]
    if named[0] != named[1]:
        return _ordered(a, b)
    left = list(b)
    for shape in a:
        match = next((i for i, other in enumerate(left) if alike(shape, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _relations(a: tuple[str, Node], b: tuple[str, Node]) -> bool:
    return a[0] == b[0] and same.proportional(a[1], b[1], positive=a[0] != "!=")
