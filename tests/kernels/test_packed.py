"""Packed 4-bit weights against their definition in exact arithmetic: every byte, every code, every tie."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import packed
from muse_fn.kernels.packed import MXFP4, NVFP4, dequantise, pack, quantise_mxfp4, quantise_nvfp4, unpack

HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # the eight magnitudes in units of one half, written from the format's definition
CODES = [Fraction(half, 2) * sign for sign in (1, -1) for half in HALVES]
LOW_THEN_HIGH = torch.tensor([c | ((c + 1) << 4) for c in range(0, 16, 2)], dtype=torch.uint8)  # codes 0, 1, … 15
FLOATS = st.floats(-8, 8, width=32)


def e4m3(byte: int) -> Fraction | None:
    """The value of an E4M3 byte by its definition: 4 exponent bits, bias 7, no infinities; None is NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    )
    return -size if sign else size


def all_codes_beside(scales: int, block: int) -> Tensor:
    """uint8 [scales, block / 2]: one row of all sixteen codes, repeated over the block, for each scale."""
    return LOW_THEN_HIGH.repeat(scales, block // 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_e8m0_byte_times_every_code(dtype: torch.dtype) -> None:
    weight = MXFP4(all_codes_beside(256, 32), torch.arange(256, dtype=torch.uint8).unsqueeze(1))
    values = dequantise(weight, dtype).double()
    assert values.shape == (256, 32)
    for byte in range(256):
        for column in range(32):
            code = column % 16
            found, sign = values[byte, column].item(), torch.signbit(values[byte, column]).item()
            if byte == 255:
                assert found != found
                continue
            exact = CODES[code] * Fraction(2) ** (byte - 127)
            if abs(exact) >= 2**128:
                assert found == (float("inf") if exact > 0 else -float("inf"))
            else:
                assert Fraction(found) == exact, (byte, code)
                assert sign == (code >= 8), "code 8 is minus zero"


def test_float16_rounds_an_mxfp4_value_once() -> None:
    weight = MXFP4(all_codes_beside(256, 32), torch.arange(256, dtype=torch.uint8).unsqueeze(1))
    assert torch.equal(dequantise(weight, torch.float16)[:255], dequantise(weight, torch.float32)[:255].half())


def test_every_e4m3_byte_times_every_code() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    for global_scale in (1.0, 0.75, 3.0e-5):
        weight = NVFP4(all_codes_beside(256, 16), scales, torch.tensor([global_scale]))
        values = dequantise(weight, torch.float32)
        factor = Fraction(torch.tensor(global_scale).item())
        for byte in range(256):
            scale = e4m3(byte)
            for code in range(16):
                found = values[byte, code].item()
                if scale is None:
                    assert found != found
                else:
                    exact = float(CODES[code] * scale * factor)  # one product of exact factors: rounded once, as here
                    assert found == torch.tensor(exact, dtype=torch.float64).float().item(), (byte, code)


def test_nan_e4m3_bytes_are_two() -> None:
    assert [byte for byte in range(256) if e4m3(byte) is None] == [0x7F, 0xFF]


def test_row_parts_have_their_own_global_scale() -> None:
    codes = torch.full((2, 4, 8), 0x22, dtype=torch.uint8)  # all 1.0
    scales = torch.full((2, 4, 1), 2.0).to(torch.float8_e4m3fn)
    values = dequantise(NVFP4(codes, scales, torch.tensor([[1.0, 4.0], [16.0, 64.0]])), torch.float32)
    assert values[..., 0].tolist() == [[2, 2, 8, 8], [32, 32, 128, 128]]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        *[(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)],  # ties, to the even code
        *[(6.0, 7), (6.5, 7), (100.0, 7), (float("inf"), 7)],  # saturation
        *[(0.2501, 1), (0.7499, 1), (1.2501, 3), (1.7499, 3), (2.5001, 5), (3.4999, 5), (5.0001, 7), (0.0, 0)],
    ],
)
def test_rounding_to_e2m1(value: float, code: int) -> None:
    byte = pack(torch.tensor([value, -value])).item()
    assert (int(byte) & 15, int(byte) >> 4) == (code, code | 8)


@given(st.lists(FLOATS, min_size=2, max_size=64).filter(lambda values: len(values) % 2 == 0))
def test_packing_takes_the_nearest_code(values: list[float]) -> None:
    found = unpack(pack(torch.tensor(values)), torch.float32).tolist()
    for value, got in zip(values, found, strict=True):
        nearest = min(abs(Fraction(value) - code) for code in CODES)
        assert abs(Fraction(value) - Fraction(got)) == nearest, (value, got)


@given(st.binary(min_size=1, max_size=64))
def test_unpack_then_pack_is_identity(raw: bytes) -> None:
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(pack(unpack(codes, dtype)), codes)


def block_exponent(values: list[float]) -> int:
    """The block rule in exact arithmetic: floor(log2 of the maximum, rounded up from 1.75) - 2, within E8M0."""
    largest = max(Fraction(abs(value)) for value in values)
    if largest < Fraction(2) ** -126:
        return -127
    exponent = 0
    while Fraction(2) ** exponent > largest:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= largest:
        exponent += 1
    exponent += largest >= Fraction(7, 4) * Fraction(2) ** exponent
    return max(-127, exponent - 2)


BLOCK = st.tuples(st.lists(FLOATS, min_size=32, max_size=32), st.integers(-120, 120))


@given(BLOCK)
def test_mxfp4_block_rule(block: tuple[list[float], int]) -> None:
    values = (torch.tensor(block[0]).double() * 2.0 ** block[1]).float()
    weight = quantise_mxfp4(values.unsqueeze(0))
    exponent = block_exponent(values.tolist())
    assert weight.scales.item() == exponent + 127
    scaled = [Fraction(value) / Fraction(2) ** exponent for value in values.tolist()]
    for want, got in zip(scaled, unpack(weight.codes[0], torch.float32).tolist(), strict=True):
        assert abs(want - Fraction(got)) == min(abs(want - code) for code in CODES)


@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(1, 252))
def test_mxfp4_repacks_its_own_values(raw: list[int], scale: int) -> None:
    """Quantising what a block stands for gives the same values; the same bytes if the block uses its range."""
    raw = [*raw[:-1], 0x77]  # both codes 6, so that the maximum fixes the exponent
    weight = MXFP4(torch.tensor([raw], dtype=torch.uint8), torch.tensor([[scale]], dtype=torch.uint8))
    again = quantise_mxfp4(dequantise(weight, torch.float32))
    assert torch.equal(dequantise(again, torch.float32), dequantise(weight, torch.float32))


def test_mxfp4_saturates_instead_of_overflowing() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 1e38, 0.0] * 8).unsqueeze(0)
    back = dequantise(quantise_mxfp4(values), torch.float32)
    assert back.isfinite().all()
    assert back[0, 0] == packed.MXFP4_MAX == -back[0, 1]


def test_zero_blocks_stay_zero() -> None:
    zeros = torch.zeros(2, 4, 32)
    assert quantise_mxfp4(zeros).scales.unique().tolist() == [0]
    for weight in (quantise_mxfp4(zeros), quantise_nvfp4(zeros, parts=2)):
        assert torch.equal(dequantise(weight, torch.float32), zeros)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_nvfp4_is_near_at_every_magnitude(size: float) -> None:
    values = (torch.randn(3, 8, 64).clamp(-3, 3) / 3).double().mul(size).float()
    weight = quantise_nvfp4(values, parts=2)
    back = dequantise(weight, torch.float32)
    assert weight.global_scale.shape == (3, 2)
    assert back.isfinite().all()
    # Half a step of the widest gap (4 to 6) plus the rounding of the block scale, relative to the block's maximum.
    blocks = (back - values).unflatten(-1, (-1, 16)).abs().amax(-1).double()
    limit = values.unflatten(-1, (-1, 16)).abs().amax(-1).double() * 0.25
    assert (blocks <= limit + 2688 * 2.0**-117).all()


def test_nvfp4_global_scale_is_the_maximum_of_its_part() -> None:
    values = torch.zeros(1, 4, 16)
    values[0, 0, 0], values[0, 3, 5] = 2688.0, -5376.0
    weight = quantise_nvfp4(values, parts=2)
    assert weight.global_scale.tolist() == [[1.0, 2.0]]
    assert torch.equal(dequantise(weight, torch.float32), values)


@pytest.mark.parametrize(("quantise", "block"), [(quantise_mxfp4, 32), (quantise_nvfp4, 16)])
def test_quantisers_refuse(quantise: Callable[[Tensor], MXFP4 | NVFP4], block: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {block}, not {block + 8}"):
        quantise(torch.zeros(2, block + 8))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            quantise(torch.full((2, block), bad))


def test_logical_shape_is_what_dequantise_returns() -> None:
    plain = torch.randn(2, 6, 64)
    for weight in (plain, quantise_mxfp4(plain), quantise_nvfp4(plain, parts=2)):
        assert packed.logical_shape(weight) == tuple(dequantise(weight, torch.float32).shape) == (2, 6, 64)
