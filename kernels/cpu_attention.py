"""Attention of a few new positions over the blocks of a cache in bfloat16: keys and values are read where they lie.

The contract is that of reference.attend_blocks. One piece of work is one KV head of one sequence: for each block and
each stretch of keys in it that a query sees, the scores of its heads, their weights, the weighted values, kept against
the highest score so far. Keys that are not seen are not read.
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
from muse_fn.kernels.cpu_vectors import FACTOR_BYTES, LANES, ask_for, claim, soften, tile, weigh, workspace

WIDEST = 256  # channels of a head
STRETCH = 32  # keys that are scored before their values are read
LOWEST = -3.4e38  # below every score: the first top, from which a sum of nothing is brought to the next
_w8, _w4, _w2, _w1 = (weigh(m) for m in (8, 4, 2, 1))
_k16, _k4, _k1 = (tile("bf16", rows, 1, ahead=0) for rows in (LANES, 4, 1))  # keys are asked for block by block


@inline
def _weigh(m, v, stride, count, p, p_stride, sums, sums_stride):
    if m == 1:
        _w1(v, stride, count, p, p_stride, sums, sums_stride)
    elif m == 2:
        _w2(v, stride, count, p, p_stride, sums, sums_stride)
    elif m == 4:
        _w4(v, stride, count, p, p_stride, sums, sums_stride)
    else:
        _w8(v, stride, count, p, p_stride, sums, sums_stride)


@inline
def _scores(q, groups, k, stride, count, scores_at):
    """Of `count` keys for one head: STRETCH places, what is left of the last 16 is -infinity."""
    n = 0
    while n + LANES <= count:
        _k16(k + n * stride, stride, 0, 0, q, groups, scores_at + n * 4)
        n += LANES
    scores = f32(scores_at, STRETCH)
    while n + 4 <= count:
        _k4(k + n * stride, stride, 0, 0, q, groups, scores_at + n * 4)
        n += 4
    while n < count:
        _k1(k + n * stride, stride, 0, 0, q, groups, scores_at + n * 4)
        n += 1
    while n % LANES:
        scores[n] = np.float32(-np.inf)
        n += 1


@inline
def _heads(q_at, heads, groups, k, stride, count, scale, scores_at, states_at, sums_at):
    """Scores and weights of `count` keys for each head, [heads, STRETCH]; sums are brought to the new tops."""
    for h in range(heads):
        at, state = scores_at + h * STRETCH * 4, f32(states_at + h * 16, 4)
        _scores(q_at + h * groups * FACTOR_BYTES, groups, k, stride, count, at)
        soften(at, (count + LANES - 1) // LANES, scale, states_at + h * 16)
        if state[2] != np.float32(1.0):
            sums = f32(sums_at + h * groups * GROUP * 4, groups * GROUP)
            for n in range(groups * GROUP):
                sums[n] *= state[2]


@inline
def _ask_for(rows, stride, count, groups):
    """Has rows of keys or values fetched while others are worked on: a head's lie too far apart to be foreseen."""
    for n in range(count):
        for g in range(groups):
            ask_for(rows + n * stride + g * 64)


@inline
def _stretch(pos, first, size, at, window):
    """How many keys from `first` on are seen from position `at`, one after another."""
    j = first
    while j < size and j - first < STRETCH and 0 <= pos[j] <= at and (not window or pos[j] > at - window):
        j += 1
    return j - first


@inline
def _values(v, stride, count, heads, groups, scores_at, sums_at):
    """Adds `count` weighted values to the sums of each head."""
    m = 0
    while m < heads:
        size = piece(heads - m)
        for g in range(groups):
            to = sums_at + (m * groups + g) * GROUP * 4
            _weigh(size, v + g * 64, stride, count, scores_at + m * STRETCH * 4, STRETCH * 4, to, groups * GROUP * 4)
        m += size


@inline
def _divided(sums, states_at, heads, groups, out):
    """The sums of each head over its total weight, as bfloat16; zeros where no key was seen."""
    for h in range(heads):
        total = f32(states_at + h * 16, 4)[1]
        less = np.float32(0.0) if total == 0 else np.float32(1.0) / total
        for place in range(h * groups * GROUP, (h + 1) * groups * GROUP, GROUP):
            for lane in range(LANES):
                out[place + 2 * lane] = narrow(sums[place + lane] * less)
                out[place + 2 * lane + 1] = narrow(sums[place + LANES + lane] * less)


@inline
def _begin(x, heads, groups, q_at, states_at, sums):
    """Lays out the queries of the heads; no key has been seen."""
    for h in range(heads):
        spread_row(x + h * groups * GROUP * 2, False, groups, q_at + h * groups * FACTOR_BYTES, FACTOR_BYTES)
        state = f32(states_at + h * 16, 4)
        state[0], state[1] = np.float32(LOWEST), np.float32(0.0)
    sums[:] = np.float32(0.0)


def _attend(a):
    """Arguments: 0 claims, 1 sequences, 2 new positions, 3 KV heads, 4 heads of each, 5 groups of a head's channels, 6
    q, 7 K arena, 8 V arena, 9 blocks, 10 columns of blocks, 11 rows of a block, 12 q positions, 13 k positions, 14
    window, 15 result, 16 the helpers, 17 this, 18 threads."""
    queries, kv_heads, heads, groups = argument(a, 2), argument(a, 3), argument(a, 4), argument(a, 5)
    columns, size, window, width = argument(a, 10), argument(a, 11), argument(a, 14), argument(a, 5) * GROUP
    stride, scale = kv_heads * width * 2, np.float32(1.0 / math.sqrt(np.float64(width)))
    # Fewer than 16 scores are written as 16: behind those of the last head there is room for them.
    q_at, sums_at, scores_at, states_at = workspace(16384), workspace(16384), workspace(2048 + 64), workspace(256)
    sums = f32(sums_at, heads * width)
    while True:
        unit = claim(a)
        if unit >= argument(a, 1) * queries * kv_heads:
            break
        row, head = unit // kv_heads, unit % kv_heads  # of all sequences' new positions
        b, at = row // queries, i64(argument(a, 12), argument(a, 1) * queries)[row]
        _begin(argument(a, 6) + unit * heads * width * 2, heads, groups, q_at, states_at, sums)
        for column in range(b * columns, (b + 1) * columns):
            pos, j = i64(argument(a, 13) + column * size * 8, size), 0
            block = i64(argument(a, 9), argument(a, 1) * columns)[column] * size * stride + head * width * 2
            while j < size:
                count = _stretch(pos, j, size, at, window)
                if count:
                    k, v = argument(a, 7) + block + j * stride, argument(a, 8) + block + j * stride
                    _ask_for(v, stride, count, groups)
                    if column + 1 < (b + 1) * columns:
                        following = i64(argument(a, 9), argument(a, 1) * columns)[column + 1] * size * stride
                        _ask_for(argument(a, 7) + following + head * width * 2, stride, count, groups)
                    _heads(q_at, heads, groups, k, stride, count, scale, scores_at, states_at, sums_at)
                    _values(v, stride, count, heads, groups, scores_at, sums_at)
                j += max(count, 1)
        _divided(sums, states_at, heads, groups, bf16(argument(a, 15) + unit * heads * width * 2, heads * width))


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
