"""`kernels.lowbit_matmul` in Triton.

out^T = W' x^T: a program computes `BN` rows of W' times `BM` rows of x, so that W' is the operand that tensor cores take from
registers. A tile of words goes from memory to shared memory several tiles ahead of its use, from there to registers in the tensor
cores' own order, and its slots one after the other become numbers there, two at a time:

    bits of 2^m + q = (word >> shift) & mask | bits of 2^m,      m = 7 in bfloat16, 10 in float16
    q - z           = (2^m + q) - (2^m + z)                      exact: both are whole numbers of m+1 bits

With few rows of x the scale multiplies a group's sum of products; with many, it multiplies the weights (in bfloat16 as the sum of
two numbers, since one does not hold all its digits), which is then rounded to the type of x as the reference does. Few rows of W'
leave multiprocessors without work: then `SPLIT` programs share the tiles of a row, and the last that is ready adds their sums.
"""

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def instructions(bits, slot, bf16, scaled):
    """(assembly, constraints) that turn two words, in one register, into two weights. 8 bits in bfloat16 go through float32."""
    kind, magic = ("bf16x2", "0x43004300") if bf16 else ("f16x2", "0x64006400")
    words = 3 if bits == 3 and slot == 15 else 1
    at = words + 1  # of the zero point among the operands
    if bf16 and bits == 8:
        text = f"""prmt.b32 t, $1, 0x4B000000, {0x7440 + slot}; prmt.b32 u, $1, 0x4B000000, {0x7442 + slot};
            sub.f32 t, t, $2; sub.f32 u, u, $3; cvt.rn.bf16x2.f32 t, u, t;"""
        at += 1
    elif words == 3:
        text = f"""shr.u32 t, $1, 15; lop3.b32 t, t, 0x00010001, {magic}, 0xEA;
            shr.u32 u, $2, 14; lop3.b32 t, u, 0x00020002, t, 0xEA;
            shr.u32 u, $3, 13; lop3.b32 t, u, 0x00040004, t, 0xEA; sub.rn.{kind} t, t, $4;"""
    else:
        shift, mask = (3 * (slot % 5), 7) if bits == 3 else (bits * slot, 2**bits - 1)
        text = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
        text += f"lop3.b32 t, t, {mask << 16 | mask}, {magic}, 0xEA; sub.rn.{kind} t, t, ${at};"
    operands = at
    if scaled and bf16:
        text += f"mul.rn.bf16x2 u, t, ${at + 2}; fma.rn.bf16x2 t, t, ${at + 1}, u;"
        operands += 2
    elif scaled:
        text += f"mul.rn.f16x2 t, t, ${at + 1};"
        operands += 1
    return "{ .reg .b32 t, u; " + text + " mov.b32 $0, t; }", "=r" + ",r" * operands


@triton.jit
def loaded(words, N, C: tl.constexpr, PLANES: tl.constexpr):
    """The tile's words of each plane, three times the same where there is one plane."""
    a = tl.load(words)
    if PLANES == 3:
        return a, tl.load(words + N * C), tl.load(words + 2 * N * C)
    return a, a, a


@triton.jit
def integers(a, b, c, SLOT: tl.constexpr, BITS: tl.constexpr):
    """The codes of a slot, in int32."""
    a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    if BITS != 3:
        return (a >> (BITS * SLOT)) & (2**BITS - 1)
    if SLOT == 15:
        return ((a >> 15) & 1) | ((b >> 14) & 2) | ((c >> 13) & 4)
    word = a if SLOT < 5 else b if SLOT < 10 else c
    return (word >> (3 * (SLOT % 5))) & 7


@triton.jit
def numbers(
    a, b, c, scale, zero, x, SLOT: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """q - z of a slot, or s (q - z), in the type of x. scale, zero: float32 and int32, one a row."""
    BF16: tl.constexpr = x.dtype == tl.bfloat16
    if not ASM:
        w = integers(a, b, c, SLOT, BITS).to(tl.float32) - zero.to(tl.float32)[:, None]
        if SCALED:
            w *= scale[:, None]
        return w.to(x.dtype)
    code: tl.constexpr = instructions(BITS, SLOT, BF16, SCALED)
    if BF16 and BITS == 8:
        z = (zero | 0x4B000000).to(tl.float32, bitcast=True)[:, None]
    else:
        z = (zero | (0x4300 if BF16 else 0x6400)).to(tl.int16).to(x.dtype, bitcast=True)[:, None]
    word = a
    if BITS == 3 and SLOT >= 5:
        word = b if SLOT < 10 else c
    high = scale.to(x.dtype)
    low = (scale - high.to(tl.float32)).to(x.dtype)
    if BITS == 3 and SLOT == 15:
        if SCALED and BF16:
            args = (a, b, c, z, high[:, None], low[:, None])
        elif SCALED:
            args = (a, b, c, z, high[:, None])
        else:
            args = (a, b, c, z)
    else:
        if SCALED and BF16:
            args = (word, z, high[:, None], low[:, None])
        elif SCALED:
            args = (word, z, high[:, None])
        else:
            args = (word, z)
    return tl.inline_asm_elementwise(code[0], code[1], args, dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def grid_of(grids, n, g, N):
    """Scale (float32) and zero point (int32) of rows n in group g."""
    both = tl.load(grids + g * N + n)
    return (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), both >> 16


@triton.jit
def product(
    x, words, grids, bias, out, sums, ready, M, N, K, tiles,
    GROUP: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr, SEGMENT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`(BM, BN)` of out, or of what a part of the tiles adds to it. SEGMENT: slots of a tile that share a grid."""
    TILE: tl.constexpr = C * SLOTS
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)  # beyond the last row, that row again: not stored
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    begin, end = tl.program_id(1) * tiles // SPLIT, (tl.program_id(1) + 1) * tiles // SPLIT
    wp = words + begin.to(tl.int64) * (N * C * PLANES) + n[:, None] * C + c[None, :]
    xp = x + begin * TILE + m[None, :] * K + c[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for t in range(begin, end):
        first, second, third = loaded(wp, N, C, PLANES)
        for start in tl.static_range(0, SLOTS, SEGMENT):
            scale, zero = grid_of(grids, n, (t * TILE + start * C) // GROUP, N)
            segment = tl.zeros((BN, BM), tl.float32)
            for slot in tl.static_range(start, start + SEGMENT):
                if EVEN:
                    xt = tl.load(xp + slot * C)
                else:
                    k = t * TILE + slot * C + c
                    xt = tl.load(xp + slot * C, mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
                w = numbers(first, second, third, scale, zero, xt, slot, BITS, SCALED, ASM)
                if SCALED:
                    total = tl.dot(w, xt, total)
                else:
                    segment = tl.dot(w, xt, segment)
            if not SCALED:
                total += segment * scale[:, None]
        wp += N * C * PLANES
        xp += TILE
    keep = (rows < N)[:, None] & (m < M)[None, :]
    last = True
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        part = sums + tile.to(tl.int64) * (SPLIT * BN * BM) + inner
        tl.store(part + tl.program_id(1) * (BN * BM), total)
        tl.debug_barrier()
        last = tl.atomic_add(ready + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            total = tl.zeros((BN, BM), tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(part + i * (BN * BM), cache_modifier=".cg")
            tl.store(ready + tile, 0)  # for the next call
    if last:
        if BIASED:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        tl.store(out + m[None, :].to(tl.int64) * N + rows[:, None], total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def unpacked(
    words, grids, out, N, K, GROUP: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """`BN` rows of one tile of W'."""
    t = tl.program_id(1)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)
    c = tl.arange(0, C)
    wp = words + t.to(tl.int64) * (N * C * PLANES) + n[:, None] * C + c[None, :]
    first, second, third = loaded(wp, N, C, PLANES)
    for slot in tl.static_range(SLOTS):
        k = (t * SLOTS + slot) * C + c
        scale, zero = grid_of(grids, n, (t * SLOTS + slot) * C // GROUP, N)
        w = (integers(first, second, third, slot, BITS) - zero[:, None]).to(tl.float32) * scale[:, None]
        at = out + rows[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at, w.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (k < K)[None, :])


def weights(words: torch.Tensor, grids: torch.Tensor, layout, dtype: torch.dtype) -> torch.Tensor:
    """`kernels.lowbit_matmul.weights`."""
    out = torch.empty(layout.rows, layout.columns, dtype=dtype, device=words.device)
    grid = triton.cdiv(layout.rows, 64), layout.tiles
    unpacked[grid](
        words, grids, out, layout.rows, layout.columns, layout.group,
        layout.bits, layout.width, layout.slots, layout.planes, 64,
    )  # fmt: skip
    return out


def config(M: int, layout, processors: int) -> dict:
    """Block sizes, parts of a row, warps and stages, found by trying on an H200."""
    BM = 8 if M <= 8 else min(triton.next_power_of_2(M), 64)
    BN = 128 if BM > 16 else 64
    warps, stages = (2, 4) if BM <= 8 else (4, 4 if BM <= 16 else 3)
    programs = triton.cdiv(layout.rows, BN) * triton.cdiv(M, BM)
    split = max(1, min(layout.tiles // 4, 3 * processors // programs, 8))
    return {"BN": BN, "BM": BM, "SPLIT": split, "num_warps": warps, "num_stages": stages, "SCALED": BM > 16}


READY: dict[torch.device, torch.Tensor] = {}  # zeros, which each call leaves as zeros


def matmul(
    x: torch.Tensor, words: torch.Tensor, grids: torch.Tensor, layout, bias: torch.Tensor | None
) -> torch.Tensor:
    """`kernels.lowbit_matmul.matmul` for bfloat16 or float16, up to `ROWS` rows of x."""
    x = x.contiguous()
    M, N, K = len(x), layout.rows, layout.columns
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    chosen = config(M, layout, processors)
    grid = triton.cdiv(N, chosen["BN"]), chosen["SPLIT"], triton.cdiv(M, chosen["BM"])
    sums = torch.empty(grid[0] * grid[1] * grid[2] * chosen["BN"] * chosen["BM"], device=x.device)
    ready = READY.setdefault(x.device, torch.zeros(4096, dtype=torch.int32, device=x.device))
    product[grid](
        x, words, grids, bias, out, sums, ready, M, N, K, layout.tiles, layout.group,
        layout.bits, layout.width, layout.slots, layout.planes, min(layout.group // layout.width, layout.slots),
        BIASED=bias is not None, EVEN=M % chosen["BM"] == 0 and layout.padded == K, ASM=x.is_cuda, **chosen,
    )  # fmt: skip
    return out
