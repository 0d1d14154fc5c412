"""Captured steps as a server takes them. As long as sequences go on, a decode step is fed with what the one before left
on the device, and launched before the host has seen that step's tokens; a piece of a prompt is read by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muse_fn.buckets import smallest
from muse_fn.captured_decode import Coming, DecodeSteps, Feed, to_host
from muse_fn.captured_prefill import ReadSteps
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.sample import Sampling, draws
from muse_fn.serve.scheduler import Share


class _Step(NamedTuple):
    """A decode step that has been launched. Its rows are places of its feed, None where nobody is."""

    names: tuple[int | None, ...]
    nexts: tuple[int, ...]  # positions of the tokens that it draws
    sampling: tuple[Sampling | None, ...]
    tables: NDArray[np.int64]  # [G, rows, N], of those who are not there 0
    feed: Feed  # what it leaves for the step after it
    coming: Coming  # the tokens that it draws

    def places(self, shares: Sequence[Share], sampling: Sequence[Sampling]) -> tuple[int, ...] | None:
        """Where these are, if each of them goes on with what this step drew for it, and is to draw likewise."""
        drawn, at = self.coming.wait(), {name: n for n, name in enumerate(self.names) if name is not None}
        found = tuple(at.get(share.name, -1) for share in shares)
        for n, share, how in zip(found, shares, sampling, strict=True):
            if n < 0 or (share.start, how, share.tokens.tolist()) != (self.nexts[n], self.sampling[n], [drawn[n]]):
                return None
        return found

    def only(self, places: Sequence[int]) -> "_Step":
        """The step without the others of its rows, who have left before it was asked for."""
        return self._replace(names=tuple(name if n in places else None for n, name in enumerate(self.names)))

    def holds(self, places: Sequence[int], shares: Sequence[Share], block_size: int) -> bool:
        """Whether it wrote where these want their positions written."""
        columns = [share.start // block_size for share in shares]
        mine = [self.tables[:, n, column] for n, column in zip(places, columns, strict=True)]
        return all(
            (one == share.table_GN[:, column]).all() for one, share, column in zip(mine, shares, columns, strict=True)
        )


@dataclass
class Replays:
    """On a mesh every rank has its own and is given the same, so that all of them launch alike.

    As long as sequences go on, a step is launched before the tokens of the one before are fetched: the device goes on
    while the host takes them in. Who has ended meanwhile has a row in it that nobody asks for, and that writes behind
    all that was ever told, before anybody else is given the block.
    """

    steps: DecodeSteps
    reads: ReadSteps
    _last: _Step | None = None  # the last one that was asked for
    _ahead: _Step | None = None  # launched after it

    def __call__(
        self, kv: KVCache, shares: Sequence[Share], sampling: Sequence[Sampling], goes_on: bool = False
    ) -> tuple[tuple[int, ...], KVCache]:
        """One more token of each sequence, -1 where its logits are not finite. Consumes `kv`. `goes_on`: nobody else
        does anything before the next token."""
        last, ahead, self._last, self._ahead = self._last, self._ahead, None, None
        places, step, size = None if last is None else last.places(shares, sampling), None, kv.k[0].shape[1]
        if last is not None and places is not None:
            if ahead is not None:
                step = ahead.only(places) if ahead.holds(places, shares, size) else None
            elif self._suits(last, shares):
                step, kv = self._after(last, places, shares, kv)
        if step is None or places is None:
            step, kv = self._begin(shares, sampling, kv)
            places = tuple(range(len(shares)))
        if goes_on and self._suits(step, shares) and self._have_room(shares, size):
            self._ahead, kv = self._after(step, places, shares, kv)
        drawn, self._last = step.coming.wait(), step
        return tuple(drawn[n] for n in places), kv

    def can_read(self, share: Share) -> bool:
        """Whether there is a step for this piece of a prompt."""
        return self.reads.piece_for(len(share.tokens), share.table_GN.shape[1]) is not None

    def read(self, kv: KVCache, share: Share) -> tuple[Tensor, KVCache]:
        """Logits [V] after its last token, on a mesh this rank's share. Consumes `kv`."""
        found, kv = self.reads(*batch_of([share], torch.device("cpu")), kv)
        return found[0].clone(), kv

    def _begin(self, shares: Sequence[Share], sampling: Sequence[Sampling], kv: KVCache) -> tuple[_Step, KVCache]:
        """A step that is put together on the host."""
        tokens, view = batch_of(shares, torch.device("cpu"))
        feed = self.steps.begin(tokens, view, draws([*sampling], self.steps.config.vocab_size), kv)
        after, kv = self.steps(feed, kv)
        spare = (None,) * (len(after.tokens_B1) - len(shares))
        names, nexts = zip(*((share.name, share.start + 1) for share in shares), strict=True)
        tables, coming = view.table_GBN.numpy(), to_host(after.tokens_B1)
        return _Step((*names, *spare), nexts, (*sampling, *spare), tables, after, coming), kv

    def _after(self, step: _Step, places: Sequence[int], shares: Sequence[Share], kv: KVCache) -> tuple[_Step, KVCache]:
        """The step that follows this one with these of its rows, fed on the device; who has left it has no blocks."""
        rows, width = max(places) + 1, max(share.table_GN.shape[1] for share in shares)
        tables = np.zeros((len(step.tables), rows, width), np.int64)
        names: list[int | None] = [None] * len(step.names)
        for n, share in zip(places, shares, strict=True):
            tables[:, n, : share.table_GN.shape[1]] = share.table_GN
            names[n] = share.name
        feed = step.feed
        if not np.array_equal(tables, step.tables):
            feed = self.steps.with_tables(feed, torch.from_numpy(tables))
        after, kv = self.steps(feed, kv)
        nexts = tuple(n + 1 for n in step.nexts)
        return _Step(tuple(names), nexts, step.sampling, tables, after, to_host(after.tokens_B1)), kv

    def _suits(self, step: _Step, shares: Sequence[Share]) -> bool:
        """Whether no step of fewer rows would do for these of them."""
        width = max(share.table_GN.shape[1] for share in shares)
        return smallest(self.steps.captured, len(shares), width).batch == len(step.names)

    def _have_room(self, shares: Sequence[Share], block_size: int) -> bool:
        """Whether each has a block for the position after this step's."""
        for share in shares:
            column = (share.start + 1) // block_size
            if column >= share.table_GN.shape[1] or not share.table_GN[:, column].all():
                return False
        return max(share.start for share in shares) + 1 < self.steps.config.max_positions


def batch_of(shares: Sequence[Share], device: torch.device) -> tuple[Tensor, View]:
    """Tokens int64 [B, T], each row padded at its end, and where they go."""
    groups = len(shares[0].table_GN)
    width, length = (max(sizes) for sizes in ([s.table_GN.shape[1] for s in shares], [len(s.tokens) for s in shares]))
    tokens = np.zeros((len(shares), length), np.int64)
    tables = np.zeros((groups, len(shares), width), np.int64)
    for row, share in enumerate(shares):
        tokens[row, : len(share.tokens)] = share.tokens
        tables[:, row, : share.table_GN.shape[1]] = share.table_GN
    past, count = np.array([(share.start, len(share.tokens)) for share in shares], np.int64).T.copy()
    return torch.from_numpy(tokens).to(device), View(*(torch.from_numpy(x).to(device) for x in (tables, past, count)))
