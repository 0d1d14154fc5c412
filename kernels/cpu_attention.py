"""Attention of a few new positions over the blocks of a cache in bfloat16: keys and values are read where they lie.

The contract is that of reference.attend_blocks. One piece of work is one KV head of one sequence: for each block and
each stretch of keys in it that a query sees, the scores of its heads, their weights, the weighted values, kept against
the highest score so far. Keys that are not seen are not read.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import call, compiled, helpers, threads
from muse_fn.kernels.cpu_linear import GROUP, dots_of_bf16, lay_out, piece
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, bf16, exp, f32, i64, inline, narrow
from muse_fn.kernels.cpu_vectors import LANES, ROWS, claim, weigh, workspace

MOST_HEADS = 16  # of queries that read one KV head
WIDEST = 256  # channels of a head
STRETCH = 32  # keys that are scored before their values are read
_w8, _w4, _w2, _w1 = (weigh(m) for m in (8, 4, 2, 1))


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
def _scores(q, heads, groups, k, stride, count, scale, scores_at, sums_at):
    """Of `count` keys for each head: [heads, STRETCH]."""
    scores, sums, j = f32(scores_at, heads * STRETCH), f32(sums_at, LANES), 0
    while j < count:
        rows, m = ROWS if j + ROWS <= count else 1, 0
        while m < heads:
            size = piece(heads - m)
            dots_of_bf16(rows, size, k + j * stride, stride, q + m * groups * 4 * GROUP, groups, sums_at)
            for r in range(rows):
                for h in range(size):
                    scores[(m + h) * STRETCH + j + r] = sums[r * size + h] * scale
            m += size
        j += rows


@inline
def _soften(scores, highest, total, sums, count, width):
    """Scores of one head -> weights against the highest so far, to which the sums are brought."""
    top = highest
    for j in range(count):
        top = max(top, scores[j]) if scores[j] == scores[j] else scores[j]
    if top > highest:
        less = exp(highest - top)
        total *= less
        for n in range(width):
            sums[n] *= less
    for j in range(count):
        scores[j] = exp(scores[j] - top)
        total += scores[j]
    return top, total


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
def _divided(sums, total, heads, groups, out):
    """The sums of each head over its total weight, as bfloat16; zeros where no key was seen."""
    for h in range(heads):
        less = np.float32(0.0) if total[h] == 0 else np.float32(1.0) / total[h]
        for place in range(h * groups * GROUP, (h + 1) * groups * GROUP, GROUP):
            for lane in range(LANES):
                out[place + 2 * lane] = narrow(sums[place + lane] * less)
                out[place + 2 * lane + 1] = narrow(sums[place + LANES + lane] * less)


def _attend(a):
    """Arguments: 0 claims, 1 sequences, 2 new positions, 3 KV heads, 4 heads of each, 5 groups of a head's channels, 6
    q, 7 K arena, 8 V arena, 9 blocks, 10 columns of blocks, 11 rows of a block, 12 q positions, 13 k positions, 14
    window, 15 result, 16 the helpers' state, 17 this, 18 threads."""
    queries, kv_heads, heads, groups = argument(a, 2), argument(a, 3), argument(a, 4), argument(a, 5)
    columns, size, window, width = argument(a, 10), argument(a, 11), argument(a, 14), argument(a, 5) * GROUP
    stride, scale = kv_heads * width * 2, np.float32(1.0 / math.sqrt(np.float64(width)))
    q_at, sums_at, scores_at, lanes_at = workspace(16384), workspace(16384), workspace(2048), workspace(64)
    sums, scores = f32(sums_at, heads * width), f32(scores_at, heads * STRETCH)
    highest, total = f32(workspace(64), heads), f32(workspace(128), heads)
    while True:
        unit = claim(a)
        if unit >= argument(a, 1) * queries * kv_heads:
            break
        row, head = unit // kv_heads, unit % kv_heads  # of all sequences' new positions
        b = row // queries
        at = i64(argument(a, 12), argument(a, 1) * queries)[row]
        lay_out(argument(a, 6) + unit * heads * width * 2, False, False, heads, groups, q_at)
        sums[:], total[:], highest[:] = np.float32(0.0), np.float32(0.0), np.float32(-np.inf)
        for column in range(b * columns, (b + 1) * columns):
            pos, j = i64(argument(a, 13) + column * size * 8, size), 0
            block = i64(argument(a, 9), argument(a, 1) * columns)[column] * size * stride + head * width * 2
            while j < size:
                count = _stretch(pos, j, size, at, window)
                if count:
                    k, v = argument(a, 7) + block + j * stride, argument(a, 8) + block + j * stride
                    _scores(q_at, heads, groups, k, stride, count, scale, scores_at, lanes_at)
                    for h in range(heads):
                        highest[h], total[h] = _soften(
                            scores[h * STRETCH :], highest[h], total[h], sums[h * width :], count, width
                        )
                    _values(v, stride, count, heads, groups, scores_at, sums_at)
                j += max(count, 1)
        _divided(sums, total, heads, groups, bf16(argument(a, 15) + unit * heads * width * 2, heads * width))


def _started(a):
    in_parallel(argument(a, 16), argument(a, 17), a, argument(a, 18))


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
    batch, queries, count, width = q.shape
    kv_heads, size = k_arena.shape[2], k_arena.shape[1]
    out = torch.empty_like(q)
    shared = threads(batch * queries * kv_heads)
    call(_started, [0, batch, queries, kv_heads, count // kv_heads, width // GROUP, q.data_ptr(), k_arena.data_ptr(),
        v_arena.data_ptr(), blocks.data_ptr(), blocks.shape[1], size, q_pos.data_ptr(), k_pos.data_ptr(), window,
        out.data_ptr(), helpers(shared), compiled(_attend)[1], shared])  # fmt: skip
    return out
