"""Attention of a few new positions over the blocks of a cache in bfloat16: keys and values are read where they lie.

The contract is that of reference.attend_blocks. One piece of work is one or more KV heads of one sequence: crowd after
crowd of the keys that a query sees, the scores of its heads, their weights, the weighted values, kept against the
highest score so far. Keys that are not seen are not read.
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

CROWD = 64  # keys, at most, that are scored before their values are read
RUN = 16  # of them, at most, that lie one behind the other in a block and are asked for at once
MOST_HEADS = 16  # of queries that a unit has
NEAR = 16384  # bytes of a crowd's keys: they and the values are asked for while others are in the nearest cache
ROOM = (CROWD + LANES) * 4  # bytes of a head's scores: the last ones are written with what else fills 16 places


def _forms(pieces):
    """For so many heads: products of 16 / heads keys and of one with their queries, weights and sums of values."""
    many, one = (tile("bf16", rows, pieces) for rows in (LANES // pieces, 1))
    return many, one, soften(pieces), weigh(pieces)


_k8, _o8, _s8, _w8 = _forms(8)
_k4, _o4, _s4, _w4 = _forms(4)
_k2, _o2, _s2, _w2 = _forms(2)
_k1, _o1, _s1, _w1 = _forms(1)


@inline
def _score(m, q, groups, k, stride, count, to, coming, step):
    """Products of `count` keys with m queries, [count, m], and whatever in 16 places behind them. As many at
    `coming` are asked for."""
    n, rows = 0, LANES // m
    while n < count:
        at, place, ask = k + n * stride, to + n * m * 4, coming + n * step
        if n + rows <= count:
            if m == 1:
                _k1(at, stride, 0, 0, q, groups, place, ask, step)
            elif m == 2:
                _k2(at, stride, 0, 0, q, groups, place, ask, step)
            elif m == 4:
                _k4(at, stride, 0, 0, q, groups, place, ask, step)
            else:
                _k8(at, stride, 0, 0, q, groups, place, ask, step)
            n += rows
        else:
            if m == 1:
                _o1(at, stride, 0, 0, q, groups, place, ask, step)
            elif m == 2:
                _o2(at, stride, 0, 0, q, groups, place, ask, step)
            elif m == 4:
                _o4(at, stride, 0, 0, q, groups, place, ask, step)
            else:
                _o8(at, stride, 0, 0, q, groups, place, ask, step)
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
def _weigh(m, v, stride, count, p, sums, sums_stride, coming, step):
    if m == 1:
        _w1(v, stride, count, p, sums, sums_stride, coming, step)
    elif m == 2:
        _w2(v, stride, count, p, sums, sums_stride, coming, step)
    elif m == 4:
        _w4(v, stride, count, p, sums, sums_stride, coming, step)
    else:
        _w8(v, stride, count, p, sums, sums_stride, coming, step)


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
    queries, parts, columns, size = argument(a, 2), argument(a, 3) // argument(a, 19), argument(a, 10), argument(a, 11)
    if cursor[1] >= columns:
        cursor[0], cursor[1], cursor[2] = claim(a), 0, 0
    crowd[0], crowd[1], crowd[2] = cursor[0], 0, 0
    if crowd[0] >= argument(a, 1) * queries * parts:
        return
    row, width = cursor[0] // parts, argument(a, 5) * GROUP * 2
    at, begin = i64(argument(a, 12), argument(a, 1) * queries)[row], cursor[0] % parts * argument(a, 19) * width
    while cursor[1] < columns and crowd[1] + RUN <= argument(a, 20):
        column = row // queries * columns + cursor[1]
        count = _run(i64(argument(a, 13) + column * size * 8, size), cursor[2], size, at, argument(a, 14))
        if count:
            block = i64(argument(a, 9), argument(a, 1) * columns)[column]
            crowd[3 + 2 * crowd[2]] = (block * size + cursor[2]) * argument(a, 3) * width + begin
            crowd[4 + 2 * crowd[2]] = count
            crowd[1] += count
            crowd[2] += 1
        cursor[2] += max(count, 1)
        if cursor[2] >= size:
            cursor[1], cursor[2] = cursor[1] + 1, 0


@inline
def _asked(crowd, coming, n):
    """Where the rows lie that are asked for while a crowd's n-th run is read: blocks lie where nobody would foresee it,
    and many lines asked for at once hold up what is read now. Whole rows are asked for in the order in which they lie,
    whatever is read meanwhile."""
    return coming[3 + 2 * n] if n < coming[2] else crowd[3 + 2 * n]


@inline
def _ask_for(coming, n, arena, stride, size):
    """Asks for all runs from the n-th on."""
    while n < coming[2]:
        for row in range(coming[4 + 2 * n]):
            for place in range(0, size, 64):
                ask_for(arena + coming[3 + 2 * n] + row * stride + place)
        n += 1


@inline
def _keys(a, crowd, coming, q_at, scores_at):
    """Scores of a crowd for all heads of its unit, while the coming one's keys are asked for."""
    heads, groups, own, k, done = argument(a, 4), argument(a, 5), argument(a, 19), argument(a, 7), 0
    width = groups * GROUP * 2
    stride = argument(a, 3) * width
    step, between = (width, RUN * width) if own == argument(a, 3) else (stride, width)
    for n in range(crowd[2]):
        for h in range(own):
            m, at, ask = 0, k + crowd[3 + 2 * n] + h * width, k + _asked(crowd, coming, n) + h * between
            while m < heads:
                size, row = piece(heads - m), h * heads + m
                q, to = q_at + row * groups * FACTOR_BYTES, scores_at + row * ROOM + done * size * 4
                _score(size, q, groups, at, stride, crowd[4 + 2 * n], to, ask, step)
                m += size
        done += crowd[4 + 2 * n]
    _ask_for(coming, crowd[2], k, stride, own * width)


@inline
def _weights(a, crowd, scale, scores_at, states_at, sums_at):
    """Weights of a crowd's scores; sums are brought to the new tops."""
    heads, width = argument(a, 4), argument(a, 5) * GROUP
    for h in range(argument(a, 19)):
        m = 0
        while m < heads:
            size, row = piece(heads - m), h * heads + m
            _soften(size, scores_at + row * ROOM, crowd[1], scale, states_at + row * STATE)
            _bring(size, width, states_at + row * STATE, sums_at + row * width * 4)
            m += size


@inline
def _values(a, crowd, coming, scores_at, sums_at):
    """Adds a crowd's weighted values to the sums, while the coming one's values are asked for."""
    heads, groups, own, v, done = argument(a, 4), argument(a, 5), argument(a, 19), argument(a, 8), 0
    width = groups * GROUP * 2
    stride = argument(a, 3) * width
    step, one, between = (64, RUN * 64, RUN * width) if own == argument(a, 3) else (stride, 64, width)
    for n in range(crowd[2]):
        for h in range(own):
            m, at, ask = 0, v + crowd[3 + 2 * n] + h * width, v + _asked(crowd, coming, n) + h * between
            while m < heads:
                size, row = piece(heads - m), h * heads + m
                p, to = scores_at + row * ROOM + done * size * 4, sums_at + row * width * 2
                for g in range(groups):
                    place = to + g * GROUP * 4
                    _weigh(size, at + g * 64, stride, crowd[4 + 2 * n], p, place, width * 2, ask + g * one, step)
                m += size
        done += crowd[4 + 2 * n]
    _ask_for(coming, crowd[2], v, stride, own * width)


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
def _divided(sums, state, m, width, out):
    """The sums of m heads over their total weights, as bfloat16; zeros where no key was seen."""
    parts = f32(state + 64, LANES)
    for h in range(m):
        total = np.float32(0.0)
        for n in range(h, LANES, m):
            total += parts[n]
        less = np.float32(0.0) if total == 0 else np.float32(1.0) / total
        for place in range(h * width, (h + 1) * width, GROUP):
            for lane in range(LANES):
                out[place + 2 * lane] = narrow(sums[place + lane] * less)
                out[place + 2 * lane + 1] = narrow(sums[place + LANES + lane] * less)


@inline
def _end(a, unit, states_at, sums_at):
    """Writes what a unit's heads have found."""
    heads, own, width = argument(a, 4), argument(a, 19), argument(a, 5) * GROUP
    for h in range(own):
        m = 0
        while m < heads:
            size, row = piece(heads - m), h * heads + m
            sums = f32(sums_at + row * width * 4, size * width)
            out = bf16(argument(a, 15) + (unit * own * heads + row) * width * 2, size * width)
            _divided(sums, states_at + row * STATE, size, width, out)
            m += size


@inline
def _begin(a, unit, q_at, states_at, sums_at):
    """Lays out the queries of a unit's heads; no key has been seen."""
    heads, groups, own = argument(a, 4), argument(a, 5), argument(a, 19)
    for h in range(own):
        m = 0
        while m < heads:
            size, row = piece(heads - m), h * heads + m
            for k in range(size):
                x = argument(a, 6) + (unit * own * heads + row + k) * groups * GROUP * 2
                spread_row(x, False, groups, q_at + (row * groups + k) * FACTOR_BYTES, size * FACTOR_BYTES)
            state = f32(states_at + row * STATE, 2 * LANES)
            state[:LANES], state[LANES:] = np.float32(LOWEST), np.float32(0.0)
            m += size
    f32(sums_at, own * heads * groups * GROUP)[:] = np.float32(0.0)


def _attend(a):
    """Arguments: 0 claims, 1 sequences, 2 new positions, 3 KV heads, 4 heads of each, 5 groups of a head's channels, 6
    q, 7 K arena, 8 V arena, 9 blocks, 10 columns of blocks, 11 rows of a block, 12 q positions, 13 k positions, 14
    window, 15 result, 16 the helpers, 17 this, 18 threads, 19 KV heads of a unit, 20 keys of a crowd."""
    units = argument(a, 1) * argument(a, 2) * (argument(a, 3) // argument(a, 19))
    scale = np.float32(1.0 / math.sqrt(np.float64(argument(a, 5) * GROUP)))
    q_at, sums_at, scores_at, states_at = workspace(16384), workspace(16384), workspace(5120), workspace(3072)
    crowd, coming, cursor = i64(workspace(2048), 256), i64(workspace(2048), 256), i64(workspace(64), 3)
    cursor[1] = argument(a, 10)  # of no unit yet
    crowd[0], crowd[1], crowd[2] = -1, 0, 0
    while crowd[0] < units:
        _next(a, cursor, coming)
        _keys(a, crowd, coming, q_at, scores_at)
        if crowd[1]:
            _weights(a, crowd, scale, scores_at, states_at, sums_at)
        _values(a, crowd, coming, scores_at, sums_at)
        if coming[0] != crowd[0]:
            if crowd[0] >= 0:
                _end(a, crowd[0], states_at, sums_at)
            if coming[0] < units:
                _begin(a, coming[0], q_at, states_at, sums_at)
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


def _crowd(kv_heads: int, heads: int, width: int) -> tuple[int, int]:
    """How many KV heads, whose keys lie beside each other, fit into a unit, and how many of their keys into a crowd."""
    most = min(MOST_HEADS * kv_heads // heads, NEAR // (RUN * width * 2))
    own = next((n for n in range(most, 1, -1) if kv_heads % n == 0), 1)
    return own, min(CROWD, NEAR // (own * width * 2))


def attention_of(q: int, shape: Sequence[int], seen: Seen, out: int) -> Work:
    """Attention of queries at an address, of shape [B, T, N, D], to another, which may be the same."""
    batch, queries, count, width = shape
    k, v, size, kv_heads, blocks, columns, q_pos, k_pos, window = seen
    # Sums are brought to new tops crowd by crowd, so that is the same for any batch; units are to be enough for all.
    own, keys = _crowd(kv_heads, count, width)
    enough = min(own, batch * queries * kv_heads // (2 * torch.get_num_threads()))
    own = next((n for n in range(enough, 1, -1) if own % n == 0), 1)
    shared = threads(batch * queries * kv_heads // own)
    return Work(_started, [0, batch, queries, kv_heads, count // kv_heads, width // GROUP, q, k, v, blocks, columns,
        size, q_pos, k_pos, window, out, helpers(shared), compiled(_attend)[1], shared, own, keys])  # fmt: skip


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
