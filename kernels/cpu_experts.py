"""Experts on the rows of a few tokens, in bfloat16 or MXFP4: each touched expert is read once for all its tokens.

The contract is that of reference.expert_rows. Routes are put in order of their expert. Then threads claim blocks of
rows of gate and up, whose gated results are laid out for the second product, and after that blocks of rows of down.
What is between the two products is rounded once, as it goes into the second.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from collections.abc import Sequence

import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, call, compiled, helpers, threads
from muse_fn.kernels.cpu_linear import (
    BF16,
    GROUP,
    MOST,
    PACKED,
    UNIT,
    asked,
    at_once,
    dots_of_bf16,
    dots_of_mxfp4,
    piece,
    put,
    put_in_factor,
    share,
    spread_row,
)
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, f32, i64, inline, sigmoid
from muse_fn.kernels.cpu_vectors import FACTOR_BYTES, claim, workspace
from muse_fn.kernels.packed import MXFP4, Weight, logical_shape

RUN = 256  # rows of an expert's matrix, at most, that are read one behind the other


@inline
def in_order(routes, count, first, experts, order, starts, touched):
    """Routes sorted by expert into `order`; for the n-th expert touched its number, and where its routes start.
    -> how many experts are touched."""
    for e in range(experts + 1):
        starts[e] = 0
    for n in range(count):
        e = routes[n] - first
        if 0 <= e < experts:
            starts[e + 1] += 1
    found, total = 0, 0
    for e in range(experts):
        own = starts[e + 1]
        starts[e + 1] = total  # where the next route of e goes
        if own:
            touched[2 * found], touched[2 * found + 1] = e, total
            found += 1
        total += own
    for n in range(count):
        e = routes[n] - first
        if 0 <= e < experts:
            order[starts[e + 1]] = n
            starts[e + 1] += 1
    touched[2 * found + 1] = total
    return found


@inline
def _stride(packed, groups):
    return groups * (16 if packed else 64)


@inline
def dots(packed, rows, m, w, scales, row, groups, x, out, coming):
    """`tile` for rows of a stack of matrices of either kind."""
    if packed:
        dots_of_mxfp4(rows, m, w + row * groups * 16, groups * 16, scales + row * groups, x, groups, out, coming)
    else:
        dots_of_bf16(rows, m, w + row * groups * 64, groups * 64, x, groups, out, coming)


@inline
def _times(packed, m, w, scales, row, count, groups, x, out, after):
    """Products of `count` rows from the row-th on with m rows of x, [count, m], and whatever in 16 places behind."""
    n, stride = 0, _stride(packed, groups)
    while n < count:
        rows, coming = at_once(PACKED if packed else BF16, n, count), asked(w + row * stride, stride, n, count, after)
        dots(packed, rows, m, w, scales, row + n, groups, x, out + n * m * 4, coming)
        n += rows


@inline
def hide(packed, w, scales, gate, up, count, m, groups, x, hidden, at, after):
    """silu(gate) * up of `count` rows of each, RUN at most, for m rows of x, from column `at` of `hidden` on. The rows
    of gate are read before those of up: what lies in one piece is read faster than two at once. Those at `after` come
    next."""
    gates_at, ups_at, size = workspace(8192 + 64), workspace(8192 + 64), count * m
    _times(packed, m, w, scales, gate, count, groups, x, gates_at, w + up * _stride(packed, groups))
    _times(packed, m, w, scales, up, count, groups, x, ups_at, after)
    gates, ups = f32(gates_at, size), f32(ups_at, size)
    for n in range(size):
        ups[n] = gates[n] * sigmoid(gates[n]) * ups[n]
    for n in range(count):
        for k in range(m):
            to = hidden + ((at + n) // GROUP * m + k) * FACTOR_BYTES
            put_in_factor(to, (at + n) % GROUP, ups[n * m + k])


@inline
def _portion(a, unit, last, width):
    """Of the units from one on up to the `last`: the touched expert of the first, which of its `width` rows come first,
    how many come one behind the other, and the unit behind them."""
    blocks = (width + UNIT - 1) // UNIT
    touched, at, first = i64(argument(a, 15), 2 * argument(a, 5) + 2), unit // blocks, unit % blocks * UNIT
    is_long = touched[2 * at + 3] - touched[2 * at + 1] > MOST  # rows that are read again must be near
    count = min(width - first, min(last - unit, 1 if is_long else RUN // UNIT) * UNIT)
    return at, first, count, unit + (count + UNIT - 1) // UNIT


@inline
def _row_of(a, unit, width, of_expert, w, stride):
    """Where a unit's first row lies, of matrices with so many rows `of_expert`; 0 behind the last unit."""
    blocks = (width + UNIT - 1) // UNIT
    if unit >= blocks * argument(a, 2):
        return 0
    expert = i64(argument(a, 15), 2 * argument(a, 5) + 2)[unit // blocks * 2]
    return w + (expert * of_expert + unit % blocks * UNIT) * stride


def _gate_up(a):
    """Claims rows of gate and up, always one run ahead. Arguments as `_experts` has them."""
    groups, inner, packed, threads = argument(a, 6), argument(a, 7) * GROUP, argument(a, 8), argument(a, 23)
    touched, stride = i64(argument(a, 15), 2 * argument(a, 5) + 2), _stride(packed, groups)
    units = (inner + UNIT - 1) // UNIT * argument(a, 2)
    unit, last = share(claim(a), units, threads)
    while unit < units:
        following, its_last = share(claim(a), units, threads)
        while unit < last:
            at, first, count, unit = _portion(a, unit, last, inner)
            after = _row_of(a, unit if unit < last else following, inner, 2 * inner, argument(a, 9), stride)
            gate, m, stop = touched[2 * at] * 2 * inner + first, touched[2 * at + 1], touched[2 * at + 3]
            while m < stop:
                size = piece(stop - m)
                x, hidden = (
                    argument(a, 16) + m * groups * FACTOR_BYTES,
                    argument(a, 17) + m * inner // GROUP * FACTOR_BYTES,
                )
                w, scales = argument(a, 9), argument(a, 10)
                hide(packed, w, scales, gate, gate + inner, count, size, groups, x, hidden, first, after)
                m += size
        unit, last = following, its_last


def _down(a):
    """Claims rows of down likewise."""
    groups, width, packed, threads = argument(a, 7), argument(a, 6) * GROUP, argument(a, 8), argument(a, 23)
    stride, sums_at = _stride(packed, groups), workspace(8192 + 64)
    touched, order = i64(argument(a, 15), 2 * argument(a, 5) + 2), i64(argument(a, 14), argument(a, 3))
    units, sums = (width + UNIT - 1) // UNIT * argument(a, 2), f32(sums_at, RUN * MOST)
    unit, last = share(claim(a + 8), units, threads)
    while unit < units:
        following, its_last = share(claim(a + 8), units, threads)
        while unit < last:
            at, first, count, unit = _portion(a, unit, last, width)
            after = _row_of(a, unit if unit < last else following, width, width, argument(a, 11), stride)
            row, m, stop = touched[2 * at] * width + first, touched[2 * at + 1], touched[2 * at + 3]
            while m < stop:
                size = piece(stop - m)
                x = argument(a, 17) + m * groups * FACTOR_BYTES
                _times(packed, size, argument(a, 11), argument(a, 12), row, count, groups, x, sums_at, after)
                for k in range(size):
                    for n in range(count):
                        put(argument(a, 18), argument(a, 19), order[m + k] * width + first + n, sums[n * size + k])
                m += size
        unit, last = following, its_last


def _experts(a):
    """Arguments: 0 and 1 claims of rows, 2 experts touched (found here), 3 routes, 4 of each token, 5 experts here, 6
    and 7 groups of the latent and the inner width, 8 whether packed, 9 gate and up, 10 their scales, 11 down, 12 its
    scales, 13 experts of the routes, 14 their order, 15 touched experts, 16 laid out tokens, 17 what is between, 18
    the result, 19 whether it is float32, 20 tokens, 21 the first expert here, 22 the helpers, 23 threads, 24 and 25
    the two halves."""
    count, experts, groups = argument(a, 3), argument(a, 5), argument(a, 6)
    routes, order = i64(argument(a, 13), count), i64(argument(a, 14), count + experts + 1)
    touched = i64(argument(a, 15), 2 * experts + 2)
    found = in_order(routes, count, argument(a, 21), experts, order, order[count:], touched)
    i64(a, 3)[2] = found
    for at in range(found):
        m, stop = touched[2 * at + 1], touched[2 * at + 3]
        while m < stop:
            size = piece(stop - m)
            for k in range(size):
                token = argument(a, 20) + order[m + k] // argument(a, 4) * groups * 2 * GROUP
                spread_row(token, False, groups, argument(a, 16) + (m * groups + k) * FACTOR_BYTES, size * FACTOR_BYTES)
            m += size
    if touched[2 * found + 1] < count:
        for n in range(count):
            if not 0 <= routes[n] - argument(a, 21) < experts:
                for column in range(groups * GROUP):
                    put(argument(a, 18), argument(a, 19), n * groups * GROUP + column, 0.0)
    in_parallel(argument(a, 22), argument(a, 24), a, argument(a, 23))
    in_parallel(argument(a, 22), argument(a, 25), a, argument(a, 23))


def room_of(tokens: int, routes: int, experts: int, width: int, inner: int) -> int:
    """How many bytes `experts_of` has to have room for."""
    count = tokens * routes
    return 4 * count * (width + inner) + 8 * (count + 3 * (experts + 1))


def experts_of(
    u: int, idx: int, shape: Sequence[int], gate_up: Weight, down: Weight, first: int, out: int, is_float: bool,
    room: int,
) -> Work:  # fmt: skip
    """Rows of routes, of shape [tokens, routes], from addresses of tokens and routes to another; `room` has as much as
    `room_of` says."""
    (tokens, routes), (experts, width, inner) = shape, logical_shape(down)
    count = tokens * routes
    weights = [
        part.data_ptr() for w in (gate_up, down) for part in ((w.codes, w.scales) if isinstance(w, MXFP4) else (w, w))
    ]
    hidden, order = room + 4 * count * width, room + 4 * count * (width + inner)
    touched = order + 8 * (count + experts + 1)
    shared = threads(min(count, experts) * (inner // UNIT))
    return Work(_experts, [0, 0, 0, count, routes, experts, width // GROUP, inner // GROUP,
        isinstance(down, MXFP4), *weights, idx, order, touched, room, hidden, out, is_float, u, first,
        helpers(shared), shared, compiled(_gate_up)[1], compiled(_down)[1]])  # fmt: skip


def expert_rows(
    u_TM: Tensor,
    idx_TR: Tensor,
    gate_up_EFM: Weight,
    down_EMF: Weight,
    *,
    first: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """reference.expert_rows for bfloat16 tokens; both widths are multiples of 32."""
    u_TM, idx_TR = u_TM.contiguous(), idx_TR.contiguous()
    experts, width, inner = logical_shape(down_EMF)
    out = u_TM.new_empty(*idx_TR.shape, width, dtype=dtype or u_TM.dtype)
    room = u_TM.new_empty(room_of(*idx_TR.shape, experts, width, inner), dtype=torch.uint8)
    to, is_float = out.data_ptr(), out.dtype == torch.float32
    call(*experts_of(u_TM.data_ptr(), idx_TR.data_ptr(), idx_TR.shape, gate_up_EFM, down_EMF, first, to, is_float,
        room.data_ptr()))  # fmt: skip
    return out
