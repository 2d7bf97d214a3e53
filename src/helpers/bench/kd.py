"""`lowbit bench kd`: the distillation loss and its gradients at a real vocabulary, against the plain loss of all logits at once."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from helpers import models
from helpers.bench import measure
from helpers.training import objective

TARGET_GIB = 4.0  # for 8,192 tokens of Qwen3
SHAPES = {  # 8 x 1,024 tokens of Qwen3-0.6B, and something for a CPU
    "cuda": {"tokens": 8_192, "vocabulary": 151_936, "width": 1_024},
    "cpu": {"tokens": 256, "vocabulary": 4_096, "width": 128},
}


def rows(repeats: int = 9, **shape: int) -> list[dict[str, Any]]:
    """The loss and its gradients at a shape of `SHAPES`, whose entries `shape` overrides; on a GPU in bfloat16, and memory as well.

    Value and gradients are compared before anything is timed. The limit is the time of the four matrix products alone.
    """
    device = models.seed_everything(0)
    tokens, vocabulary, width = (SHAPES[device.type] | shape).values()
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden, of_teacher = (torch.randn(tokens, width, device=device, dtype=kind) for _ in range(2))
    heads = [torch.nn.Linear(width, vocabulary, bias=False, device=device, dtype=kind) for _ in range(2)]
    hidden.requires_grad_()

    def plain() -> torch.Tensor:
        with torch.no_grad():
            p = heads[1](of_teacher).float().log_softmax(-1)
        q = heads[0](hidden).float().log_softmax(-1)
        return torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True) / tokens

    def in_chunks() -> torch.Tensor:
        return objective.kd(hidden, heads[0], of_teacher, heads[1]) / tokens

    def products() -> None:
        for h, t in zip(hidden.detach().split(2048), of_teacher.split(2048), strict=True):
            slopes = h @ heads[0].weight.detach().T
            t @ heads[1].weight.detach().T
            slopes @ heads[0].weight.detach(), slopes.T @ h

    def work(loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        hidden.grad = heads[0].weight.grad = None
        value = loss()
        value.backward()
        return value.detach(), hidden.grad, heads[0].weight.grad

    losses = {"ours": in_chunks, "all logits at once": plain} | liger(hidden, of_teacher, heads)
    memory, found = {}, {}
    for name, loss in losses.items():
        results, gib = measure.with_memory(lambda loss=loss: work(loss))
        memory[name], found[name] = [gib], [t.clone() for t in results]
    pairs = list(zip(found["ours"], found["all logits at once"], strict=True))
    error = max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)
    contenders = {name: lambda loss=loss: work(loss) for name, loss in losses.items()}
    times = measure.timed(contenders | {"products": products}, repeats)
    times = {name: [1e3 * s for s in taken] for name, taken in times.items()}
    limit = median(times.pop("products"))
    text = f"{tokens:,} tokens, vocabulary {vocabulary:,}, width {width:,}"
    target = median(times["all logits at once"]) if device.type == "cuda" else None
    rows = [measure.row("KD loss and gradients", text, "ms", times, "ours", target=target, limit=limit, error=error)]
    if device.type == "cuda":
        unit = "GiB beyond inputs"
        rows.append(measure.row("KD loss and gradients", text, unit, memory, "ours", target=TARGET_GIB, error=error))
    return rows


def liger(hidden: torch.Tensor, of_teacher: torch.Tensor, heads: list[torch.nn.Linear]) -> dict[str, Callable]:
    """Liger's loss of the same, where it is installed and there is a GPU; beta = 0 is the forward KL."""
    if not hidden.is_cuda:
        return {}
    try:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as Loss
    except ImportError:
        return {}
    weights = heads[0].weight, heads[1].weight.detach()
    return {
        "liger": lambda: Loss.apply(hidden, weights[0], of_teacher, weights[1], None, 0.0, -100, 1.0, None, None, None)
    }
