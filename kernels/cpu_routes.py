"""Experts on the rows of many tokens in bfloat16: each expert's rows stand as columns beside its matrices, which are in
bfloat16, or in MXFP4 and unpacked a few rows at a time, for all of a tile.

The contract is that of reference.expert_rows. Routes are put in order of their expert and cut into tiles whose rows
stay in the caches while the expert's matrices pass by. Threads lay out tiles; then they claim blocks of rows of gate
and up, whose gated results are laid out as the next product wants them, rounded once; then blocks of rows of down.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import torch
from torch import Tensor

from muse_fn.kernels.cpu_blocks import EIGHT, WIDEST, hidden, sixteen, sums_of, unpacked
from muse_fn.kernels.cpu_calls import call, compiled, helpers, threads
from muse_fn.kernels.cpu_experts import in_order
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, i64, inline
from muse_fn.kernels.cpu_tiles import clear, turned
from muse_fn.kernels.cpu_vectors import LANES, claim, spread, workspace
from muse_fn.kernels.packed import MXFP4, Weight, logical_shape

GROUP = 32  # channels to 64 bytes
UNIT = 64  # rows of a matrix that a thread claims at once
TILE_BYTES = 1 << 18  # of a tile's rows: some of the cache that a processor has for itself
_hidden3, _hidden2, _hidden1 = (hidden(n) for n in (3, 2, 1))
_sums3, _sums2, _sums1 = (sums_of(n) for n in (3, 2, 1))


@inline
def _vectors(rest):
    """How many of so many vectors make the next panel: no panel is narrower than it has to be."""
    return WIDEST if rest > 4 or rest == WIDEST else min(rest, 2)


@inline
def _cut(a, touched, found, tiles):
    """Tiles, four numbers each: expert, first route, routes, vectors before. -> how many there are."""
    most, count, before = argument(a, 18), 0, 0
    for at in range(found):
        m, stop = touched[2 * at + 1], touched[2 * at + 3]
        while m < stop:
            size = min(stop - m, most)
            tiles[4 * count], tiles[4 * count + 1] = touched[2 * at], m
            tiles[4 * count + 2], tiles[4 * count + 3] = size, before
            before += (size + LANES - 1) // LANES
            m += size
            count += 1
    return count


def _lay_out(a):
    """Claims tiles and lays out their tokens in panels."""
    groups, tiles = argument(a, 8), i64(argument(a, 15), 4 * argument(a, 3))
    order, rows = i64(argument(a, 13), argument(a, 4)), workspace(1024)
    while True:
        unit = claim(a)
        if unit >= argument(a, 3):
            break
        first, size, before = tiles[4 * unit + 1], tiles[4 * unit + 2], tiles[4 * unit + 3]
        rest = (size + LANES - 1) // LANES
        start = 0
        while rest:
            vectors = _vectors(rest)
            panel = argument(a, 16) + before * groups * 1024
            for v in range(vectors):
                for g in range(groups):
                    for n in range(LANES):
                        at = start + v * LANES + n
                        if at < size:
                            token = order[first + at] // argument(a, 5)
                            spread(argument(a, 19) + (token * groups + g) * 64, rows + n * 64)
                        else:
                            clear(rows + n * 64)
                    turned(rows, 64, panel + g * 1024 * vectors + v * 64, 64 * vectors)
            start, before, rest = start + vectors * LANES, before + vectors, rest - vectors


@inline
def _rows_of(packed, w, scales, row, count, groups, room):
    """Where `count` rows of a stack of matrices lie in bfloat16: in `room` if they have to be unpacked."""
    if packed:
        for g in range(row * groups, (row + count) * groups):
            unpacked(w + g * 16, scales + g, room + (g - row * groups) * 64)
        return room
    return w + row * groups * 64


def _gate_up(a):
    """Claims rows of gate and up."""
    room, packed = workspace(131072), argument(a, 27)  # LANES rows of WIDEST_PACKED; Numba wants the number itself
    groups, inner = argument(a, 8), argument(a, 9) * GROUP
    tiles, stride, blocks = i64(argument(a, 15), 4 * argument(a, 3)), groups * 64, (inner + UNIT - 1) // UNIT
    while True:
        unit = claim(a + 8)
        if unit >= argument(a, 3) * blocks:
            break
        tile, row = 4 * (unit // blocks), unit % blocks * UNIT
        for n in range(row, min(row + UNIT, inner), EIGHT):
            first = tiles[tile] * 2 * inner + n
            gate = _rows_of(packed, argument(a, 10), argument(a, 28), first, EIGHT, groups, room)
            up = _rows_of(packed, argument(a, 10), argument(a, 28), first + inner, EIGHT, groups, room + EIGHT * stride)
            before = tiles[tile + 3]
            rest = (tiles[tile + 2] + LANES - 1) // LANES
            while rest:
                vectors = _vectors(rest)
                x = argument(a, 16) + before * groups * 1024
                to = argument(a, 17) + before * inner * 32 + n * 32 * vectors
                if vectors == 3:
                    _hidden3(gate, up, stride, x, groups * 16, to)
                elif vectors == 2:
                    _hidden2(gate, up, stride, x, groups * 16, to)
                else:
                    _hidden1(gate, up, stride, x, groups * 16, to)
                before, rest = before + vectors, rest - vectors


@inline
def _columns(w, stride, x, pairs, vectors, sums):
    """LANES rows of a matrix times a panel, 16 * WIDEST float32 to a row."""
    for n in range(0, LANES, EIGHT):
        at, to = w + n * stride, sums + n * 64 * WIDEST
        if vectors == 3:
            _sums3(at, stride, x, pairs, to)
        elif vectors == 2:
            _sums2(at, stride, x, pairs, to)
        else:
            _sums1(at, stride, x, pairs, to)


def _down(a):
    """Claims rows of down, whose sums go to the routes' rows."""
    room, packed = workspace(131072), argument(a, 27)  # LANES rows of WIDEST_PACKED; Numba wants the number itself
    groups, width = argument(a, 9), argument(a, 8) * GROUP
    tiles, stride, blocks = i64(argument(a, 15), 4 * argument(a, 3)), groups * 64, (width + UNIT - 1) // UNIT
    order, sums, rows, each = i64(argument(a, 13), argument(a, 4)), workspace(3072), workspace(1024), argument(a, 20)
    while True:
        unit = claim(a + 16)
        if unit >= argument(a, 3) * blocks:
            break
        tile, row = 4 * (unit // blocks), unit % blocks * UNIT
        for n in range(row, min(row + UNIT, width), LANES):
            row_n, before = tiles[tile] * width + n, tiles[tile + 3]
            w = _rows_of(packed, argument(a, 11), argument(a, 29), row_n, LANES, groups, room)
            first, stop = tiles[tile + 1], tiles[tile + 1] + tiles[tile + 2]
            while first < stop:
                vectors = _vectors((stop - first + LANES - 1) // LANES)
                _columns(w, stride, argument(a, 17) + before * groups * 1024, groups * 16, vectors, sums)
                for v in range(vectors):
                    turned(sums + v * 64, 64 * WIDEST, rows, 64)
                    for k in range(min(LANES, stop - first)):
                        to = argument(a, 7) + (order[first + k] * width + n) * each
                        sixteen(rows + k * 64, each // 4, to)
                    first += LANES
                before += vectors


def _experts(a):
    """Arguments: 0 to 2 claims, 3 tiles (found here), 4 routes, 5 of each token, 6 experts here, 7 the result, 8 and 9
    groups of the latent and the inner width, 10 gate and up, 11 down, 12 experts of the routes, 13 their order, 14
    touched experts, 15 tiles, 16 laid out tokens, 17 what is between, 18 routes of a tile, 19 tokens, 20 bytes of an
    element of the result, 21 the first expert here, 22 the helpers, 23 threads, 24 to 26 the three parts, 27
    whether weights are packed, 28 and 29 their scales."""
    count, experts, groups = argument(a, 4), argument(a, 6), argument(a, 8)
    routes, order = i64(argument(a, 12), count), i64(argument(a, 13), count + experts + 1)
    touched = i64(argument(a, 14), 2 * experts + 2)
    found = in_order(routes, count, argument(a, 21), experts, order, order[count:], touched)
    tiles = i64(argument(a, 15), 4 * (experts + count // argument(a, 18) + 1))
    i64(a, 4)[3] = _cut(a, touched, found, tiles)
    if touched[2 * found + 1] < count:
        size = groups * GROUP * argument(a, 20)
        for n in range(count):
            if not 0 <= routes[n] - argument(a, 21) < experts:
                for at in range(0, size, 64):
                    clear(argument(a, 7) + n * size + at)
    for part in range(24, 27):
        in_parallel(argument(a, 22), argument(a, part), a, argument(a, 23))


def expert_rows(
    u_TM: Tensor,
    idx_TR: Tensor,
    gate_up_EFM: Weight,
    down_EMF: Weight,
    *,
    first: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """reference.expert_rows in bfloat16; both widths are multiples of 32, of packed experts WIDEST_PACKED at most."""
    u_TM, idx_TR = u_TM.contiguous(), idx_TR.contiguous()
    experts, width, inner = logical_shape(down_EMF)
    packed = isinstance(down_EMF, MXFP4)
    (gate_up, gate_up_scales), (down, down_scales) = (
        w if isinstance(w, MXFP4) else (w, w) for w in (gate_up_EFM, down_EMF)
    )
    count, own = idx_TR.numel(), dtype or u_TM.dtype
    most = max(1, TILE_BYTES // (2 * width * WIDEST * LANES)) * WIDEST * LANES
    out = u_TM.new_empty(*idx_TR.shape, width, dtype=own)
    tiles = experts + count // most + 1  # each expert has one that is not full at most
    whole = idx_TR.new_empty(count + 3 * (experts + 1) + 4 * tiles)
    vectors = count // LANES + tiles
    room = u_TM.new_empty(vectors * LANES * (width + inner))
    order, laid = whole.data_ptr(), room.data_ptr()
    touched = order + 8 * (count + experts + 1)
    shared = threads(min(count, experts) * -(-inner // UNIT))
    call(_experts, [0, 0, 0, 0, count, idx_TR.shape[-1], experts, out.data_ptr(), width // GROUP, inner // GROUP,
        gate_up.data_ptr(), down.data_ptr(), idx_TR.data_ptr(), order, touched, touched + 16 * (experts + 1),
        laid, laid + 2 * LANES * vectors * width, most, u_TM.data_ptr(), own.itemsize, first, helpers(shared), shared,
        compiled(_lay_out)[1], compiled(_gate_up)[1], compiled(_down)[1], packed,
        gate_up_scales.data_ptr(), down_scales.data_ptr()])  # fmt: skip
    return out
