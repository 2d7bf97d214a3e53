"""Whether a Triton kernel can do a piece of work, or its PyTorch reference has to.

Each module of `kernels` holds the reference and decides; the kernel itself is in the module of the same name in `kernels.fused`,
which imports Triton and is itself imported only when it is used.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

SWITCH = "LOWBIT_KERNELS"  # environment variable: `torch` keeps to the references


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def usable(*tensors: torch.Tensor) -> bool:
    """Whether these tensors, all on one CUDA device, can go through a Triton kernel here."""
    return installed() and all(t.is_cuda for t in tensors) and os.environ.get(SWITCH, "") != "torch"
