"""Captured steps as a server takes them. Where sequences go on, a decode step is fed with what the one before left on
the device, and nothing is put together on the host again but tables that have changed; a piece of a prompt is read by
itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muse_fn.captured_decode import DecodeSteps, Feed, to_host
from muse_fn.captured_prefill import ReadSteps
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.sample import Sampling, draws
from muse_fn.serve.scheduler import Share


class _Left(NamedTuple):
    """What the last step was for, and what it left."""

    shares: tuple[Share, ...]
    sampling: tuple[Sampling, ...]
    tokens: tuple[int, ...]
    feed: Feed


@dataclass
class Replays:
    """On a mesh every rank has its own and is given the same, so that all of them feed alike."""

    steps: DecodeSteps
    reads: ReadSteps
    _left: _Left | None = None

    def __call__(
        self, kv: KVCache, shares: Sequence[Share], sampling: Sequence[Sampling]
    ) -> tuple[tuple[int, ...], KVCache]:
        """One more token of each sequence, -1 where its logits are not finite. Consumes `kv`."""
        wanted = tuple(shares), tuple(sampling)
        feed, self._left = self._fed(*wanted), None
        if feed is None:
            tokens, view = batch_of(shares, torch.device("cpu"))
            draw = draws([*sampling], self.steps.config.vocab_size)
            feed = self.steps.begin(tokens, view, draw, kv)
        after, kv = self.steps(feed, kv)
        drawn = tuple(to_host(after.tokens_B1).wait()[: len(shares)])
        self._left = _Left(*wanted, drawn, after)
        return drawn, kv

    def can_read(self, share: Share) -> bool:
        """Whether there is a step for this piece of a prompt."""
        return self.reads.piece_for(len(share.tokens), share.table_GN.shape[1]) is not None

    def read(self, kv: KVCache, share: Share) -> tuple[Tensor, KVCache]:
        """Logits [V] after its last token, on a mesh this rank's share. Consumes `kv`."""
        found, kv = self.reads(*batch_of([share], torch.device("cpu")), kv)
        return found[0].clone(), kv

    def _fed(self, shares: tuple[Share, ...], sampling: tuple[Sampling, ...]) -> Feed | None:
        """What the last step left, if these are its sequences one token further and drawn likewise."""
        left = self._left
        if left is None or len(shares) != len(left.shares) or sampling != left.sampling:
            return None
        for share, old, token in zip(shares, left.shares, left.tokens, strict=True):
            if (share.name, share.start, share.tokens.tolist()) != (old.name, old.start + 1, [token]):
                return None
        tables = [(share.table_GN, old.table_GN) for share, old in zip(shares, left.shares, strict=True)]
        if all(np.array_equal(new, old) for new, old in tables):
            return left.feed
        _, view = batch_of(shares, torch.device("cpu"))
        return self.steps.with_tables(left.feed, view.table_GBN)


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
