"""Fake quantization of a weight matrix in one pass: what its codes stand for, and the gradient straight through the rounding.

    W' = s (q - z),   q = clip(round(W / s) + z, low, high)            dL/dW = dL/dW'
                                                       masked:         dL/dW = dL/dW' where low <= round(W/s) + z <= high, else 0
    dL/ds = sum over the grid of dL/dW' (q - z - W/s),   where W/s is left out for a weight beyond the range

s is rounded to float16 first, as it will be stored, with the gradient straight through that too. All is computed in float32; W' is
rounded once, to the type of the matrix product that it is for. Nothing the size of W is kept for the backward pass but W itself:
which weights were beyond the range is found again, and where nobody asks (not masked, scales not learned) the gradient is handed
on as it is. A grid is `length` neighbours of the flattened W in all granularities, so one kernel does for all.
"""

from typing import Any

import torch

from helpers.kernels import backend


def fake_quantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    low: int,
    high: int,
    masked: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """W' `(rows, columns)` in `dtype` (None: the weight's), through which gradients reach `weight` and `scale`.

    `scale` (float32 or float16) and `zero` (any type) are `(rows or 1, G)`: one for each of a row's G groups, or one for all.
    """
    return StraightThrough.apply(weight, scale, zero, low, high, masked, dtype or weight.dtype)


class StraightThrough(torch.autograd.Function):
    """`fake_quantize` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        low: int,
        high: int,
        masked: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.range, ctx.masked, ctx.kind = (low, high), masked, weight.dtype
        ctx.learned = ctx.needs_input_grad[1]
        ctx.save_for_backward(*((weight, scale, zero) if masked or ctx.learned else ()))
        return fill(torch.empty_like(weight, dtype=dtype), weight, scale, zero, low, high)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_weight, of_scale = gradient, None
        if ctx.masked or ctx.learned:
            of_weight, of_scale = slopes(gradient, *ctx.saved_tensors, *ctx.range, ctx.masked, ctx.learned)
        return of_weight.to(ctx.kind), of_scale, None, None, None, None, None


def fill(
    out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    """Write W' to `out`, which is given back; no gradient."""
    if backend.usable(out, weight, scale, zero):
        from helpers.kernels.fused import fake_quant

        return fake_quant.forward(out, weight, scale, zero, low, high)
    return out.copy_(restored(weight, scale, zero, low, high))


def slopes(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    low: int,
    high: int,
    masked: bool,
    learned: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of W and, where it is learned, of s (else None), from that of W'."""
    if backend.usable(gradient, weight, scale, zero):
        from helpers.kernels.fused import fake_quant

        return fake_quant.backward(gradient, weight, scale, zero, low, high, masked, learned)
    return plain_slopes(gradient, weight, scale, zero, low, high, masked, learned)


def grouped(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W / s `(rows, G, columns / G)`, s and z `(rows or 1, G, 1)`, in float32."""
    s, z = scale.half().float().unsqueeze(-1), zero.float().unsqueeze(-1)
    return weight.float().unflatten(1, (scale.shape[1], -1)) / s, s, z


def restored(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The reference of `fill`: W' in float32."""
    ratio, s, z = grouped(weight, scale, zero)
    return ratio.round_().add_(z).clamp_(low, high).sub_(z).mul_(s).flatten(1)


def plain_slopes(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    low: int,
    high: int,
    masked: bool,
    learned: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference of `slopes`."""
    ratio, s, z = grouped(weight, scale, zero)
    point = torch.round(ratio) + z
    code = point.clamp(low, high)
    inside, g = code == point, gradient.unflatten(1, (scale.shape[1], -1))
    of_scale = (g * (code - z - ratio * inside)).sum_to_size(s.shape).squeeze(-1) if learned else None
    return (g * inside).flatten(1) if masked else gradient, of_scale
