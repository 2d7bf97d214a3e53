"""How a measurement is made: all contenders in one process, those of `timed` and `cold` each in turn, so that a busy machine slows
them all alike. What takes many seconds a call is measured one contender after another, and peers once (their modules say so).

A row says `work`, `shape`, `unit`, `ours`, `peers` (name: value), `limit` (what the hardware allows: bytes over bandwidth, in the
row's unit, or None), `target` (what ours must reach, or None) and whether it is `reached`, `better` (lower or higher), `ratio` (how
many times better ours is than the best peer), `error` (ours against the reference: the work's module says which) and `error_unit`
(empty: relative), `spread` (name: lower and upper quartile), `moved` (name: bytes that a call has to read and write at least, or
None), `repeats` (values behind the median of ours), `left_out` (name: why that peer does not run here), `device`, `versions` and
`commit`. Values are medians. What is compared is checked for correctness before it is timed.
"""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from helpers import models, project

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "bitsandbytes", "torchao", "gptqmodel", "liger_kernel")
Times = dict[str, list[float]]  # seconds of each contender


def now() -> float:
    """Seconds on a clock that is read when a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()


def once(work: Callable[[], Any]) -> float:
    """Seconds of one call, host and device."""
    start = now()
    work()
    return now() - start


def timed(contenders: dict[str, Callable[[], Any]], repeats: int) -> Times:
    """Seconds of each contender's calls, host and device, after one call that does not count."""
    taken: Times = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, work in contenders.items():
            seconds = once(work)
            if repeat:
                taken[name].append(seconds)
    return taken


def cold(contenders: dict[str, Callable[[int], Any]], copies: int, repeats: int) -> Times:
    """Seconds on the GPU of one call, weights not in its cache: each contender's calls for copies 0, 1, ... are one CUDA graph.

    `copies` must be enough that their weights together are several times the L2 cache.
    """
    graphs = {}
    for name, work in contenders.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for copy in (*range(copies), 0):  # compile, tune, and let each copy arrange its weights
                work(copy)
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for copy in range(copies):
                work(copy)
    taken: Times = {name: [] for name in contenders}
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat > 1:
                taken[name].append(start.elapsed_time(end) / 1e3 / copies)
    return taken


def bandwidth() -> float:
    """Bytes per second that a copy on the device reads and writes, together."""
    source = torch.empty(2**31 if torch.cuda.is_available() else 2**26, dtype=torch.uint8, device=models.device())
    goal = torch.empty_like(source)
    seconds = median(timed({"copy": lambda: goal.copy_(source)}, 9)["copy"])
    return 2 * source.nbytes / seconds


def with_memory(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and how many GiB of a GPU it took at most beyond what was in use before; 0 without a GPU."""
    if not torch.cuda.is_available():
        return work(), 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = work()
    torch.cuda.synchronize()
    return found, (torch.cuda.max_memory_allocated() - before) / 2**30


def row(
    work: str,
    shape: str,
    unit: str,
    values: dict[str, list[float]],
    ours: str,
    *,
    better: str = "lower",
    limit: float | None = None,
    target: float | None = None,
    error: float | None = None,
    error_unit: str = "",
    moved: dict[str, int] | None = None,
    left_out: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One measurement, with where it was made: `values` of each contender in `unit`, of which `ours` is one (of `moved` too)."""
    middle = {name: median(found) for name, found in values.items()}
    spread = {
        n: [q for i, q in enumerate(quantiles(v, n=4)) if i != 1] if len(v) > 1 else [v[0]] * 2
        for n, v in values.items()
    }
    own = middle.pop(ours)
    best = (min if better == "lower" else max)(middle.values(), default=None)
    ratio = None if best is None else best / own if better == "lower" else own / best
    reached = None if target is None else own <= target if better == "lower" else own >= target
    commit, dirty = project.commit()
    return {
        "work": work,
        "shape": shape,
        "unit": unit,
        "ours": own,
        "peers": middle,
        "limit": limit,
        "target": target,
        "reached": reached,
        "better": better,
        "ratio": ratio,
        "error": error,
        "error_unit": error_unit,
        "spread": {"ours" if name == ours else name: found for name, found in spread.items()},
        "moved": moved and {"ours" if name == ours else name: found for name, found in moved.items()},
        "repeats": len(values[ours]),
        "left_out": left_out or {},
        "device": models.device_name(),
        "versions": {"python": platform.python_version()} | installed(),
        "commit": commit + ("+changes" if dirty else ""),
    }


def installed() -> dict[str, str]:
    """The version of each package of `PACKAGES` that is there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def as_metric(row: dict[str, Any]) -> dict[str, Any]:
    """A measurement as a metric of a run, the whole row in its detail."""
    where = {"task": "speed", "benchmark": row["shape"]}
    return {"metric": row["work"], "value": row["ours"], "n": row["repeats"], **where, "detail": row}


def as_text(row: dict[str, Any]) -> str:
    """A measurement for a reader: each contender, and how it stands to ours."""
    error = "" if row["error"] is None else f", error {row['error']:.1e} {row['error_unit'] or '(relative)'}"
    lines = [f"{row['work']}: {row['shape']}, {row['device']}{error}"]
    for name, value in ({"ours": row["ours"]} | row["peers"]).items():
        low, high = row["spread"][name]
        lines.append(
            f"  {name:<26} {value:.4g} {row['unit']} ({low:.4g} to {high:.4g})   {row['ours'] / value:.3f} of it is ours"
        )
    lines += [f"  {name:<26} does not run here: {reason}" for name, reason in row["left_out"].items()]
    if row["limit"] is not None:
        lines.append(f"  {'limit':<26} {row['limit']:.4g} {row['unit']}   {row['limit'] / row['ours']:.2f} of ours")
    if row["target"] is not None:
        end = "reached" if row["reached"] else "not reached"
        lines.append(f"  {'target':<26} {row['target']:.4g} {row['unit']}   {end}")
    return "\n".join(lines)
