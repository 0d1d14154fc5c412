"""Sequences over one cache: the pool says which blocks, the steps fill them, and both go together as one value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.decoder import Scales
from muse_fn.kernels.select import Ops
from muse_fn.kvcache.arena import Blocks, carry_in, carry_out
from muse_fn.kvcache.blocks import NoRoom, Pool, admit, discard, extend, fill, finish, new_pool, push, restore, table
from muse_fn.kvcache.cache import KVCache, View, blocks_for, init_cache
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, sample_tensor
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.step import decode, prefill

Salts = Sequence[tuple[str, str | bytes] | tuple[str, str | bytes, int]]


@dataclass(frozen=True)
class Runner:
    """What does not change while sequences come and go."""

    params: Params
    config: Config
    mesh: Mesh = ONE
    chunk: int = 512  # prompt tokens read in one step
    ops: Ops | None = None  # None: the fastest for the device
    every: tuple[Scales, ...] = ()  # of `prepared`; none: worked out at each step

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return sample_tensor(self.params).device


class Batch(NamedTuple):
    """All sequences in flight. Events consume it and return the next one."""

    pool: Pool
    kv: KVCache


def open_batch(runner: Runner, num_blocks: int, block_size: int = 16, *, dtype: torch.dtype | None = None) -> Batch:
    """No sequences over an empty cache; `dtype` None stores keys and values in the parameters' dtype."""
    config, mesh = runner.config, runner.mesh
    dtype = sample_tensor(runner.params).dtype if dtype is None else dtype
    kv = init_cache(config, num_blocks, block_size, dtype=dtype, device=str(runner.device), mesh=mesh)
    return Batch(new_pool(num_blocks, block_size, layout_of(config, mesh).windows), kv)


def blocks_needed(config: Config, positions: int, chunk: int, block_size: int) -> int:
    """The most blocks that a sequence ever holds on its way to this many positions, read in chunks of `chunk`.

    A sliding group holds its window, the chunk that is being written, and what both cut off of a block.
    """
    found = 0
    for window in layout_of(config).windows:
        held = min(positions, window + chunk) if window else positions
        found += min(blocks_for(positions, block_size), blocks_for(held, block_size) + 1)
    return found


def read(
    runner: Runner,
    batch: Batch,
    name: int,
    tokens: Sequence[int],
    salts: Salts = (),
    *,
    reuse: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor | NoRoom, Batch]:
    """A sequence joins: its tokens are read in chunks, but for those whose blocks the cache has already.

    Returns logits [1, V] (on a mesh this rank's share) after the last token; or NoRoom, and the sequence is not in the
    batch. `progress` is told how many tokens are read, of how many. Consumes `batch`.
    """
    pool, past = admit(batch.pool, name, tokens, salts, reuse=reuse)
    kv, logits = batch.kv, torch.empty(0)
    while past < len(tokens):
        stop = min(past + runner.chunk, len(tokens))
        wider = extend(pool, name, stop)
        if isinstance(wider, NoRoom):
            return wider, Batch(finish(pool, name), kv)
        pool = wider
        view = view_of(pool, [name], [past], stop - past, runner.device)
        chunk = torch.tensor([tokens[past:stop]], device=runner.device)
        given = runner.params, chunk, kv, view, runner.config, runner.mesh
        logits, kv = prefill(*given, gathered=False, every=runner.every, ops=runner.ops)
        pool, past = fill(pool, name, stop), stop
        if progress:
            progress(past, len(tokens))
    return logits, Batch(pool, kv)


def step(runner: Runner, batch: Batch, names: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor | NoRoom, Batch]:
    """One new token for each of these sequences: logits [B, V] after it, or NoRoom with the batch as it was.

    Consumes `batch`.
    """
    pool, past = batch.pool, [_filled(batch.pool, name) for name in names]
    for name, token, filled in zip(names, tokens, past, strict=True):
        wider = extend(push(pool, name, [token]), name, filled + 1)
        if isinstance(wider, NoRoom):
            return wider, batch
        pool = wider
    view = view_of(pool, names, past, 1, runner.device)
    column = torch.tensor(tokens, device=runner.device)[:, None]
    given = runner.params, column, batch.kv, view, runner.config, runner.mesh
    logits, kv = decode(*given, gathered=False, every=runner.every, ops=runner.ops)
    for name, filled in zip(names, past, strict=True):
        pool = fill(pool, name, filled + 1)
    return logits[:, 0], Batch(pool, kv)


def leave(batch: Batch, name: int, *, trusted: bool = True) -> Batch:
    """A sequence ends; its blocks stay as cache until they are needed. Not `trusted`: what it wrote is never used."""
    return batch._replace(pool=(finish if trusted else discard)(batch.pool, name))


class Suspended(NamedTuple):
    """A sequence that had to make room: what the cache held of it, on the host."""

    filled: int  # positions
    held_GN: Tensor  # bool: which entries of its tables had a block
    content: Blocks


def suspend(batch: Batch, name: int) -> tuple[Suspended, Batch]:
    """A sequence leaves, and what it had in the cache goes with it. Consumes `batch`."""
    ids_GN = torch.from_numpy(table(batch.pool, name))
    kept = Suspended(_filled(batch.pool, name), ids_GN > 0, carry_out(batch.kv, ids_GN[ids_GN > 0]))
    return kept, leave(batch, name)


def resume(batch: Batch, name: int, tokens: Sequence[int], kept: Suspended, salts: Salts = ()) -> tuple[bool, Batch]:
    """The sequence is back where it was, in other blocks, without computing anything; False if there is no room.

    `tokens` are all it has, read or not: those not read yet are not in the batch, as before. Consumes `batch`.
    """
    pool = restore(batch.pool, name, tokens[: kept.filled], salts)
    if isinstance(pool, NoRoom):
        return False, batch
    ids_GN = torch.from_numpy(table(pool, name))
    return True, Batch(pool, carry_in(batch.kv, ids_GN[kept.held_GN], kept.content))


def _filled(pool: Pool, name: int) -> int:
    return pool.rows[name].filled


def view_of(pool: Pool, names: Sequence[int], past: Sequence[int], count: int, device: torch.device) -> View:
    """The view of a step in which each sequence gets `count` tokens, its tables as wide as the longest needs."""
    tables = [torch.from_numpy(table(pool, name)) for name in names]
    width = max(each.shape[1] for each in tables)
    padded = [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in tables]
    past_B = torch.tensor(past, device=device)
    return View(torch.stack(padded, 1).to(device), past_B, torch.full_like(past_B, count))
