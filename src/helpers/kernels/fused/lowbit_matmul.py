"""`kernels.lowbit_matmul` in Triton.

out^T = W' x^T: a program computes `BN` rows of W' times `BM` rows of x, so that W' is the operand that tensor cores take from
registers. Tiles of words go from memory to shared memory some tiles ahead of their use, from there to registers in the tensor
cores' own order, and there their slots become numbers one after the other, two numbers at a time:

    bits of 2^m + q = (word >> shift) & mask | bits of 2^m,      m = 7 in bfloat16, 10 in float16
    q - z           = (2^m + q) - (2^m + z)                      exact: both are whole numbers of m + 1 bits

The scale multiplies a group's sum of products, in float32. Where W' has too few rows for all multiprocessors, `SPLIT` programs
share a row's tiles, and the last that is ready adds up what they found (`product`). With one row of x, or a few, and many of W',
the warps of one program do that (`few`). From Hopper on, a kernel is launched before the one in front of it has ended.
"""

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def instructions(bits, slot, bf16):
    """(assembly, constraints) that turn two words, in one register, into two of q - z. 8 bits in bfloat16 go through float32."""
    magic = "0x43004300" if bf16 else "0x64006400"
    words = 3 if bits == 3 and slot == 15 else 1
    zero = f"${words + 1}"
    if bf16 and bits == 8:
        text = f"""prmt.b32 t, $1, 0x4B000000, {0x7440 + slot}; prmt.b32 u, $1, 0x4B000000, {0x7442 + slot};
            add.f32 t, t, $2; add.f32 u, u, $3; cvt.rn.bf16x2.f32 $0, u, t;"""
        return "{ .reg .b32 t, u; " + text + " }", "=r,r,r,r"
    if words == 3:
        text = f"""shr.u32 t, $1, 15; lop3.b32 t, t, 0x00010001, {magic}, 0xEA;
            shr.u32 u, $2, 14; lop3.b32 t, u, 0x00020002, t, 0xEA;
            shr.u32 u, $3, 13; lop3.b32 t, u, 0x00040004, t, 0xEA;"""
    else:
        shift, mask = (3 * (slot % 5), 7) if bits == 3 else (bits * slot, 2**bits - 1)
        text = f"shr.u32 t, $1, {shift}; lop3.b32 t, t, {mask << 16 | mask}, {magic}, 0xEA;"
    text += f"mov.b32 u, 0x3F803F80; fma.rn.bf16x2 $0, t, u, {zero};" if bf16 else f"add.rn.f16x2 $0, t, {zero};"
    return "{ .reg .b32 t, u; " + text + " }", "=r" + ",r" * (words + 1)


@triton.jit
def loaded(words, N, C: tl.constexpr, PLANES: tl.constexpr):
    """A tile's words of each plane, three times the same where there is one plane."""
    a = tl.load(words)
    if PLANES == 3:
        return a, tl.load(words + N * C), tl.load(words + 2 * N * C)
    return a, a, a


@triton.jit
def grid_of(grids, n, N, t, start, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Scale (float32) and zero point (int32) of rows n in the group of column `start` of tile t."""
    group = t * (TILE // GROUP) + start // GROUP if GROUP <= TILE else t // (GROUP // TILE)
    both = tl.load(grids + group * N + n)
    return (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), both >> 16


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
def numbers(a, b, c, zero, x, SLOT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """q - z of a slot, in the type of x; `zero` broadcasts against the words."""
    if not ASM:
        return (integers(a, b, c, SLOT, BITS) - zero).to(tl.float32).to(x.dtype)
    BF16: tl.constexpr = x.dtype == tl.bfloat16
    if BF16 and BITS == 8:
        z = (zero - 0x35000000).to(tl.float32, bitcast=True)  # -(2^23 + z)
    else:
        z = (zero | (0xC300 if BF16 else 0xE400)).to(tl.int16).to(x.dtype, bitcast=True)  # -(2^m + z)
    code: tl.constexpr = instructions(BITS, SLOT, BF16)
    if BITS == 3 and SLOT == 15:
        return tl.inline_asm_elementwise(code[0], code[1], (a, b, c, z), dtype=x.dtype, is_pure=True, pack=2)
    word = a
    if BITS == 3 and SLOT >= 5:
        word = b if SLOT < 10 else c
    return tl.inline_asm_elementwise(code[0], code[1], (word, z), dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def few(
    x, words, grids, bias, out, M, N, K, steps,
    BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`(BM, BN)` of out; the program's warps share each row's tiles: of `SPLIT` parts, each takes UNROLL tiles a step."""
    TILE: tl.constexpr = C * SLOTS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)  # beyond the last row, that row again: not stored
    c = tl.arange(0, C)
    part = tl.arange(0, SPLIT) * steps * UNROLL  # its first tile
    words += part[:, None, None] * (N * C * PLANES) + n[None, :, None] * C + c[None, None, :]
    x += part[:, None, None] * TILE + m[None, None, :] * K + c[None, :, None]
    total = tl.zeros((SPLIT, BN, BM), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for step in range(steps):
        for tile in tl.static_range(UNROLL):
            t = step * UNROLL + tile
            first, second, third = loaded(words + t * (N * C * PLANES), N, C, PLANES)
            for start in tl.static_range(0, SLOTS, SEGMENT):
                scale, zero = grid_of(grids, n[None, :], N, (part + t)[:, None], start * C, TILE, GROUP)
                segment = tl.zeros((SPLIT, BN, BM), tl.float32)
                for slot in tl.static_range(start, start + SEGMENT):
                    k = t * TILE + slot * C
                    inside = (m < M)[None, None, :]
                    if not EVEN:
                        inside &= (part[:, None] * TILE + k + c[None, :] < K)[:, :, None]
                    xt = tl.load(x + k, mask=inside, other=0.0)
                    w = numbers(first, second, third, zero[:, :, None], xt, slot, BITS, ASM)
                    segment = tl.dot(w, xt, segment)
                total += segment * scale[:, :, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    found = tl.sum(total, 0)
    if BIASED:
        found += tl.load(bias + n).to(tl.float32)[:, None]
    keep = (rows < N)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :] * N + rows[:, None], found.to(out.dtype.element_ty), mask=keep)


@triton.jit
def product(
    x, words, grids, bias, out, sums, ready, M, N, K, steps,
    BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`(BM, BN)` of out, or of what one of `SPLIT` parts of the steps, of UNROLL tiles each, adds to it."""
    TILE: tl.constexpr = C * SLOTS
    m = tl.program_id(0) * BM + tl.arange(
        0, BM
    )  # programs of the same rows of W' start together, so that one reads them
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)  # beyond the last row, that row again: not stored
    c = tl.arange(0, C)
    part = tl.program_id(2)
    words += n[:, None] * C + c[None, :]
    x += m[None, :] * K + c[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for step in range(part * steps // SPLIT, (part + 1) * steps // SPLIT):
        for tile in tl.static_range(UNROLL):
            t = step * UNROLL + tile
            first, second, third = loaded(words + t * (N * C * PLANES), N, C, PLANES)
            for start in tl.static_range(0, SLOTS, SEGMENT):
                scale, zero = grid_of(grids, n, N, t, start * C, TILE, GROUP)
                segment = tl.zeros((BN, BM), tl.float32)
                for slot in tl.static_range(start, start + SEGMENT):
                    k = t * TILE + slot * C
                    inside = (m < M)[None, :]
                    if not EVEN:
                        inside &= (k + c < K)[:, None]
                    xt = tl.load(x + k, mask=inside, other=0.0)
                    w = numbers(first, second, third, zero[:, None], xt, slot, BITS, ASM)
                    segment = tl.dot(w, xt, segment)
                total += segment * scale[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    last = True
    if SPLIT > 1:
        block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        sums += block * (SPLIT * BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(sums + part * (BN * BM), total)
        tl.debug_barrier()  # the whole program has stored its sums before it says so
        last = tl.atomic_add(ready + block, 1, sem="acq_rel") == SPLIT - 1
        if last:
            total = tl.zeros((BN, BM), tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(sums + i * (BN * BM), cache_modifier=".cg")
            tl.store(ready + block, 0)  # for the next call
    if last:
        if BIASED:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        keep = (rows < N)[:, None] & (m < M)[None, :]
        tl.store(out + m[None, :] * N + rows[:, None], total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def unpacked(
    words, grids, out, N, K,
    BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`BN` rows of one tile of W'."""
    t = tl.program_id(1)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)
    c = tl.arange(0, C)
    first, second, third = loaded(words + t * (N * C * PLANES) + n[:, None] * C + c[None, :], N, C, PLANES)
    for slot in tl.static_range(SLOTS):
        k = (t * SLOTS + slot) * C + c
        scale, zero = grid_of(grids, n, N, t, slot * C, SLOTS * C, GROUP)
        w = (integers(first, second, third, slot, BITS) - zero[:, None]).to(tl.float32) * scale[:, None]
        at = out + rows[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at, w.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (k < K)[None, :])


def weights(words: torch.Tensor, grids: torch.Tensor, layout, dtype: torch.dtype) -> torch.Tensor:
    """`kernels.lowbit_matmul.weights`."""
    out = torch.empty(layout.rows, layout.columns, dtype=dtype, device=words.device)
    unpacked[triton.cdiv(layout.rows, 64), layout.tiles](
        words, grids, out, layout.rows, layout.columns,
        layout.bits, layout.width, layout.slots, layout.planes, layout.group, 64,
    )  # fmt: skip
    return out


def config(M: int, layout, processors: int) -> tuple:
    """(kernel, BN, BM, SPLIT, UNROLL, warps, stages): what was fastest on an H200, of several hundred tried with 4 bits."""
    BM = 8 if M <= 8 else min(triton.next_power_of_2(M), 64)
    unroll = 1 if BM == 64 else max(1, 256 // (layout.slots * layout.width))
    while layout.tiles % unroll:
        unroll //= 2
    steps = layout.tiles // unroll
    if BM == 8 and layout.rows >= 128 * processors and steps % 2 == 0:
        return few, 32, BM, 2, unroll, 2, 3
    BN = 128 if BM in (16, 64) else 64
    programs = triton.cdiv(layout.rows, BN) * triton.cdiv(M, BM)
    wanted = min((2 if BM == 64 else 4) * processors // programs, steps // 2, 8) if programs <= layout.rows else 1
    split = 1 << max(0, wanted.bit_length() - 1)  # a power of two, for parts of one length
    warps = 2 if BM == 8 else 4 if M <= 64 else 8
    return product, BN, BM, split, unroll, warps, 4 if BM == 8 else 3


def matmul(
    x: torch.Tensor, words: torch.Tensor, grids: torch.Tensor, layout, bias: torch.Tensor | None
) -> torch.Tensor:
    """`kernels.lowbit_matmul.matmul` for bfloat16 or float16, up to `ROWS` rows of x."""
    x = x.contiguous()
    M, N, K = len(x), layout.rows, layout.columns
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    kernel, BN, BM, split, unroll, warps, stages = config(M, layout, processors)
    grid = triton.cdiv(M, BM), triton.cdiv(N, BN)
    steps, shared = layout.tiles // unroll, ()
    if kernel is few:
        steps //= split
    else:
        sums = torch.empty(grid[0] * grid[1] * split * BN * BM if split > 1 else 0, device=x.device)
        grid, shared = (*grid, split), (sums, grids[-1])
    early = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    kernel[grid](
        x, words, grids, bias, out, *shared, M, N, K, steps,
        layout.bits, layout.width, layout.slots, layout.planes, layout.group,
        min(layout.group // layout.width, layout.slots), BN, BM, split, unroll,
        BIASED=bias is not None, EVEN=layout.padded == K, ASM=x.is_cuda, EARLY=early,
        num_warps=warps, num_stages=stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
