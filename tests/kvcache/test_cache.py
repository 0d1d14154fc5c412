"""The cache against a dictionary: what was appended at a position of a sequence is what its context holds there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kvcache.cache import KVCache, View, append, blocks_for, context, init_cache, own_blocks, step_positions
from tests.models import SEEDS, SMALL, scattered_cache, snapshot, unchanged


def rows(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, SMALL.kv_heads, SMALL.head_dim, generator=draw).to(dtype)


@given(SEEDS, st.integers(1, 5), st.integers(1, 3), st.lists(st.lists(st.integers(0, 4), min_size=3), max_size=4))
def test_context_is_what_was_appended(seed: int, block: int, batch: int, steps: list[list[int]]) -> None:
    """Ragged steps with padding columns, blocks in any order, several layers at once."""
    longest = 1 + sum(max(counts) for counts in steps)
    kv, table = scattered_cache(SMALL, batch, longest, block, seed)
    held: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(batch)] for _ in range(SMALL.layers)]
    past = torch.zeros(batch, dtype=torch.int64)
    for n, counts in enumerate(steps):
        count = torch.tensor(counts[:batch])
        view = View(table, past, count)
        width = max(1, int(count.max()))
        for layer in range(SMALL.layers):
            k, v = rows(seed + 7 * n + layer, batch, width), rows(seed + 7 * n + layer + 1000, batch, width)
            kv = append(kv, layer, k, v, view)
            for b in range(batch):
                held[layer][b] += [(k[b, t], v[b, t]) for t in range(counts[b])]
            found_k, found_v, pos = context(kv, layer, view, torch.float32)
            assert found_k.shape == found_v.shape == (batch, table.shape[1] * block, SMALL.kv_heads, SMALL.head_dim)
            for b in range(batch):
                real = len(held[layer][b])
                assert pos[b].tolist() == [*range(real), *[-1] * (pos.shape[1] - real)]
                for j, (each_k, each_v) in enumerate(held[layer][b]):
                    assert torch.equal(found_k[b, j], each_k)
                    assert torch.equal(found_v[b, j], each_v)
        past = past + count


@given(SEEDS, st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.integers(1, 6))
def test_append_touches_its_rows_and_block_0_only(seed: int, block: int, past: int, count: int, width: int) -> None:
    count = min(count, width)
    kv, table = scattered_cache(SMALL, 2, 9, block, seed)
    before = [t.clone() for t in (*kv.k, *kv.v)]
    view = View(table, torch.tensor([past, 0]), torch.tensor([count, 0]))
    kv = append(kv, 1, rows(seed, 2, width) + 100, rows(seed + 1, 2, width) + 100, view)
    places = {int(table[0, p // block]) * block + p % block for p in range(past, past + count)}
    for i, (old, new) in enumerate(zip(before, (*kv.k, *kv.v), strict=True)):
        changed = (old != new).flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
        outside_0 = {place for place in changed if place >= block}
        assert outside_0 == (places if i % SMALL.layers == 1 else set())


@pytest.mark.parametrize("arena", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [torch.float32, torch.bfloat16])
def test_dtypes(arena: torch.dtype, step: torch.dtype) -> None:
    """Rows are rounded to the arena's dtype once, and read in the dtype that is asked for."""
    kv = init_cache(SMALL, 3, 4, dtype=arena)
    view = View(own_blocks(1, 5, 4), torch.tensor([0]), torch.tensor([5]))
    k, v = rows(0, 1, 5, step), rows(1, 1, 5, step)
    kv = append(kv, 0, k, v, view)
    found_k, found_v, _ = context(kv, 0, view, step)
    assert kv.k[0].dtype == arena
    assert found_k.dtype == found_v.dtype == step
    assert torch.equal(found_k[:, :5], k.to(arena).to(step))
    assert torch.equal(found_v[:, :5], v.to(arena).to(step))


def test_inputs_of_append_and_context_are_not_modified_but_for_the_arena() -> None:
    kv, table = scattered_cache(SMALL, 2, 9, 4, 0)
    view = View(table, torch.tensor([2, 0]), torch.tensor([3, 1]))
    inputs = (rows(0, 2, 3), rows(1, 2, 3), view)
    before = snapshot(inputs)
    kv = append(kv, 0, inputs[0], inputs[1], view)
    arena = snapshot(kv)
    context(kv, 0, view, torch.float32)
    unchanged(inputs, before)
    unchanged(kv, arena)


def test_init_cache_holds_whole_tensors_of_the_stated_size() -> None:
    kv = init_cache(SMALL, 7, 4, dtype=torch.bfloat16)
    assert isinstance(kv, KVCache)
    assert len(kv.k) == len(kv.v) == SMALL.layers
    arrays = [*kv.k, *kv.v]
    for each in arrays:
        assert each.shape == (7, 4, SMALL.kv_heads, SMALL.head_dim)
        assert each.dtype == torch.bfloat16
        assert each.untyped_storage().nbytes() == each.numel() * 2, "whole, never a view of a larger one"
        assert not each.any()
    assert len({each.data_ptr() for each in arrays}) == len(arrays)
    assert init_cache(SMALL, 2).k[0].shape[1] == 16


@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (0, 4), (-1, 4), (2, 0)])
def test_a_cache_without_room_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 blocks of at least 1 position, not {blocks} of {size}"):
        init_cache(SMALL, blocks, size)


def test_the_smallest_cache_is_not_refused() -> None:
    init_cache(SMALL, 2, 1)


@given(st.integers(0, 100), st.integers(1, 9))
def test_blocks_for_is_the_fewest_that_hold(positions: int, block: int) -> None:
    n = blocks_for(positions, block)
    assert n * block >= positions
    assert (n - 1) * block < positions


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 9))
def test_own_blocks_are_distinct_and_never_block_0(batch: int, positions: int, block: int) -> None:
    table = own_blocks(batch, positions, block)
    assert table.dtype == torch.int64
    assert table.shape == (batch, blocks_for(positions, block))
    assert table.flatten().tolist() == list(range(1, 1 + table.numel()))


def test_step_positions_follow_the_past() -> None:
    view = View(own_blocks(2, 9, 4), torch.tensor([0, 5]), torch.tensor([2, 1]))
    assert step_positions(view, 3).tolist() == [[0, 1, 2], [5, 6, 7]]
