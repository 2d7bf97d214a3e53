"""What a model weighs: bytes by part, and bits for each quantized weight.

Full precision counts 2 bytes a weight (bfloat16). A quantized layer counts its codes at their bit-width in whole 32-bit words, its
scales and zero points; embeddings and norms stay in full precision and count at 2 bytes, a tied matrix once. `packed` says whether
those bytes are what the layer computes from, or what it would occupy if it did (simulated).
"""

from collections.abc import Mapping

from transformers import PreTrainedModel

from helpers.runs import Memory

FULL_PRECISION_BYTES = 2


def measure(model: PreTrainedModel, quantized: Mapping[str, int] | None = None, packed: bool = False) -> Memory:
    """Give the memory of `model`, of which the layers in `quantized` (weight's name -> bytes of codes, scales, zeros) are low-bit.

    `effective_bits` is the mean over the weights of the quantized layers; 16 where nothing is quantized.
    """
    quantized = quantized or {}
    parts = {"embeddings": 0, "linear": 0, "other": 0}
    weights = 0
    for name, parameter in model.named_parameters():  # tied parameters are listed once
        if name in quantized:
            weights += parameter.numel()
        part = "embeddings" if "embed" in name or "lm_head" in name else "linear" if parameter.ndim == 2 else "other"
        parts[part] += quantized.get(name, parameter.numel() * FULL_PRECISION_BYTES)
    bits = 8 * sum(quantized.values()) / weights if weights else 8.0 * FULL_PRECISION_BYTES
    return Memory(parts=parts, total_bytes=sum(parts.values()), effective_bits=bits, packed=packed)
