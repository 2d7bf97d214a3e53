"""`lowbit bench linear`: the product of a few rows with packed weights, at the shapes of an 8B model, weights not in the cache."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from helpers import models
from helpers.bench import measure
from helpers.kernels import LowBitLinear

GROUP = 128
GATE_UP, QKV, DOWN = (24_576, 4_096), (6_144, 4_096), (4_096, 12_288)  # rows, columns
CASES = [  # rows and columns of the weight, bits, rows of x
    *((GATE_UP, 4, m) for m in (1, 16, 64, 128)),
    *((GATE_UP, bits, m) for bits in (3, 2, 8) for m in (1, 16)),
    (QKV, 4, 1),
    (DOWN, 4, 1),
]
TARGETS = {(GATE_UP, 4, 1): 17.0, (GATE_UP, 4, 16): 25.0, (GATE_UP, 4, 128): 62.0}  # microseconds on an H200
SHARE = 0.6  # of the limit that other widths are to reach with one row
CACHE = 400e6  # bytes that all copies together take at least: several times an L2 cache


def rows(shrink: int | None = None, repeats: int = 9) -> list[dict[str, Any]]:
    """A measurement for each of `CASES`, its matrix `shrink` times smaller each way (on a CPU 64 where nothing is said)."""
    on_gpu = models.seed_everything(0).type == "cuda"
    shrink = shrink or (1 if on_gpu else 64)
    speed = measure.bandwidth()
    return [case(shape, bits, m, shrink, speed, repeats) for shape, bits, m in CASES]


def case(shape: tuple[int, int], bits: int, m: int, shrink: int, speed: float, repeats: int) -> dict[str, Any]:
    """One of `CASES`, on a device that moves `speed` bytes per second."""
    device = models.device()
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    n, k = (max(side // shrink, GROUP) for side in shape)
    codes = torch.randint(0, 2**bits, (n, k), device=device).to(torch.uint8)
    grids = n, k // GROUP
    scale = (torch.rand(grids, device=device) + 0.5) / 2**bits
    layer = LowBitLinear.pack(codes, scale, torch.full(grids, 2 ** (bits - 1), device=device).to(torch.uint8), bits)
    x = torch.randn(m, k, device=device, dtype=kind)
    weight = layer.dequantize()
    exact = x.float() @ weight.t()
    beside = x.nbytes + exact.numel() * x.itemsize
    copies = max(3, -int(-CACHE // layer.nbytes)) if device.type == "cuda" else 1
    contenders = {"ours": [LowBitLinear.pack(codes, *layer.unpacked()[1:], bits) for _ in range(copies)]}
    contenders["bf16" if kind == torch.bfloat16 else "fp32"] = [plain(weight.to(kind)) for _ in range(copies)]
    if device.type == "cuda" and bits == 4:
        contenders |= peers(weight.to(kind), copies)
    with torch.no_grad():
        error = float((contenders["ours"][0](x).float() - exact).norm() / exact.norm())
        calls = {name: (lambda copy, found=found: found[copy](x)) for name, found in contenders.items()}
        if device.type == "cuda":
            seconds = measure.cold(calls, copies, repeats)
        else:
            seconds = measure.timed({name: lambda call=call: call(0) for name, call in calls.items()}, repeats)
    weights = {"ours": layer.nbytes, "bitsandbytes NF4": n * k * 9 // 16, "torchao int4": n * k * 17 // 32}
    moved = {name: weights.get(name, n * k * kind.itemsize) + beside for name in contenders}
    limit = 1e6 * moved["ours"] / speed
    target = TARGETS.get((shape, bits, m), limit / SHARE if m == 1 else None) if shrink == 1 else None
    values = {name: [1e6 * s for s in taken] for name, taken in seconds.items()}
    text = f"{n:,} x {k:,}, w{bits}g{GROUP}, {m} row{'s' if m > 1 else ''}"
    return measure.row(
        "low-bit linear", text, "us", values, "ours", limit=limit, target=target, error=error, moved=moved
    )


def plain(weight: torch.Tensor) -> nn.Linear:
    """The layer in full precision."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def peers(weight: torch.Tensor, copies: int) -> dict[str, list[Callable]]:
    """The same weight in 4 bits, rounded by the packages that a user would pick, where they are installed."""
    found = {}
    if find_spec("bitsandbytes"):
        import bitsandbytes as bnb

        host, (n, k) = weight.cpu(), weight.shape

        def nf4() -> nn.Module:
            layer = bnb.nn.Linear4bit(k, n, False, weight.dtype, quant_type="nf4", device="meta")
            layer.weight = bnb.nn.Params4bit(host, requires_grad=False, quant_type="nf4")
            return layer.to(weight.device)

        found["bitsandbytes NF4"] = [nf4() for _ in range(copies)]
    if find_spec("torchao"):
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        packing = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
        found["torchao int4"] = [plain(weight) for _ in range(copies)]
        for layer in found["torchao int4"]:
            quantize_(layer, packing)
    return found
