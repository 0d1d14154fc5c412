"""Triton's expert products against the reference, in its interpreter: formats, routings, scales, splits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_experts, gpu_order, reference
from muse_fn.kernels.gpu_experts import Shape, expert_rows, why_not
from muse_fn.kernels.gpu_order import tiles_of
from muse_fn.kernels.packed import MXFP4, Weight, quantise_mxfp4, quantise_nvfp4
from tests.models import SEEDS, close

# Where exp overflows a quotient is 0, as it should be; numpy, which the interpreter computes with, warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

ALONE = [0, gpu_experts.ALONE]  # routes that are multiplied each by itself: none, or as it is
FORMS = ["plain", "mxfp4", "nvfp4"]
BF16 = torch.bfloat16
TOLERANCE = 2**-6  # of the largest: the reference rounds the activation's factors, the kernel their product


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(form: str, seed: int, experts: int, latent: int = 256, inner: int = 128) -> tuple[Weight, Weight]:
    gate_up, down = draw(seed, experts, 2 * inner, latent) / 8, draw(seed + 1, experts, latent, inner) / 8
    match form:
        case "mxfp4":
            return quantise_mxfp4(gate_up), quantise_mxfp4(down)
        case "nvfp4":
            return quantise_nvfp4(gate_up, 2), quantise_nvfp4(down)
        case _:
            return gate_up.to(BF16), down.to(BF16)


def exact(u: Tensor, idx: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """The reference in float32."""
    gate_up, down = (w.float() if isinstance(w, Tensor) else w for w in (gate_up, down))
    return reference.expert_rows(u.float(), idx, gate_up, down)


def near(found: Tensor, expected: Tensor) -> None:
    """Within TOLERANCE of the largest, however small that is."""
    largest = expected.abs().max().clamp_min(1e-30)
    close(found.float() / largest, expected / largest, TOLERANCE)


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([1, 2, 5, 21]), st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 9]),
       st.sampled_from(FORMS))  # fmt: skip
def test_expert_rows(seed: int, tokens: int, top_k: int, experts: int, spread: int, form: str) -> None:
    """One token and many, few experts taking all, others' routes among them, experts with none."""
    gate_up, down = weights(form, seed, experts)
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, min(spread, experts + 1), (tokens, top_k), generator=generator)
    u = draw(seed + 2, tokens, 256).to(BF16)
    found = expert_rows(u, idx, gate_up, down)
    assert found.dtype == BF16
    assert (found[(idx < 0) | (idx >= experts)] == 0).all()
    near(found, exact(u, idx, gate_up, down))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "shape"), [
    (1, Shape(8, (32, 64), (2, 1), (1, 1), (2, 2))),
    (3, Shape(16, (64, 32), (1, 1), (2, 1), (2, 2))),
    (40, Shape(32, (128, 128), (1, 1), (1, 1), (2, 2))),
])  # fmt: skip
def test_however_the_work_is_cut(form: str, tokens: int, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(routes: int, form: int, latent: int, inner: int) -> Shape:
        return shape

    monkeypatch.setattr(gpu_experts, "shape_of", chosen)
    monkeypatch.setattr(gpu_experts, "ALONE", 0)
    gate_up, down = weights(form, 0, 3, 256, 128)
    u, idx = draw(2, tokens, 256).to(BF16), torch.randint(-1, 4, (tokens, 2))
    near(expert_rows(u, idx, gate_up, down), exact(u, idx, gate_up, down))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 14, 60])
def test_experts_of_a_part_of_the_ids(form: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are those of all experts, of which this part begins at `first`; rows may be asked for in float32."""
    monkeypatch.setattr(gpu_experts, "SORTED_HERE", 100)
    monkeypatch.setattr(gpu_order, "SORTED_HERE", 100)
    gate_up, down = weights(form, 0, 3)
    u, idx = draw(2, tokens, 256).to(BF16), torch.randint(0, 9, (tokens, 3))
    found = expert_rows(u, idx, gate_up, down, first=4, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert (found[(idx < 4) | (idx >= 7)] == 0).all()
    near(found, exact(u, idx - 4, gate_up, down))
    given = gpu_experts.arranged_for(u, idx.numel())
    assert torch.equal(found, expert_rows(u, idx, gate_up, down, first=4, dtype=torch.float32, arranged=given))


def test_one_expert_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """More routes than a large tile has rows: a full one and what is left."""
    for file in (gpu_experts, gpu_order):
        monkeypatch.setattr(file, "SORTED_HERE", 8)
    gate_up, down = weights("mxfp4", 0, 2)
    u, idx = draw(2, 140, 256).to(BF16), torch.ones(140, 1, dtype=torch.int64)
    near(expert_rows(u, idx, gate_up, down), exact(u, idx, gate_up, down))


@pytest.mark.parametrize("alone", ALONE)
def test_one_large_scale_among_small_ones(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where routes are sorted its tile is done without the short cut, and the others are not."""
    monkeypatch.setattr(gpu_experts, "ALONE", alone)
    gate_up, down = weights("mxfp4", 0, 2)
    assert isinstance(gate_up, MXFP4)
    scales = gate_up.scales.clone()
    scales[1, 5, 0] = 140
    u, idx = draw(2, 2, 256).to(BF16), torch.tensor([[0, 1]] * 2)
    large = gate_up._replace(scales=scales)
    found, before = expert_rows(u, idx, large, down), expert_rows(u, idx, gate_up, down)
    near(found, exact(u, idx, large, down))
    assert torch.equal(found[:, 0], before[:, 0])
    assert not torch.equal(found[:, 1], before[:, 1])


def test_many_routes_are_sorted_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (gpu_experts, gpu_order):
        monkeypatch.setattr(file, "SORTED_HERE", 8)
    gate_up, down = weights("mxfp4", 0, 5)
    u, idx = draw(2, 50, 256).to(BF16), torch.randint(-1, 7, (50, 3))
    near(expert_rows(u, idx, gate_up, down), exact(u, idx, gate_up, down))


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("scale", [2, 3, 60, 127, 128, 129, 200, 247])
def test_scales_reach_as_far_as_the_format(scale: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against dequantised weights; inputs are scaled against them so that sums stay in range.

    0 and 1 make numbers below the normal ones, which the interpreter turns to 0: bench/kernel_checks.py has them.
    """
    monkeypatch.setattr(gpu_experts, "ALONE", alone)
    gate_up, down = weights("mxfp4", 0, 2)
    assert isinstance(gate_up, MXFP4)
    gate_up = gate_up._replace(scales=torch.full_like(gate_up.scales, scale))
    u = (draw(2, 4, 256) * 2.0 ** max(-120, min(120, 127 - scale))).to(BF16)
    idx = torch.tensor([[0, 1]] * 4)
    expected = exact(u, idx, gate_up, down)
    assert expected.isfinite().all()
    near(expert_rows(u, idx, gate_up, down), expected)


def test_negative_zeros_and_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 4, 64).repeat(1, 64, 1)
    gate_up = MXFP4(codes, torch.full((1, 256, 4), 122, dtype=torch.uint8))
    down = MXFP4(codes[:, :128].contiguous(), torch.full((1, 128, 4), 122, dtype=torch.uint8))
    u, idx = draw(0, 3, 128).to(BF16), torch.zeros(3, 1, dtype=torch.int64)
    near(expert_rows(u, idx, gate_up, down), exact(u, idx, gate_up, down))
    u.zero_()
    assert torch.equal(expert_rows(-u, idx, gate_up, down), torch.zeros(3, 1, 128, dtype=BF16))


@pytest.mark.parametrize("alone", ALONE)
def test_a_broken_token_breaks_no_other(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_experts, "ALONE", alone)
    gate_up, down = weights("mxfp4", 0, 2)
    u, idx = draw(2, 6, 256).to(BF16), torch.tensor([[0, 1]] * 6)
    expected = expert_rows(u, idx, gate_up, down)
    u[2] = torch.nan
    found = expert_rows(u, idx, gate_up, down)
    others = [0, 1, 3, 4, 5]
    assert found[2].isnan().all()
    assert torch.equal(found[others], expected[others])


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 60), st.integers(1, 9), st.sampled_from([8, 16]), st.booleans())
def test_tiles_hold_every_route_once(seed: int, count: int, experts: int, rows: int, is_sorted_here: bool) -> None:
    idx = torch.randint(-1, experts + 1, (count, 2), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_order, "SORTED_HERE", 1024 if is_sorted_here else 0)
        order, expert, start, size = (x.tolist() for x in tiles_of(idx, experts, rows))
    routes = idx.flatten().tolist()
    assert sorted(order) == [*range(len(routes))]
    held: list[int] = []
    for e, first, many in zip(expert, start, size, strict=True):
        mine = order[first : first + many]
        assert many <= rows
        assert all(routes[r] == e if e >= 0 else not 0 <= routes[r] < experts for r in mine)
        held += mine
    assert sorted(held) == sorted(order)


def test_no_tokens_at_all() -> None:
    gate_up, down = weights("mxfp4", 0, 2)
    assert (
        expert_rows(torch.empty(0, 256, dtype=BF16), torch.empty(0, 2, dtype=torch.int64), gate_up, down).numel() == 0
    )


def test_what_does_not_fit_is_named() -> None:
    u, (gate_up, down) = torch.zeros(1, 256, dtype=BF16), weights("mxfp4", 0, 2)
    assert isinstance(gate_up, MXFP4)
    assert why_not(u, gate_up, down) == ""
    assert why_not(u.float(), gate_up, down) == "inputs are torch.float32: bfloat16 alone"
    assert "multiples of 128" in why_not(u, *weights("plain", 0, 2, 256, 64))
    assert "different formats" in why_not(u, gate_up, weights("plain", 0, 2)[1])
    assert "float32: bfloat16, MXFP4" in why_not(u, torch.zeros(1, 256, 256), torch.zeros(1, 256, 128))
    assert "not contiguous" in why_not(u, gate_up._replace(codes=gate_up.codes.mT.contiguous().mT), down)
    three = quantise_nvfp4(draw(0, 1, 384, 256), 3), quantise_nvfp4(draw(0, 1, 256, 128))
    assert "3 global scales" in why_not(u, *three)
