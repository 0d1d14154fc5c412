"""The Triton choice of experts and the norm beside it, in Triton's interpreter, against its plain form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_alone, gpu_experts, gpu_route, gpu_unpack, pieces
from muse_fn.kernels.norms import Gain
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


def route(logits: Tensor, bias: Tensor, top_k: int, multiplier: float, factor: float) -> Routes:
    """What `choose` says of the experts; what goes into them is tested below."""
    squeezed, norm = torch.ones(2, len(logits), 4), Gain(torch.ones(8))
    return gpu_route.choose(logits, bias, top_k, multiplier, factor, squeezed, norm, 1e-5, torch.float32).routes


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
    same(route(*args), pieces.route(*args))


def test_the_released_model_and_the_most_experts() -> None:
    for experts in (256, 1000, 1024):
        args = *apart(0, 4, experts), 8, 1.0, 2.5
        same(route(*args), pieces.route(*args))


def test_of_equal_sums_the_lowest_ids_are_taken() -> None:
    logits, bias = torch.zeros(2, 9), torch.zeros(9)
    assert route(logits, bias, 4, 1.0, 1.0).idx_TR.tolist() == [[0, 1, 2, 3]] * 2
    bias[[3, 7]] = 1.0
    assert route(logits, bias, 3, 1.0, 1.0).idx_TR.tolist() == [[0, 3, 7]] * 2


def test_sums_of_zero_are_equal_whatever_their_biases_sign() -> None:
    bias = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    logits = torch.full((1, 4), -200.0)
    with pytest.warns(RuntimeWarning, match="overflow"):  # numpy's, of the interpreter
        assert route(logits, bias, 2, 1.0, 1.0).idx_TR.tolist() == [[0, 1]]


def test_negative_sums_are_ordered_too() -> None:
    bias = torch.tensor([-3.0, -1.0, -5.0, -2.0, -4.0])
    assert route(torch.zeros(1, 5), bias, 3, 1.0, 1.0).idx_TR.tolist() == [[0, 1, 3]]


def test_the_bias_has_no_part_in_the_weights() -> None:
    bias = torch.tensor([9.0, 0.0, 5.0])
    routes = route(torch.zeros(1, 3), bias, 2, 1.0, 3.0)
    close(routes.weight_TR, torch.tensor([[1.5, 1.5]]), 1e-6)


def test_scores_too_small_to_normalise_stay_small() -> None:
    args = torch.full((1, 3), -40.0), torch.tensor([0.0, 2.0, 1.0]), 2, 1.0, 1.0
    same(route(*args), pieces.route(*args))


UNUSUAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, math.inf, -math.inf, math.nan, -math.nan])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, for infinities and NaN
@given(st.data(), st.integers(1, 12))
def test_whatever_the_numbers_the_ids_are_distinct_experts(data: st.DataObject, experts: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    logits = torch.tensor(data.draw(st.lists(UNUSUAL, min_size=experts, max_size=experts)))[None]
    bias = torch.tensor(data.draw(st.lists(UNUSUAL, min_size=experts, max_size=experts)))
    idx = route(logits, bias, top_k, 1.0, 1.0).idx_TR[0].tolist()
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
    found, expected = route(logits, bias, 3, 1.0, 1.0), pieces.route(logits, bias, 3, 1.0, 1.0)
    assert torch.equal(found.idx_TR, expected.idx_TR)
    assert 5 in found.idx_TR[1]
    torch.testing.assert_close(found.weight_TR, expected.weight_TR, rtol=1e-6, atol=0, equal_nan=True)


def test_logits_may_be_parts_of_wider_rows() -> None:
    logits, bias = apart(0, 4, 8)
    wide = torch.full((4, 20), 50.0)
    wide[:, 5:13] = logits
    for part in (wide[:, 5:13], logits.T.contiguous().T):
        same(route(part, bias, 3, 1.0, 2.0), pieces.route(logits, bias, 3, 1.0, 2.0))


def test_no_tokens_have_no_routes() -> None:
    routes = route(torch.zeros(0, 8), torch.zeros(8), 3, 1.0, 1.0)
    assert routes.idx_TR.shape == routes.weight_TR.shape == (0, 3)


def squeezed(seed: int, parts: int, tokens: int, part: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(parts, tokens, part, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    SEEDS,
    st.integers(1, 3),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 3, 16, 48, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_rows_in_parts_are_normed(
    seed: int, tokens: int, parts: int, part: int, given_as: torch.dtype, dtype: torch.dtype, is_expanded: bool
) -> None:
    """Parts of their own, or one part that is all of them without being stored again."""
    logits, bias = apart(seed, tokens, 8)
    rows = squeezed(seed, 1 if is_expanded else parts, tokens, part, given_as).expand(parts, -1, -1)
    norm = Gain(torch.randn(parts * part, generator=torch.Generator().manual_seed(seed + 1)))
    args = logits, bias, 2, 1.0, 2.5, rows, norm, 1e-5, dtype
    found, expected = gpu_route.choose(*args), pieces.choose(*args)
    same(found.routes, expected.routes)
    assert found.u_TM.dtype == dtype
    top = expected.u_TM.float().abs().max().clamp_min(1e-30)
    close(found.u_TM.float() / top, expected.u_TM.float() / top, 1e-6 if dtype == torch.float32 else 2**-8)
    assert expected.arranged_TM == ()
    if dtype == torch.bfloat16 and parts * part % 128 == 0:
        assert isinstance(found.arranged_TM, Tensor)
        assert torch.equal(found.arranged_TM, arranged(found.u_TM, found.routes.idx_TR.numel()))
    else:
        assert found.arranged_TM == ()


def arranged(u: Tensor, routes: int) -> Tensor:
    """In whole numbers, or each column where the unpacked weights of packed experts have it."""
    if routes <= gpu_route.ALONE:
        return gpu_alone.quantised_rows(u)
    k, out = torch.arange(u.shape[-1]), torch.empty_like(u)
    out[:, (k & -128) + gpu_unpack.column.fn(k & 127, gpu_experts.is_few(routes))] = u
    return out


@pytest.mark.parametrize("few", [True, False])
def test_columns_are_arranged_in_groups_whatever_their_number(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """384 of them are not all that the program could hold; each has its own number, and both orders are used."""
    monkeypatch.setattr(gpu_route, "ALONE", 0)
    for file in (gpu_experts, gpu_route):
        monkeypatch.setattr(file, "is_few", lambda routes: few)  # pyright: ignore[reportUnknownLambdaType]
    logits, bias = apart(0, 2, 8)
    rows = squeezed(0, 3, 2, 128, torch.bfloat16)
    found = gpu_route.choose(logits, bias, 2, 1.0, 1.0, rows, Gain(torch.arange(1.0, 385)), 1e-5, torch.bfloat16)
    assert isinstance(found.arranged_TM, Tensor)
    assert torch.equal(found.arranged_TM, arranged(found.u_TM, found.routes.idx_TR.numel()))
    assert torch.equal(found.arranged_TM.sort().values, found.u_TM.sort().values)


def test_the_released_model_in_one_part_and_in_eight() -> None:
    logits, bias = apart(0, 2, 256)
    rows, norm = squeezed(0, 8, 2, 512, torch.bfloat16), Gain(torch.rand(4096) + 0.5)
    eight, one = (
        gpu_route.choose(logits, bias, 8, 1.0, 2.5, x, norm, 1e-5, torch.bfloat16)
        for x in (rows, pieces.whole(rows)[None])
    )
    assert isinstance(eight.arranged_TM, Tensor)
    assert isinstance(one.arranged_TM, Tensor)
    pairs = (*zip(eight.routes, one.routes, strict=True), (eight.u_TM, one.u_TM), (eight.arranged_TM, one.arranged_TM))
    for found, expected in pairs:
        assert torch.equal(found, expected)
    expected = pieces.choose(logits, bias, 8, 1.0, 2.5, rows, norm, 1e-5, torch.bfloat16)
    same(eight.routes, expected.routes)
    close(eight.u_TM.float(), expected.u_TM.float(), 2**-6)


def test_rows_may_have_any_strides() -> None:
    logits, bias = apart(0, 3, 8)
    rows, norm = squeezed(0, 2, 3, 20, torch.float32), Gain(torch.ones(40))
    expected = pieces.choose(logits, bias, 2, 1.0, 1.0, rows, norm, 1e-5, torch.float32).u_TM
    wide = torch.full((3, 2, 30), 9.0)
    wide[:, :, 4:24] = rows.transpose(0, 1)
    for x in (wide[:, :, 4:24].transpose(0, 1), rows.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        close(gpu_route.choose(logits, bias, 2, 1.0, 1.0, x, norm, 1e-5, torch.float32).u_TM, expected, 1e-6)


def why_not(logits: Tensor, bias: Tensor, top_k: int, *shape: int) -> str:
    return gpu_route.why_not(logits, bias, top_k, torch.zeros(shape or (2, len(logits), 4)))


def test_what_the_form_cannot_take_is_said() -> None:
    logits, bias = torch.zeros(2, 8), torch.zeros(8)
    assert why_not(logits, bias, 8) == ""
    refused = [
        (why_not(logits.bfloat16(), bias, 2), "torch.bfloat16"),
        (why_not(logits[0], bias, 2), "[8]"),
        (why_not(logits, bias[1:], 2), "[7]"),
        (why_not(logits, torch.zeros(16)[::2], 2), "adjacent"),
        (why_not(logits, bias, 9), "top_k is 9"),
        (why_not(logits, bias, 0), "top_k is 0"),
        (why_not(torch.zeros(1, 64), torch.zeros(64), 33), "1 to 32"),
        (why_not(torch.zeros(1, 1025), torch.zeros(1025), 2), "1025 experts"),
        (why_not(logits, bias, 2, 2, 3, 4), "[2, 3, 4]"),
        (why_not(logits, bias, 2, 2, 4), "[2, 4]"),
        (why_not(logits, bias, 2, 3, 2, 4096), "12288 columns"),
    ]
    for reason, part in refused:
        assert part in reason
