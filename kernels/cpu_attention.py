"""Attention of a few new positions over the blocks of a cache in bfloat16: keys and values are read where they lie.

The contract is that of reference.attend_blocks. One piece of work is one KV head of one sequence: crowd after crowd of
the keys that a query sees, the scores of its heads, their weights, the weighted values, kept against the highest score
so far. Keys that are not seen are not read.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, call, compiled, helpers, threads
from muse_fn.kernels.cpu_linear import GROUP, piece, spread_row
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, bf16, f32, i64, inline, narrow
from muse_fn.kernels.cpu_vectors import FACTOR_BYTES, LANES, ask_for, claim, tile, workspace
from muse_fn.kernels.cpu_weights import LOWEST, STATE, soften, weigh

WIDEST = 256  # channels of a head
CROWD = 64  # keys, at most, that are scored before their values are read
RUN = 16  # of them, at most, that lie one behind the other in a block and are asked for at once
NEAR = 8192  # bytes of a crowd's keys: with its values and the next one's keys they fit the nearest cache


def _forms(pieces):
    """For so many heads: products of 16 / heads keys and of one with their queries, weights and sums of values."""
    # What is read next is asked for run by run.
    many, one = (tile("bf16", rows, pieces, asks=False) for rows in (LANES // pieces, 1))
    return many, one, soften(pieces), weigh(pieces)


_k8, _o8, _s8, _w8 = _forms(8)
_k4, _o4, _s4, _w4 = _forms(4)
_k2, _o2, _s2, _w2 = _forms(2)
_k1, _o1, _s1, _w1 = _forms(1)


@inline
def _score(m, q, groups, k, stride, count, to):
    """Products of `count` keys with m queries, [count, m], and whatever in 16 places behind them."""
    n, rows = 0, LANES // m
    while n < count:
        at, place = k + n * stride, to + n * m * 4
        if n + rows <= count:
            if m == 1:
                _k1(at, stride, 0, 0, q, groups, place, 0)
            elif m == 2:
                _k2(at, stride, 0, 0, q, groups, place, 0)
            elif m == 4:
                _k4(at, stride, 0, 0, q, groups, place, 0)
            else:
                _k8(at, stride, 0, 0, q, groups, place, 0)
            n += rows
        else:
            if m == 1:
                _o1(at, stride, 0, 0, q, groups, place, 0)
            elif m == 2:
                _o2(at, stride, 0, 0, q, groups, place, 0)
            elif m == 4:
                _o4(at, stride, 0, 0, q, groups, place, 0)
            else:
                _o8(at, stride, 0, 0, q, groups, place, 0)
            n += 1


@inline
def _soften(m, scores_at, count, scale, state):
    """Scores of `count` keys for m heads become weights; what is left of the last 16 has none."""
    vectors = (count * m + LANES - 1) // LANES
    scores = f32(scores_at, vectors * LANES)
    for n in range(count * m, vectors * LANES):
        scores[n] = np.float32(-np.inf)
    if m == 1:
        _s1(scores_at, vectors, scale, state)
    elif m == 2:
        _s2(scores_at, vectors, scale, state)
    elif m == 4:
        _s4(scores_at, vectors, scale, state)
    else:
        _s8(scores_at, vectors, scale, state)


@inline
def _weigh(m, v, stride, count, p, sums, sums_stride):
    if m == 1:
        _w1(v, stride, count, p, sums, sums_stride)
    elif m == 2:
        _w2(v, stride, count, p, sums, sums_stride)
    elif m == 4:
        _w4(v, stride, count, p, sums, sums_stride)
    else:
        _w8(v, stride, count, p, sums, sums_stride)


@inline
def _run(pos, first, size, at, window):
    """How many keys from `first` on are seen from position `at`, one after another."""
    j = first
    while j < size and j - first < RUN and 0 <= pos[j] <= at and (not window or pos[j] > at - window):
        j += 1
    return j - first


@inline
def _next(a, cursor, crowd):
    """The keys that follow of those that a query sees; where there are none the first ones of another unit, claimed
    now. The cursor is a unit and the column and place of its next key; a crowd its unit, its keys, its runs, then for
    each run where it begins in an arena, in bytes, and its keys."""
    queries, kv_heads, width = argument(a, 2), argument(a, 3), argument(a, 5) * GROUP
    columns, size = argument(a, 10), argument(a, 11)
    if cursor[1] >= columns:
        cursor[0], cursor[1], cursor[2] = claim(a), 0, 0
    crowd[0], crowd[1], crowd[2] = cursor[0], 0, 0
    if crowd[0] >= argument(a, 1) * queries * kv_heads:
        return
    row, head, stride = cursor[0] // kv_heads, cursor[0] % kv_heads, kv_heads * width * 2
    at, most = i64(argument(a, 12), argument(a, 1) * queries)[row], min(CROWD, max(RUN, NEAR // (2 * width)))
    while cursor[1] < columns and crowd[1] + RUN <= most:
        column = row // queries * columns + cursor[1]
        count = _run(i64(argument(a, 13) + column * size * 8, size), cursor[2], size, at, argument(a, 14))
        if count:
            block = i64(argument(a, 9), argument(a, 1) * columns)[column]
            crowd[3 + 2 * crowd[2]] = (block * size + cursor[2]) * stride + head * width * 2
            crowd[4 + 2 * crowd[2]] = count
            crowd[1] += count
            crowd[2] += 1
        cursor[2] += max(count, 1)
        if cursor[2] >= size:
            cursor[1], cursor[2] = cursor[1] + 1, 0


@inline
def _ask_for(crowd, n, arena, stride, groups):
    """Has a crowd's n-th run fetched while others are worked on: a head's rows lie too far apart to be foreseen."""
    if n < crowd[2]:
        for row in range(crowd[4 + 2 * n]):
            for g in range(groups):
                ask_for(arena + crowd[3 + 2 * n] + row * stride + g * 64)


@inline
def _meet(a, crowd, coming, scale, q_at, scores_at, states_at, sums_at):
    """A crowd's keys and values for all heads of its unit, while those of the coming one are asked for."""
    heads, groups, stride, m = argument(a, 4), argument(a, 5), argument(a, 3) * argument(a, 5) * GROUP * 2, 0
    while m < heads:
        size, place = piece(heads - m), scores_at
        for n in range(max(crowd[2], coming[2])):
            if not m:
                _ask_for(coming, n, argument(a, 7), stride, groups)
            if n < crowd[2]:
                k, q = argument(a, 7) + crowd[3 + 2 * n], q_at + m * groups * FACTOR_BYTES
                _score(size, q, groups, k, stride, crowd[4 + 2 * n], place)
                place += crowd[4 + 2 * n] * size * 4
        if crowd[1]:
            _soften(size, scores_at, crowd[1], scale, states_at + m * STATE)
            _bring(size, groups * GROUP, states_at + m * STATE, sums_at + m * groups * GROUP * 4)
        place = scores_at
        for n in range(max(crowd[2], coming[2])):
            if not m:
                _ask_for(coming, n, argument(a, 8), stride, groups)
            if n < crowd[2]:
                for g in range(groups):
                    v, to = argument(a, 8) + crowd[3 + 2 * n] + g * 64, sums_at + (m * groups + g) * GROUP * 4
                    _weigh(size, v, stride, crowd[4 + 2 * n], place, to, groups * GROUP * 4)
                place += crowd[4 + 2 * n] * size * 4
        m += size


@inline
def _bring(m, width, state, sums_at):
    """Brings the sums of m heads to their new tops."""
    less = f32(state + 128, LANES)
    for h in range(m):
        if less[h] != np.float32(1.0):
            sums = f32(sums_at + h * width * 4, width)
            for n in range(width):
                sums[n] *= less[h]


@inline
def _divided(sums, states_at, heads, groups, out):
    """The sums of each head over its total weight, as bfloat16; zeros where no key was seen."""
    m = 0
    while m < heads:
        size = piece(heads - m)
        parts = f32(states_at + m * STATE + 64, LANES)
        for h in range(size):
            total = np.float32(0.0)
            for n in range(h, LANES, size):
                total += parts[n]
            less = np.float32(0.0) if total == 0 else np.float32(1.0) / total
            for place in range((m + h) * groups * GROUP, (m + h + 1) * groups * GROUP, GROUP):
                for lane in range(LANES):
                    out[place + 2 * lane] = narrow(sums[place + lane] * less)
                    out[place + 2 * lane + 1] = narrow(sums[place + LANES + lane] * less)
        m += size


@inline
def _begin(x, heads, groups, q_at, states_at, sums):
    """Lays out the queries of the heads; no key has been seen."""
    m = 0
    while m < heads:
        size = piece(heads - m)
        for h in range(size):
            to = q_at + (m * groups + h) * FACTOR_BYTES
            spread_row(x + (m + h) * groups * GROUP * 2, False, groups, to, size * FACTOR_BYTES)
        state = f32(states_at + m * STATE, 2 * LANES)
        state[:LANES], state[LANES:] = np.float32(LOWEST), np.float32(0.0)
        m += size
    sums[:] = np.float32(0.0)


def _attend(a):
    """Arguments: 0 claims, 1 sequences, 2 new positions, 3 KV heads, 4 heads of each, 5 groups of a head's channels, 6
    q, 7 K arena, 8 V arena, 9 blocks, 10 columns of blocks, 11 rows of a block, 12 q positions, 13 k positions, 14
    window, 15 result, 16 the helpers, 17 this, 18 threads."""
    heads, groups, units = argument(a, 4), argument(a, 5), argument(a, 1) * argument(a, 2) * argument(a, 3)
    width, scale = groups * GROUP, np.float32(1.0 / math.sqrt(np.float64(groups * GROUP)))
    q_at, sums_at, scores_at, states_at = workspace(16384), workspace(16384), workspace(4096), workspace(3072)
    crowd, coming, cursor = i64(workspace(2048), 256), i64(workspace(2048), 256), i64(workspace(64), 3)
    sums = f32(sums_at, heads * width)
    cursor[1] = argument(a, 10)  # of no unit yet
    crowd[0], crowd[1], crowd[2] = -1, 0, 0
    while crowd[0] < units:
        _next(a, cursor, coming)
        if crowd[0] >= 0 or coming[0] < units:
            _meet(a, crowd, coming, scale, q_at, scores_at, states_at, sums_at)
        if coming[0] != crowd[0]:
            if crowd[0] >= 0:
                _divided(
                    sums, states_at, heads, groups, bf16(argument(a, 15) + crowd[0] * heads * width * 2, heads * width)
                )
            if coming[0] < units:
                _begin(argument(a, 6) + coming[0] * heads * width * 2, heads, groups, q_at, states_at, sums)
        crowd, coming = coming, crowd


def _started(a):
    in_parallel(argument(a, 16), argument(a, 17), a, argument(a, 18))


class Seen(NamedTuple):
    """Where queries find their keys: addresses and sizes, as `_attend` has them."""

    k: int
    v: int
    size: int  # rows of a block
    kv_heads: int
    blocks: int
    columns: int
    q_pos: int
    k_pos: int
    window: int


def attention_of(q: int, shape: Sequence[int], seen: Seen, out: int) -> Work:
    """Attention of queries at an address, of shape [B, T, N, D], to another, which may be the same."""
    batch, queries, count, width = shape
    k, v, size, kv_heads, blocks, columns, q_pos, k_pos, window = seen
    shared = threads(batch * queries * kv_heads)
    return Work(_started, [0, batch, queries, kv_heads, count // kv_heads, width // GROUP, q, k, v, blocks, columns,
        size, q_pos, k_pos, window, out, helpers(shared), compiled(_attend)[1], shared])  # fmt: skip


def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
) -> Tensor:
    """reference.attend_blocks in bfloat16; a query that sees no key gets zeros."""
    q, blocks, q_pos, k_pos = (x.contiguous() for x in (q_BTND, blocks_BC, q_pos_BT, k_pos_BS))
    out = torch.empty_like(q)
    seen = Seen(k_arena.data_ptr(), v_arena.data_ptr(), *k_arena.shape[1:3], blocks.data_ptr(), blocks.shape[1],
        q_pos.data_ptr(), k_pos.data_ptr(), window)  # fmt: skip
    call(*attention_of(q.data_ptr(), q.shape, seen, out.data_ptr()))
    return out
