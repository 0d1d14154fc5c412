"""Attention of many new positions over the blocks of a cache in bfloat16, in tiles that stay in the caches.

The contract is that of reference.attend_blocks. One piece of work is a tile of rows of one KV head of one sequence, a
row being one query of one of its heads. The keys that any of them sees are packed, KEYS at a time, and meet ROWS rows
after ROWS rows while they are in the nearest cache. A row's bits depend on its keys and their columns of the table
only: what it does not see adds exact zeros, so neither the rows beside it nor finite values of keys behind it matter.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import call, compiled, helpers, threads
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, i64, inline
from muse_fn.kernels.cpu_tiles import KEYS, ROWS, STATE, begun, clear, divided, paired, shares, turned, weighed, weights
from muse_fn.kernels.cpu_vectors import LANES, claim, spread

GROUP = 32  # channels to 64 bytes
TILE = 252  # most rows that meet the same packed keys, a multiple of ROWS: packing is a few hundredths of the work then
TILE_SUMS = 1 << 16  # bytes of their sums
UNITS = 4  # pieces of work for each thread, if there are rows for so many
_seen_weights, _all_weights = weights(True), weights(False)
_weighed4, _weighed2 = weighed(4), weighed(2)


@inline
def _rows(a, b, head, first, rows, q, places):
    """Lays out `rows` queries of a KV head from the `first` on and, [2, rows], the last place that each sees and the
    one below the first; behind the last query rows that see nothing. Returns the lowest and highest of their places."""
    queries, heads, groups, window = argument(a, 2), argument(a, 4), argument(a, 5), argument(a, 14)
    pos, placed = i64(argument(a, 12) + b * queries * 8, queries), i64(places, 2 * rows)
    low, high = np.int64(2**62), np.int64(-1)
    for n in range(rows):
        row, to = first + n, q + n * groups * 64
        placed[n], placed[rows + n] = -1, -1
        if row >= queries * heads:
            for g in range(groups):
                clear(to + g * 64)
            continue
        at = pos[row // heads]
        place = ((b * queries + row // heads) * argument(a, 3) + head) * heads + row % heads
        for g in range(groups):
            spread(argument(a, 6) + (place * groups + g) * 64, to + g * 64)
        placed[n], placed[rows + n] = at, max(at - window, -1) if window else -1
        low, high = min(low, at), max(high, at)
    return low, high


@inline
def _keys(a, arena, b, head, first, places, target):
    """KEYS rows of an arena from the `first` on of what these blocks hold, zeros where there is no key."""
    groups, columns, size = argument(a, 5), argument(a, 10), argument(a, 11)
    blocks, pos = i64(argument(a, 9), (b + 1) * columns), i64(places, KEYS)
    for n in range(KEYS):
        to = target + n * groups * 64
        if pos[n] < 0:
            for g in range(groups):
                clear(to + g * 64)
        else:
            block = blocks[b * columns + (first + n) // size]
            row = (block * size + (first + n) % size) * argument(a, 3) + head
            for g in range(groups):
                spread(arena + (row * groups + g) * 64, to + g * 64)


@inline
def _pack(a, b, head, first, places, raw, k, v):
    """K turned, [pairs of channels, KEYS], and V in pairs of keys: panels of 64 columns, [pairs of keys, 64] each, the
    last may be of 32."""
    groups = argument(a, 5)
    stride = groups * 64
    _keys(a, argument(a, 7), b, head, first, places, raw)
    for n in range(0, KEYS, LANES):
        for g in range(groups):
            turned(raw + n * stride + g * 64, stride, k + g * LANES * KEYS * 4 + n * 4, KEYS * 4)
    _keys(a, argument(a, 8), b, head, first, places, raw)
    for g in range(groups):
        wide = 2 if g // 2 * 2 + 2 <= groups else 1  # groups of this panel
        panel = v + g // 2 * KEYS * 128 + g % 2 * 128
        for n in range(KEYS // 2):
            paired(raw + 2 * n * stride + g * 64, raw + (2 * n + 1) * stride + g * 64, panel + n * 128 * wide)


@inline
def _tile(a, b, first, places):
    """Places of KEYS keys from the `first` on, -1 behind the last; the lowest and highest of keys that there are, and
    whether there are all."""
    count = argument(a, 10) * argument(a, 11)
    pos, placed = i64(argument(a, 13) + b * count * 8, count), i64(places, KEYS)
    low, high, whole = np.int64(2**62), np.int64(-1), True
    for n in range(KEYS):
        at = pos[first + n] if first + n < count else np.int64(-1)
        placed[n] = at
        high = max(high, at)
        if at < 0:
            whole = False
        else:
            low = min(low, at)
    return low, high, whole


@inline
def _six(groups, q, k, v, out, factor, state, sums, places, bounds, is_whole, pairs):
    """ROWS rows meet KEYS keys, of which so many pairs matter."""
    stride = groups * 64
    if is_whole:
        _all_weights(q, stride, k, groups * 16, factor, state, out, places, bounds)
    else:
        _seen_weights(q, stride, k, groups * 16, factor, state, out, places, bounds)
    for g in range(0, groups - 1, 2):
        _weighed4(out, v + g // 2 * KEYS * 128, pairs, state, sums + g * 128, groups * 128)
    if groups % 2:
        _weighed2(out, v + groups // 2 * KEYS * 128, pairs, state, sums + (groups - 1) * 128, groups * 128)


@inline
def _meet(a, rows, q, k, v, out, states, sums, places, bounds, low, high, is_whole):
    """All rows of a piece of work meet KEYS keys whose places are from `low` to `high`."""
    groups, placed, ends = argument(a, 5), i64(places, KEYS), i64(bounds, 2 * rows)
    factor = np.float32(math.log2(math.e) / math.sqrt(np.float64(groups * GROUP)))
    six = bounds + 2 * rows * 8
    own = i64(six, 2 * ROWS)
    for n in range(0, rows, ROWS):
        last, first, below, most = np.int64(-1), np.int64(2**62), np.int64(2**62), np.int64(-1)
        for r in range(ROWS):
            own[r], own[ROWS + r] = ends[n + r], ends[rows + n + r]
            last, first = max(last, own[r]), min(first, own[r])
            below, most = min(below, own[ROWS + r]), max(most, own[ROWS + r])
        if low > last or high <= below:
            continue
        sees_all, count = is_whole and high <= first and low > most, KEYS
        while not sees_all and count > 1 and not (below < placed[count - 1] <= last):
            count -= 1
        state, to = states + n // ROWS * STATE, sums + n * groups * 128
        _six(groups, q + n * groups * 64, k, v, out, factor, state, to, places, six, sees_all, (count + 1) // 2)


@inline
def _end(a, b, head, first, rows, states, sums):
    """The sums of each row over its total weight, as bfloat16; zeros where no key was seen."""
    queries, heads, groups = argument(a, 2), argument(a, 4), argument(a, 5)
    for n in range(rows):
        row, state = first + n, states + n // ROWS * STATE
        if n % ROWS == 0:
            shares(state)
        if row < queries * heads:
            place = ((b * queries + row // heads) * argument(a, 3) + head) * heads + row % heads
            to = argument(a, 15) + place * groups * 64
            divided(sums + n * groups * 128, state + 64 + n % ROWS * 4, groups * 2, to)


@inline
def _piece(a, unit, room):
    """One tile of rows. Its room, each part from a multiple of 64 bytes on."""
    kv_heads, groups, rows = argument(a, 3), argument(a, 5), argument(a, 19)
    pairs = argument(a, 1) * kv_heads
    b, head = unit % pairs // kv_heads, unit % kv_heads
    first = (argument(a, 22) - 1 - unit // pairs) * rows  # the last see most keys, and are begun first
    sums, part = room, groups * KEYS * 64
    q = sums + rows * groups * 128
    raw = q + rows * groups * 64
    k, v = raw + part, raw + 2 * part
    out = v + part
    states = out + ROWS * KEYS * 2
    places = states + rows // ROWS * STATE
    bounds = places + KEYS * 8
    for n in range(0, rows * groups * 128, 64):
        clear(sums + n)
    for n in range(rows // ROWS):
        begun(states + n * STATE)
    earliest, latest = _rows(a, b, head, first, rows, q, bounds)
    window = argument(a, 14)
    for key in range(0, argument(a, 10) * argument(a, 11), KEYS):
        low, high, is_whole = _tile(a, b, key, places)
        if low <= latest and not (window and high <= earliest - window):
            _pack(a, b, head, key, places, raw, k, v)
            _meet(a, rows, q, k, v, out, states, sums, places, bounds, low, high, is_whole)
    _end(a, b, head, first, rows, states, sums)


def _attend(a):
    """Arguments 0 to 18 as cpu_attention has them, 19 rows of a tile, 20 room for threads, 21 how many have taken
    theirs, 22 tiles of a KV head, 23 bytes of a thread's room."""
    room = 0
    while True:
        unit = claim(a)
        if unit >= argument(a, 1) * argument(a, 3) * argument(a, 22):
            break
        if room == 0:
            room = argument(a, 20) + claim(a + 8 * 21) * argument(a, 23)
        _piece(a, unit, room)


def _started(a):
    in_parallel(argument(a, 16), argument(a, 17), a, argument(a, 18))


def _sizes(rows: int, pairs: int, width: int) -> tuple[int, int]:
    """Rows of a tile and tiles, of so many rows of each pair of a sequence and a KV head."""
    most = min(TILE, TILE_SUMS // (4 * width) // ROWS * ROWS)
    wanted = -(-UNITS * threads(UNITS * rows) // pairs)
    tile = min(most, -(-rows // (wanted * ROWS)) * ROWS)
    return tile, -(-rows // tile)


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
    kv_heads, size, groups = k_arena.shape[2], k_arena.shape[1], width // GROUP
    heads = count // kv_heads
    rows, tiles = _sizes(queries * heads, batch * kv_heads, width)
    each = rows * groups * 192 + 3 * groups * KEYS * 64 + ROWS * KEYS * 2 + rows // ROWS * STATE + KEYS * 8
    each = (each + 2 * (rows + ROWS) * 8 + 63) // 64 * 64
    out, shared = torch.empty_like(q), threads(batch * kv_heads * tiles)
    room = q.new_empty(shared * each + 64, dtype=torch.uint8)
    call(_started, [0, batch, queries, kv_heads, heads, groups, q.data_ptr(), k_arena.data_ptr(), v_arena.data_ptr(),
        blocks.data_ptr(), blocks.shape[1], size, q_pos.data_ptr(), k_pos.data_ptr(), window, out.data_ptr(),
        helpers(shared), compiled(_attend)[1], shared, rows, (room.data_ptr() + 63) // 64 * 64, 0, tiles,
        each])  # fmt: skip
    return out
