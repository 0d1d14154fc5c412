"""Filters by counting: against a sort, on ties and extremes, and split over ranks with the same bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.filters import keep, ordered, within
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.simulated import simulate
from tests.models import SEEDS

ROWS = st.integers(1, 5)
INF = float("inf")


def values(seed: int, rows: int, vocab: int) -> Tensor:
    """Logits counted from the largest, many of them equal, some -inf, some so small that they weigh nothing."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-12, 12, (rows, vocab), generator=draw) / 2
    x = torch.where(torch.rand(x.shape, generator=draw) < 0.1, -INF, x)
    x = torch.where(torch.rand(x.shape, generator=draw) < 0.1, x - 80, x)
    x[:, seed % vocab] = 7.0
    return x - x.amax(-1, keepdim=True)


def limits(seed: int, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed + 1)
    top_k = torch.randint(1, 2 * vocab, (rows,), generator=draw).clamp_max(vocab)
    top_p = torch.where(torch.rand(rows, generator=draw) < 0.3, 1.0, torch.rand(rows, generator=draw) + 1e-3).clamp_max(
        1
    )
    min_p = torch.where(torch.rand(rows, generator=draw) < 0.3, 0.0, torch.rand(rows, generator=draw))
    return top_k, top_p, min_p


def by_sorting(x_BV: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [B, V]: what the documentation says, in float64 and by a sort."""
    kept = torch.zeros(x_BV.shape, dtype=torch.bool)
    for b, row in enumerate(x_BV.double()):
        order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))[: int(top_k[b])]
        p = row[order].exp()
        before = (p.cumsum(0) - p) / p.sum()
        good = (before < top_p[b].double()) | (top_p[b] >= 1)
        good &= p >= min_p[b].double()
        kept[b, torch.tensor(order)[good]] = True
    return kept


@given(SEEDS, ROWS, st.integers(1, 60))
def test_keeps_what_a_sort_keeps(seed: int, rows: int, vocab: int) -> None:
    x, given_limits = values(seed, rows, vocab), limits(seed, rows, vocab)
    found, kept = keep(x, *given_limits), by_sorting(x, *given_limits)
    assert torch.equal(found, x.masked_fill(~kept, -INF))
    assert (found == 0).any(-1).all(), "the likeliest is always kept"


@given(SEEDS, ROWS, st.integers(1, 9), st.sampled_from([Mesh(1, 2), Mesh(2, 1), Mesh(2, 2), Mesh(2, 4)]))
def test_shares_of_the_vocabulary_keep_the_same(seed: int, rows: int, each: int, mesh: Mesh) -> None:
    x, given_limits = values(seed, rows, each * mesh.ranks), limits(seed, rows, each * mesh.ranks)
    parts = simulate(mesh, lambda m: keep(x[:, m.rank * each : (m.rank + 1) * each], *given_limits, m))
    assert torch.equal(torch.cat(parts, -1), keep(x, *given_limits))


def test_order_of_numbers_is_the_order_of_floats() -> None:
    floats = [-INF, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, INF]
    rank = ordered(torch.tensor(floats))
    assert rank.min() >= 0
    assert rank.max() < 2**32
    assert rank[4] == rank[5]
    assert (rank.diff() >= 0).all()
    assert (rank.diff() == 0).sum() == 1


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, [0]), (4, [0]), (5, [0, 3]), (6, [0, 3, 1]), (8, [0, 3, 1, 2]), (99, [0, 3, 1, 2])]
)
def test_within_counts_what_ranks_before(limit: int, kept: list[int]) -> None:
    rank, weight = torch.tensor([[9, 5, 5, 7]]), torch.tensor([[4, 2, 3, 1]])
    assert within(rank, weight, torch.tensor([limit]))[0].nonzero()[:, 0].tolist() == sorted(kept)
