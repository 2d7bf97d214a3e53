"""Benchmarks: what low-bit work costs, and what a user would pick instead, in the same process.

A module a work, whose `rows(..., repeats)` gives its measurements (see `measure`), at full size on a GPU and small on a CPU.
"""

import gc
import io
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch

from helpers.bench import decode, gptq, grade, grpo, kd, linear, qat, rollout
from helpers.bench.measure import as_metric, as_text
from helpers.errors import UserError
from helpers.sampling import engine
from helpers.staging import lock

BENCHMARKS = {
    "linear": linear.rows,
    "rollout": rollout.rows,
    "decode": decode.rows,
    "grpo": grpo.rows,
    "qat": qat.rows,
    "kd": kd.rows,
    "gptq": gptq.rows,
    "grade": grade.rows,
}

__all__ = ["BENCHMARKS", "as_metric", "as_text", "measured", "needs", "usual"]


def measured(work: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a work, measured while no other process of this project measures; what it kept on a GPU is freed for the next.

    What libraries print meanwhile is dropped: some of them draw a progress bar for every layer.

    Errors: `UserError` for an unknown name, and where a decoding step could not be captured, whose speed would be another's.
    """
    if work not in BENCHMARKS:
        raise UserError(f"work = {work!r} is unknown: choose one of {', '.join(BENCHMARKS)}.")
    alone = lock("bench", lambda: print("waiting for another measurement", file=sys.stderr))
    with alone, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("error", message=engine.NO_GRAPH)
        try:
            rows = BENCHMARKS[work](repeats=repeats)
        except UserWarning as found:
            if not str(found).startswith(engine.NO_GRAPH):
                raise
            raise UserError(f"{work} was not measured: {found}.") from found
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def usual() -> list[str]:
    """The works of this device: all but grading, which needs data, and on a CPU but the linear layers, whose kernels need a GPU."""
    left_out = {"grade"} if torch.cuda.is_available() else {"grade", "linear"}
    return [work for work in BENCHMARKS if work not in left_out]


def needs(device: str) -> None:
    """Raise `UserError` where this machine is not the `gpu` or `cpu` that was asked for; `any` is content with either."""
    here = "gpu" if torch.cuda.is_available() else "cpu"
    if device not in ("any", here):
        raise UserError(f"device = {device} cannot be measured here: this machine would measure its {here}.")
