"""`lowbit bench kd`: the distillation loss and its gradients at a real vocabulary, against the plain loss of all logits at once."""

from collections.abc import Callable
from typing import Any

import torch

from helpers import models
from helpers.bench import measure
from helpers.training import objective

TARGET_GIB = 4.0  # for 8,192 tokens of Qwen3


def rows(tokens: int = 8_192, vocabulary: int = 151_936, width: int = 1_024, repeats: int = 9) -> list[dict[str, Any]]:
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
        (value, gradient), memory[name] = measure.with_memory(lambda loss=loss: work(loss))
        found[name] = value, gradient.float().clone()
    (value, gradient), (theirs, reference) = found.values()
    error = max(float(abs(value - theirs) / theirs), float((gradient - reference).norm() / reference.norm()))
    seconds = measure.timed({name: lambda loss=loss: work(loss) for name, loss in contenders.items()}, repeats)
    shape = f"{tokens:,} tokens, vocabulary {vocabulary:,}, width {width:,}"
    rows = [measure.row("KD loss and gradients", shape, "s", seconds, "in chunks", error=error)]
    if device.type == "cuda":
        memory = {name: [value] for name, value in memory.items()}
        unit = "GiB beyond inputs"
        rows.append(
            measure.row("KD loss and gradients", shape, unit, memory, "in chunks", target=TARGET_GIB, error=error)
        )
    return rows
