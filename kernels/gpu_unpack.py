"""Four-bit weights to bfloat16 in registers: what the Triton expert products share.

A tensor core takes its left factor from registers in a fixed pattern: of 16 columns, thread q of a row's four holds
2q, 2q + 1, 2q + 8 and 2q + 9. A thread that reads 16 bytes holds 32 neighbouring weights instead. So the columns are
renumbered, such that what a thread has read is what it must hold, and no weight moves: a group of 128 inputs is two
products of 64 columns, of the even and of the odd inputs (a byte holds one of each), and `column` says which input
stands where. The right factor is stored in that order. Rows are renumbered likewise.

E2M1 in the low bits of a bfloat16's exponent and the high bit of its mantissa is its value times 2^-126, zero and the
subnormal included; one product brings it back, another applies the scale of its block.
"""

# pyright: basic, reportArgumentType=false
import triton
import triton.language as tl

from muse_fn.kernels.gpu import INTERPRETED

GROUP = 128  # inputs that are renumbered together

# A register of eight codes and one of a scale, twice -> the even inputs' weights of bytes (0, 2) and (1, 3); the odd's.
_ASM = tl.constexpr("""
{
    .reg .b32 r, s, t, one, none;
    mov.b32 one, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shr.u32 r, $4, 6;
    shl.b32 s, $4, 6;
    shl.b32 t, $4, 12;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 $0, t, 0x80008000, s, 0xEA;
    shl.b32 s, r, 4;
    shl.b32 t, $4, 4;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 $1, t, 0x80008000, s, 0xEA;
    shl.b32 s, $4, 2;
    shl.b32 t, $4, 8;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 $2, t, 0x80008000, s, 0xEA;
    and.b32 s, r, 0x01C001C0;
    lop3.b32 $3, $4, 0x80008000, s, 0xEA;
    fma.rn.bf16x2 $0, $0, one, none;
    fma.rn.bf16x2 $1, $1, one, none;
    fma.rn.bf16x2 $2, $2, one, none;
    fma.rn.bf16x2 $3, $3, one, none;
    fma.rn.bf16x2 $0, $0, $5, none;
    fma.rn.bf16x2 $1, $1, $5, none;
    fma.rn.bf16x2 $2, $2, $5, none;
    fma.rn.bf16x2 $3, $3, $5, none;
}
""")


@triton.jit
def column(input):
    """Where an input 0 .. GROUP - 1 stands: even inputs in columns 0 .. 63, odd ones in 64 .. 127."""
    j = input >> 1  # its byte: q q s s low high
    k = ((j >> 2) & 3) * 16 + (j & 1) * 8 + (j >> 4) * 2 + ((j >> 1) & 1)
    return (input & 1) * 64 + k


@triton.jit
def row_of(r, BN: tl.constexpr, WARPS: tl.constexpr):
    """Which of BN rows in memory stands as row r of a product's result; pairs (0, 8) of 16 are its two halves."""
    warp, half = (r // 16) % WARPS, (r // 8) % 2
    return (r // (16 * WARPS)) * (16 * WARPS) + half * (8 * WARPS) + warp * 8 + r % 8


@triton.jit
def e8m0(byte):
    """2^(byte - 127) as bfloat16, exact, twice in an int32; 0 is 2^-127, below the normal numbers, and 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
    return bits | (bits << 16)


@triton.jit
def _value(nibble):
    """E2M1 -> float32, for the interpreter."""
    exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << (exponent + 1)).to(tl.float32) * 0.25)
    return tl.where((nibble & 8) != 0, -size, size)


@triton.jit
def _scaled(codes, scale, at: tl.constexpr):
    """The code at bit `at` of each register, for the interpreter."""
    return (_value((codes >> at) & 15) * (scale << 16).to(tl.float32, bitcast=True)).to(tl.bfloat16)  # exact


@triton.jit
def _half(x, at: tl.constexpr):
    return ((x >> at) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _placed(a, b, c, d, BN: tl.constexpr, WARPS: tl.constexpr):
    """Bytes 0, 2, 1, 3 of registers [BN, 16] as the columns of a left factor bfloat16 [BN, 64]."""
    x = tl.join(tl.join(a, b), tl.join(c, d))
    x = tl.reshape(x, (BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2))  # … half w l, q s low high
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 5, 7, 4, 6)), (BN, 64))


@triton.jit
def unpack(codes, scale, BN: tl.constexpr, WARPS: tl.constexpr):
    """Codes int32 [BN, 16], eight in each, and for each a scale as `e8m0` gives it -> the even and the odd inputs'
    weights, bfloat16 [BN, 64], rows and columns renumbered."""
    if INTERPRETED:
        even = _placed(_scaled(codes, scale, 0), _scaled(codes, scale, 16),
                       _scaled(codes, scale, 8), _scaled(codes, scale, 24), BN, WARPS)  # fmt: skip
        odd = _placed(_scaled(codes, scale, 4), _scaled(codes, scale, 20),
                      _scaled(codes, scale, 12), _scaled(codes, scale, 28), BN, WARPS)  # fmt: skip
    else:
        e, f, g, h = tl.inline_asm_elementwise(
            _ASM, "=&r,=&r,=&r,=&r,r,r", [codes, scale],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        even = _placed(_half(e, 0), _half(e, 16), _half(f, 0), _half(f, 16), BN, WARPS)
        odd = _placed(_half(g, 0), _half(g, 16), _half(h, 0), _half(h, 16), BN, WARPS)
    return even, odd
