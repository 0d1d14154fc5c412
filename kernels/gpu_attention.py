"""Attention of few new tokens over a paged context: keys read where they lie, by many programs, merged by their sums.

A program takes every n-th tile of a sequence's keys, so that all have alike much to do wherever the context ends in its
table. Source: online softmax (Milakov and Gimelshein, 2018); splitting over keys as in flash decoding (Dao et al.).
Float32 within 1e-5 of the reference, relative to the largest; bfloat16 within 2**-6.
"""

# pyright: basic, reportGeneralTypeIssues=false
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu
from muse_fn.kernels.gpu import WARPS, bound, dot, inputs_ready, options, processors
from muse_fn.kernels.gpu_merge import merge
from muse_fn.kernels.streamed import WORKSPACE

MOST_ROWS, MOST_EXACT_ROWS = 64, 16  # heads of a group times new tokens: rows of a tile; of float32, in registers
TILE_BYTES = 16 << 10  # of K, and as many of V
STAGES, STAGES_OF_MANY = 7, 5  # half of positions and tables, then of K and V: two programs fit on a processor
PROGRAMS = 2  # per processor
SMALL_PROGRAMS = 5  # the same if none has more than one tile: nothing is then gained by having more than one on its way
FEWEST_KEYS = 64  # of a program; a short context waits for one tile and not for two
SCANNED = 4096  # positions that a program looks at together
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OLDEST_FLOAT8 = (8, 9)  # compute capability from which float8 is converted
NOWHERE = tl.constexpr(2**31 - 1)


def why_not(q_BTND: Tensor, k_arena: Tensor, v_arena: Tensor) -> str:
    """Why `attend_blocks` cannot take these; "" if it can."""
    group, rest = divmod(q_BTND.shape[2], k_arena.shape[2])
    most = MOST_EXACT_ROWS if q_BTND.dtype == torch.float32 else MOST_ROWS
    if rest or not 0 < group * q_BTND.shape[1] <= most:
        return f"{q_BTND.shape[1]} new tokens of {group} heads to a KV head: at most {most} rows"
    if not (k_arena.is_contiguous() and v_arena.is_contiguous()):
        return "an arena is a view of something larger"
    return why_no_tiles(q_BTND, k_arena, v_arena)


def why_no_tiles(q_BTND: Tensor, k: Tensor, v: Tensor) -> str:
    """What any form made of tiles asks of dtypes, width and device."""
    if q_BTND.dtype not in FLOATS or any(x.dtype not in (*FLOATS, torch.float8_e4m3fn) for x in (k, v)):
        return f"queries of {q_BTND.dtype}, keys of {k.dtype}, values of {v.dtype}: no such product"
    if q_BTND.shape[3] > 256 or any(x.stride(-1) != 1 for x in (q_BTND, k, v)):
        return f"heads of width {q_BTND.shape[3]}: at most 256, one element after the other"
    return gpu.why_not(q_BTND.device) or why_no_float8(q_BTND.device, k.dtype)


def why_no_float8(device: torch.device, dtype: torch.dtype) -> str:
    """Why an arena of this dtype cannot be read or written on this device; "" if it can."""
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return ""
    found = torch.cuda.get_device_capability(device)
    return "" if found >= OLDEST_FLOAT8 else f"compute capability {found[0]}.{found[1]}: float8 needs 8.9"


@triton.jit
def absorb(raw, v, acc, top, total, SCALE: tl.constexpr):
    """A tile's scores before scaling [rows, keys], -inf where hidden, and its values, into the running sums."""
    higher = tl.maximum(top, tl.max(raw, 1) * SCALE)
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    p = tl.exp2(raw * SCALE - shift[:, None])
    shrink = tl.exp2(top - shift)
    acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def seen_tiles(k_pos, tile, step, tiles, S, oldest, newest, TILE: tl.constexpr, SCAN: tl.constexpr):
    """First and last of the tiles `tile`, `tile + step` … in which a key has a position from oldest to newest."""
    first, last = tiles, -1
    for start in range(0, bound(tl.cdiv(tiles - tile, step)), SCAN):
        i = start + tl.arange(0, SCAN)
        s = (tile + i * step)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        pos = tl.load(k_pos + s, mask=s < S, other=-1).to(tl.int32)
        seen = tl.max(((pos >= oldest) & (pos <= newest)).to(tl.int32), 1) > 0
        first = tl.minimum(first, tl.min(tl.where(seen, i, tiles)))
        last = tl.maximum(last, tl.max(tl.where(seen, i, -1)))
    return first, last


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["T"])
def _split_kernel(
    q, k, v, table, q_pos, k_pos, out, sums, T, S, splits, q_b, q_t, q_n,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SCAN: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A split's tiles for TOGETHER KV heads of a sequence: rows are their query heads at every new token.

    With several KV heads a row's query stands in its own head's columns and zeros in the others', so that one product
    of whole rows of the arena does them all. Positions and tables must not be what the kernel just before wrote.
    """
    split, head, b = tl.program_id(0), tl.program_id(1) * TOGETHER, tl.program_id(2)
    r, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = r // (GROUP * T)
    t, n = r % (GROUP * T) // GROUP, (head + own) * GROUP + r % GROUP
    real = own < TOGETHER
    mine = real[:, None] & (c // D == own[:, None])
    place = b.to(tl.int64) * q_b + t[:, None] * q_t + n[:, None] * q_n + c % D
    i = tl.load(q_pos + b * T + t, mask=real, other=-1).to(tl.int32)
    oldest = tl.maximum(tl.min(tl.where(real, i, NOWHERE)) - WINDOW + 1, 0) if WINDOW else 0
    k_pos += b.to(tl.int64) * S
    table += b.to(tl.int64) * (S // BLOCK)
    first, last = seen_tiles(k_pos, split, splits, tl.cdiv(S, TILE), S, oldest, tl.max(i), TILE, SCAN)
    inputs_ready(PDL)
    q_RC = tl.load(q + place, mask=mine, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for step in tl.range(bound(first), bound(last + 1), num_stages=STAGES):
        tile = split + step * splits
        j, k_SC, v_SC = read_tile(
            k, v, table, k_pos, tile, S, 0, NOWHERE, head, q_RC.dtype, HEADS, D, BLOCK, TOGETHER, WIDTH, TILE
        )
        seen = (j >= 0)[None, :] & (j[None, :] <= i[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > i[:, None] - WINDOW)
        raw = dot(q_RC, k_SC.T, tl.zeros([ROWS, TILE], tl.float32))
        acc, top, total = absorb(tl.where(seen, raw, float("-inf")), v_SC, acc, top, total, SCALE)
    row = (b * T + t).to(tl.int64) * (HEADS * GROUP) + n
    leave(out, sums, row, split, splits, real, mine, c % D, acc, top, total, D, PARTS)


@triton.jit
def read_tile(
    k, v, table, k_pos, tile, S, oldest, newest, head, dtype: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Positions int32 [TILE] of a tile's keys, -1 where there is none, and keys and values [TILE, WIDTH] of TOGETHER
    heads, zeros for positions that are not from oldest to newest, neither below 0."""
    s, c = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    j = tl.load(k_pos + s, mask=s < S, other=-1).to(tl.int32)
    at = _rows(table, tile, s, S, BLOCK, TILE)[:, None] * (HEADS * D) + head * D + c[None, :]
    there = ((j >= oldest) & (j <= newest))[:, None]
    there = there if WIDTH == TOGETHER * D else there & (c < TOGETHER * D)[None, :]
    k_SC, v_SC = tl.load(k + at, mask=there, other=0.0), tl.load(v + at, mask=there, other=0.0)
    return j, k_SC.to(dtype), v_SC.to(dtype)


@triton.jit
def _rows(table, tile, s, S, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Rows of the flattened arena that hold the keys s of a tile."""
    if BLOCK % TILE == 0:
        start = tile * TILE
        row = tl.load(table + start // BLOCK).to(tl.int64) * BLOCK + start % BLOCK + (s - start)
    else:
        row = tl.load(table + s // BLOCK, mask=s < S, other=0).to(tl.int64) * BLOCK + s % BLOCK
    return row


@triton.jit
def leave(out, sums, row, split, splits, real, mine, d, acc, top, total, D: tl.constexpr, PARTS: tl.constexpr):
    """Stores a program's rows: its part and sums, for `merge`, or what they come to."""
    if PARTS:
        part = row * splits + split
        tl.store(out + part[:, None] * D + d[None, :], acc, mask=mine & (total != 0)[:, None])
        tl.store(sums + 2 * part, top, mask=real)
        tl.store(sums + 2 * part + 1, total, mask=real)
    else:
        o = acc / tl.where(total == 0, 1.0, total)[:, None]  # a query that sees nothing gets zeros
        tl.store(out + row[:, None] * D + d[None, :], o.to(out.dtype.element_ty), mask=mine)


def split_count(programs: int, rows: int, width: int, most: int, device: torch.device, each: int = PROGRAMS) -> int:
    """Into how many the keys of each of so many programs are cut, `most` at most, for `each` of them on a processor.

    The parts of all `rows` take WORKSPACE bytes at most.
    """
    wanted = each * processors(device) // max(programs, 1)
    return max(1, min(wanted, most, WORKSPACE // max(4 * rows * (width + 2), 1)))


def scale_of(width: int) -> float:
    """What turns a product of heads of this width into the logarithm of a weight to base 2."""
    return width**-0.5 * math.log2(math.e)


def workspace(q_BTND: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """An output [B, T, N, D], where the splits leave their parts (the output itself if there is one) and their sums."""
    batch, length, heads, width = q_BTND.shape
    out = torch.empty(batch, length, heads, width, dtype=q_BTND.dtype, device=q_BTND.device)
    if splits == 1:
        return out, out, out
    parts, sums = (
        torch.empty(batch * length * heads, splits, last, dtype=torch.float32, device=q_BTND.device)
        for last in (width, 2)
    )
    return out, parts, sums


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
    """reference.attend_blocks for few new tokens (see `why_not`); zeros for a query that sees nothing.

    Positions below 2**31. With several KV heads to a program, a visible key of one that is not finite spoils them all.
    """
    del is_start
    if not q_BTND.numel() or not k_pos_BS.shape[1]:
        return torch.zeros(q_BTND.shape, dtype=q_BTND.dtype, device=q_BTND.device)
    splits, grid, shape = cut(q_BTND, k_arena, k_pos_BS.shape[1])
    out, parts, sums = workspace(q_BTND, splits)
    if shape.pop("ONE") and shape["ROWS"] == 16:
        shape["STAGES"] = 1
    strides: tuple[Any, ...] = q_BTND.stride()[:3]
    _split_kernel[(splits, *grid)](
        q_BTND, k_arena, v_arena, blocks_BC.contiguous(), q_pos_BT.contiguous(), k_pos_BS.contiguous(), parts, sums,
        q_BTND.shape[1], k_pos_BS.shape[1], splits, *strides, **options(out.device, **shape, WINDOW=window),
    )  # fmt: skip
    if splits > 1:
        merge(parts, sums, out)
    return out


def cut(q_BTND: Tensor, k_arena: Tensor, keys: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """How a launch for so many keys is divided: splits of the keys, the rest of the grid, and constants of the kernel;
    ONE says that no program has more than a tile."""
    (batch, length, count, width), (block, heads), device = q_BTND.shape, k_arena.shape[1:3], q_BTND.device
    # Products of float32 take registers, not tensor cores: tiles half as long.
    itemsize = 2 * q_BTND.itemsize if q_BTND.dtype == torch.float32 else k_arena.itemsize
    # Processors for all tiles of one KV head each: longer tiles, so fewer parts to merge.
    apart = shape_of(length, count // heads, 1, width, itemsize)
    if batch * heads * -(-keys // apart["TILE"]) <= processors(device):
        shape = apart | {"HEADS": heads}
    else:
        shape = shape_of(length, count // heads, heads, width, itemsize)
    grid, tile = (heads // shape["TOGETHER"], batch), shape["TILE"]
    programs, tiles, most = math.prod(grid), -(-keys // tile), -(-keys // max(FEWEST_KEYS, tile))
    each = SMALL_PROGRAMS if most == tiles and programs * most <= SMALL_PROGRAMS * processors(device) else PROGRAMS
    splits = split_count(programs, batch * length * count, width, most, device, each)
    scan = min(triton.next_power_of_2(-(-tiles // splits)), SCANNED // tile)
    return splits, grid, {**shape, "BLOCK": block, "PARTS": splits > 1, "SCAN": scan, "ONE": tiles <= splits}


def shape_of(length: int, group: int, heads: int, width: int, itemsize: int) -> dict[str, Any]:
    """How a program's tile looks: sizes that the kernel is compiled for."""
    # Several KV heads while their queries fill no more than the 16 rows that a product has at least.
    together = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or _fills(n, length * group, width)))
    columns = max(16, triton.next_power_of_2(together * width))
    tile = min(128, max(16, TILE_BYTES // (columns * itemsize)))
    rows = max(16, triton.next_power_of_2(together * group * length))
    sizes = {"TOGETHER": together, "ROWS": rows, "WIDTH": columns, "TILE": tile}
    stages = STAGES if rows == 16 else STAGES_OF_MANY
    return {"GROUP": group, "HEADS": heads, "D": width, "SCALE": scale_of(width), "STAGES": stages, **sizes}


def _fills(together: int, rows: int, width: int) -> bool:
    return together * rows <= 16 and together * width <= 256


_INDEX, _OPTIONS = dict.fromkeys(("table", "q_pos", "k_pos"), "*i64"), {"num_warps": WARPS, "launch_pdl": True}
_SPLIT = {
    **shape_of(1, 8, 2, 64, 2), "BLOCK": 128, "WINDOW": 0, "SCAN": 64, "PARTS": True, "PDL": True,
    "q_b": 1024, "q_t": 1024, "q_n": 64,
}  # fmt: skip
_SIZES = dict.fromkeys(("T", "S", "splits"), "i32")
COMPILED = [
    (
        _split_kernel,
        {"q": "*bf16", "k": cache, "v": cache, **_INDEX, "out": "*fp32", "sums": "*fp32", **_SIZES},
        constexprs,
        _OPTIONS,
    )
    for cache, constexprs in (
        ("*bf16", _SPLIT),
        ("*bf16", {**_SPLIT, "BLOCK": 16, "WINDOW": 2048, "SCAN": 1, "STAGES": 1}),
        ("*bf16", {**_SPLIT, **shape_of(8, 8, 2, 64, 2), "q_b": 8192}),
        ("*bf16", {**_SPLIT, **shape_of(1, 8, 1, 64, 2), "HEADS": 2, "SCAN": 1, "STAGES": 1}),
        ("*fp8e4nv", {**_SPLIT, **shape_of(1, 8, 2, 64, 1), "SCAN": 32}),
    )
]
