"""How much each layer matters: what goes wrong when it alone is quantized and all others keep full precision.

    KL_l(b) = mean over tokens of KL( p(. | full model) || p(. | full model with layer l at b bits) )

A layer may be put into the full-precision model from any model of the same shape, so the same measure tells where a quantized
model hurts (`alone`), and what each layer would cost at each width (`sensitivity`), from which `mixed` chooses. Near zero, KL is
quadratic in the change of the logits, so the layers' KLs add up as long as their errors are small and independent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import torch
from transformers import PreTrainedModel

from helpers.models import reading
from helpers.quant.calibration import decoder_blocks, split
from helpers.quant.layers import linear_layers, weight_of
from helpers.quant.quantize import quantize
from helpers.quant.scheme import Scheme, SchemeError

MEASURES = ("kl", "output_error")


def alone(
    full: PreTrainedModel,
    low: PreTrainedModel,
    units: Sequence[str],
    texts: Sequence[Sequence[int]],
    starts: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    """KL(full || full with one unit of `low`) for each unit, a layer's or a decoder block's name: `(texts, 2)`.

    Column 0 is the sum over a text's tokens in nats, column 1 their number. The unit "" is the whole of `low`.

    Errors: those of `reading.batches`; `SchemeError` for a unit that one of the models lacks.
    """
    for name in units:
        refuse_unknown(full, low, name)
    found = {name: np.zeros((len(texts), 2)) for name in units}
    for batch in reading.batches(full, texts, starts):
        exact, rows = reading.log_probs(full, batch), batch.rows.cpu().numpy()
        for name in units:
            with swapped(full, low, name) as model:
                off = reading.divergence(exact, reading.log_probs(model, batch)).double().cpu().numpy()
            np.add.at(found[name], (rows, 0), off)
            np.add.at(found[name], (rows, 1), 1)
    return found


@contextmanager
def swapped(full: PreTrainedModel, low: PreTrainedModel, name: str) -> Iterator[PreTrainedModel]:
    """`full` with the module `name` of `low` while inside; `low` itself where the name is empty."""
    if not name:
        yield low
        return
    own = full.get_submodule(name)
    full.set_submodule(name, low.get_submodule(name))
    try:
        yield full
    finally:
        full.set_submodule(name, own)


def changed_layers(full: PreTrainedModel, low: PreTrainedModel) -> list[str]:
    """The linear layers whose weights differ, in order; none where a layer makes no sense without the rest of its block.

    That is so after AWQ, which moves scales from a layer into the norm before it, and with an adapter, which adds layers.

    Errors: `SchemeError` where blocks or layers are not the same, but for an adapter's.
    """
    ours, theirs = linear_layers(full), linear_layers(low)
    blocks = [name for model in (full, low) for name, _ in decoder_blocks(model)]
    for name in dict.fromkeys([*blocks, *(name for name in ours if name in theirs)]):
        refuse_unknown(full, low, name)
    if ours.keys() != theirs.keys():
        return []
    for (prefix, block), (_, other) in zip(decoder_blocks(full), decoder_blocks(low), strict=True):
        vectors = dict(other.named_parameters())
        for name, weight in block.named_parameters():
            if f"{prefix}.{name}".rpartition(".")[0] not in ours and not torch.equal(weight, vectors[name].to(weight)):
                return []
    return [name for name in ours if not torch.equal(weight_of(ours[name]), weight_of(theirs[name]))]


def refuse_unknown(full: PreTrainedModel, low: PreTrainedModel, name: str) -> None:
    """Raise `SchemeError` where `name` is in one of the models alone, or of another shape there."""
    shapes = []
    for model in (full, low):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise SchemeError(
                f"{name} is not in both models: compare a model with the one that it was made from."
            ) from None
        shapes.append((getattr(module, "out_features", None), getattr(module, "in_features", None)))
    if shapes[0] != shapes[1]:
        raise SchemeError(f"{name} is {shapes[0]} in one model and {shapes[1]} in the other: their sizes differ.")


def sensitivity(
    model: PreTrainedModel,
    method: str,
    schemes: Sequence[Scheme],
    texts: Sequence[Sequence[int]],
    measure: str = "output_error",
    starts: Sequence[int] | None = None,
    **settings: bool | float | None,
) -> dict[str, dict[Scheme, float]]:
    """What each layer costs at each scheme when it alone is quantized: layer -> scheme -> KL a token, or squared output error.

    A copy of the model is quantized by `method` at each scheme, calibrated on four texts in five; a layer is measured on the
    fifth, KL there on the tokens from `starts` on (see `models.reading`). For `awq`, whose layers do not stand alone, KL is that
    of `rtn-clip`.

    Errors: `SchemeError` for an unknown measure and for fewer than 5 texts; those of `quantize`.
    """
    if measure not in MEASURES:
        raise SchemeError(f"measure = {measure!r} is unknown: choose one of {', '.join(MEASURES)}.")
    held_out = split(texts)[1]
    if not held_out:
        raise SchemeError(
            f"a sensitivity needs at least 5 texts (one in five to measure on), and {len(texts)} were given."
        )
    method = "rtn-clip" if method == "awq" and measure == "kl" else method
    found: dict[str, dict[Scheme, float]] = {}
    for scheme in schemes:
        low = deepcopy(model)
        reports = quantize(low, method, scheme, texts, **settings)
        if measure == "kl":
            off = alone(model, low, [r.name for r in reports], held_out, split(starts)[1] if starts else None)
            costs = {name: sums[:, 0].sum() / sums[:, 1].sum() for name, sums in off.items()}
        else:
            costs = {r.name: r.output_error**2 for r in reports}
        for name, cost in costs.items():
            found.setdefault(name, {})[scheme] = float(cost)
    return found
