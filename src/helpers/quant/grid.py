"""Uniform grids: where their points lie, and which point a weight goes to.

Weights that share a grid have one scale s and one zero point z; with b bits there are 2^b codes:

    asymmetric   s = (max - min) / (2^b - 1),  z = round(-min / s),    q = clip(round(w / s) + z, 0, 2^b - 1)
    symmetric    s = max|w| / (2^(b-1) - 1),   z = 2^(b-1),            q as above, and the lowest code stays unused
    both         w' = s (q - z)

The asymmetric range always contains zero, so z is itself a code and zero weights stay zero. Scales are rounded to float16 before
codes are chosen, because float16 is what is stored. Source: Nagel et al., A White Paper on Neural Network Quantization (2021).

Clip search: a narrower range errs more on the few weights outside and less on the many inside. Of several shares of the range each
grid takes the one with the least error d^T H d, d = w' - w: H is that grid's block of the inputs' second moment E[x x^T] where
inputs were seen, so that this is the error of its part of the output, and else the identity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from helpers.kernels import LowBitLinear
from helpers.quant.scheme import Scheme, SchemeError

TINY = 2.0**-24  # smallest positive float16: the step of a grid of zeros
WHOLE = (1.0,)  # shares of the range to try: no search
SEARCH = tuple(1 - 0.02 * i for i in range(36))  # 1 .. 0.3: at 2 bits the best is about half
COARSE = tuple(1 - 0.06 * i for i in range(11))  # 1 .. 0.4, where a search is inside another


@dataclass(frozen=True)
class Quantized:
    """Codes and grids of one `(rows, columns)` weight; G grids a row, or one for all rows."""

    codes: torch.Tensor  # (rows, columns) uint8
    scale: torch.Tensor  # (rows or 1, G) float16
    zero: torch.Tensor  # (rows or 1, G) uint8
    scheme: Scheme

    def dequantize(self) -> torch.Tensor:
        """The float32 weight `(rows, columns)` that the codes stand for."""
        scale, zero = (per_weight(x.float(), self.codes.shape) for x in (self.scale, self.zero))
        return scale * (self.codes.float() - zero)

    def pack(self, bias: torch.Tensor | None = None) -> LowBitLinear:
        """The layer that computes from these codes, packed."""
        zero = None if self.scheme.symmetric else self.zero
        return LowBitLinear.pack(self.codes, self.scale, zero, self.scheme.bits, bias)


def per_weight(grids: torch.Tensor, shape: torch.Size | tuple[int, int]) -> torch.Tensor:
    """`(rows or 1, G)` values of grids as `(rows, columns)` values of weights."""
    return grids.repeat_interleave(shape[1] // grids.shape[1], dim=1).expand(shape)


def find_grids(
    weight: torch.Tensor, scheme: Scheme, shares: Sequence[float] = WHOLE, second: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales float16, zero points uint8), both `(rows or 1, G)`, for a `(rows, columns)` weight.

    Each grid's range is the best of `shares` of the whole, by the second moment H `(columns, columns)` of the inputs if given.

    Errors: `SchemeError` where the weight is no finite matrix, does not fit the scheme, or is too large for a float16 scale.
    """
    if weight.ndim != 2 or not torch.isfinite(weight).all():
        raise SchemeError(f"a weight of shape {tuple(weight.shape)} cannot be quantized: it must be a finite matrix.")
    rows, columns = weight.shape
    length = scheme.grid_length(rows, columns)
    w = weight.detach().float().reshape(-1, length)
    low, high = w.amin(dim=1, keepdim=True).clamp(max=0), w.amax(dim=1, keepdim=True).clamp(min=0)
    scale, zero = _grids(shares[0] * low, shares[0] * high, scheme)
    if not torch.isfinite(scale).all():
        raise SchemeError(
            f"a weight of size {float(w.abs().max()):.3g} needs a scale beyond float16: rescale the layer."
        )
    if len(shares) > 1:
        best = torch.full_like(low, torch.inf)
        for share in shares:
            s, z = _grids(share * low, share * high, scheme)
            error = _errors(_nearest(w, s, z, scheme) - w, weight.shape, second)
            better = error < best
            best, scale, zero = (torch.where(better, new, old) for new, old in ((error, best), (s, scale), (z, zero)))
    shape = (1, 1) if scheme.granularity == "tensor" else (rows, columns // length)
    return scale.view(shape), zero.view(shape).to(torch.uint8)


def _errors(difference: torch.Tensor, shape: torch.Size, second: torch.Tensor | None) -> torch.Tensor:
    """d^T H d of each grid `(grids, 1)`; `difference` is `(grids, length)`, the weight's shape `(rows, columns)`."""
    if second is None:
        return difference.square().sum(dim=1, keepdim=True)
    grids, (rows, columns) = len(difference), shape
    length = min(difference.shape[1], columns)  # of a grid's part of one row
    blocks = second.float().view(columns // length, length, columns // length, length)
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (columns / length, length, length)
    d = difference.reshape(rows, -1, length).transpose(0, 1)
    return ((d @ blocks) * d).sum(-1).T.reshape(grids, -1).sum(dim=1, keepdim=True)


def _grids(low: torch.Tensor, high: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    top, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    span, steps = (torch.maximum(-low, high), middle - 1) if scheme.symmetric else (high - low, top)
    span = span / torch.full_like(span, steps)  # by a number, CUDA would multiply by 1 / steps, which is rounded
    scale = span.clamp(min=TINY).half()
    zero = torch.full_like(low, middle) if scheme.symmetric else torch.round(-low / scale.float()).clamp(0, top)
    return scale, zero


def encode(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The nearest code of each weight, float32; `scale` and `zero` broadcast against `weight`."""
    codes = torch.round(weight / scale.float()) + zero.float()
    return codes.clamp(int(scheme.symmetric), 2**scheme.bits - 1)


def _nearest(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return scale.float() * (encode(weight, scale, zero, scheme) - zero.float())
