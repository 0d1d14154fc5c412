"""The pieces between products: each against its equations in float64, written out here, and the laws they obey."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.norms import Gain, Mix, Rotary, rotary_angles
from muse_fn.kernels.packed import Weight
from muse_fn.kernels.pieces import (
    Chosen,
    Joined,
    Routes,
    blend,
    choose,
    gated,
    heads,
    join,
    linears,
    normed,
    place,
    route,
    whole,
)
from muse_fn.kernels.reference import FP8_MAX
from tests.models import SEEDS, close, far, snapshot, unchanged

EPS = st.sampled_from([1e-8, 1e-5, 1e-2, 1.0])
WIDTHS = st.integers(1, 40)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) in float64."""
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x.double()).exp())


def within(dtype: torch.dtype) -> float:
    """How far one rounding to the dtype takes a number, and float32 sums of tens of terms."""
    return max(3e-6, torch.finfo(dtype).eps)


def test_linears_are_products_of_one_input_each_in_the_dtype_of_its_weight() -> None:
    x, ws = draw(0, 3, 5), (draw(1, 4, 5), draw(2, 2, 5, dtype=torch.bfloat16), draw(3, 4, 5))
    found = linears(x, ws)
    assert [y.dtype for y in found] == [torch.float32, torch.bfloat16, torch.float32]
    close(found[0], x.double() @ ws[0].double().T, 1e-6)
    close(found[1], x.bfloat16().double() @ ws[1].double().T, 2**-8)
    close(found[2], x.double() @ ws[2].double().T, 1e-6)
    assert linears(x, ()) == ()
    for y, wide in zip(found, linears(x, ws, torch.float32), strict=True):
        assert wide.dtype == torch.float32
        close(wide, y.float(), 2**-8)


def test_linears_pass_weights_to_the_product_they_are_given() -> None:
    asked: list[tuple[Tensor, Weight, torch.dtype | None]] = []

    def product(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
        asked.append((x, w, dtype))
        return torch.full((1,), float(len(asked)))

    x, ws = draw(0, 2, 3), [draw(1, 2, 3), draw(2, 2, 3)]
    assert [y.item() for y in linears(x, ws, torch.float64, linear=product)] == [1.0, 2.0]
    assert len(asked) == 2
    assert all(a is x and b is w and to == torch.float64 for (a, b, to), w in zip(asked, ws, strict=True))


@given(SEEDS, WIDTHS, EPS, DTYPES, DTYPES)
def test_normed_in_float64(seed: int, width: int, eps: float, given_as: torch.dtype, dtype: torch.dtype) -> None:
    x, norm = draw(seed, 2, 3, width, dtype=given_as), Gain(draw(seed + 1, width))
    found = normed(x, norm, eps, dtype)
    assert found.dtype == dtype
    close(found, unit(x, eps) * norm.factor.double(), within(dtype))


def test_normed_rounds_once() -> None:
    x, norm = draw(0, 50, 30, dtype=torch.bfloat16), Gain(draw(1, 30))
    assert torch.equal(normed(x, norm, 1e-5, torch.bfloat16), normed(x, norm, 1e-5, torch.float32).bfloat16())


class Parts(NamedTuple):
    """What a stream, a branch and their vectors are in one example."""

    h: Tensor
    branch: Tensor  # in one part
    scale: Gain | None
    mix: Mix
    norm: Gain | None


def parts(seed: int, width: int, *, scaled: bool, is_normed: bool, dtype: torch.dtype = torch.float32) -> Parts:
    branch = draw(seed + 1, 1, 2, 3, width, dtype=dtype)
    scale = Gain(draw(seed + 2, width)) if scaled else None
    norm = Gain(draw(seed + 3, width)) if is_normed else None
    return Parts(draw(seed, 2, 3, width), branch, scale, Mix(draw(seed + 4, width), draw(seed + 5, width)), norm)


@given(SEEDS, WIDTHS, EPS, EPS, st.booleans(), st.booleans(), DTYPES, DTYPES)
def test_join_in_float64(
    seed: int,
    width: int,
    post_eps: float,
    eps: float,
    scaled: bool,
    is_normed: bool,
    given_as: torch.dtype,
    dtype: torch.dtype,
) -> None:
    p = parts(seed, width, scaled=scaled, is_normed=is_normed, dtype=given_as)
    before = snapshot(tuple(x for x in (p.h, p.branch)))
    y = p.branch[0].double() if p.scale is None else p.branch[0].double() * p.scale.factor.double()
    h = p.mix.alpha.double() * p.h.double() + p.mix.beta.double() * unit(y, post_eps)
    found = join(p.h, p.branch, p.scale, p.mix, p.norm, post_eps, eps, dtype)
    assert isinstance(found, Joined)
    assert found.h.dtype == torch.float32
    close(found.h, h, 3e-6)
    if p.norm is None:
        assert torch.equal(found.a, found.h), "h itself, not rounded"
    else:
        assert found.a.dtype == dtype
        close(found.a, unit(found.h, eps) * p.norm.factor.double(), within(dtype))
    unchanged((p.h, p.branch), before)


@pytest.mark.parametrize("changed", ["post_eps", "eps", "alpha", "beta", "scale", "norm"])
def test_join_feels_each_of_its_arguments(changed: str) -> None:
    """And the stream does not feel the two that only the norm after it has."""
    p, post_eps, eps = parts(0, 12, scaled=True, is_normed=True), 1e-5, 1e-5
    before = join(*p, post_eps, eps, torch.float32)
    match changed:
        case "post_eps":
            post_eps = 0.5
        case "eps":
            eps = 0.5
        case "alpha" | "beta":
            p = p._replace(mix=p.mix._replace(**{changed: draw(7, 12)}))
        case _:
            p = p._replace(**{changed: Gain(draw(7, 12))})
    after = join(*p, post_eps, eps, torch.float32)
    far(after.a, before.a)
    if changed in ("eps", "norm"):
        assert torch.equal(after.h, before.h)
    else:
        far(after.h, before.h)


def test_join_scales_the_branch_before_its_norm() -> None:
    """A scale that is the same everywhere is lost in the norm; after the norm it would not be."""
    p = parts(0, 12, scaled=False, is_normed=True)
    plain = join(*p, 1e-30, 1e-5, torch.float32)
    close(join(*p._replace(scale=Gain(torch.full((12,), 7.0))), 1e-30, 1e-5, torch.float32).h, plain.h, 1e-6)


@given(SEEDS, st.sampled_from([1, 2, 8]), st.integers(1, 9), st.booleans(), st.booleans())
def test_rows_in_parts_mean_what_they_are_beside_each_other(
    seed: int, count: int, part: int, scaled: bool, is_expanded: bool
) -> None:
    p = parts(seed, count * part, scaled=scaled, is_normed=True)
    assert p.norm is not None
    rows = draw(seed + 7, 1 if is_expanded else count, 2, 3, part).expand(count, -1, -1, -1)
    beside = torch.cat(list(rows), -1)
    assert torch.equal(whole(rows), beside)
    for x, y in zip(
        join(*p._replace(branch=rows), 1e-5, 1e-5, torch.bfloat16)[:2],
        join(*p._replace(branch=beside[None]), 1e-5, 1e-5, torch.bfloat16)[:2],
        strict=True,
    ):
        assert torch.equal(x, y)
    logits, bias = draw(seed, 3, 5), draw(seed + 1, 5)
    chosen = choose(logits, bias, 2, 0.5, 2.5, rows[:, 0], p.norm, 1e-5, torch.bfloat16)
    assert isinstance(chosen, Chosen)
    assert chosen.arranged_TM == ()
    assert torch.equal(chosen.u_TM, normed(beside[0], p.norm, 1e-5, torch.bfloat16))
    for x, y in zip(chosen.routes, route(logits, bias, 2, 0.5, 2.5), strict=True):
        assert torch.equal(x, y)


def turned(x: Tensor, pos: Tensor, theta: float) -> Tensor:
    """Rotary position of [B, T, N, D] in float64: pair (j, j + D/2) turned by pos * theta^(-2j/D)."""
    half = x.shape[-1] // 2
    angle = pos.double()[..., None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


class Projected(NamedTuple):
    """Rows of q, k and v of two sequences of three columns."""

    q: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor


def projected(seed: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Projected:
    widths = kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim
    q, k, v = (draw(seed + i, 2, 3, width, dtype=dtype) for i, width in enumerate(widths))
    return Projected(q, k, v, torch.tensor([[0, 1, 2], [7, 8, 9]]))


def rotary_of(x: Projected, head_dim: int, is_rotated: bool) -> Rotary | None:
    return rotary_angles(x.pos, head_dim, 100.0) if is_rotated else None


def heads_by_hand(x: Projected, head_dim: int, qk_scale: float, eps: float, is_rotated: bool) -> tuple[Tensor, Tensor]:
    q, k = (unit(rows.unflatten(-1, (-1, head_dim)), eps) for rows in (x.q, x.k))
    q = q * qk_scale
    return (turned(q, x.pos, 100.0), turned(k, x.pos, 100.0)) if is_rotated else (q, k)


@given(SEEDS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]), EPS, st.booleans(), DTYPES)
def test_heads_in_float64(
    seed: int, kv_heads: int, group: int, head_dim: int, eps: float, is_rotated: bool, dtype: torch.dtype
) -> None:
    x = projected(seed, kv_heads, group, head_dim, dtype)
    q, k = heads(x.q, x.k, rotary_of(x, head_dim, is_rotated), head_dim, 5.5, eps)
    assert q.dtype == k.dtype == dtype
    for found, expected in zip((q, k), heads_by_hand(x, head_dim, 5.5, eps, is_rotated), strict=True):
        close(found, expected, within(dtype))


@given(SEEDS, st.integers(1, 2), st.integers(1, 3), EPS, st.booleans())
def test_place_gives_the_queries_and_writes_keys_and_values_where_told(
    seed: int, kv_heads: int, group: int, eps: float, is_rotated: bool
) -> None:
    x = projected(seed, kv_heads, group, 4)
    arenas = draw(seed + 4, 4, 3, kv_heads, 4), draw(seed + 5, 4, 3, kv_heads, 4)
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:6]
    expected = [arena.clone().flatten(0, 1).double() for arena in arenas]
    q, k = heads_by_hand(x, 4, 2.0, eps, is_rotated)
    for i, row in enumerate(rows.tolist()):
        expected[0][row] = k.flatten(0, 1)[i]
        expected[1][row] = x.v.flatten(0, 1)[i].unflatten(-1, (-1, 4)).double()
    close(place(x.q, x.k, x.v, rotary_of(x, 4, is_rotated), 2.0, eps, *arenas, rows), q, 3e-6)
    for arena, wanted in zip(arenas, expected, strict=True):
        close(arena.flatten(0, 1), wanted, 3e-6)


def test_place_rounds_to_the_arenas_dtype_and_keeps_float8_below_its_largest() -> None:
    x = projected(0, 1, 2, 4)
    x = x._replace(v=x.v * 1e4)
    arenas = [torch.zeros(3, 2, 1, 4).to(torch.float8_e4m3fn) for _ in range(2)]
    place(x.q, x.k, x.v, None, 1.0, 1e-5, arenas[0], arenas[1], torch.arange(6))
    k, v = (arena.float().flatten() for arena in arenas)
    close(k, unit(x.k, 1e-5).flatten(), 2**-4)
    assert v.abs().max() == FP8_MAX
    assert torch.equal(v.sign(), x.v.flatten().sign())


@given(SEEDS, st.integers(1, 3), st.integers(1, 6), EPS, DTYPES, DTYPES)
def test_gated_in_float64(
    seed: int, count: int, head_dim: int, eps: float, given_as: torch.dtype, dtype: torch.dtype
) -> None:
    o = draw(seed, 2, 3, count, head_dim, dtype=given_as)
    gate = 4 * draw(seed + 1, 2, 3, count * head_dim, dtype=given_as)
    found = gated(o, gate, eps, dtype)
    assert found.dtype == dtype
    close(found, unit(o, eps).flatten(2) * sigmoid(gate), within(dtype))


def test_the_sigmoid_given_is_the_one_used() -> None:
    o, gate = draw(0, 1, 2, 3, 4), draw(1, 1, 2, 12)
    close(gated(o, gate, 0.1, torch.float32, sigmoid=torch.ones_like), unit(o, 0.1).flatten(2), 1e-6)
    rows, norm = draw(3, 1, 3, 4), Gain(draw(4, 4))
    given_ = draw(2, 3, 4), torch.tensor([0.0, 3.0, 1.0, 2.0]), 3, 1.0, 6.0
    routes = choose(*given_, rows, norm, 0.1, torch.float32, sigmoid=torch.ones_like).routes
    assert routes.idx_TR.tolist() == [[1, 2, 3]] * 3
    close(routes.weight_TR, torch.full((3, 3), 2.0), 1e-6)


@given(SEEDS, st.integers(1, 9), st.data(), st.sampled_from([0.25, 1.0]), st.sampled_from([1.0, 2.5]))
def test_route_in_float64(seed: int, experts: int, data: st.DataObject, multiplier: float, factor: float) -> None:
    top_k = data.draw(st.integers(1, experts))
    logits, bias = 3 * draw(seed, 4, experts), 0.3 * draw(seed + 1, experts)
    routes = route(logits, bias, top_k, multiplier, factor)
    assert isinstance(routes, Routes)
    assert routes.idx_TR.dtype == torch.int64
    assert routes.weight_TR.dtype == torch.float32
    for row, idx, weight in zip(logits, *routes, strict=True):
        score = sigmoid(row * multiplier)
        chosen = sorted(sorted(range(experts), key=lambda e: -(score[e] + bias[e].double()).item())[:top_k])
        assert idx.tolist() == chosen, "each expert once, in ascending order"
        close(weight, score[chosen] / (score[chosen].sum() + 1e-15) * factor, 1e-6)


def test_route_adds_so_little_to_the_sum_that_only_the_smallest_scores_feel_it() -> None:
    score = torch.sigmoid(torch.tensor(-40.0)).item()
    weight = route(torch.full((1, 3), -40.0), torch.zeros(3), 2, 1.0, 1.0).weight_TR
    close(weight / score, torch.full((1, 2), 1 / (2 * score + 1e-15)), 1e-6)


@given(SEEDS, st.integers(1, 3), WIDTHS, EPS, DTYPES)
def test_blend_norms_then_weights_then_sums(seed: int, top_k: int, width: int, eps: float, dtype: torch.dtype) -> None:
    y, norm = draw(seed, 3, top_k, width, dtype=dtype), Gain(draw(seed + 1, width))
    weight = draw(seed + 2, 3, top_k)
    found = blend(y, weight, norm, eps, torch.float32)
    assert found.dtype == torch.float32
    rows = [
        sum(unit(y[t, r].double() * norm.factor.double(), eps) * weight[t, r].double() for r in range(top_k))
        for t in range(3)
    ]
    close(found, torch.stack([row for row in rows if isinstance(row, Tensor)]), 3e-6)


def test_blend_of_halves_is_not_half_of_the_blend() -> None:
    """Why rows must be whole."""
    y, weight, norm = draw(0, 3, 2, 12), torch.rand(3, 2), Gain(draw(1, 12))
    halves = blend(y / 2, weight, norm, 0.1, torch.float32)
    far(halves + halves, blend(y, weight, norm, 0.1, torch.float32), 1e-2)


def test_the_reference_product_is_the_one_used_unless_another_is_given() -> None:
    x, w = draw(0, 3, 5), draw(1, 4, 5)
    assert torch.equal(linears(x, [w])[0], reference.linear(x, w))
