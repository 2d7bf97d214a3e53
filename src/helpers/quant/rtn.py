"""Round to nearest (RTN): put each weight on the closest point of a uniform grid. No data, no search: the baseline.

Weights that share a grid have one scale s and one zero point z; with b bits there are 2^b codes:

    asymmetric   s = (max - min) / (2^b - 1),  z = round(-min / s),    q = clip(round(w / s) + z, 0, 2^b - 1)
    symmetric    s = max|w| / (2^(b-1) - 1),   z = 2^(b-1),            q as above, and the lowest code stays unused
    both         w' = s (q - z)

The asymmetric range always contains zero, so z is itself a code and zero weights stay zero. Scales are rounded to float16 before
codes are chosen, because float16 is what is stored. Source: Nagel et al., A White Paper on Neural Network Quantization (2021).
"""

from dataclasses import dataclass

import torch

from helpers.quant.scheme import Scheme, SchemeError

SCALE_BITS = 16
TINY = 2.0**-24  # smallest positive float16: the step of a grid of zeros


@dataclass(frozen=True)
class Quantized:
    """Codes and grids of one `(rows, columns)` weight; G = number of grids, L = weights a grid, G * L = rows * columns."""

    codes: torch.Tensor  # (G, L) uint8
    scale: torch.Tensor  # (G, 1) float16
    zero: torch.Tensor  # (G, 1) uint8
    shape: tuple[int, int]
    scheme: Scheme

    @property
    def nbytes(self) -> int:
        """Bytes when stored: codes in whole 32-bit words a grid, scales in float16, zero points (if any) at the codes' width."""
        grids, length = self.codes.shape
        words = grids * -(-length * self.scheme.bits // 32)
        zeros = 0 if self.scheme.symmetric else -(-grids * self.scheme.bits // 8)
        return 4 * words + grids * SCALE_BITS // 8 + zeros


def round_to_nearest(weight: torch.Tensor, scheme: Scheme) -> Quantized:
    """Quantize a `(rows, columns)` float weight.

    Errors: `SchemeError` where the weight is no finite matrix, does not fit the scheme, or is too large for a float16 scale.
    """
    if weight.ndim != 2 or not torch.isfinite(weight).all():
        raise SchemeError(f"a weight of shape {tuple(weight.shape)} cannot be quantized: it must be a finite matrix.")
    rows, columns = weight.shape
    w = weight.detach().float().reshape(-1, scheme.grid_length(rows, columns))
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        middle = 2 ** (scheme.bits - 1)
        scale = w.abs().amax(dim=1, keepdim=True) / (middle - 1)
    else:
        low, high = w.amin(dim=1, keepdim=True).clamp(max=0), w.amax(dim=1, keepdim=True).clamp(min=0)
        scale = (high - low) / top
    scale = scale.clamp(min=TINY).half()
    if not torch.isfinite(scale).all():
        raise SchemeError(
            f"a weight of size {float(w.abs().max()):.3g} needs a scale beyond float16: rescale the layer."
        )
    step = scale.float()
    zero = torch.full_like(step, middle) if scheme.symmetric else torch.round(-low / step).clamp(0, top)
    codes = (torch.round(w / step) + zero).clamp(int(scheme.symmetric), top)
    return Quantized(codes.to(torch.uint8), scale, zero.to(torch.uint8), (rows, columns), scheme)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The float32 weight `(rows, columns)` that the codes stand for."""
    values = (quantized.codes.float() - quantized.zero.float()) * quantized.scale.float()
    return values.reshape(quantized.shape)
