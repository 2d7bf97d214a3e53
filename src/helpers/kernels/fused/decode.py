"""The Triton kernels of `kernels.decode`: the small work between the matrix products of a decoding step.

Each reads its inputs once and holds everything between in float32. A row is a sequence; a program does one row, or one head of it.
Shapes are those of `kernels.decode`. The launches are free of allocations that the host would have to wait for, so a step can be
captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = 4_096  # logits that one program of the draw reads
TILE = 32  # cached tokens that attention reads at a time
PROGRAMS = 264  # two a multiprocessor of an H200: attention splits the cache where rows and heads give fewer
TOP = tl.constexpr(-2147483648)  # the sign bit


@triton.jit
def _add_norm(hidden, change, weight, out, eps, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(hidden + row * N + cols, mask, 0.0)
    if ADD:
        x = x + tl.load(change + row * N + cols, mask, 0.0)
        tl.store(hidden + row * N + cols, x, mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / N + eps)
    normed = (wide * scale).to(x.dtype)  # rounded before the weight, as transformers does
    tl.store(out + row * N + cols, normed * tl.load(weight + cols, mask, 0.0), mask)


def add_norm(hidden: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, n = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(n)
    warps = min(max(block // 512, 1), 8)
    given = hidden if change is None else change
    _add_norm[(rows,)](hidden, given, weight, out, eps, n, block, change is not None, num_warps=warps)
    return out


@triton.jit
def _normed(low, high, weight, cols, mask, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of a head in float32, normalized where there is a weight."""
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / D + eps)
        a = ((a * scale).to(low.dtype) * tl.load(weight + cols, mask, 0.0)).to(tl.float32)
        b = ((b * scale).to(low.dtype) * tl.load(weight + HALF + cols, mask, 0.0)).to(tl.float32)
    return a, b


@triton.jit
def _rotate_store(
    query, key, value, query_weight, key_weight, eps, cos, sin, places, positions, turned, keys, values,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    at, place = tl.load(positions + row), tl.load(places + row)
    if head < HEADS + KV:
        c = tl.load(cos + at * D + cols, mask, 0.0).to(tl.float32)
        s = tl.load(sin + at * D + cols, mask, 0.0).to(tl.float32)
        if head < HEADS:
            source = query + (row * HEADS + head) * D + cols
            low, high = tl.load(source, mask, 0.0), tl.load(source + HALF, mask, 0.0)
            a, b = _normed(low, high, query_weight, cols, mask, eps, D, HALF, NORM)
            goal = turned + (row * HEADS + head) * D + cols
        else:
            source = key + (row * KV + head - HEADS) * D + cols
            low, high = tl.load(source, mask, 0.0), tl.load(source + HALF, mask, 0.0)
            a, b = _normed(low, high, key_weight, cols, mask, eps, D, HALF, NORM)
            goal = keys + ((place * KV + head - HEADS) * WIDTH + at) * D + cols
        tl.store(goal, a * c - b * s, mask)
        tl.store(goal + HALF, b * c + a * s, mask)
    else:
        source = value + (row * KV + head - HEADS - KV) * D + cols
        goal = values + ((place * KV + head - HEADS - KV) * WIDTH + at) * D + cols
        tl.store(goal, tl.load(source, mask, 0.0), mask)
        tl.store(goal + HALF, tl.load(source + HALF, mask, 0.0), mask)


def rotate_store(query, key, value, weights, eps, cos, sin, places, positions, keys, values) -> torch.Tensor:
    rows, heads, d = query.shape
    kv, half = key.shape[1], d // 2
    turned = torch.empty_like(query)
    first, second = weights or (query, query)
    _rotate_store[(rows, heads + 2 * kv)](
        query, key, value, first, second, eps, cos, sin, places, positions, turned, keys, values,
        heads, kv, keys.shape[2], d, half, triton.next_power_of_2(half), weights is not None, num_warps=1,
    )  # fmt: skip
    return turned


@triton.jit
def _attend(
    query, keys, values, lengths, out, maxima, sums, scale, WIDTH,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(lengths + row).to(tl.int32) + 1
    part = tl.cdiv(tl.cdiv(n, SPLITS), BN) * BN
    first = split * part
    last = tl.minimum(first + part, n)
    g, d = tl.arange(0, G), tl.arange(0, BD)
    inside = (g[:, None] < GROUP) & (d[None, :] < D)
    heads = (row * KV + head) * GROUP + g
    q = tl.load(query + heads[:, None] * D + d[None, :], inside, 0.0)
    base = (row * KV + head).to(tl.int64) * WIDTH * D
    top = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    sum_v = tl.zeros((G, BD), tl.float32)
    for start in range(first, last, BN):
        cols = start + tl.arange(0, BN)
        seen = cols < last
        places = base + cols[:, None] * D + d[None, :]
        there = seen[:, None] & (d[None, :] < D)
        k = tl.load(keys + places, there, 0.0)
        v = tl.load(values + places, there, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        sum_v = sum_v * shrink[:, None]
        sum_v += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    if SPLITS == 1:
        tl.store(out + heads[:, None] * D + d[None, :], sum_v / total[:, None], inside)
    else:  # sums of this part, as they are
        tl.store(out + (heads[:, None] * SPLITS + split) * D + d[None, :], sum_v, inside)
        tl.store(maxima + heads * SPLITS + split, top, g < GROUP)
        tl.store(sums + heads * SPLITS + split, total, g < GROUP)


@triton.jit
def _merge(parts, maxima, sums, out, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, S: tl.constexpr):
    head = tl.program_id(0)
    s, d = tl.arange(0, S), tl.arange(0, BD)
    there = (s[:, None] < SPLITS) & (d[None, :] < D)
    top = tl.load(maxima + head * SPLITS + s, s < SPLITS, float("-inf"))
    weight = tl.exp2(top - tl.max(top))
    total = tl.sum(weight * tl.load(sums + head * SPLITS + s, s < SPLITS, 0.0))
    rows = tl.load(parts + (head * SPLITS + s[:, None]) * D + d[None, :], there, 0.0)
    tl.store(out + head * D + d, tl.sum(rows * weight[:, None], 0) / total, d < D)


def attend(query, keys, values, lengths, scale) -> torch.Tensor:
    rows, heads, d = query.shape
    kv, width = keys.shape[1], keys.shape[2]
    group = heads // kv
    g, bd = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(d))
    splits = max(1, min(PROGRAMS // (rows * kv), triton.cdiv(width, 4 * TILE)))
    out = torch.empty_like(query)
    parts, maxima, sums = out, out, out
    if splits > 1:
        parts = query.new_empty((rows * heads, splits, d), dtype=torch.float32)
        maxima, sums = query.new_empty((2, rows * heads, splits), dtype=torch.float32)
    _attend[(rows, kv, splits)](
        query, keys, values, lengths, parts, maxima, sums, scale, width,
        kv, group, d, g, bd, TILE, splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows * heads,)](parts, maxima, sums, out, d, bd, splits, triton.next_power_of_2(splits), num_warps=1)
    return out


@triton.jit
def _gate(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(gate + at, mask, 0.0)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)  # rounded before the product, as transformers does
    tl.store(out + at, silu * tl.load(up + at, mask, 0.0), mask)


def gate(gate, up) -> torch.Tensor:
    out = torch.empty_like(gate)
    n = gate.numel()
    _gate[(triton.cdiv(n, 1024),)](gate, up, out, n, 1024, num_warps=4)
    return out


# ---------------------------------------------------------------- drawing a token


@triton.jit
def _order(x):
    """Integers in the order of the floats: a float32's bits, all of them turned over where the sign is set."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _floor(
    logits, floors, temperature, top_k, top_p, V,
    BLOCK: tl.constexpr, LAST: tl.constexpr, BY_COUNT: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The largest key t for which the logits from t on are at least `top_k`, and hold `top_p` of what those hold."""
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * V
    cols = tl.arange(0, BLOCK)
    floor = tl.full((), TOP, tl.int32)
    if BY_COUNT:
        for step in range(0, 32 - LAST):
            bit = tl.full((), 1, tl.int32) << (31 - step)
            higher = tl.where(step == 0, 0, floor | bit)
            count = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, V, BLOCK):
                mask = start + cols < V
                keys = _order(tl.load(source + start + cols, mask, float("-inf")))
                count += ((keys >= higher) & mask).to(tl.int32)
            floor = tl.where(tl.sum(count) >= top_k, higher, floor)
    if BY_MASS:
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            best = tl.maximum(best, tl.load(source + start + cols, start + cols < V, float("-inf")).to(tl.float32))
        peak = tl.max(best) / temperature
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(source + start + cols, start + cols < V, float("-inf")).to(tl.float32)
            mass += tl.where(_order(x) >= floor, tl.exp(x / temperature - peak), 0.0)
        needed = tl.sum(mass) * top_p
        found = tl.full((), TOP, tl.int32)
        for step in range(0, 32 - LAST):
            bit = tl.full((), 1, tl.int32) << (31 - step)
            higher = tl.where(step == 0, 0, found | bit)
            mass = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                x = tl.load(source + start + cols, start + cols < V, float("-inf")).to(tl.float32)
                keys = _order(x)
                mass += tl.where((keys >= higher) & (keys >= floor), tl.exp(x / temperature - peak), 0.0)
            found = tl.where(tl.sum(mass) >= needed, higher, found)
        floor = tl.maximum(floor, found)
    tl.store(floors + row, floor)


@triton.jit
def _chunks(
    logits, floors, peaks, masses, inside, best, temperature, V, P,
    CHUNK: tl.constexpr, GREEDY: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """Of each chunk of a row: the largest logit, the sum of exp(z - largest), that over what may be drawn, the best token."""
    row, part = tl.program_id(0), tl.program_id(1)
    cols = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * V + cols, cols < V, float("-inf")).to(tl.float32)
    z = x / temperature
    peak = tl.max(z)
    e = tl.exp(z - peak)
    at = row * P + part
    tl.store(peaks + at, peak)
    tl.store(masses + at, tl.sum(e))
    if GREEDY:
        tl.store(best + at, part * CHUNK + tl.argmax(x, 0))
    elif FILTER:
        tl.store(inside + at, tl.sum(tl.where(_order(x) >= tl.load(floors + row), e, 0.0)))


@triton.jit
def _first_over(cumulated, goal, weight, SIZE: tl.constexpr):
    """The first place whose cumulated weight is over the goal; the heaviest where rounding left none."""
    places = tl.arange(0, SIZE)
    found = tl.min(tl.where((cumulated > goal) & (weight > 0), places, SIZE))
    return tl.where(found < SIZE, found, tl.argmax(weight, 0))


@triton.jit
def _pick(
    logits, floors, peaks, masses, inside, best, tokens, logprobs, seed, clock, temperature, V, P,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, GREEDY: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    parts = tl.arange(0, PARTS)
    there = parts < P
    peak = tl.load(peaks + row * P + parts, there, float("-inf"))
    top = tl.max(peak)
    shrink = tl.exp(peak - top)
    norm = top + tl.log(tl.sum(tl.load(masses + row * P + parts, there, 0.0) * shrink))
    if GREEDY:
        token = tl.load(best + row * P + tl.argmax(peak, 0))
        chosen = top
    else:
        weight = tl.load((inside if FILTER else masses) + row * P + parts, there, 0.0) * shrink
        # two numbers for each row and step: one chooses the chunk, one the token in it
        offset = ((tl.load(clock) * rows + row) * 2).to(tl.int32)
        key = tl.load(seed)
        total = tl.cumsum(weight, 0)
        part = _first_over(total, tl.rand(key, offset) * tl.max(total), weight, PARTS)
        cols = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * V + cols, cols < V, float("-inf")).to(tl.float32)
        z = x / temperature
        weight = tl.exp(z - tl.max(z))
        if FILTER:
            weight = tl.where(_order(x) >= tl.load(floors + row), weight, 0.0)
        total = tl.cumsum(weight, 0)
        place = _first_over(total, tl.rand(key, offset + 1) * tl.max(total), weight, CHUNK)
        token = part * CHUNK + place
        chosen = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - norm)


def draw(logits, temperature, top_k, top_p, seed, clock) -> tuple[torch.Tensor, torch.Tensor]:
    rows, v = logits.shape
    greedy = temperature == 0
    by_count, by_mass = not greedy and 0 < top_k < v, not greedy and top_p < 1
    chunk = min(CHUNK, max(16, triton.next_power_of_2(v)))
    p = triton.cdiv(v, chunk)
    peaks, masses, inside = logits.new_empty((3, rows, p), dtype=torch.float32)
    best = logits.new_empty((rows, p), dtype=torch.int32)
    floors = logits.new_empty(rows, dtype=torch.int32)
    t = 1.0 if greedy else float(temperature)
    last = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)  # lower bits of such a number are all alike
    if by_count or by_mass:
        block = min(8_192, triton.next_power_of_2(v))
        _floor[(rows,)](logits, floors, t, top_k, top_p, v, block, last, by_count, by_mass, num_warps=8)
    filtered = by_count or by_mass
    _chunks[(rows, p)](logits, floors, peaks, masses, inside, best, t, v, p, chunk, greedy, filtered, num_warps=4)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _pick[(rows,)](
        logits, floors, peaks, masses, inside, best, tokens, logprobs, seed, clock, t, v, p,
        chunk, triton.next_power_of_2(p), greedy, filtered, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _advance(
    token, lengths, counts, ended, tokens, logprobs, drawn, logprob, ends, clock, E, ROOM,
    ENDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    new = tl.load(drawn + row)
    over = tl.load(ended + row).to(tl.int32)
    count = tl.load(counts + row)
    tl.store(token + row, new)
    tl.store(tokens + row * ROOM + count, new)
    tl.store(logprobs + row * ROOM + count, tl.load(logprob + row))
    marks = tl.arange(0, ENDS)
    marked = tl.max(((tl.load(ends + marks, marks < E, -1) == new) & (marks < E)).to(tl.int32))
    tl.store(counts + row, count + (1 - over))
    tl.store(lengths + row, tl.load(lengths + row) + (1 - over))
    full = (count + 1 >= ROOM - 1).to(tl.int32)
    tl.store(ended + row, (over | marked | full).to(tl.int1))
    if row == 0:
        tl.store(clock, tl.load(clock) + 1)


def advance(token, lengths, counts, ended, tokens, logprobs, drawn, logprob, ends, clock) -> None:
    size = len(ends)
    marks = ends if size else drawn
    _advance[(len(token),)](
        token, lengths, counts, ended, tokens, logprobs, drawn, logprob, marks, clock, size, tokens.shape[1],
        triton.next_power_of_2(max(size, 1)), num_warps=1,
    )  # fmt: skip
