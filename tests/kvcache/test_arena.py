"""The arrays as a whole: growing keeps everything, dropping gives it back, carried blocks arrive bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kvcache.arena import carry_in, carry_out, drop, grow
from muse_fn.kvcache.cache import STORAGE, KVCache, init_cache
from tests.models import SEEDS, SMALL, on_arrays
from tests.tiny_checkpoint import raw_bytes


def filled(seed: int, dtype: torch.dtype, blocks: int = 7) -> KVCache:
    draw = torch.Generator().manual_seed(seed)
    return on_arrays(
        lambda t: torch.randn(t.shape, generator=draw).to(t.dtype), init_cache(SMALL, blocks, 4, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", STORAGE.values(), ids=STORAGE)
def test_growing_keeps_every_block(dtype: torch.dtype) -> None:
    old = filled(0, dtype)
    before = [raw_bytes(t).clone() for t in (*old.k, *old.v)]
    new = grow(old, 12)
    for array, bytes_before in zip((*new.k, *new.v), before, strict=True):
        assert array.shape[0] == 12
        assert array._base is None, "whole, never a view"
        assert torch.equal(raw_bytes(array[:7]), bytes_before)
        assert not raw_bytes(array[7:]).any()
    with pytest.raises(ValueError, match="consumed"):
        grow(old, 13)
    with pytest.raises(ValueError, match="num_blocks is 11: the cache has 12"):
        grow(new, 11)


def test_dropping_gives_the_memory_back_and_kills_the_handle() -> None:
    kv = filled(0, torch.float32)
    drop(kv)
    assert sum(t.untyped_storage().nbytes() for t in (*kv.k, *kv.v)) == 0
    with pytest.raises(ValueError, match="consumed"):
        drop(kv)


@given(
    SEEDS,
    st.sampled_from(list(STORAGE.values())),
    st.permutations(range(7)),
    st.permutations(range(7)),
    st.integers(0, 7),
)
def test_blocks_carried_out_and_in_are_the_same_bits_elsewhere(
    seed: int, dtype: torch.dtype, source: list[int], target: list[int], count: int
) -> None:
    kv, other = filled(seed, dtype), filled(seed + 1, dtype)
    content = carry_out(kv, torch.tensor(source[:count], dtype=torch.int64))
    before = on_arrays(torch.clone, other)
    other = carry_in(other, torch.tensor(target[:count], dtype=torch.int64), content)
    for mine, theirs, old in zip((*kv.k, *kv.v), (*other.k, *other.v), (*before.k, *before.v), strict=True):
        for a, b in zip(source[:count], target[:count], strict=True):
            assert torch.equal(raw_bytes(mine[a]), raw_bytes(theirs[b]))
        for untouched in set(range(7)) - set(target[:count]):
            assert torch.equal(raw_bytes(old[untouched]), raw_bytes(theirs[untouched]))


def test_what_does_not_fit_is_refused_and_the_cache_lives_on() -> None:
    kv, content = filled(0, torch.float32), carry_out(filled(1, torch.float32), torch.tensor([1, 2]))
    other = carry_out(filled(1, torch.bfloat16), torch.tensor([1, 2]))
    for blocks, offered, told in (
        ([1, 7], content, r"blocks has \[7\]: the cache has blocks 0 to 6"),
        ([-1, 1], content, r"blocks has \[-1\]"),
        ([1], content, r"content.k is .*: 1 blocks of this cache are"),
        ([1, 2], other, "content.k is .*torch.bfloat16"),
        ([1, 2], content._replace(v=content.v[:-1]), r"content.v is \[\]"),
    ):
        with pytest.raises(ValueError, match=told):
            carry_in(kv, torch.tensor(blocks), offered)
    with pytest.raises(ValueError, match=r"blocks has \[7\]"):
        carry_out(kv, torch.tensor([7]))
    carry_in(kv, torch.tensor([1, 2]), content)
    with pytest.raises(ValueError, match="consumed"):
        carry_out(kv, torch.tensor([1]))
