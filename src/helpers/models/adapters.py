"""Low-rank adapters (LoRA): kept beside their base model, attached when it is loaded, merged exactly when one model is wanted.

    y = W x + (alpha / rank) B A x        A: (rank, columns), B: (rows, rank), zero at first; W is frozen

W may be a 4-bit matrix (QLoRA). A checkpoint is the base as it was trained on and, in its folder `adapter/`, PEFT's own files; its
`config.json` says that the adapter belongs to it. Sources: Hu et al., LoRA (2106.09685); Dettmers et al., QLoRA (2305.14314).

To merge is to compute W + (alpha / rank) B A in full precision, W being what its codes stand for. PEFT's `merge_and_unload` rounds
a 4-bit sum to 4 bits again, and adding B A to the weights from before quantization makes a model that was never trained.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from helpers.errors import UserError

FOLDER = MARK = "adapter"  # the folder, and the entry of config.json that names it
FILE = "adapter_model.safetensors"
NAME = "default"  # PEFT's, of a model's first adapter
MARKS = (  # what transformers and PEFT leave on a model
    "hf_quantizer",
    "is_quantized",
    "quantization_method",
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "_weight_conversions",  # how low-bit tensors were read, which transformers would undo when it saves
    "peft_config",
)


class AdapterError(UserError):
    """An adapter that is not there."""


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is attached to the model, which is then a `PeftModel`."""
    return hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, with the adapter's layers in it if there are any."""
    return model.get_base_model() if has_adapter(model) else model


def adapted(base: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers that have an adapter: each holds the frozen layer and its A and B."""
    return {name: m for name, m in base.named_modules() if hasattr(m, "get_base_layer")}


@contextmanager
def set_aside(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The base model, without the adapter's layers as long as this is open."""
    base = base_of(model)
    layers = adapted(base)
    for name, layer in layers.items():
        base.set_submodule(name, layer.get_base_layer())
    try:
        yield base
    finally:
        for name, layer in layers.items():
            base.set_submodule(name, layer)


def save(model: nn.Module, folder: Path) -> None:
    """Write the base model into `folder` and the adapter into its folder `adapter/`."""
    from peft import get_peft_model_state_dict  # takes a second to import

    tensors = {
        name: t.detach().contiguous()
        for name, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    with set_aside(model) as base:
        setattr(base.config, MARK, FOLDER)
        base.save_pretrained(folder)
    config = copy.deepcopy(model.peft_config[NAME])
    config.base_model_name_or_path, config.inference_mode = "..", True
    config.save_pretrained(folder / FOLDER)
    save_file(tensors, folder / FOLDER / FILE, metadata={"format": "pt"})


def named_in(folder: str | Path) -> Path | None:
    """The folder of the adapter that belongs to the checkpoint in `folder`, if one does."""
    config = Path(folder) / "config.json"
    return Path(folder) / FOLDER if config.is_file() and MARK in json.loads(config.read_text()) else None


def attach(model: PreTrainedModel, folder: Path) -> nn.Module:
    """`model` with the adapter in `folder`, frozen.

    Errors: `ValueError` where the files are missing or lack tensors; PEFT's own where they do not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    for file in ("adapter_config.json", FILE):
        if not (folder / file).is_file():
            raise ValueError(f"its adapter is missing, there is no {folder.name}/{file}")
    attached = PeftModel.from_pretrained(model, folder, is_trainable=False)
    with safe_open(folder / FILE, "pt") as held:
        missing = sorted(set(get_peft_model_state_dict(attached, save_embedding_layers=False)) - set(held.keys()))
    if missing:  # they would be random numbers
        raise ValueError(f"its adapter lacks {len(missing)} tensors, the first of them {missing[0]}")
    return attached


@torch.no_grad()
def merge(model: nn.Module, needed: bool = False) -> PreTrainedModel:
    """The full-precision model that `model` and its adapter are together, made in place; one without an adapter as it is.

    Errors: `AdapterError` where there is none and it is `needed`.
    """
    if not has_adapter(model):
        if needed:
            raise AdapterError(f"{type(model).__name__} has no adapter to merge: start from a run of lora or qlora.")
        return model
    base = base_of(model)
    for name, layer in adapted(base).items():
        frozen = layer.get_base_layer()
        base.set_submodule(name, _plain(frozen, _weight(frozen) + layer.get_delta_weight(NAME).float()))
    for name, layer in list(base.named_modules()):
        if hasattr(getattr(layer, "weight", None), "quant_state"):  # 4 bits that no adapter sat on
            base.set_submodule(name, _plain(layer, _weight(layer)))
    unmark(base)
    return base.requires_grad_(True)


def _weight(layer: nn.Linear) -> torch.Tensor:
    """The float32 weight that a frozen layer multiplies by."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer.weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, state).float()


def _plain(like: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(like.in_features, like.out_features, like.bias is not None, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), like.bias
    return layer


def unmark(model: PreTrainedModel) -> None:
    """Take back what was said on the model about low-bit layers or an adapter that it no longer has."""
    for name in ("quantization_config", "_is_quantized", MARK):
        model.config.__dict__.pop(name, None)
    for name in MARKS:
        model.__dict__.pop(name, None)
