"""Simulated low-bit activations and key-value cache (W4A4KV4 and the like): numbers are rounded, and computed with as floats.

    x' = s round((x - min) / s) + min,   s = (max - min) / (2^b - 1)

Each token has a grid of its own, found when it comes: over the inputs of a linear layer, and over each head's keys and values. Keys
are rounded before the rotation by position, where their channels are more alike (KVQuant, 2401.18079). The gradient goes straight
through (STE). Nothing is stored in fewer bits, so memory is that of the model as it is: only what this does to the replies is
shown.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from helpers.errors import UserError

FULL = 16  # bits: not rounded
BITS = (4, 8, FULL)


class ActivationError(UserError):
    """Activations or a key-value cache that cannot be simulated in so many bits, or in this model."""


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` `(..., n)` on a grid of 2^bits points for each of its rows of n, with the gradient of the identity."""
    with torch.no_grad():
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
        off = step * torch.round((x - low) / step) + low - x
    return x + off


def labelled(scheme: str, activation_bits: int = FULL, cache_bits: int = FULL) -> str:
    """A scheme's name with what is simulated beside it: `w4g64a4kv4`; an equal end is there once."""
    end = "".join(f"{name}{bits}" for name, bits in (("a", activation_bits), ("kv", cache_bits)) if bits < FULL)
    return scheme if end and scheme.endswith(end) else scheme + end


def simulate(model: PreTrainedModel, activation_bits: int = FULL, cache_bits: int = FULL) -> list[Any]:
    """Round the inputs of each of the decoder's linear layers, and its keys and values, from now on; gives hooks with `.remove()`.

    Errors: `ActivationError` for other bits than `BITS`, and for a model whose attention has no `k_proj` and `v_proj`.
    """
    for name, bits in (("activation_bits", activation_bits), ("cache_bits", cache_bits)):
        if bits not in BITS:
            raise ActivationError(f"{name} = {bits} is unknown: choose one of {', '.join(map(str, BITS))}.")
    hooks = []
    decoder = model.get_decoder()
    if activation_bits < FULL:
        inside = ()  # an adapter's layer holds linear layers of its own, whose inputs are not a layer's
        for name, module in decoder.named_modules():
            if hasattr(module, "in_features") and not name.startswith(inside):
                hooks.append(module.register_forward_pre_hook(_inputs(activation_bits)))
                inside = (*inside, f"{name}.")
    if cache_bits < FULL:
        attentions = [m for m in decoder.modules() if hasattr(m, "k_proj") and hasattr(m, "v_proj")]
        if not attentions:
            raise ActivationError(
                f"cache_bits = {cache_bits}: no k_proj and v_proj is found in {type(model).__name__}."
            )
        for attention in attentions:
            keys = getattr(attention, "k_norm", attention.k_proj)  # Qwen3 normalizes keys before it rotates them
            for module in (keys, attention.v_proj):
                hooks.append(module.register_forward_hook(_outputs(cache_bits, attention.head_dim)))
    return hooks


def _inputs(bits: int) -> Callable:
    return lambda module, args: (rounded(args[0], bits), *args[1:])


def _outputs(bits: int, head: int) -> Callable:
    return lambda module, args, output: rounded(output.unflatten(-1, (-1, head)), bits).view(output.shape)
