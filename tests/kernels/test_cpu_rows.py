"""Compiled norms, joins, blends, choices, heads and gates equal their meaning: float32 within a few last places, and
what is rounded to bfloat16 within the one step that these may tip."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import pieces
from muse_fn.kernels.norms import Gain, Mix, rotary_angles
from tests.models import SEEDS

cpu_rows: Any = pytest.importorskip("muse_fn.kernels.cpu_rows", reason="Numba is not installed")
cpu_heads: Any = pytest.importorskip("muse_fn.kernels.cpu_heads", reason="Numba is not installed")
BF16, FLOAT = torch.bfloat16, torch.float32
EPS = 1e-5
ROWS, WIDTHS = st.integers(1, 40), st.integers(1, 100)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> None:
    """A few units of float32's last place of the tensor's size; where rounding follows, one of bfloat16's as well."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    rtol, atol = (2.0**-7, 2.0**-16) if found.dtype == BF16 else (2.0**-19, 2.0**-19)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    if found.dtype == BF16 and found.numel() > 500:  # and seldom even that
        assert (found != expected).float().mean() < 0.05


@given(SEEDS, ROWS, WIDTHS, st.sampled_from([BF16, FLOAT]), st.sampled_from([BF16, FLOAT]))
def test_normed(seed: int, rows: int, width: int, given: torch.dtype, made: torch.dtype) -> None:
    x, norm = draw(seed, 2, rows, width).to(given), Gain(1 + draw(seed + 1, width))
    near(cpu_rows.normed(x, norm, EPS, made), pieces.normed(x, norm, EPS, made))


@given(SEEDS, ROWS, WIDTHS, st.booleans(), st.booleans(), st.sampled_from([BF16, FLOAT]))
def test_join(seed: int, rows: int, width: int, is_scaled: bool, is_normed: bool, dtype: torch.dtype) -> None:
    h, branch, vectors = draw(seed, rows, width), draw(seed + 1, 1, rows, width).to(BF16), draw(seed + 2, 4, width)
    scale, norm = (Gain(1 + x) if on else None for x, on in zip(vectors[:2], (is_scaled, is_normed), strict=True))
    args = h, branch, scale, Mix(vectors[2], vectors[3]), norm, EPS, 2 * EPS, dtype
    before = h.clone()
    for found, expected in zip(cpu_rows.join(*args)[:2], pieces.join(*args)[:2], strict=True):
        near(found, expected)
    assert torch.equal(h, before)


@given(SEEDS, ROWS, st.integers(1, 5), WIDTHS)
def test_blend(seed: int, tokens: int, routes: int, width: int) -> None:
    y, weight = draw(seed, tokens, routes, width).to(BF16), draw(seed + 1, tokens, routes).sigmoid()
    norm = Gain(1 + draw(seed + 2, width))
    found, expected = cpu_rows.blend(y, weight, norm, EPS), pieces.blend(y, weight, norm, EPS, FLOAT)
    # Weighted rows may cancel, so the bound is of what was added.
    sizes = pieces.blend(y.abs(), weight, Gain(norm.factor.abs()), EPS, FLOAT)
    assert ((found.float() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-20 * sizes).all()


@given(SEEDS, ROWS, st.integers(1, 40), st.integers(1, 9), WIDTHS)
def test_choose(seed: int, tokens: int, experts: int, top_k: int, width: int) -> None:
    top_k = min(top_k, experts)
    logits, bias = draw(seed, tokens, experts), draw(seed + 1, experts)
    rest = draw(seed + 2, 1, tokens, width).to(BF16), Gain(1 + draw(seed + 3, width)), EPS, BF16
    found, expected = (form.choose(logits, bias, top_k, 0.7, 2.5, *rest) for form in (cpu_rows, pieces))
    score = (torch.sigmoid(logits * 0.7) + bias).sort(-1, descending=True).values
    if experts > top_k:  # scores a last place apart may change theirs
        clear = score[:, top_k - 1] - score[:, top_k] > 1e-6
    else:
        clear = torch.ones(tokens, dtype=torch.bool)
    assert torch.equal(found.routes.idx_TR[clear], expected.routes.idx_TR[clear])
    torch.testing.assert_close(found.routes.weight_TR[clear], expected.routes.weight_TR[clear], rtol=2e-6, atol=0)
    near(found.u_TM, expected.u_TM)
    assert clear.float().mean() > 0.5


def test_choices_of_equal_scores_and_of_what_is_no_number() -> None:
    """Of equals the first ones; what is no number counts as the highest, as for topk."""
    nan = float("nan")
    logits = torch.tensor([[0.0, 0, 0, 0, 0], [-1, nan, 5, nan, 4], [nan] * 5, [-math.inf, math.inf, 0, -0.0, 1]])
    rest = torch.ones(1, 4, 8, dtype=BF16), Gain(torch.ones(8)), EPS, BF16
    idx, weight = cpu_rows.choose(logits, torch.zeros(5), 3, 1.0, 1.0, *rest).routes
    assert idx.tolist() == [[0, 1, 2], [1, 2, 3], [0, 1, 2], [1, 2, 4]]
    torch.testing.assert_close(weight[0], torch.full((3,), 1 / 3))
    assert weight[1:3].isnan().all()
    assert weight[3].isfinite().all()


HEADS = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 70))


@given(SEEDS, st.integers(1, 3), st.integers(1, 20), HEADS, st.booleans())
def test_heads_and_where_they_are_put(
    seed: int, batch: int, length: int, heads: tuple[int, int, int], has_rotary: bool
) -> None:
    kv_heads, group, half = heads
    width = 2 * half
    q, k, v = (
        draw(seed + n, batch, length, c * width).to(BF16) for n, c in enumerate((kv_heads * group, *[kv_heads] * 2))
    )
    pos = torch.randint(0, 5000, (batch, length), generator=torch.Generator().manual_seed(seed))
    rotary = rotary_angles(pos, width, 1e4) if has_rotary else None
    expected = pieces.heads(q, k, rotary, width, 1.3, EPS)
    for found, wanted in zip(cpu_heads.heads(q, k, rotary, width, 1.3, EPS), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2.0**-7, atol=2.0**-12)  # turned pairs may cancel
    arenas = torch.full((2, 20, 4, kv_heads, width), 7.0, dtype=BF16)
    rows = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[: batch * length]
    wanted_arenas = arenas.clone()
    placed = cpu_heads.place(q, k, v, rotary, 1.3, EPS, arenas[0], arenas[1], rows)
    wanted = pieces.place(q, k, v, rotary, 1.3, EPS, wanted_arenas[0], wanted_arenas[1], rows)
    torch.testing.assert_close(placed, wanted, rtol=2.0**-7, atol=2.0**-12)
    torch.testing.assert_close(arenas[0], wanted_arenas[0], rtol=2.0**-7, atol=2.0**-12)
    assert torch.equal(arenas[1], wanted_arenas[1])


@given(SEEDS, st.integers(1, 40), st.integers(1, 4), st.integers(1, 70))
def test_gated(seed: int, tokens: int, heads: int, width: int) -> None:
    o, gate = draw(seed, 1, tokens, heads, width).to(BF16), (9 * draw(seed + 1, 1, tokens, heads * width)).to(BF16)
    near(cpu_heads.gated(o, gate, EPS), pieces.gated(o, gate, EPS, BF16))


def test_the_sigmoid_of_every_bfloat16() -> None:
    """A head of width 1 is its sign, so what is left is the sigmoid; each of 65536 bit patterns, infinities and all."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)[None, :, None]
    o = torch.full((1, 2**16, 1, 1), 2.0, dtype=BF16)
    found, expected = cpu_heads.gated(o, gate, 0.0), pieces.gated(o, gate, 0.0, BF16)
    small = gate.float() < -87  # e^87 is near the end of float32: results below 2^-126 may be 0
    torch.testing.assert_close(found[~small], expected[~small], rtol=2.0**-8, atol=0, equal_nan=True)
    assert (found[small].float() < 2e-38).all()


EXTREME = [0.0, -0.0, 1e-38, 1e-20, 1e18, float("inf"), float("nan")]


@pytest.mark.parametrize("value", EXTREME)
def test_rows_with_extreme_values(value: float) -> None:
    """In float32 squares leave the range where they do in the plain form."""
    x = draw(0, 3, 40)
    x[1] = value
    x[2, 7] = value
    norm, mix = Gain(1 + draw(1, 40)), Mix(draw(2, 40), draw(3, 40))
    near(cpu_rows.normed(x, norm, EPS, FLOAT), pieces.normed(x, norm, EPS, FLOAT))
    near(cpu_rows.normed(x.to(BF16), norm, EPS, BF16), pieces.normed(x.to(BF16), norm, EPS, BF16))
    args = draw(4, 3, 40), x.to(BF16)[None], norm, mix, norm, EPS, EPS, BF16
    for found, expected in zip(cpu_rows.join(*args)[:2], pieces.join(*args)[:2], strict=True):
        near(found, expected)
    o, gate = x.to(BF16).view(1, 3, 4, 10), x.to(BF16).view(1, 3, 40)
    near(cpu_heads.gated(o, gate, EPS), pieces.gated(o, gate, EPS, BF16))


def test_order_in_memory_and_threads_do_not_matter() -> None:
    x, norm = draw(0, 40, 100), Gain(1 + draw(1, 40))
    mix = Mix(draw(2, 40), draw(3, 40))
    args = draw(4, 40, 100).t(), x.t().to(BF16)[None], norm, mix, norm, EPS, EPS, BF16
    straight = args[0].contiguous(), args[1].contiguous(), *args[2:]
    one = cpu_rows.join(*args), cpu_rows.normed(x.t(), norm, EPS, BF16)
    torch.set_num_threads(2)
    try:
        two = cpu_rows.join(*straight), cpu_rows.normed(x.t().contiguous(), norm, EPS, BF16)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0].h, two[0].h)
    assert torch.equal(one[0].a, two[0].a)
    assert torch.equal(one[1], two[1])
