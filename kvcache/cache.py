"""The key-value cache as a value: an arena of blocks, the view a step has of it, and the step's append.

A block is `block` consecutive positions of one sequence; block 0 belongs to nobody and takes the rows of padding. The
arena is a pair of arrays per slot, shared by the layers that kvcache/layout.py puts there; a sequence has one table of
blocks per window group. Consuming: a step writes in place and returns a new handle; the one passed in is dead, and
using it again is an error.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.around import numba_form, triton_form
from muse_fn.kernels.reference import rows_of, write_rows
from muse_fn.kvcache.layout import Layout, layout_of
from muse_fn.params.config import Config
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.split import local_kv_heads

STORAGE = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class KVCache(NamedTuple):
    """One pair of arrays per slot, each [num_blocks, block, K, D]; whole tensors, never views of a larger one."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    alive: Tensor  # bool [], on the host: False once this handle has been consumed


class View(NamedTuple):
    """Which blocks each sequence of a step reads and writes."""

    table_GBN: Tensor  # int64, for each window group the block ids in order of position; 0 where none
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

    Takes num_blocks * block_size * K * D * 2 elements per slot (`layout_of(config)`). `dtype` float8_e4m3fn stores
    values rounded and clamped to ±240. Raises ValueError for fewer than 2 blocks or a dtype that cannot hold them.
    """
    if not dtype.is_floating_point or (dtype.itemsize == 1 and dtype != torch.float8_e4m3fn):
        raise ValueError(f"dtype is {dtype}: a cache stores float32, bfloat16 or float8_e4m3fn")
    if num_blocks < 2 or block_size < 1:
        raise ValueError(f"a cache needs at least 2 blocks of at least 1 position, not {num_blocks} of {block_size}")
    mesh = mesh or ONE
    shape = (num_blocks, block_size, local_kv_heads(config, mesh), config.head_dim)
    slots = range(layout_of(config, mesh).slots)
    k, v = ([torch.zeros(shape, dtype=dtype, device=device) for _ in slots] for _ in "kv")
    return KVCache(tuple(k), tuple(v), _flag())


def bytes_per_block(config: Config, block_size: int, dtype: torch.dtype, mesh: Mesh = ONE) -> int:
    """What one block takes on this rank, in all slots."""
    row = local_kv_heads(config, mesh) * config.head_dim * dtype.itemsize
    return 2 * layout_of(config, mesh).slots * block_size * row


def check_alive(kv: KVCache) -> None:
    """Raises ValueError if the handle has been consumed."""
    if not kv.alive:
        raise ValueError("this cache handle has been consumed by an earlier step: use the one it returned")


def consume(kv: KVCache) -> KVCache:
    """A new handle of the same arrays; the old one is dead. Raises ValueError if it was dead already."""
    check_alive(kv)
    kv.alive.fill_(False)
    return kv._replace(alive=_flag())


def _flag() -> Tensor:
    with torch.inference_mode(False):  # a flag made there could not be lowered outside
        return torch.ones((), dtype=torch.bool, device="cpu")


def blocks_for(positions: int, block_size: int) -> int:
    """How many blocks hold this many positions."""
    return -(-positions // block_size)


def own_blocks(config: Config, batch: int, positions: int, block_size: int = 16, *, device: str = "cpu") -> Tensor:
    """int64 [G, batch, N]: tables in which each sequence owns consecutive blocks for `positions` positions, in every
    window group. The cache must have 1 + G * batch * N blocks; kvcache/blocks.py manages with fewer. Raises ValueError
    for a batch or number of positions below 0, or blocks of less than 1.
    """
    if batch < 0 or positions < 0 or block_size < 1:
        raise ValueError(f"batch={batch}, positions={positions}, block_size={block_size}: at least 0, 0 and 1")
    each, groups = blocks_for(positions, block_size), layout_of(config).groups
    return 1 + torch.arange(groups * batch * each, device=device).view(groups, batch, each)


def step_positions(view: View, length: int) -> Tensor:
    """int64 [B, T]: the positions of a step's columns, padding included."""
    if length == 1:
        return view.past_B[:, None]
    return view.past_B[:, None] + torch.arange(length, device=view.past_B.device)


class Places(NamedTuple):
    """A view worked out for a step of a certain length and one window group: the same for all its layers."""

    write: Tensor  # int64 [B*T]: the row of the flattened arena that each column goes to; padding goes to block 0
    blocks_BC: Tensor  # int64: the blocks of the context; of a sliding group only those its window meets
    pos_BS: Tensor  # int64, the positions of the context, -1 where there is none to be seen


def locate(view: View, length: int, block_size: int, layout: Layout) -> tuple[Places, ...]:
    """Where a step of `length` columns writes and what it reads, for each window group."""
    width, device = view.table_GBN.shape[2], view.past_B.device
    columns = {window: _columns(window, length, block_size, width) for window in layout.windows}
    alike = (len(layout.windows), len(view.past_B)) == tuple(view.table_GBN.shape[:2])
    alike = alike and view.past_B.shape == view.count_B.shape and all(x.dtype == torch.int64 for x in view)
    form = numba_form(*view) if alike else None
    if form:
        wanted = [(window, columns[window]) for window in layout.windows]
        write_GR, *rest = form.locate(*view, length, block_size, wanted)
        return tuple(map(Places, write_GR.unbind(), rest[::2], rest[1::2]))
    pos_BT = step_positions(view, length)
    column = (pos_BT // block_size).clamp_max(width - 1)
    real, within = torch.arange(length, device=device) < view.count_B[:, None], pos_BT % block_size
    start_GBT = view.table_GBN.gather(2, column.expand(len(view.table_GBN), -1, -1)) * block_size
    write_GR = (torch.where(real, start_GBT, 0) + within).flatten(1)
    seen = {window: _context_of(view, window, count, block_size) for window, count in columns.items()}
    return tuple(
        Places(write, table_BN.gather(1, seen[window][0]), seen[window][1])
        for window, table_BN, write in zip(layout.windows, view.table_GBN.unbind(), write_GR.unbind(), strict=True)
    )


def _columns(window: int, length: int, block_size: int, width: int) -> int:
    """How many columns of a table a step of `length` columns meets, however a stretch of its positions starts."""
    return min(width, (window - 1 + length + block_size - 2) // block_size + 1) if window else width


def _context_of(view: View, window: int, columns: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The columns of a table [B, C] and positions [B, S] that a step can see, -1 for those it cannot: alike for all
    groups of a window."""
    oldest = (view.past_B - window + 1).clamp_min(0) if window else torch.zeros_like(view.past_B)
    first = (oldest // block_size).clamp_max(view.table_GBN.shape[2] - columns)
    column = first[:, None] + torch.arange(columns, device=first.device)
    pos = (column[..., None] * block_size + torch.arange(block_size, device=first.device)).flatten(1)
    seen = (pos >= oldest[:, None]) & (pos < (view.past_B + view.count_B)[:, None])
    return column, torch.where(seen, pos, -1)


def locate_next(view: View, block_size: int, layout: Layout, most: int) -> tuple[View, tuple[Places, ...]]:
    """`locate` for one new position of each row. A row that has no block for it, or `most` positions already, becomes
    padding: its count is 0 in the view returned."""
    form = triton_form(view.past_B.device)
    if form and not form.why_not_locate(view.table_GBN, layout.windows):
        count_B, found = form.locate_next(*view, layout.windows, block_size, most)
        return view._replace(count_B=count_B), tuple(Places(*of_group) for of_group in found)
    (groups, _, width), column_B = view.table_GBN.shape, view.past_B // block_size
    own_GB1 = view.table_GBN.gather(2, column_B.clamp_max(width - 1).expand(groups, -1)[..., None])
    has_room_B = (own_GB1[..., 0] > 0).all(0) & (column_B < width) & (view.past_B < most)
    view = view._replace(count_B=torch.where(has_room_B, view.count_B, 0))
    return view, locate(view, 1, block_size, layout)


def append(kv: KVCache, slot: int, k_BTKD: Tensor, v_BTKD: Tensor, at: Places) -> KVCache:
    """The cache with a step's keys and values in it, written in place; within a step, all layers share one handle."""
    write_rows(kv.k[slot], k_BTKD.flatten(0, 1), at.write)
    write_rows(kv.v[slot], v_BTKD.flatten(0, 1), at.write)
    return kv


def context(kv: KVCache, slot: int, at: Places, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, S, K, D] of every sequence in order of position, and the positions [B, S], -1 where empty.

    Rows without a position are zeros, whatever the arena holds there.
    """
    k, v = (rows_of(side[slot], at.blocks_BC, at.pos_BS, dtype) for side in (kv.k, kv.v))
    return k, v, at.pos_BS
