"""Expert products by Triton: each touched expert's weights are read once, packed as they lie, unpacked in registers.

Routes are sorted by expert and stand in tiles of rows; one program multiplies some rows of one expert's matrix with one
tile. Two launches: gate and up with the activation between them, then down. A single token needs no sorting: each of
its routes is a tile. With few programs the first launch splits its sum, and the second adds the parts in order.
"""

# pyright: basic
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import dot, inputs_ready, outputs_coming, overlaps, processors
from muse_fn.kernels.gpu_unpack import column, e8m0, unpack
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
    PP: tl.constexpr, EE: tl.constexpr, CC: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
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
    c = tl.arange(0, CC)
    mine = (c[:, None] >= (end_tile - tiles)[None, :]) & (c[:, None] < end_tile[None, :])  # one expert a tile, or none
    number = c - tl.sum(tl.where(mine, (end_tile - tiles)[None, :], 0), 1)
    size = tl.sum(tl.where(mine, count[None, :], 0), 1)
    start = tl.sum(tl.where(mine, (end_row - count)[None, :], 0), 1) + number * ROWS
    expert = tl.sum(tl.where(mine, experts[None, :], 0), 1)
    left = tl.minimum(tl.maximum(size - number * ROWS, 0), ROWS)
    tl.store(expert_ptr + c, tl.where(expert < E, expert, -1))
    tl.store(start_ptr + c, start)
    tl.store(count_ptr + c, left)
    outputs_coming(PDL)


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
    _order_kernel[(1,)](routes, order, *found, count, experts, *sizes, rows, step, PDL=pdl, launch_pdl=pdl, num_warps=8)
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
def _pair(x_ptr, row, j, valid, STRIDE: tl.constexpr):
    """The inputs 2j and 2j + 1 of some rows of bfloat16, in the order of unpacked weights -> two tiles [J, rows]."""
    at = row[None, :].to(tl.int64) * STRIDE + column(j)[:, None]
    both = tl.load(x_ptr + at, mask=valid[None, :], other=0)
    low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _weights(codes_ptr, scales_ptr, row, j, FORMAT: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr):
    """Rows `row` int64 [BN] of a matrix, bytes j: the even and the odd inputs' weights [BN, BJ]."""
    PER: tl.constexpr = 16 if FORMAT == MX else 8  # bytes of a scale
    if FORMAT == PLAIN:
        both = tl.load(codes_ptr + row[:, None] * J + column(j)[None, :])  # two bfloat16 at once
        low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        codes = tl.load(codes_ptr + row[:, None] * J + j[None, :])
        block = tl.min(j, 0) // PER + tl.arange(0, BJ // PER)
        scale = tl.load(scales_ptr + row[:, None] * (J // PER) + block[None, :])
        if FORMAT == MX:
            scale = e8m0(scale)
        else:
            scale = scale.to(tl.float32).to(tl.bfloat16)
        low, high = unpack(codes, scale, BN, BJ, PER)
    return low, high


@triton.jit
def _gate_up_kernel(
    u_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, P, E,
    R: tl.constexpr, J: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    SPLITS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of BN rows for one tile -> bfloat16 [P, F] by place; with SPLITS float32 parts [S, P, 2F]."""
    inputs_ready(PDL)
    tile = tl.program_id(1)
    n = (tl.program_id(0) % (F // BN)) * BN + tl.arange(0, BN)
    split = tl.program_id(0) // (F // BN)
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tile, E, ALONE)
    if (expert < 0) | (count == 0):
        return
    m = tl.arange(0, ROWS)
    valid = m < count
    place = tl.where(valid, start + m, 0)
    if ALONE:
        token = place // R
    else:
        token = tl.load(order_ptr + place, mask=valid, other=0) // R
    first = expert.to(tl.int64) * (2 * F)
    gate, up = tl.zeros((BN, ROWS), tl.float32), tl.zeros((BN, ROWS), tl.float32)
    for step in range(0, J // SPLITS, BJ):
        j = split * (J // SPLITS) + step + tl.arange(0, BJ)
        even, odd = _pair(u_ptr, token, j, valid, J)
        low, high = _weights(codes_ptr, scales_ptr, first + n, j, FORMAT, J, BN, BJ)
        gate = dot(high, odd, dot(low, even, gate))
        low, high = _weights(codes_ptr, scales_ptr, first + F + n, j, FORMAT, J, BN, BJ)
        up = dot(high, odd, dot(low, even, up))
    if FORMAT == NV:
        gate *= tl.load(global_ptr + expert * PARTS)
        up *= tl.load(global_ptr + expert * PARTS + PARTS - 1)
    if SPLITS == 1:
        h = gate / (1.0 + tl.exp(-gate)) * up
        to = place[None, :].to(tl.int64) * F + n[:, None]
        tl.store(out_ptr + to, h.to(tl.bfloat16), mask=valid[None, :])
    else:
        to = (split.to(tl.int64) * P + place[None, :]) * (2 * F) + n[:, None]
        tl.store(out_ptr + to, gate, mask=valid[None, :])
        tl.store(out_ptr + to + F, up, mask=valid[None, :])
    outputs_coming(PDL)


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
def _activated(part_ptr, place, f, valid, P, F: tl.constexpr, SPLITS: tl.constexpr):
    """silu(gate) * up of inner columns f from the parts of their sums -> bfloat16 [J, rows]."""
    at = place[None, :].to(tl.int64) * (2 * F) + f[:, None]
    gate = tl.zeros(at.shape, tl.float32)
    up = tl.zeros(at.shape, tl.float32)
    for s in tl.static_range(SPLITS):
        shift = s * P.to(tl.int64) * (2 * F)
        gate += tl.load(part_ptr + shift + at, mask=valid[None, :], other=0.0)
        up += tl.load(part_ptr + shift + F + at, mask=valid[None, :], other=0.0)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@triton.jit
def _down_kernel(
    h_ptr, idx_ptr, order_ptr, expert_ptr, start_ptr, count_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, P, E,
    N: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, ALONE: tl.constexpr,
    SPLITS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of down for one tile -> bfloat16 [P, N] by route; zeros for routes of no expert here."""
    inputs_ready(PDL)
    tile = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, start, count = _tile(idx_ptr, expert_ptr, start_ptr, count_ptr, tile, E, ALONE)
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
        first = expert.to(tl.int64) * N
        for step in range(0, J, BJ):
            j = step + tl.arange(0, BJ)
            if SPLITS == 1:
                even, odd = _pair(h_ptr, place, j, valid, J)
            else:
                even = _activated(h_ptr, place, 2 * column(j), valid, P, 2 * J, SPLITS)
                odd = _activated(h_ptr, place, 2 * column(j) + 1, valid, P, 2 * J, SPLITS)
            low, high = _weights(codes_ptr, scales_ptr, first + n, j, FORMAT, J, BN, BJ)
            out = dot(high, odd, dot(low, even, out))
        if FORMAT == NV:
            out *= tl.load(global_ptr + expert * PARTS)
    to = route[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out_ptr + to, out.to(tl.bfloat16), mask=valid[None, :])
    outputs_coming(PDL)


class Shape(NamedTuple):
    """How the two launches cut their work."""

    rows: int  # of a tile
    splits: int  # of gate and up's sum
    out: tuple[int, int]  # rows of gate and up, and of down, that one program takes
    step: tuple[int, int]  # bytes of such a row at once
    warps: int
    stages: int


def shape_of(routes: int, tokens: int, latent: int, inner: int, multiprocessors: int) -> Shape:
    """By sizes alone. Few tokens: as many programs as keep the memory busy. Many: large tiles."""
    if routes > SORTED_HERE:
        return Shape(MANY_ROWS, 1, (64, 128), (64, 64), 8, 3)
    splits, steps = 1, latent // 2 // 128
    programs = routes * inner // 64
    while (
        tokens <= 2 and splits < 4 and steps and steps % (2 * splits) == 0 and programs * splits < 4 * multiprocessors
    ):
        splits *= 2
    return Shape(FEW_ROWS, splits, (64, 64), (128, 128), 4, 3)


def expert_rows(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """reference.expert_rows for bfloat16 inputs; `why_not` says what does not fit. Sums in float32, the activation is
    not rounded before it is multiplied."""
    experts, latent, inner = logical_shape(down_EMF)
    device, (tokens, top_k) = u_TM.device, idx_TR.shape
    routes = tokens * top_k
    out = torch.empty(tokens, top_k, latent, dtype=torch.bfloat16, device=device)
    if not routes:
        return out
    shape = _fitted(shape_of(routes, tokens, latent, inner, processors(device)), latent, inner)
    is_alone = tokens == 1
    idx = idx_TR.contiguous()
    tiles = Tiles(idx, idx, idx, idx) if is_alone else tiles_of(idx, experts, shape.rows)
    count = routes if is_alone else len(tiles.expert_C)
    parts = (shape.splits, routes, 2 * inner) if shape.splits > 1 else (routes, inner)
    h = torch.empty(parts, dtype=torch.float32 if shape.splits > 1 else torch.bfloat16, device=device)
    pdl = overlaps(device)
    launch = {"num_warps": shape.warps, "num_stages": shape.stages, "PDL": pdl, "launch_pdl": pdl}
    common = (idx, *tiles)
    codes, scales, globals_, parts_, form = _parts(gate_up_EFM)
    _gate_up_kernel[(inner // shape.out[0] * shape.splits, count)](
        u_TM.contiguous().view(torch.int32), *common, codes, scales, globals_, h, routes, experts,
        R=top_k, J=latent // 2, F=inner, PARTS=parts_, FORMAT=form, ALONE=is_alone, SPLITS=shape.splits,
        BN=shape.out[0], BJ=shape.step[0], ROWS=shape.rows, **launch,
    )  # fmt: skip
    codes, scales, globals_, parts_, form = _parts(down_EMF)
    _down_kernel[(latent // shape.out[1], count)](
        h if shape.splits > 1 else h.view(torch.int32), *common, codes, scales, globals_, out, routes, experts,
        N=latent, J=inner // 2, PARTS=parts_, FORMAT=form, ALONE=is_alone, SPLITS=shape.splits,
        BN=shape.out[1], BJ=shape.step[1], ROWS=shape.rows, **launch,
    )  # fmt: skip
    return out


def _parts(w: Weight) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Codes, scales, global scales and how many of those an expert has, and the format."""
    match w:
        case MXFP4(codes, scales):
            return codes, scales, scales, 1, 1
        case NVFP4(codes, scales, global_scale):
            return codes, scales, global_scale, global_scale.shape[-1], 2
        case _:
            return w.view(torch.int32), w, w, 1, 0


def _fitted(shape: Shape, latent: int, inner: int) -> Shape:
    """Cut down to a small model's widths, which are powers of two times 32."""
    out = min(shape.out[0], inner & -inner), min(shape.out[1], latent & -latent)
    step = (min(shape.step[0], (latent // 2 // shape.splits) & -(latent // 2 // shape.splits)),
            min(shape.step[1], (inner // 2) & -(inner // 2)))  # fmt: skip
    return shape._replace(out=out, step=step)


def why_not(u_TM: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> str:
    """Why these operands do not fit the kernels; "" if they do."""
    _, latent, inner = logical_shape(down_EMF)
    if u_TM.dtype != torch.bfloat16:
        return f"inputs are {u_TM.dtype}: bfloat16 alone"
    if latent % 32 or inner % 32:
        return f"expert matrices are {inner} by {latent}: multiples of 32 alone"
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
