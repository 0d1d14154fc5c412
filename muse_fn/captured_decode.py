"""Decode steps captured in buckets of sizes, sampling inside: tokens of one step feed the next without the host.

Who drives them builds a `Feed` on the host when the batch changes, calls the steps with what the last one returned as
long as it does not, and fetches tokens with `to_host` while later steps already run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.buckets import Bucket, buckets, smallest
from muse_fn.capture import Captured, Progress, capture_each
from muse_fn.decoder import Chunk, Scales, hidden_states, logits, scales
from muse_fn.kernels.around import advanced
from muse_fn.kernels.one_op import one_op
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, View, check_alive, consume, locate, locate_next, step_positions
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, map_tensors, sample_tensor
from muse_fn.sample import Draw, sample
from muse_fn.sharding.mesh import ONE, Link, Mesh
from muse_fn.step import check_share, check_step


class Arenas(NamedTuple):
    """The cache as a captured step sees it: its arrays, without the flag that lives on the host."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


class Feed(NamedTuple):
    """What a step reads beside parameters and cache. A row whose count is 0 is padding."""

    tokens_B1: Tensor  # int64; -1 for a row that is padding or has failed
    view: View
    draw: Draw


DEAD = torch.tensor(False)  # the flag of a handle inside of a captured step: who asks it finds it consumed


def decode_logits(
    params: Params,
    tokens_BT: Tensor,
    arenas: Arenas,
    view: View,
    config: Config,
    mesh: Mesh = ONE,
    *,
    every: tuple[Scales, ...] = (),
    ops: Ops | None = None,
) -> Tensor:
    """`decode` without its host side: float32 [B, T, V], or this rank's share of V. Writes into the arenas and looks at
    no value, so that a graph can hold it; who calls has checked the step."""
    length = tokens_BT.shape[1]
    places = locate(view, length, arenas.k[0].shape[1], layout_of(config, mesh))
    return _logits_of(params, Chunk(tokens_BT, step_positions(view, length), places), arenas, config, mesh, every, ops)


def _logits_of(
    params: Params,
    chunk: Chunk,
    arenas: Arenas,
    config: Config,
    mesh: Mesh,
    every: tuple[Scales, ...],
    ops: Ops | None,
) -> Tensor:
    ops = ops or select(sample_tensor(params).device)
    h = hidden_states(params, [chunk], KVCache(*arenas, DEAD), config, ops, mesh, every).h_BTH
    return logits(params, h, config, ops, mesh, gathered=False)


def decode_and_sample(
    params: Params,
    tokens_B1: Tensor,
    arenas: Arenas,
    view: View,
    draw: Draw,
    allowed_V: Tensor | tuple[()],
    config: Config,
    mesh: Mesh = ONE,
    *,
    filtered: bool = True,
    every: tuple[Scales, ...] = (),
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor, Tensor, Arenas]:
    """One new token for each row: the next tokens int64 [B, 1], past and count of the next step's view, the arenas.

    The token drawn takes the position after this step's. -1 stands for a row whose logits are not finite, that is
    padding, or that has no block for its new position, which makes it padding; a row that once got -1 stays so.
    """
    view, places = locate_next(view, arenas.k[0].shape[1], layout_of(config, mesh), config.max_positions)
    chunk = Chunk(tokens_B1, step_positions(view, 1), places)
    z_BV = _logits_of(params, chunk, arenas, config, mesh, every, ops)[:, 0]
    past_B, going_B = advanced(view.past_B, view.count_B, tokens_B1[:, 0])
    allowed = allowed_V if isinstance(allowed_V, Tensor) else None
    chosen_B = sample(z_BV, draw, past_B, allowed_V=allowed, filtered=filtered, going_B=going_B, mesh=mesh)
    return chosen_B[:, None], past_B, view.count_B, arenas


@dataclass(frozen=True)
class DecodeSteps:
    """Captured decode steps of one model over one cache; `capture_decode` makes them."""

    config: Config
    params: Params
    allowed_V: Tensor | tuple[()]
    every: tuple[Scales, ...]
    filtered: bool
    captured: dict[Bucket, Captured[tuple[Tensor, Tensor, Tensor, Arenas]]]  # in the order of their capture

    def begin(self, tokens_B1: Tensor, view: View, draw: Draw, kv: KVCache) -> Feed:
        """A batch composed on the host, checked, padded to the smallest bucket that holds it, and on the device.

        All tensors lie on the host: tokens int64 [B, 1], the view of their step, the settings of each row. Raises
        ValueError for a step that does not fit its blocks or no bucket, or that filters in steps captured without.
        """
        check_step(tokens_B1, kv, view, self.config, at_least=0)
        on = (draw.top_k_B < self.config.vocab_size) | (draw.top_p_B < 1) | (draw.min_p_B > 0)
        if not self.filtered and on.any():
            rows = on.nonzero()[:, 0].tolist()
            raise ValueError(f"rows {rows} use top_k, top_p or min_p: these steps were captured with filtered=False")
        if tokens_B1.shape[1] != 1:
            raise ValueError(f"tokens is {list(tokens_B1.shape)}: a captured step takes one new token per row")
        feed = self.padded(Feed(tokens_B1, view, draw))
        device = sample_tensor(self.params).device
        return map_tensors(partial(moved, device=device), feed)

    def __call__(self, feed: Feed, kv: KVCache) -> tuple[Feed, KVCache]:
        """One step. Consumes `kv`; reads no value on the host, so it returns before the device is done.

        Of what it returns, tokens and view may be used until this bucket's next step, which they may be fed to; rows
        beyond the feed's are padding. Raises ValueError for a consumed handle, a feed that fits no bucket, and another
        cache than that of the capture.
        """
        check_alive(kv)
        feed = self.padded(feed)
        step = self.captured[self.bucket_of(feed)]
        tokens, past, count, _ = step(
            self.params, feed.tokens_B1, Arenas(kv.k, kv.v), feed.view, feed.draw, self.allowed_V, self.every
        )
        return Feed(tokens, View(feed.view.table_GBN, past, count), feed.draw), consume(kv)

    def with_tables(self, feed: Feed, table_GBN: Tensor) -> Feed:
        """The feed with other tables, int64 [G, B, N] on the host: sequences that go on need blocks before they reach
        them, which the host knows without knowing their tokens. Rows beyond the tables are padding or have ended."""
        rows, columns = feed.view.table_GBN.shape[1:]
        _, given, wanted = table_GBN.shape
        if given > rows:
            raise ValueError(f"table_GBN is {list(table_GBN.shape)}: the feed has {rows} rows")
        table = F.pad(table_GBN, (0, max(0, columns - wanted), 0, rows - given))
        return feed._replace(view=feed.view._replace(table_GBN=moved(table, feed.tokens_B1.device)))

    def bucket_of(self, feed: Feed) -> Bucket:
        """The smallest bucket that holds a feed. Raises ValueError if none does."""
        _, batch, columns = feed.view.table_GBN.shape
        return smallest(self.captured, batch, columns)

    def padded(self, feed: Feed) -> Feed:
        """The feed with rows and columns of padding up to its bucket."""
        return pad_feed(feed, self.bucket_of(feed), self.config)

    @property
    def bytes(self) -> dict[Bucket, int | None]:
        """What each graph takes beside its arguments, None where the device does not say."""
        return {bucket: step.bytes for bucket, step in self.captured.items()}


def capture_decode(
    params: Params,
    kv: KVCache,
    config: Config,
    mesh: Mesh | None = None,
    *,
    sizes: Sequence[Bucket] | None = None,
    max_batch: int = 16,
    max_columns: int = 256,
    allowed_V: Tensor | None = None,
    filtered: bool = True,
    backend: str | None = None,
    strict: bool = True,
    ops: Ops | None = None,
    progress: Progress | None = None,
) -> tuple[DecodeSteps, KVCache]:
    """Captures decode steps over this cache in all `sizes` (default: buckets of these maxima), largest first. Consumes
    `kv`; nothing but its block 0 is written.

    Ids that are False in `allowed_V` are never drawn; with `filtered` False no row may use top_k, top_p or min_p, and
    steps are faster. On a mesh every rank captures and steps at the same time. See `capture` for the other arguments.
    """
    mesh = mesh or ONE
    check_share(params, kv, config, mesh)
    kv, inner, device = consume(kv), linked_as_one_op(mesh), sample_tensor(params).device
    allowed = () if allowed_V is None else allowed_V
    with torch.inference_mode():
        every = scales(params.layers, config)  # the same at every step: worked out once

    def step(
        params: Params,
        tokens: Tensor,
        kv: Arenas,
        view: View,
        draw: Draw,
        allowed_V: Tensor | tuple[()],
        every: tuple[Scales, ...],
    ) -> tuple[Tensor, Tensor, Tensor, Arenas]:
        args = params, tokens, kv, view, draw, allowed_V, config, inner
        return decode_and_sample(*args, filtered=filtered, every=every, ops=ops)

    def args_of(bucket: Bucket) -> tuple[Any, ...]:
        feed = map_tensors(partial(moved, device=device), empty_feed(bucket, config))
        return params, feed.tokens_B1, Arenas(kv.k, kv.v), feed.view, feed.draw, allowed, every

    how = {"donate": (2,), "fixed": (0, 5, 6)}
    wanted = sizes or buckets(max_batch, max_columns)
    found = capture_each(step, wanted, args_of, **how, backend=backend, strict=strict, progress=progress)
    return DecodeSteps(config, params, allowed, every, filtered, found), kv


def empty_feed(bucket: Bucket, config: Config) -> Feed:
    """Nothing but padding: no blocks, nothing past, nothing new, greedy."""
    nothing, one = torch.zeros(bucket.batch, dtype=torch.int64), torch.ones(bucket.batch)
    table = torch.zeros(layout_of(config).groups, *bucket, dtype=torch.int64)
    draw = Draw(
        torch.zeros_like(one),
        torch.full_like(nothing, config.vocab_size),
        one,
        torch.zeros_like(one),
        torch.zeros(bucket.batch, 2, dtype=torch.int32),
    )
    return Feed(torch.full_like(nothing, -1)[:, None], View(table, nothing, nothing.clone()), draw)


def pad_feed(feed: Feed, bucket: Bucket, config: Config) -> Feed:
    """The feed with rows of padding and empty columns up to the size of a bucket; itself if it has that size."""
    _, batch, columns = feed.view.table_GBN.shape
    rows = bucket.batch - batch
    if (rows, columns) == (0, bucket.columns):
        return feed
    table = F.pad(feed.view.table_GBN, (0, bucket.columns - columns, 0, rows))
    values = {"top_k_B": config.vocab_size, "top_p_B": 1.0}
    draw = {
        name: F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows), value=values.get(name, 0))
        for name, x in feed.draw._asdict().items()
    }
    past, count = (F.pad(x, (0, rows)) for x in (feed.view.past_B, feed.view.count_B))
    return Feed(F.pad(feed.tokens_B1, (0, 0, 0, rows), value=-1), View(table, past, count), Draw(**draw))


class Coming(NamedTuple):
    """Tokens on their way to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """The token of each row, once they are here."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.flatten().tolist()


def to_host(tokens_B1: Tensor) -> Coming:
    """Starts copying a step's tokens to the host, behind the step and before the next; waits for neither."""
    if tokens_B1.device.type == "cpu":
        return Coming(tokens_B1.clone(), None)
    host = torch.empty(tokens_B1.shape, dtype=tokens_B1.dtype, pin_memory=True)
    host.copy_(tokens_B1, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Coming(host, event)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, so that the host need not wait for the copy."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def linked_as_one_op(mesh: Mesh) -> Mesh:
    """The same rank, each of its collectives one operation to whoever watches."""
    return mesh if mesh.link is None else replace(mesh, link=_OneOpLink(mesh.link))


class _OneOpLink:
    """See mesh.Link: on a device a collective is one operation, whatever stands behind it here."""

    def __init__(self, link: Link) -> None:
        self.all_sum, self.sum_scatter = one_op(link.all_sum), one_op(link.sum_scatter)
        self.all_gather, self.all_to_all = one_op(link.all_gather), one_op(link.all_to_all)
        self.broadcast, self.pass_on = one_op(link.broadcast), one_op(link.pass_on)
