"""The work of a decoding step between its matrix products, for one new token a row. References in PyTorch; `fused.decode` on a GPU.

    norm       h := h + change,   n = weight * h / sqrt(mean(h^2) + eps)
    rotation   q' = q cos(p) + turn(q) sin(p) with turn((a, b)) = (-b, a), and k' likewise; p is the row's own position
    attention  softmax(q' K^T scale) V over the row's own `lengths + 1` cached tokens; each key head serves a group of query heads
    gate       silu(gate) * up
    draw       log p = z - log sum exp z, z = logits / T; a token from p, or from p on the `top_k` likeliest tokens and then on
               their smallest set that holds `top_p`

On a GPU a token is drawn by inversion in two stages: one pass over the vocabulary sums exp(z) of each chunk, a random number picks
the chunk by these sums and another the token in it. The floor of `top_k` and `top_p` is found bit by bit, from the highest bit of
the float down, with one count (or sum) over the row for each: no sort. Random numbers there are those of Philox (Salmon et al.,
2011) for the seed and step * B + row, seed and step read on the device, so a captured step needs no generator of the host.
"""

import torch
from torch.nn import functional

from helpers.kernels import backend


def add_norm(hidden: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `hidden + change`, `(B, n)`; the sum is kept in `hidden`. Each step rounds as transformers' modules do."""
    if backend.usable(hidden):
        from helpers.kernels.fused import decode

        return decode.add_norm(hidden, change, weight, eps)
    if change is not None:
        hidden += change
    wide = hidden.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(hidden.dtype)


def turn(x: torch.Tensor) -> torch.Tensor:
    """(-b, a) for the halves a, b of the last axis."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Queries `(n, heads, d)` of n tokens as attention needs them; their keys and values `(n, kv_heads, d)` go into the cache.

    They go to `rows` `(n,)` and `positions` `(n,)` of the cache's `keys` and `values` `(B, kv_heads, width, d)`. `weights`: of the
    norms of queries and keys, None without. `cos`, `sin` `(width, d)`.
    """
    if backend.usable(query):
        from helpers.kernels.fused import decode

        return decode.rotate_store(query, key, value, weights, eps, cos, sin, rows, positions, keys, values)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    if weights is not None:
        query, key = (add_norm(x, None, w, eps) for x, w in zip((query, key), weights, strict=True))
    keys[rows, :, positions] = key * c + turn(key) * s
    values[rows, :, positions] = value
    return query * c + turn(query) * s


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """What the queries `(B, heads, d)` read from the first `lengths + 1` tokens of the cache, `(B, heads, d)`."""
    if backend.usable(query):
        from helpers.kernels.fused import decode

        return decode.attend(query, keys, values, lengths, scale)
    rows, heads, d = query.shape
    grouped = query.view(rows, keys.shape[1], -1, d)  # the queries of a key head are as many rows of one product
    scores = (grouped @ keys.transpose(2, 3)).float() * scale
    seen = torch.arange(keys.shape[2], device=lengths.device) <= lengths.unsqueeze(1)
    weights = scores.masked_fill_(~seen[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
    return (weights @ values).view(rows, heads, d)


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, `(B, n)`."""
    if backend.usable(gate):
        from helpers.kernels.fused import decode

        return decode.gate(gate, up)
    return functional.silu(gate) * up


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """`logits / temperature` `(B, V)` with -inf outside the `top_k` likeliest tokens (0: all) and their nucleus of `top_p`.

    A token is in the nucleus if those that are likelier hold less than `top_p` of the probability.
    """
    z = logits.float() / temperature
    if 0 < top_k < z.shape[1]:
        z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered = z.sort(-1, descending=True).values
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0].zero_()
        last = (before < top_p).sum(-1, keepdim=True) - 1
        z = z.masked_fill(z < ordered.gather(1, last), -torch.inf)
    return z


def draw(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, seed: torch.Tensor, clock: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row of `logits` `(B, V)` and its log-probability at `temperature`, both `(B,)`.

    The log-probability is that before `top_k` and `top_p`; temperature 0 takes the likeliest token. `seed` and `clock` `(1,)` int64
    choose the random numbers of a kernel, which are others for each step as long as all draws from a seed have as many rows; the
    reference takes them from the device's default generator.
    """
    if backend.usable(logits):
        from helpers.kernels.fused import decode

        return decode.draw(logits, temperature, top_k, top_p, seed, clock)
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        of = allowed(logits, temperature, top_k, top_p) if top_p < 1 or top_k else logs
        # argmax(z - log E) with E ~ Exp(1) is a draw from softmax(z): the Gumbel-max trick
        token = (of - torch.empty_like(of).exponential_().log_()).argmax(-1)
    return token, logs.gather(1, token.unsqueeze(1)).squeeze(1)


def advance(
    token: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    ended: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    drawn: torch.Tensor,
    logprob: torch.Tensor,
    ends: torch.Tensor,
    clock: torch.Tensor,
) -> None:
    """Note what was drawn, `(B,)`, in the state of the rows: all of it changes in place, and a row that has ended stays.

    `tokens` and `logprobs` are `(B, limit + 1)`: a reply ends with one of `ends` `(E,)`, or with its `limit`-th token; the last
    column takes what rows draw that have ended.
    """
    if backend.usable(token):
        from helpers.kernels.fused import decode

        return decode.advance(token, lengths, counts, ended, tokens, logprobs, drawn, logprob, ends, clock)
    token.copy_(drawn)
    at = counts.unsqueeze(1)
    tokens.scatter_(1, at, drawn.unsqueeze(1))
    logprobs.scatter_(1, at, logprob.unsqueeze(1))
    live = ~ended
    counts += live
    lengths += live
    ended |= torch.isin(drawn, ends) | (counts >= tokens.shape[1] - 1)
    clock += 1
    return None
