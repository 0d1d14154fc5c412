"""Routes by expert, in tiles of rows, for the Triton expert products: one launch up to SORTED_HERE routes."""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import bound, inputs_ready, overlaps

SORTED_HERE = 1024  # routes up to which one program sorts them


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


@triton.jit
def _tiles_kernel(
    begin_ptr, expert_ptr, start_ptr, count_ptr, E,
    EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for routes already sorted: where those of each expert begin, int64 [E + 2]."""
    inputs_ready(PDL)
    experts = tl.arange(0, EE)
    begin, end = tl.load(begin_ptr + tl.minimum(experts, E)), tl.load(begin_ptr + tl.minimum(experts, E) + 1)
    _write_tiles((end - begin).to(tl.int32), expert_ptr, start_ptr, count_ptr, E, EE, CC, ROWS)


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
        order, begin = _sorted(routes - first if first else routes, experts)
        _tiles_kernel[(1,)](begin, *found, experts, *sizes, PDL=pdl, launch_pdl=pdl, num_warps=4)
    return Tiles(order, *(x[:tiles] for x in found))


def _sorted(routes: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Routes by expert, those of none last, int32 [P], and where each expert's begin, int64 [experts + 2]."""
    expert = torch.where((routes >= 0) & (routes < experts), routes, experts)
    if experts < 2**15 - 1:
        expert = expert.to(torch.int16)  # a radix sort takes as many passes as a key has bytes
    expert, order = expert.sort(stable=True)
    ids = torch.arange(experts + 2, dtype=expert.dtype, device=expert.device)
    return order.int(), torch.searchsorted(expert, ids)


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _order_kernel,
        {"idx_ptr": "*i64", **dict.fromkeys(("order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i32"),
         "P": "i32", "E": "i32", "first": "i32"},
        {"PP": 1024, "EE": 256, "CC": 256, "ROWS": 8, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    (
        _tiles_kernel,
        {"begin_ptr": "*i64", **dict.fromkeys(("expert_ptr", "start_ptr", "count_ptr"), "*i32"), "E": "i32"},
        {"EE": 256, "CC": 512, "ROWS": 128, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
]  # fmt: skip
