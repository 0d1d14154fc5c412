"""Four-bit weights to bfloat16 in registers: what the Triton expert products share.

A tensor core takes its left factor from registers in a fixed pattern of a row's four threads; a thread that reads 16
bytes holds 32 neighbouring weights instead. So the columns are renumbered, such that what a thread has read is what it
must hold, and no weight moves: a group of 128 inputs is two products of 64 columns, of the even and of the odd inputs
(a byte holds one of each), and `column` says which input stands where. The right factor is stored in that order, which
differs between the products of few rows (each warp its own part of the inputs) and of many (all warps together).

E2M1 in the low bits of a bfloat16's exponent and the high bit of its mantissa is its value times 2^-126, zero and the
subnormal included; so a block's scale times 2^126 makes it what it stands for. That factor exists for scales up to 1;
where they are larger, one product brings the weight back and another applies its scale.
"""

# pyright: basic, reportArgumentType=false
import triton
import triton.language as tl

from muse_fn.kernels.gpu import INTERPRETED

GROUP = 128  # inputs that are renumbered together
LARGE = tl.constexpr(-0x7F7F7F80)  # of four e8m0 bytes the bits that say that one's factor may not be a bfloat16
NV_SHIFT = tl.constexpr(2.0**-16)  # what is left out of the factors of NVFP4, whose scales reach 448


def _asm(registers: int, *factors: str) -> tl.constexpr:
    """Registers of eight codes and as many factors -> for each the even inputs' weights of bytes (0, 2), all of (1, 3),
    then the odd inputs' likewise, each times every factor; "@" is the one given."""
    lines: list[str] = []
    for i in range(registers):
        code, by = f"${4 * registers + i}", f"${5 * registers + i}"
        e, f, g, h = (f"${n * registers + i}" for n in range(4))
        pick = "0x01C001C0, 0xE4;"  # u's bits there, v's beside
        lines += [
            f"and.b32 s, {code}, 0x08080808; and.b32 t, {code}, 0x80808080;",  # every second sign
            f"shl.b32 u, {code}, 6; shl.b32 v, s, 12; lop3.b32 {e}, u, v, {pick}",
            f"shr.u32 u, {code}, 2; shl.b32 v, s, 4; lop3.b32 {f}, u, v, {pick}",
            f"shl.b32 u, {code}, 2; shl.b32 v, t, 8; lop3.b32 {g}, u, v, {pick}",
            f"shr.u32 u, {code}, 6; lop3.b32 {h}, u, t, {pick}",
        ]
        lines += [f"mul.rn.bf16x2 {x}, {x}, {by if n == '@' else n};" for n in factors for x in (e, f, g, h)]
    return tl.constexpr("{\n.reg .b32 s, t, u, v, one;\nmov.b32 one, 0x7E807E80;\n" + "\n".join(lines) + "\n}")


def _constraints(registers: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=&r"] * 4 * registers + ["r"] * 2 * registers))


# 16 bytes at once where registers allow it: the compiler then keeps them together.
_ASM, _LONG_ASM, _OF_FOUR = _asm(4, "@"), _asm(4, "one", "@"), _constraints(4)
_ONE_ASM, _ONE_LONG_ASM, _OF_ONE = _asm(1, "@"), _asm(1, "one", "@"), _constraints(1)


@triton.jit
def column(input, FEW: tl.constexpr):
    """Where an input 0 .. GROUP - 1 stands: even inputs in columns 0 .. 63, odd ones in 64 .. 127."""
    j = input >> 1  # its byte: q q s s low high, of thread q
    if FEW:
        k = ((j >> 2) & 3) * 16 + (j >> 4) * 4 + (j & 1) * 2 + ((j >> 1) & 1)
    else:
        k = ((j >> 2) & 3) * 16 + (j & 1) * 8 + (j >> 4) * 2 + ((j >> 1) & 1)
    return (input & 1) * 64 + k


@triton.jit
def row_of(r, BN: tl.constexpr, WARPS: tl.constexpr):
    """Which of BN rows in memory stands as row r of a product of many; pairs (0, 8) of 16 are its two halves."""
    warp, half = (r // 16) % WARPS, (r // 8) % 2
    return (r // (16 * WARPS)) * (16 * WARPS) + half * (8 * WARPS) + warp * 8 + r % 8


@triton.jit
def e8m0(byte):
    """2^(byte - 127) as bfloat16, exact, twice in an int32; 0 is 2^-127, below the normal numbers, and 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
    return bits | (bits << 16)


@triton.jit
def short_factor(scales, q):
    """2^(byte - 1) likewise, of byte q of four; anything of a byte above 127."""
    if INTERPRETED:
        both = tl.minimum((scales >> (8 * q)) & 0xFF, 127) * 0x10001  # it would warn of infinities
    else:
        both = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [scales, q * 0x101 + 0x4040], dtype=tl.int32, is_pure=True, pack=1
        )
    return both * 0x80 + 0x3F003F00


@triton.jit
def _value(nibble):
    """E2M1 -> float32, for the interpreter."""
    exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << (exponent + 1)).to(tl.float32) * 0.25)
    return tl.where((nibble & 8) != 0, -size, size)


@triton.jit
def _scaled(codes, factor, at: tl.constexpr, LONG: tl.constexpr):
    """The code at bit `at` of each register, for the interpreter."""
    value = _value((codes >> at) & 15)
    value = value if LONG else value * 2.0**-126
    return (value * (factor << 16).to(tl.float32, bitcast=True)).to(tl.bfloat16)  # exact


@triton.jit
def _half(x, at: tl.constexpr):
    return ((x >> at) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def weights(codes, factor, FEW: tl.constexpr, LONG: tl.constexpr):
    """Codes int32 [..., 16], eight in each, and for each the bfloat16 it is multiplied with, twice in an int32 -> the
    weights of the even and of the odd inputs, bfloat16 [..., 16, 2, 2]: register, (0, 2) or (1, 3), which of both."""
    if INTERPRETED:
        even = tl.join(tl.join(_scaled(codes, factor, 0, LONG), _scaled(codes, factor, 16, LONG)),
                       tl.join(_scaled(codes, factor, 8, LONG), _scaled(codes, factor, 24, LONG)))  # fmt: skip
        odd = tl.join(tl.join(_scaled(codes, factor, 4, LONG), _scaled(codes, factor, 20, LONG)),
                      tl.join(_scaled(codes, factor, 12, LONG), _scaled(codes, factor, 28, LONG)))  # fmt: skip
    else:
        four: tl.constexpr = _LONG_ASM if LONG else _ASM
        one: tl.constexpr = _ONE_LONG_ASM if LONG else _ONE_ASM
        e, f, g, h = tl.inline_asm_elementwise(
            four if FEW else one, _OF_FOUR if FEW else _OF_ONE, [codes, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4 if FEW else 1,
        )  # fmt: skip
        even = tl.join(tl.join(_half(e, 0), _half(e, 16)), tl.join(_half(f, 0), _half(f, 16)))
        odd = tl.join(tl.join(_half(g, 0), _half(g, 16)), tl.join(_half(h, 0), _half(h, 16)))
    return even, odd


@triton.jit
def placed_few(x, S: tl.constexpr, BN: tl.constexpr, AT_ONCE: tl.constexpr):
    """Weights [8, S, AT_ONCE * BN / 8, 16, 2, 2] as left factors [S, BN, AT_ONCE * 64]: row 8 b + l of part s is
    [l, s, b] of every group."""
    x = tl.reshape(x, (8, S, AT_ONCE, BN // 8, 4, 4, 2, 2))  # l s group b, thread, register, low, high
    return tl.reshape(tl.permute(x, (1, 3, 0, 2, 5, 4, 7, 6)), (S, BN, AT_ONCE * 64))


@triton.jit
def placed_many(x, BN: tl.constexpr, WARPS: tl.constexpr):
    """Weights [8, WARPS, BN / 8 / WARPS, 16, 2, 2] as a left factor [BN, 64]; `row_of` says which row is where."""
    x = tl.reshape(x, (8, WARPS, BN // (16 * WARPS), 2, 4, 4, 2, 2))  # l w … half, thread, register, low, high
    return tl.reshape(tl.permute(x, (2, 1, 3, 0, 5, 7, 4, 6)), (BN, 64))
