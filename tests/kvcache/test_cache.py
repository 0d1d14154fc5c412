"""The cache against a dictionary: what was appended at a position of a sequence is what its context holds there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels.reference import FP8_MAX
from muse_fn.kvcache.cache import (
    KVCache,
    View,
    append,
    blocks_for,
    bytes_per_block,
    check_alive,
    consume,
    context,
    init_cache,
    locate,
    own_blocks,
    step_positions,
)
from muse_fn.kvcache.layout import Layout, layout_of
from muse_fn.params.config import Config
from muse_fn.sharding.mesh import Mesh
from tests.models import SEEDS, SMALL, on_arrays, snapshot, unchanged

TWO = Layout(windows=(0, 5), places=((1, 0), (0, 0), (1, 1)), slots=2)  # what follows does not need a model


def rows(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, SMALL.kv_heads, SMALL.head_dim, generator=draw).to(dtype)


def scattered(batch: int, positions: int, block: int, seed: int, layout: Layout = TWO) -> tuple[KVCache, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    each = blocks_for(positions, block)
    free = 1 + torch.randperm(layout.groups * batch * each + 3, generator=draw)
    shape = (1 + len(free), block, SMALL.kv_heads, SMALL.head_dim)
    k, v = ([torch.full(shape, torch.nan) for _ in range(layout.slots)] for _ in "kv")
    table = free[: layout.groups * batch * each].view(layout.groups, batch, each)
    return KVCache(tuple(k), tuple(v), torch.tensor(True)), table


@given(SEEDS, st.integers(1, 5), st.integers(1, 3), st.lists(st.lists(st.integers(0, 4), min_size=3), max_size=4))
def test_context_is_what_was_appended(seed: int, block: int, batch: int, steps: list[list[int]]) -> None:
    """Ragged steps with padding columns, blocks in any order, both groups; a sliding group forgets what has left its
    window and is given no block for it."""
    longest = 1 + sum(max(counts) for counts in steps)
    kv, table = scattered(batch, longest, block, seed)
    held: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    past = torch.zeros(batch, dtype=torch.int64)
    for n, counts in enumerate(steps):
        count = torch.tensor(counts[:batch])
        for b, p in enumerate(past.tolist()):
            table[1, b, : max(0, p - 5 + 1) // block] = 0
        width = max(1, int(count.max()))
        places = locate(View(table, past, count), width, block, TWO)
        for layer, (group, slot) in enumerate(TWO.places):
            k, v = rows(seed + 7 * n + layer, batch, width), rows(seed + 7 * n + layer + 1000, batch, width)
            kv = append(kv, slot, k, v, places[group])
            found_k, found_v, pos = context(kv, slot, places[group], torch.float32)
            for b in range(batch):
                own = held.setdefault((layer, b), [])
                own += [(k[b, t], v[b, t]) for t in range(counts[b])]
                oldest = max(0, int(past[b]) - 5 + 1) if group == 1 else 0
                seen = [p for p in pos[b].tolist() if p >= 0]
                assert seen == list(range(oldest, len(own)))
                for j, p in enumerate(pos[b].tolist()):
                    expected = own[p] if p >= 0 else (torch.zeros_like(k[0, 0]),) * 2
                    assert torch.equal(found_k[b, j], expected[0])
                    assert torch.equal(found_v[b, j], expected[1])
        past = past + count


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.integers(0, 30))
def test_a_sliding_context_has_a_size_of_its_own(window: int, block: int, length: int, past: int) -> None:
    """However long the sequence is, the blocks read are those of a window; all that is visible is among them."""
    layout = Layout((window,), ((0, 0),), 1)
    table = torch.arange(1, 41).view(1, 1, 40)
    (at,) = locate(View(table, torch.tensor([past]), torch.tensor([length])), length, block, layout)
    assert at.blocks_BC.shape[1] <= (window + length + block - 3) // block + 1
    needed = set(range(max(0, past - window + 1), past + length))
    assert needed == {p for p in at.pos_BS[0].tolist() if p >= 0}


@given(SEEDS, st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.integers(1, 6))
def test_append_touches_its_rows_and_block_0_only(seed: int, block: int, past: int, count: int, width: int) -> None:
    count = min(count, width)
    kv, table = scattered(2, 9, block, seed)
    before = [t.clone() for t in (*kv.k, *kv.v)]
    places = locate(View(table, torch.tensor([past, 0]), torch.tensor([count, 0])), width, block, TWO)
    kv = append(kv, 1, rows(seed, 2, width) + 100, rows(seed + 1, 2, width) + 100, places[0])
    written = {int(table[0, 0, p // block]) * block + p % block for p in range(past, past + count)}
    for i, (old, new) in enumerate(zip(before, (*kv.k, *kv.v), strict=True)):
        changed = (new == new).flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
        assert old.isnan().all()
        assert {place for place in changed if place >= block} == (written if i % 2 == 1 else set())


STORED = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("arena", STORED)
@pytest.mark.parametrize("step", [torch.float32, torch.bfloat16])
def test_dtypes(arena: torch.dtype, step: torch.dtype) -> None:
    """Rows are rounded to the arena's dtype once, and read in the dtype that is asked for."""
    kv = init_cache(SMALL, 9, 4, dtype=arena)
    places = locate(View(own_blocks(SMALL, 1, 5, 4), torch.tensor([0]), torch.tensor([5])), 5, 4, layout_of(SMALL))[1]
    k, v = rows(0, 1, 5, step), rows(1, 1, 5, step)
    kv = append(kv, 0, k, v, places)
    found_k, found_v, _ = context(kv, 0, places, step)
    assert kv.k[0].dtype == arena
    assert found_k.dtype == found_v.dtype == step
    assert torch.equal(found_k[:, :5], k.to(arena).to(step))
    assert torch.equal(found_v[:, :5], v.to(arena).to(step))


def test_fp8_stores_what_every_device_can_hold() -> None:
    """Too large is the largest, NaN stays NaN: an e4m3 number beyond 240 means something else on some devices."""
    kv = init_cache(SMALL, 9, 4, dtype=torch.float8_e4m3fn)
    places = locate(View(own_blocks(SMALL, 1, 5, 4), torch.tensor([0]), torch.tensor([5])), 5, 4, layout_of(SMALL))[0]
    k = torch.tensor([1e9, -1e9, 300.0, torch.nan, -0.0]).view(1, 5, 1, 1).expand(1, 5, SMALL.kv_heads, SMALL.head_dim)
    found, _, _ = context(append(kv, 0, k, k, places), 0, places, torch.float32)
    values = found[0, :5, 0, 0]
    assert values[:3].tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX]
    assert values[3].isnan()
    assert values[4] == 0


def test_inputs_of_append_and_context_are_not_modified_but_for_the_arena() -> None:
    kv, table = scattered(2, 9, 4, 0)
    view = View(table, torch.tensor([2, 0]), torch.tensor([3, 1]))
    places = locate(view, 3, 4, TWO)
    inputs = (rows(0, 2, 3), rows(1, 2, 3), view, places)
    before = snapshot(inputs)
    kv = append(kv, 0, inputs[0], inputs[1], places[0])
    kv = on_arrays(lambda t: t.nan_to_num(3.0), kv)
    arena = snapshot(kv)
    context(kv, 0, places[0], torch.float32)
    unchanged(inputs, before)
    unchanged(kv, arena)


def test_a_consumed_handle_is_dead_and_its_successor_alive() -> None:
    first = init_cache(SMALL, 7, 4)
    second = consume(first)
    check_alive(second)
    assert second.k[0].data_ptr() == first.k[0].data_ptr(), "nothing is copied"
    for use in (check_alive, consume):
        with pytest.raises(ValueError, match="consumed by an earlier step: use the one it returned"):
            use(first)
    check_alive(consume(second))


def test_init_cache_holds_whole_tensors_of_the_stated_size() -> None:
    kv = init_cache(SMALL, 7, 4, dtype=torch.bfloat16)
    assert isinstance(kv, KVCache)
    assert len(kv.k) == len(kv.v) == layout_of(SMALL).slots == 1
    arrays = [*kv.k, *kv.v]
    for each in arrays:
        assert each.shape == (7, 4, SMALL.kv_heads, SMALL.head_dim)
        assert each.dtype == torch.bfloat16
        assert each.untyped_storage().nbytes() == each.numel() * 2, "whole, never a view of a larger one"
        assert not each.any()
    assert len({each.data_ptr() for each in arrays}) == len(arrays)
    assert sum(each.nbytes for each in arrays) == 7 * bytes_per_block(SMALL, 4, torch.bfloat16)
    assert init_cache(SMALL, 2).k[0].shape[1] == 16


def test_a_block_of_the_released_model_on_one_card_of_eight() -> None:
    """8,192 bytes a token: 16 slots of 2 heads of 64, keys and values in 2 bytes."""
    for block in (16, 128):
        assert bytes_per_block(Config(), block, torch.bfloat16, Mesh(2, 4).at(3)) == 8192 * block
        assert bytes_per_block(Config(), block, torch.float8_e4m3fn, Mesh(2, 4).at(3)) == 4096 * block


@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (0, 4), (-1, 4), (2, 0)])
def test_a_cache_without_room_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 blocks of at least 1 position, not {blocks} of {size}"):
        init_cache(SMALL, blocks, size)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e5m2])
def test_a_dtype_that_cannot_hold_keys_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype is {dtype}: a cache stores float32, bfloat16 or float8_e4m3fn"):
        init_cache(SMALL, 2, 1, dtype=dtype)


def test_the_smallest_cache_is_not_refused() -> None:
    init_cache(SMALL, 2, 1)


@given(st.integers(0, 100), st.integers(1, 9))
def test_blocks_for_is_the_fewest_that_hold(positions: int, block: int) -> None:
    n = blocks_for(positions, block)
    assert n * block >= positions
    assert (n - 1) * block < positions


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 9))
def test_own_blocks_are_distinct_and_never_block_0(batch: int, positions: int, block: int) -> None:
    table = own_blocks(SMALL, batch, positions, block)
    assert table.dtype == torch.int64
    assert table.shape == (layout_of(SMALL).groups, batch, blocks_for(positions, block))
    assert table.flatten().tolist() == list(range(1, 1 + table.numel()))


@pytest.mark.parametrize("sizes", [(-1, 4, 4), (1, -4, 4), (1, 4, 0)])
def test_own_blocks_of_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positions="):
        own_blocks(SMALL, *sizes)


def test_step_positions_follow_the_past() -> None:
    view = View(own_blocks(SMALL, 2, 9, 4), torch.tensor([0, 5]), torch.tensor([2, 1]))
    assert step_positions(view, 3).tolist() == [[0, 1, 2], [5, 6, 7]]


def test_handles_may_cross_the_border_of_inference_mode() -> None:
    with torch.inference_mode():
        kv = consume(init_cache(SMALL, 2, 4))
    outside = consume(kv)
    with torch.inference_mode():
        inside = consume(outside)
    check_alive(consume(inside))
    for dead in (kv, outside, inside):
        with pytest.raises(ValueError, match="consumed"):
            check_alive(dead)
