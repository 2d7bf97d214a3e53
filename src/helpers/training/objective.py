"""What the student is trained to do, at each token of a reply, without ever holding all tokens times the whole vocabulary.

p is what the teacher makes of the next token, q what the student makes of it, both at temperature T (p, q ~ softmax(logits / T)):

    SFT            - log q(o_t)                               o_t is the token that stands there, T = 1
    forward KL     sum over v of p(v) (log p(v) - log q(v))   q must cover all that p does
    reverse KL     sum over v of q(v) (log q(v) - log p(v))   q must do nothing that p would not
    mixture        (1 - r) forward + r reverse                r is the share of the reverse

KL is times T^2, so that gradients keep their size (Hinton et al., 1503.02531); mixture: as in BitDistiller (2402.10631). The last
hidden states h `(N, width)` are small; logits `h W^T` are `(N, vocabulary)`, 5 GB in float32 for 8,192 tokens of Qwen3, and a
plain KL holds half a dozen such arrays. So tokens go through the head in chunks, and the gradients of h and W are found as soon as
a chunk's logits are there, in the forward pass, from the slopes that `kernels.kl` writes in their place (as in Liger, 2410.10989,
and Cut Cross-Entropy, 2411.09009); the backward pass multiplies them by the loss's own. Nothing is computed twice, memory is that
of a chunk, and value and gradients are the plain ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.kernels.kl import cross_entropy_, kl_
from helpers.sampling.decoder import hooked

LOGITS = 2**26, 2**29  # numbers in the logits of a chunk, on a CPU (256 MB in float32) and on a GPU (1 GB in bfloat16)


def sft(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of -log q: `hidden` `(N, width)` of the positions that predict `targets` `(N,)`; nats."""
    return in_chunks(cross_entropy_, hidden, head, targets)


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

    def loss_(logits: torch.Tensor, of_teacher: torch.Tensor) -> torch.Tensor:
        return kl_(logits, teacher_head(of_teacher), reverse, temperature)

    return in_chunks(loss_, hidden, head, teacher_hidden)


def in_chunks(
    loss_: Callable[..., torch.Tensor], hidden: torch.Tensor, head: nn.Module, others: torch.Tensor
) -> torch.Tensor:
    """The sum over rows of `loss_`, which gives the value of each row of logits and leaves slopes in their place."""
    inputs = [hidden, *head.parameters()]
    if not torch.is_grad_enabled():
        inputs = [t.detach() for t in inputs]
    return InForward.apply(loss_, head, others, *inputs)


class InForward(torch.autograd.Function):
    """The gradients of hidden states and of the head's parameters, found in the forward pass, one chunk after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_: Callable[..., torch.Tensor],
        head: nn.Module,
        others: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[3:]
        inputs = (hidden, *parameters)
        sums = [torch.zeros_like(t, dtype=torch.float32) if w else None for t, w in zip(inputs, wanted, strict=True)]
        of_hidden, *of_parameters = sums
        total = torch.zeros((), device=hidden.device)
        chunks = -(-len(hidden) * head.out_features // LOGITS[hidden.is_cuda]) or 1
        size = max(-(-len(hidden) // chunks), 1)  # also of no token
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            one = of_hidden[rows] if wanted[0] else None
            total += _step(loss_, head, hidden[rows], others[rows], parameters, [one, *of_parameters])
        ctx.kinds = [t.dtype for t in inputs]
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = zip(ctx.saved_tensors, ctx.kinds, strict=True)
        scaled = (None if s is None else torch.mul(s, gradient, out=torch.empty_like(s, dtype=k)) for s, k in found)
        return None, None, None, *scaled


def _step(
    loss_: Callable[..., torch.Tensor],
    head: nn.Module,
    h: torch.Tensor,
    others: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    sums: list[torch.Tensor | None],
) -> torch.Tensor:
    """The loss of a chunk; its gradients of `h` and `parameters` are added to the `sums` that are there."""
    plain = type(head) is nn.Linear and not hooked(head) and h.dtype == head.weight.dtype
    if plain and not torch.is_autocast_enabled(h.device.type):
        slopes = head(h)
        value = loss_(slopes, others).sum()
        of_h, of_weight, *of_bias = sums
        if of_h is not None:
            _add_product(of_h, slopes, head.weight)
        if of_weight is not None:
            _add_product(of_weight, slopes.T, h)
        if of_bias and of_bias[0] is not None:
            of_bias[0] += slopes.sum(0, dtype=torch.float32)
        return value
    with torch.enable_grad():
        h = h.detach().requires_grad_(sums[0] is not None)
        logits = head(h)
    slopes = logits.detach().clone()  # the head may keep its logits for its own backward pass
    value = loss_(slopes, others).sum()
    found = [(t, s) for t, s in zip((h, *parameters), sums, strict=True) if s is not None]
    if found:
        slopes = torch.autograd.grad(logits, [t for t, _ in found], slopes, allow_unused=True)
        for (_, s), g in zip(found, slopes, strict=True):
            if g is not None:
                s += g
    return value


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total` += a b, summed in float32, which is the type of `total`."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
