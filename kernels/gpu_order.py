"""Routes by expert, in tiles of rows, for the Triton expert products: one launch up to SORTED_HERE routes, else two."""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import bound, inputs_ready, overlaps

SORTED_HERE = 1024  # routes up to which one program sorts them
SHARE = 256  # of more routes, those that a program sorts
AT_ONCE = tl.constexpr(16)  # programs whose counts are added at once


class Tiles(NamedTuple):
    """Routes by expert, in tiles of rows."""

    order_P: Tensor  # int32, routes sorted by expert, those of no expert here last
    expert_C: Tensor  # int32, the expert of each tile; -1 where there is none, and its routes' rows are zeros
    start_C: Tensor  # int32, its first place in the order
    count_C: Tensor  # int32, its routes; 0 for a tile that is not needed


@triton.jit
def _expert_of(idx_ptr, r, P, E, first):
    """The expert here of each route; E for one of none, E + 1 beyond the routes."""
    e = tl.load(idx_ptr + r, mask=r < P, other=0).to(tl.int32) - first
    return tl.where(r < P, tl.where((e < 0) | (e >= E), E, e), E + 1)


@triton.jit
def _write_tiles(
    count, expert_ptr, start_ptr, count_ptr, E, EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The tiles of experts with so many routes, [EE] with those of no expert last, in the order of the experts."""
    experts, c = tl.arange(0, EE), tl.arange(0, CC)
    count = tl.where(experts <= E, count, 0)  # the rest is padding
    tiles = (count + ROWS - 1) // ROWS
    first_tile, first_row = tl.cumsum(tiles, 0) - tiles, tl.cumsum(count, 0) - count
    tl.store(count_ptr + c, tl.zeros_like(c), mask=c >= tl.sum(tiles))
    # Every expert writes its own tiles, the first of all experts at once.
    for number in range(0, bound(tl.max(tiles))):
        mine = number < tiles
        at = first_tile + number
        tl.store(expert_ptr + at, tl.where(experts < E, experts, -1), mask=mine)
        tl.store(start_ptr + at, first_row + number * ROWS, mask=mine)
        tl.store(count_ptr + at, tl.minimum(count - number * ROWS, ROWS), mask=mine)


@triton.jit(do_not_specialize=["P"])
def _order_kernel(
    idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, P, E, first,
    PP: tl.constexpr, EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: PP, EE and CC are powers of two above the routes, the experts with one for "none", and the tiles."""
    inputs_ready(PDL)
    r = tl.arange(0, PP)
    e = _expert_of(idx_ptr, r, P, E, first)
    tl.store(order_ptr + r, tl.sort(e * PP + r) % PP, mask=r < P)
    _write_tiles(tl.histogram(e, EE), expert_ptr, start_ptr, count_ptr, E, EE, CC, ROWS)


@triton.jit(do_not_specialize=["P"])
def _count_kernel(idx_ptr, counts_ptr, P, E, first, SHARE: tl.constexpr, EE: tl.constexpr, PDL: tl.constexpr):
    """How many of a program's SHARE of the routes each expert has, int32 [programs, EE]."""
    inputs_ready(PDL)
    at = tl.program_id(0)
    e = _expert_of(idx_ptr, at * SHARE + tl.arange(0, SHARE), P, E, first)
    tl.store(counts_ptr + at * EE + tl.arange(0, EE), tl.histogram(e, EE))


@triton.jit(do_not_specialize=["P", "programs"])
def _place_kernel(
    idx_ptr, counts_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, P, E, first, programs,
    SHARE: tl.constexpr, EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program puts its share of the routes behind those of lower experts and those of earlier programs."""
    at, experts, share = tl.program_id(0), tl.arange(0, EE), tl.arange(0, SHARE)
    e = _expert_of(idx_ptr, at * SHARE + share, P, E, first)
    mine, key = tl.histogram(e, EE), tl.sort(e * SHARE + share)
    inputs_ready(PDL)
    every, earlier = tl.zeros((EE,), tl.int32), tl.zeros((EE,), tl.int32)
    for begin in range(0, bound(programs), AT_ONCE):
        row = begin + tl.arange(0, AT_ONCE)[:, None]
        count = tl.load(counts_ptr + row * EE + experts[None, :], mask=row < programs, other=0)
        every, earlier = every + tl.sum(count, 0), earlier + tl.sum(tl.where(row < at, count, 0), 0)
    place = tl.cumsum(every, 0) - every + earlier - (tl.cumsum(mine, 0) - mine)
    e = key // SHARE
    tl.store(order_ptr + tl.gather(place, e, 0) + share, at * SHARE + key % SHARE, mask=e <= E)
    if at == 0:
        _write_tiles(every, expert_ptr, start_ptr, count_ptr, E, EE, CC, ROWS)


def tiles_of(idx_TR: Tensor, experts: int, rows: int, first: int = 0) -> Tiles:
    """Tiles of so many rows of the experts `first` and following. Sizes by shapes alone: as many tiles as any routing
    can need."""
    routes, device = idx_TR.flatten(), idx_TR.device
    count = len(routes)
    tiles = count // rows + min(experts + 1, count)
    order = torch.empty(count, dtype=torch.int32, device=device)
    found = [torch.empty(triton.next_power_of_2(tiles), dtype=torch.int32, device=device) for _ in range(3)]
    sizes, pdl = (triton.next_power_of_2(experts + 2), len(found[0]), rows), overlaps(device)
    if count <= SORTED_HERE:
        padded = triton.next_power_of_2(count)
        _order_kernel[(1,)](
            routes, order, *found, count, experts, first, padded, *sizes, PDL=pdl, launch_pdl=pdl, num_warps=4
        )
    else:
        programs, options = triton.cdiv(count, SHARE), {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
        counts = torch.empty(programs, sizes[0], dtype=torch.int32, device=device)
        _count_kernel[(programs,)](routes, counts, count, experts, first, SHARE, sizes[0], **options)
        _place_kernel[(programs,)](
            routes, counts, order, *found, count, experts, first, programs, SHARE, *sizes, **options
        )
    return Tiles(order, *(x[:tiles] for x in found))


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _order_kernel,
        {"idx_ptr": "*i64", **dict.fromkeys(("order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i32"),
         "P": "i32", "E": "i32", "first": "i32"},
        {"PP": 1024, "EE": 256, "CC": 256, "ROWS": 8, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    (
        _count_kernel,
        {"idx_ptr": "*i64", "counts_ptr": "*i32", "P": "i32", "E": "i32", "first": "i32"},
        {"SHARE": SHARE, "EE": 256, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    (
        _place_kernel,
        {"idx_ptr": "*i64",
         **dict.fromkeys(("counts_ptr", "order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i32"),
         **dict.fromkeys(("P", "E", "first", "programs"), "i32")},
        {"SHARE": SHARE, "EE": 256, "CC": 512, "ROWS": 128, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
]  # fmt: skip
