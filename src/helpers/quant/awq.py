"""AWQ: before rounding, give the columns that large inputs meet a finer grid, by scaling weights up and inputs down.

    y = W x = (W diag(s)) (x / s),        s = m^a / n^(1-a),        a in 0, 0.1, .., 1

m is the mean |x| of a column's inputs, n the mean size of its weights relative to their group; the variant without n is tried
too. The s with the least (relative) output error tr(D H D^T), D = Q(W s) / s - W, is folded into whatever makes x (a norm's
weight, or the rows of the layer before), so the model computes what it did and nothing is stored. Q searches each grid's range
(clip), coarsely while s is sought and finely at the end, and keeps the whole range where that errs less. Source: Lin et al.,
AWQ (2306.00978).

Ours measures the error of the layers' outputs through H = E[x x^T], exactly and without running them again, where AutoAWQ
measures that of the attention or MLP as a whole; s = 1 and "no clip" are among the candidates, so no layer is behind RTN on the
text it saw (the model as a whole may be). Under grouped-query attention one value channel meets several output channels: these
share one s. (AutoAWQ leaves out that fold.) A fold that changes the block's output is undone and noted: some norms do not
multiply by their weight.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from helpers.quant.calibration import Moments, Stream
from helpers.quant.grid import COARSE, WHOLE, Quantized
from helpers.quant.rtn import round_to_nearest
from helpers.quant.scheme import Scheme, SchemeError

STEPS = 10
FOLDS = (  # what makes the inputs, the layers that read them
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
SAME = 1e-3  # relative change of a block's output that rounding errors of a fold stay below


@dataclass
class Scales:
    """What was folded into one layer: its columns times `columns`, its rows divided by `rows`; `note` where a fold was left out.

    `weight` is the layer's weight after that, in float32.
    """

    columns: torch.Tensor
    rows: torch.Tensor
    weight: torch.Tensor
    note: str = ""

    def undo(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight after the fold, as the layer before it would need it to compute the same."""
        return weight * self.rows[:, None] / self.columns


@torch.no_grad()
def fold(
    block: nn.Module,
    layers: dict[str, nn.Linear],
    moments: dict[str, Moments],
    stream: Stream,
    scheme: Scheme | Mapping[str, Scheme],
    clip: bool = True,
) -> dict[str, Scales]:
    """Fold the best scales into `block`; `layers` and `moments` (and `scheme`, if it is one for each) go by the names
    within the block. Gives what each layer got; the layers themselves, which are about to be replaced, stay as they are.

    All is done on a float32 copy; what stays in full precision (norms, biases) is rounded to bfloat16 as it will be saved, and
    a norm's scale is what its rounded weight makes it.

    Errors: `SchemeError` where nothing can be folded into the block.
    """
    work = copy.deepcopy(block).float()
    scales = {
        name: Scales(torch.ones_like(m.weight[0]).float(), torch.ones_like(m.weight[:, 0]).float(), m.weight.float())
        for name, m in layers.items()
    }
    for name in scales.keys() - {name for _, readers in FOLDS for name in readers}:
        scales[name].note = "no scale: awq does not know this layer"
    before = stream.call(block, 0, work)
    for maker, readers in FOLDS:
        readers = [name for name in readers if name in layers]
        try:
            source = work.get_submodule(maker)
        except AttributeError:
            for name in readers:
                scales[name].note = f"no scale: its block has no {maker}"
            continue
        if not readers:
            continue
        mine = [work.get_submodule(name) for name in readers]
        heads = sharing(work, source, mine[0])
        schemes = [scheme[name] if isinstance(scheme, Mapping) else scheme for name in readers]
        weights = [m.weight for m in mine]
        s = best_scale(weights, moments[readers[0]], schemes, COARSE if clip else WHOLE, heads)
        made = s.view(-1, *heads)[:, 0].flatten() if heads else s  # one a channel of the maker
        kept = copy.deepcopy([p.data for p in (*source.parameters(), *weights)])
        made = divide(source, made, quantized=maker in layers)
        s = made.view(-1, 1, heads[1]).expand(-1, *heads).flatten() if heads else made
        for m in mine:
            m.weight.mul_(s)
        after = stream.call(block, 0, work)
        if not float((after - before).norm() / before.norm()) <= SAME:
            for p, old in zip((*source.parameters(), *weights), kept, strict=True):
                p.data.copy_(old)
            for name in readers:
                scales[name].note = f"no scale: folding it into {maker} changes the output"
            continue
        for name in readers:
            scales[name].columns = s
        for seen in {id(moments[name]): moments[name] for name in readers}.values():  # one object that they share
            seen.second /= s[:, None] * s
            seen.magnitude /= s
        if maker in scales:
            scales[maker].rows = made
    if scales and all(found.note for found in scales.values()):
        raise SchemeError(
            f"awq finds nothing to scale in a {type(block).__name__}: use gptq or rtn-clip for this model."
        )
    for name, parameter in block.named_parameters():
        if name.removesuffix(".weight") in layers:
            scales[name.removesuffix(".weight")].weight = work.get_parameter(name).data
        else:
            parameter.data.copy_(work.get_parameter(name))
    return scales


def divide(source: nn.Module, scale: torch.Tensor, quantized: bool) -> torch.Tensor:
    """Divide what `source` makes, a norm or a linear layer, by `scale` `(channels,)`; gives the scale that was really taken.

    Parameters that stay in full precision become bfloat16 numbers (`quantized`: the weight of a linear layer does not stay).
    """
    weight, bias = source.weight, getattr(source, "bias", None)
    if weight.ndim == 1:
        rounded = (weight / scale).bfloat16().float()
        scale = torch.where(rounded == 0, scale, weight / rounded)
        weight.copy_(rounded)
    else:
        divided = weight / scale[:, None]
        weight.copy_(divided if quantized else divided.bfloat16().float())
    if bias is not None:
        bias.copy_((bias / scale).bfloat16().float())
    return scale


def sharing(block: nn.Module, source: nn.Module, reader: nn.Linear) -> tuple[int, int] | None:
    """(queries a value head, width of a head) where several columns come from one channel of `source`; else None."""
    made = source.weight.shape[0]
    if made == reader.in_features:
        return None
    return reader.in_features // made, block.self_attn.head_dim


def best_scale(
    weights: list[torch.Tensor],
    moments: Moments,
    scheme: Scheme | Sequence[Scheme],
    shares: Sequence[float] = WHOLE,
    heads: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The s `(columns,)` with the least sum of relative output errors of `weights`, which read the same inputs; ones if none is
    better. Relative, because q_norm and k_norm take away what a projection's own size is.
    """

    def share(x: torch.Tensor) -> torch.Tensor:  # the mean over the columns that one channel feeds
        return x if heads is None else x.view(-1, *heads).mean(1, keepdim=True).expand(-1, *heads).flatten()

    schemes = [scheme] * len(weights) if isinstance(scheme, Scheme) else scheme
    inputs = share(moments.magnitude).clamp(min=1e-8)
    relative = [relative_size(w, own) for w, own in zip(weights, schemes, strict=True)]
    sizes = share(torch.cat(relative).mean(0)).clamp(min=1e-4)
    candidates = [torch.ones_like(inputs)]
    for ratio in (i / STEPS for i in range(STEPS + 1)):
        for s in (inputs**ratio, inputs**ratio / sizes ** (1 - ratio)):
            s = s.clamp(min=1e-4)
            candidates.append(s / (s.max() * s.min()).sqrt())
    exact = [max(output_error(w, moments.second), 1e-30) for w in weights]
    errors = []
    for s in candidates:
        scaled = Moments(moments.second / (s[:, None] * s), moments.magnitude / s)
        found = [
            rounded(w * s, scaled, own, shares).dequantize() / s - w for w, own in zip(weights, schemes, strict=True)
        ]
        errors.append(sum(output_error(d, moments.second) / e for d, e in zip(found, exact, strict=True)))
    return candidates[min(range(len(errors)), key=errors.__getitem__)]


def relative_size(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """|w| over the largest |w| of its grid, `(rows, columns)`."""
    grids = weight.abs().reshape(-1, scheme.grid_length(*weight.shape))
    return (grids / grids.amax(dim=1, keepdim=True).clamp(min=1e-6)).reshape(weight.shape)


def output_error(difference: torch.Tensor, second: torch.Tensor) -> float:
    """E |D x|^2 = tr(D H D^T) for D `(rows, columns)` and H `(columns, columns)`."""
    return float(((difference @ second) * difference).sum())


def rounded(weight: torch.Tensor, moments: Moments, scheme: Scheme, shares: Sequence[float]) -> Quantized:
    """The nearest codes with the range searched or the whole one, whichever has the smaller output error."""
    whole = round_to_nearest(weight, scheme)
    if len(shares) == 1:
        return whole
    searched = round_to_nearest(weight, scheme, shares, moments.second)
    return min(whole, searched, key=lambda q: output_error(q.dequantize() - weight.float(), moments.second))
