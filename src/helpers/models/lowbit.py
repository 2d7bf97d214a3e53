"""Packed checkpoints: a transformers quantizer named `lowbit`, so that `from_pretrained` gives back the layers that were saved.

`config.json` lists each low-bit layer with its bits, its grids a row and whether they are symmetric (layers may differ, so mixed
precision needs nothing more); the safetensors hold codes, scales and zero points as they lie in memory. Reading such a checkpoint
needs this module imported; `lowbit export` writes formats that other software reads.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from helpers.errors import UserError
from helpers.kernels import LowBitLinear
from helpers.kernels.packing import WIDTHS

NAME = "lowbit"
BITSANDBYTES = "bitsandbytes"
TYPES = {"bits": int, "grids": int, "symmetric": bool, "per_tensor": bool}


class PackingError(UserError):
    """A configuration whose low-bit layers cannot be made."""


@register_quantization_config(NAME)
class LowBitConfig(QuantizationConfigMixin):
    """`layers`: name of each low-bit layer -> its `bits`, `grids`, `symmetric`, `per_tensor`.

    Errors: `PackingError` for a mapping that describes no layer, and for a description that is not complete or makes no sense.
    """

    def __init__(self, layers: dict[str, dict[str, Any]] | None = None, **_: Any) -> None:
        if not isinstance(layers, dict) or not layers:
            raise PackingError(
                "the layers of its quantization_config must be an object that describes each low-bit layer."
            )
        for name, kind in layers.items():
            if not makes_sense(kind):
                raise PackingError(
                    f"layer {name} is described by {kind} in its quantization_config: bits ({', '.join(map(str, WIDTHS))}), "
                    "grids (1 or more, 1 per tensor), symmetric and per_tensor (true or false) are needed, and nothing else."
                )
        self.quant_method = NAME
        self.layers = layers


def makes_sense(kind: Any) -> bool:
    """Whether a `LowBitLinear` can be made as `kind` says."""
    if not isinstance(kind, dict) or {key: type(value) for key, value in kind.items()} != TYPES:
        return False
    return kind["bits"] in WIDTHS and kind["grids"] >= 1 and not (kind["per_tensor"] and kind["grids"] > 1)


@register_quantizer(NAME)
class LowBitQuantizer(HfQuantizer):
    """Puts empty `LowBitLinear` layers where the configuration names them, before the weights are read."""

    requires_calibration = True  # transformers is never to quantize by itself under this name

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        modules = dict(model.named_modules())
        for name, kind in self.quantization_config.layers.items():
            old = modules.get(name)
            if not isinstance(old, nn.Linear):
                raise PackingError(
                    f"its quantization_config names layer {name}, which is no linear layer of the model."
                )
            if old.in_features % kind["grids"]:
                raise PackingError(f"layer {name}: {kind['grids']} grids do not divide a row of {old.in_features}.")
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


def quantization_of(config: PreTrainedConfig) -> dict:
    """What a configuration says of its low-bit layers; nothing in full precision."""
    text = config.get_text_config()
    found = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None) or {}
    return found if isinstance(found, dict) else found.to_dict()


def quantized_by(config: PreTrainedConfig) -> str:
    """Whose low-bit layers the model has: `lowbit`, `bitsandbytes` or another software; empty in full precision.

    Errors: `PackingError` for software whose layers are not read here. (transformers would read some of it, as if the weights
    were in full precision.)
    """
    own = quantization_of(config)
    in_bits = own.get("load_in_4bit") or own.get("load_in_8bit")  # old configurations of bitsandbytes have no name
    kind = own.get("quant_method") or (BITSANDBYTES if in_bits else "software that it does not name")
    if own and kind not in (NAME, BITSANDBYTES):
        raise PackingError(
            f"it is quantized by {kind}, which is not read here: start from the full-precision model or a run of this project."
        )
    return kind if own else ""


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
