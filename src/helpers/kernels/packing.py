"""Bit packing: codes of 2, 3, 4 or 8 bits in 32-bit words, with nothing left between them.

A row of codes is one stream of bits, least significant bit first: code i occupies bits `i * bits` to `(i + 1) * bits - 1`, and a
3-bit code may lie across two words. So 32 codes take exactly `bits` words, and 8 codes exactly `bits` bytes, which is how they are
read here. Each row ends at a whole word. The same stream is used by GPTQ checkpoints.
"""

import torch
from torch.nn.functional import pad

WIDTHS = (2, 3, 4, 8)


def words(columns: int, bits: int) -> int:
    """32-bit words that a row of `columns` codes takes."""
    return -(-columns * bits // 32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack `(rows, columns)` codes, each below `2**bits`, into `(rows, words(columns, bits))` int32.

    Errors: `ValueError` for another width, a shape that is not a matrix, or a code that does not fit.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits = {bits} cannot be packed: choose one of {', '.join(map(str, WIDTHS))}.")
    if codes.ndim != 2 or not codes.numel():
        raise ValueError(f"codes of shape {tuple(codes.shape)} cannot be packed: they must be a matrix.")
    if not 0 <= int(codes.min()) <= int(codes.max()) < 2**bits:
        raise ValueError(f"a code from {int(codes.min())} to {int(codes.max())} does not fit into {bits} bits.")
    rows, columns = codes.shape
    eights = pad(codes.long(), (0, -columns % 32)).view(rows, -(-columns // 32) * 4, 8)  # 8 codes are `bits` bytes
    shifts = bits * torch.arange(8, device=codes.device)
    streams = (eights << shifts).sum(-1, keepdim=True)  # distinct bits: their sum is their union
    octets = (streams >> (8 * torch.arange(bits, device=codes.device))) & 0xFF
    whole = octets.to(torch.uint8).flatten(1)[:, : 4 * words(columns, bits)]
    return whole.flatten().view(torch.int32).view(rows, -1)


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The `(rows, columns)` uint8 codes in `packed`, `(rows, words(columns, bits))` int32."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :columns]
    if bits == 3:  # 8 codes in 3 bytes
        a, b, c = pad(octets, (0, -octets.shape[1] % 3)).unflatten(1, (-1, 3)).int().unbind(-1)
        streams, each = a | b << 8 | c << 16, 8
    else:  # whole codes in each byte
        streams, each = octets, 8 // bits
    shifts = bits * torch.arange(each, device=packed.device, dtype=streams.dtype)
    codes = (streams.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :columns].to(torch.uint8)
