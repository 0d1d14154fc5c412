"""Few new tokens: any splits, tiles, windows and orders of positions give what the reference gives."""

from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu, gpu_attention, gpu_merge, reference
from tests.models import SEEDS, close

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
FLOAT8 = torch.float8_e4m3fn
NO_DEVICE = gpu.why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(bool(NO_DEVICE), reason=f"no place to run device kernels: {NO_DEVICE}")


class Case(NamedTuple):
    """What the forms of attention take."""

    q_BTND: Tensor
    k_arena: Tensor
    v_arena: Tensor
    blocks_BC: Tensor
    q_pos_BT: Tensor
    k_pos_BS: Tensor


def case(
    seed: int, lengths: list[int], new: int, block: int, heads: tuple[int, int, int], dtype: torch.dtype,
    cache: torch.dtype, empty: int = 0, shuffled: bool = False,
) -> Case:  # fmt: skip
    """Sequences of these lengths, `new` of them new, in blocks in any order, then `empty` columns. Everything that has
    no position is NaN. Heads: to a KV head, KV heads, width."""
    draw = torch.Generator().manual_seed(seed)
    group, kv_heads, width = heads
    batch, columns = len(lengths), empty - (-max(lengths) // block)
    order = 1 + torch.randperm(batch * columns, generator=draw).view(batch, columns)
    pos = torch.arange(columns * block).expand(batch, -1)
    pos = torch.where(pos < torch.tensor(lengths)[:, None], pos, -1)
    if shuffled:
        pos = pos[:, torch.randperm(columns * block, generator=draw)]
    arenas: list[Tensor] = []
    for _ in "kv":
        arena = torch.full((batch * columns + 1, block, kv_heads, width), torch.nan)
        rows = (order[..., None] * block + torch.arange(block)).flatten(1)[pos >= 0]
        arena.flatten(0, 1)[rows] = torch.randn(len(rows), kv_heads, width, generator=draw)
        arenas.append(arena.to(cache))
    q = torch.randn(batch, new, group * kv_heads, width, generator=draw).to(dtype)
    q_pos = torch.tensor(lengths)[:, None] - new + torch.arange(new)
    return Case(q, arenas[0], arenas[1], order, q_pos.clamp_min(0), pos)


def exact(case: Case, window: int) -> Tensor:
    """The reference in float32, from inputs as they are, and zeros for a query that sees nothing."""
    out = reference.attend_blocks(case.q_BTND.float(), *case[1:], window)
    sees = reference.visible(case.q_pos_BT, case.k_pos_BS, window).any(-1)
    return out * sees[..., None, None]


def check(found: Tensor, case: Case, window: int) -> None:
    assert found.dtype == case.q_BTND.dtype
    assert found.is_contiguous()
    close(found.float(), exact(case, window), TOLERANCE[found.dtype])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and shares so small that a short context has many."""
    monkeypatch.setattr(gpu_attention, "TILE_BYTES", 1)
    monkeypatch.setattr(gpu_attention, "FEWEST_KEYS", 1)
    monkeypatch.setattr(gpu_attention, "SCANNED", 32)
    monkeypatch.setattr(gpu_merge, "MERGED", 2)


HEADS = st.sampled_from([(1, 1, 16), (8, 2, 8), (3, 2, 5), (2, 3, 4), (4, 2, 32), (16, 1, 16)])
TYPES = st.sampled_from(
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
     (torch.bfloat16, FLOAT8), (torch.float32, FLOAT8), (torch.float32, torch.bfloat16)]
)  # fmt: skip


@settings(max_examples=20)
@given(
    SEEDS, st.lists(st.integers(1, 150), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from([1, 5, 16, 32]),
    HEADS, TYPES, st.sampled_from([0, 1, 7, 64]), st.integers(0, 3), st.booleans(), st.sampled_from([1, 4, 9]),
)  # fmt: skip
def test_any_splits_equal_the_reference(
    seed: int, lengths: list[int], new: int, block: int, heads: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype], window: int, empty: int, shuffled: bool, processors: int,
) -> None:  # fmt: skip
    most = 16 if types[0] == torch.float32 else 64
    drawn = case(seed, lengths, min(new, most // heads[0]), block, heads, *types, empty, shuffled)
    assert not gpu_attention.why_not(*drawn[:3])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TILE_BYTES", 1), ("FEWEST_KEYS", 1), ("SCANNED", 32)):
            patch.setattr(gpu_attention, name, value)
        patch.setattr(gpu_merge, "MERGED", 2)
        patch.setattr(gpu_attention, "processors", Mock(return_value=processors))
        check(gpu_attention.attend_blocks(*drawn, window), drawn, window)


@pytest.mark.parametrize(("cache", "block"), [(torch.bfloat16, 128), (torch.bfloat16, 16), (FLOAT8, 256)])
@pytest.mark.parametrize("window", [0, 256])
def test_the_released_shapes(cache: torch.dtype, block: int, window: int) -> None:
    drawn = case(0, [700, 1], 1, block, (8, 2, 64), torch.bfloat16, cache, 2)
    check(gpu_attention.attend_blocks(*drawn, window), drawn, window)


@given(SEEDS, st.integers(0, 60))
@settings(max_examples=5)
def test_keys_behind_a_query_are_not_seen(seed: int, at: int) -> None:
    drawn = case(seed, [50], 1, 8, (2, 2, 16), torch.float32, torch.float32)
    drawn = drawn._replace(q_pos_BT=torch.tensor([[at]]))
    check(gpu_attention.attend_blocks(*drawn, 0), drawn, 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("processors", [1, 9])
def test_a_query_that_sees_nothing_gets_zeros(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside one that sees something, and in a sequence whose places are all empty."""
    monkeypatch.setattr(gpu_attention, "processors", Mock(return_value=processors))
    drawn = case(0, [40, 40], 2, 8, (2, 2, 16), torch.float32, torch.float32)
    k_pos = torch.stack([drawn.k_pos_BS[0] + 5, torch.full_like(drawn.k_pos_BS[0], -1)])
    drawn = drawn._replace(k_pos_BS=k_pos, q_pos_BT=torch.tensor([[2, 9], [39, 40]]))
    found = gpu_attention.attend_blocks(*drawn, 0)
    assert (found[0, 0] == 0).all()
    assert (found[1] == 0).all()
    assert (found[0, 1] != 0).any()
    check(found, drawn, 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("processors", [1, 9])
def test_what_is_not_a_number_stays_so(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A visible key that is NaN must not come out as numbers."""
    monkeypatch.setattr(gpu_attention, "processors", Mock(return_value=processors))
    for arena in (1, 2):
        drawn = case(0, [40], 1, 8, (2, 1, 16), torch.float32, torch.float32)
        drawn[arena][drawn.blocks_BC[0, 2], 3] = torch.nan
        assert gpu_attention.attend_blocks(*drawn, 0).isnan().all()


@pytest.mark.usefixtures("small")
def test_huge_and_tiny_scores() -> None:
    drawn = case(0, [90], 1, 8, (2, 2, 16), torch.float32, torch.float32)
    for factor in (0.0, 1e-30, 300.0):
        q = drawn.q_BTND * factor
        check(gpu_attention.attend_blocks(q, *drawn[1:], 0), drawn._replace(q_BTND=q), 0)


@pytest.mark.usefixtures("small")
def test_queries_may_be_a_slice() -> None:
    drawn = case(0, [30, 9], 2, 8, (2, 2, 16), torch.float32, torch.float32)
    wide = torch.randn(2, 2, 7, 32)
    wide[:, :, 2:6, :16] = drawn.q_BTND
    check(gpu_attention.attend_blocks(wide[:, :, 2:6, :16], *drawn[1:], 0), drawn, 0)


def test_nothing_at_all() -> None:
    drawn = case(0, [9], 1, 4, (2, 2, 16), torch.float32, torch.float32)
    none = drawn._replace(blocks_BC=drawn.blocks_BC[:, :0], k_pos_BS=drawn.k_pos_BS[:, :0])
    assert (gpu_attention.attend_blocks(*none, 0) == 0).all()
    nobody = drawn._replace(
        **{name: x[:0] for name, x in drawn._asdict().items() if name.rpartition("_")[2].startswith("B")}
    )
    assert gpu_attention.attend_blocks(*nobody, 0).shape == (0, 1, 4, 16)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 256), st.integers(1, 10_000))
def test_split_count(programs: int, rows: int, width: int, most: int) -> None:
    device = torch.device("cpu")
    splits = gpu_attention.split_count(programs, rows, width, most, device)
    assert 1 <= splits <= most
    assert splits == 1 or splits * programs <= gpu_attention.PROGRAMS * gpu.processors(device)
    assert splits == 1 or splits * rows * (width + 2) * 4 <= gpu_attention.WORKSPACE


def test_why_not() -> None:
    drawn = case(0, [9], 2, 4, (4, 2, 16), torch.float32, torch.float32)
    q, k, v = drawn[:3]
    assert not gpu_attention.why_not(q, k, v)
    assert not gpu_attention.why_not(q.bfloat16(), k.to(FLOAT8), v.to(FLOAT8))
    assert "at most 16 rows" in gpu_attention.why_not(torch.empty(1, 9, 4, 16), k, v)
    assert not gpu_attention.why_not(torch.empty(1, 32, 4, 16).bfloat16(), k, v)
    assert "at most 64 rows" in gpu_attention.why_not(torch.empty(1, 33, 4, 16).bfloat16(), k, v)
    assert "rows" in gpu_attention.why_not(q[:, :, :3], k, v)
    assert "float64" in gpu_attention.why_not(q.double(), k, v)
    assert "float64" in gpu_attention.why_not(q, k.double(), v)
    assert "view" in gpu_attention.why_not(q, k[:, :, :, :8], v)
    assert "256" in gpu_attention.why_not(
        torch.empty(1, 1, 8, 512), torch.empty(2, 4, 2, 512), torch.empty(2, 4, 2, 512)
    )
    assert "one element" in gpu_attention.why_not(q.mT.contiguous().mT, k, v)
