"""Norms, residual gate and rotary: against float64, against transformers bit for bit, and by their scale laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MuseSparkTextConfig
from transformers.models.muse_spark import modeling_muse_spark as published

from muse_fn.kernels.norms import (
    Gain,
    Rotary,
    centred_norm,
    input_scaled_norm,
    plain_norm,
    residual_gate,
    rotary_angles,
    rotate,
)
from tests.models import SEEDS, close, far

EPS = st.sampled_from([1e-8, 1e-5, 1e-2, 1.0])
WIDTHS = st.integers(1, 70)
POWERS = st.integers(-12, 12).map(lambda n: 2.0**n)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def final_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the head applies it: the weight is the whole factor."""
    return centred_norm(x, Gain(weight.float()), eps)


def rms(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x²) + eps) in float64."""
    return (x.double().square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


@given(SEEDS, WIDTHS, EPS, st.sampled_from([1e-3, 1.0, 1e3]))
def test_norms_match_float64(seed: int, width: int, eps: float, scale: float) -> None:
    x, w = draw(seed, 3, width) * scale, draw(seed + 1, width)
    y = x.double() * (1 + w.double())
    close(plain_norm(x, eps), x.double() / rms(x, eps), 2e-6)
    close(final_norm(x, w, eps), x.double() / rms(x, eps) * w.double(), 2e-6)
    close(centred_norm(x, w, eps), x.double() / rms(x, eps) * (1 + w.double()), 2e-6)
    close(input_scaled_norm(x, w, eps), y / rms(y, eps), 2e-6)


@given(SEEDS, WIDTHS, EPS)
def test_norms_equal_transformers_bit_for_bit(seed: int, width: int, eps: float) -> None:
    x, w = draw(seed, 5, width), draw(seed + 1, width)
    modules = [
        (plain_norm(x, eps), published.MuseSparkRMSNorm(eps=eps, with_scale=False)),
        (final_norm(x, w, eps), published.MuseSparkRMSNorm(width, eps=eps)),
        (centred_norm(x, w, eps), published.MuseSparkTextCenteredRMSNorm(width, eps=eps)),
        (input_scaled_norm(x, w, eps), published.MuseSparkTextInputScaledRMSNorm(width, eps=eps)),
    ]
    for ours, module in modules:
        module.load_state_dict({"weight": w} if module.state_dict() else {})
        assert torch.equal(ours, module(x)), type(module)


@given(SEEDS, WIDTHS, EPS, POWERS)
def test_a_norm_of_a_scaled_input_is_the_norm_with_eps_unscaled(seed: int, width: int, eps: float, c: float) -> None:
    """norm(c x, c² eps) = norm(x, eps), bit for bit when c is a power of two; the input-scaled norm so in 1 + w too."""
    x, w = draw(seed, 3, width), draw(seed + 1, width).mul(64).round() / 64
    assert torch.equal(plain_norm(c * x, c * c * eps), plain_norm(x, eps))
    assert torch.equal(final_norm(c * x, w, c * c * eps), final_norm(x, w, eps))
    assert torch.equal(centred_norm(c * x, w, c * c * eps), centred_norm(x, w, eps))
    assert torch.equal(input_scaled_norm(c * x, w, c * c * eps), input_scaled_norm(x, w, eps))
    assert torch.equal(input_scaled_norm(x, c * (1 + w) - 1, c * c * eps), input_scaled_norm(x, w, eps))


@given(SEEDS, st.integers(2, 70), st.floats(1e-4, 1e4))
def test_without_eps_the_scale_of_the_input_is_lost(seed: int, width: int, c: float) -> None:
    x, w = draw(seed, 3, width), draw(seed + 1, width)
    close(plain_norm(c * x, 1e-30), plain_norm(x, 1e-30), 1e-5)
    close(plain_norm(x, 1e-30).square().mean(-1), torch.ones(3), 1e-5)
    close(input_scaled_norm(x, w, 1e-30).square().mean(-1), torch.ones(3), 1e-5)


@given(SEEDS, WIDTHS, POWERS)
def test_weights_act_after_the_mean_except_in_the_input_scaled_norm(seed: int, width: int, c: float) -> None:
    x, w = draw(seed, 3, width), draw(seed + 1, width)
    assert torch.equal(final_norm(x, c * w, 1e-5), c * final_norm(x, w, 1e-5))
    zero = torch.zeros(width)
    assert torch.equal(centred_norm(x, zero, 1e-5), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    assert torch.equal(input_scaled_norm(x, zero, 1e-5), centred_norm(x, zero, 1e-5))
    close(final_norm(x, zero + 1, 1e-5), centred_norm(x, zero, 1e-5), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_narrow_inputs_are_float32_and_round_nothing(dtype: torch.dtype) -> None:
    x, w = draw(0, 4, 33).to(dtype), draw(1, 33).to(dtype)
    wide_x, wide_w = x.float(), w.float()
    for narrow, wide in (
        (plain_norm(x, 1e-5), plain_norm(wide_x, 1e-5)),
        (final_norm(x, w, 1e-5), final_norm(wide_x, wide_w, 1e-5)),
        (centred_norm(x, w, 1e-5), centred_norm(wide_x, wide_w, 1e-5)),
        (input_scaled_norm(x, w, 1e-5), input_scaled_norm(wide_x, wide_w, 1e-5)),
        (residual_gate(x, x.flip(0), w, 0.3), residual_gate(wide_x, wide_x.flip(0), wide_w, 0.3)),
    ):
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, wide)


def alpha_beta(gate: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The two factors, read off with a stream of ones and a branch of zeros, and the reverse."""
    one, zero = torch.ones_like(gate), torch.zeros_like(gate)
    return residual_gate(one, zero, gate, temperature), residual_gate(zero, one, gate, temperature)


@given(st.floats(-20, 20), st.floats(0.05, 3))
def test_gate_factors(gate: float, temperature: float) -> None:
    alpha, beta = (x.item() for x in alpha_beta(torch.tensor([gate]), temperature))
    exact_beta = 1 / (1 + math.exp(-torch.tensor(gate).item() / temperature))
    exact_left = (1 - exact_beta) * (1 + exact_beta)
    assert beta == pytest.approx(exact_beta, rel=1e-5, abs=1e-30)
    if exact_left > 1.001e-3:
        assert alpha**2 + beta**2 == pytest.approx(1, abs=1e-6)
    if exact_left < 0.999e-3:
        assert alpha == torch.tensor(1e-3).sqrt().item(), "the clamp"


def test_gate_at_zero_and_on_both_ends() -> None:
    alpha, beta = alpha_beta(torch.tensor([0.0, 100.0, -100.0]), 0.3)
    close(alpha, torch.tensor([0.75**0.5, 1e-3**0.5, 1.0]), 1e-7)
    close(beta, torch.tensor([0.5, 1.0, 0.0]), 1e-7)


@given(SEEDS, st.floats(0.05, 3))
def test_gate_equals_transformers_bit_for_bit(seed: int, temperature: float) -> None:
    class Settings:
        hidden_size = 33
        residual_gate_temperature = temperature

    module = published.MuseSparkResidualGate(Settings())  # pyright: ignore[reportArgumentType]  # reads two fields
    gate, residual, branch = draw(seed, 33) * 3, draw(seed + 1, 4, 33), draw(seed + 2, 4, 33)
    module.load_state_dict({"gate": gate})
    assert torch.equal(residual_gate(residual, branch, gate, temperature), module(residual, branch))


@given(SEEDS)
def test_gate_is_linear_in_stream_and_branch(seed: int) -> None:
    gate, x, y = draw(seed, 9), draw(seed + 1, 4, 9), draw(seed + 2, 4, 9)
    alpha, beta = alpha_beta(gate, 0.3)
    close(residual_gate(x, y, gate, 0.3), alpha * x + beta * y, 1e-6)


@given(st.integers(0, 2**20 - 1), st.sampled_from([2, 6, 64, 128]), st.sampled_from([100.0, 10_000.0, 500_000.0]))
def test_rotary_angles_against_float64(position: int, head_dim: int, theta: float) -> None:
    """An angle is one float32 product, of at most a few units in the last place: at position p pair j turns by
    p theta^(-2j/D), known to 2^-21 of itself. At a million that is up to half a radian for the fast pairs: the
    published model computes in float32 too, and the next test holds ours to its very bits."""
    cos, sin = rotary_angles(torch.tensor([[position]]), head_dim, theta)
    assert cos.shape == sin.shape == (1, 1, 1, head_dim)
    for j in range(head_dim // 2):
        angle = position * theta ** (-2 * j / head_dim)
        limit = angle * 2.0**-21 + 1e-6
        for k in (j, j + head_dim // 2):
            assert abs(cos[..., k].item() - math.cos(angle)) <= limit, (j, k)
            assert abs(sin[..., k].item() - math.sin(angle)) <= limit, (j, k)


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=9), st.sampled_from([2, 6, 64]))
def test_rotary_angles_equal_transformers_bit_for_bit(positions: list[int], head_dim: int) -> None:
    config = MuseSparkTextConfig(head_dim=head_dim)
    module = published.MuseSparkTextRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]  # it reads the text part
    pos = torch.tensor([positions])
    cos, sin = module(torch.zeros(1), pos)
    ours = rotary_angles(pos, head_dim, 500_000.0)
    assert torch.equal(ours.cos.squeeze(2), cos)
    assert torch.equal(ours.sin.squeeze(2), sin)


@given(SEEDS, st.integers(1, 8), st.integers(0, 5000))
def test_rotate_turns_pairs_as_complex_numbers(seed: int, half: int, position: int) -> None:
    x = draw(seed, 1, 1, 3, 2 * half)
    rotary = rotary_angles(torch.tensor([[position]]), 2 * half, 1e4)
    turn = torch.complex(rotary.cos[..., :half], rotary.sin[..., :half])
    expected = torch.complex(x[..., :half], x[..., half:]) * turn
    close(rotate(x, rotary), torch.cat([expected.real, expected.imag], -1), 1e-6)
    close(rotate(x, rotary).norm(dim=-1), x.norm(dim=-1), 1e-6)


def test_rotate_by_nothing_is_the_identity_and_backwards_undoes() -> None:
    x = draw(0, 2, 5, 3, 8)
    pos = torch.arange(10).view(2, 5)
    rotary = rotary_angles(pos, 8, 1e4)
    assert torch.equal(rotate(x, rotary_angles(torch.zeros_like(pos), 8, 1e4)), x)
    close(rotate(rotate(x, rotary), Rotary(rotary.cos, -rotary.sin)), x, 1e-6)
    far(rotate(x, rotary)[:, 1:], x[:, 1:])
