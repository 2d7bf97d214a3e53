"""The kernels of `kernels.kl`: a program has a row and goes over it twice.

The first pass finds the log-sum-exp, with the largest logit so far kept apart (online softmax, Milakov and Gimelshein, 1805.02867),
and for the reverse KL its value, which each of its slopes needs. The second finds probabilities, values and slopes. A row of both
logits is about 600 KB at 151,936 words, so much of the second pass is read from the L2 cache.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


@triton.jit
def _larger(largest, x):
    """(the largest so far, what sums of exp must be multiplied by, exp of `x` over the largest), of a block of logits."""
    new = tl.maximum(largest, tl.max(x, axis=0))
    return new, tl.exp(largest - new), tl.exp(x - new)


@triton.jit
def _kl(
    logits, teacher, value, words, per_t, reverse,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * words
    logits, teacher = logits + start, teacher + start
    m_q, m_p = float("-inf"), float("-inf")
    sum_q, sum_p, gaps = 0.0, 0.0, 0.0
    for at in range(0, words, BLOCK):
        word = at + tl.arange(0, BLOCK)
        x = tl.load(logits + word, mask=word < words, other=float("-inf")).to(tl.float32) * per_t
        y = tl.load(teacher + word, mask=word < words, other=float("-inf")).to(tl.float32) * per_t
        m_q, fade_q, q = _larger(m_q, x)
        m_p, fade_p, p = _larger(m_p, y)
        sum_q, sum_p = sum_q * fade_q + tl.sum(q, axis=0), sum_p * fade_p + tl.sum(p, axis=0)
        if REVERSE:
            gaps = gaps * fade_q + tl.sum(tl.where(word < words, q * (x - y), 0.0), axis=0)
    log_q, log_p = m_q + tl.log(sum_q), m_p + tl.log(sum_p)
    reversed_kl = gaps / sum_q - log_q + log_p
    tl.debug_barrier()  # all have read the row before it is written
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, words, BLOCK):
        word = at + tl.arange(0, BLOCK)
        x = tl.load(logits + word, mask=word < words, other=0.0).to(tl.float32) * per_t - log_q
        y = tl.load(teacher + word, mask=word < words, other=0.0).to(tl.float32) * per_t - log_p
        q, p, gap = tl.exp(x), tl.exp(y), x - y
        slope, loss = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        if FORWARD:
            slope += (1 - reverse) * (q - p)
            loss -= (1 - reverse) * p * gap
        if REVERSE:
            slope += reverse * q * (gap - reversed_kl)
            loss += reverse * q * gap
        total += tl.where(word < words, loss, 0.0)
        tl.store(logits + word, (slope / per_t).to(logits.dtype.element_ty), mask=word < words)
    tl.store(value + tl.program_id(0), tl.sum(total, axis=0) / (per_t * per_t))


@triton.jit
def _cross_entropy(logits, targets, value, words, BLOCK: tl.constexpr):
    logits += tl.program_id(0).to(tl.int64) * words
    target = tl.load(targets + tl.program_id(0))
    of_target = tl.load(logits + target).to(tl.float32)
    m, total = float("-inf"), 0.0
    for at in range(0, words, BLOCK):
        word = at + tl.arange(0, BLOCK)
        x = tl.load(logits + word, mask=word < words, other=float("-inf")).to(tl.float32)
        m, fade, q = _larger(m, x)
        total = total * fade + tl.sum(q, axis=0)
    log_sum = m + tl.log(total)
    tl.debug_barrier()
    for at in range(0, words, BLOCK):
        word = at + tl.arange(0, BLOCK)
        x = tl.load(logits + word, mask=word < words, other=0.0).to(tl.float32)
        slope = tl.exp(x - log_sum) - tl.where(word == target, 1.0, 0.0)
        tl.store(logits + word, slope.to(logits.dtype.element_ty), mask=word < words)
    tl.store(value + tl.program_id(0), log_sum - of_target)


def kl_(logits: torch.Tensor, of_teacher: torch.Tensor, reverse: float, temperature: float) -> torch.Tensor:
    """The value `(N,)` of each row of `logits` `(N, vocabulary)`, which become slopes."""
    rows, words = logits.shape
    value = logits.new_empty(rows, dtype=torch.float32)
    _kl[(rows,)](
        logits, of_teacher, value, words, 1 / temperature, float(reverse),
        FORWARD=reverse < 1, REVERSE=reverse > 0, BLOCK=block(words), num_warps=WARPS,
    )  # fmt: skip
    return value


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The value `(N,)` of each row of `logits` `(N, vocabulary)`, which become slopes."""
    rows, words = logits.shape
    value = logits.new_empty(rows, dtype=torch.float32)
    _cross_entropy[(rows,)](logits, targets, value, words, BLOCK=block(words), num_warps=WARPS)
    return value


def block(words: int) -> int:
    """Logits that a program reads at once; enough that none is read by two threads, of which one might write it already."""
    return max(1024, min(BLOCK, triton.next_power_of_2(words)))
