"""The product of a few rows with packed low-bit weights, without unpacking them into memory.

    y = x W'^T,    W' = s (q - z)

Reading the codes is what such a product costs, so a kernel may do no more than about four operations a weight before it computes
longer than it reads. The codes are therefore arranged so that unpacking is a shift and a mask for two weights at once, and the
multiplications are the tensor cores'. Columns come in tiles of `slots * width`; in a tile, the 16-bit word c of a row holds the
codes of columns c, width + c, 2 width + c, ...: one in each slot. So slot j of a tile of words is, as it stands, the matrix of
`width` consecutive columns. A word holds 8 codes of 2 bits, 4 of 4 bits or 2 of 8 bits. Three words hold 16 codes of 3 bits: five
each, and the last code in the bit that each of them has left.

Beside the words lies a table of grids: scale (float16) and zero point in one 32-bit word, a row for each group of columns.
"""

from dataclasses import dataclass
from functools import cache

import torch

from helpers.kernels import backend

WIDTHS = {2: (32, 16), 3: (16,), 4: (32, 16), 8: (64, 32, 16)}  # of a tile of words, the one that is fastest first
PADDING = 1.1  # times its bytes that a matrix may take: beyond, it stays as it was packed, unless it is `SMALL`
SMALL = 2**20  # bytes with padding: an H200 reads them in a quarter of a microsecond, less than a launch takes
ROWS = 256  # of x; more are multiplied by unpacked weights


@dataclass(frozen=True)
class Layout:
    """How a `(rows, columns)` matrix of codes is arranged; `group` columns share a grid."""

    bits: int
    rows: int
    columns: int
    group: int
    width: int

    @classmethod
    @cache
    def of(cls, bits: int, rows: int, columns: int, grids: int) -> "Layout | None":
        """The layout of a matrix with `grids` grids a row; None where groups or padding allow none."""
        for width in WIDTHS[bits]:
            tile = width * (16 if bits == 3 else 16 // bits)
            padded = -(-columns // tile) * tile
            group = padded if grids == 1 else columns // grids
            whole = group % width == 0 and (tile % group == 0 or group % tile == 0)
            if whole and (padded <= PADDING * columns or (width == 16 and rows * padded * bits <= 8 * SMALL)):
                return cls(bits, rows, columns, group, width)
        return None

    @property
    def planes(self) -> int:
        """Words that hold the codes of one place in the tile."""
        return 3 if self.bits == 3 else 1

    @property
    def slots(self) -> int:
        """Codes in those words."""
        return 16 * self.planes // self.bits

    @property
    def tiles(self) -> int:
        """Tiles a row, the last of which may be padded with zeros."""
        return -(-self.columns // (self.slots * self.width))

    @property
    def padded(self) -> int:
        """Columns of all tiles."""
        return self.tiles * self.slots * self.width


def places(layout: Layout, slot: int) -> list[tuple[int, int, int, int]]:
    """Where the code of a slot lies: (plane, shift in its word, mask, shift of the masked bits to their place in the code)."""
    if layout.bits != 3:
        return [(0, layout.bits * slot, 2**layout.bits - 1, 0)]
    if slot < 15:
        return [(slot // 5, 3 * (slot % 5), 7, 0)]
    return [(plane, 15, 1, plane) for plane in range(3)]


def arrange(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`(tiles, planes, rows, width)` int16 words of `(rows, columns)` uint8 codes."""
    codes = torch.nn.functional.pad(codes, (0, layout.padded - layout.columns))
    slots = codes.view(layout.rows, layout.tiles, layout.slots, layout.width)
    shape = layout.tiles, layout.planes, layout.rows, layout.width
    words = torch.zeros(shape, dtype=torch.int16, device=codes.device)
    for slot in range(layout.slots):
        of_slot = slots[:, :, slot].transpose(0, 1).short()
        for plane, shift, mask, back in places(layout, slot):
            words[:, plane] |= ((of_slot >> back) & mask) << shift
    return words


def restore(words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The codes that `arrange` was given."""
    shape = layout.rows, layout.tiles, layout.slots, layout.width
    slots = torch.zeros(shape, dtype=torch.uint8, device=words.device)
    for slot in range(layout.slots):
        for plane, shift, mask, back in places(layout, slot):
            slots[:, :, slot] |= (((words[:, plane] >> shift) & mask) << back).to(torch.uint8).transpose(0, 1)
    return slots.view(layout.rows, layout.padded)[:, : layout.columns].contiguous()


def table(scale: torch.Tensor, zero: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`(groups + 1, rows)` int32 of `(rows or 1, groups)` scales and zero points: scale in the lower half, zero point in the upper.

    In the last row, of zeros, the kernel counts.
    """
    grids = zero.int() << 16 | scale.contiguous().view(torch.int16).int() & 0xFFFF
    grids = torch.nn.functional.pad(grids.t(), (0, 0, 0, layout.padded // layout.group + 1 - scale.shape[1]))
    return grids.expand(-1, layout.rows).contiguous()


def weights(words: torch.Tensor, grids: torch.Tensor, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """W' `(rows, columns)`: computed in float32, then rounded to `dtype`."""
    if backend.usable(words, grids):
        from helpers.kernels.fused import lowbit_matmul as fused

        return fused.weights(words, grids, layout, dtype)
    groups = torch.nn.functional.pad(restore(words, layout), (0, layout.padded - layout.columns))
    groups = groups.view(layout.rows, -1, layout.group).float()
    scale, zero = grids[:-1].short().view(torch.float16).float(), (grids[:-1] >> 16).float()
    found = (groups - zero.t().unsqueeze(-1)) * scale.t().unsqueeze(-1)
    return found.view(layout.rows, -1)[:, : layout.columns].to(dtype)


def matmul(
    x: torch.Tensor, words: torch.Tensor, grids: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`(M, columns)` times W'^T, plus the bias: `(M, rows)` in the type of x. Gradients go to x alone.

    The kernel takes up to `ROWS` rows in bfloat16 or float16, without gradients; else W' is rebuilt and multiplied.
    """
    plain = x.dtype == torch.float32 or len(x) > ROWS or (x.requires_grad and torch.is_grad_enabled())
    if plain or not backend.usable(x, words):
        bias = None if bias is None else bias.to(x)
        return torch.nn.functional.linear(x, weights(words, grids, layout, x.dtype), bias)
    from helpers.kernels.fused import lowbit_matmul as fused

    return fused.matmul(x, words, grids, layout, bias)
