"""Steps over a cache: a chunk of a prompt, and one or a few new tokens for each running sequence."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.decoder import Chunk, Scales, check_tokens, check_tokens_shape, hidden_states, logits
from muse_fn.kernels.around import fits
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, View, blocks_for, check_alive, consume, locate, step_positions
from muse_fn.kvcache.layout import Layout, layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, sample_tensor
from muse_fn.sharding.mesh import ONE, Mesh, MeshError
from muse_fn.sharding.split import check_shard, local_kv_heads


def prefill(
    params: Params,
    tokens: Tensor,
    kv: KVCache,
    view: View,
    config: Config,
    mesh: Mesh | None = None,
    *,
    all_logits: bool = False,
    gathered: bool = True,
    microbatches: int | None = None,
    checked: bool = False,
    every: tuple[Scales, ...] = (),
    ops: Ops | None = None,
) -> tuple[Tensor, KVCache]:
    """Reads a chunk of each prompt into the cache. Consumes `kv`.

    tokens int64 [B, T]; row b has view.count_B[b] real tokens (at least 1 unless `all_logits`), then padding, and
    follows view.past_B[b] positions already in the cache. Returns float32 logits of each row's last real token [B, V],
    or with `all_logits` of every column [B, T, V] (padding columns are meaningless), and the cache.

    On a mesh every rank calls with the same arguments but its own `params` and `kv`; `gathered=False` returns its share
    of the vocabulary only. Pipeline stages work on `microbatches` pieces of the chunk at once (default: as many as
    there are stages). `every` are the layers' vectors, worked out at each step unless `prepared` did once. `ops` are
    the fastest for the device unless given. Raises ValueError for a step that does not fit its blocks, unless who calls
    has made sure that it does (`checked`).
    """
    check_share(params, kv, config, mesh or ONE)
    if not checked:
        check_step(tokens, kv, view, config, at_least=0 if all_logits else 1)
    is_start = not view.past_B.any()
    given = (params, tokens, consume(kv), view, config, mesh or ONE)
    found = run_on(*given, microbatches=microbatches, is_start=is_start, every=every, ops=ops)
    h = found.h_BTH if all_logits else last_rows(found.h_BTH, view)
    return logits(params, h, config, ops or select(h.device), mesh or ONE, gathered=gathered), found.kv


def decode(
    params: Params,
    tokens: Tensor,
    kv: KVCache,
    view: View,
    config: Config,
    mesh: Mesh | None = None,
    *,
    gathered: bool = True,
    checked: bool = False,
    every: tuple[Scales, ...] = (),
    ops: Ops | None = None,
) -> tuple[Tensor, KVCache]:
    """One step of running sequences, each with T >= 1 new tokens: int64 [B, T] -> float32 [B, T, V]. Consumes `kv`.

    On a mesh as in `prefill`, and so are `every` and `ops`.
    """
    check_share(params, kv, config, mesh or ONE)
    if not checked:
        check_step(tokens, kv, view, config, at_least=0)
    found = run_on(params, tokens, consume(kv), view, config, mesh or ONE, microbatches=1, every=every, ops=ops)
    ops = ops or select(found.h_BTH.device)
    return logits(params, found.h_BTH, config, ops, mesh or ONE, gathered=gathered), found.kv


def check_share(params: Params, kv: KVCache, config: Config, mesh: Mesh) -> None:
    """Raises MeshError if the parameters or the cache are not this rank's share of the mesh."""
    check_shard(params, config, mesh)
    check_alive(kv)
    found = len(kv.k), *kv.k[0].shape[2:]
    wanted = layout_of(config, mesh).slots, local_kv_heads(config, mesh), config.head_dim
    if found != wanted:
        share = "{} slots of {} heads of {}".format
        raise MeshError(
            f"kv has {share(*found)}: on rank {mesh.rank} of mesh {mesh} it must have {share(*wanted)}: "
            "init_cache(…, mesh=mesh) makes it"
        )


def check_step(tokens: Tensor, kv: KVCache, view: View, config: Config, at_least: int) -> None:
    """Raises ValueError, naming field and row, for a step that would write outside of its blocks or past the limit.

    Reads the view on the host: a captured step is checked before it is captured and leaves this out.
    """
    check_tokens_shape(tokens)
    (batch, length), (blocks, size) = tokens.shape, kv.k[0].shape[:2]
    windows = layout_of(config).windows
    _check_shape(view, len(windows), batch, length)
    width = view.table_GBN.shape[-1]
    room = min(width * size, config.max_positions)
    if fits(tokens, view, windows, (blocks, size), (at_least, room, config.vocab_size)):
        return
    check_tokens(tokens, config)
    pasts, counts = view.past_B.tolist(), view.count_B.tolist()
    for row, (past, count) in enumerate(zip(pasts, counts, strict=True)):
        if not at_least <= count <= length:
            raise ValueError(f"view.count_B[{row}] is {count}: must be {at_least} to {length}, the width of tokens")
        if past < 0 or past + count > room:
            held = f"its table holds {width * size}, the model {config.max_positions}"
            raise ValueError(f"row {row} would reach position {past + count}: {held}")
    read, written = list[int](), set[int]()
    for group, window in enumerate(windows):
        starts = [max(0, past - window + 1) // size if window else 0 for past in pasts]
        stops = [blocks_for(past + count, size) for past, count in zip(pasts, counts, strict=True)]
        lines = view.table_GBN[group, :, min(starts) : max(stops)].tolist()  # few numbers: Python is the faster one
        for row, (line, start, stop) in enumerate(zip(lines, starts, stops, strict=True)):
            used = line[start - min(starts) : max(start, stop) - min(starts)]
            if used and not (0 < min(used) and max(used) < blocks):
                raise ValueError(
                    f"view.table_GBN[{group}, {row}] has {used} from column {start} on: "
                    f"the cache has blocks 1 to {blocks - 1} to give"
                )
            read += used
            written.update(used[pasts[row] // size - start :] if counts[row] else ())
    _check_own(read, written)


def _check_shape(view: View, groups: int, batch: int, length: int) -> None:
    strange = [f"view.{n} is {type(x).__name__}" for n, x in view._asdict().items() if not isinstance(x, Tensor)]
    if strange:
        raise ValueError(f"{', '.join(strange)}: must be tensors of torch.int64")
    width = view.table_GBN.shape[-1] if view.table_GBN.dim() else 0
    shapes = {"table_GBN": (groups, batch, width), "past_B": (batch,), "count_B": (batch,)}
    for name, shape in shapes.items():
        field: Tensor = getattr(view, name)
        if tuple(field.shape) != shape or field.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"view.{name} is {list(field.shape)} of {field.dtype}: tokens are {[batch, length]}, "
                f"so it must be {list(shape)} of torch.int64"
            )


def _check_own(read: list[int], written: set[int]) -> None:
    """A block that a step writes is in one place of all that it reads: rows and groups share only what is full."""
    met = [block for block in read if block in written]
    if len(met) > len(written):
        twice = sorted(block for block, times in Counter(met).items() if times > 1)
        raise ValueError(f"view.table_GBN has blocks {twice} twice: this step writes them, so one row must own each")


class Ran(NamedTuple):
    """A step without its head: the stream, the cache, and who went where."""

    h_BTH: Tensor  # float32; on all pipeline stages but the last the stage's own
    kv: KVCache
    routes: tuple[Tensor | tuple[()], ...]  # for each layer of this stage the experts of each token, int64 [B, T, R]


def run(
    params: Params,
    tokens: Tensor,
    kv: KVCache,
    view: View,
    config: Config,
    mesh: Mesh | None = None,
    *,
    microbatches: int | None = None,
    is_start: bool = False,
    ops: Ops | None = None,
) -> Ran:
    """The layers on a step [B, T] whose fit has been checked. Consumes `kv`. `is_start` promises that the cache holds
    nothing of these sequences yet."""
    given = (params, tokens, consume(kv), view, config, mesh or ONE)
    return run_on(*given, microbatches=microbatches, is_start=is_start, ops=ops)


def run_on(
    params: Params,
    tokens: Tensor,
    kv: KVCache,
    view: View,
    config: Config,
    mesh: Mesh = ONE,
    *,
    microbatches: int | None = None,
    is_start: bool = False,
    every: tuple[Scales, ...] = (),
    ops: Ops | None = None,
) -> Ran:
    """`run` without its host side: looks at no value, not even whether the handle is alive, so that a graph can hold
    it. `every`: see `hidden_states`."""
    pieces = min(mesh.pp if microbatches is None else microbatches, tokens.shape[1])
    if pieces < 1:
        raise ValueError(f"microbatches is {microbatches}: must be at least 1")
    layout = layout_of(config, mesh)
    chunks = [_chunk(tokens, view, kv, ends, layout, is_start) for ends in _cuts(tokens.shape[1], pieces)]
    ops = ops or select(sample_tensor(params).device)
    h, out, routes = hidden_states(params, chunks, kv, config, ops, mesh, every)
    assert isinstance(out, KVCache)
    return Ran(h, out, routes)


def _cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    ends = [length * n // pieces for n in range(pieces + 1)]
    return list(pairwise(ends))


def _chunk(tokens: Tensor, view: View, kv: KVCache, ends: tuple[int, int], layout: Layout, is_start: bool) -> Chunk:
    """Columns start..stop of a step, as a step of its own."""
    start, stop = ends
    view = View(*(x.long() for x in view))
    if start == 0 and stop == tokens.shape[1]:
        places = locate(view, stop, kv.k[0].shape[1], layout)
        return Chunk(tokens, step_positions(view, stop), places, is_start)
    count_B = (view.count_B - start).clamp(0, stop - start)
    own = View(view.table_GBN, view.past_B + view.count_B.clamp_max(start), count_B)
    pos_BT = step_positions(view, tokens.shape[1])[:, start:stop]
    places = locate(own, stop - start, kv.k[0].shape[1], layout)
    return Chunk(tokens[:, start:stop], pos_BT, places, is_start and start == 0)


def last_rows(h_BTH: Tensor, view: View) -> Tensor:
    """[B, H]: the row of each sequence's last real token."""
    last_B = view.count_B - 1
    return h_BTH.gather(1, last_B.view(-1, 1, 1).expand(-1, 1, h_BTH.shape[-1])).squeeze(1)


def advance(view: View, count: int | Tensor = 1) -> View:
    """The view of the next step: this step's positions become the past, `count` new ones follow."""
    past = view.past_B + view.count_B
    new = count.to(past.device).expand_as(past) if isinstance(count, Tensor) else torch.full_like(past, count)
    return View(view.table_GBN, past, new)
