"""Made-up measurements of every kind, in the form of `bench.measure.row`, and finished runs that hold them."""

from pathlib import Path

import synthetic_runs
from helpers import records

BANDWIDTH = 4e12  # bytes a second, of the made-up GPU
N, K = 24576, 4096


def row(work, shape, unit, ours, device="Some GPU", target=None, better="lower", **more):
    reached = None if target is None else ours <= target if better == "lower" else ours >= target
    row = {"work": work, "shape": shape, "unit": unit, "ours": ours, "peers": {}, "limit": None, "target": target}
    row |= {"reached": reached, "better": better, "ratio": None, "error": 1e-3, "spread": {"ours": [ours, ours]}}
    row |= {"moved": None, "repeats": 9, "device": device, "versions": {"torch": "2.0"}, "commit": "c0ffee" * 7}
    return row | more


def linear(m: int, bits: int, ours: float, target: float | None = None):
    moved = {"ours": N * K * bits // 8, "bf16": 2 * N * K, "bitsandbytes NF4": N * K * 9 // 16}
    peers = {"bf16": 50.0 + m / 20, "bitsandbytes NF4": 46.0 + m}
    limit = moved["ours"] / BANDWIDTH * 1e6
    shape = f"{N:,} x {K:,}, w{bits}g128, {m} row{'s' * (m > 1)}"
    return row(
        "low-bit linear", shape, "us", ours, target=target, peers=peers, moved=moved, limit=limit, ratio=50 / ours
    )


def decode(size: str, precision: str, count: int, ours: float):
    shape = f"{size}, {precision}, {count} sequence{'s' * (count > 1)}, 128 new tokens"
    return row("decoding, micro models", shape, "tokens/s", ours, better="higher", limit=1e7)


def rows() -> list[dict]:
    """Of a GPU: one row misses its target."""
    found = [linear(m, bits, 4 * bits + m / 4, 17.0 if bits == 4 else None) for m in (1, 16) for bits in (4, 2)]
    rollout = {"unit": "tokens/s", "better": "higher", "limit": 2e5}
    found += [
        row("rollout", "Qwen3-0.6B shape, 64 prompts of 64 tokens, 128 new", ours=20_613.0, target=20_000.0,
            peers={"transformers generate": 868.0}, **rollout),
        row("rollout, fake-quantized", "Qwen3-0.6B shape, 64 prompts of 64 tokens, 128 new, w4g128", ours=20_000.0,
            peers={"bfloat16": 20_613.0}, ratio=0.97, **rollout),
        row("rollout", "Qwen3-8B shape, 64 prompts of 64 tokens, 64 new, bfloat16", ours=4_000.0, **rollout),
        row("rollout, packed", "Qwen3-8B shape, 64 prompts of 64 tokens, 64 new, w4g128", ours=9_000.0, ratio=2.25, **rollout),
        row("QAT step", "8 x 1024 tokens, w4g128, fixed grids", "ms", 160.0, target=164.0, peers={"plain": 156.0}),
        row("GRPO step", "Qwen3-0.6B shape, 8 prompts of 8 replies", "s", 2.0, peers={"TRL with generate": 10.0}, ratio=5.0),
    ]  # fmt: skip
    found += [
        row(
            f"GRPO step: {part}",
            "Qwen3-0.6B shape, 8 prompts of 8 replies",
            "s",
            ours,
            peers={"TRL with generate": theirs},
        )
        for part, ours, theirs in (("rollout", 1.0, 9.0), ("grading", 0.1, 0.1), ("training", 0.9, 0.9))
    ]
    for count in (1, 64):
        for size, speed in (("xs", 4000.0), ("s", 3000.0), ("m", 2900.0), ("l", 1500.0)):
            for bits, share in ((8, 0.9), (4, 0.8), (3, 0.6), (2, 0.8)):
                found.append(decode(size, f"w{bits}g64", count, speed * share * count**0.9))
            found.append(decode(size, "bf16", count, speed * count**0.9))
    return found


def run(home: Path, name: str, rows: list[dict], started: str = "2026-01-02T03:04:05+00:00") -> str:
    """A finished speed run that holds these rows; gives its id."""
    run_id = synthetic_runs.run(home, name, "speed", None, "", 0, study="speed")["run_id"]
    path = home / "runs" / "speed" / "speed" / run_id / "result.json"
    metrics = [
        records.Metric(metric=r["work"], value=r["ours"], n=9, task="speed", benchmark=r["shape"], detail=r) for r in rows
    ]  # fmt: skip
    changed = records.read(path).model_copy(update={"metrics": metrics, "started": started})
    records.write_json(path, changed.model_dump(mode="json"))
    return run_id
