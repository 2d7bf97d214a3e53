"""compressed-tensors, format `pack-quantized`: what llm-compressor writes, and transformers and vLLM read.

For a layer of C inputs and R outputs with G groups, in int32 words:

    weight_packed      (R, C b / 32)    signed codes plus 2^(b-1), a stream of bits a row, least significant first
    weight_scale       (R, G) float16   w = s (q - z)
    weight_zero_point  (R b / 32, G)    asymmetric only: signed zero points plus 2^(b-1), a stream a column
    weight_shape       (2,)             R and C

A signed code plus 2^(b-1) is our unsigned one, and rows are packed as ours: `weight_packed` is what lies in memory. There
is no packed zero point for one grid a tensor, so that is written as one a row. Rows and columns of zero points end at whole
words, so any shape fits. transformers (5.24) expects the zero points of asymmetric layers unpacked, and stops, unless it is
told to take the weights out of their codes as it loads them; the configuration of such a model says that (`dequantize`,
which nothing else reads).
Source: the package's own code, compressed-tensors 0.19.
"""

import torch

from helpers.kernels import LowBitLinear, pack
from helpers.quant.export.grids import WHOLE_ROW, Kind, Layers, grids_of

READERS = "transformers with compressed-tensors, or (4 and 8 bits) vLLM"


def objection(kind: Kind, layers: Layers) -> str:
    """Why the format cannot hold these layers; empty if it can."""
    return ""


def written(kind: Kind, layers: Layers) -> Kind:
    """How the layers are written: as they are."""
    return kind


def tensors(layer: LowBitLinear, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of one layer by their names in the checkpoint, bias aside."""
    g = grids_of(layer, kind.group_size)
    found = {
        "weight_packed": pack(g.codes, kind.bits),
        "weight_scale": g.scale,
        "weight_shape": torch.tensor(g.codes.shape),
    }
    if not kind.symmetric:
        found["weight_zero_point"] = pack(g.zero.t(), kind.bits).t().contiguous()
    return found


def config(kind: Kind, layers: Layers, kept: list[str]) -> dict:
    """The `quantization_config`; `kept` are the linear layers in full precision, the output head among them."""
    whole = kind.group_size == WHOLE_ROW
    weights = {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": kind.symmetric,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else kind.group_size,
        "dynamic": False,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": kept,
    }
    return settings if kind.symmetric else settings | {"dequantize": True}
