"""Where the work runs, and what makes it repeatable there.

On a CPU one thread is used per process: sums then do not depend on how many cores are free, so the same seed gives the same
numbers on one machine, and two jobs side by side use two cores fully.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub
import torch
import transformers

from helpers import processes


def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What the device is called in a result: `cpu` or the GPU's own name; `2 x ...` of a run in two processes."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return name if processes.count() == 1 else f"{processes.count()} x {name}"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_everything(seed: int) -> torch.device:
    """Seed Python, NumPy and PyTorch, quiet the libraries, and give the device."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # the libraries' own, about settings of theirs
    transformers.set_seed(seed)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()  # it tells of each of its attempts to reach a hub
    return device()


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Inside, a GPU multiplies float32 matrices as TF32, some eight times as fast: factors of 10 bits of mantissa, float32 sums."""
    before = torch.get_float32_matmul_precision()
    try:
        if torch.cuda.is_available():  # on a CPU the setting may mean bfloat16
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
