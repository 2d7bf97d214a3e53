"""What each method can do, and what speaks against quantizing a model: everything is asked before the model is touched."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from helpers.quant.calibration import decoder_blocks, split
from helpers.quant.grid import find_grids
from helpers.quant.layers import is_low_bit, linear_layers
from helpers.quant.scheme import Scheme, SchemeError

METHODS = {  # in the words of the error that says so
    "rtn": "uniform grids",
    "rtn-clip": "uniform grids",
    "gptq": "uniform grids",
    "awq": "uniform grids",
    "autoawq": "w4g32, w4g64 and w4g128",
    "bnb": "nf4, nf4-dq and int8, with or without -attn",
}
CALIBRATED = ("gptq", "awq", "autoawq")
GRID = ("granularity", "group_size", "symmetric", "targets", "mixed")
READ = {  # the settings that a method makes use of, beside bits and texts
    "rtn": GRID,
    "rtn-clip": GRID,
    "gptq": (*GRID, "act_order", "damping"),
    "awq": GRID,
    "autoawq": ("group_size",),
    "bnb": ("targets", "double"),
    "merge": (),
}


def refuse_unread(method: str, changed: Iterable[str]) -> None:
    """Raise `SchemeError` on a setting among `changed` that `method` would not look at: it would only seem to matter."""
    known = {name for names in READ.values() for name in names}
    for name in changed:
        if name in known and name not in READ.get(method, known):
            users = ", ".join(other for other, names in READ.items() if name in names)
            raise SchemeError(
                f"{name} means nothing to method = {method}: leave it as it is, or choose one of {users}."
            )


def check(model: PreTrainedModel, method: str, scheme: Scheme | str | Mapping[str, Scheme]) -> None:
    """Raise the `SchemeError` that `quantize` would, for all but the texts: ask before writing them takes an hour."""
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    layers_to_quantize(model, method, scheme_of_each(model, method, scheme))


def scheme_of_each(model: PreTrainedModel, method: str, scheme: Scheme | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """The scheme of each layer to quantize, by name in the model's order.

    Errors: `SchemeError` for a method that is unknown or cannot make a scheme, for a mapping that names no layer or one that the
    model lacks, for different schemes where the method takes one, and for a model without linear layers.
    """
    if not isinstance(scheme, Scheme | Mapping):
        raise SchemeError(
            f"scheme = {scheme!r} cannot be read: give a Scheme, its name such as w4g64, or one for each layer."
        )
    for each in {*scheme.values()} if isinstance(scheme, Mapping) else {scheme}:
        refuse_method(method, each)
    if not isinstance(scheme, Mapping):
        refuse_kinds(model)
        if found := dict.fromkeys(linear_layers(model, scheme.targets), scheme):
            return found
        raise SchemeError(f"{type(model).__name__} has no linear layers for scheme = {scheme}.")
    layers = linear_layers(model)
    unknown = [name for name in scheme if name not in layers]
    if unknown or not scheme:
        wrong = f"layer {unknown[0]}, which the model lacks" if unknown else "no layer"
        raise SchemeError(f"the schemes name {wrong}: its linear layers are {next(iter(layers), 'none')} and so on.")
    if method in ("autoawq", "bnb"):
        raise SchemeError(f"method = {method} takes one scheme for all layers, not one for each.")
    return {name: scheme[name] for name in layers if name in scheme}


def layers_to_quantize(
    model: PreTrainedModel,
    method: str,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]] | None = None,
) -> dict[str, nn.Linear]:
    """The layers, by name in the model's order, once nothing speaks against it.

    Errors: `SchemeError` for weights in Conv1D layers, experts or linear layers outside the decoder, for a model that is quantized
    already, and for weights or texts (if given) that a method cannot use.
    """
    refuse_kinds(model)
    layers = {name: model.get_submodule(name) for name in schemes}
    inside = tuple(f"{prefix}." for prefix, _ in decoder_blocks(model))
    for name, layer in layers.items():
        if not name.startswith(inside):
            raise SchemeError(f"layer {name} lies outside the decoder's layers, where nothing is quantized.")
        if not torch.isfinite(layer.weight).all():
            raise SchemeError(f"layer {name}: its weights hold a NaN or an infinity.")
        try:
            if schemes[name].numbers == "uniform":
                find_grids(layer.weight, schemes[name])
        except SchemeError as error:
            raise SchemeError(f"layer {name}: {error}") from None
    if texts is None:
        return layers
    tokens, widest = sum(map(len, split(texts)[0])), max(layer.in_features for layer in layers.values())
    if method in CALIBRATED and tokens < widest:
        raise SchemeError(
            f"method = {method} has {tokens} tokens to calibrate on, and the widest layer has {widest} inputs: give more texts."
        )
    return layers


def refuse_method(method: str, scheme: Scheme) -> None:
    if method not in METHODS:
        raise SchemeError(f"method = {method!r} is unknown: choose one of {', '.join(METHODS)}.")
    fits = scheme.numbers == "uniform"
    if method == "bnb":
        fits = not fits
    if method == "autoawq":
        fits = fits and str(scheme) == f"w4g{scheme.group_size}"
    if not fits:
        raise SchemeError(f"method = {method} cannot make scheme = {scheme}: it makes {METHODS[method]}.")


def refuse_kinds(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise SchemeError("the model has an adapter: merge it first, then quantize what comes out.")
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise SchemeError(
                f"{kind} keeps weights in Conv1D layers ({name}): only models of nn.Linear are quantized."
            )
        if "expert" in type(module).__name__.lower():
            raise SchemeError(f"{kind} is a mixture of experts ({name}): only dense models are quantized.")
        if is_low_bit(module):
            raise SchemeError(f"the model is quantized already (layer {name}): start from a full-precision one.")
    if getattr(model.config, "quantization_config", None):
        raise SchemeError("the model is quantized already, as its configuration says: start from a full-precision one.")
