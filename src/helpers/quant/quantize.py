"""Quantize a model in place, block by block, and say of each layer what it cost.

Every linear layer but the output head is quantized (or the attention's alone); embeddings and norms stay in full precision, as
in both papers. Afterwards each layer computes from packed codes: bytes are those of its tensors. A fifth of the calibration
texts is held out: on these, in the full-precision model, every method's output error is measured alike. `gptq` and `awq` see
the other texts as they come through the blocks quantized so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from helpers.quant.awq import output_error as error_of
from helpers.quant.calibration import Moments, Stream, decoder_blocks, split
from helpers.quant.fit import layers_to_quantize, scheme_of_each
from helpers.quant.gptq import MOST_DAMPING
from helpers.quant.layers import stored_bytes
from helpers.quant.methods import Layer, mark, solver
from helpers.quant.scheme import Scheme, SchemeError

EXAMPLE = 64  # weights


@dataclass(frozen=True)
class LayerReport:
    """One layer. Errors are relative: |W' - W| / |W|, and of the outputs on held-out text (None without calibration texts).

    `nbytes` is what its tensors occupy, `bits` that a weight; `note` says what was done differently here.
    """

    name: str
    shape: tuple[int, int]
    weight_error: float
    output_error: float | None
    nbytes: int
    bits: float
    seconds: float
    note: str = ""
    example: torch.Tensor | None = (
        None  # (2, up to 64): the layer's first weights before and after, in the original model's terms
    )


@torch.no_grad()
def quantize(
    model: PreTrainedModel,
    method: str,
    scheme: Scheme | str | Mapping[str, Scheme],
    calibration: Sequence[Sequence[int]] = (),
    *,
    clip: bool | None = None,
    act_order: bool = True,
    damping: float = 0.01,
) -> list[LayerReport]:
    """Replace each linear layer by its low-bit one, in place; gives one report a layer, in the model's order.

    `calibration` holds the token ids of texts, without padding: `gptq`, `awq` and `autoawq` need them, the others only measure
    on them. A mapping gives each layer that it names a scheme of its own, and leaves the others as they are. `clip` (search each
    grid's range) is what the method does unless told otherwise: rtn not, the others yes; `act_order` and `damping` are those of
    `gptq`.

    Errors: `SchemeError` for an unknown method, one that cannot do the scheme, a model that it does not fit (Conv1D, experts,
    already quantized), a layer that the scheme does not fit (named), and too few texts; the model is then unchanged. Inputs
    that are not finite, and layers without inputs, show up on the way: the model is then part quantized and of no more use.
    """
    if not 0 <= damping <= MOST_DAMPING:  # a NaN neither
        raise SchemeError(f"damping = {damping} is not allowed: it must be 0 or more, and at most {MOST_DAMPING:g}.")
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    schemes = scheme_of_each(model, method, scheme)
    layers = layers_to_quantize(model, method, schemes, calibration)
    seen, held_out = split(calibration)
    measured = Stream(model, held_out) if held_out else None
    stream = Stream(model, seen) if method in ("gptq", "awq") else None
    solve = solver(model, method, schemes, seen, stream, clip, act_order, damping)
    order, reports = list(layers), []
    for prefix, block in decoder_blocks(model):
        own = {
            name: layers.pop(name) for name in list(layers) if name.startswith(f"{prefix}.")
        }  # freed as they are replaced
        exact = measured.moments(block, own, onward=True) if measured else {}
        before = {name: layer.weight.detach().float().clone() for name, layer in own.items()}
        for new in solve(prefix, block, own) if own else ():
            model.set_submodule(new.name, new.module)
            reports.append(report(before[new.name], new, exact.get(new.name)))
        if stream:
            stream.go_through(block)
    mark(model, next(iter(schemes.values())))
    return sorted(reports, key=lambda r: order.index(r.name))


def report(before: torch.Tensor, new: Layer, moments: Moments | None) -> LayerReport:
    """The report of one layer whose weight was `before`."""
    difference = new.weight - before
    weight_error = float(difference.norm() / before.norm().clamp(min=1e-12))
    output_error = None
    if moments is not None:
        exact, off = (error_of(w, moments.second) for w in (before, difference))
        output_error = (max(off, 0.0) / max(exact, 1e-12)) ** 0.5
    nbytes = stored_bytes(new.module)
    bits = 8 * nbytes / before.numel()
    example = torch.stack([before.flatten()[:EXAMPLE], new.weight.flatten()[:EXAMPLE]]).cpu()
    shape = tuple(before.shape)
    return LayerReport(new.name, shape, weight_error, output_error, nbytes, bits, new.seconds, new.note, example)
