"""Expert products by Triton: each touched expert's weights are read once, packed as they lie, unpacked in registers.

Routes are sorted by expert and stand in tiles of rows; one program multiplies some rows of one expert's matrix with one
tile. Gate and up with the activation between them are one launch, down another. Of FEW routes every warp has its own
part of the inputs, and the parts' sums meet at the end, so that many loads are under way. Up to ALONE of them there is
no sorting: each route is a tile, and what two tokens share comes from the level-2 cache the second time; kernels/
gpu_alone.py has them for packed experts.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu_alone
from muse_fn.kernels.gpu import inputs_ready, overlaps, rounded
from muse_fn.kernels.gpu_order import SORTED_HERE, Tiles, tiles_of
from muse_fn.kernels.gpu_product import MX, NV, PLAIN, packed_product, plain_product
from muse_fn.kernels.gpu_unpack import GROUP, NV_SHIFT, column, row_of
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, logical_shape

ALONE = 32  # routes up to which each is a tile
REST = tl.constexpr(32)  # rows of a tile that is less than full, where tiles are large


@triton.jit
def _arrange_kernel(x_ptr, out_ptr, FEW: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """A row of inputs in the order of unpacked weights."""
    inputs_ready(PDL)
    row = tl.program_id(0).to(tl.int64) * K
    k = tl.program_id(1) * STEP + tl.arange(0, STEP)
    tl.store(out_ptr + row + (k & -128) + column(k & 127, FEW), tl.load(x_ptr + row + k))


@triton.jit
def _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tile, E, first, ALONE: tl.constexpr):
    """The expert (-1: none here), the first place and the number of routes of a tile."""
    if ALONE:
        expert = tl.load(idx_ptr + tile).to(tl.int32) - first
        expert = tl.where((expert < 0) | (expert >= E), -1, expert)
        start, count = tile, 1
    else:
        expert, start, count = tl.load(expert_ptr + tile), tl.load(start_ptr + tile), tl.load(count_ptr + tile)
    return expert, start, count


@triton.jit
def _rows_of(first, BN: tl.constexpr, WARPS: tl.constexpr, FEW: tl.constexpr, HALVES: tl.constexpr, F: tl.constexpr):
    """Rows of a matrix that a program takes, int64 [8, WARPS or 1, B]: BN from `first` on, or BN / 2 and as many F rows
    further, such that a thread gets both of a pair."""
    r, b = tl.arange(0, 8)[:, None, None], tl.arange(0, BN // 8 if FEW else BN // 8 // WARPS)[None, None, :]
    w = tl.zeros((1, 1, 1), tl.int32) if FEW else tl.arange(0, WARPS)[None, :, None]
    W: tl.constexpr = 1 if FEW else WARPS
    if HALVES:
        return (first + ((b // 2) * W + w) * 8 + r + (b % 2) * F).to(tl.int64)
    else:
        return (first + (b * W + w) * 8 + r).to(tl.int64)


@triton.jit
def _gate_up(
    x_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, expert, start, count,
    R: tl.constexpr, K: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    FEW: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of BN / 2 inner columns for up to ROWS routes of one expert."""
    m = tl.arange(0, ROWS)
    valid = m < count
    place = tl.where(valid, start + m, 0)
    if ALONE:
        token = place // R
    else:
        token = tl.load(order_ptr + place, mask=valid, other=0) // R
    n = tl.program_id(0) * (BN // 2)
    if FORMAT == PLAIN:
        r = tl.arange(0, BN)
        row = expert.to(tl.int64) * (2 * F) + n + r // 2 + (r % 2) * F
        both = plain_product(x_ptr, token, valid, codes_ptr, row, K, BN, ROWS, STAGES)
        both = tl.permute(tl.reshape(both, (BN // 2, 2, ROWS)), (0, 2, 1))
    else:
        row = expert.to(tl.int64) * (2 * F) + _rows_of(n, BN, WARPS, FEW, True, F)
        both = packed_product(
            x_ptr, token, valid, codes_ptr, scales_ptr, row, K, FORMAT, FEW, BN, ROWS, WARPS, AT_ONCE, STAGES, False,
        )  # fmt: skip
        W: tl.constexpr = 1 if FEW else WARPS
        both = tl.permute(tl.reshape(both, (BN // 16 // W, W, 2, 8, ROWS)), (0, 1, 3, 4, 2))
    gate, up = tl.split(tl.reshape(both, (BN // 2, ROWS, 2)))
    if FORMAT == NV:
        gate *= tl.load(global_ptr + expert * PARTS) / NV_SHIFT
        up *= tl.load(global_ptr + expert * PARTS + PARTS - 1) / NV_SHIFT
    h = gate / (1.0 + tl.exp(-gate)) * up
    f = n + tl.arange(0, BN // 2)
    if FORMAT != PLAIN:
        f = (f & -128) + column(f & 127, FEW)
    tl.store(h_ptr + place[None, :].to(tl.int64) * F + f[:, None], rounded(h, tl.bfloat16), mask=valid[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, E, first,
    R: tl.constexpr, K: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    FEW: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of routes by program id 1 -> bfloat16 [P, F] by place, arranged for down."""
    inputs_ready(PDL)
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tl.program_id(1), E, first, ALONE)
    if (expert < 0) | (count == 0):
        return
    if not FEW and count <= REST:
        _gate_up(x_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, expert, start, count,
                 R, K, F, PARTS, FORMAT, ALONE, FEW, BN, REST, WARPS, AT_ONCE, STAGES)  # fmt: skip
    else:
        _gate_up(x_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, expert, start, count,
                 R, K, F, PARTS, FORMAT, ALONE, FEW, BN, ROWS, WARPS, AT_ONCE, STAGES)  # fmt: skip


@triton.jit
def _down(
    h_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, expert, start, count, row,
    K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr, FEW: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of down for up to ROWS routes of one expert, or of none, once the inputs are there."""
    m = tl.arange(0, ROWS)
    valid = m < count
    place = tl.where(valid, start + m, 0)
    if ALONE:
        route = place
    else:
        route = tl.load(order_ptr + place, mask=valid, other=0)
    out = tl.zeros((BN, ROWS), tl.float32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if expert >= 0:
        if FORMAT == PLAIN:
            inputs_ready(PDL)
            out = plain_product(h_ptr, place, valid, codes_ptr, expert.to(tl.int64) * N + n, K, BN, ROWS, STAGES)
        else:
            out = packed_product(
                h_ptr, place, valid, codes_ptr, scales_ptr, row, K, FORMAT, FEW, BN, ROWS, WARPS, AT_ONCE, STAGES, PDL,
            )  # fmt: skip
        if FORMAT == NV:
            out *= tl.load(global_ptr + expert) / NV_SHIFT
    else:
        inputs_ready(PDL)
    if FORMAT != PLAIN and not FEW:
        n = tl.program_id(0) * BN + row_of(tl.arange(0, BN), BN, WARPS)
    to = route[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out_ptr + to, rounded(out, out_ptr.dtype.element_ty), mask=valid[None, :])


@triton.jit
def _down_kernel(
    h_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, E, first,
    K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr, FEW: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of routes by program id 1 -> [P, N] by route; zeros for routes of no expert here. Which routes these are,
    the kernel before the previous one wrote."""
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tl.program_id(1), E, first, ALONE)
    begin = tl.maximum(expert, 0).to(tl.int64) * N
    row = begin + _rows_of(tl.program_id(0) * BN, BN, WARPS, FEW, False, 0)
    if count == 0:
        inputs_ready(PDL)
        return
    if not FEW and count <= REST:
        _down(h_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, expert, start, count, row,
              K, N, FORMAT, ALONE, FEW, BN, REST, WARPS, AT_ONCE, STAGES, PDL)  # fmt: skip
    else:
        _down(h_ptr, order_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, expert, start, count, row,
              K, N, FORMAT, ALONE, FEW, BN, ROWS, WARPS, AT_ONCE, STAGES, PDL)  # fmt: skip


class Shape(NamedTuple):
    """How the launches cut their work."""

    rows: int  # of a tile of routes
    out: tuple[int, int]  # rows of gate and up, and of down, that one program takes
    warps: tuple[int, int]
    at_once: tuple[int, int]  # groups of inputs that a turn of each product's loop takes
    stages: tuple[int, int]  # of these loops


# How work on sorted routes to packed experts was cut best on an H200.
SORTED, SORTED_ROUTES = Shape(8, (32, 32), (2, 1), (1, 1), (4, 4)), 80
MANY_SORTED = Shape(8, (32, 64), (1, 1), (1, 1), (4, 4))


def is_few(routes: int) -> bool:
    """Whether every warp takes a part of the inputs: decides how inputs are arranged."""
    return routes <= SORTED_HERE


def shape_of(routes: int, form: int, latent: int, inner: int) -> Shape:
    """By the number of routes, the format and the widths alone."""
    if not is_few(routes):
        warps = 8 if form == NV.value else 4
        return Shape(128, (128, 128), (warps, warps), (1, 1), (3, 3))
    if form == PLAIN.value:
        return Shape(16, (64, 64), (4, 4), (1, 1), (3, 3))
    made = SORTED if routes <= SORTED_ROUTES else MANY_SORTED
    groups = latent // GROUP, inner // GROUP
    warps = tuple(math.gcd(n, most) for n, most in zip(groups, made.warps, strict=True))
    at_once = tuple(math.gcd(n // w, most) for n, w, most in zip(groups, warps, made.at_once, strict=True))
    return made._replace(warps=warps, at_once=at_once)


def expert_rows(
    u_TM: Tensor,
    idx_TR: Tensor,
    gate_up_EFM: Weight,
    down_EMF: Weight,
    *,
    first: int = 0,
    dtype: torch.dtype | None = None,
    arranged: Tensor | tuple[()] | None = None,
) -> Tensor:
    """reference.expert_rows for bfloat16 inputs; `why_not` says what does not fit. Sums in float32, the activation is
    not rounded before it is multiplied. `arranged` are the inputs as `arranged_for` gives them, worked out here unless
    given."""
    experts, latent, inner = logical_shape(down_EMF)
    device, (tokens, top_k) = u_TM.device, idx_TR.shape
    routes = tokens * top_k
    out = torch.empty(tokens, top_k, latent, dtype=dtype or u_TM.dtype, device=device)
    if not routes:
        return out
    codes, scales, globals_, parts, form = _parts(gate_up_EFM)
    shape, pdl, idx = shape_of(routes, form, latent, inner), overlaps(device), idx_TR.contiguous()
    is_alone, few = routes <= ALONE, is_few(routes)
    tiles = Tiles(idx, idx, idx, idx) if is_alone else tiles_of(idx, experts, shape.rows, first)
    count = routes if is_alone else len(tiles.expert_C)
    x = u_TM.contiguous()
    if form != PLAIN.value:
        x = arranged if isinstance(arranged, Tensor) else arranged_for(x, routes)
    if form != PLAIN.value and is_alone:
        given = (
            gpu_alone.Packed(codes, scales.view(torch.uint8), globals_, parts, form, inputs)
            for (codes, scales, globals_, parts, _), inputs in (
                (_parts(gate_up_EFM), latent),
                (_parts(down_EMF), inner),
            )
        )
        gpu_alone.expert_rows(x, idx, *given, out, experts, first)
        return out
    h = torch.empty(routes, inner, dtype=torch.bfloat16, device=device)
    common = {"FORMAT": form, "ALONE": is_alone, "FEW": few, "ROWS": shape.rows, "PDL": pdl, "launch_pdl": pdl}
    _gate_up_kernel[(2 * inner // shape.out[0], count)](
        x, idx, *tiles, codes, scales, globals_, h, experts, first,
        R=top_k, K=latent, F=inner, PARTS=parts, **_cut(shape, 0), **common,
    )  # fmt: skip
    codes, scales, globals_, _, form = _parts(down_EMF)
    _down_kernel[(latent // shape.out[1], count)](
        h, idx, *tiles, codes, scales, globals_, out, experts, first,
        K=inner, N=latent, **_cut(shape, 1), **common,
    )  # fmt: skip
    return out


def _cut(shape: Shape, which: int) -> dict[str, int]:
    """Settings of one product's launch."""
    warps = shape.warps[which]
    loop = {"AT_ONCE": shape.at_once[which], "STAGES": shape.stages[which]}
    return {"BN": shape.out[which], "WARPS": warps, "num_warps": warps, **loop}


def arranged_for(x_TM: Tensor, routes: int) -> Tensor:
    """Inputs [T, M] as packed experts take them for so many routes: in whole numbers, or GROUP by GROUP in the order of
    unpacked weights."""
    if routes <= ALONE:
        return gpu_alone.quantised_rows(x_TM)
    out, step, pdl = torch.empty_like(x_TM), _lowest_bit(x_TM.shape[1], 1024), overlaps(x_TM.device)
    grid, few = (len(x_TM), x_TM.shape[1] // step), is_few(routes)
    _arrange_kernel[grid](x_TM, out, FEW=few, K=x_TM.shape[1], STEP=step, PDL=pdl, launch_pdl=pdl, num_warps=4)
    return out


def _lowest_bit(n: int, most: int) -> int:
    """The largest power of two that divides n, `most` at most."""
    return min(n & -n, most)


def _parts(w: Weight) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Codes, scales, global scales and how many of those an expert has, and the format."""
    match w:
        case MXFP4(codes, scales):
            return codes.view(torch.int32), scales.view(torch.int32), scales, 1, 1
        case NVFP4(codes, scales, global_scale):
            return codes.view(torch.int32), scales.view(torch.int64), global_scale, global_scale.shape[-1], 2
        case _:
            return w, w, w, 1, 0


def why_not(u_TM: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> str:
    """Why these operands do not fit the kernels; "" if they do."""
    _, latent, inner = logical_shape(down_EMF)
    if u_TM.dtype != torch.bfloat16:
        return f"inputs are {u_TM.dtype}: bfloat16 alone"
    if latent % GROUP or inner % GROUP:
        return f"expert matrices are {inner} by {latent}: multiples of {GROUP} alone"
    if type(gate_up_EFM) is not type(down_EMF):
        return "gate_up and down are stored in different formats"
    parts = gate_up_EFM if isinstance(gate_up_EFM, (MXFP4, NVFP4)) else (gate_up_EFM,)
    if isinstance(gate_up_EFM, Tensor) and gate_up_EFM.dtype != torch.bfloat16:
        return f"experts are {gate_up_EFM.dtype}: bfloat16, MXFP4 and NVFP4 alone"
    for name, w, most in (("gate_up", gate_up_EFM, 2), ("down", down_EMF, 1)):
        if isinstance(w, NVFP4) and w.global_scale.shape[-1] > most:
            return f"{name} has {w.global_scale.shape[-1]} global scales an expert: {most} at most"
    both = (*parts, *(down_EMF if isinstance(down_EMF, (MXFP4, NVFP4)) else (down_EMF,)))
    return "" if all(part.is_contiguous() for part in both) else "expert matrices are not contiguous"


def _compiled(routes: int, packing: int) -> list[tuple[Any, ...]]:
    """Both products for a card that has 128 experts, a quarter of each, in MXFP4, NVFP4 or plain."""
    shape, is_alone, few = shape_of(routes, packing, 4096, 1024), routes <= ALONE, is_few(routes)
    codes, scales, globals_ = (("*bf16",) * 3, ("*i32", "*i32", "*u8"), ("*i32", "*i64", "*fp32"))[packing]
    tiles = dict.fromkeys(("order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i64" if is_alone else "*i32")
    types = {"idx_ptr": "*i64", **tiles, "codes_ptr": codes, "scales_ptr": scales, "global_ptr": globals_, "E": "i32"}
    types["first"] = "i32"
    common = {"FORMAT": packing, "ALONE": is_alone, "FEW": few, "ROWS": shape.rows, "PDL": True}
    first, second = _cut(shape, 0), _cut(shape, 1)
    options = [{"num_warps": cut.pop("num_warps"), "launch_pdl": True} for cut in (first, second)]
    parts = 2 if packing == NV.value else 1
    gate_up = {"R": 8, "K": 4096, "F": 1024, "PARTS": parts, **first, **common}
    down = {"K": 1024, "N": 4096, **second, **common}
    return [
        (_gate_up_kernel, {"x_ptr": "*bf16", "h_ptr": "*bf16", **types}, gate_up, options[0]),
        (_down_kernel, {"h_ptr": "*bf16", "out_ptr": "*bf16", **types}, down, options[1]),
    ]


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _arrange_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16"},
        {"FEW": True, "K": 4096, "STEP": 1024, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    *(entry for routes in (8, 64, 128, SORTED_HERE + 1) for packing in (MX.value, NV.value, PLAIN.value)
      if routes > ALONE or packing == PLAIN.value for entry in _compiled(routes, packing)),
]  # fmt: skip
