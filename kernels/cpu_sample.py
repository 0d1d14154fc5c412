"""The next token of each row of logits on a CPU, in one pass without PyTorch's threads.

The meaning is that of muse_fn/sample.py on one rank, the filters' that of muse_fn/filters.py. A row's logits become
whole numbers of the same order, -0 and 0 the same. Noise is worked out where it may still decide: no noise is above
HIGHEST, and ids whose logits are further below what was found so far need none.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import math

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels import cpu_reasons
from muse_fn.kernels.cpu_calls import address, call, compiled, helpers, threads
from muse_fn.kernels.cpu_pool import in_parallel, rest
from muse_fn.kernels.cpu_scalars import argument, bytes_at, exp, f32, i32, i64, inline, log
from muse_fn.kernels.cpu_vectors import bits_of, claim, float_of, workspace
from muse_fn.kernels.one_op import one_op

SPAN = 512  # ids that are left out together
HIGHEST = 16.7  # the noise of the largest of 2^23 numbers below 1 is 16.64
WORTH = 1 << 16  # logits from which on several threads are worth their start
LEAST = -2139095041  # the whole number of -infinity
UNIT = 2.0**40  # as filters.UNIT
PARITY = 0x1BD11BDA


@inline
def _ordered(x):
    """A whole number in the order of float32."""
    bits = np.int32(bits_of(x + np.float32(0.0)))
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def _value(key):
    """What `_ordered` made a number of."""
    return float_of(np.uint32(np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF)))))


@inline
def _turned(x0, x1, r):
    x0 = np.uint32(x0 + x1)
    return x0, np.uint32(np.uint32((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0)


@inline
def _threefry(k0, k1, x0, x1):
    """sample.threefry of one counter."""
    k2 = np.uint32(k0 ^ k1 ^ np.uint32(PARITY))
    x0, x1 = np.uint32(x0 + k0), np.uint32(x1 + k1)
    for group in range(5):
        if group % 2 == 0:
            x0, x1 = _turned(x0, x1, 13)
            x0, x1 = _turned(x0, x1, 15)
            x0, x1 = _turned(x0, x1, 26)
            x0, x1 = _turned(x0, x1, 6)
        else:
            x0, x1 = _turned(x0, x1, 17)
            x0, x1 = _turned(x0, x1, 29)
            x0, x1 = _turned(x0, x1, 16)
            x0, x1 = _turned(x0, x1, 24)
        k0, k1, k2 = k1, k2, k0
        x0, x1 = np.uint32(x0 + k0), np.uint32(x1 + k1 + np.uint32(group + 1))
    return x0, x1


@inline
def _noise(word):
    """-log(-log(u)) of 23 bits."""
    u = (np.float32(np.int32(word >> np.uint32(9))) + np.float32(0.5)) * np.float32(2.0**-23)
    return -log(-log(u))


@inline
def _read(a, row, keys):
    """A row's logits as whole numbers, ids that are not allowed as -infinity; whether all are finite, and the lowest id
    of the largest."""
    width, worst, best, at = argument(a, 2), np.int32(0), np.int32(-2147483648), 0
    z, ok = f32(argument(a, 3) + row * width * 4, width), bytes_at(argument(a, 4) + row * argument(a, 5), width)
    for first in range(0, width, SPAN):
        high = np.int32(-2147483648)
        for n in range(first, min(width, first + SPAN)):
            size = np.int32(bits_of(z[n]) & np.uint32(0x7FFFFFFF))
            worst = max(worst, size)
            keys[n] = _ordered(z[n])
        if argument(a, 4):
            for n in range(first, min(width, first + SPAN)):
                keys[n] = keys[n] if ok[n] else np.int32(LEAST)
        for n in range(first, min(width, first + SPAN)):
            high = max(high, keys[n])
        if high > best:
            best, at = high, first
    while keys[at] != best:
        at += 1
    return worst < np.int32(0x7F800000), at


@inline
def _last(keys, width, weights, is_weighted, limit):
    """filters.within: the number of the last token within a limit, and what those before it weigh."""
    last, above, counts = np.uint32(0), 0, i64(workspace(2048), 256)
    for shift in range(24, -1, -8):
        counts[:] = 0
        for n in range(width):
            rank = np.uint32(keys[n]) ^ np.uint32(0x80000000)
            if (np.uint64(rank) >> np.uint64(shift + 8)) == np.uint64(last):
                counts[(rank >> np.uint32(shift)) & np.uint32(255)] += weights[n] if is_weighted else 1
        digit, reached = 255, above + counts[255]
        while digit > 0 and reached < limit:
            digit -= 1
            reached += counts[digit]
        above, last = reached - counts[digit], np.uint32((np.uint64(last) << np.uint64(8)) + np.uint64(digit))
    return last, above


@inline
def _drop(keys, width, weights, is_weighted, limit):
    """Leaves out ids before which as much stands as the limit."""
    last, above = _last(keys, width, weights, is_weighted, limit)
    for n in range(width):
        rank = np.uint32(keys[n]) ^ np.uint32(0x80000000)
        if rank == last:
            is_kept = above < limit
            above += weights[n] if is_weighted else 1
        else:
            is_kept = rank > last
        if not is_kept:
            weights[n] = -1


@inline
def _filter(a, row, keys, weights):
    """filters.keep: what top_k, top_p and min_p leave out becomes -infinity."""
    width, top_k = argument(a, 2), i64(argument(a, 13), row + 1)[row]
    top_p, min_p = f32(argument(a, 14), row + 1)[row], f32(argument(a, 15), row + 1)[row]
    if top_k >= width and top_p >= np.float32(1.0) and min_p <= np.float32(0.0):
        return
    weights[:] = 0
    if top_k < width:
        _drop(keys, width, weights, False, top_k)
    if top_p < np.float32(1.0):
        total = 0
        for n in range(width):
            if weights[n] == 0:
                weights[n] = np.int64(np.float64(exp(_value(keys[n]))) * UNIT + 0.5)
                total += weights[n]
        # Those that are out already weigh nothing, and are out again.
        for n in range(width):
            keys[n] = keys[n] if weights[n] >= 0 else np.int32(LEAST)
            weights[n] = max(weights[n], 0)
        _drop(keys, width, weights, True, np.int64(math.ceil(np.float64(top_p) * np.float64(total))))
    for n in range(width):
        if weights[n] < 0 or exp(_value(keys[n])) < min_p:
            keys[n] = np.int32(LEAST)


@inline
def _drawn(keys, width, k0, k1):
    """The lowest id of the largest sum of a logit and its noise."""
    best, at, even, odd = np.float32(-np.inf), 0, f32(workspace(1024), SPAN // 2), f32(workspace(1024), SPAN // 2)
    for first in range(0, width, SPAN):
        stop, high = min(width, first + SPAN), np.int32(-2147483648)
        for n in range(first, stop):
            high = max(high, keys[n])
        if _value(high) + np.float32(HIGHEST) < best:
            continue
        for pair in range((stop - first + 1) // 2):
            x0, x1 = _threefry(k0, k1, np.uint32(0), np.uint32(first // 2 + pair))
            even[pair], odd[pair] = _noise(x0), _noise(x1)
        for n in range(first, stop):
            noise = odd[(n - first) // 2] if n % 2 else even[(n - first) // 2]
            value = _value(keys[n]) + noise
            if value > best:
                best, at = value, n
    return at


@inline
def _token(a, row, keys, weights):
    """The token of a row."""
    is_finite, at = _read(a, row, keys)
    if not is_finite or (argument(a, 9) and not bytes_at(argument(a, 9), row + 1)[row]):
        return -1
    temperature, top, width = f32(argument(a, 6), row + 1)[row], _value(keys[at]), argument(a, 2)
    if argument(a, 11) or not temperature > np.float32(0.0) or top == np.float32(-np.inf):
        return at
    for n in range(width):
        keys[n] = _ordered((_value(keys[n]) - top) / temperature)
    if argument(a, 12):
        _filter(a, row, keys, weights)
    key, pos = i32(argument(a, 7), 2 * row + 2), i64(argument(a, 8), row + 1)[row]
    k0, k1 = _threefry(np.uint32(key[2 * row]), np.uint32(key[2 * row + 1]), np.uint32(0), np.uint32(pos))
    return _drawn(keys, width, k0, k1)


def _tokens(a):
    """Claims rows. Arguments: 0 claims, 1 rows, 2 ids, 3 logits, 4 which ids are allowed or 0, 5 bytes from those of
    one row to the next's, 6 temperatures, 7 keys, 8 positions, 9 which rows go on or 0, 10 the result, 11 whether all
    are greedy, 12 whether there are filters, 13 to 15 top_k, top_p and min_p, 16 room, 17 claims of it, 18 bytes of it
    for each thread."""
    width, out = argument(a, 2), i64(argument(a, 10), argument(a, 1))
    keys_at = argument(a, 16) + claim(a + 8 * 17) * argument(a, 18)
    keys, weights = i32(keys_at, width), i64(keys_at + 8 * ((width + 1) // 2), width if argument(a, 12) else 0)
    row = claim(a)
    while row < argument(a, 1):
        out[row] = _token(a, row, keys, weights)
        row = claim(a)


def _started(a):
    """Arguments: the helpers' state, `_tokens`, threads, 0, then its own. A step ends with it: helpers may rest."""
    in_parallel(argument(a, 0), argument(a, 1), a + 32, argument(a, 2))
    rest(argument(a, 0))


@one_op
def tokens(
    logits_BV: Tensor,
    allowed: Tensor | None,
    settings: tuple[Tensor, ...],
    pos_B: Tensor,
    going_B: Tensor | None,
    *,
    filtered: bool,
    greedy: bool,
) -> Tensor:
    """sample.sample on one rank for float32 logits -> int64 [B]. `settings` are the fields of a Draw."""
    (rows, width), allowed = logits_BV.shape, None if allowed is None else allowed.contiguous()
    logits, temperature, top_k, top_p, min_p, key = (x.contiguous() for x in (logits_BV, *settings))
    pos, going = pos_B.long().contiguous(), None if going_B is None else going_B.contiguous()
    many, everyone = threads(rows if rows * width >= WORTH else 1), torch.get_num_threads()
    each = ((16 if filtered else 4) * (width + 1) + 63) // 64 * 64  # a number for each id, and for filters a weight
    room, out = logits.new_empty(many * each, dtype=torch.uint8), pos.new_empty(rows)
    stride = width if allowed is not None and allowed.dim() == 2 else 0
    words = [0, rows, width, logits.data_ptr(), address(allowed), stride, temperature.data_ptr(), key.data_ptr(),
        pos.data_ptr(), address(going), out.data_ptr(), greedy, filtered, top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), room.data_ptr(), 0, each]  # fmt: skip
    call(_started, [helpers(everyone), compiled(_tokens)[1], many, 0, *words])
    return out


def why_not(
    logits_BV: Tensor,
    allowed: Tensor | None,
    settings: tuple[Tensor, ...],
    pos_B: Tensor,
    going_B: Tensor | None = None,
) -> str:
    """Why these cannot be taken; "" if they can."""
    kinds = torch.float32, torch.float32, torch.int64, torch.float32, torch.float32, torch.int32
    if [x.dtype for x in (logits_BV, *settings)] != [*kinds] or logits_BV.dim() != 2 or not logits_BV.numel():
        return "logits are no rows of float32, or none, or settings have other dtypes than those of `draws`"
    rows, width = logits_BV.shape
    masks = [x for x in (allowed, going_B) if x is not None]
    if any(x.dtype != torch.bool for x in masks) or pos_B.dtype not in (torch.int32, torch.int64):
        return "ids that are allowed or rows that go on are not bool, or positions no whole numbers"
    each = [*settings[:4], pos_B, *([] if going_B is None else [going_B])]
    if any(x.shape != (rows,) for x in each) or settings[4].shape != (rows, 2):
        return "settings are not one for each row"
    if allowed is not None and allowed.shape not in ((width,), (rows, width)):
        return f"ids that are allowed are {list(allowed.shape)}"
    return cpu_reasons.why_not(logits_BV, *settings, pos_B, *masks)
