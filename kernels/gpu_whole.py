"""Products of packed weights in whole numbers on tensor cores: what the expert products of few routes share.

A weight is twice its value, 0 to 12 with a sign, in eight bits; an input is a number of 15 bits in two parts, by blocks
of 16 inputs that share a power of two. One permutation of bytes looks four weights up at once: it reads a code's low
bits as which of eight bytes to take, and its sign as whether to spread that byte's highest bit, here always 0, over all
of it. So one look-up finds the positive weights, with zeros for the others, and one with all signs turned the others.

A matrix's right factor has eight columns, and a route is one. So the columns hold the four blocks of 128 inputs that
share a scale, in both parts, each zero outside of its block: the sums of blocks come out apart, and their scales,
whatever they are, are applied to sums in float32 instead of to weights.

A thread of a row's four has read 32 neighbouring weights, one block, as 16 bytes: inputs 8 i + 4 h + b of its block q.
It must hold them for the tensor core, so of the inputs with i's high bit alike these are column 32 h + 8 q + 4 i + b.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from muse_fn.kernels.gpu import INTERPRETED, inputs_ready
from muse_fn.kernels.gpu_product import MX

BLOCK = tl.constexpr(16)  # inputs that share a power of two
ROUND = tl.constexpr(1.5 * 2.0**23)  # a float32 so large has no places behind the point, and whole bits below
BASE = tl.constexpr(255)  # of the two parts: each is -127 to 127
_LOOK_UP = tl.constexpr("""{
.reg .b32 other, high;
xor.b32 other, $4, 0x88888888;
prmt.b32 $0, $5, 0x0C080604, $4;
shr.u32 high, $4, 16;
prmt.b32 $1, $5, 0x0C080604, high;
prmt.b32 $2, $5, 0x0C080604, other;
shr.u32 high, other, 16;
prmt.b32 $3, $5, 0x0C080604, high;
}""")


@triton.jit
def quantised(v):
    """float32 [N, 16] -> both parts, int8 [N, 16], and what twice their sum is a multiple of, float32 [N]: v is
    2 * scale * (255 * first + second), which is no finer than 2^-125. NaN where a block has infinities or NaN."""
    exponent = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
    e = tl.minimum(tl.maximum(exponent, 15), 254)
    up = ((267 - e) << 23).to(tl.float32, bitcast=True)
    whole = (tl.where(exponent[:, None] == 255, 0.0, v * up[:, None]) + ROUND) - ROUND
    first = (whole * (1.0 / BASE) + ROUND) - ROUND
    scale = tl.where(exponent == 255, 0x7FC00000, (e - 14) << 23).to(tl.float32, bitcast=True)
    return _low_byte(first), _low_byte(whole - first * BASE), scale


@triton.jit
def _low_byte(whole):
    """A whole number of float32 as int8; a conversion by the instruction for it is some ten times slower."""
    return (whole + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.constexpr_function
def width(inputs):
    """Bytes of a row of so many inputs: both parts, then the scales."""
    return 2 * inputs + inputs // 4


@triton.jit
def store_quantised(out_ptr, v, first, K: tl.constexpr, N: tl.constexpr):
    """Inputs float32 [N * 16] from column `first` on of a row: [K] of each part, then [K / 16] scales."""
    a, b, scale = quantised(tl.reshape(v, (N, BLOCK)))
    k, block = first + tl.arange(0, N * BLOCK), first // BLOCK + tl.arange(0, N)
    tl.store(out_ptr + k, tl.reshape(a, (N * BLOCK,)), k < K)
    tl.store(out_ptr + K + k, tl.reshape(b, (N * BLOCK,)), k < K)
    tl.store((out_ptr + 2 * K).to(tl.pointer_type(tl.float32)) + block, scale, block < K // BLOCK)


@triton.jit
def _emulated(codes):
    """What _LOOK_UP does to codes, for the interpreter."""
    low = (codes * 0).to(tl.uint32)
    high, low_other, high_other = low, low, low
    for j in tl.static_range(8):
        nibble = (codes.to(tl.uint32, bitcast=True) >> (4 * j)) & 15
        exponent, half = (nibble >> 1) & 3, nibble & 1
        size = tl.where(exponent == 0, half, (2 + half) << (tl.maximum(exponent, 1) - 1)) << (8 * (j % 4))
        plus, minus = tl.where(nibble < 8, size, 0), tl.where(nibble < 8, 0, size)
        if j < 4:
            low, low_other = low | plus, low_other | minus
        else:
            high, high_other = high | plus, high_other | minus
    return (
        low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True),
        low_other.to(tl.int32, bitcast=True), high_other.to(tl.int32, bitcast=True),
    )  # fmt: skip


@triton.jit
def _bytes(x):
    """int32 [...] -> its bytes, int8 [..., 2, 2]."""
    return tl.join(tl.join(x, x >> 16), tl.join(x >> 8, x >> 24)).to(tl.int8)


@triton.jit
def own_words(pointers, own):
    """Four int32 from each address where `own` is not 0, else zeros: [...] -> [..., 2, 2]."""
    if INTERPRETED:
        at = pointers.to(tl.pointer_type(tl.int32))
        a, b = tl.load(at, own != 0, 0), tl.load(at + 1, own != 0, 0)
        c, d = tl.load(at + 2, own != 0, 0), tl.load(at + 3, own != 0, 0)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}", "=&r,=&r,=&r,=&r,l,r",
            [pointers.to(tl.int64), own], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def words(pointers):
    """Four int32 from each address: [...] -> [..., 2, 2]."""
    if INTERPRETED:
        a, b, c, d = tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _scales(pointers, FORMAT: tl.constexpr):
    """Of 32 weights the scales of the first and of the last 16, as bytes in int32; MXFP4 has one for both."""
    if FORMAT == MX:
        byte = _byte(pointers)
        return byte, byte
    else:
        return _byte(pointers), _byte(pointers + 1)


@triton.jit
def _byte(pointers):
    """A byte from each address, in int32."""
    if INTERPRETED:
        return tl.load(pointers).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.u8 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _scale(byte, FORMAT: tl.constexpr):
    """A block's scale as float32: 2^(byte - 127), 0 being 2^-127 and 255 NaN, or an e4m3."""
    if FORMAT == MX:
        bits = tl.where(byte == 255, 0x7FC00000, tl.maximum(byte << 23, 0x00400000))
        return bits.to(tl.float32, bitcast=True)
    else:
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _table():
    """The table's first half. Through another lane, or the assembler would make the constant anew for each use."""
    x = tl.cast(0x03020100, tl.int32)
    if not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "{.reg .b32 t; mov.u32 t, %laneid; mov.u32 $0, %smid; add.u32 t, t, $0; shr.u32 t, t, 20;"
            "or.b32 $0, $1, t;}",
            "=&r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return x


@triton.jit
def _whole_product(low, high, x, S: tl.constexpr, BN: tl.constexpr):
    """Weights of one sign, words [8, S, BN / 8, 4, 2] of inputs 8 i and 8 i + 4 on, times inputs int8 [S, 64, 8]."""
    a = tl.join(_bytes(low), _bytes(high))  # l, s, b, q, i, byte, byte, half
    a = tl.reshape(tl.permute(a, (1, 2, 0, 7, 3, 4, 5, 6)), (S, BN, 64))
    return tl.dot(a, x, tl.zeros((S, BN, 8), tl.int32), out_dtype=tl.int32)


@triton.jit
def _block_sums(codes, table, x, S: tl.constexpr, BN: tl.constexpr):
    """Codes [8, S, BN / 8, 4, 2] and inputs [S, 64, 8] -> each block's sum, float32 [S, BN, 4]."""
    if INTERPRETED:
        low, high, low_other, high_other = _emulated(codes)
    else:
        low, high, low_other, high_other = tl.inline_asm_elementwise(
            _LOOK_UP, "=&r,=&r,=&r,=&r,r,r", [codes, table], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    total = _whole_product(low, high, x, S, BN) - _whole_product(low_other, high_other, x, S, BN)
    first, second = tl.split(tl.reshape(total, (S, BN, 4, 2)))
    return (first * BASE + second).to(tl.float32)


@triton.jit
def _inputs(both, S: tl.constexpr):
    """Inputs of 16 columns of each block, both parts in the columns of their blocks, words [S, 8, 4, 2, 2] -> int8
    [S, 64, 8] in the order of weights."""
    x = _bytes(both)  # s, n, q, i, half, byte, byte
    return tl.reshape(tl.permute(x, (0, 4, 2, 3, 5, 6, 1)), (S, 64, 8))


@triton.jit
def _further(b, STEP: tl.constexpr):
    """How many rows on the b-th eight begin; see `product`."""
    if STEP:
        return b // 2 * 8 + b % 2 * STEP
    else:
        return b * 8


@triton.jit
def _beside(g, scales_at, scales_further, x_at, x_scales_at, own, FORMAT: tl.constexpr):
    """What group g needs beside its codes: of the first and the last 16 weights of each block the scales, the inputs
    and their scales."""
    scales = _scales(scales_at + g * 4 * FORMAT + scales_further, FORMAT)
    inputs = own_words(x_at + g * 128, own), own_words(x_at + g * 128 + 16, own)
    return scales, inputs, (tl.load(x_scales_at + g * 8), tl.load(x_scales_at + g * 8 + 1))


@triton.jit
def _add(acc, codes, beside, table, FORMAT: tl.constexpr, BN: tl.constexpr, S: tl.constexpr):
    """The sum with a group of 128 inputs: codes int32 [8, S, BN / 8, 4, 2, 2]."""
    scales, inputs, x_scales = beside
    left, right = tl.split(tl.permute(codes, (0, 1, 2, 3, 5, 4)))
    acc += (_block_sums(left, table, _inputs(inputs[0], S), S, BN) * x_scales[0]) * _scale(scales[0], FORMAT)
    return acc + (_block_sums(right, table, _inputs(inputs[1], S), S, BN) * x_scales[1]) * _scale(scales[1], FORMAT)


@triton.jit
def product(
    x_ptr, codes_ptr, scales_ptr, first, STEP: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BN: tl.constexpr,
    S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN matrix rows with one row of quantised inputs -> float32 [BN]: those from `first` on, int64; or, if STEP is not
    0, eight of these, then eight from `first` + STEP on, and so on in turn.

    Each of S warps has its own part of the inputs, 128 at a time. What these need is read while those before are
    multiplied, the first codes before the inputs are there if these are still to be waited for (PDL).
    """
    GROUPS: tl.constexpr = K // S // 128
    r, s, q = tl.arange(0, 8), tl.arange(0, S), tl.arange(0, 4)
    # Within a thread rows are known distances apart, which the assembler puts into the instructions that read.
    further = _further(tl.arange(0, BN // 8), STEP)[None, None, :, None] * (K // 8)
    at = (
        (first + r[:, None, None, None]) * (K // 8)
        + (s * (K // 8 // S))[None, :, None, None]
        + (q * 4)[None, None, None, :]
    )
    at += codes_ptr
    s = s[:, None, None]
    n = tl.arange(0, BN)
    scales_further = _further(n // 8, STEP)[None, :, None] * (K // 32 * FORMAT)
    scales_at = (first + n % 8)[None, :, None] * (K // 32) + s * (K // 32 // S) + q[None, None, :]
    scales_at = scales_ptr + scales_at * FORMAT  # one of 32, or two
    n = tl.arange(0, 8)[None, :, None]
    own = ((n >> 1) == q[None, None, :]).to(tl.int32) + s * 0
    x_at = x_ptr + (n & 1) * K + s * (K // S) + q[None, None, :] * 32
    x_scales_at = (x_ptr + 2 * K).to(tl.pointer_type(tl.float32)) + s * (K // 16 // S) + q[None, None, :] * 2
    codes = words(at + further)
    inputs_ready(PDL)
    table = _table()
    acc = tl.zeros((S, BN, 4), tl.float32)
    beside = _beside(0, scales_at, scales_further, x_at, x_scales_at, own, FORMAT)
    # Two groups a turn, so that each has registers of its own for what is read while the other is multiplied.
    for turn in range(GROUPS // 2):
        g = 2 * turn + 1
        other_codes = words(at + g * 16 + further)
        other_beside = _beside(g, scales_at, scales_further, x_at, x_scales_at, own, FORMAT)
        acc = _add(acc, codes, beside, table, FORMAT, BN, S)
        g = tl.minimum(g + 1, GROUPS - 1)
        codes = words(at + g * 16 + further)
        beside = _beside(g, scales_at, scales_further, x_at, x_scales_at, own, FORMAT)
        acc = _add(acc, other_codes, other_beside, table, FORMAT, BN, S)
    if GROUPS % 2 == 1:
        acc = _add(acc, codes, beside, table, FORMAT, BN, S)
    return tl.sum(tl.sum(acc, 2), 0)
