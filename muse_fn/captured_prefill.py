"""Pieces of prompts read by captured steps: launching some thousand kernels takes a host longer than a device needs for
a short prompt, and about as long as it needs for a long one.

A piece is padded at its end to the length that was captured; padding is computed and goes nowhere. The captured step
is `read_logits`, run eagerly at the same size, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.buckets import Piece, piece_for, pieces
from muse_fn.capture import Captured, Progress, capture_each
from muse_fn.captured_decode import DEAD, Arenas, linked_as_one_op, moved
from muse_fn.decoder import Scales, logits, scales
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, View, check_alive, consume
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, map_tensors, sample_tensor
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.step import check_share, last_rows, run_on


def read_logits(
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
    """`prefill` without its host side: float32 [B, V], or this rank's share of V. Writes into the arenas and looks at
    no value, so that a graph can hold it; who calls has checked the step.

    Not even whether a prompt starts here, which `prefill` tells its attention (`is_start`). A device's forms do not
    ask, so the bits are those of `prefill` of the same size; on a CPU in bfloat16 one does, and then they are not.
    """
    ops = ops or select(sample_tensor(params).device)
    ran = run_on(params, tokens_BT, KVCache(*arenas, DEAD), view, config, mesh, every=every, ops=ops)
    return logits(params, last_rows(ran.h_BTH, view), config, ops, mesh, gathered=False)


@dataclass(frozen=True)
class ReadSteps:
    """Captured steps that read a piece of one prompt; `capture_reads` makes them."""

    config: Config
    params: Params
    every: tuple[Scales, ...]
    captured: dict[Piece, Captured[tuple[Tensor, Arenas]]]  # in the order of their capture

    def piece_for(self, tokens: int, columns: int) -> Piece | None:
        """The step for so many tokens of a sequence with so many blocks; None if an eager one does better."""
        return piece_for(self.captured, tokens, columns)

    def __call__(self, tokens_1T: Tensor, view: View, kv: KVCache) -> tuple[Tensor, KVCache]:
        """Logits [1, V] after the last token, on a mesh this rank's share, valid until this piece's next step.

        tokens int64 [1, T] and the view of one sequence, on the host, where their fit has been checked. Consumes `kv`;
        reads no value from the device. Raises ValueError for a consumed handle and for what fits no piece.
        """
        check_alive(kv)
        length, columns = tokens_1T.shape[1], view.table_GBN.shape[2]
        piece = self.piece_for(length, columns)
        if piece is None or len(tokens_1T) != 1:
            raise ValueError(
                f"tokens is {list(tokens_1T.shape)} with {columns} columns: no piece of one prompt holds them"
            )
        tokens = F.pad(tokens_1T, (0, piece.tokens - length))
        view = view._replace(table_GBN=F.pad(view.table_GBN, (0, piece.columns - columns)))
        tokens, view = map_tensors(partial(moved, device=sample_tensor(self.params).device), (tokens, view))
        found, _ = self.captured[piece](self.params, tokens, Arenas(kv.k, kv.v), view, self.every)
        return found, consume(kv)

    @property
    def bytes(self) -> dict[Piece, int | None]:
        """What each graph takes beside its arguments, None where the device does not say."""
        return {piece: step.bytes for piece, step in self.captured.items()}


def capture_reads(
    params: Params,
    kv: KVCache,
    config: Config,
    mesh: Mesh | None = None,
    *,
    sizes: Sequence[Piece] | None = None,
    chunk: int = 512,
    max_columns: int = 256,
    backend: str | None = None,
    strict: bool = True,
    ops: Ops | None = None,
    progress: Progress | None = None,
) -> tuple[ReadSteps, KVCache]:
    """Captures steps over this cache that read pieces of all `sizes` (default: `pieces` of these maxima), largest
    first. Consumes `kv`, unless it fails; nothing but its block 0 is written.

    Their memory is their own: what captured decode steps have left on the device survives them. On a mesh every rank
    captures and steps at the same time. See `capture` for the other arguments.
    """
    mesh = mesh or ONE
    check_share(params, kv, config, mesh)
    inner, device = linked_as_one_op(mesh), sample_tensor(params).device
    with torch.inference_mode():
        every = scales(params.layers, config)  # the same at every step: worked out once

    def step(
        params: Params, tokens: Tensor, kv: Arenas, view: View, every: tuple[Scales, ...]
    ) -> tuple[Tensor, Arenas]:
        return read_logits(params, tokens, kv, view, config, inner, every=every, ops=ops), kv

    def args_of(piece: Piece) -> tuple[Any, ...]:
        tokens, view = map_tensors(partial(moved, device=device), _padding(piece, config))
        return params, tokens, Arenas(kv.k, kv.v), view, every

    how = {"donate": (2,), "fixed": (0, 4)}
    wanted = pieces(chunk, max_columns, kv.k[0].shape[1]) if sizes is None else sizes
    found = capture_each(step, wanted, args_of, **how, backend=backend, strict=strict, progress=progress)
    return ReadSteps(config, params, every, found), consume(kv)


def _padding(piece: Piece, config: Config) -> tuple[Tensor, View]:
    """A piece of nothing, but for one token that goes to block 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(layout_of(config).groups, 1, piece.columns, dtype=torch.int64)
    return torch.zeros(1, piece.tokens, dtype=torch.int64), View(table, zero, torch.ones_like(zero))
