"""A quantization scheme: which numbers there are, which weights share a grid, and which layers are quantized.

Written `w4g64` (4 bit, groups of 64 along a row), `w8pc` (one grid an output channel, i.e. a row), `w8pt` (one a tensor), with
`-sym` where the grid is symmetric about zero and `-attn` where only the attention's layers are quantized; `nf4` and `nf4-dq`
(double quantization) and `int8` are the formats of bitsandbytes. A group longer than the row is the row.
"""

import re
from dataclasses import dataclass

from helpers.errors import UserError

BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128)  # whole 32-bit words at every width
GRANULARITIES = {"tensor": "pt", "channel": "pc", "group": "g"}
TARGETS = ("all", "attention")
NUMBERS = ("uniform", "nf4", "int8")


class SchemeError(UserError):
    """A scheme that does not exist, or that does not fit a layer."""


@dataclass(frozen=True)
class Scheme:
    """Bits, granularity (tensor, channel or group), group size (used by `group` alone), symmetric or asymmetric grid.

    `targets`: all linear layers but the output head, or those of the attention alone. `numbers`: a uniform grid, or bitsandbytes'
    `nf4` (with `double` quantization of its scales or without) and `int8`, whose granularity is their own: leave the rest as it is.
    """

    bits: int
    granularity: str = "group"
    group_size: int = 64
    symmetric: bool = False
    targets: str = "all"
    numbers: str = "uniform"
    double: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, BITS),
            ("granularity", self.granularity, tuple(GRANULARITIES)),
            ("group_size", self.group_size, GROUP_SIZES),
            ("targets", self.targets, TARGETS),
            ("numbers", self.numbers, NUMBERS),
        ):
            if value not in allowed or isinstance(value, bool):
                raise SchemeError(f"{name} = {value!r} is no scheme: choose one of {', '.join(map(str, allowed))}.")
        if self.numbers != "uniform" and self.bits != (4 if self.numbers == "nf4" else 8):
            raise SchemeError(f"bits = {self.bits} is no {self.numbers}: nf4 has 4 bits and int8 has 8.")
        if self.double and self.numbers != "nf4":
            raise SchemeError("double = True is for nf4 alone.")

    @classmethod
    def parse(cls, text: str) -> "Scheme":
        """Read what `str()` writes.

        Errors: `SchemeError` for anything else, with examples.
        """
        match = re.fullmatch(
            r"(?:w(?P<bits>\d+)(?:(?P<pt>pt)|(?P<pc>pc)|g(?P<g>\d+))(?P<sym>-sym)?|(?P<nf4>nf4)(?P<dq>-dq)?|(?P<int8>int8))"
            r"(?P<attn>-attn)?",
            text.strip(),
        )
        if match is None:
            raise SchemeError(
                f"scheme = {text!r} cannot be read: write w4g64, w3g128-sym, w8pc, w8pt, nf4, nf4-dq or int8, with -attn "
                "at the end for the attention's layers alone."
            )
        found = match.groupdict()
        targets = "attention" if found["attn"] else "all"
        if found["nf4"] or found["int8"]:
            return bitsandbytes(4 if found["nf4"] else 8, targets, bool(found["dq"]))
        granularity = "tensor" if found["pt"] else "channel" if found["pc"] else "group"
        return cls(int(found["bits"]), granularity, int(found["g"] or 64), bool(found["sym"]), targets)

    def __str__(self) -> str:
        size = str(self.group_size) if self.granularity == "group" else ""
        own = f"w{self.bits}{GRANULARITIES[self.granularity]}{size}{'-sym' if self.symmetric else ''}"
        name = {"uniform": own, "nf4": "nf4-dq" if self.double else "nf4", "int8": "int8"}[self.numbers]
        return name + ("-attn" if self.targets == "attention" else "")

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


def bitsandbytes(bits: int, targets: str = "all", double: bool = False) -> Scheme:
    """The format of bitsandbytes that has `bits` bits.

    Errors: `SchemeError` where there is none, and for `double` quantization of what has no scales of blocks.
    """
    numbers = {4: "nf4", 8: "int8"}
    if bits not in numbers:
        raise SchemeError(f"bits = {bits}: bitsandbytes has 4 (NF4) and 8 (LLM.int8).")
    granularity = "group" if bits == 4 else "channel"  # NF4's blocks are of 64 weights
    return Scheme(bits, granularity, 64, True, targets, numbers[bits], double)
