"""Four-bit weights to bfloat16 in registers: what the Triton expert products share.

A byte holds the codes of two neighbouring inputs, the even one below. A tile of bytes becomes two tiles, one for each
half; the products take the inputs split the same way. On the device four bytes are one register, whose 16-bit lanes
hold bytes 0 and 1, and 2 and 3: its natural pairs are bytes (0, 2) and (1, 3), and that order is kept, since moving
bytes costs more than reading the inputs in the same order (`column`).

E2M1 in the low bits of a bfloat16's exponent and the high bit of its mantissa is its value times 2^-126, zero and
the subnormal included; one product brings it back, another applies the scale of its block.
"""

# pyright: basic
import triton
import triton.language as tl

from muse_fn.kernels.gpu import INTERPRETED

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
    fma.rn.bf16x2 $1, $1, $6, none;
    fma.rn.bf16x2 $2, $2, $5, none;
    fma.rn.bf16x2 $3, $3, $6, none;
}
""")


@triton.jit
def column(j):
    """The byte that stands at place j of an unpacked tile: the middle two of every four change places."""
    return (j & ~3) | ((j & 1) << 1) | ((j >> 1) & 1)


@triton.jit
def e8m0(byte):
    """2^(byte - 127) as bfloat16, exact; 0 is 2^-127, below the normal numbers, and 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte.to(tl.int32) << 7))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _value(nibble):
    """E2M1 -> float32, for the interpreter."""
    exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << (exponent + 1)).to(tl.float32) * 0.25)
    return tl.where((nibble & 8) != 0, -size, size)


@triton.jit
def _swapped(x, N: tl.constexpr, J: tl.constexpr):
    """The columns of an interpreted tile in the order that the device's have."""
    return tl.reshape(tl.permute(tl.reshape(x, (N, J // 4, 2, 2)), (0, 1, 3, 2)), (N, J))


@triton.jit
def unpack(codes, scale, N: tl.constexpr, J: tl.constexpr, PER_SCALE: tl.constexpr):
    """Codes uint8 [N, J] and scales bfloat16 [N, J / PER_SCALE] -> the even and the odd inputs' weights, bfloat16
    [N, J] each, in the order of `column`."""
    wide = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, J // PER_SCALE, PER_SCALE)), (N, J))
    if INTERPRETED:
        low, high = _value((codes & 15).to(tl.int32)), _value((codes >> 4).to(tl.int32))
        low, high = low * wide.to(tl.float32), high * wide.to(tl.float32)
        low, high = _swapped(low, N, J).to(tl.bfloat16), _swapped(high, N, J).to(tl.bfloat16)
    else:
        low, high = tl.inline_asm_elementwise(
            _ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, wide],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high
