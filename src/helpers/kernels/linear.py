"""A linear layer that computes from packed low-bit weights.

    y = x W'^T + b,    W' = s (q - z)

q are codes of `bits` bits, packed; s a float16 scale and z a zero point of `bits` bits for each grid, packed too. Without zero
points z is the middle code, 2^(bits-1). No copy of W' outlives a call. The reference in plain PyTorch rebuilds W' in float32, then
multiplies in the type of x. On a GPU `lowbit_matmul` does it: the first call arranges the codes as its kernel reads them, in place
of the packed ones. What is saved, moved to another device or read with `unpacked` is always the packed stream, bit for bit.
"""

import torch
from torch import nn

from helpers.kernels import backend, lowbit_matmul
from helpers.kernels.packing import pack, unpack, words


class LowBitLinear(nn.Module):
    """`in_features` inputs (columns), `out_features` outputs (rows); `grids` a row, or one for the whole matrix (`per_tensor`).

    `latent`: the weight that the codes were rounded from, where it was trained and is to be kept; nothing computes with it.
    `table`: the grids as the kernel reads them, 4 bytes each; while it is there, `codes` are arranged for the kernel.
    """

    latent: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        grids: int = 1,
        symmetric: bool = False,
        per_tensor: bool = False,
        bias: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.grids, self.symmetric, self.per_tensor = bits, grids, symmetric, per_tensor
        rows = 1 if per_tensor else out_features
        packed = (out_features, words(in_features, bits))
        self.register_buffer("codes", torch.zeros(packed, dtype=torch.int32, device=device))
        self.register_buffer("scale", torch.ones(rows, grids, dtype=torch.float16, device=device))
        zero = None if symmetric else torch.zeros(1, words(rows * grids, bits), dtype=torch.int32, device=device)
        self.register_buffer("zero", zero)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False) if bias else None

    @classmethod
    def pack(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        bits: int,
        bias: torch.Tensor | None = None,
    ) -> "LowBitLinear":
        """The layer of `(rows, columns)` codes with `(rows, grids)` or `(1, 1)` scales and zero points (None: the middle code)."""
        rows, columns = codes.shape
        layer = cls(
            columns, rows, bits, scale.shape[1], zero is None, scale.shape[0] < rows, bias is not None, codes.device
        )
        layer.codes, layer.scale = pack(codes, bits), scale.half()
        if zero is not None:
            layer.zero = pack(zero.reshape(1, -1), bits)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        return layer

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes `(rows, columns)` uint8, scale float16, zero points uint8), both `(rows or 1, grids)`."""
        if self.table is None:
            codes = unpack(self.codes, self.bits, self.in_features)
        else:
            codes = lowbit_matmul.restore(self.codes, self.layout)
        if self.zero is None:
            return codes, self.scale, torch.full_like(self.scale, 2 ** (self.bits - 1)).to(torch.uint8)
        return codes, self.scale, unpack(self.zero, self.bits, self.scale.numel()).view(self.scale.shape)

    def dequantize(self) -> torch.Tensor:
        """W' `(out_features, in_features)` in float32."""
        codes, scale, zero = self.unpacked()
        grouped = codes.view(self.out_features, self.grids, -1).float()
        return ((grouped - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)).view(codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points as they lie in the checkpoint; the kernel's have `table` and padding besides."""
        codes = 4 * self.out_features * words(self.in_features, self.bits)
        return codes + sum(b.nbytes for b in (self.scale, self.zero) if b is not None)

    @property
    def layout(self) -> "lowbit_matmul.Layout | None":
        """How the kernel's codes are arranged; None where this layer's shape allows no such layout."""
        return lowbit_matmul.Layout.of(self.bits, self.out_features, self.in_features, self.grids)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, in the type of x."""
        if self.table is None and backend.usable(x, self.codes) and not torch.cuda.is_current_stream_capturing():
            self.arrange()
        if self.table is None:
            return nn.functional.linear(
                x, self.dequantize().to(x.dtype), None if self.bias is None else self.bias.to(x)
            )
        rows = x.reshape(-1, self.in_features)
        y = lowbit_matmul.matmul(rows, self.codes, self.table, self.layout, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def arrange(self) -> None:
        """Arrange the codes for the kernel, where the layer's shape allows it."""
        if self.table is None and self.layout is not None:
            codes, scale, zero = self.unpacked()
            self.table = lowbit_matmul.table(scale, zero, self.layout)
            self.codes = lowbit_matmul.arrange(codes, self.layout)

    def restore(self) -> None:
        """Pack the codes again."""
        if self.table is not None:
            self.codes, self.table = pack(self.unpacked()[0], self.bits), None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.table is not None:
            destination[prefix + "codes"] = pack(self.unpacked()[0], self.bits)

    def _load_from_state_dict(self, *args, **kwargs):
        self.restore()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn, recurse=True):
        """Move between devices, but never let `.to(bfloat16)` or `.half()` round a scale: float16 is what the codes belong to."""
        self.restore()
        scale = self.scale
        super()._apply(fn, recurse)
        on_meta = scale.is_meta  # there is no value to keep then
        self.scale = self.scale.half() if on_meta else scale.to(self.codes.device)
        return self

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, grids={self.grids}, {kind}"
