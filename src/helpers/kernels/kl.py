"""What a row of logits loses against a teacher's or against a token, and its slope, in one go over the vocabulary.

q ~ softmax(student / T), p ~ softmax(teacher / T); the slopes are those at the student's logits:

    forward KL       T^2 sum p (log p - log q)        slope  T (q - p)
    reverse KL       T^2 sum q (log q - log p)        slope  T q (log q - log p - reverse KL / T^2)
    cross-entropy    - log q(o)                       slope  q - 1 at the token o, q elsewhere

Slopes take the place of the logits, which nobody needs any more: a chunk of logits is the only array of that size.
"""

import torch

from helpers.kernels import backend


def kl_(logits: torch.Tensor, of_teacher: torch.Tensor, reverse: float, temperature: float) -> torch.Tensor:
    """(1 - r) forward + r reverse KL of each row, `(N,)` float32 nats times T^2; `logits` `(N, vocabulary)` become its slopes.

    `of_teacher` are the teacher's logits, of the same shape. Works on whole rows: both are contiguous.
    """
    if backend.usable(logits, of_teacher):
        from helpers.kernels.fused import kl

        return kl.kl_(logits, of_teacher, reverse, temperature)
    log_q, log_p = (torch.log_softmax(x.float() / temperature, dim=-1) for x in (logits, of_teacher))
    q, gap = log_q.exp(), log_q - log_p
    value, slope = 0.0, 0.0
    if reverse < 1:
        p = log_p.exp_()
        value = value - (1 - reverse) * torch.linalg.vecdot(p, gap)
        slope = slope + (1 - reverse) * (q - p)
    if reverse > 0:
        backward = torch.linalg.vecdot(q, gap)
        value = value + reverse * backward
        slope = slope + reverse * q * (gap - backward.unsqueeze(-1))
    logits.copy_(temperature * slope)
    return temperature**2 * value


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """- log q of each row's target, `(N,)` float32 nats; `logits` `(N, vocabulary)` become its slopes. `targets` `(N,)` int64."""
    if backend.usable(logits, targets):
        from helpers.kernels.fused import kl

        return kl.cross_entropy_(logits, targets)
    log_q, targets = torch.log_softmax(logits.float(), dim=-1), targets.unsqueeze(-1)
    slope = log_q.exp()
    logits.copy_(slope.scatter_add_(-1, targets, torch.full_like(slope[:, :1], -1.0)))
    return -log_q.gather(-1, targets).squeeze(-1)
