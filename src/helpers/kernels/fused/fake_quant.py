"""The kernels of `kernels.fake_quant`: one read and one write of the weight forward, and only where it must be, one backward.

A program has a tile of GRIDS grids by COLUMNS of the `length` weights that each grid has; a long grid (a row, a matrix) is cut into
several tiles. Divisions are rounded as IEEE 754 says (Triton's own are not), and halves go to even codes, so codes are those of
the reference.
"""

from functools import cache

import torch
import triton
import triton.language as tl

TILE = 1024  # weights of a program


@triton.jit
def _nearest(x):
    """The nearest whole number, halves to even; exact below 2^22, beyond which all codes are clipped anyway."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _tile(grids, length, GRIDS: tl.constexpr, COLUMNS: tl.constexpr):
    """(numbers of this program's grids, where each of its weights is, which weights there are, number of its cut)."""
    cuts = tl.cdiv(length, COLUMNS)
    cut = tl.program_id(0) % cuts
    grid = tl.program_id(0) // cuts * GRIDS + tl.arange(0, GRIDS)
    column = cut * COLUMNS + tl.arange(0, COLUMNS)
    at = grid[:, None].to(tl.int64) * length + column[None, :]
    return grid, at, (grid < grids)[:, None] & (column < length)[None, :], cut


@triton.jit
def _codes(w, scale, zero, grid, grids, low, high):
    """(W / s, s before it was rounded, s, z, codes, codes before they were clipped)."""
    raw = tl.load(scale + grid, mask=grid < grids, other=1.0).to(tl.float32)[:, None]
    s = raw.to(tl.float16).to(tl.float32)
    z = tl.load(zero + grid, mask=grid < grids, other=0).to(tl.float32)[:, None]
    ratio = tl.div_rn(w, s)
    point = _nearest(ratio) + z
    code = tl.clamp(point, low, high, propagate_nan=tl.PropagateNan.ALL)
    return ratio, raw, s, z, code, point


@triton.jit(do_not_specialize=["grids"])
def _forward(
    weight, scale, zero, out, grids, length, low, high,
    GRIDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    grid, at, there, _ = _tile(grids, length, GRIDS, COLUMNS)
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    _, _, s, z, code, _ = _codes(w, scale, zero, grid, grids, low, high)
    tl.store(out + at, (s * (code - z)).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["grids"])
def _backward(
    gradient, weight, scale, zero, of_weight, of_scale, grids, length, low, high,
    GRIDS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    grid, at, there, cut = _tile(grids, length, GRIDS, COLUMNS)
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    ratio, _, _, z, code, point = _codes(w, scale, zero, grid, grids, low, high)
    inside = code == point
    if MASKED:
        tl.store(of_weight + at, tl.where(inside, g, 0.0).to(of_weight.dtype.element_ty), mask=there)
    if LEARNED:
        cuts = tl.cdiv(length, COLUMNS)
        slope = tl.sum(g * (code - z - tl.where(inside, ratio, 0.0)), axis=1)
        tl.store(of_scale + grid.to(tl.int64) * cuts + cut, slope, mask=grid < grids)


@triton.jit(do_not_specialize=["grids"])
def _find(
    weight, scale, zero, grids, length, steps,
    SYMMETRIC: tl.constexpr, GRIDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    grid = tl.program_id(0) * GRIDS + tl.arange(0, GRIDS)
    low, high = tl.zeros([GRIDS, COLUMNS], tl.float32), tl.zeros([GRIDS, COLUMNS], tl.float32)  # zero is in each range
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = grid[:, None].to(tl.int64) * length + column[None, :]
        there = (grid < grids)[:, None] & (column < length)[None, :]
        w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, w), tl.maximum(high, w)
    low, high = tl.min(low, axis=1), tl.max(high, axis=1)
    span = tl.maximum(-low, high) if SYMMETRIC else high - low
    span = tl.div_rn(span, tl.zeros_like(span) + steps)
    s = tl.maximum(span, 5.9604644775390625e-08).to(tl.float16)  # the smallest positive float16, 2^-24
    z = (
        tl.zeros_like(span) + steps + 1
        if SYMMETRIC
        else tl.clamp(_nearest(tl.div_rn(-low, s.to(tl.float32))), 0.0, steps)
    )
    tl.store(scale + grid, s, mask=grid < grids)
    tl.store(zero + grid, z.to(tl.uint8), mask=grid < grids)


@cache
def shape(length: int, grids: int) -> tuple[int, int, dict[str, int]]:
    """(programs for all grids, cuts of each, tile) for `grids` grids of `length` weights."""
    columns = min(triton.next_power_of_2(length), TILE)
    rows = TILE // columns
    return triton.cdiv(grids, rows), triton.cdiv(length, columns), {"GRIDS": rows, "COLUMNS": columns}


def forward(
    out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    """Write W' to `out`, in its type; shapes as in `kernels.fake_quant`."""
    weight, scale, zero, grids = weight.contiguous(), scale.contiguous(), zero.contiguous(), scale.numel()
    length = weight.numel() // grids
    programs, cuts, tile = shape(length, grids)
    _forward[(programs * cuts,)](weight, scale, zero, out, grids, length, float(low), float(high), **tile)
    return out


def backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    low: int,
    high: int,
    masked: bool,
    learned: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of W, gradient of s or None) from that of W'."""
    gradient, weight, scale, zero = (t.contiguous() for t in (gradient, weight, scale, zero))
    grids, length = scale.numel(), weight.numel() // scale.numel()
    programs, cuts, tile = shape(length, grids)
    of_weight = torch.empty_like(weight) if masked else gradient
    of_scale = scale.new_empty(grids, cuts, dtype=torch.float32) if learned else scale
    _backward[(programs * cuts,)](
        gradient, weight, scale, zero, of_weight, of_scale, grids, length, float(low), float(high),
        MASKED=masked, LEARNED=learned, **tile,
    )  # fmt: skip
    return of_weight, of_scale.sum(1).view(scale.shape) if learned else None


def find(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, symmetric: bool) -> None:
    """Write to `scale` and `zero` `(rows, G)` what `quant.grid.find_grids` finds; each grid lies within one row."""
    weight, grids = weight.contiguous(), scale.numel()
    length = weight.numel() // grids
    programs, _, tile = shape(length, grids)
    steps = (
        2.0 ** (bits - 1) - 1 if symmetric else 2.0**bits - 1
    )  # that the range is divided into; from zero, if symmetric
    _find[(programs,)](weight, scale, zero, grids, length, steps, SYMMETRIC=symmetric, **tile)
