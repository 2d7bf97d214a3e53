"""The block update of `kernels.gptq_block` in Triton: a program is one warp and has a few rows of the block in its registers.

Registers cannot be indexed by a number that is only known later, so column j is picked by a sum over the row with all but j masked
out, which is exact. Once its error is known, it takes the column's place in the row: U is zero below the diagonal, so no later
step changes it. The next column's scale and zero point are read while this one is computed. Nothing is fused into multiply-adds
and divisions are rounded as IEEE says, as PyTorch does it.
"""

import torch
import triton
import triton.language as tl

ROWS = 2  # of a program
SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 numbers near it are whole, so adding it rounds, half to even
FAR = tl.constexpr(1024.0)  # steps beyond every code, which SHIFT still rounds


@triton.jit
def _block(
    w_ptr, scale_ptr, zero_ptr, group_ptr, upper_ptr, code_ptr, error_ptr, rows, columns,
    w_row, scale_row, zero_row, upper_row, upper_column, lowest, highest, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    here = row < rows
    inside = here & (column < columns)
    w = tl.load(w_ptr + row * w_row + column, inside, 0.0)
    codes = tl.zeros([ROWS, COLUMNS], tl.float32)
    g = tl.load(group_ptr)
    s = tl.load(scale_ptr + row * scale_row + g, here, 1.0).to(tl.float32)
    z = tl.load(zero_ptr + row * zero_row + g, here, 0).to(tl.float32)
    for j in range(columns):
        g = tl.load(group_ptr + j + 1, j + 1 < columns, 0)
        next_s = tl.load(scale_ptr + row * scale_row + g, here, 1.0).to(tl.float32)
        next_z = tl.load(zero_ptr + row * zero_row + g, here, 0).to(tl.float32)
        inverse = tl.div_rn(1.0, tl.load(upper_ptr + j * (upper_row + upper_column)))
        u = tl.load(upper_ptr + j * upper_row + column * upper_column, column < columns, 0.0)
        w_j = tl.sum(tl.where(column == j, w, 0.0), 1, keep_dims=True)
        steps = tl.minimum(tl.maximum(tl.div_rn(w_j, s), -FAR), FAR)
        code = tl.minimum(tl.maximum((steps + SHIFT - SHIFT) + z, lowest), highest)
        error = (w_j - s * (code - z)) * inverse
        w = tl.where(column == j, error, w - error * u)
        codes = tl.where(column == j, code, codes)
        s, z = next_s, next_z
    at = row * columns + column
    tl.store(error_ptr + at, w, inside)
    tl.store(code_ptr + at, codes.to(tl.uint8), inside)


def compensate(
    w: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group: torch.Tensor,
    upper: torch.Tensor,
    lowest: int,
    highest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, errors float32), both `(rows, columns)`; a row of `w`, `scale` and `zero` lies in one piece, U as it likes."""
    rows, columns = w.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=w.device)
    errors = torch.empty(rows, columns, dtype=torch.float32, device=w.device)
    _block[(triton.cdiv(rows, ROWS),)](
        w, scale, zero, group, upper, codes, errors, rows, columns, w.stride(0), scale.stride(0), zero.stride(0),
        *upper.stride(), float(lowest), float(highest), ROWS=ROWS, COLUMNS=max(triton.next_power_of_2(columns), 32),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, errors
