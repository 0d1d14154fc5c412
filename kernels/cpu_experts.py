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
    PACKED,
    at_once,
    dots_of_bf16,
    dots_of_mxfp4,
    piece,
    put,
    put_in_factor,
    spread_row,
)
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, f32, i64, inline, sigmoid
from muse_fn.kernels.cpu_vectors import FACTOR_BYTES, LANES, claim, workspace
from muse_fn.kernels.packed import MXFP4, Weight, logical_shape

UNIT = 32  # rows of a matrix that a thread claims at once


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
def dots(packed, rows, m, w, scales, row, groups, x, out):
    """`tile` for rows of a stack of matrices of either kind."""
    if packed:
        dots_of_mxfp4(rows, m, w + row * groups * 16, groups * 16, scales + row * groups, x, groups, out)
    else:
        dots_of_bf16(rows, m, w + row * groups * 64, groups * 64, x, groups, out)


@inline
def hide(packed, w, scales, gate, up, count, m, groups, x, hidden, at):
    """silu(gate) * up of `count` rows of each, UNIT at most, for m rows of x, from column `at` of `hidden` on. The rows
    of gate are read before those of up: what lies in one piece is read faster than two at once."""
    gates_at, ups_at = workspace(2048), workspace(64)
    gates, ups, n = f32(gates_at, UNIT * LANES), f32(ups_at, LANES), 0
    while n < count:
        rows = at_once(PACKED if packed else BF16, n, count)
        dots(packed, rows, m, w, scales, gate + n, groups, x, gates_at + n * 64)
        n += rows
    n = 0
    while n < count:
        rows = at_once(PACKED if packed else BF16, n, count)
        dots(packed, rows, m, w, scales, up + n, groups, x, ups_at)
        for r in range(rows):
            column = at + n + r
            for k in range(m):
                value = gates[n * LANES + r * m + k]
                to = hidden + (column // GROUP * m + k) * FACTOR_BYTES
                put_in_factor(to, column % GROUP, value * sigmoid(value) * ups[r * m + k])
        n += rows


def _gate_up(a):
    """Claims rows of gate and up. Arguments as `_experts` has them."""
    groups, inner, packed = argument(a, 6), argument(a, 7) * GROUP, argument(a, 8)
    touched = i64(argument(a, 15), 2 * argument(a, 5) + 2)
    blocks = (inner + UNIT - 1) // UNIT
    while True:
        unit = claim(a)
        at = unit // blocks
        if at >= argument(a, 2):
            break
        e, m, stop = touched[2 * at], touched[2 * at + 1], touched[2 * at + 3]
        first = unit % blocks * UNIT
        gate, up, count = e * 2 * inner + first, (e * 2 + 1) * inner + first, min(inner - first, UNIT)
        while m < stop:
            size = piece(stop - m)
            x = argument(a, 16) + m * groups * FACTOR_BYTES
            hidden = argument(a, 17) + m * argument(a, 7) * FACTOR_BYTES
            hide(packed, argument(a, 9), argument(a, 10), gate, up, count, size, groups, x, hidden, first)
            m += size


def _down(a):
    """Claims rows of down."""
    groups, width, packed = argument(a, 7), argument(a, 6) * GROUP, argument(a, 8)
    touched = i64(argument(a, 15), 2 * argument(a, 5) + 2)
    order = i64(argument(a, 14), argument(a, 3))
    sums_at = workspace(64)
    sums = f32(sums_at, LANES)
    blocks = (width + UNIT - 1) // UNIT
    while True:
        unit = claim(a + 8)
        at = unit // blocks
        if at >= argument(a, 2):
            break
        e, start, stop = touched[2 * at], touched[2 * at + 1], touched[2 * at + 3]
        n, last = (unit % blocks) * UNIT, min(width, (unit % blocks + 1) * UNIT)
        while n < last:
            rows = at_once(PACKED if packed else BF16, n, last)
            m = start
            while m < stop:
                size = piece(stop - m)
                x = argument(a, 17) + m * groups * FACTOR_BYTES
                dots(packed, rows, size, argument(a, 11), argument(a, 12), e * width + n, groups, x, sums_at)
                for r in range(rows):
                    for k in range(size):
                        put(argument(a, 18), argument(a, 19), order[m + k] * width + n + r, sums[r * size + k])
                m += size
            n += rows


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
