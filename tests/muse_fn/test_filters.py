"""Filters by counting: against a sort, on ties and extremes, and split over ranks with the same bits."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn import sample as sample_module
from muse_fn.filters import keep, keep_by_kernels, ordered, within
from muse_fn.kernels import gpu_filter, gpu_sample
from muse_fn.sample import Sampling, draws, sample
from muse_fn.sharding.collectives import stacked
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.simulated import simulate
from tests.models import SEEDS

ROWS = st.integers(1, 16)
INF = float("inf")


def values(seed: int, rows: int, vocab: int) -> Tensor:
    """Logits counted from the largest, many of them equal, some -inf, some so small that they weigh nothing."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(1, 13, (rows, 1), generator=draw)  # with few of them every limit falls between equals
    x = torch.randint(-12, 12, (rows, vocab), generator=draw) % levels / 2
    x = torch.where(torch.rand(x.shape, generator=draw) < 0.1, -INF, x)
    x = torch.where(torch.rand(x.shape, generator=draw) < 0.1, x - 80, x)
    x[:, seed % vocab] = 7.0 - seed % 2
    return x - x.amax(-1, keepdim=True)


def limits(seed: int, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed + 1)

    def off() -> Tensor:  # half of each, so that one filter does not hide what another does
        return torch.rand(rows, generator=draw) < 0.5

    top_k = torch.randint(1, vocab + 1, (rows,), generator=draw).masked_fill(off(), vocab)
    top_p = (torch.rand(rows, generator=draw) + 1e-3).clamp_max(1).masked_fill(off(), 1.0)
    min_p = torch.rand(rows, generator=draw).pow(4).masked_fill(off(), 0.0)
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


def test_equals_on_several_ranks_are_kept_by_id() -> None:
    """The fifth and sixth of six equals begin the third of four ranks; top_p cuts the same way as top_k."""
    x = torch.tensor([[0.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -5.0]])
    full, none = torch.tensor([8]), torch.tensor([1.0])
    five = (1 + 4 * x[0, 1].exp()) / x.exp().sum() - 1e-4
    for top_k, top_p in ((torch.tensor([5]), none), (full, five[None])):
        for mesh in (Mesh(), Mesh(2, 2), Mesh(1, 2), Mesh(8, 1)):
            each = 8 // mesh.ranks
            parts = simulate(
                mesh,
                lambda m, k=top_k, p=top_p, n=each: keep(x[:, m.rank * n : (m.rank + 1) * n], k, p, torch.zeros(1), m),
            )
            assert torch.cat(parts, -1).isfinite()[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_long_tail_of_tiny_weights_counts() -> None:
    """200 000 tokens of 4e-8 each are 0.8 % together, and top_p 0.995 ends among them."""
    x = torch.full((1, 200_001), -17.0)
    x[0, 7] = 0.0
    tiny = x[0, 0].exp().double()
    tail = (0.995 * (1 + 200_000 * tiny) - 1) / tiny
    kept = keep(x, torch.tensor([200_001]), torch.tensor([0.995]), torch.zeros(1)).isfinite().sum() - 1
    assert abs(kept - tail) < 1e-3 * tail


def test_order_of_numbers_is_the_order_of_floats() -> None:
    floats = [-INF, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, INF]
    rank = ordered(torch.tensor(floats))
    assert rank.min() >= 0
    assert rank.max() < 2**32
    assert rank[4] == rank[5]
    assert (rank.diff() >= 0).all()
    assert (rank.diff() == 0).sum() == 1


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(1, [0]), (4, [0]), (5, [0, 3]), (6, [0, 3, 1]), (7, [0, 3, 1]), (8, [0, 3, 1, 2]), (99, [0, 3, 1, 2])],
)
def test_within_counts_what_ranks_before(limit: int, kept: list[int]) -> None:
    rank, weight = torch.tensor([[9, 5, 5, 7]]), torch.tensor([[4, 2, 3, 1]])
    assert within(rank, weight, torch.tensor([limit]))[0].nonzero()[:, 0].tolist() == sorted(kept)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter knows one kernel at a time, and ranks are threads here."""
    lock = threading.Lock()

    def guarded(form: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **names: Any) -> Any:
            with lock:
                return form(*args, **names)

        return call

    for module, names in ((gpu_filter, ("count", "pick", "ties", "keep")), (gpu_sample, ("tops",))):
        for name in names:
            monkeypatch.setattr(module, name, guarded(getattr(module, name)))


def by_kernels(
    x: Tensor, temperature: Tensor, given_limits: tuple[Tensor, ...], mesh: Mesh, allowed: Tensor | None = None
) -> Tensor:
    """Of all ranks, each with its share, in Triton's interpreter."""
    each = x.shape[1] // mesh.ranks

    def run(m: Mesh) -> Tensor:
        start = m.rank * each
        own, mask = x[:, start : start + each], None if allowed is None else allowed[..., start : start + each]
        tops = stacked(gpu_sample.tops(own, start, mask), m, STAGE)
        top_k, top_p, min_p = given_limits
        return keep_by_kernels(own, mask, tops, temperature, (top_k, top_p, min_p), m)

    return torch.cat(simulate(mesh, run), -1)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where numbers overflow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEEDS, st.integers(1, 4), st.integers(1, 30), st.sampled_from([Mesh(), Mesh(1, 2), Mesh(2, 2)]), st.booleans())
def test_kernels_keep_the_same(seed: int, rows: int, each: int, mesh: Mesh, some: bool) -> None:
    x, given_limits = values(seed, rows, each * mesh.ranks), limits(seed, rows, each * mesh.ranks)
    draw = torch.Generator().manual_seed(seed + 2)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0])[torch.randint(0, 4, (rows,), generator=draw)]
    allowed = (torch.rand(x.shape, generator=draw) < 0.7) | (x == 0) if some else None
    shown = x if allowed is None else x.masked_fill(~allowed, -INF)
    scaled = shown / torch.where(temperature > 0, temperature, 1.0)[:, None]
    expected = shown.masked_fill(keep(scaled, *given_limits) == -INF, -INF)
    assert torch.equal(by_kernels(x + 3.0, temperature, given_limits, mesh, allowed), expected + 3.0)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(1, 2)])
def test_kernels_count_over_blocks(mesh: Mesh) -> None:
    """More ids than a program takes, most of them equal: what is kept ends within one of the later blocks."""
    size = 2 * gpu_sample.BLOCK + 4
    x = torch.full((3, size), -1.0)
    x[:, 7], x[:, -3:] = 0.0, -0.5
    most = torch.tensor([gpu_sample.BLOCK + 50, size, 3])
    given_limits = most, torch.tensor([1.0, 0.6, 1.0]), torch.zeros(3)
    found = by_kernels(x, torch.ones(3), given_limits, mesh)
    assert torch.equal(found, keep(x, *given_limits))
    assert (found > -INF).sum(-1).tolist()[::2] == [gpu_sample.BLOCK + 50, 3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(SEEDS, st.integers(1, 4), st.integers(2, 40))
def test_tokens_drawn_by_kernels_are_the_same(seed: int, rows: int, vocab: int) -> None:
    x, (top_k, top_p, min_p) = values(seed, rows, vocab), limits(seed, rows, vocab)
    settings_of = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    each = [Sampling(0.8 * (n % 2), k, p, m, seed + n) for n, (k, p, m) in enumerate(settings_of)]
    x, drawn, pos = x.nan_to_num(neginf=-1e30), draws(each, vocab), torch.arange(rows)
    expected = sample(x, drawn, pos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_module, "why_no_triton", lambda where: "")  # pyright: ignore[reportUnknownLambdaType]
        assert torch.equal(sample(x, drawn, pos), expected)
