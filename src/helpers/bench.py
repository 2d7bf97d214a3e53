"""Benchmarks: what low-bit work costs, measured in one process, each contender in turn so that a busy machine slows them all.

A row says `work`, `shape`, `unit`, `ours`, `peers` (name: value), `limit` (what ours must not pass, or None), `better` (lower or
higher), `device`, `versions` and `commit`. Values are medians over the repeats.
"""

import copy
import platform
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from helpers import models, project, sampling, tasks
from helpers.grading import pool, rewrites
from helpers.quant import Scheme, fake
from helpers.training import objective

ROLLOUT_LIMIT = 1.1  # times the full-precision rollout
GRADE_LIMIT = 60.0  # seconds for 12,480 replies
KD_LIMIT_GIB = 4.0  # for 8,192 tokens of Qwen3


def rollout(
    ref: str = "base-s", scheme: str = "w8pt-sym", replies: int = 128, tokens: int = 64, repeats: int = 9
) -> list[dict[str, Any]]:
    """Rollouts of a fake-quantized policy against the full-precision one: `replies` replies of exactly `tokens` tokens.

    Ours materializes the quantized weights once a rollout, as in training; the peer `quantized at every token` does not. Replies
    run to the limit, whatever they say, so that all contenders do equal work.
    """
    models.seed_everything(0)
    full, tokenizer = models.load(ref)
    low_bit = copy.deepcopy(full)
    fake.insert(low_bit, Scheme.parse(scheme))
    problems = tasks.load("arithmetic", split="train", n=replies, seed=0)
    ids = tokenizer.pad({"input_ids": sampling.prompt_ids(tokenizer, problems)}, return_tensors="pt").to(full.device)
    config = GenerationConfig(
        do_sample=True, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=full.generation_config.eos_token_id,
    )  # fmt: skip

    @torch.no_grad()
    def generate(model: torch.nn.Module) -> None:
        model.generate(**ids, generation_config=config)

    def materialized() -> None:
        with fake.materialized(low_bit):
            generate(low_bit)

    contenders = {
        "full precision": lambda: generate(full),
        "materialized": materialized,
        "quantized at every token": lambda: generate(low_bit),
    }
    seconds = timed(contenders, repeats)
    ours = seconds.pop("materialized")
    shape = f"{ref} at {scheme}, {replies} replies of {tokens} tokens"
    limit = ROLLOUT_LIMIT * seconds["full precision"]
    return [row("rollout of a fake-quantized policy", shape, "s a rollout", ours, seconds, limit, "lower")]


def kd(tokens: int = 8_192, vocabulary: int = 151_936, width: int = 1_024, repeats: int = 9) -> list[dict[str, Any]]:
    """The distillation loss and its gradients at a real vocabulary, in chunks against all logits at once; on a GPU memory as well.

    Hidden states are bfloat16 there, as in mixed-precision training. Value and gradients are compared before anything is timed.
    """
    device = models.seed_everything(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden, of_teacher = (torch.randn(tokens, width, device=device, dtype=kind).requires_grad_() for _ in range(2))
    heads = [torch.nn.Linear(width, vocabulary, bias=False, device=device, dtype=kind) for _ in range(2)]

    def plain() -> torch.Tensor:
        q, p = (head(h).float().log_softmax(-1) for head, h in zip(heads, (hidden, of_teacher.detach()), strict=True))
        return torch.nn.functional.kl_div(q, p.detach(), reduction="sum", log_target=True)

    def chunked() -> torch.Tensor:
        return objective.kd(hidden, heads[0], of_teacher.detach(), heads[1])

    def work(loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden.grad = heads[0].weight.grad = None
        value = loss() / tokens
        value.backward()
        return value.detach(), hidden.grad

    contenders = {"in chunks": chunked, "all logits at once": plain}
    memory, found = {}, {}
    for name, loss in contenders.items():
        (value, gradient), memory[name] = with_memory(lambda loss=loss: work(loss))
        found[name] = value, gradient.float().clone()
    (value, gradient), (theirs, reference) = found.values()
    error = max(float(abs(value - theirs) / theirs), float((gradient - reference).norm() / reference.norm()))
    seconds = timed({name: lambda loss=loss: work(loss) for name, loss in contenders.items()}, repeats)
    shape = f"{tokens:,} tokens, vocabulary {vocabulary:,}, width {width:,}, relative error {error:.1e}"
    rows = [row("KD loss and gradients", shape, "s", seconds.pop("in chunks"), seconds, None, "lower")]
    if device.type == "cuda":
        ours = memory.pop("in chunks")
        rows.append(row("KD loss and gradients", shape, "GiB beyond inputs", ours, memory, KD_LIMIT_GIB, "lower"))
    return rows


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


def timed(contenders: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each contender, after one call that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, work in contenders.items():
            start = perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                taken[name].append(perf_counter() - start)
    return {name: median(values) for name, values in taken.items()}


def row(
    work: str, shape: str, unit: str, ours: float, peers: dict[str, float], limit: float | None, better: str
) -> dict[str, Any]:
    """One measurement, with where it was made."""
    commit, dirty = project.commit()
    return {
        "work": work,
        "shape": shape,
        "unit": unit,
        "ours": ours,
        "peers": peers,
        "limit": limit,
        "better": better,
        "device": models.device_name(),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("torch", "transformers")},
        "commit": commit + ("+changes" if dirty else ""),
    }


def within(row: dict[str, Any]) -> bool:
    """Whether ours keeps its limit."""
    if row["limit"] is None:
        return True
    return row["ours"] <= row["limit"] if row["better"] == "lower" else row["ours"] >= row["limit"]


def as_text(row: dict[str, Any]) -> str:
    """A measurement for a reader: each contender, and how it stands to ours."""
    lines = [f"{row['work']}: {row['shape']}, {row['device']}"]
    for name, value in ({"ours": row["ours"]} | row["peers"]).items():
        lines.append(f"  {name:<26} {value:.4g} {row['unit']}   {row['ours'] / value:.3f} of it is ours")
    if row["limit"] is not None:
        lines.append(f"  {'limit':<26} {row['limit']:.4g} {row['unit']}   {'kept' if within(row) else 'not kept'}")
    return "\n".join(lines)


def grade(replies: int = 8, workers: int = 2, repeats: int = 9) -> list[dict[str, Any]]:
    """Grading `replies` ordinary replies to each problem of the papers' benchmarks, workers started each time.

    A reply is a few paragraphs and a boxed answer, which is the gold in one of the ways of `grading.rewrites`, in turn.
    """
    jobs = []
    for problem in tasks.load(tasks.PAPERS, "test", 10**6):
        found = rewrites.replies(problem.gold)
        for i in range(replies):
            text = "Let us see what follows from $a_1 + b_1 = 12$.\n\n" * 40
            jobs.append(
                (rf"<think>{text}</think>{text}So it is \boxed{{{found[i % len(found)][2]}}}.", problem.gold, "maths")
            )

    def work() -> None:
        with pool.Pool(workers) as found:
            found.map(jobs)

    seconds = timed({"ours": work}, repeats)["ours"]
    return [row("grading", f"{len(jobs):,} replies, {workers} workers", "s", seconds, {}, GRADE_LIMIT, "lower")]


BENCHMARKS = {"rollout": rollout, "kd": kd, "grade": grade}
