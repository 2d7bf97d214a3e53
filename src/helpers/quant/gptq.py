"""GPTQ: round one column at a time, and let the columns still to come make up for the error.

For a layer with inputs x the output error is E|(W' - W) x|^2 = tr(D H D^T), D = W' - W, H = E[x x^T]. Rounding column j of W to
q leaves an error that the best change of the later columns reduces the most; with U the upper Cholesky factor of the inverse,
H^-1 = U^T U:

    e_j = (w_j - q_j) / U_jj,        w_k <- w_k - e_j U_jk   for every k > j

Done in blocks: inside a block column by column (`kernels.gptq_block`), then once for all columns after it. With R upper triangular
and H = R R^T, U is the inverse of R, and R is the Cholesky factor of H with its rows and columns in reverse order. A little of
the mean diagonal is added to H (damping), ten times more each time the factor does not exist. With `act_order` columns go by
falling H_jj, so the inputs that matter most are rounded while most columns are left to compensate; grids are fixed before that
from the original weights (static groups), so each column keeps its own grid and nothing about the order is stored. A column whose
input is always zero has H_jj = 0: it takes part in no compensation and is rounded to nearest. Source: Frantar et al., GPTQ
(2210.17323).

Clip: the range that is best for rounding alone is not the best for GPTQ, which makes up for a far point but not for a coarse
grid. So the whole computation is done for several shares of the range, each row alike in all its groups, and each row keeps the
share with the least output error. (A search by squared error before the computation made outputs err more than no search, most
at 2 bits.)

Ours differs from the original in this, and in dead columns, which the original sets to zero.
"""

from dataclasses import dataclass

import torch

from helpers.kernels import gptq_block
from helpers.quant.grid import WHOLE, Quantized, find_grids, per_weight
from helpers.quant.scheme import Scheme, SchemeError

BLOCK = 128  # columns updated together
MOST_DAMPING = 10.0
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the range, tried by the clip search


@dataclass(frozen=True)
class Inputs:
    """What GPTQ needs of the inputs that layers read: H, the order of columns, U in that order, and the damping it took."""

    hessian: torch.Tensor  # (columns, columns) float32
    order: torch.Tensor  # (columns,)
    upper: torch.Tensor  # (columns, columns) float32
    damping: float


def prepared(hessian: torch.Tensor, act_order: bool = True, damping: float = 0.01) -> Inputs:
    """What all layers with these inputs share.

    Errors: `SchemeError` for a Hessian that is not finite, or that no damping makes positive definite.
    """
    if not torch.isfinite(hessian).all():
        raise SchemeError("the calibration inputs of a layer are not finite: the model itself is broken before it.")
    h = hessian.float()
    falling = h.diagonal().argsort(descending=True, stable=True)
    order = falling if act_order else torch.arange(len(h), device=h.device)
    return Inputs(h, order, *inverse_factor(h[order][:, order], damping))


def gptq(weight: torch.Tensor, inputs: Inputs, scheme: Scheme, clip: bool = True) -> Quantized:
    """Quantize `(rows, columns)` weights that meet `inputs`.

    Errors: those of `find_grids`.
    """
    w, order = weight.detach().float(), inputs.order
    rows, columns = w.shape
    shares = SHARES if clip else WHOLE
    grids = [find_grids(w, scheme, (share,)) for share in shares]
    scales, zeros = (torch.cat([x.expand(rows, -1) for x in kind]) for kind in zip(*grids, strict=True))
    stacked = w.repeat(len(shares), 1)  # the candidates as further rows: one pass for all
    group = order // (columns // scales.shape[1])
    codes = compensated(stacked[:, order], scales, zeros, group, inputs.upper, scheme)[:, order.argsort()]
    if not clip:
        return Quantized(codes, *grids[0], scheme)

    scales, zeros = (per_weight(x.float(), stacked.shape) for x in (scales, zeros))
    difference = scales * (codes - zeros) - stacked
    errors = ((difference @ inputs.hessian) * difference).sum(1).view(len(shares), rows)
    if scheme.granularity == "tensor":
        errors = errors.sum(1, keepdim=True).expand(-1, rows)
    best, row = errors.argmin(0), torch.arange(rows, device=w.device)
    scale, zero = (torch.stack(kind)[best[: len(kind[0])], row[: len(kind[0])]] for kind in zip(*grids, strict=True))
    return Quantized(codes.view(len(shares), rows, columns)[best, row], scale, zero, scheme)


def compensated(
    w: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group: torch.Tensor,
    upper: torch.Tensor,
    scheme: Scheme,
) -> torch.Tensor:
    """The codes `(rows, columns)` uint8 of w, column by column, each error taken to the columns after it; w is changed.

    `scale` and `zero` are `(rows, G)`, and `group` `(columns,)` says which of the G is a column's.
    """
    codes, columns = [], w.shape[1]
    for start in range(0, columns, BLOCK):
        own, later = slice(start, start + BLOCK), slice(start + BLOCK, columns)
        made, errors = gptq_block.compensate(
            w[:, own], scale, zero, group[own], upper[own, own], int(scheme.symmetric), 2**scheme.bits - 1
        )
        w[:, later] -= errors @ upper[own, later]
        codes.append(made)
    return torch.cat(codes, 1)


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """(U, damping used): U upper triangular with U^T U the inverse of the damped `hessian`; the argument is changed.

    Errors: `SchemeError` where even `MOST_DAMPING` is too little.
    """
    diagonal = hessian.diagonal()  # a view
    dead = diagonal == 0
    mean = torch.where(dead.all(), 1.0, diagonal.sum() / (~dead).sum())
    undamped = diagonal + dead.float()
    while damping <= MOST_DAMPING:
        diagonal.copy_(undamped + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if not failed:
            identity = torch.eye(len(hessian), device=hessian.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).triu().contiguous()
            if torch.isfinite(upper).all():
                return upper, damping
        damping = max(10 * damping, 1e-4)
    raise SchemeError(f"no damping up to {MOST_DAMPING:g} makes the Hessian of a layer positive definite.")
