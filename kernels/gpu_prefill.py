"""Attention of many new tokens: tiles of queries over tiles of keys, in an arena under a block table or in one array.

The rows of a tile are the query heads of one KV head at a few tokens, so that windows and triangles cut little off.
Tiles of keys that no row sees are left out; those that all rows see in full go without a mask. Source: online softmax
(Milakov and Gimelshein, 2018); tiling as in flash attention (Dao et al.). Float32 within 1e-5 of the reference,
relative to the largest; bfloat16 within 2**-6.
"""

# pyright: basic
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import WARPS, bound, dot, inputs_ready, options
from muse_fn.kernels.gpu_attention import (
    NOWHERE,
    absorb,
    leave,
    scale_of,
    split_count,
    why_no_tiles,
    workspace,
)
from muse_fn.kernels.gpu_merge import merge

ROWS, EXACT_ROWS = 128, 32  # of a tile of queries; products of float32 do not run on tensor cores and take registers
KEYS, EXACT_KEYS = 64, 32  # of a tile of keys
STAGES = 3  # of positions and tables, then of K and V; with more, registers do not suffice for two programs
FEWEST_TILES = 32  # of keys for a program, where those of a tile of queries are split
LOOKED_AT = tl.constexpr(1024)  # tiles whose bounds a program reads together


def why_not(q_BTND: Tensor, k: Tensor, v: Tensor) -> str:
    """Why `attend_blocks` (arenas) and `attend` (keys and values [B, S, K, D]) cannot take these; "" if they can."""
    group, rest = divmod(q_BTND.shape[2], k.shape[2])
    if rest or group > _sizes(q_BTND)[0]:
        return f"{group} heads to a KV head: at most {_sizes(q_BTND)[0]}"
    return why_no_tiles(q_BTND, k, v)


@triton.jit(do_not_specialize=["S", "tiles"])
def _bounds_kernel(k_pos, bounds, S, tiles, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):
    """Of each tile of keys: lowest and highest position, and -1 if a place is empty, else the lowest again."""
    inputs_ready(PDL)
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILES + tl.arange(0, TILES)
    s = i[:, None] * TILE + tl.arange(0, TILE)[None, :]
    pos = tl.load(k_pos + b * S + s, mask=s < S, other=-1).to(tl.int32)
    at = bounds + b * 3 * tiles + i
    tl.store(at, tl.min(tl.where(pos >= 0, pos, NOWHERE), 1), mask=i < tiles)
    tl.store(at + tiles, tl.max(pos, 1), mask=i < tiles)
    tl.store(at + 2 * tiles, tl.min(pos, 1), mask=i < tiles)


@triton.jit
def _seen_range(bounds, tiles, oldest, newest):
    """First tile with a key that may be seen at a position from oldest to newest, and the one after the last."""
    first, end = tiles, 0
    for start in range(0, bound(tiles), LOOKED_AT):
        i = start + tl.arange(0, LOOKED_AT)
        lowest = tl.load(bounds + i, mask=i < tiles, other=NOWHERE)
        seen = (lowest <= newest) & (tl.load(bounds + tiles + i, mask=i < tiles, other=-1) >= oldest)
        first = tl.minimum(first, tl.min(tl.where(seen, i, tiles)))
        end = tl.maximum(end, tl.max(tl.where(seen, i + 1, 0)))
    return first, end


@triton.jit
def _full_range(bounds, tiles, first, end, oldest, newest):
    """The first run of tiles whose keys all have positions from oldest to newest."""
    begin, after = end, end
    for start in range(bound(first), bound(end), LOOKED_AT):
        i = start + tl.arange(0, LOOKED_AT)
        highest = tl.load(bounds + tiles + i, mask=i < end, other=-1)
        full = (tl.load(bounds + 2 * tiles + i, mask=i < end, other=-1) >= oldest) & (highest <= newest)
        begin = tl.minimum(begin, tl.min(tl.where(full, i, end)))
        after = tl.minimum(after, tl.min(tl.where((i > begin) & (full == 0), i, end)))
    return begin, after


@triton.jit
def _offsets(table, tile, s, S, stride, row, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Where the keys s of a tile lie: elements from the start of an arena, or of a sequence if BLOCK is 0."""
    if BLOCK == 0:
        at = s.to(tl.int64) * row
    elif BLOCK % KEYS == 0:
        start = tile * KEYS
        at = tl.load(table + start // BLOCK).to(tl.int64) * stride + (start % BLOCK + (s - start)) * row
    else:
        at = tl.load(table + s // BLOCK, mask=s < S, other=0).to(tl.int64) * stride + s % BLOCK * row
    return at


@triton.jit
def _run(
    acc, top, total, q_RD, i, first, count, gap_at, gap, k, v, table, k_pos, S, k_block, k_row, v_block, v_row,
    D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`count` tiles from `first` on, leaving out the `gap` from `gap_at` on, into the running sums."""
    d = tl.arange(0, q_RD.shape[1])
    for step in tl.range(0, bound(count), num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        tile = first + step
        if MASKED:
            tile += tl.where(tile >= gap_at, gap, 0)
        s = tile * KEYS + tl.arange(0, KEYS)
        k_at = _offsets(table, tile, s, S, k_block, k_row, BLOCK, KEYS)[:, None] + d[None, :]
        v_at = _offsets(table, tile, s, S, v_block, v_row, BLOCK, KEYS)[:, None] + d[None, :]
        if MASKED:
            j = tl.load(k_pos + s, mask=s < S, other=-1).to(tl.int32)
            there = (j >= 0)[:, None] & (d < D)[None, :]
            k_SD, v_SD = tl.load(k + k_at, mask=there, other=0.0), tl.load(v + v_at, mask=there, other=0.0)
        elif q_RD.shape[1] == D:
            k_SD, v_SD = tl.load(k + k_at), tl.load(v + v_at)
        else:
            there = (d < D)[None, :]
            k_SD, v_SD = tl.load(k + k_at, mask=there, other=0.0), tl.load(v + v_at, mask=there, other=0.0)
        raw = dot(q_RD, k_SD.to(q_RD.dtype).T, tl.zeros([q_RD.shape[0], KEYS], tl.float32))
        if MASKED:
            seen = (j >= 0)[None, :] & (j[None, :] <= i[:, None])
            if WINDOW:
                seen = seen & (j[None, :] > i[:, None] - WINDOW)
            raw = tl.where(seen, raw, float("-inf"))
        acc, top, total = absorb(raw, v_SD.to(q_RD.dtype), acc, top, total, SCALE)
    return acc, top, total


@triton.jit(do_not_specialize=["T", "S", "B", "columns", "tiles", "splits"])
def _prefill_kernel(
    q, k, v, table, q_pos, k_pos, bounds, out, sums, T, S, B, columns, tiles, splits,
    q_b, q_t, q_n, k_block, k_row, k_head, v_block, v_row, v_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows, all query heads of a KV head at a few tokens, and one split of the tiles of keys it sees."""
    inputs_ready(PDL)
    # The last tokens see most, so their tiles start first.
    tile = tl.cdiv(T, ROWS // GROUP) - 1 - tl.program_id(0) // (HEADS * B)
    head, b = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS % B).to(tl.int64)
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    t, n = tile * (ROWS // GROUP) + r // GROUP, head * GROUP + r % GROUP
    real = (t < T) & (r < ROWS // GROUP * GROUP)
    mine = real[:, None] & (d < D)[None, :]
    q_RD = tl.load(q + b * q_b + (t.to(tl.int64) * q_t + n * q_n)[:, None] + d[None, :], mask=mine, other=0.0)
    i = tl.load(q_pos + b * T + t, mask=real, other=-1).to(tl.int32)
    low, high = tl.min(tl.where(real, i, NOWHERE)), tl.max(i)
    bounds += b * 3 * tiles
    first, end = _seen_range(bounds, tiles, tl.maximum(low - WINDOW + 1, 0) if WINDOW else 0, high)
    share = tl.cdiv(tl.maximum(end - first, 0), splits)
    first = tl.minimum(first + tl.program_id(1) * share, end)
    end = tl.minimum(first + share, end)
    begin, after = _full_range(bounds, tiles, first, end, tl.maximum(high - WINDOW + 1, 0) if WINDOW else 0, low)
    k_pos += b * S
    table += b * columns
    k += head * k_head + (0 if BLOCK else b * k_block)
    v += head * v_head + (0 if BLOCK else b * v_block)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc, top, total = _run(
        acc, top, total, q_RD, i, begin, after - begin, 0, 0, k, v, table, k_pos, S, k_block, k_row, v_block, v_row,
        D, BLOCK, WINDOW, SCALE, KEYS, STAGES, False,
    )  # fmt: skip
    acc, top, total = _run(
        acc, top, total, q_RD, i, first, end - first - (after - begin), begin, after - begin, k, v, table, k_pos, S,
        k_block, k_row, v_block, v_row, D, BLOCK, WINDOW, SCALE, KEYS, STAGES, True,
    )  # fmt: skip
    row = (b * T + t) * (HEADS * GROUP) + n
    leave(out, sums, row, tl.program_id(1), splits, real, mine, d[None, :], acc, top, total, D, PARTS)


def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend_blocks for what `why_not` lets pass; zeros for a query that sees nothing.

    Positions below 2**31. Fewer than 2**31 rows of queries and heads, as for any grid.
    """
    del is_start
    return _attend(q_BTND, k_arena, v_arena, blocks_BC.contiguous(), q_pos_BT, k_pos_BS, window, k_arena.shape[1])


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend for what `why_not` lets pass; zeros for a query that sees nothing. Positions below 2**31."""
    del is_start
    return _attend(q_BTND, k_BSKD, v_BSKD, k_pos_BS, q_pos_BT, k_pos_BS, window, 0)


def _attend(
    q_BTND: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    block: int,
) -> Tensor:
    batch, length, count, width = q_BTND.shape
    heads, keys = k.shape[2], k_pos_BS.shape[1]
    if not q_BTND.numel() or not keys:
        return torch.zeros(q_BTND.shape, dtype=q_BTND.dtype, device=q_BTND.device)
    rows, tile = _sizes(q_BTND)
    k_pos_BS, tiles = k_pos_BS.contiguous(), -(-keys // tile)
    bounds = _bounds(k_pos_BS, tiles, tile)
    programs = -(-length // (rows // (count // heads))) * heads * batch
    splits = split_count(programs, q_BTND.numel() // width, width, -(-tiles // FEWEST_TILES), q_BTND.device)
    out, parts, sums = workspace(q_BTND, splits)
    shape = _shape(count // heads, heads, width, rows, tile)
    shape |= {"BLOCK": block, "WINDOW": window, "PARTS": splits > 1}
    strides: tuple[Any, ...] = (*q_BTND.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    _prefill_kernel[(programs, splits)](
        q_BTND, k, v, table, q_pos_BT.contiguous(), k_pos_BS, bounds, parts, sums, length, keys, batch, table.shape[1],
        tiles, splits, *strides, **options(out.device, num_warps=WARPS if width <= 64 else 2 * WARPS, **shape),
    )  # fmt: skip
    if splits > 1:
        merge(parts, sums, out)
    return out


def _bounds(k_pos_BS: Tensor, tiles: int, tile: int) -> Tensor:
    """int32 [B, 3, tiles]: see `_bounds_kernel`."""
    batch = len(k_pos_BS)
    bounds = torch.empty(batch, 3, tiles, dtype=torch.int32, device=k_pos_BS.device)
    sizes = options(k_pos_BS.device, TILE=tile, TILES=16)
    _bounds_kernel[(-(-tiles // 16), batch)](k_pos_BS, bounds, k_pos_BS.shape[1], tiles, **sizes)
    return bounds


def _sizes(q_BTND: Tensor) -> tuple[int, int]:
    """Rows of a tile of queries, and keys of a tile."""
    if q_BTND.dtype == torch.float32:
        return EXACT_ROWS, EXACT_KEYS
    return ROWS, KEYS if q_BTND.shape[3] <= 128 else EXACT_KEYS


def _shape(group: int, heads: int, width: int, rows: int, tile: int) -> dict[str, Any]:
    sizes = {"ROWS": rows, "WIDTH": max(16, triton.next_power_of_2(width)), "KEYS": tile, "STAGES": STAGES}
    return {"GROUP": group, "HEADS": heads, "D": width, "SCALE": scale_of(width), **sizes}


_OPTIONS = {"num_warps": WARPS, "launch_pdl": True}
_POINTERS = {"q": "*bf16", "table": "*i64", "q_pos": "*i64", "k_pos": "*i64", "bounds": "*i32"}
_SIZES = dict.fromkeys(("T", "S", "B", "columns", "tiles", "splits"), "i32")
_CONSTANTS = {
    **_shape(8, 2, 64, ROWS, KEYS), "BLOCK": 128, "WINDOW": 0, "PARTS": False, "PDL": True,
    "q_b": 1 << 20, "q_t": 1024, "q_n": 64,
    **{f"{side}_{name}": n for side in "kv" for name, n in (("block", 16384), ("row", 128), ("head", 64))},
}  # fmt: skip
COMPILED = [
    (
        _prefill_kernel,
        {**_POINTERS, "k": cache, "v": cache, "out": out, "sums": "*fp32", **_SIZES},
        {**_CONSTANTS, **changed},
        _OPTIONS,
    )
    for cache, out, changed in (
        ("*bf16", "*bf16", {}),
        ("*bf16", "*bf16", {"BLOCK": 16, "WINDOW": 2048}),
        ("*bf16", "*bf16", {"BLOCK": 0, "WINDOW": 2048}),
        ("*bf16", "*fp32", {"PARTS": True}),
        ("*fp8e4nv", "*bf16", {}),
    )
] + [
    (
        _bounds_kernel,
        {"k_pos": "*i64", "bounds": "*i32", "S": "i32", "tiles": "i32"},
        {"TILE": KEYS, "TILES": 16, "PDL": True},
        _OPTIONS,
    )
]
