"""Does what reinforcement learning changed survive quantization?

RL moves a weight by less than a quantization step, so most weights may keep their code. Of a base model W, the RL model
W + U made from it, and a scheme with step s, RTN gives

    step share   mean |U| / s                            codes changed   share of q(W + U) that differ from q(W)
    direction    cosine of U and Q(W + U) - Q(W)         size            |Q(W + U) - Q(W)| / |U|

on the base's grids (U alone decides what moves) and on each model's own (as two checkpoints are quantized). Rounding is not
blind to small updates: few weights move, but by a whole step. Where weights lie evenly between grid points the update is kept on
average, under noise; the cosine says how much noise. What counts in the end is the gain that is left,

    survival = (acc(Q(RL)) - acc(base)) / (acc(RL) - acc(base)),

a ratio of sums over the same problems, with a paired bootstrap over them.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from transformers import PreTrainedModel

from helpers.errors import UserError
from helpers.evaluation.bootstrap import ratio
from helpers.evaluation.compare import compare
from helpers.quant import Scheme, SchemeError, linear_layers, weight_of
from helpers.quant.grid import Quantized, encode, find_grids, per_weight
from helpers.runs import Metric, Result


@torch.no_grad()
def updates(base: PreTrainedModel, tuned: PreTrainedModel, scheme: Scheme) -> pd.DataFrame:
    """One row a linear layer, and `all`: weights, `step_share`, and codes changed, cosine and size on `fixed` and `own` grids.

    Errors: `SchemeError` for layers that differ in name or shape, and for a scheme that does not fit or is not uniform.
    """
    if scheme.numbers != "uniform":
        raise SchemeError(f"scheme = {scheme} has no steps of one size: choose a uniform grid, such as w4g64.")
    ours, theirs = linear_layers(base, scheme.targets), linear_layers(tuned, scheme.targets)
    if list(ours) != list(theirs):
        raise SchemeError("the two models do not have the same layers: compare a model with the one it was made from.")
    rows = pd.DataFrame.from_dict(
        {name: _sums(name, weight_of(ours[name]), weight_of(theirs[name]), scheme) for name in ours}, orient="index"
    )
    rows.loc["all"] = rows.sum()
    weights, (uu, ff, oo) = rows["weights"], (rows[x].clip(lower=1e-30) for x in ("uu", "ff", "oo"))
    return pd.DataFrame(
        {
            "weights": weights.astype(int),
            "step_share": rows["steps"] / weights,
            "changed_fixed": rows["changed_fixed"] / weights,
            "changed_own": rows["changed_own"] / weights,
            "cosine_fixed": rows["uf"] / (uu * ff) ** 0.5,
            "cosine_own": rows["uo"] / (uu * oo) ** 0.5,
            "size_fixed": (ff / uu) ** 0.5,
            "size_own": (oo / uu) ** 0.5,
        }
    ).rename_axis("layer")


def _sums(name: str, before: torch.Tensor, after: torch.Tensor, scheme: Scheme) -> dict[str, float]:
    """What the shares and cosines of one layer are made of, as sums over its weights; u: update, f, o: after rounding."""
    if before.shape != after.shape:
        raise SchemeError(f"layer {name} is {tuple(before.shape)} in one model and {tuple(after.shape)} in the other.")
    start = _rounded(before, *find_grids(before, scheme), scheme)
    fixed = _rounded(after, start.scale, start.zero, scheme)
    own = _rounded(after, *find_grids(after, scheme), scheme)
    u, f, o = (x.double() for x in (after - before, *(q.dequantize() - start.dequantize() for q in (fixed, own))))
    step = per_weight(start.scale.double(), before.shape)
    found = {
        "changed_fixed": fixed.codes != start.codes,
        "changed_own": own.codes != start.codes,
        "steps": u.abs() / step,
    }
    found |= {"uu": u * u, "uf": u * f, "ff": f * f, "uo": u * o, "oo": o * o}
    return {"weights": float(u.numel())} | {key: float(x.sum()) for key, x in found.items()}


def _rounded(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, scheme: Scheme) -> Quantized:
    codes = encode(weight, *(per_weight(x.float(), weight.shape) for x in (scale, zero)), scheme)
    return Quantized(codes.to(torch.uint8), scale, zero, scheme)


def update_metrics(base: PreTrainedModel, tuned: PreTrainedModel, schemes: Sequence[Scheme]) -> list[Metric]:
    """The totals of `updates` at each scheme, as benchmark `updates/w4g64`; n counts weights: all of them, so no interval."""
    found = []
    for scheme in schemes:
        row = updates(base, tuned, scheme).loc["all"]
        for name, value in row.drop("weights").items():
            found.append(Metric(metric=name, value=float(value), n=int(row["weights"]), benchmark=f"updates/{scheme}"))
    return found


def survival(base: Metric, tuned: Metric, quantized: Metric) -> Metric:
    """How much of the gain in `accuracy` is left, with a 95 % interval; the detail has the gain.

    The interval is None where resamples without any gain are so frequent that it has no end.

    Errors: `UserError` where nothing was gained; those of `compare` (other problems, no marks).
    """
    gain, left = compare(base, tuned), compare(base, quantized)
    if gain.gained == gain.lost:
        raise UserError(
            f"training gained nothing ({gain.gained} of {gain.n} problems gained, {gain.lost} lost): there is nothing to survive."
        )
    start, end, low = ([int(c) for c in m.detail["correct"]] for m in (base, tuned, quantized))
    value, ci_low, ci_high = ratio(
        [q - b for q, b in zip(low, start, strict=True)], [r - b for r, b in zip(end, start, strict=True)]
    )
    return Metric(
        metric="survival", value=value, n=gain.n, ci_low=ci_low, ci_high=ci_high, task=base.task, benchmark=base.benchmark,
        detail={"gain": gain.difference, "left": left.difference},
    )  # fmt: skip


def survivals(evaluations: Sequence[Result], task: str) -> pd.DataFrame:
    """`survival` of every evaluated model whose parent and grandparent were evaluated on the same problems too.

    A parent that gained nothing is left out.
    """
    scored = {}  # (id of the evaluated model, its problems) -> (description, seed, accuracy)
    for result in evaluations:
        metric = next((m for m in result.metrics if m.metric == "accuracy" and m.benchmark == task), None)
        if metric is not None:
            scored[result.parents[0], metric.detail["problems"]] = result.model, result.seed, metric
    rows = []
    for (_, problems), (about, seed, metric) in scored.items():
        tuned = scored.get((about.get("made_from"), problems))
        base = scored.get((tuned[0].get("made_from"), problems)) if tuned else None
        if base and tuned[2].value != base[2].value:
            left = survival(base[2], tuned[2], metric)
            interval = "unbounded" if left.ci_low is None else f"{left.ci_low:+.2f} to {left.ci_high:+.2f}"
            rows.append([about["name"], about["recipe"], about["scheme"], seed, f"{left.detail['gain']:+.3f}",
                         f"{left.detail['left']:+.3f}", f"{left.value:.2f}", interval, left.n])  # fmt: skip
    columns = ["model", "recipe", "scheme", "seed", "gain", "left", "survival", "95 % interval", "n"]
    return pd.DataFrame(rows, columns=columns).set_index(columns[:4])
