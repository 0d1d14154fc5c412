"""The Triton norms between products, in Triton's interpreter, against their plain forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_pieces, pieces
from muse_fn.kernels.norms import Gain, Mix, plain_norm
from tests.models import SEEDS, close, far

WIDTHS = st.sampled_from([1, 2, 3, 16, 31, 100, 128, 700])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EPS = st.sampled_from([1e-8, 1e-5, 1.0])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    """Within 1e-6 of the largest in float32, one rounding in shorter dtypes; the same dtype."""
    assert found.dtype == expected.dtype
    limit = 1e-6 if found.dtype == torch.float32 else 2**-8
    top = expected.float().abs().max().clamp_min(1e-30)
    close(found.float() / top, expected.float() / top, limit)


@given(SEEDS, WIDTHS, EPS, DTYPES, DTYPES)
def test_normed(seed: int, width: int, eps: float, given_as: torch.dtype, dtype: torch.dtype) -> None:
    x, norm = draw(seed, 2, 2, width, dtype=given_as), Gain(draw(seed + 1, width))
    same(gpu_pieces.normed(x, norm, eps, dtype), pieces.normed(x, norm, eps, dtype))
    same(gpu_pieces.normed(x, None, eps, dtype), plain_norm(x, eps).to(dtype))


@settings(max_examples=30)
@given(SEEDS, WIDTHS, EPS, EPS, st.booleans(), st.booleans(), DTYPES, DTYPES)
def test_join(
    seed: int,
    width: int,
    post_eps: float,
    eps: float,
    scaled: bool,
    is_normed: bool,
    given_as: torch.dtype,
    dtype: torch.dtype,
) -> None:
    h, branch = draw(seed, 3, width), draw(seed + 1, 1, 3, width, dtype=given_as)
    gates = Mix(draw(seed + 2, width).abs() + 0.1, draw(seed + 3, width))
    scale, norm = Gain(draw(seed + 4, width)), Gain(draw(seed + 5, width))
    args = h, branch, scale if scaled else None, gates, norm if is_normed else None, post_eps, eps, dtype
    before = h.clone(), branch.clone()
    found, expected = gpu_pieces.join(*args), pieces.join(*args)
    same(found.h, expected.h)
    if is_normed:
        same(found.a, pieces.normed(found.h, norm, eps, dtype))
    else:
        assert found.a is found.h
    if is_normed and dtype == torch.float32:
        assert isinstance(found.rounded, Tensor)
        assert torch.equal(found.rounded, found.a.to(torch.bfloat16))
    else:
        assert found.rounded == ()
    assert torch.equal(h, before[0])
    assert torch.equal(branch, before[1])


@given(SEEDS, st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 4, 16, 25]), DTYPES, DTYPES, st.booleans())
def test_join_takes_the_branch_in_parts(
    seed: int, parts: int, part: int, given_as: torch.dtype, dtype: torch.dtype, is_expanded: bool
) -> None:
    """Parts of their own, or one part that is all of them without being stored again."""
    width = parts * part
    h, branch = draw(seed, 2, 3, width), draw(seed + 1, 1 if is_expanded else parts, 2, 3, part, dtype=given_as)
    branch = branch.expand(parts, -1, -1, -1)
    gates, norm = Mix(draw(seed + 2, width), draw(seed + 3, width)), Gain(draw(seed + 4, width))
    args = gates, norm, 1e-5, 1e-5, dtype
    for scale in (None, Gain(draw(seed + 5, width))):
        found = gpu_pieces.join(h, branch, scale, *args)
        same(found.h, pieces.join(h, branch, scale, *args).h)
        same(found.a, pieces.normed(found.h, norm, 1e-5, dtype))
        one = gpu_pieces.join(h, pieces.whole(branch)[None], scale, *args)
        assert torch.equal(found.h, one.h)
        assert torch.equal(found.a, one.a)


@given(SEEDS, st.sampled_from([1, 2, 3, 8, 9, 11]), WIDTHS, EPS, DTYPES)
def test_blend(seed: int, count: int, width: int, eps: float, dtype: torch.dtype) -> None:
    y, weight, norm = draw(seed, 3, count, width, dtype=dtype), draw(seed + 1, 3, count), Gain(draw(seed + 2, width))
    for out in (torch.float32, torch.bfloat16):
        found = gpu_pieces.blend(y, weight, norm, eps, out)
        assert found.dtype == out
        same(found, pieces.blend(y, weight, norm, eps, out))


def test_blend_adds_routes_in_ascending_order() -> None:
    """Terms that only cancel before a small one joins them: another order loses it."""
    y, norm = torch.ones(1, 4, 8), Gain(torch.ones(8))
    for order, total in (([1e9, -1e9, 1.0, 2.0], 3.0), ([1e9, 1.0, 2.0, -1e9], 0.0)):
        assert gpu_pieces.blend(y, torch.tensor([order]), norm, 0.0, torch.float32).eq(total).all()


VALUES = {
    "zeros": torch.zeros(2, 8),
    "-0.0": torch.full((2, 8), -0.0),
    "huge": torch.full((2, 8), 1e18),
    "squares beyond float32": torch.full((2, 8), 1e30),
    "tiny": torch.full((2, 8), 1e-30),
    "one infinity": torch.tensor([[1.0] * 8, [math.inf] + [1.0] * 7]),
    "one NaN": torch.tensor([[1.0] * 8, [math.nan] + [1.0] * 7]),
}


@pytest.mark.parametrize("x", VALUES.values(), ids=VALUES.keys())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, for infinities and NaN
def test_unusual_values_are_what_they_are_in_the_plain_form(x: Tensor) -> None:
    norm, gates = Gain(torch.full((8,), 0.5)), Mix(torch.full((8,), 0.75), torch.full((8,), 0.5))
    pairs = [
        (gpu_pieces.normed(x, norm, 1e-8, torch.float32), pieces.normed(x, norm, 1e-8, torch.float32)),
        *zip(
            gpu_pieces.join(x, x[None], norm, gates, norm, 1e-8, 1e-8, torch.float32)[:2],
            pieces.join(x, x[None], norm, gates, norm, 1e-8, 1e-8, torch.float32)[:2],
            strict=True,
        ),
        (
            gpu_pieces.blend(x[:, None], torch.ones(2, 1), norm, 1e-8, torch.float32),
            pieces.blend(x[:, None], torch.ones(2, 1), norm, 1e-8, torch.float32),
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_a_row_depends_on_no_other() -> None:
    h, branch, norm, gates = draw(0, 5, 20), draw(1, 5, 20), Gain(draw(2, 20)), Mix(draw(3, 20), draw(4, 20))
    whole = gpu_pieces.join(h, branch[None], norm, gates, norm, 1e-5, 1e-5, torch.bfloat16)
    alone = gpu_pieces.join(h[3:4], branch[None, 3:4], norm, gates, norm, 1e-5, 1e-5, torch.bfloat16)
    assert torch.equal(whole.h[3:4], alone.h)
    assert torch.equal(whole.a[3:4], alone.a)


def test_rows_may_be_parts_of_wider_ones_and_outputs_are_whole() -> None:
    wide, norm, gates = draw(0, 2, 3, 50), Gain(draw(1, 20)), Mix(draw(2, 20), draw(3, 20))
    part, turned = wide[..., 7:27], draw(4, 20, 3, 2).transpose(0, 2)
    same(gpu_pieces.normed(part, norm, 1e-5, torch.float32), pieces.normed(part, norm, 1e-5, torch.float32))
    same(gpu_pieces.normed(turned, norm, 1e-5, torch.float32), pieces.normed(turned, norm, 1e-5, torch.float32))
    for h, branch in ((part, turned), (turned, part)):
        found = gpu_pieces.join(h, branch[None], None, gates, norm, 1e-5, 1e-5, torch.float32)
        same(found.h, pieces.join(h, branch[None], None, gates, norm, 1e-5, 1e-5, torch.float32).h)
        assert found.h.is_contiguous()
        assert found.a.is_contiguous()
    y, weight = draw(5, 4, 3, 20).transpose(0, 1), draw(6, 4, 3).T
    same(gpu_pieces.blend(y, weight, norm, 1e-5, torch.float32), pieces.blend(y, weight, norm, 1e-5, torch.float32))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_parts_that_are_all_one_are_read_where_they_lie(shape: tuple[int, int]) -> None:
    one = draw(0, *shape, 8)
    parts = one.expand(4, *shape, 8)
    rows = gpu_pieces.rows_in_parts(parts)
    assert torch.equal(rows, parts.flatten(1, 2))
    assert rows.data_ptr() == one.data_ptr()
    assert rows.stride(0) == 0


def test_no_rows_give_no_rows() -> None:
    norm, gates = Gain(torch.ones(8)), Mix(torch.ones(8), torch.ones(8))
    assert gpu_pieces.normed(torch.ones(0, 8), norm, 1e-5, torch.bfloat16).shape == (0, 8)
    assert gpu_pieces.join(
        torch.ones(2, 0, 8), torch.ones(2, 2, 0, 4), None, gates, None, 1, 1, torch.float32
    ).h.shape == (
        2,
        0,
        8,
    )
    assert gpu_pieces.blend(torch.ones(0, 2, 8), torch.ones(0, 2), norm, 1e-5, torch.float32).shape == (0, 8)


def test_the_width_of_the_released_model() -> None:
    h, branch, gates = draw(0, 1, 8192), draw(1, 8, 1, 1024).bfloat16(), Mix(draw(2, 8192), draw(3, 8192))
    scale, norm = Gain(draw(4, 8192)), Gain(draw(5, 8192))
    found = gpu_pieces.join(h, branch, scale, gates, norm, 1e-8, 1e-5, torch.bfloat16)
    expected = pieces.join(h, branch, scale, gates, norm, 1e-8, 1e-5, torch.bfloat16)
    same(found.h, expected.h)
    same(found.a, expected.a)
    for width in (4096, 8192):
        y, weight, norm = draw(6, 1, 8, width).bfloat16(), draw(7, 1, 8), Gain(draw(8, width))
        same(gpu_pieces.blend(y, weight, norm, 1e-8, torch.float32), pieces.blend(y, weight, norm, 1e-8, torch.float32))


def test_eps_is_felt() -> None:
    x, norm = draw(0, 2, 8), Gain(torch.ones(8))
    far(gpu_pieces.normed(x, norm, 1.0, torch.float32), gpu_pieces.normed(x, norm, 1e-5, torch.float32))


def test_what_the_forms_cannot_take_is_said() -> None:
    assert gpu_pieces.why_not(torch.ones(2, 8192)) == ""
    assert gpu_pieces.why_not_in_parts(torch.ones(8, 2, 1024).bfloat16(), (2, 8192)) == ""
    assert gpu_pieces.why_not_blend(torch.ones(2, 8, 4096)) == ""
    refused = [
        (gpu_pieces.why_not(torch.ones(2, 3).double()), "torch.float64"),
        (gpu_pieces.why_not_in_parts(torch.ones(1, 1, 3), (2, 3)), "[1, 1, 3]"),
        (gpu_pieces.why_not_in_parts(torch.ones(2, 2, 2), (2, 3)), "[2, 2, 2]"),
        (gpu_pieces.why_not_in_parts(torch.ones(2, 3), (2, 3)), "must be parts [P, ..., W / P] of [2, 3]"),
        (gpu_pieces.why_not_in_parts(torch.ones(4, 1, 8192), (1, 32768)), "32768 columns"),
        (gpu_pieces.why_not_in_parts(torch.ones(1, 2, 3).long(), (2, 3)), "torch.int64"),
        (gpu_pieces.why_not(torch.ones(1, 20000)), "20000 columns"),
        (gpu_pieces.why_not(torch.ones(1, 0)), "0 columns"),
        (gpu_pieces.why_not_blend(torch.ones(2, 3)), "[2, 3]"),
        (gpu_pieces.why_not_blend(torch.ones(1, 0, 3)), "[1, 0, 3]"),
        (gpu_pieces.why_not_blend(torch.ones(1, 1, 9000)), "9000 columns"),
        (gpu_pieces.why_not_blend(torch.ones(1, 1, 9).long()), "torch.int64"),
    ]
    for reason, part in refused:
        assert part in reason
