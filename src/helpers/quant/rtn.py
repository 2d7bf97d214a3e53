"""Round to nearest (RTN): put each weight on the closest point of its grid. No data: the baseline of every quantizer.

With several `shares` the grid's range is the one of least squared error (see `grid`), which still needs no data.
"""

from collections.abc import Sequence

import torch

from helpers.quant.grid import WHOLE, Quantized, encode, find_grids, per_weight
from helpers.quant.scheme import Scheme


def round_to_nearest(
    weight: torch.Tensor, scheme: Scheme, shares: Sequence[float] = WHOLE, second: torch.Tensor | None = None
) -> Quantized:
    """Quantize a `(rows, columns)` float weight; `second` `(columns, columns)` is the inputs' second moment.

    Errors: those of `find_grids`.
    """
    scale, zero = find_grids(weight, scheme, shares, second)
    w = weight.detach().float()
    codes = encode(w, per_weight(scale.float(), w.shape), per_weight(zero, w.shape), scheme)
    return Quantized(codes.to(torch.uint8), scale, zero, scheme)
