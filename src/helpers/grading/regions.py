"""Sets of real numbers as unions of intervals with constant ends, in one normal form, so that equal sets are equal
piece by piece.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from mpmath import mp, mpc

from helpers.grading import arithmetic
from helpers.grading.arithmetic import Value
from helpers.grading.tokens import Unreadable

Interval = tuple[Value, bool, Value, bool]  # low, whether low belongs to it, high, whether high does


@dataclass(frozen=True)
class Region:
    """Disjoint intervals in order, none of which touch."""

    intervals: tuple[Interval, ...]

    @staticmethod
    def line() -> "Region":
        return Region(((-mp.inf, False, mp.inf, False),))

    @staticmethod
    def ray(sign: str, bound: Value) -> "Region":
        """All x with `x sign bound`."""
        if sign == "!=":
            return Region.line().without(Region.points([bound]))
        closed = "=" in sign
        return Region.interval("[" if closed else "(", bound, mp.inf, ")") if ">" in sign else Region.interval(
            "(", -mp.inf, bound, "]" if closed else ")"
        )  # fmt: skip

    @staticmethod
    def interval(opening: str, low: Value, high: Value, closing: str) -> "Region":
        left, right = opening == "[" and not arithmetic.infinite(low), closing == "]" and not arithmetic.infinite(high)
        order = compare(low, high)
        if order > 0 or (order == 0 and not (left and right)):
            raise Unreadable("an interval that holds nothing")
        return Region(((low, left, high, right),))

    @staticmethod
    def points(values: Iterable[Value]) -> "Region":
        return Region.union(Region(((value, True, value, True),)) for value in values)

    @staticmethod
    def union(regions: Iterable["Region"]) -> "Region":
        return reduce(Region.join, regions, Region(()))

    def join(self, other: "Region") -> "Region":
        merged: list[Interval] = []
        for interval in sorted((*self.intervals, *other.intervals), key=_Key):
            if merged and _touch(merged[-1], interval):
                low, left, high, right = merged[-1]
                order = compare(high, interval[2])
                end = (high, right or interval[3]) if order == 0 else (high, right) if order > 0 else interval[2:]
                merged[-1] = (low, left, *end)
            else:
                merged.append(interval)
        return Region(tuple(merged))

    def complement(self) -> "Region":
        pieces: list[Interval] = []
        low, left = -mp.inf, False
        for start, starts, end, ends in self.intervals:
            order = compare(low, start)
            if order < 0 or (order == 0 and left and not starts):
                pieces.append((low, left, start, not starts and not arithmetic.infinite(start)))
            low, left = end, not ends
        if not arithmetic.infinite(low) or low < 0:
            pieces.append((low, left and not arithmetic.infinite(low), mp.inf, False))
        return Region(tuple(pieces))

    def meet(self, other: "Region") -> "Region":
        return self.complement().join(other.complement()).complement()

    def without(self, other: "Region") -> "Region":
        return self.meet(other.complement())

    def same(self, other: "Region") -> bool:
        return len(self.intervals) == len(other.intervals) and all(
            a[1] == b[1] and a[3] == b[3] and arithmetic.close(a[0], b[0]) and arithmetic.close(a[2], b[2])
            for a, b in zip(self.intervals, other.intervals, strict=True)
        )


def compare(a: Value, b: Value) -> int:
    """-1, 0 or 1. Errors: `Unreadable` for complex numbers."""
    if isinstance(a, mpc) or isinstance(b, mpc):
        raise Unreadable("complex numbers have no order")
    if arithmetic.close(a, b):
        return 0
    if arithmetic.infinite(a) or arithmetic.infinite(b):
        return -1 if (arithmetic.infinite(a) and a < 0) or (arithmetic.infinite(b) and b > 0) else 1
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return -1 if a < b else 1
    return -1 if arithmetic.inexact(a) < arithmetic.inexact(b) else 1


class _Key:
    """Sorts intervals by their low ends; a closed end comes first."""

    def __init__(self, interval: Interval):
        self.low, self.closed = interval[0], interval[1]

    def __lt__(self, other: "_Key") -> bool:
        order = compare(self.low, other.low)
        return order < 0 or (order == 0 and self.closed and not other.closed)


def _touch(a: Interval, b: Interval) -> bool:
    """Whether the union of two intervals, of which `a` begins first, is one interval."""
    order = compare(b[0], a[2])
    return order < 0 or (order == 0 and (a[3] or b[1]))
