"""Arithmetic that cannot run away: exact on rationals, to 100 digits on everything else.

A value is a `Fraction` or an mpmath number. Rationals stay exact as long as they have at most 2^23 bits; roots of
perfect powers are exact too. Before anything large is computed its size is estimated, and `Unreadable` is raised
instead. The same happens where 100 digits would not tell two numbers apart: a huge rational is never rounded, and a
sum whose terms lie more than 40 orders apart is refused. Terms that cancel to within 60 digits are zero. `precise`
makes all of these bounds four times as strict.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import isqrt

from mpmath import mp, mpc, mpf

from helpers.grading.tokens import Unreadable

Value = Fraction | mpf | mpc

DIGITS = 100
MAX_BITS = 2**23  # of an exact result
MAX_COMMON_BITS = 2**16  # of a denominator: reducing a fraction takes quadratic time
ROUNDED_BITS = 280  # largest rational that 100 digits hold with room to spare
FAR = mpf(10) ** 40
SAME = mpf(10) ** -60
mp.dps = DIGITS


@contextmanager
def precise() -> Iterator[None]:
    """Four times the digits, and numbers that must agree to four times as many."""
    global FAR, SAME, ROUNDED_BITS
    before = FAR, SAME, ROUNDED_BITS
    try:
        mp.dps = 4 * DIGITS
        FAR, SAME, ROUNDED_BITS = mpf(10) ** 160, mpf(10) ** -240, 4 * ROUNDED_BITS
        yield
    finally:
        mp.dps = DIGITS
        FAR, SAME, ROUNDED_BITS = before


class Undefined(Unreadable):
    """A formula has no value here, or one by convention only (a root or logarithm off the real numbers): the point
    decides nothing.
    """


def bits(a: Fraction) -> int:
    return a.numerator.bit_length() + a.denominator.bit_length()


def infinite(a: Value) -> bool:
    return not isinstance(a, Fraction) and bool(mp.isinf(a))


def inexact(a: Value) -> mpf | mpc:
    """A value to 100 digits."""
    if not isinstance(a, Fraction):
        return a
    if bits(a) > 2 * ROUNDED_BITS:
        raise Unreadable("a rational that 100 digits do not hold")
    return mpf(a.numerator) / a.denominator


def checked(a: mpf | mpc) -> mpf | mpc:
    if mp.isnan(a) or mp.isinf(a):
        raise Unreadable("not a number")
    return a.real if isinstance(a, mpc) and a.imag == 0 else a


def add(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        _room(bits(a) + bits(b), a.denominator.bit_length() + b.denominator.bit_length())
        return a + b
    if a == 0 or b == 0:
        return b if a == 0 else a
    a, b = inexact(a), inexact(b)
    large = max(abs(a), abs(b))
    if large > FAR * min(abs(a), abs(b)):
        raise Unreadable("a sum of a huge and a tiny number")
    total = a + b
    return Fraction(0) if abs(total) < SAME * large else checked(total)


def multiply(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        _room(bits(a) + bits(b), a.denominator.bit_length() + b.denominator.bit_length())
        return a * b
    if a == 0 or b == 0:
        if infinite(a) or infinite(b):
            raise Undefined
        return Fraction(0)
    return checked(inexact(a) * inexact(b))


def divide(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        _room(bits(a) + bits(b), a.denominator.bit_length() + b.numerator.bit_length())
        return a / b
    return checked(inexact(a) / inexact(b)) if a != 0 else Fraction(0)


def power(a: Value, b: Value) -> Value:
    """a^b; a rational root of a rational is exact where it is rational."""
    if isinstance(b, Fraction) and b.denominator == 1:
        exponent = b.numerator
        if a == 0:
            if exponent <= 0:
                raise Undefined
            return Fraction(0)
        if isinstance(a, Fraction):
            if abs(a) == 1:
                return Fraction(1 if exponent % 2 == 0 else a)
            _room(abs(exponent) * max(a.numerator.bit_length(), a.denominator.bit_length()))
            return a**exponent
    rational = isinstance(a, Fraction) and isinstance(b, Fraction) and a > 0
    if rational and abs(b.numerator) <= 1000 and b.denominator <= 64 and (found := root(a, b.denominator)) is not None:
        return power(found, Fraction(b.numerator))
    if a == 0:
        if isinstance(b, mpc) or b <= 0:
            raise Undefined
        return Fraction(0)
    a, b = inexact(a), inexact(b)
    if abs(b * mp.log(a)) > 10**7:
        raise Unreadable("a huge power")
    result = checked(a**b)
    if isinstance(result, mpc) and not isinstance(a, mpc) and not isinstance(b, mpc):
        raise Undefined
    return result


def root(a: Fraction, index: int) -> Fraction | None:
    """The exact `index`-th root of a positive rational, or None."""
    if bits(a) > 4096:
        return None
    top, bottom = (_integer_root(n, index) for n in (a.numerator, a.denominator))
    return Fraction(top, bottom) if top**index == a.numerator and bottom**index == a.denominator else None


def _integer_root(n: int, index: int) -> int:
    if index == 2:
        return isqrt(n)
    low, high = 0, 1 << (n.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= n else (low, middle - 1)
    return low


def close(a: Value, b: Value) -> bool:
    """Whether two values are the same number."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    if a == 0 or b == 0 or infinite(a) or infinite(b):
        return bool(a == b)
    a, b = inexact(a), inexact(b)
    return bool(abs(a - b) <= SAME * max(abs(a), abs(b)))


def _room(size: int, denominator: int = 0) -> None:
    if size > MAX_BITS or denominator > MAX_COMMON_BITS:
        raise Unreadable("a number with too many digits")
