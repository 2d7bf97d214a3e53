"""What every format writes down: codes, and one scale and zero point for each row and group, of the same group size in all
layers.

Formats know one group size for the whole model, and rows: one grid a tensor is repeated for each row, and where layers
differ (a group is no longer than its row), the groups are cut to the largest length that divides them all, each piece with
the whole one's scale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd

import torch

from helpers.kernels import LowBitLinear

Layers = Mapping[str, LowBitLinear]
WHOLE_ROW = -1  # how the formats write one group a row


@dataclass(frozen=True)
class Grids:
    """Of one layer: R rows of C codes, G groups a row."""

    codes: torch.Tensor  # (R, C) uint8
    scale: torch.Tensor  # (R, G) float16
    zero: torch.Tensor  # (R, G) uint8


@dataclass(frozen=True)
class Kind:
    """What a format holds or not, the same in all layers; `group_size` is -1 for the whole row."""

    name: str  # as a scheme is written
    bits: int
    symmetric: bool
    group_size: int


def grids_of(layer: LowBitLinear, group_size: int) -> Grids:
    """The layer's codes with scales and zero points for each row and group of `group_size`."""
    codes, scale, zero = (x.cpu() for x in layer.unpacked())
    rows, columns = codes.shape
    groups = 1 if group_size == WHOLE_ROW else columns // group_size
    scale, zero = (x.repeat_interleave(groups // x.shape[1], dim=1).expand(rows, groups) for x in (scale, zero))
    return Grids(codes, scale.contiguous(), zero.contiguous())


def kind_of(layers: Layers) -> Kind | None:
    """What all layers have in common; None where they differ in bits or symmetry."""
    if len({(m.bits, m.symmetric) for m in layers.values()}) > 1:
        return None
    first = next(iter(layers.values()))
    if all(m.grids == 1 for m in layers.values()):
        size, written = WHOLE_ROW, "pt" if first.per_tensor else "pc"
    else:
        size = reduce(gcd, (m.in_features // m.grids for m in layers.values()))
        written = f"g{max(m.in_features // m.grids for m in layers.values())}"
    return Kind(f"w{first.bits}{written}{'-sym' if first.symmetric else ''}", first.bits, first.symmetric, size)


def without_whole_rows(kind: Kind, layers: Layers) -> Kind:
    """`kind` with rows of 4-bit codes cut into groups of 128, 64 or 32, whichever divides them all; others as they are.

    gptqmodel's kernel for CPUs fails for whole rows, or gives wrong numbers where they have zero points.
    """
    if kind.bits != 4 or kind.group_size != WHOLE_ROW:
        return kind
    fitting = (size for size in (128, 64, 32) if all(m.in_features % size == 0 for m in layers.values()))
    return replace(kind, group_size=next(fitting, WHOLE_ROW))


def unfilled(layers: Layers, bits: int, outputs: int = 1, inputs: int = 1) -> str:
    """Names the first layer whose number of outputs (inputs) is no multiple of `outputs` (`inputs`), as the format packs them."""
    for name, m in layers.items():
        for what, count, needed in (("outputs", m.out_features, outputs), ("inputs", m.in_features, inputs)):
            if count % needed:
                return f"the {count} {what} of {name} do not fill whole words of {bits}-bit codes (it needs a multiple of {needed})"
    return ""


def told_apart(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """`names` as the readers match them: `mlp.up_proj` for all blocks, or in full where one of `others` ends so, too.

    Some readers look for the short name within a block, others for the end of the full one.
    """
    taken = {short(name) for name in others}
    return sorted({name if short(name) in taken else short(name) for name in names})


def short(name: str) -> str:
    """`model.layers.0.mlp.up_proj` -> `mlp.up_proj`."""
    return ".".join(name.split(".")[-2:])
