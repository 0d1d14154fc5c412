"""The arrays of a cache as a whole: made larger, given back, and blocks carried to the host and back."""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kvcache.cache import KVCache, check_alive, consume


class Blocks(NamedTuple):
    """The content of some blocks in every slot, on the host, in the order in which they were asked for."""

    k: tuple[Tensor, ...]  # each [n, block, K, D]
    v: tuple[Tensor, ...]


def grow(kv: KVCache, num_blocks: int) -> KVCache:
    """The same cache with room for more blocks. Consumes `kv`; both take memory until it has returned.

    Raises ValueError for fewer blocks than there are.
    """
    have = kv.k[0].shape[0]
    if num_blocks < have:
        raise ValueError(f"num_blocks is {num_blocks}: the cache has {have}, and growing cannot take any away")
    kv = consume(kv)
    k, v = (tuple(_longer(t, num_blocks) for t in side) for side in (kv.k, kv.v))
    return kv._replace(k=k, v=v)


def _longer(arena: Tensor, num_blocks: int) -> Tensor:
    out = torch.zeros(num_blocks, *arena.shape[1:], dtype=arena.dtype, device=arena.device)
    out[: arena.shape[0]] = arena
    return out


def drop(kv: KVCache) -> None:
    """Gives the memory back at once, whoever still holds the handle; it is dead from now on."""
    consume(kv)
    for array in (*kv.k, *kv.v):
        array.untyped_storage().resize_(0)


def carry_out(kv: KVCache, blocks: Tensor) -> Blocks:
    """A copy of these blocks (int64 [n]) on the host. Raises ValueError for a consumed handle or blocks it has not."""
    check_alive(kv)
    _check_blocks(kv, blocks)
    k, v = (
        tuple(_raw(t).index_select(0, blocks.to(t.device)).view(t.dtype).cpu() for t in side) for side in (kv.k, kv.v)
    )
    return Blocks(k, v)


def carry_in(kv: KVCache, blocks: Tensor, content: Blocks) -> KVCache:
    """The cache with this content in these blocks (int64 [n]), any blocks. Consumes `kv`.

    Raises ValueError, and `kv` lives on, for blocks it has not and content of another cache's shape or dtype.
    """
    check_alive(kv)
    _check_blocks(kv, blocks)
    for name, side, rows in (("k", kv.k, content.k), ("v", kv.v, content.v)):
        wanted = [(arena.dtype, (len(blocks), *arena.shape[1:])) for arena in side]
        found = [(each.dtype, tuple(each.shape)) for each in rows]
        if found != wanted:
            raise ValueError(f"content.{name} is {found}: {len(blocks)} blocks of this cache are {wanted}")
    kv = consume(kv)
    for side, rows in ((kv.k, content.k), (kv.v, content.v)):
        for arena, own in zip(side, rows, strict=True):
            _raw(arena).index_copy_(0, blocks.to(arena.device), _raw(own.to(arena.device)))
    return kv


def _check_blocks(kv: KVCache, blocks: Tensor) -> None:
    last = kv.k[0].shape[0] - 1
    wrong = blocks[(blocks < 0) | (blocks > last)].tolist()
    if wrong:
        raise ValueError(f"blocks has {wrong}: the cache has blocks 0 to {last}")


def _raw(arena: Tensor) -> Tensor:
    """float8 has neither index_select nor index_copy: its bytes have."""
    return arena.view(torch.uint8) if arena.dtype == torch.float8_e4m3fn else arena
