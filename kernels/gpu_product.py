"""Products of one tile of routes with some rows of one expert's matrix, unpacked in registers: the inner loops.

Of FEW routes every warp has its own part of the inputs, and the parts' sums meet at the end, so that many loads are
under way; of many all warps share a tile of inputs.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from muse_fn.kernels.gpu import INTERPRETED, dot, inputs_ready
from muse_fn.kernels.gpu_unpack import LARGE, NV_SHIFT, e8m0, placed_few, placed_many, short_factor, weights

PLAIN, MX, NV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def plain_product(
    x_ptr, x_row, valid, w_ptr, row, K: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):
    """Matrix rows `row` int64 [BN] with the inputs of a tile -> float32 [BN, ROWS]."""
    acc = tl.zeros((BN, ROWS), tl.float32)
    k, inputs = tl.arange(0, 64), x_row.to(tl.int64)[None, :] * K
    for g in tl.range(0, K // 64, num_stages=STAGES):
        x = tl.load(x_ptr + inputs + g * 64 + k[:, None], mask=valid[None, :], other=0.0)
        acc = dot(tl.load(w_ptr + row[:, None] * K + g * 64 + k[None, :]), x, acc)
    return acc


@triton.jit
def _factors(scales, W: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr, LONG: tl.constexpr):
    """What a thread has read of scales (MXFP4: four of them in an int32, NVFP4: eight in an int64), [4, 8, W, B] ->
    what each register of codes is multiplied with, int32 [8, W, B, 16]."""
    q = tl.arange(0, 4)[:, None, None, None]
    if FORMAT == MX:
        bits = e8m0((scales >> (8 * q)) & 0xFF) if LONG else short_factor(scales, q)
        bits = tl.broadcast_to(tl.permute(bits, (1, 2, 3, 0))[:, :, :, :, None], (8, W, B, 4, 4))
    else:
        byte = (scales >> (16 * q)).to(tl.int32)
        both = tl.join(byte & 0xFF, (byte >> 8) & 0xFF)
        factor = both.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * (NV_SHIFT * 2.0**126)
        bits = factor.to(tl.int32, bitcast=True)
        bits = (bits & -65536) | ((bits >> 16) & 0xFFFF)  # a float8 is exact in bfloat16
        bits = tl.broadcast_to(tl.permute(bits, (1, 2, 3, 0, 4))[:, :, :, :, :, None], (8, W, B, 4, 2, 2))
    return tl.reshape(bits, (8, W, B, 16))


@triton.jit
def _places(row, K: tl.constexpr, PART: tl.constexpr, WARPS: tl.constexpr, B: tl.constexpr, AT_ONCE: tl.constexpr):
    """Where the codes, in int32, and the scales, in groups of 128 inputs, of rows int64 [8, 1 or WARPS, B] begin, each
    warp PART inputs on: [8, WARPS, AT_ONCE * B, 1] and [8, WARPS, AT_ONCE * B]."""
    part, group = tl.arange(0, WARPS)[None, :, None, None] * (PART // 128), tl.arange(0, AT_ONCE)[None, None, :, None]
    groups = tl.reshape(row[:, :, None, :] * (K // 128) + part + group, (8, WARPS, AT_ONCE * B))
    return groups[:, :, :, None] * 16, groups


@triton.jit
def _read(codes_ptr, at, W: tl.constexpr, B: tl.constexpr):
    """16 int32 from each place int64 [8, W, B, 1]; what follows comes into the level-2 cache with it."""
    if INTERPRETED:
        return tl.load(codes_ptr + at + tl.arange(0, 16)[None, None, None, :])
    else:
        pointers = (codes_ptr + at + 4 * tl.arange(0, 4)[None, None, None, :]).to(tl.int64)
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [pointers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (8, W, B, 16))


@triton.jit
def _sum_few(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr, LONG: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Matrix rows 8 b + l = row[l, 0, b] with the inputs of a tile, each warp its part of the inputs -> float32 [WARPS,
    BN, ROWS], and what bits any scale of MXFP4 that a thread read has.

    Codes and scales go from memory to registers, a turn ahead: no thread needs what another reads. The first are on
    their way before the inputs are there, if they are still to be waited for (PDL).
    """
    PART: tl.constexpr = K // WARPS
    TURNS: tl.constexpr = PART // 128 // AT_ONCE
    B: tl.constexpr = AT_ONCE * BN // 8
    codes_at, scales_at = _places(row, K, PART, WARPS, BN // 8, AT_ONCE)
    # All four threads of a row read its scales: passed on between threads, they would go through shared memory.
    scales_at = tl.broadcast_to(scales_at[None, :, :, :], (4, 8, WARPS, B))
    k = tl.arange(0, 64 * AT_ONCE)
    k = ((k // 64) * 128 + k % 64)[None, :, None]
    x_at = x_ptr + (tl.arange(0, WARPS) * PART)[:, None, None] + x_row.to(tl.int64)[None, None, :] * K + k
    acc = tl.zeros((WARPS, BN, ROWS), tl.float32)
    codes, scales = _read(codes_ptr, codes_at, WARPS, B), tl.load(scales_ptr + scales_at)
    inputs_ready(PDL)
    seen = tl.zeros((4, 8, WARPS, B), tl.int32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        next_codes, next_scales = codes, scales
        if TURNS > 1:
            ahead = tl.minimum(turn + 1, TURNS - 1) * AT_ONCE
            next_codes = _read(codes_ptr, codes_at + ahead * 16, WARPS, B)
            next_scales = tl.load(scales_ptr + scales_at + ahead)
        even = tl.load(x_at + turn * AT_ONCE * 128, mask=valid[None, None, :], other=0.0)
        odd = tl.load(x_at + turn * AT_ONCE * 128 + 64, mask=valid[None, None, :], other=0.0)
        factor = _factors(scales, WARPS, B, FORMAT, LONG)
        if FORMAT == MX:
            seen |= scales
        even_w, odd_w = weights(codes, factor, True, LONG)
        acc = dot(placed_few(even_w, WARPS, BN, AT_ONCE), even, acc)
        acc = dot(placed_few(odd_w, WARPS, BN, AT_ONCE), odd, acc)
        codes, scales = next_codes, next_scales
    return acc, seen


@triton.jit
def _product_few(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of all parts, float32 [BN, ROWS]."""
    acc, seen = _sum_few(
        x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, False, BN, ROWS, WARPS, AT_ONCE, STAGES, PDL
    )
    if FORMAT == MX:
        # Scales above 1 are rare in weights; where one is, the tile is done again without the short cut.
        if tl.max(((seen & LARGE) != 0).to(tl.int32)) > 0:
            acc, seen = _sum_few(
                x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, True, BN, ROWS, WARPS, AT_ONCE, STAGES,
                False,
            )  # fmt: skip
    return tl.sum(acc, 0)


@triton.jit
def _sum_many(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr, LONG: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Matrix rows int64 [8, WARPS, B] with the inputs of a tile -> float32 [BN, ROWS] as `row_of` says, and what bits
    any scale of MXFP4 has."""
    B: tl.constexpr = BN // 8 // WARPS
    codes_at, scales_at = _places(row, K, 0, WARPS, B, 1)
    codes_at += tl.arange(0, 16)[None, None, None, :]
    x_at = x_ptr + x_row.to(tl.int64)[None, :] * K + tl.arange(0, 64)[:, None]
    acc = tl.zeros((BN, ROWS), tl.float32)
    seen = tl.zeros((8, WARPS, B), tl.int32)
    for g in tl.range(0, K // 128, num_stages=STAGES):
        even = tl.load(x_at + g * 128, mask=valid[None, :], other=0.0)
        odd = tl.load(x_at + g * 128 + 64, mask=valid[None, :], other=0.0)
        scales = tl.load(scales_ptr + scales_at + g)
        if FORMAT == MX:
            seen |= scales
        factor = _factors(tl.broadcast_to(scales[None, :, :, :], (4, 8, WARPS, B)), WARPS, B, FORMAT, LONG)
        even_w, odd_w = weights(tl.load(codes_ptr + codes_at + g * 16), factor, False, LONG)
        acc = dot(placed_many(odd_w, BN, WARPS), odd, dot(placed_many(even_w, BN, WARPS), even, acc))
    return acc, seen


@triton.jit
def _product_many(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum alone."""
    acc, seen = _sum_many(x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, False, BN, ROWS, WARPS, STAGES)
    if FORMAT == MX:
        if tl.max(((seen & LARGE) != 0).to(tl.int32)) > 0:
            acc, seen = _sum_many(
                x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, True, BN, ROWS, WARPS, STAGES
            )
    return acc


@triton.jit
def packed_product(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr, FEW: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Matrix rows with the inputs of a tile -> float32 [BN, ROWS]: row 8 b + l is row[l, 0, b] of FEW, else they lie as
    `row_of` says. Rows are int64 [8, 1, BN / 8] of FEW, else [8, WARPS, BN / 8 / WARPS]. If PDL it waits for the
    inputs."""
    if FEW:
        return _product_few(
            x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, BN, ROWS, WARPS, AT_ONCE, STAGES, PDL
        )
    else:
        inputs_ready(PDL)
        return _product_many(x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K, FORMAT, BN, ROWS, WARPS, STAGES)
