"""What a low-bit layer computes from, and how: packed codes and the layer over them. PyTorch alone, nothing of the project."""

from helpers.kernels.linear import LowBitLinear
from helpers.kernels.packing import pack, unpack, words

__all__ = ["LowBitLinear", "pack", "unpack", "words"]
