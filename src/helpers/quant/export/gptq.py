"""GPTQ: what AutoGPTQ began and gptqmodel, transformers and vLLM read.

For a layer of C inputs and R outputs with G groups, in int32 words:

    qweight (C b / 32, R)   the codes of each output, one below the other: a stream of bits, least significant first
    qzeros  (G, R b / 32)   the zero points of each group, side by side, in the same kind of stream
    scales  (G, R) float16  w = s (q - z)
    g_idx   (C,)            the group of each input; ours are in order, also where GPTQ took the columns in another one

The stream is ours (see `kernels.packing`), turned: 3-bit codes lie across words. The first version of the format stores z-1,
which has no code for z = 0; the second (`gptq_v2`) stores z. A symmetric layer's z is the middle code, so it is written in
the first version, which all software reads; an asymmetric one in the second, which needs a reader that knows it (older ones
are off by one step).

One grid a row is `group_size` -1, but at 4 bits: gptqmodel 7.7 chooses another kernel for these on a CPU (`TorchFusedLinear`),
which fails for most widths, and for the others takes no notice of zero points. So 4-bit rows are cut into groups with the same
scale, for 0.16 bits a weight.
Source: the readers' own code, gptqmodel 7.7 and optimum 2.3.
"""

import re
from math import gcd

import torch

from helpers.kernels import LowBitLinear, pack
from helpers.quant.export.grids import WHOLE_ROW, Kind, Layers, grids_of, told_apart, unfilled, without_whole_rows

READERS = "transformers with gptqmodel and optimum, gptqmodel itself, or vLLM"
GROUP_SIZES = (WHOLE_ROW, 32, 64, 128)


def objection(kind: Kind, layers: Layers) -> str:
    """Why the format cannot hold these layers; empty if it can."""
    if kind.group_size not in GROUP_SIZES:
        return f"its groups have 32, 64 or 128 weights, not {kind.group_size}"
    whole = 32 // gcd(32, kind.bits)  # codes that end with a word: 32 of 3 bits, 8 of 4 bits
    return unfilled(layers, kind.bits, outputs=whole, inputs=whole)


written = without_whole_rows


def tensors(layer: LowBitLinear, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of one layer by their names in the checkpoint, bias aside."""
    g = grids_of(layer, kind.group_size)
    columns, groups = g.codes.shape[1], g.scale.shape[1]
    stored = g.zero - 1 if kind.symmetric else g.zero
    return {
        "qweight": pack(g.codes, kind.bits).t().contiguous(),
        "qzeros": pack(stored.t(), kind.bits),
        "scales": g.scale.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def config(kind: Kind, layers: Layers, kept: list[str]) -> dict:
    """The `quantization_config`; `kept` are the linear layers in full precision, the output head among them."""
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if kind.symmetric else "gptq_v2",
        "bits": kind.bits,
        "group_size": kind.group_size,
        "sym": kind.symmetric,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    inside = [name for name in kept if ".layers." in name]
    if inside:  # transformers is told what is quantized, gptqmodel what is not
        settings["modules_in_block_to_quantize"] = [told_apart(layers, inside)]
        settings["dynamic"] = {f"-:.*{re.escape(name)}$": {} for name in told_apart(inside, layers)}
    return settings
