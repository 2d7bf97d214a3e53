"""AWQ: 4-bit layers as AutoAWQ writes them (its `GEMM` version), which AutoAWQ, transformers and vLLM read.

For a layer of C inputs and R outputs with G groups, in int32 words of eight codes:

    qweight (C, R / 8)      the codes of each input, side by side
    qzeros  (G, R / 8)      the zero points of each group
    scales  (G, R) float16  w = s (q - z)

Within a word, nibble k (from the least significant one) holds output 0, 2, 4, 6, 1, 3, 5, 7: so a GPU kernel takes even and
odd ones out with one mask each. Zero points are stored as they are, also where they are all the middle code.
Rows with one grid are cut into groups, as in `gptq`.
Source: the package's own code, autoawq 0.2.9.
"""

import torch

from helpers.kernels import LowBitLinear, pack
from helpers.quant.export.grids import WHOLE_ROW, Kind, Layers, grids_of, told_apart, unfilled, without_whole_rows

READERS = "AutoAWQ, transformers with gptqmodel, or vLLM"
GROUP_SIZES = (WHOLE_ROW, 32, 64, 128)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def objection(kind: Kind, layers: Layers) -> str:
    """Why the format cannot hold these layers; empty if it can."""
    if kind.bits != 4:
        return "it has 4 bits only"
    if kind.group_size not in GROUP_SIZES:
        return f"its groups have 32, 64 or 128 weights, not {kind.group_size}"
    return unfilled(layers, kind.bits, outputs=8)


written = without_whole_rows


def tensors(layer: LowBitLinear, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of one layer by their names in the checkpoint, bias aside."""
    g = grids_of(layer, kind.group_size)
    return {
        "qweight": pack(interleaved(g.codes.t()), 4),
        "qzeros": pack(interleaved(g.zero.t()), 4),
        "scales": g.scale.t().contiguous(),
    }


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """`(any, R)` codes with each eight neighbours in the order of the nibbles."""
    return codes.unflatten(1, (-1, 8))[..., ORDER].flatten(1)


def config(kind: Kind, layers: Layers, kept: list[str]) -> dict:
    """The `quantization_config`; `kept` are the linear layers in full precision, the output head among them."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": kind.group_size,
        "zero_point": True,
        "modules_to_not_convert": told_apart(kept, layers),
    }
