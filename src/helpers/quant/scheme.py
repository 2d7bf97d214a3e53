"""A quantization scheme: how many levels, and which weights share a grid.

Written `w4g64` (4 bit, groups of 64 along a row), `w8pc` (one grid an output channel, i.e. a row), `w8pt` (one a tensor); `-sym`
is added where the grid is symmetric about zero. A group longer than the row is the row.
"""

from dataclasses import dataclass

from helpers.errors import UserError

BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128)  # whole 32-bit words at every width
GRANULARITIES = {"tensor": "pt", "channel": "pc", "group": "g"}


class SchemeError(UserError):
    """A scheme that does not exist, or that does not fit a layer."""


@dataclass(frozen=True)
class Scheme:
    """Bits, granularity (tensor, channel or group), group size (used by `group` alone), symmetric or asymmetric grid."""

    bits: int
    granularity: str = "group"
    group_size: int = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, BITS),
            ("granularity", self.granularity, tuple(GRANULARITIES)),
            ("group_size", self.group_size, GROUP_SIZES),
        ):
            if value not in allowed:
                raise SchemeError(f"{name} = {value!r} is no scheme: choose one of {', '.join(map(str, allowed))}.")

    def __str__(self) -> str:
        size = str(self.group_size) if self.granularity == "group" else ""
        return f"w{self.bits}{GRANULARITIES[self.granularity]}{size}{'-sym' if self.symmetric else ''}"

    def grid_length(self, rows: int, columns: int) -> int:
        """How many weights of a `(rows, columns)` matrix share one grid.

        Errors: `SchemeError` where groups do not divide a row.
        """
        if self.granularity == "tensor":
            return rows * columns
        if self.granularity == "channel" or columns <= self.group_size:
            return columns
        if columns % self.group_size:
            raise SchemeError(f"group_size = {self.group_size} does not divide a row of {columns} weights.")
        return self.group_size
