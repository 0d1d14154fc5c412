"""Products of a few rows with matrices in bfloat16, MXFP4 or float32: each matrix is read once for all rows.

The contract is that of pieces.linears. Sums are float32; the result is rounded once.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from collections.abc import Sequence

import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, call, compiled, helpers, threads
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, bf16, f32, inline, narrow, wide
from muse_fn.kernels.cpu_vectors import (
    BF16_ROWS,
    FACTOR_BYTES,
    HAS_DOTS,
    LANES,
    PIECES,
    ROWS,
    claim,
    spread,
    tile,
    workspace,
)
from muse_fn.kernels.packed import MXFP4, Weight

GROUP = 32  # inputs that are read at a time
UNIT = 16  # rows of a matrix that a thread claims at least
LONGEST = 64  # such units, at most, that it claims at once
AHEAD = 4096  # bytes between what is read and what is asked for, beyond where the processor would look by itself
BLOCK = 8  # of them that meet the next rows of x while both are in the nearest cache
BF16, PACKED, FLOAT = 0, 1, 2
MOST, *_REST = PIECES
_b8, _b4, _b2, _b1 = (tile("bf16", BF16_ROWS, m) for m in (8, 4, 2, 1))
_c8, _c4, _c2, _c1 = (tile("bf16", 1, m) for m in (8, 4, 2, 1))
_p8, _p4, _p2, _p1 = (tile("mxfp4", ROWS, m) for m in (8, 4, 2, 1))
_q8, _q4, _q2, _q1 = (tile("mxfp4", 1, m) for m in (8, 4, 2, 1))
_f8, _f4, _f2, _f1 = (tile("f32", 1, m) for m in (8, 4, 2, 1))


@inline
def piece(rest):
    """How many of `rest` rows of x are taken at once."""
    size = MOST
    while size > rest:
        size //= 2
    return size


@inline
def at_once(kind, n, count):
    """How many rows of a matrix from the n-th of `count` on are taken at once."""
    most = BF16_ROWS if kind == BF16 else ROWS if kind == PACKED else 1
    return most if n + most <= count else 1


@inline
def dots_of_bf16(rows, m, w, stride, x, groups, out, coming):
    """`tile` for BF16_ROWS rows or one of a bfloat16 matrix, and m rows of x."""
    if rows == BF16_ROWS:
        if m == 1:
            _b1(w, stride, 0, 0, x, groups, out, coming, stride)
        elif m == 2:
            _b2(w, stride, 0, 0, x, groups, out, coming, stride)
        elif m == 4:
            _b4(w, stride, 0, 0, x, groups, out, coming, stride)
        else:
            _b8(w, stride, 0, 0, x, groups, out, coming, stride)
    elif m == 1:
        _c1(w, stride, 0, 0, x, groups, out, coming, stride)
    elif m == 2:
        _c2(w, stride, 0, 0, x, groups, out, coming, stride)
    elif m == 4:
        _c4(w, stride, 0, 0, x, groups, out, coming, stride)
    else:
        _c8(w, stride, 0, 0, x, groups, out, coming, stride)


@inline
def dots_of_mxfp4(rows, m, w, stride, scales, x, groups, out, coming):
    """The same for ROWS rows or one of codes, whose scales lie `groups` to a row."""
    if rows == ROWS:
        if m == 1:
            _p1(w, stride, scales, groups, x, groups, out, coming, stride)
        elif m == 2:
            _p2(w, stride, scales, groups, x, groups, out, coming, stride)
        elif m == 4:
            _p4(w, stride, scales, groups, x, groups, out, coming, stride)
        else:
            _p8(w, stride, scales, groups, x, groups, out, coming, stride)
    elif m == 1:
        _q1(w, stride, scales, groups, x, groups, out, coming, stride)
    elif m == 2:
        _q2(w, stride, scales, groups, x, groups, out, coming, stride)
    elif m == 4:
        _q4(w, stride, scales, groups, x, groups, out, coming, stride)
    else:
        _q8(w, stride, scales, groups, x, groups, out, coming, stride)


@inline
def dots_of_f32(m, w, x, groups, out, coming):
    """The same for one row of a float32 matrix and rows of x as they are."""
    if m == 1:
        _f1(w, 0, 0, 0, x, groups, out, coming, 0)
    elif m == 2:
        _f2(w, 0, 0, 0, x, groups, out, coming, 0)
    elif m == 4:
        _f4(w, 0, 0, 0, x, groups, out, coming, 0)
    else:
        _f8(w, 0, 0, 0, x, groups, out, coming, 0)


@inline
def put_in_factor(x, place, value):
    """Stores a value, rounded to bfloat16, at one of the 32 places of a factor's group."""
    if HAS_DOTS:
        bf16(x, GROUP)[place] = narrow(value)
    else:
        f32(x, GROUP)[place // 2 + place % 2 * LANES] = wide(narrow(value))


@inline
def spread_row(x, is_float, groups, target, step):
    """One row of x, rounded to bfloat16, to `groups` places of a factor `step` bytes apart."""
    if not is_float:
        for n in range(groups):
            spread(x + n * 64, target + n * step)
        return
    given = f32(x, groups * GROUP)
    for n in range(groups):
        for place in range(GROUP):
            put_in_factor(target + n * step, place, given[n * GROUP + place])


@inline
def lay_out(x, is_float, is_kept, count, groups, target):
    """Rows of x as `tile` takes them, piece after piece; float32 ones unchanged if they are `kept`."""
    m, width = 0, groups * GROUP
    while m < count:
        size = piece(count - m)
        for row in range(m, m + size):
            source = x + row * width * (4 if is_float else 2)
            each = 4 * GROUP if is_kept else FACTOR_BYTES
            to = target + (m * groups + row - m) * each
            if is_kept:
                given = f32(source, width)
                for n in range(groups):
                    placed = f32(to + n * size * each, GROUP)
                    for lane in range(GROUP):
                        placed[lane] = given[n * GROUP + lane]
            else:
                spread_row(source, is_float, groups, to, size * each)
        m += size


@inline
def put(out, is_float, place, value):
    """Stores a sum as an element of a float32 or bfloat16 tensor."""
    if is_float:
        f32(out, place + 1)[place] = value
    else:
        bf16(out, place + 1)[place] = narrow(value)


@inline
def asked(w, stride, n, last, after):
    """Where that lies which is asked for while a matrix's n-th row is read: AHEAD behind it in the order in which this
    thread reads rows, those from `after` on when it has done with the `last`. A thread that looked beyond would fetch
    what is another's to read, and would wait for each of its own pieces."""
    rows = (AHEAD + stride - 1) // stride
    if stride > AHEAD:
        return w + n * stride + AHEAD
    return w + (n + rows) * stride if n + rows < last or after == 0 else after + (n + rows - last) * stride


@inline
def _stride(kind, groups):
    return groups * (64 if kind == BF16 else 16 if kind == PACKED else 128)


@inline
def share(n, units, threads):
    """The first of the units of the n-th claim, and the one behind its last: a quarter of a thread's part, LONGEST at
    most. Long runs are read faster than short ones that threads take in turn."""
    size = max(1, min(LONGEST, units // (4 * threads)))
    return min(units, n * size), min(units, (n + 1) * size)


@inline
def _matrix_of(a, unit):
    """Where a unit's matrix is told of, and which of its rows is the unit's first."""
    matrix, first = a + 8 * 13, unit * UNIT
    while first >= (argument(matrix, 2) + UNIT - 1) // UNIT * UNIT:
        first -= (argument(matrix, 2) + UNIT - 1) // UNIT * UNIT
        matrix += 48
    return matrix, first


@inline
def _row_of(a, unit):
    """Where a unit's first row lies; 0 behind the last unit."""
    if unit >= argument(a, 8):
        return 0
    matrix, first = _matrix_of(a, unit)
    return argument(matrix, 0) + first * _stride(argument(matrix, 3), argument(a, 4))


def _work(a):
    """Claims rows of matrices, always one run ahead. Arguments as `_products` has them."""
    sums_at, units, threads = workspace(64), argument(a, 8), argument(a, 11)
    unit, last = share(claim(a), units, threads)
    while unit < units:
        following, its_last = share(claim(a), units, threads)
        while unit < last:
            matrix, first = _matrix_of(a, unit)
            stop = min(argument(matrix, 2), first + (last - unit) * UNIT)
            unit += (stop - first + UNIT - 1) // UNIT
            _rows(a, matrix, first, stop, _row_of(a, unit if unit < last else following), sums_at)
        unit, last = following, its_last


@inline
def _rows(a, matrix, first, last, after, sums_at):
    """Some rows of a matrix times all of x, a block of rows at a time; those at `after` come next."""
    w, scales, width, kind = argument(matrix, 0), argument(matrix, 1), argument(matrix, 2), argument(matrix, 3)
    count, groups, out, is_float = argument(a, 3), argument(a, 4), argument(matrix, 4), argument(matrix, 5)
    sums, stride = f32(sums_at, LANES), _stride(kind, groups)
    while first < last:
        stop, m = min(last, first + BLOCK), 0
        while m < count:
            size, n = piece(count - m), first
            x = argument(a, 6 if kind == FLOAT else 5) + m * groups * (4 * GROUP if kind == FLOAT else FACTOR_BYTES)
            while n < stop:
                rows, at, ask = at_once(kind, n, stop), w + n * stride, asked(w, stride, n, last, after)
                if kind == BF16:
                    dots_of_bf16(rows, size, at, stride, x, groups, sums_at, ask)
                elif kind == PACKED:
                    dots_of_mxfp4(rows, size, at, stride, scales + n * groups, x, groups, sums_at, ask)
                else:
                    dots_of_f32(size, at, x, groups, sums_at, ask)
                for r in range(rows):
                    for k in range(size):
                        put(out, is_float, (m + k) * width + n + r, sums[r * size + k])
                n += rows
            m += size
        first = stop


def _products(a):
    """Lays out x and starts `_work`. Arguments: 0 claims, 1 x, 2 whether float32, 3 its rows, 4 groups, 5 and 6 room
    for it rounded and kept, 7 matrices, 8 units, 9 the helpers, 10 `_work`, 11 threads, 12 which layouts are needed;
    then for each matrix weights, scales, rows, kind, result, whether that is float32."""
    if argument(a, 12) & 1:
        lay_out(argument(a, 1), argument(a, 2), False, argument(a, 3), argument(a, 4), argument(a, 5))
    if argument(a, 12) & 2:
        lay_out(argument(a, 1), True, True, argument(a, 3), argument(a, 4), argument(a, 6))
    in_parallel(argument(a, 9), argument(a, 10), a, argument(a, 11))


def matrix(w: Weight, out: int, to_float: bool) -> list[int]:
    """What `_products` is told of a weight whose result goes to an address, in float32 or bfloat16."""
    if isinstance(w, MXFP4):
        return [w.codes.data_ptr(), w.scales.data_ptr(), w.codes.shape[0], PACKED, out, to_float]
    return [w.data_ptr(), 0, w.shape[0], BF16 if w.dtype == torch.bfloat16 else FLOAT, out, to_float]


def products_of(x: int, is_float: bool, count: int, width: int, matrices: Sequence[list[int]], room: int) -> Work:
    """Products of `count` rows at an address with matrices; there is room for the rows in float32, twice."""
    layouts, units = 0, 0
    for _, _, rows, kind, _, _ in matrices:
        layouts |= 2 if kind == FLOAT else 1
        units += -(-rows // UNIT)
    kept, shared = room + (4 * count * width if layouts == 3 else 0), threads(units)
    words = [number for each in matrices for number in each]
    return Work(_products, [0, x, is_float, count, width // GROUP, room, kept, len(matrices), units, helpers(shared),
        compiled(_work)[1], shared, layouts, *words])  # fmt: skip


def linears(x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """pieces.linears for x [..., in], `in` a multiple of 32; x is float32 where a matrix is."""
    x = x.contiguous()
    width = x.shape[-1]
    made, matrices = [], []
    for w in ws:
        rows, own = (w.codes.shape[0], x.dtype) if isinstance(w, MXFP4) else (w.shape[0], w.dtype)
        out = x.new_empty(*x.shape[:-1], rows, dtype=dtype or own)
        made.append(out)
        matrices.append(matrix(w, out.data_ptr(), out.dtype == torch.float32))
    room = x.new_empty(2, x.numel(), dtype=torch.float32)
    is_float, count = x.dtype == torch.float32, x.numel() // width
    call(*products_of(x.data_ptr(), is_float, count, width, matrices, room.data_ptr()))
    return tuple(made)
