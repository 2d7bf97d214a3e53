"""Quantize a model in place, layer by layer, and say what it cost.

Every linear layer but `lm_head` is quantized; embeddings and norms stay in full precision, as in both papers. The layer keeps
the float32 weights that its codes stand for, so the rest of the code runs unchanged: accuracy is that of the low-bit model,
memory is counted from the codes (`packed` is false: simulated).
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.quant.rtn import Quantized, dequantize, round_to_nearest
from helpers.quant.scheme import Scheme, SchemeError

METHODS: dict[str, Callable[[torch.Tensor, Scheme], Quantized]] = {"rtn": round_to_nearest}


@dataclass(frozen=True)
class LayerReport:
    """One layer: relative error |W - W'| / |W| (Frobenius), bytes stored, effective bits a weight, seconds."""

    name: str
    shape: tuple[int, int]
    error: float
    nbytes: int
    bits: float
    seconds: float


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that are quantized, by name: every `nn.Linear` but the output head."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


@torch.no_grad()
def quantize(model: PreTrainedModel, method: str, scheme: Scheme) -> list[LayerReport]:
    """Replace each linear layer's weight by its quantized value, in place; gives one report a layer, in the model's order.

    Errors: `SchemeError` for an unknown method, a model without linear layers, or a layer that the scheme does not fit (named; the
    model is then unchanged).
    """
    if method not in METHODS:
        raise SchemeError(f"method = {method!r} is unknown: choose one of {', '.join(METHODS)}.")
    layers = linear_layers(model)
    if not layers:
        raise SchemeError(f"{type(model).__name__} has no linear layers to quantize.")
    for name, layer in layers.items():
        try:
            scheme.grid_length(*layer.weight.shape)
        except SchemeError as error:
            raise SchemeError(f"layer {name}: {error}") from None
    reports = []
    for name, layer in layers.items():
        start = perf_counter()
        quantized = METHODS[method](layer.weight, scheme)
        restored = dequantize(quantized).to(layer.weight)
        error = float((restored - layer.weight).norm() / layer.weight.norm().clamp(min=1e-12))
        layer.weight.copy_(restored)
        shape = tuple(layer.weight.shape)
        bits = 8 * quantized.nbytes / layer.weight.numel()
        reports.append(LayerReport(name, shape, error, quantized.nbytes, bits, perf_counter() - start))
    return reports
