"""Where quantization-aware training (QAT) starts: a model whose layers are fake-quantized, on which grids and from which weights.

    init      weights W at the start               grids at the start
    full      the full-precision ones              of round to nearest: the range of the weights
    rtn       what RTN's codes stand for           the same
    gptq      what GPTQ's codes stand for          GPTQ's, found with calibration texts
    awq       what AWQ's codes stand for           AWQ's, on weights whose columns were scaled first
    parent    the parent's, on its own grids: a quantized run, or one that was trained on a grid, whose latent weights go on

`full` and `rtn` compute the same at first; only how far each weight is from its neighbouring code differs. With `grids = step`
grids are found again from the weights at each forward, as RTN finds them: of a quantizer's or a parent's start only the weights
are kept, which the new grids may round elsewhere; a line says so. Source: Reasoning-QAT (2601.14888), whose best start is GPTQ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from helpers.errors import UserError
from helpers.kernels import LowBitLinear
from helpers.models import lowbit
from helpers.quant import Mixed, Scheme, fake, linear_layers, quantize
from helpers.quant.layers import is_low_bit

INITS = ("full", "rtn", "gptq", "awq", "parent")


class StudentError(UserError):
    """A start of training that does not exist, or that does not fit the model or the scheme."""


def prepare(
    model: PreTrainedModel,
    init: str,
    scheme: Scheme | None,
    texts: Sequence[Sequence[int]] = (),
    *,
    grids: str = "fixed",
    masked: bool = False,
    latents: Mapping[str, torch.Tensor] | None = None,
) -> Scheme | Mixed | None:
    """Make `model` a student on the grid of `scheme`, in place; without a scheme it is trained in full precision.

    Gives the scheme that it is on, which is a mixed one where the parent's is.

    `texts` are token ids to calibrate `gptq` and `awq` on. `grids`, `masked` and `latents` are those of `quant.fake`.

    Errors: `StudentError` for an unknown `init`, `parent` with a model that is not packed or is on other grids than the
    scheme's, and another `init` with one that is quantized; `SchemeError` for what the quantizer refuses.
    """
    if init not in INITS:
        raise StudentError(f"init = {init!r} is unknown: choose one of {', '.join(INITS)}.")
    packed = lowbit.low_bit_layers(model)
    if scheme is None:
        if init != "full":
            raise StudentError(
                f"init = {init} does not fit bits = 16: training in full precision starts from init = full."
            )
        fake.restore(model)
        return None
    if grids == "step" and init in ("gptq", "awq", "parent"):
        print(f"grids = step finds grids anew at each step: of init = {init} only the weights are kept, not its grids.")
    if init == "parent":
        return _go_on(model, packed, scheme, grids, masked, latents)
    if any(map(is_low_bit, model.modules())):
        raise StudentError(
            f"init = {init} does not fit a parent that is quantized already: init = parent goes on from it."
        )
    if init != "full":
        quantize(model, init, scheme, texts)
    fake.insert(model, scheme, grids, masked)
    return scheme


def _go_on(
    model: PreTrainedModel,
    packed: Mapping[str, LowBitLinear],
    scheme: Scheme,
    grids: str,
    masked: bool,
    latents: Mapping[str, torch.Tensor] | None,
) -> Scheme | Mixed:
    if not packed:
        raise StudentError("init = parent needs a parent with packed codes: otherwise choose full, rtn, gptq or awq.")
    if packed.keys() != linear_layers(model, scheme.targets).keys():
        raise StudentError(f"the parent has {len(packed)} quantized layers, which are not those of {scheme}.")
    sizes = {name: layer.in_features * layer.out_features for name, layer in packed.items()}
    widths = {layer.bits for layer in packed.values()}
    mean_bits = sum(packed[name].bits * size for name, size in sizes.items()) / sum(sizes.values())
    if not scheme.bits - 1 < mean_bits <= scheme.bits:  # of mixed widths `bits` is what they stay within
        raise StudentError(
            f"the parent has {mean_bits:.3g} bits a weight, and the scheme is {scheme}: they must agree."
        )
    schemes = Mixed({name: replace(scheme, bits=layer.bits) for name, layer in packed.items()}, budget=scheme)
    fake.insert(model, schemes, grids, masked, latents)
    for name, layer in fake.layers(model).items():
        if not fake.same_grids(packed[name], layer):
            raise StudentError(
                f"layer {name} of the parent has {packed[name].extra_repr()}: this is not {layer.scheme}, and must be."
            )
    return schemes if len(widths) > 1 else scheme
