"""Triton forms of what stands before attention: heads normed, rotated and written into the cache.

The contracts are those of the same names in kernels/pieces.py; arithmetic is float32, and each output is rounded once
(what goes into a float8 arena twice, as there). Float32 within 1e-5 of them, relative to the largest; bfloat16 within
2**-6. Inputs may be columns of a wider product.
"""

# pyright: basic
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu
from muse_fn.kernels.gpu import INTERPRETED, WARPS, inputs_ready, options
from muse_fn.kernels.gpu_attention import FLOATS, why_no_float8
from muse_fn.kernels.norms import Rotary
from muse_fn.kernels.reference import FP8_MAX

WIDEST = 1024  # elements of a head
TILE = 2048  # elements of a program's heads: 16 bytes a thread for each of two halves
LARGEST = tl.constexpr(FP8_MAX)


def why_not(head_dim: int, *tensors: Tensor) -> str:
    """Why `heads`, `place` and gpu_merge's `gated` cannot take these tensors, arenas among them; "" if they can."""
    if head_dim % 2 or not 0 < head_dim <= WIDEST:
        return f"heads of width {head_dim}: even, and at most {WIDEST}"
    for x in tensors:
        if x.dtype not in (*FLOATS, torch.float8_e4m3fn):
            return f"a tensor of {x.dtype}"
        if x.numel() and x.stride(-1) != 1:
            return "a row whose elements do not lie one after the other"
        reason = gpu.why_not(x.device) or why_no_float8(x.device, x.dtype)
        if reason:
            return reason
    return ""


@triton.jit
def _halves(x, row, head, there, D: tl.constexpr, HALF: tl.constexpr, STRIDE):
    """Two halves [heads, D / 2] of these heads of these rows, float32, zeros beyond D / 2."""
    j = tl.arange(0, HALF)[None, :]
    at = x + row[:, None] * STRIDE + head[:, None] * D + j
    mask = there[:, None] & (j < D // 2)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 in another dtype. The interpreter cuts off what bfloat16 does not hold, and float8 it gets wrong."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = _cut(x, 16)
    if INTERPRETED and dtype == tl.float8e4nv:
        return _float8(x)
    return x.to(dtype)


@triton.jit
def _cut(x, LAST: tl.constexpr):
    """float32 rounded to nearest, halves to even, so that its last bits are zeros; what is not a number stays so."""
    bits = x.to(tl.int32, bitcast=True)
    below_half = (1 << (LAST - 1)) - 1  # pyright: ignore[reportOperatorIssue]
    bits = (bits + below_half + ((bits >> LAST) & 1)) >> LAST << LAST
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _float8(x):
    """float32 within ±448 as e4m3, bit by bit."""
    size = tl.abs(x)
    normal = (_cut(size, 20).to(tl.int32, bitcast=True) >> 20) - (120 << 3)  # exponents count from 7, not from 127
    # Below 2**-6 in steps of 2**-9, as float32 has them beside this number.
    small = (tl.where(size < 2.0**-6, size, 0.0) + 1.5 * 2.0**14) - 1.5 * 2.0**14
    code = tl.where(size < 2.0**-6, (small * 2.0**9).to(tl.int32), normal)
    code = tl.where(x == x, code, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def in_arena(x, dtype: tl.constexpr):
    """float32 as an arena of this dtype holds it: float8 within ±LARGEST."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -LARGEST, LARGEST, tl.PropagateNan.ALL)
    return _rounded(x, dtype)


@triton.jit
def _store(out, row, head, there, low, high, dtype: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr):
    """Two halves into heads of rows [COUNT, D], rounded to `dtype`, then to what `out` has."""
    j = tl.arange(0, low.shape[1])[None, :]
    at = out + (row[:, None] * COUNT + head[:, None]) * D + j
    low, high = _rounded(low, dtype).to(tl.float32), _rounded(high, dtype).to(tl.float32)
    mask = there[:, None] & (j < D // 2)
    tl.store(at, in_arena(low, out.dtype.element_ty), mask=mask)
    tl.store(at + D // 2, in_arena(high, out.dtype.element_ty), mask=mask)


@triton.jit
def _placed(
    x, out, cos, sin, rows, item, R, stride, scale, eps, dtype: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, NORMED: tl.constexpr, ROTARY: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Some heads, normed, scaled and rotated, into `out`, whose row for row i is rows[i] if they are MOVED."""
    there = item < R * COUNT
    row, head = (item // COUNT).to(tl.int64), item % COUNT
    low, high = _halves(x, row, head, there, D, HALF, stride)  # pyright: ignore[reportGeneralTypeIssues]
    if NORMED:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D
        factor = (tl.rsqrt(mean + eps))[:, None]
        low, high = low * factor * scale, high * factor * scale
    if ROTARY:
        zero = tl.zeros_like(head)
        c_low, c_high = _halves(cos, row, zero, there, D, HALF, D)
        s_low, s_high = _halves(sin, row, zero, there, D, HALF, D)
        low, high = low * c_low - high * s_low, high * c_high + low * s_high
    if MOVED:
        row = tl.load(rows + row, mask=there, other=0)
    _store(out, row, head, there, low, high, dtype, COUNT, D)


@triton.jit(do_not_specialize=["R"])
def _heads_kernel(
    q, k, v, cos, sin, q_out, k_out, v_out, rows, R, q_row, k_row, v_row, qk_scale, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr,
    ROTARY: tl.constexpr, PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH heads of all queries, then of all keys, then of all values."""
    inputs_ready(PDL)
    pid, of_q, of_k = tl.program_id(0), tl.cdiv(R * QUERIES, EACH), tl.cdiv(R * KEYS, EACH)
    if pid < of_q:
        item = pid * EACH + tl.arange(0, EACH)
        _placed(q, q_out, cos, sin, rows, item, R, q_row, qk_scale, eps, q.dtype.element_ty, QUERIES,
                D, HALF, True, ROTARY, False)  # fmt: skip
    elif pid < of_q + of_k:
        item = (pid - of_q) * EACH + tl.arange(0, EACH)
        _placed(k, k_out, cos, sin, rows, item, R, k_row, 1.0, eps, q.dtype.element_ty, KEYS,
                D, HALF, True, ROTARY, PLACE)  # fmt: skip
    elif PLACE:
        item = (pid - of_q - of_k) * EACH + tl.arange(0, EACH)
        _placed(v, v_out, cos, sin, rows, item, R, v_row, 1.0, eps, v.dtype.element_ty, KEYS,
                D, HALF, False, False, True)  # fmt: skip


def heads(
    q_BTF: Tensor, k_BTF: Tensor, rotary: Rotary | None, head_dim: int, qk_scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """pieces.heads in one launch."""
    k_BTKD = torch.empty(*k_BTF.shape[:2], k_BTF.shape[2] // head_dim, head_dim, dtype=q_BTF.dtype, device=q_BTF.device)
    return _launch(q_BTF, k_BTF, None, rotary, head_dim, qk_scale, eps, k_BTKD, k_BTKD, None), k_BTKD


def place(
    q_BTF: Tensor,
    k_BTF: Tensor,
    v_BTF: Tensor,
    rotary: Rotary | None,
    qk_scale: float,
    eps: float,
    k_arena: Tensor,
    v_arena: Tensor,
    rows: Tensor,
) -> Tensor:
    """pieces.place in one launch. Of several columns that name one row, its elements may come from any."""
    if not (k_arena.is_contiguous() and v_arena.is_contiguous()):
        raise ValueError(f"arenas have strides {k_arena.stride()} and {v_arena.stride()}: they must be whole tensors")
    return _launch(q_BTF, k_BTF, v_BTF, rotary, k_arena.shape[-1], qk_scale, eps, k_arena, v_arena, rows)


def _launch(
    q_BTF: Tensor,
    k_BTF: Tensor,
    v_BTF: Tensor | None,
    rotary: Rotary | None,
    head_dim: int,
    qk_scale: float,
    eps: float,
    k_out: Tensor,
    v_out: Tensor,
    rows: Tensor | None,
) -> Tensor:
    batch, length, features = q_BTF.shape
    count, heads, keys = batch * length, features // head_dim, k_BTF.shape[2] // head_dim
    q_out = torch.empty(batch, length, heads, head_dim, dtype=q_BTF.dtype, device=q_BTF.device)
    if not count:
        return q_out
    q, k, v = (x.reshape(count, -1) for x in (q_BTF, k_BTF, k_BTF if v_BTF is None else v_BTF))
    cos, sin = (q, q) if rotary is None else (x.reshape(count, head_dim).contiguous() for x in rotary)
    shape = _shape(heads, keys, head_dim, rotary is not None, v_BTF is not None)
    sizes = (heads, keys, keys) if shape["PLACE"] else (heads, keys)
    programs = sum(-(-count * n // shape["EACH"]) for n in sizes)
    scalars: tuple[Any, ...] = (count, q.stride(0), k.stride(0), v.stride(0), qk_scale, eps)
    rows = k if rows is None else rows.contiguous()
    _heads_kernel[(programs,)](q, k, v, cos, sin, q_out, k_out, v_out, rows, *scalars, **options(q.device, **shape))
    return q_out


def _shape(queries: int, keys: int, head_dim: int, rotary: bool, place: bool) -> dict[str, Any]:
    half = triton.next_power_of_2(head_dim // 2)
    sizes = {"D": head_dim, "HALF": half, "EACH": max(1, TILE // (2 * half))}
    return {"QUERIES": queries, "KEYS": keys, **sizes, "ROTARY": rotary, "PLACE": place}


_OPTIONS = {"num_warps": WARPS, "launch_pdl": True}
_POINTERS = {**dict.fromkeys(("q", "k", "v", "q_out"), "*bf16"), "cos": "*fp32", "sin": "*fp32", "rows": "*i64"}
_SCALARS = {"R": "i32", "qk_scale": "fp32", "eps": "fp32"}
_STRIDES = dict.fromkeys(("q_row", "k_row", "v_row"), 2304)
COMPILED = [
    (
        _heads_kernel,
        {**_POINTERS, "k_out": cache, "v_out": cache, **_SCALARS},
        {**_shape(16, 2, 64, rotary, place), **_STRIDES, "PDL": True},
        _OPTIONS,
    )
    for cache, rotary, place in (
        ("*bf16", True, True),
        ("*bf16", False, True),
        ("*fp8e4nv", True, True),
        ("*bf16", True, False),
    )
]
