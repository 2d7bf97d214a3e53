"""What the student is trained to do, at each token of a reply, without ever holding all tokens times the whole vocabulary.

p is what the teacher makes of the next token, q what the student makes of it, both at temperature T (p, q ~ softmax(logits / T)):

    SFT            - log q(o_t)                               o_t is the token that stands there, T = 1
    forward KL     sum over v of p(v) (log p(v) - log q(v))   q must cover all that p does
    reverse KL     sum over v of q(v) (log q(v) - log p(v))   q must do nothing that p would not
    mixture        (1 - r) forward + r reverse                r is the share of the reverse

KL is times T^2, so that gradients keep their size (Hinton et al., 1503.02531); mixture: as in BitDistiller (2402.10631). The last
hidden states h `(N, width)` are small; logits `h W^T` are `(N, vocabulary)`, 5 GB in float32 for 8,192 tokens of Qwen3, and a
plain KL holds half a dozen such arrays. So tokens go through the head in chunks whose logits are computed again in the backward
pass (Chen et al., 1604.06174): value and gradients are the plain ones, memory is that of a chunk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGITS = 2**26  # numbers in the logits of a chunk: 256 MB


def sft(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of -log q: `hidden` `(N, width)` of the positions that predict `targets` `(N,)`; nats."""

    def loss(h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(h).float(), target, reduction="sum")

    return in_chunks(loss, head, hidden, targets)


def kd(
    hidden: torch.Tensor,
    head: nn.Module,
    teacher_hidden: torch.Tensor,
    teacher_head: nn.Module,
    reverse: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Sum over tokens of the KL between teacher and student, in nats times T^2.

    `hidden` and `teacher_hidden` are `(N, own width)` of the same N positions; both heads give the same vocabulary. `reverse` is
    the share of the reverse KL. No gradient reaches the teacher.
    """

    def loss(h: torch.Tensor, of_teacher: torch.Tensor) -> torch.Tensor:
        q = F.log_softmax(head(h).float() / temperature, dim=-1)
        with torch.no_grad():
            p = F.log_softmax(teacher_head(of_teacher).float() / temperature, dim=-1)
        forward = F.kl_div(q, p, reduction="sum", log_target=True) if reverse < 1 else 0.0
        backward = F.kl_div(p, q, reduction="sum", log_target=True) if reverse > 0 else 0.0
        return temperature**2 * ((1 - reverse) * forward + reverse * backward)

    return in_chunks(loss, head, hidden, teacher_hidden)


def in_chunks(loss: Callable[..., torch.Tensor], head: nn.Module, *tensors: torch.Tensor) -> torch.Tensor:
    """The sum of `loss` over chunks of the tensors' rows, so few that a chunk's logits are at most `LOGITS` numbers."""
    size = max(1, LOGITS // head.out_features)
    if len(tensors[0]) <= size:
        return loss(*tensors)
    chunks = zip(*(t.split(size) for t in tensors), strict=True)
    return sum(checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks)
