"""GPTQ: round one column at a time, and let the columns still to come make up for the error.

For a layer with inputs x the output error is E|(W' - W) x|^2 = tr(D H D^T), D = W' - W, H = E[x x^T]. Rounding column j of W to
q leaves an error that the best change of the later columns reduces the most; with U the upper Cholesky factor of the inverse,
H^-1 = U^T U:

    e_j = (w_j - q_j) / U_jj,        w_k <- w_k - e_j U_jk   for every k > j

Done in blocks: inside a block column by column, then once for all columns after it. A little of the mean diagonal is added to H
(damping), ten times more each time the factor does not exist. With `act_order` columns go by falling H_jj, so the inputs that
matter most are rounded while most columns are left to compensate; grids are fixed before that from the original weights (static
groups), so each column keeps its own grid and nothing about the order is stored. A column whose input is always zero has H_jj =
0: it takes part in no compensation and is rounded to nearest. Source: Frantar et al., GPTQ (2210.17323).

Clip: the range that is best for rounding alone is not the best for GPTQ, which makes up for a far point but not for a coarse
grid. So the whole computation is done for several shares of the range, each row alike in all its groups, and each row keeps the
share with the least output error. (A search by squared error before the computation made outputs err more than no search, most
at 2 bits.)

Ours differs from the original in this, and in dead columns, which the original sets to zero.
"""

import torch

from helpers.quant.grid import WHOLE, Quantized, encode, find_grids, per_weight
from helpers.quant.scheme import Scheme, SchemeError

BLOCK = 128  # columns updated together
MOST_DAMPING = 10.0
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the range, tried by the clip search


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: Scheme,
    clip: bool = True,
    act_order: bool = True,
    damping: float = 0.01,
) -> tuple[Quantized, float]:
    """Quantize `(rows, columns)` weights against `hessian` `(columns, columns)`; also gives the damping that was needed.

    Errors: those of `find_grids`; `SchemeError` for a Hessian that is not finite, or that no damping makes positive definite.
    """
    if not torch.isfinite(hessian).all():
        raise SchemeError("the calibration inputs of a layer are not finite: the model itself is broken before it.")
    w, h = weight.detach().float(), hessian.float()
    rows, columns = w.shape
    shares = SHARES if clip else WHOLE
    grids = [find_grids(w, scheme, (share,)) for share in shares]
    scales, zeros = (torch.cat([per_weight(x.float(), w.shape) for x in kind]) for kind in zip(*grids, strict=True))
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns, device=w.device)
    upper, damping = inverse_factor(h[order][:, order], damping)
    stacked = w.repeat(len(shares), 1)  # the candidates as further rows: one pass for all
    codes = compensated(stacked[:, order], scales[:, order], zeros[:, order], upper, scheme)[:, order.argsort()]

    difference = scales * (codes - zeros) - stacked
    errors = ((difference @ h) * difference).sum(1).view(len(shares), rows)
    if scheme.granularity == "tensor":
        errors = errors.sum(1, keepdim=True).expand(-1, rows)
    best, row = errors.argmin(0), torch.arange(rows, device=w.device)
    scale, zero = (torch.stack(kind)[best[: len(kind[0])], row[: len(kind[0])]] for kind in zip(*grids, strict=True))
    codes = codes.view(len(shares), rows, columns)[best, row]
    return Quantized(codes.to(torch.uint8), scale, zero, scheme), damping


def compensated(
    w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, upper: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """The codes `(rows, columns)` of w, column by column, each error taken to the columns after it; w is changed."""
    rows, columns = w.shape
    codes = torch.empty_like(w)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.zeros(rows, end - start, device=w.device)
        for j in range(start, end):
            codes[:, j] = encode(w[:, j], scales[:, j], zeros[:, j], scheme)
            error = (w[:, j] - scales[:, j] * (codes[:, j] - zeros[:, j])) / upper[j, j]
            w[:, j:end] -= error[:, None] * upper[j, j:end]
            errors[:, j - start] = error
        w[:, end:] -= errors @ upper[start:end, end:]
    return codes


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """(U, damping used): U upper triangular with U^T U the inverse of the damped `hessian`; the argument is changed.

    Errors: `SchemeError` where even `MOST_DAMPING` is too little.
    """
    diagonal = hessian.diagonal()  # a view
    dead = diagonal == 0
    diagonal[dead] = 1.0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    undamped = diagonal.clone()
    while damping <= MOST_DAMPING:
        diagonal.copy_(undamped + damping * mean)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed and torch.isfinite(upper).all():
            return upper, damping
        damping = max(10 * damping, 1e-4)
    raise SchemeError(f"no damping up to {MOST_DAMPING:g} makes the Hessian of a layer positive definite.")
