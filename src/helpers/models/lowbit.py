"""Packed checkpoints: a transformers quantizer named `lowbit`, so that `from_pretrained` gives back the layers that were saved.

`config.json` lists each low-bit layer with its bits, its grids a row and whether they are symmetric (layers may differ, so mixed
precision needs nothing more); the safetensors hold codes, scales and zero points as they lie in memory. Reading such a checkpoint
needs this module imported; `lowbit export` writes formats that other software reads.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from helpers.kernels import LowBitLinear

NAME = "lowbit"


@register_quantization_config(NAME)
class LowBitConfig(QuantizationConfigMixin):
    """`layers`: name of each low-bit layer -> its `bits`, `grids`, `symmetric`, `per_tensor`."""

    def __init__(self, layers: dict[str, dict[str, Any]], **_: Any) -> None:
        self.quant_method = NAME
        self.layers = layers


@register_quantizer(NAME)
class LowBitQuantizer(HfQuantizer):
    """Puts empty `LowBitLinear` layers where the configuration names them, before the weights are read."""

    requires_calibration = True  # transformers is never to quantize by itself under this name

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for name, kind in self.quantization_config.layers.items():
            old = model.get_submodule(name)
            bias = old.bias is not None
            new = LowBitLinear(old.in_features, old.out_features, bias=bias, device=old.weight.device, **kind)
            model.set_submodule(name, new)
        return model

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """A float16 tensor is a scale, and stays one whatever type the model is loaded in."""
        kind = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return None if kind in ("F16", "torch.float16") else super().get_new_dtype(converter, param, dtype)

    def is_serializable(self, **_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def low_bit_layers(model: PreTrainedModel) -> dict[str, LowBitLinear]:
    """The packed layers of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LowBitLinear)}


def mark(model: PreTrainedModel) -> None:
    """Write into the model's configuration which of its layers are packed, so that `save_pretrained` keeps them."""
    layers = {
        name: {"bits": m.bits, "grids": m.grids, "symmetric": m.symmetric, "per_tensor": m.per_tensor}
        for name, m in low_bit_layers(model).items()
    }
    config = LowBitConfig(layers)
    model.config.quantization_config = config
    model.hf_quantizer = LowBitQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, NAME
