"""Attention of one new token for each sequence, from its projected rows to its gated heads: in one launch, and a second
one where keys are split.

The contract is that of `Ops.attend_new`: `pieces.place`, attention over the arenas, `pieces.gated`. Where a program has
one tile of keys, those older than the step are read before the projected rows are there. The new key never comes from
the arena: whoever has its place among the keys takes it from the projected row, and one program writes it.
"""

# pyright: basic, reportGeneralTypeIssues=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu_attention, gpu_heads
from muse_fn.kernels.gpu import WARPS, bound, dot, inputs_ready, options, rounded
from muse_fn.kernels.gpu_attention import absorb, cut, leave, read_tile, seen_tiles, shape_of, workspace
from muse_fn.kernels.gpu_heads import in_arena
from muse_fn.kernels.gpu_merge import Gate, gated_heads, merge
from muse_fn.kernels.norms import Rotary
from muse_fn.kernels.pieces import Context, Projected


@triton.jit
def _pairs(at, mine, D: tl.constexpr, ROTARY: tl.constexpr, WIDTH: tl.constexpr):
    """Each row's head in its columns, and at each element the other of its pair; zeros in other columns."""
    d = tl.arange(0, WIDTH)[None, :] % D
    x = tl.load(at[:, None] + d, mask=mine, other=0.0)
    y = x
    if ROTARY:
        y = tl.load(at[:, None] + tl.where(d < D // 2, d + D // 2, d - D // 2), mask=mine, other=0.0)
    return x, y


@triton.jit
def _head(x, y, cos, sin, scale, eps, D: tl.constexpr, ROTARY: tl.constexpr):
    """Heads with the others of their pairs, normed, scaled and rotated, in their dtype."""
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x * factor * scale
    if ROTARY:
        x = x * cos + y.to(tl.float32) * factor * scale * sin
    return rounded(x, dtype)


@triton.jit
def _with(is_seen, raw, v, acc, top, total, SCALE: tl.constexpr):
    """One key more, if it is seen: each row's score before scaling and its value [rows, columns]."""
    raw, v = tl.where(is_seen, raw, float("-inf")), tl.where(is_seen, v, 0.0)
    higher = tl.maximum(top, raw * SCALE)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p, shrink = tl.exp2(raw * SCALE - shift), tl.exp2(top - shift)
    return acc * shrink[:, None] + rounded(p, v.dtype).to(tl.float32)[:, None] * v, higher, total * shrink + p


@triton.jit
def _angles(cos, sin, b, d, D: tl.constexpr, ROTARY: tl.constexpr):
    """Of the elements d of a head [1, columns]: cosines, and sines with the sign by which the other of a pair joins."""
    cosine, sine = 1.0, 0.0
    if ROTARY:
        cosine = tl.load(cos + b * D + d)[None, :]
        sine = tl.load(sin + b * D + d)
        sine = tl.where(d < D // 2, -sine, sine)[None, :]
    return cosine, sine


@triton.jit
def _projected(
    q_at, k_at, v_at, mine, cos, sin, qk_scale, eps, k_dtype: tl.constexpr, v_dtype: tl.constexpr, D: tl.constexpr,
    ROTARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each row's query, its key and value as the arenas hold them, and query times key. All are asked for before the
    first is used."""
    q, q_other = _pairs(q_at, mine, D, ROTARY, WIDTH)
    k, k_other = _pairs(k_at, mine, D, ROTARY, WIDTH)
    v, _ = _pairs(v_at, mine, D, False, WIDTH)
    q = _head(q, q_other, cos, sin, qk_scale, eps, D, ROTARY)
    k = in_arena(_head(k, k_other, cos, sin, 1.0, eps, D, ROTARY).to(tl.float32), k_dtype)
    score = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1)
    return q, k, in_arena(v.to(tl.float32), v_dtype), score


@triton.jit
def _write(k, v, new, value, once):
    tl.store(k, new, mask=once)
    tl.store(v, value, mask=once)


@triton.jit
def _older(q_RC, j, k_SC, v_SC, i, oldest, acc, top, total, has_new, SCALE: tl.constexpr):
    """A tile's keys from position `oldest` to below i into the running sums, and whether i has a place so far."""
    raw = dot(q_RC, k_SC.T, tl.zeros([q_RC.shape[0], k_SC.shape[0]], tl.float32))
    seen = ((j >= oldest) & (j < i))[None, :]
    acc, top, total = absorb(tl.where(seen, raw, float("-inf")), v_SC, acc, top, total, SCALE)
    return acc, top, total, has_new | (tl.max(((j == i) & (j >= 0)).to(tl.int32)) > 0)


@triton.jit
def _leave_gated(out, gate, n, d, mine, acc, total, eps, dtype: tl.constexpr, D: tl.constexpr):
    """Stores a program's heads, normed and gated; `out` and `gate` are those of its sequence."""
    o = rounded(tl.where(mine, acc / tl.where(total == 0, 1.0, total)[:, None], 0.0), dtype).to(tl.float32)
    g = tl.load(gate + n[:, None] * D + d[None, :], mask=mine, other=0.0).to(tl.float32)
    o = gated_heads(o, g, eps, D)
    tl.store(out + n[:, None] * D + d[None, :], rounded(o, out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["splits", "S"])
def _decode_kernel(
    q, k_new, v_new, gate, cos, sin, k, v, write, table, q_pos, k_pos, out, sums, S, splits,
    q_row, k_row, v_row, gate_row, qk_scale, eps,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SCAN: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, ONE: tl.constexpr, ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A split's tiles for TOGETHER KV heads of a sequence; rows and columns as in gpu_attention's `_split_kernel`."""
    split, head, b = tl.program_id(0), tl.program_id(1) * TOGETHER, tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH) % D
    own, kv_head = r // GROUP, head + r // GROUP
    real, n = own < TOGETHER, kv_head * GROUP + r % GROUP
    mine = real[:, None] & (tl.arange(0, WIDTH) // D == own[:, None])
    i, to = tl.load(q_pos + b).to(tl.int32), tl.load(write + b)
    oldest = tl.maximum(i - WINDOW + 1, 0) if WINDOW else 0
    k_pos, table = k_pos + b * S, table + b * (S // BLOCK)
    cosine, sine = _angles(cos, sin, b, d, D, ROTARY)
    if ONE:
        j, k_SC, v_SC = read_tile(
            k, v, table, k_pos, split, S, oldest, i - 1, head, dtype, HEADS, D, BLOCK, TOGETHER, WIDTH, TILE
        )
    else:
        first, last = seen_tiles(k_pos, split, splits, tl.cdiv(S, TILE), S, oldest, i, TILE, SCAN)
    inputs_ready(PDL)
    q_RC, new, value, score = _projected(
        q + b * q_row + n * D, k_new + b * k_row + kv_head * D, v_new + b * v_row + kv_head * D, mine, cosine, sine,
        qk_scale, eps, k.dtype.element_ty, v.dtype.element_ty, D, ROTARY, WIDTH,
    )  # fmt: skip
    if split == 0:
        place, once = to * (HEADS * D) + kv_head[:, None] * D + d[None, :], mine & (r % GROUP == 0)[:, None]
        _write(k + place, v + place, new, value, once)
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    top, has_new = tl.full([ROWS], float("-inf"), tl.float32), i != i
    if ONE:
        acc, top, total, has_new = _older(q_RC, j, k_SC, v_SC, i, oldest, acc, top, total, has_new, SCALE)
    else:
        for step in tl.range(bound(first), bound(last + 1), num_stages=STAGES):
            tile = split + step * splits
            j, k_SC, v_SC = read_tile(
                k, v, table, k_pos, tile, S, oldest, i - 1, head, dtype, HEADS, D, BLOCK, TOGETHER, WIDTH, TILE
            )
            acc, top, total, has_new = _older(q_RC, j, k_SC, v_SC, i, oldest, acc, top, total, has_new, SCALE)
    acc, top, total = _with(has_new, score, value.to(dtype), acc, top, total, SCALE)
    if PARTS:
        leave(out, sums, b * (HEADS * GROUP) + n, split, splits, real, mine, d, acc, top, total, D, True)
    else:
        _leave_gated(out + b * (HEADS * GROUP * D), gate + b * gate_row, n, d, mine, acc, total, eps, dtype, D)


def why_not(rows: Projected, k_arena: Tensor, v_arena: Tensor, at: Context, dtype: torch.dtype) -> str:
    """Why `attend_new` cannot take these; "" if it can."""
    batch, length, width = rows.q_BTF.shape
    if length != 1:
        return f"{length} new tokens: one alone"
    if not batch or not at.k_pos_BS.shape[1]:
        return "there are no queries or no keys"
    if dtype != rows.q_BTF.dtype:
        return f"results are {dtype}, queries {rows.q_BTF.dtype}: must be alike"
    if rows.k_BTF.dtype != dtype:
        return f"keys are {rows.k_BTF.dtype}, queries {dtype}: must be alike"
    head_dim = k_arena.shape[3]
    q_BTND = rows.q_BTF.view(batch, 1, width // head_dim, head_dim)
    return gpu_attention.why_not(q_BTND, k_arena, v_arena) or gpu_heads.why_not(head_dim, *rows, k_arena, v_arena)


def attend_new(
    rows: Projected,
    rotary: Rotary | None,
    qk_scale: float,
    eps: float,
    k_arena: Tensor,
    v_arena: Tensor,
    at: Context,
    dtype: torch.dtype,
) -> Tensor:
    """`Ops.attend_new` for what `why_not` lets pass: [B, 1, N * D]. Writes the new keys and values into the arenas.

    Positions below 2**31. With several KV heads to a program, a visible key of one that is not finite spoils them all.
    On a device what is older than the projected rows, as are positions and angles, must not be what the kernel just
    before wrote.
    """
    (batch, _, features), keys = rows.q_BTF.shape, at.k_pos_BS.shape[1]
    q, k, v, gate = (x.reshape(batch, -1) for x in rows)
    q_BTND = q.view(batch, 1, -1, k_arena.shape[3])
    splits, grid, shape = cut(q_BTND, k_arena, keys)
    out, parts, sums = workspace(q_BTND, splits)
    cos, sin = (q, q) if rotary is None else (x.reshape(batch, k_arena.shape[3]).contiguous() for x in rotary)
    shape |= {"WINDOW": at.window, "ROTARY": rotary is not None}
    scalars: tuple[Any, ...] = (keys, splits, q.stride(0), k.stride(0), v.stride(0), gate.stride(0), qk_scale, eps)
    _decode_kernel[(splits, *grid)](
        q, k, v, gate, cos, sin, k_arena, v_arena, at.write.contiguous(), at.blocks_BC.contiguous(),
        at.q_pos_BT.contiguous(), at.k_pos_BS.contiguous(), parts, sums, *scalars, **options(out.device, **shape),
    )  # fmt: skip
    if splits > 1:
        merge(parts, sums, out, Gate(rows.gate_BTF, eps))
    return out.view(batch, 1, features)


_TYPES = {
    **dict.fromkeys(("q", "k_new", "v_new", "gate"), "*bf16"),
    **dict.fromkeys(("cos", "sin", "sums"), "*fp32"),
    **dict.fromkeys(("write", "table", "q_pos", "k_pos"), "*i64"),
    **{"S": "i32", "splits": "i32", "qk_scale": "fp32", "eps": "fp32"},
}
_SHAPE, _APART = shape_of(1, 8, 2, 64, 2), {**shape_of(1, 8, 1, 64, 2), "HEADS": 2}
_ONE, _MORE = {"SCAN": 1, "PARTS": True, "ONE": True}, {"SCAN": 32, "PARTS": True, "ONE": False}
_STRIDES = dict.fromkeys(("q_row", "k_row", "v_row", "gate_row"), 2304)
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    (
        _decode_kernel,
        {**_TYPES, "k": cache, "v": cache, "out": "*fp32" if constants["PARTS"] else "*bf16"},
        {**sizes, **_STRIDES, **constants, "PDL": True},
        {"num_warps": WARPS, "launch_pdl": True},
    )
    for sizes, cache, constants in (
        (_APART, "*bf16", {**_ONE, "BLOCK": 128, "WINDOW": 2048, "ROTARY": True}),
        (_SHAPE, "*bf16", {**_ONE, "BLOCK": 128, "WINDOW": 2048, "ROTARY": True}),
        (_SHAPE, "*bf16", {**_MORE, "BLOCK": 128, "WINDOW": 0, "ROTARY": False}),
        (_SHAPE, "*bf16", {**_MORE, "BLOCK": 128, "WINDOW": 2048, "ROTARY": True, "PARTS": False}),
        (shape_of(1, 8, 2, 64, 1), "*fp8e4nv", {**_MORE, "BLOCK": 16, "WINDOW": 2048, "ROTARY": True}),
    )
]
