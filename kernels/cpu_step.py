"""What a step does before its layers and after its head, on a CPU without gradients, each piece in one pass.

Their meaning: `locate` of kvcache/cache.py, and all that kernels/around.py names.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import call, compiled, helpers, threads
from muse_fn.kernels.cpu_pool import in_parallel, rest
from muse_fn.kernels.cpu_rows import UNIT, normed
from muse_fn.kernels.cpu_scalars import argument, bf16, bytes_at, f32, i64, inline, real, sigmoid, tanh, wide
from muse_fn.kernels.cpu_vectors import claim
from muse_fn.kernels.norms import RESIDUAL_GATE_FLOOR
from muse_fn.kernels.one_op import one_op

PIECE = 512  # elements that count as a row


def _capped(a):
    """Arguments: 0 claims, 1 pieces, 2 elements, 3 z, 4 result; then multiplier, cap, 1 / cap or 0."""
    multiplier, cap, less = real(a, 5), real(a, 6), real(a, 7)
    while True:
        first = claim(a) * UNIT * PIECE
        if first >= argument(a, 2):
            break
        count = min(argument(a, 2) - first, UNIT * PIECE)
        z, out = bf16(argument(a, 3) + first * 2, count), f32(argument(a, 4) + first * 4, count)
        if cap == 0:
            for n in range(count):
                out[n] = wide(z[n]) * multiplier
        else:
            for n in range(count):
                out[n] = tanh(wide(z[n]) * multiplier * less) * cap


def _last(a):
    """`_capped` on the threads of the helpers, who may rest then: it is a step's last form. Arguments: their state, the
    form, threads, 0, then the form's own."""
    in_parallel(argument(a, 0), argument(a, 1), a + 32, argument(a, 2))
    rest(argument(a, 0))


@one_op
def capped(z: Tensor, multiplier: float, cap: float) -> Tensor:
    """`around.capped` of bfloat16 [...] -> float32 [...]."""
    z = z.contiguous()
    out = torch.empty_like(z, dtype=torch.float32)
    count, less = z.numel(), 1.0 / cap if cap else 0.0
    pieces, all_of_them = -(-count // PIECE), torch.get_num_threads()
    words = [helpers(all_of_them), compiled(_capped)[1], threads(pieces // UNIT), 0]
    call(_last, [*words, 0, pieces, count, z.data_ptr(), out.data_ptr()], (multiplier, cap, less))
    return out


def _embedding(a):
    """Arguments: 0 ids, 1 how many, 2 table, 3 its rows, 4 its width, 5 the id of its first row, 6 result."""
    ids, width = i64(argument(a, 0), argument(a, 1)), argument(a, 4)
    for n in range(argument(a, 1)):
        row, to = ids[n] - argument(a, 5), bf16(argument(a, 6) + n * width * 2, width)
        if 0 <= row < argument(a, 3):
            given = bf16(argument(a, 2) + row * width * 2, width)
            for k in range(width):
                to[k] = given[k]
        else:
            to[:] = np.uint16(0)


@one_op
def embedding(table_VH: Tensor, ids: Tensor, first: int) -> Tensor:
    """`around.embedding` of a contiguous table in bfloat16 for ids int64 [...] -> [..., H]."""
    ids, (rows, width) = ids.contiguous(), table_VH.shape
    out = table_VH.new_empty(*ids.shape, width)
    call(_embedding, [ids.data_ptr(), ids.numel(), table_VH.data_ptr(), rows, width, first, out.data_ptr()])
    return out


@one_op
def stream_norm(x: Tensor, eps: float) -> Tensor:
    """`around.stream_norm` of bfloat16 [..., H] -> float32 [..., H]."""
    return normed(x, None, eps, torch.float32)


@inline
def _widened(at, is_float, width, to):
    """float32 or bfloat16 -> float32."""
    if is_float:
        to[:] = f32(at, width)
    else:
        given = bf16(at, width)
        for k in range(width):
            to[k] = wide(given[k])


def _gains(a):
    """Arguments: 0 vectors, 1 their width, 2 whether float32, 3 result; then where each lies."""
    width = argument(a, 1)
    for n in range(argument(a, 0)):
        to = f32(argument(a, 3) + n * width * 4, width)
        _widened(argument(a, 4 + n), argument(a, 2), width, to)
        for k in range(width):
            to[k] += np.float32(1.0)


@one_op
def gains(vectors: Sequence[Tensor]) -> Tensor:
    """The factors of `around.gains` for contiguous vectors [W] of one dtype, float32 or bfloat16 -> float32 [N, W]."""
    first = vectors[0]
    out = first.new_empty(len(vectors), len(first), dtype=torch.float32)
    call(_gains, [*out.shape, first.dtype == torch.float32, out.data_ptr(), *(x.data_ptr() for x in vectors)])
    return out


def _mixes(a):
    """Arguments: 0 vectors, 1 their width, 2 whether float32, 3 and 4 results; then where each lies; then temperature,
    floor."""
    count, width, at = argument(a, 0), argument(a, 1), 5 + argument(a, 0)
    temperature, floor = real(a, at), real(a, at + 1)
    for n in range(count):
        alpha, beta = f32(argument(a, 3) + n * width * 4, width), f32(argument(a, 4) + n * width * 4, width)
        _widened(argument(a, 5 + n), argument(a, 2), width, alpha)
        for k in range(width):
            w = alpha[k] / temperature
            beta[k] = sigmoid(w)
            square = sigmoid(-w) * (np.float32(1.0) + beta[k])
            alpha[k] = math.sqrt(floor if square < floor else square)


@one_op
def mixes(vectors: Sequence[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """alpha and beta of `around.mixes` likewise."""
    first = vectors[0]
    alpha, beta = (first.new_empty(len(vectors), len(first), dtype=torch.float32) for _ in range(2))
    addresses = [x.data_ptr() for x in (alpha, beta, *vectors)]
    call(_mixes, [*alpha.shape, first.dtype == torch.float32, *addresses], (temperature, RESIDUAL_GATE_FLOOR))
    return alpha, beta


@inline
def _is_inside(a, row):
    """Whether a row's past and count are in their bounds."""
    past, count = i64(argument(a, 6), row + 1)[row], i64(argument(a, 7), row + 1)[row]
    return argument(a, 8) <= count <= argument(a, 2) and 0 <= past <= argument(a, 9) - count


@inline
def _used(a, group, row):
    """The columns of a table that a row's step reads, from and to, and the first of them that it writes."""
    size, window = argument(a, 3), argument(a, 15 + group)
    past, count = i64(argument(a, 6), row + 1)[row], i64(argument(a, 7), row + 1)[row]
    start = max(0, past - window + 1) // size if window else 0
    stop = max(start, (past + count + size - 1) // size)
    return start, stop, past // size if count else stop


def _fits(a):
    """Arguments: 0 groups, 1 rows, 2 columns of a step, 3 positions of a block, 4 columns of a table, 5 tables, 6 past,
    7 count, 8 the least count, 9 how many positions there may be, 10 blocks, 11 a byte for each, 0 at first, 12 ids, 13
    how many there may be, 14 the result; then the window of each group."""
    rows, blocks, width, met, own, good = argument(a, 1), argument(a, 10), argument(a, 4), 0, 0, True
    is_written, ids = bytes_at(argument(a, 11), blocks), i64(argument(a, 12), rows * argument(a, 2))
    for n in range(len(ids)):
        good = good and 0 <= ids[n] < argument(a, 13)
    for row in range(rows):
        good = good and _is_inside(a, row)
    for is_second in range(2):  # what is written is known when all rows have been looked at
        for line in range(argument(a, 0) * rows if good else 0):
            start, stop, first = _used(a, line // rows, line % rows)
            table = i64(argument(a, 5) + line * width * 8, width)
            for n in range(start, stop):
                block = table[n]
                if not 0 < block < blocks:
                    good = False
                elif is_second:
                    met += is_written[block]
                elif n >= first:
                    own += 1 - is_written[block]
                    is_written[block] = 1
    i64(argument(a, 14), 1)[0] = good and met <= own


@one_op
def fits(
    tokens_BT: Tensor, view: Sequence[Tensor], windows: Sequence[int], cache: Sequence[int], limits: Sequence[int]
) -> bool:
    """`around.fits` for contiguous tensors in int64."""
    (table, past, count), (blocks, size), (least, room, ids) = view, cache, limits
    found, written = table.new_zeros(1), table.new_zeros(blocks, dtype=torch.uint8)
    call(_fits, [len(windows), *tokens_BT.shape, size, table.shape[2], *(x.data_ptr() for x in (table, past, count)),
        least, room, blocks, written.data_ptr(), tokens_BT.data_ptr(), ids, found.data_ptr(), *windows])  # fmt: skip
    return bool(found)


@inline
def _context(past, end, window, size, columns, table, width, blocks, pos):
    """What one row sees: its blocks, [columns], and unless `pos` is 0 their positions, [columns * size]."""
    oldest = max(0, past - window + 1) if window else 0
    first = min(oldest // size, width - columns)
    for n in range(columns):
        blocks[n] = table[first + n]
    if pos:
        positions = i64(pos, columns * size)
        for n in range(columns * size):
            at = first * size + n
            positions[n] = at if oldest <= at < end else -1


def _locate(a):
    """Arguments: 0 groups, 1 rows, 2 columns of a step, 3 positions of a block, 4 columns of a table, 5 tables, 6 past,
    7 count, 8 where the step's columns are written; then for each group the window, columns seen, their blocks, and
    their positions or 0."""
    rows, length, size, width = argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    past, count = i64(argument(a, 6), rows), i64(argument(a, 7), rows)
    for line in range(argument(a, 0) * rows):
        own, b = a + 8 * (9 + 4 * (line // rows)), line % rows
        table, write = i64(argument(a, 5) + line * width * 8, width), i64(argument(a, 8) + line * length * 8, length)
        for t in range(length):
            at = past[b] + t
            write[t] = (table[max(0, min(at // size, width - 1))] * size if t < count[b] else 0) + at % size
        columns = argument(own, 1)
        blocks = i64(argument(own, 2) + b * columns * 8, columns)
        pos = argument(own, 3) + b * columns * size * 8 if argument(own, 3) else 0
        _context(past[b], past[b] + count[b], argument(own, 0), size, columns, table, width, blocks, pos)


@one_op
def locate(
    table_GBN: Tensor, past_B: Tensor, count_B: Tensor, length: int, size: int, seen: Sequence[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """`locate` of a view in int64, for each group `seen`: its window, and how many columns of the table it meets.
    -> the rows to write [G, B * T], then for each group the blocks [B, C] and the positions [B, S]; the same positions
    for groups of one window."""
    table, past, count = table_GBN.contiguous(), past_B.contiguous(), count_B.contiguous()
    groups, batch, width = table.shape
    write, pos = table.new_empty(groups, batch * length), dict[int, Tensor]()
    words, found = [groups, batch, length, size, width, *(x.data_ptr() for x in (table, past, count, write))], [write]
    for window, columns in seen:
        is_new, blocks = window not in pos, table.new_empty(batch, columns)
        if is_new:
            pos[window] = table.new_empty(batch, columns * size)
        words += window, columns, blocks.data_ptr(), pos[window].data_ptr() if is_new else 0
        found += blocks, pos[window]
    call(_locate, words)
    return tuple(found)
