"""Packages that look at the weights alone: torchao and bitsandbytes."""

from time import perf_counter

import torch
from request import Answer, Request, full_precision, linear_layers
from transformers import AutoModelForCausalLM


def torchao(request: Request) -> Answer:
    """torchao's round to nearest (`IntxWeightOnlyConfig`)."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{request.bits}"),
        granularity=PerGroup(request.group_size),
        mapping_type=MappingType.ASYMMETRIC,
    )
    model = full_precision(request)
    start = perf_counter()
    quantize_(model, config, filter_fn=lambda layer, name: isinstance(layer, torch.nn.Linear) and "lm_head" not in name)
    seconds = perf_counter() - start
    return seconds, {f"{name}.weight": layer.weight.dequantize() for name, layer in linear_layers(model).items()}


def bitsandbytes(request: Request) -> Answer:
    """bitsandbytes through transformers, which quantizes while it loads: NF4 (`double_quant` or not) at 4 bits, LLM.int8 at 8.

    The weights are read before any forward pass: on some processors the first one repacks them in place.
    """
    from bitsandbytes.functional import dequantize_4bit
    from transformers import BitsAndBytesConfig

    if request.bits == 4:
        double = request.settings["double_quant"]
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    start = perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        request.model, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    seconds = perf_counter() - start
    weights = {}
    for name, layer in linear_layers(model).items():
        if request.bits == 4:
            weights[f"{name}.weight"] = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        else:
            weights[f"{name}.weight"] = layer.weight.data.float() * layer.weight.SCB[:, None] / 127
    return seconds, weights
