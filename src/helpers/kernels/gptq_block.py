"""The inner loop of GPTQ: a block of columns rounded one by one, each error taken to the block's columns after it.

For column j of the block, with codes from `lowest` to `highest` and the scale s and zero point z of the column's group:

    q = clip(round(w_j / s) + z, lowest, highest),    e_j = (w_j - s (q - z)) / U_jj,    w_k <- w_k - e_j U_jk  for k > j

(e_j is made by multiplying with 1 / U_jj: the division is done once for all rows.)

Every row goes its own way, so a kernel holds a few rows of the block in registers for the whole loop: weights are read once,
codes and errors written once. Plain PyTorch reads and writes them at every column, by ten kernels each time. The kernel does the
same operations in the same order, each rounded by itself, so its codes are the reference's. Source: Frantar et al., GPTQ
(2210.17323).
"""

import torch

from helpers.kernels import backend


def compensate(
    w: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group: torch.Tensor,
    upper: torch.Tensor,
    lowest: int,
    highest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, errors e float32), both `(rows, columns)`, of a block of weights w, float32 `(rows, columns)`; w is changed.

    `scale` and `zero` are `(rows, G)`, `group` `(columns,)` says which of the G is a column's; `upper` is U `(columns, columns)`,
    float32, zero below its diagonal.
    """
    if backend.usable(w, scale, zero, group, upper):
        from helpers.kernels.fused import gptq_block

        return gptq_block.compensate(w, scale, zero, group, upper, lowest, highest)
    return reference(w, scale, zero, group, upper, lowest, highest)


def reference(
    w: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group: torch.Tensor,
    upper: torch.Tensor,
    lowest: int,
    highest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `compensate` gives, in plain PyTorch."""
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    inverse = 1 / upper.diagonal()
    for j, g in enumerate(group.tolist()):
        s, z = scale[:, g].float(), zero[:, g].float()
        codes[:, j] = (torch.round(w[:, j] / s) + z).clamp(lowest, highest)
        error = (w[:, j] - s * (codes[:, j] - z)) * inverse[j]
        w[:, j:] -= error[:, None] * upper[j, j:]
        errors[:, j] = error
    return codes.to(torch.uint8), errors
