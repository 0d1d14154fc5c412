"""The Triton choice of experts, in Triton's interpreter, against its plain form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_route, pieces
from muse_fn.kernels.pieces import Routes
from tests.models import SEEDS, close

EXPERTS = st.sampled_from([1, 2, 3, 8, 31, 100, 256])


def apart(seed: int, tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """Logits and bias whose sums are well apart: no rounding of a sigmoid decides."""
    draw = torch.Generator().manual_seed(seed)
    bias = torch.randn(experts, generator=draw)
    sums = torch.stack([torch.randperm(experts, generator=draw) for _ in range(tokens)]) / experts
    scores = (sums * 3 - bias) % 0.98 + 0.01
    order = (scores + bias).sort(-1).values.diff(dim=-1)
    while experts > 1 and order.min() < 1e-5:
        bias = bias + torch.randn(experts, generator=draw)
        order = (scores + bias).sort(-1).values.diff(dim=-1)
    return torch.logit(scores), bias


def same(found: Routes, expected: Routes) -> None:
    assert torch.equal(found.idx_TR, expected.idx_TR)
    assert found.idx_TR.dtype == torch.int64
    assert found.weight_TR.dtype == torch.float32
    top = expected.weight_TR.abs().max().item() or 1.0
    close(found.weight_TR / top, expected.weight_TR / top, 1e-6)


@given(SEEDS, st.integers(1, 3), EXPERTS, st.data(), st.sampled_from([0.125, 1.0]), st.sampled_from([1.0, 2.5]))
def test_same_experts_and_weights(
    seed: int, tokens: int, experts: int, data: st.DataObject, multiplier: float, factor: float
) -> None:
    top_k = data.draw(st.integers(1, min(experts, 32)))
    logits, bias = apart(seed, tokens, experts)
    args = logits / multiplier, bias, top_k, multiplier, factor
    same(gpu_route.route(*args), pieces.route(*args))


def test_the_released_model_and_the_most_experts() -> None:
    for experts in (256, 1000, 1024):
        args = *apart(0, 4, experts), 8, 1.0, 2.5
        same(gpu_route.route(*args), pieces.route(*args))


def test_of_equal_sums_the_lowest_ids_are_taken() -> None:
    logits, bias = torch.zeros(2, 9), torch.zeros(9)
    assert gpu_route.route(logits, bias, 4, 1.0, 1.0).idx_TR.tolist() == [[0, 1, 2, 3]] * 2
    bias[[3, 7]] = 1.0
    assert gpu_route.route(logits, bias, 3, 1.0, 1.0).idx_TR.tolist() == [[0, 3, 7]] * 2


def test_sums_of_zero_are_equal_whatever_their_biases_sign() -> None:
    bias = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    logits = torch.full((1, 4), -200.0)
    with pytest.warns(RuntimeWarning, match="overflow"):  # numpy's, of the interpreter
        assert gpu_route.route(logits, bias, 2, 1.0, 1.0).idx_TR.tolist() == [[0, 1]]


def test_negative_sums_are_ordered_too() -> None:
    bias = torch.tensor([-3.0, -1.0, -5.0, -2.0, -4.0])
    assert gpu_route.route(torch.zeros(1, 5), bias, 3, 1.0, 1.0).idx_TR.tolist() == [[0, 1, 3]]


def test_the_bias_has_no_part_in_the_weights() -> None:
    bias = torch.tensor([9.0, 0.0, 5.0])
    routes = gpu_route.route(torch.zeros(1, 3), bias, 2, 1.0, 3.0)
    close(routes.weight_TR, torch.tensor([[1.5, 1.5]]), 1e-6)


def test_scores_too_small_to_normalise_stay_small() -> None:
    args = torch.full((1, 3), -40.0), torch.tensor([0.0, 2.0, 1.0]), 2, 1.0, 1.0
    same(gpu_route.route(*args), pieces.route(*args))


UNUSUAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, math.inf, -math.inf, math.nan, -math.nan])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, for infinities and NaN
@given(st.data(), st.integers(1, 12))
def test_whatever_the_numbers_the_ids_are_distinct_experts(data: st.DataObject, experts: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    logits = torch.tensor(data.draw(st.lists(UNUSUAL, min_size=experts, max_size=experts)))[None]
    bias = torch.tensor(data.draw(st.lists(UNUSUAL, min_size=experts, max_size=experts)))
    idx = gpu_route.route(logits, bias, top_k, 1.0, 1.0).idx_TR[0].tolist()
    assert idx == sorted(set(idx))
    assert len(idx) == top_k
    assert set(idx) <= set(range(experts))
    ranks = (torch.sigmoid(logits[0]) + bias).nan_to_num(nan=math.inf)
    left = [ranks[e].item() for e in set(range(experts)) - set(idx)]
    assert all(ranks[e].item() >= max(left, default=-math.inf) for e in idx), "none left out is above one taken"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_makes_its_token_and_no_other_nan() -> None:
    logits, bias = apart(0, 3, 8)
    logits[1, 5] = math.nan
    found, expected = gpu_route.route(logits, bias, 3, 1.0, 1.0), pieces.route(logits, bias, 3, 1.0, 1.0)
    assert torch.equal(found.idx_TR, expected.idx_TR)
    assert 5 in found.idx_TR[1]
    torch.testing.assert_close(found.weight_TR, expected.weight_TR, rtol=1e-6, atol=0, equal_nan=True)


def test_logits_may_be_parts_of_wider_rows() -> None:
    logits, bias = apart(0, 4, 8)
    wide = torch.full((4, 20), 50.0)
    wide[:, 5:13] = logits
    for part in (wide[:, 5:13], logits.T.contiguous().T):
        same(gpu_route.route(part, bias, 3, 1.0, 2.0), pieces.route(logits, bias, 3, 1.0, 2.0))


def test_no_tokens_have_no_routes() -> None:
    routes = gpu_route.route(torch.zeros(0, 8), torch.zeros(8), 3, 1.0, 1.0)
    assert routes.idx_TR.shape == routes.weight_TR.shape == (0, 3)


def test_what_the_form_cannot_take_is_said() -> None:
    logits, bias = torch.zeros(2, 8), torch.zeros(8)
    assert gpu_route.why_not(logits, bias, 8) == ""
    refused = [
        (gpu_route.why_not(logits.bfloat16(), bias, 2), "torch.bfloat16"),
        (gpu_route.why_not(logits[0], bias, 2), "[8]"),
        (gpu_route.why_not(logits, bias[1:], 2), "[7]"),
        (gpu_route.why_not(logits, torch.zeros(16)[::2], 2), "adjacent"),
        (gpu_route.why_not(logits, bias, 9), "top_k is 9"),
        (gpu_route.why_not(logits, bias, 0), "top_k is 0"),
        (gpu_route.why_not(torch.zeros(1, 64), torch.zeros(64), 33), "1 to 32"),
        (gpu_route.why_not(torch.zeros(1, 1025), torch.zeros(1025), 2), "1025 experts"),
    ]
    for reason, part in refused:
        assert part in reason
