"""Packed 4-bit weights: the nodes, what they mean, and how to make them.

A packed matrix is a node of a parameter tree, not a special tensor. Two E2M1 codes share a byte along the input
dimension, the element with the even index in the low nibble. Source: OCP Microscaling Formats 1.0 for E2M1 and E8M0;
the AMD Quark and NVIDIA modelopt checkpoint layouts for the rest.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; codes 8..15 are their negatives, 8 is -0
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MXFP4_MAX = 6.0 * 2.0**125
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16


class MXFP4(NamedTuple):
    """w[n, k] = E2M1[code(n, k)] * 2^(scales[n, k // 32] - 127)."""

    codes: Tensor  # uint8 [..., out, in / 2]
    scales: Tensor  # uint8 [..., out, in / 32], E8M0


class NVFP4(NamedTuple):
    """w[n, k] = E2M1[code(n, k)] * scales[n, k // 16] * global_scale[part of n]."""

    codes: Tensor  # uint8 [..., out, in / 2]
    scales: Tensor  # float8_e4m3fn [..., out, in / 16]
    global_scale: Tensor  # float32 [..., P]: the rows are P equal parts, each with its own


Weight = Tensor | MXFP4 | NVFP4


def logical_shape(weight: Weight) -> tuple[int, ...]:
    """The shape [..., out, in] of the matrix that a weight stands for."""
    if isinstance(weight, Tensor):
        return tuple(weight.shape)
    return (*weight.codes.shape[:-1], 2 * weight.codes.shape[-1])


_PAIR = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # by bytes of a value: a type of the size of two


@lru_cache(maxsize=8)
def _byte_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: both values of a byte, low nibble first, as one element of twice the size. A constant, kept per device:
    unpacking is one gather of whole elements."""
    half = torch.tensor(E2M1, dtype=torch.float32)
    table = torch.cat([half, -half])
    codes = torch.arange(256)
    pairs = torch.stack([table[codes & 15], table[codes >> 4]], -1).to(device, dtype)
    return pairs.view(_PAIR[dtype.itemsize])[:, 0]


def unpack(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., k/2] -> the exact E2M1 values [..., k] in any float dtype."""
    pairs = _byte_values(dtype, codes.device)
    return pairs.index_select(0, codes.flatten().int()).view(dtype).view(*codes.shape[:-1], -1)


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    """[256]: what each exponent byte stands for."""
    scales = torch.arange(256)
    bits = torch.where(scales == 0, 0x0040_0000, scales << 23)
    return torch.where(scales == 255, 0x7FC0_0000, bits).int().view(torch.float32).to(device)


def e8m0(scales: Tensor) -> Tensor:
    """uint8 exponents -> float32 2^(s - 127), exact; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    return _powers(scales.device).index_select(0, scales.flatten().int()).view(scales.shape)


def dequantise(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [..., out, in] that a weight stands for, in `dtype`.

    MXFP4 is exact in float32 and bfloat16, whose exponents reach as far as its own; float16 is rounded once. NVFP4
    multiplies code by block scale first (exact in bfloat16), then by the global scale in float32, then rounds once.
    """
    match weight:
        case MXFP4(codes, scales):
            wide = torch.float32 if dtype == torch.float16 else dtype
            values = unpack(codes, wide).unflatten(-1, (scales.shape[-1], -1))
            return (values * e8m0(scales).to(wide).unsqueeze(-1)).flatten(-2).to(dtype)
        case NVFP4(codes, scales, global_scale):
            values = unpack(codes, torch.float32).unflatten(-1, (scales.shape[-1], -1))
            blocks = (values * scales.float().unsqueeze(-1)).flatten(-2)
            parts = blocks.unflatten(-2, (global_scale.shape[-1], -1))
            return (parts * global_scale[..., None, None]).flatten(-3, -2).to(dtype)
        case Tensor():
            return weight.to(dtype)


def pack(values: Tensor) -> Tensor:
    """float [..., k] in units of the scale -> uint8 [..., k/2]: nearest E2M1, ties to the even code, saturating."""
    a = values.abs()
    # Ties fall on the boundary itself; >= sends them up to an even code, > leaves them at the even code below.
    code = (a > 0.25).to(torch.uint8)
    for boundary, tie_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += a >= boundary if tie_up else a > boundary
    code |= torch.signbit(values).to(torch.uint8) << 3
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def quantise_mxfp4(weight: Tensor) -> MXFP4:
    """float [..., out, in] -> MXFP4 by Quark's block rule: the exponent of the block maximum, rounded up from 1.75.

    Values above MXFP4_MAX saturate: the next value up is no finite float32. Raises ValueError if `in` is no multiple of
    32 or a value is not finite.
    """
    blocks = _blocks(weight, MXFP4_BLOCK, "MXFP4").clamp(-MXFP4_MAX, MXFP4_MAX)
    bits = blocks.abs().amax(-1).view(torch.int32)
    exponent = ((bits + 0x0020_0000) >> 23) - 127 - 2
    exponent = exponent.clamp(-127, 127)
    scale = e8m0((exponent + 127).to(torch.uint8))
    return MXFP4(pack(blocks / scale.unsqueeze(-1)).flatten(-2), (exponent + 127).to(torch.uint8))


def quantise_nvfp4(weight: Tensor, parts: int = 1) -> NVFP4:
    """float [..., out, in] -> NVFP4, each of `parts` equal row ranges with its own global scale, amax / (6 * 448).

    Raises ValueError if `in` is no multiple of 16 or a value is not finite.
    """
    blocks = _blocks(weight, NVFP4_BLOCK, "NVFP4")
    halves = blocks.unflatten(-3, (parts, -1))  # [..., P, out/P, in/16, 16]
    amax = halves.abs().amax((-3, -2, -1))
    global_scale = amax / (E2M1_MAX * E4M3_MAX)
    # Below this its products with block scales are subnormal or 0; such weights become 0.
    global_scale = torch.where(global_scale >= 2.0**-117, global_scale, 1.0)
    g = global_scale[..., None, None]
    scale = (halves.abs().amax(-1) / (E2M1_MAX * g)).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = pack(halves / (scale.float() * g).unsqueeze(-1))
    return NVFP4(codes.flatten(-2).flatten(-3, -2), scale.flatten(-3, -2), global_scale)


def _blocks(weight: Tensor, block: int, name: str) -> Tensor:
    if weight.shape[-1] % block:
        raise ValueError(f"{name} needs an input width that is a multiple of {block}, not {weight.shape[-1]}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} cannot hold values that are not finite")
    return weight.float().unflatten(-1, (-1, block))
