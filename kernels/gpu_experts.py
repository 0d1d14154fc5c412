"""Expert products by Triton: each touched expert's weights are read once, packed as they lie, unpacked in registers.

Routes are sorted by expert and stand in tiles of rows; one program multiplies some rows of one expert's matrix with one
tile. Gate and up with the activation between them are one launch, down another, after one that brings the inputs into
the order of the weights. A single token needs no sorting: each of its routes is a tile.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import dot, inputs_ready, overlaps, prefetch, rounded
from muse_fn.kernels.gpu_unpack import GROUP, column, e8m0, row_of, unpack
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, logical_shape

PLAIN, MX, NV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FEW_ROWS = 16  # rows of a tile while experts get few routes each: the least a matrix product takes
MANY_ROWS = 128  # of a tile when there are many
SORTED_HERE = 1024  # routes up to which one program sorts them


class Tiles(NamedTuple):
    """Routes by expert, in tiles of rows."""

    order_P: Tensor  # int32, routes sorted by expert, those of no expert here last
    expert_C: Tensor  # int32, the expert of each tile; -1 where there is none, and its routes' rows are zeros
    start_C: Tensor  # int32, its first place in the order
    count_C: Tensor  # int32, its routes; 0 for a tile that is not needed


@triton.jit
def _order_kernel(
    idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, P, E,
    PP: tl.constexpr, EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: PP, EE and CC are powers of two above the routes, the experts with one for "none", and the tiles."""
    inputs_ready(PDL)
    r = tl.arange(0, PP)
    e = tl.load(idx_ptr + r, mask=r < P, other=-1).to(tl.int32)
    e = tl.where((e < 0) | (e >= E), E, e)
    e = tl.where(r < P, e, E + 1)
    key = e * PP + r
    place = tl.zeros((PP,), tl.int32)
    count = tl.zeros((EE,), tl.int32)
    experts = tl.arange(0, EE)
    for first in range(0, PP, STEP):
        s = first + tl.arange(0, STEP)
        f = tl.load(idx_ptr + s, mask=s < P, other=-1).to(tl.int32)
        f = tl.where((f < 0) | (f >= E), E, f)
        f = tl.where(s < P, f, E + 1)
        place += tl.sum(((f * PP + s)[None, :] < key[:, None]).to(tl.int32), 1)
        count += tl.sum((f[None, :] == experts[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + place, r, mask=r < P)
    count = tl.where(experts <= E, count, 0)  # the rest is padding
    tiles = (count + ROWS - 1) // ROWS
    end_tile, end_row = tl.cumsum(tiles, 0), tl.cumsum(count, 0)
    # Tiles a few at once: all of them beside all experts would not fit into the registers.
    for first in range(0, CC, AT_ONCE):
        c = first + tl.arange(0, AT_ONCE)
        mine = (c[:, None] >= (end_tile - tiles)[None, :]) & (c[:, None] < end_tile[None, :])  # of one expert, or none
        number = c - tl.sum(tl.where(mine, (end_tile - tiles)[None, :], 0), 1)
        size = tl.sum(tl.where(mine, count[None, :], 0), 1)
        start = tl.sum(tl.where(mine, (end_row - count)[None, :], 0), 1) + number * ROWS
        expert = tl.sum(tl.where(mine, experts[None, :], 0), 1)
        left = tl.minimum(tl.maximum(size - number * ROWS, 0), ROWS)
        tl.store(expert_ptr + c, tl.where(expert < E, expert, -1))
        tl.store(start_ptr + c, start)
        tl.store(count_ptr + c, left)


def tiles_of(idx_TR: Tensor, experts: int, rows: int) -> Tiles:
    """Sizes by shapes alone: as many tiles as any routing can need."""
    routes = idx_TR.flatten()
    count, device = len(routes), idx_TR.device
    tiles = count // rows + min(experts + 1, count)
    if count > SORTED_HERE:
        return _tiles_by_sort(routes, experts, rows, tiles)
    padded = triton.next_power_of_2(tiles)
    order = torch.empty(count, dtype=torch.int32, device=device)
    found = [torch.empty(padded, dtype=torch.int32, device=device) for _ in range(3)]
    sizes = triton.next_power_of_2(count), triton.next_power_of_2(experts + 2), padded
    step = max(1, min(sizes[0], 32))
    pdl = overlaps(device)
    _order_kernel[(1,)](
        routes, order, *found, count, experts, *sizes, rows, step, min(padded, 32), PDL=pdl, launch_pdl=pdl, num_warps=8
    )
    return Tiles(order, *(x[:tiles] for x in found))


def _tiles_by_sort(routes: Tensor, experts: int, rows: int, tiles: int) -> Tiles:
    here = (routes >= 0) & (routes < experts)
    expert = torch.where(here, routes, experts)
    order = expert.argsort(stable=True)
    count = torch.zeros(experts + 1, dtype=torch.int64, device=routes.device)
    count = count.scatter_add(0, expert, torch.ones_like(expert))
    need = (count + rows - 1) // rows
    end_tile, end_row = need.cumsum(0), count.cumsum(0)
    c = torch.arange(tiles, device=routes.device)
    of = torch.searchsorted(end_tile, c, right=True)
    real, of = of <= experts, of.clamp_max(experts)
    number = c - (end_tile - need)[of]
    left = torch.where(real, (count[of] - number * rows).clamp(0, rows), 0)
    start = (end_row - count)[of] + number * rows
    ids = torch.where(real & (of < experts), of, -1)
    return Tiles(*(x.int() for x in (order, ids, start, left)))


@triton.jit
def _arrange_kernel(x_ptr, out_ptr, K: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """A row of inputs in the order of unpacked weights."""
    inputs_ready(PDL)
    row = tl.program_id(0).to(tl.int64) * K
    k = tl.program_id(1) * STEP + tl.arange(0, STEP)
    tl.store(out_ptr + row + (k & -128) + column(k & 127), tl.load(x_ptr + row + k))


@triton.jit
def _product(
    x_ptr, x_row, valid, codes_ptr, scales_ptr, row, K: tl.constexpr, FORMAT: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Matrix rows `row` int64 [BN] with the inputs of a tile -> float32 [BN, ROWS], its rows renumbered by `row_of`."""
    acc = tl.zeros((BN, ROWS), tl.float32)
    k, inputs = tl.arange(0, 64), x_row.to(tl.int64)[None, :] * K
    if FORMAT == PLAIN:
        for g in tl.range(0, K // 64, num_stages=STAGES):
            x = tl.load(x_ptr + inputs + g * 64 + k[:, None], mask=valid[None, :], other=0.0)
            acc = dot(tl.load(codes_ptr + row[:, None] * K + g * 64 + k[None, :]), x, acc)
    else:
        c = tl.arange(0, 16)
        # Two groups at once where registers allow: their codes are one line of memory.
        AT_ONCE: tl.constexpr = 2 if K % 256 == 0 and ROWS <= 16 else 1
        for step in tl.range(0, K // 128 // AT_ONCE, num_stages=STAGES):
            for n in tl.static_range(AT_ONCE):
                g = step * AT_ONCE + n
                even = tl.load(x_ptr + inputs + g * 128 + k[:, None], mask=valid[None, :], other=0.0)
                odd = tl.load(x_ptr + inputs + g * 128 + 64 + k[:, None], mask=valid[None, :], other=0.0)
                codes = tl.load(codes_ptr + row[:, None] * (K // 8) + g * 16 + c[None, :])
                low, high = unpack(codes, _scales(scales_ptr, row, g, K, FORMAT, BN), BN, WARPS)
                acc = dot(high, odd, dot(low, even, acc))
    return acc


@triton.jit
def _scales(scales_ptr, row, g, K: tl.constexpr, FORMAT: tl.constexpr, BN: tl.constexpr):
    """Scales of 128 inputs for every register of codes: bfloat16 twice in an int32 [BN, 16]."""
    if FORMAT == MX:
        four = tl.load(scales_ptr + row * (K // 128) + g)  # a byte for each 32 inputs
        byte = (four[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
        bits = tl.broadcast_to(e8m0(byte)[:, :, None], (BN, 4, 4))
    else:
        block = tl.arange(0, 8)
        scale = tl.load(scales_ptr + row[:, None] * (K // 16) + g * 8 + block[None, :]).to(tl.float32)
        bits = scale.to(tl.int32, bitcast=True)
        bits = (bits & -65536) | ((bits >> 16) & 0xFFFF)  # float8 is exact in bfloat16
        bits = tl.broadcast_to(bits[:, :, None], (BN, 8, 2))
    return tl.reshape(bits, (BN, 16))


@triton.jit
def _ask_for(codes_ptr, scales_ptr, row, K: tl.constexpr):
    """The codes and scales of some rows, line by line of 128 bytes."""
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, 256))
    at = tl.minimum(tl.arange(0, lines) * 32, K // 8 - 1)
    prefetch(codes_ptr + row[:, None] * (K // 8) + at[None, :])
    prefetch(scales_ptr + row * (K // 128))


@triton.jit
def _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tile, E, ALONE: tl.constexpr):
    """The expert (-1: none here), the first place and the number of routes of a tile."""
    if ALONE:
        expert = tl.load(idx_ptr + tile).to(tl.int32)
        expert = tl.where((expert < 0) | (expert >= E), -1, expert)
        start, count = tile, 1
    else:
        expert, start, count = tl.load(expert_ptr + tile), tl.load(start_ptr + tile), tl.load(count_ptr + tile)
    return expert, start, count


@triton.jit
def _gate_up_kernel(
    x_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, E,
    R: tl.constexpr, K: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of BN / 2 inner columns for one tile -> bfloat16 [P, F] by place, arranged for down."""
    if FORMAT == PLAIN:
        inputs_ready(PDL)  # otherwise the inputs are arranged between the tiles and this
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tl.program_id(1), E, ALONE)
    # In every 16 * WARPS rows the first half are gate rows, the second half the same columns' up rows.
    r = tl.arange(0, BN)
    HALF: tl.constexpr = 8 * WARPS
    n = tl.program_id(0) * (BN // 2) + (r // (2 * HALF)) * HALF + r % HALF
    row = tl.maximum(expert, 0).to(tl.int64) * (2 * F) + n + ((r // HALF) % 2) * F
    if FORMAT != PLAIN:
        if ALONE and FORMAT == MX and PDL:
            _ask_for(codes_ptr, scales_ptr, row, K)
        inputs_ready(PDL)
    if (expert < 0) | (count == 0):
        return
    m = tl.arange(0, ROWS)
    valid = m < count
    place = tl.where(valid, start + m, 0)
    if ALONE:
        token = place // R
    else:
        token = tl.load(order_ptr + place, mask=valid, other=0) // R
    both = _product(x_ptr, token, valid, codes_ptr, scales_ptr, row, K, FORMAT, BN, ROWS, WARPS, STAGES)
    if FORMAT == PLAIN:
        both = tl.permute(tl.reshape(both, (BN // (2 * HALF), 2, HALF, ROWS)), (0, 2, 3, 1))
    else:
        both = tl.reshape(both, (BN // (2 * HALF), WARPS, 2, 8, ROWS))
        both = tl.permute(both, (0, 1, 3, 4, 2))
    gate, up = tl.split(tl.reshape(both, (BN // 2, ROWS, 2)))
    if FORMAT == NV:
        gate *= tl.load(global_ptr + expert * PARTS)
        up *= tl.load(global_ptr + expert * PARTS + PARTS - 1)
    h = gate / (1.0 + tl.exp(-gate)) * up
    f = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    if FORMAT != PLAIN:
        f = (f & -128) + column(f & 127)
    tl.store(h_ptr + place[None, :].to(tl.int64) * F + f[:, None], rounded(h, tl.bfloat16), mask=valid[None, :])


@triton.jit
def _down_kernel(
    h_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, E,
    K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of down for one tile -> bfloat16 [P, N] by route; zeros for routes of no expert here."""
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tl.program_id(1), E, ALONE)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.maximum(expert, 0).to(tl.int64) * N + n
    if ALONE and FORMAT == MX and PDL:
        _ask_for(codes_ptr, scales_ptr, row, K)
    inputs_ready(PDL)
    if count == 0:
        return
    m = tl.arange(0, ROWS)
    valid = m < count
    place = tl.where(valid, start + m, 0)
    if ALONE:
        route = place
    else:
        route = tl.load(order_ptr + place, mask=valid, other=0)
    out = tl.zeros((BN, ROWS), tl.float32)
    if expert >= 0:
        out = _product(h_ptr, place, valid, codes_ptr, scales_ptr, row, K, FORMAT, BN, ROWS, WARPS, STAGES)
        if FORMAT == NV:
            out *= tl.load(global_ptr + expert)
    if FORMAT != PLAIN:
        n = tl.program_id(0) * BN + row_of(tl.arange(0, BN), BN, WARPS)
    to = route[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out_ptr + to, rounded(out, tl.bfloat16), mask=valid[None, :])


class Shape(NamedTuple):
    """How the launches cut their work."""

    rows: int  # of a tile of routes
    out: tuple[int, int]  # rows of gate and up, and of down, that one program takes
    warps: int
    stages: tuple[int, int]  # of the loop of each product


def shape_of(routes: int) -> Shape:
    """By the number of routes alone."""
    return Shape(MANY_ROWS, (128, 128), 4, (3, 2)) if routes > SORTED_HERE else Shape(FEW_ROWS, (64, 64), 4, (3, 3))


def expert_rows(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """reference.expert_rows for bfloat16 inputs; `why_not` says what does not fit. Sums in float32, the activation is
    not rounded before it is multiplied."""
    experts, latent, inner = logical_shape(down_EMF)
    device, (tokens, top_k) = u_TM.device, idx_TR.shape
    routes = tokens * top_k
    out = torch.empty(tokens, top_k, latent, dtype=torch.bfloat16, device=device)
    if not routes:
        return out
    shape, pdl, idx = shape_of(routes), overlaps(device), idx_TR.contiguous()
    is_alone = tokens == 1
    tiles = Tiles(idx, idx, idx, idx) if is_alone else tiles_of(idx, experts, shape.rows)
    count = routes if is_alone else len(tiles.expert_C)
    codes, scales, globals_, parts, form = _parts(gate_up_EFM)
    x = u_TM.contiguous() if form == 0 else arranged(u_TM.contiguous())
    h = torch.empty(routes, inner, dtype=torch.bfloat16, device=device)
    common = {"FORMAT": form, "ALONE": is_alone, "ROWS": shape.rows, "WARPS": shape.warps}
    launch = {"num_warps": shape.warps, "PDL": pdl, "launch_pdl": pdl}
    _gate_up_kernel[(2 * inner // shape.out[0], count)](
        x, idx, *tiles, codes, scales, globals_, h, experts,
        R=top_k, K=latent, F=inner, PARTS=parts, BN=shape.out[0], STAGES=shape.stages[0], **common, **launch,
    )  # fmt: skip
    codes, scales, globals_, _, form = _parts(down_EMF)
    _down_kernel[(latent // shape.out[1], count)](
        h, idx, *tiles, codes, scales, globals_, out, experts,
        K=inner, N=latent, BN=shape.out[1], STAGES=shape.stages[1], **common, **launch,
    )  # fmt: skip
    return out


def arranged(x_TM: Tensor) -> Tensor:
    """Inputs [T, M] in the order of unpacked weights, GROUP by GROUP."""
    out, step, pdl = torch.empty_like(x_TM), _lowest_bit(x_TM.shape[1], 1024), overlaps(x_TM.device)
    grid = len(x_TM), x_TM.shape[1] // step
    _arrange_kernel[grid](x_TM, out, K=x_TM.shape[1], STEP=step, PDL=pdl, launch_pdl=pdl, num_warps=4)
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
            return codes.view(torch.int32), scales, global_scale, global_scale.shape[-1], 2
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


def _compiled(routes: int, packing: int, is_alone: bool = False) -> list[tuple[Any, ...]]:
    """Both products for a card that has 128 experts, a quarter of each, in MXFP4, NVFP4 or plain."""
    shape = shape_of(routes)
    codes, scales, globals_ = (("*bf16",) * 3, ("*i32", "*i32", "*u8"), ("*i32", "*fp8e4nv", "*fp32"))[packing]
    tiles = dict.fromkeys(("order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i64" if is_alone else "*i32")
    types = {"idx_ptr": "*i64", **tiles, "codes_ptr": codes, "scales_ptr": scales, "global_ptr": globals_, "E": "i32"}
    common = {"FORMAT": packing, "ALONE": is_alone, "ROWS": shape.rows, "WARPS": shape.warps, "PDL": True}
    options = {"num_warps": shape.warps, "launch_pdl": True}
    gate_up = {
        "R": 8,
        "K": 4096,
        "F": 1024,
        "PARTS": 2 if packing == NV.value else 1,
        "BN": shape.out[0],
        "STAGES": shape.stages[0],
        **common,
    }
    down = {"K": 1024, "N": 4096, "BN": shape.out[1], "STAGES": shape.stages[1], **common}
    return [
        (_gate_up_kernel, {"x_ptr": "*bf16", "h_ptr": "*bf16", **types}, gate_up, options),
        (_down_kernel, {"h_ptr": "*bf16", "out_ptr": "*bf16", **types}, down, options),
    ]


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _order_kernel,
        {"idx_ptr": "*i64", **dict.fromkeys(("order_ptr", "expert_ptr", "start_ptr", "count_ptr"), "*i32"),
         "P": "i32", "E": "i32"},
        {"PP": 1024, "EE": 256, "CC": 256, "ROWS": FEW_ROWS, "STEP": 32, "AT_ONCE": 32, "PDL": True},
        {"num_warps": 8, "launch_pdl": True},
    ),
    (
        _arrange_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16"},
        {"K": 4096, "STEP": 1024, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    *_compiled(8, MX.value, is_alone=True),
    *(entry for routes in (128, SORTED_HERE + 1) for packing in (MX.value, NV.value, PLAIN.value)
      for entry in _compiled(routes, packing)),
]  # fmt: skip
