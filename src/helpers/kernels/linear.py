"""A linear layer that computes from packed low-bit weights.

    y = x W'^T + b,    W' = s (q - z)

q are codes of `bits` bits, packed; s a float16 scale and z a zero point of `bits` bits for each grid, packed too. Without zero
points z is the middle code, 2^(bits-1). No copy of W' outlives a call. This is the reference in plain PyTorch: it rebuilds W'
in float32, then multiplies in the type of x.
"""

import torch
from torch import nn

from helpers.kernels.packing import pack, unpack, words


class LowBitLinear(nn.Module):
    """`in_features` inputs (columns), `out_features` outputs (rows); `grids` a row, or one for the whole matrix (`per_tensor`).

    `latent`: the weight that the codes were rounded from, where it was trained and is to be kept; nothing computes with it.
    """

    latent: torch.Tensor | None = None

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
        codes = unpack(self.codes, self.bits, self.in_features)
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
        """Bytes of codes, scales and zero points, as they lie in memory and in the checkpoint."""
        return sum(b.nbytes for b in (self.codes, self.scale, self.zero) if b is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, in the type of x."""
        return nn.functional.linear(x, self.dequantize().to(x.dtype), None if self.bias is None else self.bias.to(x))

    def _apply(self, fn, recurse=True):
        """Move between devices, but never let `.to(bfloat16)` or `.half()` round a scale: float16 is what the codes belong to."""
        scale = self.scale
        super()._apply(fn, recurse)
        on_meta = scale.is_meta  # there is no value to keep then
        self.scale = self.scale.half() if on_meta else scale.to(self.codes.device)
        return self

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, grids={self.grids}, {kind}"
