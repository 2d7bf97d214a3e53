"""Which layers of a model are quantized, and what one of them multiplies by and occupies, whatever its kind."""

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.kernels import LowBitLinear


def linear_layers(model: PreTrainedModel, targets: str = "all") -> dict[str, nn.Module]:
    """The layers that are quantized, or are already, by name: every linear one but the output head, or the attention's."""
    head = model.get_output_embeddings()
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear | LowBitLinear) and m is not head and (targets == "all" or "attn" in name)
    }


def is_low_bit(layer: nn.Module) -> bool:
    """Whether a linear layer holds codes, ours or bitsandbytes' (whose layers are `nn.Linear` with weights that are no numbers)."""
    return isinstance(layer, LowBitLinear) or (isinstance(layer, nn.Linear) and not layer.weight.is_floating_point())


def weight_of(layer: nn.Module) -> torch.Tensor:
    """The float32 weight `(rows, columns)` that a layer multiplies by, quantized or not."""
    if isinstance(layer, LowBitLinear):
        return layer.dequantize()
    if not is_low_bit(layer):
        return layer.weight.detach().float()
    from helpers.quant import bnb  # takes a second to import

    return bnb.dequantized(layer)


def stored_bytes(layer: nn.Module) -> int:
    """Bytes of a low-bit layer's tensors."""
    if isinstance(layer, LowBitLinear):
        return layer.nbytes
    from helpers.quant import bnb

    return bnb.stored_bytes(layer)
