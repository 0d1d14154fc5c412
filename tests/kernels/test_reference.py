"""The meaning of each operation, against loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from muse_fn.kernels.packed import Weight, dequantise, quantise_mxfp4, quantise_nvfp4
from muse_fn.kernels.reference import attend, expert_rows, linear, visible
from tests.models import SEEDS, close, far, snapshot, unchanged

WINDOWS = st.integers(0, 6)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positions(seed: int, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Random int64 positions: queries that all see key 0 and themselves something, keys in no order, some empty."""
    draw = torch.Generator().manual_seed(seed)
    k_pos = torch.randint(-1, 9, (batch, keys), generator=draw)
    q_pos = torch.randint(0, 9, (batch, queries), generator=draw)
    return q_pos, k_pos


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int) -> Tensor:
    """One query of one head at a time; NaN where a query sees no key."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, t, n in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).view(-1, 3).tolist():
        i, kv = int(q_pos[b, t]), n // group
        seen = [s for s, j in enumerate(k_pos[b].tolist()) if 0 <= j <= i and (not window or i - j < window)]
        if seen:
            scores = k[b, seen, kv].double() @ q[b, t, n].double() / math.sqrt(q.shape[-1])
            out[b, t, n] = torch.softmax(scores, 0) @ v[b, seen, kv].double()
    return out


def experts_by_hand(u: Tensor, idx: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(*idx.shape, u.shape[-1], dtype=torch.float64)
    for t, r in torch.cartesian_prod(*map(torch.arange, idx.shape)).view(-1, 2).tolist():
        e = int(idx[t, r])
        gate, up = (gate_up[e].double() @ u[t].double()).chunk(2)
        out[t, r] = down[e].double() @ (gate / (1 + (-gate).exp()) * up)
    return out


def same_where_seen(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """As close, but a query without keys only has to be finite."""
    assert found.isfinite().all()
    close(found.where(~expected.isnan(), 0), expected.nan_to_num(), tolerance)


@given(st.integers(-1, 40), st.integers(-1, 40), WINDOWS)
def test_visible(i: int, j: int, window: int) -> None:
    seen = visible(torch.tensor([[i]]), torch.tensor([[j]]), window).item()
    assert seen == (j in range(i + 1) and (window == 0 or j in range(i - window + 1, i + 1)))


def test_a_window_of_w_holds_w_keys_the_own_one_included() -> None:
    pos = torch.arange(12)[None]
    assert visible(pos, pos, 5).sum(-1).tolist() == [[1, 2, 3, 4, *[5] * 8]]
    assert visible(pos, pos, 0).sum(-1).tolist() == [[*range(1, 13)]]


@given(SEEDS, st.integers(1, 2), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), WINDOWS)
def test_attend(seed: int, batch: int, queries: int, keys: int, kv_heads: int, group: int, window: int) -> None:
    q, k, v = draw(seed, batch, queries, kv_heads * group, 4), *draw(seed + 1, 2, batch, keys, kv_heads, 4)
    where = positions(seed, batch, queries, keys)
    found = attend(q, k, v, *where, window)
    assert found.shape == q.shape
    same_where_seen(found, attend_by_hand(q, k, v, *where, window), 1e-6)


@given(SEEDS, st.permutations(range(7)), WINDOWS)
def test_attend_knows_keys_by_their_position_only(seed: int, order: list[int], window: int) -> None:
    q, k, v = draw(seed, 1, 3, 4, 4), *draw(seed + 1, 2, 1, 7, 2, 4)
    q_pos, k_pos = torch.tensor([[4, 5, 6]]), torch.arange(7)[None]
    base = attend(q, k, v, q_pos, k_pos, window)
    close(attend(q, k[:, order], v[:, order], q_pos, k_pos[:, order], window), base, 1e-6)


def test_attend_does_not_see_empty_places() -> None:
    q, k, v = draw(0, 1, 2, 4, 4), *draw(1, 2, 1, 5, 2, 4)
    q_pos, k_pos = torch.tensor([[7, 9]]), torch.tensor([[3, -1, 7, -1, 2]])
    base = attend(q, k, v, q_pos, k_pos, 0)
    real = [0, 2, 4]
    close(base, attend(q, k[:, real], v[:, real], q_pos, k_pos[:, real], 0), 1e-6)
    k[:, [1, 3]], v[:, [1, 3]] = 1e4, -1e4
    assert torch.equal(attend(q, k, v, q_pos, k_pos, 0), base)


@given(SEEDS, st.integers(1, 3), st.integers(1, 3), WINDOWS)
def test_attend_in_bfloat16_is_within_its_roundings(seed: int, kv_heads: int, group: int, window: int) -> None:
    q, k, v = (x.bfloat16() for x in (draw(seed, 2, 5, kv_heads * group, 4), *draw(seed + 1, 2, 2, 9, kv_heads, 4)))
    where = positions(seed, 2, 5, 9)
    found = attend(q, k, v, *where, window)
    assert found.dtype == torch.bfloat16
    same_where_seen(found, attend_by_hand(q, k, v, *where, window), 2**-6)


@given(SEEDS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_expert_rows(seed: int, count: int, experts: int, routes: int) -> None:
    u, gate_up, down = draw(seed, count, 6), draw(seed + 1, experts, 8, 6), draw(seed + 2, experts, 6, 4)
    idx = torch.randint(0, experts, (count, routes), generator=torch.Generator().manual_seed(seed))
    close(expert_rows(u, idx, gate_up, down), experts_by_hand(u, idx, gate_up, down), 2e-6)


def test_expert_rows_of_no_token() -> None:
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    assert expert_rows(draw(0, 0, 6), nothing, draw(1, 3, 8, 6), draw(2, 3, 6, 4)).shape == (0, 2, 6)


def quantised(form: str, w: Tensor, parts: int = 1) -> Weight:
    return quantise_mxfp4(w) if form == "mxfp4" else quantise_nvfp4(w, parts)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_mean_their_dequantised_matrix(form: str, dtype: torch.dtype) -> None:
    x, w = draw(0, 5, 64).to(dtype), quantised(form, draw(1, 12, 64))
    found = linear(x, w)
    assert found.dtype == dtype
    assert torch.equal(found, linear(x, dequantise(w, dtype)))
    exact = x.double() @ dequantise(w, torch.float32).double().T
    close(found, exact, 1e-6 if dtype == torch.float32 else 2**-7)
    gate_up, down = quantised(form, draw(2, 3, 64, 32), 2), quantised(form, draw(3, 3, 32, 32))
    u, idx = draw(4, 5, 32).to(dtype), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1], [2, 2]])
    rows = expert_rows(u, idx, gate_up, down)
    assert rows.dtype == dtype
    assert torch.equal(rows, expert_rows(u, idx, dequantise(gate_up, dtype), dequantise(down, dtype)))
    exact = experts_by_hand(u, idx, dequantise(gate_up, torch.float32), dequantise(down, torch.float32))
    close(rows, exact, 1e-5 if dtype == torch.float32 else 2**-6)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given_", [torch.float32, torch.bfloat16])
def test_linear_rounds_its_input_to_the_weight(weight: torch.dtype, given_: torch.dtype) -> None:
    x, w = draw(0, 3, 5, 16).to(given_), draw(1, 7, 16).to(weight)
    found = linear(x, w)
    assert found.dtype == weight
    assert found.shape == (3, 5, 7)
    exact = x.to(weight).double() @ w.double().T
    close(found, exact, 1e-6 if weight == torch.float32 else 2**-8)
    if (weight, given_) == (torch.bfloat16, torch.float32):
        assert torch.equal(found, linear(x.bfloat16(), w))


def test_vmap_and_grad() -> None:
    """The reference has no data-dependent control flow: mapped over a batch it is the loop, and it has gradients."""
    u, gate_up, down = draw(0, 3, 4, 6), draw(1, 5, 8, 6), draw(2, 5, 6, 4)
    idx = torch.randint(0, 5, (3, 4, 2))
    mapped = vmap(expert_rows, in_dims=(0, 0, None, None))(u, idx, gate_up, down)
    close(mapped, torch.stack([expert_rows(*each, gate_up, down) for each in zip(u, idx, strict=True)]), 1e-6)
    q, k, v = draw(3, 3, 1, 4, 4, 4), *draw(4, 2, 3, 1, 4, 2, 4)
    pos = torch.arange(4)[None]
    each = [attend(*parts, pos, pos, 3) for parts in zip(q, k, v, strict=True)]
    close(vmap(attend, in_dims=(0, 0, 0, None, None, None))(q, k, v, pos, pos, 3), torch.stack(each), 1e-6)

    def total(scale: Tensor) -> Tensor:
        return attend(q[0] * scale, k[0], v[0], pos, pos, 3).square().sum()

    slope = (total(torch.tensor(1.01)) - total(torch.tensor(0.99))) / 0.02
    close(grad(total)(torch.tensor(1.0)), slope, 1e-2)
    far(slope, torch.tensor(0.0))


def test_inputs_are_not_modified() -> None:
    q, k, v = draw(0, 1, 4, 4, 4), *draw(1, 2, 1, 4, 2, 4)
    pos, idx = torch.arange(4)[None], torch.tensor([[0, 1]] * 4)
    w = quantise_mxfp4(draw(2, 2, 64, 32)), quantise_nvfp4(draw(3, 2, 32, 32))
    u = draw(4, 4, 32)
    before = snapshot((q, k, v, pos, idx, w, u))
    attend(q, k, v, pos, pos, 2)
    expert_rows(u, idx, *w)
    linear(u, w[0]._replace(codes=w[0].codes[0], scales=w[0].scales[0]))
    unchanged((q, k, v, pos, idx, w, u), before)
