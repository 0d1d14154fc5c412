"""Products in whole numbers in Triton's interpreter: inputs in parts, every code, however the work is cut."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_alone, gpu_experts
from muse_fn.kernels.gpu_alone import Shape, quantised_rows
from muse_fn.kernels.gpu_whole import width
from muse_fn.kernels.packed import MXFP4, quantise_mxfp4, quantise_nvfp4
from tests.kernels.test_gpu_experts import draw, exact, near
from tests.models import SEEDS

BF16 = torch.bfloat16


def parts_of(rows: Tensor, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both parts, and the scales [T, inputs / 16], of quantised rows."""
    first, second, scales = rows.split([inputs, inputs, inputs // 4], dim=1)
    return first, second, scales.contiguous().view(torch.float32)


def restored(rows: Tensor, inputs: int) -> Tensor:
    """The inputs in float64."""
    first, second, scales = parts_of(rows, inputs)
    return (255 * first.double() + second.double()) * 2 * scales.double().repeat_interleave(16, 1)


@given(SEEDS, st.integers(1, 3), st.sampled_from([128, 384, 1152]), st.integers(-100, 100))
def test_inputs_are_off_by_little_of_the_largest_of_16(seed: int, tokens: int, inputs: int, power: int) -> None:
    x = draw(seed, tokens, inputs) * 2.0**power * torch.logspace(-3, 3, inputs)
    rows = quantised_rows(x.to(BF16))
    assert rows.shape == (tokens, width(inputs))
    off = (restored(rows, inputs) - x.to(BF16).double()).abs()
    largest = x.to(BF16).double().unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, 1)
    assert (off <= largest * 2.0**-14).all()


def test_what_a_block_shares_is_a_power_of_two_and_holds_its_largest() -> None:
    """Rows of bfloat16 within 2^-6 of their largest are exact; the largest of all and the smallest are."""
    largest = torch.finfo(BF16).max
    x = torch.stack([torch.linspace(1, 2, 128), torch.full((128,), largest), torch.full((128,), -largest)]).to(BF16)
    assert torch.equal(restored(quantised_rows(x), 128), x.double())
    nothing = quantised_rows(torch.zeros(1, 128))
    assert not restored(nothing, 128).any()
    assert parts_of(nothing, 128)[2].isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_breaks_its_block(broken: float) -> None:
    x = torch.ones(1, 128)
    x[0, 20] = broken
    scales = parts_of(quantised_rows(x), 128)[2]
    assert scales.isnan().tolist() == [[False, True] + [False] * 6]


CUTS = (Shape(32, 1), Shape(16, 2)), (Shape(64, 2), Shape(32, 1))  # of gate and up, and of down


@pytest.mark.parametrize(("form", "cut", "groups"), [
    ("mxfp4", CUTS[0], 1), ("mxfp4", CUTS[0], 2), ("mxfp4", CUTS[1], 3), ("nvfp4", CUTS[0], 3), ("nvfp4", CUTS[1], 1),
])  # fmt: skip
def test_however_the_work_is_cut(
    form: str, cut: tuple[Shape, Shape], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps with one group of inputs each, with two, and with an odd number of them."""
    latent, inner = cut[0].warps * groups * 128, cut[1].warps * groups * 128
    monkeypatch.setattr(gpu_alone, "FEWEST", cut[0])
    monkeypatch.setattr(gpu_alone, "DOWN", cut[1])
    gate_up, down = draw(0, 2, 2 * inner, latent) / 8, draw(1, 2, latent, inner) / 8
    if form == "mxfp4":
        packed = quantise_mxfp4(gate_up), quantise_mxfp4(down)
    else:
        packed = quantise_nvfp4(gate_up, 2), quantise_nvfp4(down)
    u, idx = draw(2, 1, latent).to(BF16), torch.tensor([[0, -1]])
    near(gpu_experts.expert_rows(u, idx, *packed), exact(u, idx, *packed))


@pytest.mark.parametrize(("latent", "inner", "dtype"), [(128, 640, BF16), (384, 128, torch.float32)])
def test_routes_of_no_expert_here_are_zeros_whatever_lay_there(
    latent: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up writes them, in as many pieces as it has programs: 40 of 4 columns of 128, and 8 of 48 of 384."""
    empty = torch.empty

    def poisoned(*shape: int, **options: Any) -> Tensor:
        x = empty(*shape, **options)
        return x.fill_(torch.nan if x.is_floating_point() else 85)

    monkeypatch.setattr(torch, "empty", poisoned)
    gate_up, down = quantise_mxfp4(draw(0, 2, 2 * inner, latent) / 8), quantise_mxfp4(draw(1, 2, latent, inner) / 8)
    u, idx = draw(2, 2, latent).to(BF16), torch.tensor([[4, 7, 6], [9, 3, 2]])
    found = gpu_experts.expert_rows(u, idx, gate_up, down, first=5, dtype=dtype)
    elsewhere = (idx < 5) | (idx > 6)
    assert torch.equal(found[elsewhere], torch.zeros(5, latent, dtype=dtype))
    near(found, exact(u, idx - 5, gate_up, down))
    assert not gpu_experts.expert_rows(u, idx, gate_up, down, first=50, dtype=dtype).any()


def test_products_are_nearer_than_those_of_rounded_weights() -> None:
    """Inner rows keep 15 bits; only inputs and outputs are rounded, and these inputs are exact in parts."""
    gate_up, down = quantise_mxfp4(draw(0, 2, 256, 256) / 8), quantise_mxfp4(draw(1, 2, 256, 128) / 8)
    u, idx = draw(2, 3, 256).to(BF16), torch.tensor([[0, 1]] * 3)
    expected = exact(u, idx, gate_up, down)
    found = gpu_experts.expert_rows(u, idx, gate_up, down, dtype=torch.float32)
    assert (found - expected).norm() < 2.0**-12 * expected.norm()


def test_a_scale_that_is_no_number_breaks_its_row_alone() -> None:
    gate_up, down = quantise_mxfp4(draw(0, 1, 256, 256) / 8), quantise_mxfp4(draw(1, 1, 256, 128) / 8)
    scales = down.scales.clone()
    scales[0, 7, 1] = 255
    u, idx = draw(2, 1, 256).to(BF16), torch.zeros(1, 1, dtype=torch.int64)
    found = gpu_experts.expert_rows(u, idx, gate_up, MXFP4(down.codes, scales))
    assert found.isnan().nonzero().tolist() == [[0, 0, 7]]
