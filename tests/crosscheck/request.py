"""What a quantizer is asked for and what it answers, the same for all of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Weights = dict[str, torch.Tensor]
Answer = tuple[float, Weights]  # seconds, and the tensors that changed by their name in the plain checkpoint


@dataclass(frozen=True)
class Request:
    """What a peer is asked for; `settings` are its own."""

    peer: str
    model: str
    tokens: list[list[int]]
    bits: int
    group_size: int
    out: str
    settings: dict[str, Any] = field(default_factory=dict)


def full_precision(request: Request) -> torch.nn.Module:
    """The checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.float32).eval()


def linear_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that every quantizer takes: all linear ones but the output head."""
    return {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name}


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (rows, n) of a dense bit stream in int32 words (rows, n * bits / 32), least significant bit first."""
    stream = (words.to(torch.int64)[..., None] >> torch.arange(32)) & 1
    return (stream.reshape(len(words), -1, bits) << torch.arange(bits)).sum(-1)
