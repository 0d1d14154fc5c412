"""The key-value cache as a value: an arena of blocks, the view a step has of it, and the step's append.

A block is `block` consecutive positions of one sequence; block 0 belongs to nobody and takes the rows of padding. Every
layer has its own pair of arrays and all share one block table. Consuming: `append` writes in place and returns the new
handle; the one passed in must not be used again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.params.config import Config
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.split import local_kv_heads, stage_config


class KVCache(NamedTuple):
    """One pair of arrays per layer, each [num_blocks, block, K, D]; whole tensors, never views of a larger one."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


class View(NamedTuple):
    """Which blocks each sequence of a step reads and writes."""

    table_BN: Tensor  # int64, block ids in order of position; 0 where none
    past_B: Tensor  # int64, positions already in the cache
    count_B: Tensor  # int64, new positions of this step; later columns of the step are padding


def init_cache(
    config: Config,
    num_blocks: int,
    block_size: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache of `num_blocks` blocks of `block_size` positions, block 0 included; on a mesh, this rank's heads
    and layers of it.

    Takes num_blocks * block_size * K * D * 2 elements per layer. Raises ValueError for fewer than 2 blocks.
    """
    if num_blocks < 2 or block_size < 1:
        raise ValueError(f"a cache needs at least 2 blocks of at least 1 position, not {num_blocks} of {block_size}")
    mesh = mesh or ONE
    shape = (num_blocks, block_size, local_kv_heads(config, mesh), config.head_dim)
    own = stage_config(config, mesh)
    k, v = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(own.layers)] for _ in "kv")
    return KVCache(tuple(k), tuple(v))


def blocks_for(positions: int, block_size: int) -> int:
    """How many blocks hold this many positions."""
    return -(-positions // block_size)


def own_blocks(batch: int, positions: int, block_size: int, *, device: str = "cpu") -> Tensor:
    """int64 [batch, N]: a table in which each sequence owns consecutive blocks for `positions` positions.

    The cache must have 1 + batch * N blocks.
    """
    each = blocks_for(positions, block_size)
    return 1 + torch.arange(batch * each, device=device).view(batch, each)


def step_positions(view: View, length: int) -> Tensor:
    """int64 [B, T]: the positions of a step's columns, padding included."""
    return view.past_B[:, None] + torch.arange(length, device=view.past_B.device)


class Places(NamedTuple):
    """A view worked out for a step of a certain length: the same for every layer."""

    write: Tensor  # int64 [B*T]: the row of the flattened arena that each column goes to; padding goes to block 0
    blocks: Tensor  # int64 [B*N]: the blocks of the context
    pos_BS: Tensor  # int64, the positions of the context, -1 where empty


def locate(view: View, length: int, block_size: int) -> Places:
    """Where a step of `length` columns writes and what it reads."""
    pos = step_positions(view, length)
    column = (pos // block_size).clamp_max(view.table_BN.shape[1] - 1)
    write = view.table_BN.gather(1, column) * block_size + pos % block_size
    real = torch.arange(length, device=pos.device) < view.count_B[:, None]
    place = torch.arange(view.table_BN.shape[1] * block_size, device=pos.device)
    filled = place < (view.past_B + view.count_B)[:, None]
    return Places(
        torch.where(real, write, pos % block_size).flatten(), view.table_BN.flatten(), torch.where(filled, place, -1)
    )


def append(kv: KVCache, layer: int, k_BTKD: Tensor, v_BTKD: Tensor, at: View | Places) -> KVCache:
    """The cache with a step's keys and values in it. Consumes `kv`."""
    places = at if isinstance(at, Places) else locate(at, k_BTKD.shape[1], kv.k[layer].shape[1])
    for arena, rows in ((kv.k[layer], k_BTKD), (kv.v[layer], v_BTKD)):
        arena.flatten(0, 1).index_copy_(0, places.write, rows.flatten(0, 1).to(arena.dtype))
    return kv


def context(kv: KVCache, layer: int, at: View | Places, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, S, K, D] of every sequence in order of position, and the positions [B, S], -1 where empty."""
    places = at if isinstance(at, Places) else locate(at, 0, kv.k[layer].shape[1])
    shape = (*places.pos_BS.shape, *kv.k[layer].shape[2:])
    # index_select copies whole blocks; indexing with the table goes element by element, four times slower on a CPU.
    k, v = (side[layer].index_select(0, places.blocks).view(shape).to(dtype) for side in (kv.k, kv.v))
    return k, v, places.pos_BS
