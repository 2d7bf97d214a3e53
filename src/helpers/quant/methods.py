"""What each method does with one decoder block: it gives the block's layers one by one, each replaced as soon as it is given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.models import lowbit
from helpers.quant import awq, calibration
from helpers.quant.gptq import gptq, prepared
from helpers.quant.grid import SEARCH, WHOLE, Quantized
from helpers.quant.rtn import round_to_nearest
from helpers.quant.scheme import Scheme


@dataclass(frozen=True)
class Layer:
    """A layer's replacement, the weight `(rows, columns)` that it stands for in the original model, seconds, and a note."""

    name: str
    module: nn.Module
    weight: torch.Tensor
    seconds: float
    note: str = ""


TINIEST = 2.0**-14  # below it float16 numbers lose digits
Layers = dict[str, nn.Linear]  # of one block, by the model's names
Solver = Callable[[str, nn.Module, Layers], Iterator[Layer]]


def solver(
    model: PreTrainedModel,
    method: str,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]],
    stream: calibration.Stream | None,
    clip: bool | None,
    act_order: bool,
    damping: float,
) -> Solver:
    """The function that quantizes a block, each layer by its scheme: `(its name, the block, its layers) -> Layer, Layer, ...`."""
    if method in ("rtn", "rtn-clip"):
        wanted = method == "rtn-clip" if clip is None else clip
        return lambda prefix, block, layers: by_rounding(layers, schemes, wanted)
    wanted = clip is None or clip
    if method == "gptq":
        return lambda prefix, block, layers: by_gptq(block, layers, stream, schemes, wanted, act_order, damping)
    if method == "awq":
        return lambda prefix, block, layers: by_awq(prefix, block, layers, stream, schemes, wanted)
    scheme = next(iter(schemes.values()))  # the packages take one
    if method == "autoawq":
        return by_autoawq(model, scheme, texts, wanted)
    return lambda prefix, block, layers: by_bnb(layers, scheme)


def packed(
    name: str, layer: nn.Linear, quantized: Quantized, weight: torch.Tensor, start: float, note: str = ""
) -> Layer:
    """The packed layer of `quantized`, which stands for `weight`."""
    if bool((quantized.scale < TINIEST).any()) and bool(weight.any()):
        note = "; ".join(filter(None, [note, "scales too small for float16's full precision"]))
    return Layer(name, quantized.pack(layer.bias), weight, perf_counter() - start, note)


def by_rounding(layers: Layers, schemes: Mapping[str, Scheme], clip: bool) -> Iterator[Layer]:
    for name, layer in layers.items():
        start = perf_counter()
        found = round_to_nearest(layer.weight, schemes[name], SEARCH if clip else WHOLE)
        yield packed(name, layer, found, found.dequantize(), start)


def by_gptq(
    block: nn.Module,
    layers: Layers,
    stream: calibration.Stream,
    schemes: Mapping[str, Scheme],
    clip: bool,
    act_order: bool,
    damping: float,
) -> Iterator[Layer]:
    """In order of use: the inputs of `o_proj` are those that the quantized q, k and v make."""
    left = dict(layers)
    while left:
        names, moments = stream.next_moments(block, left)
        start = perf_counter()  # what the layers share counts for the first
        inputs = prepared(moments.second, act_order, damping)
        note = f"damping {inputs.damping:g}" if inputs.damping != damping else ""
        for name in names:
            layer = left.pop(name)
            found = gptq(layer.weight, inputs, schemes[name], clip)
            yield packed(name, layer, found, found.dequantize(), start, note)
            start = perf_counter()


def by_awq(
    prefix: str,
    block: nn.Module,
    layers: Layers,
    stream: calibration.Stream,
    schemes: Mapping[str, Scheme],
    clip: bool,
) -> Iterator[Layer]:
    start = perf_counter()
    own = {name.removeprefix(f"{prefix}."): layer for name, layer in layers.items()}
    schemes = {name: schemes[f"{prefix}.{name}"] for name in own}
    moments = stream.moments(block, own)
    if unused := [f"{prefix}.{name}" for name in own if name not in moments]:
        calibration.refuse_unused(unused)
    scales = awq.fold(block, own, moments, stream, schemes, clip)
    for name, layer in own.items():
        found = awq.rounded(scales[name].weight, moments[name], schemes[name], SEARCH if clip else WHOLE)
        weight = scales[name].undo(found.dequantize())
        yield packed(f"{prefix}.{name}", layer, found, weight, start, scales[name].note)
        start = perf_counter()


def by_autoawq(model: PreTrainedModel, scheme: Scheme, texts: Sequence[Sequence[int]], clip: bool) -> Solver:
    """The package does the whole model at once; its time is shared out over the layers."""
    from helpers.quant.autoawq import autoawq  # imports the package

    start = perf_counter()
    made = autoawq(model, scheme, texts, clip)
    seconds = (perf_counter() - start) / len(made.layers)

    def solve(prefix: str, block: nn.Module, layers: Layers) -> Iterator[Layer]:
        for name, layer in layers.items():
            note = "no scale: left out by AutoAWQ" if name in made.skipped else ""
            bias = made.others.get(f"{name}.bias", layer.bias)  # divided by a scale, if the next layer's inputs were
            yield Layer(name, made.layers[name].pack(bias), made.restored(name), seconds, note)
        for name, parameter in block.named_parameters(prefix=prefix):
            if name in made.others:
                parameter.data.copy_(made.others[name])

    return solve


def by_bnb(layers: Layers, scheme: Scheme) -> Iterator[Layer]:
    from helpers.quant import bnb  # takes a second to import

    for name, layer in layers.items():
        start = perf_counter()
        new = bnb.bnb_layer(layer, scheme)
        yield Layer(name, new, bnb.dequantized(new), perf_counter() - start)


def mark(model: PreTrainedModel, scheme: Scheme) -> None:
    """Say on the model what its layers are, so that it saves and loads."""
    if scheme.numbers == "uniform":
        return lowbit.mark(model)
    from helpers.quant import bnb

    return bnb.mark(model, scheme)
