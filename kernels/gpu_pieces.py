"""Triton forms of the norms between products: a row is read once, held in the registers of one program, written once.

The contracts are those of the same names in kernels/pieces.py; arithmetic is float32 and each output is rounded once.
`join` and `blend` read their vectors, and what is older than the branch or the routes' rows, before the kernel before
them is done (kernels/gpu.py).
"""

# pyright: basic
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, overlaps, rounded
from muse_fn.kernels.norms import Gain, Mix
from muse_fn.kernels.pieces import Joined

WIDEST = 8192  # columns of a row that the registers of one program hold together with its vectors
FEW = 4  # rows up to which the kernel behind does best if a blend leaves it room, and a join is done soonest
MANY = 1024  # rows from which on it matters how many are under way on a multiprocessor
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr):
    """Columns beyond WIDTH must be 0."""
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit
def in_parts(cols, stride, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Where these of WIDTH columns stand in a row whose parts of PART columns are `stride` elements apart."""
    if PART == WIDTH:
        return cols
    else:
        return cols + (cols // PART).to(tl.int64) * (stride - PART)


@triton.jit
def _normed_kernel(
    x, norm, out, x_stride, eps, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = cols < WIDTH
    inputs_ready(PDL)  # a caller may have worked out the norm just before
    v = tl.load(x + row * x_stride + cols, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    if HAS_NORM:
        factor = tl.load(norm + cols, inside, 0.0, eviction_policy="evict_last")
        v = v * inverse_rms(v, eps, WIDTH) * factor
    else:
        v = v * inverse_rms(v, eps, WIDTH)
    tl.store(out + row * WIDTH + cols, rounded(v, out.dtype.element_ty), inside)


@triton.jit
def _join_kernel(
    h,
    branch,
    scale,
    alpha,
    beta,
    norm,
    h_out,
    a_out,
    rounded_out,
    h_stride,
    part_stride,
    branch_stride,
    post_eps,
    eps,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Four columns a thread in any dtype: no value moves between threads but in sums.
    cols = tl.max_contiguous(tl.arange(0, BLOCK), min(BLOCK, 4))
    inside = cols < WIDTH
    # All loads stand before the first sum, and all but the branch's before the branch is there.
    stays = tl.load(h + row * h_stride + cols, inside, 0.0, eviction_policy="evict_first")
    stays = stays * tl.load(alpha + cols, inside, 0.0, eviction_policy="evict_last")
    share = tl.load(beta + cols, inside, 0.0, eviction_policy="evict_last")
    if HAS_NORM:
        factor = tl.load(norm + cols, inside, 0.0, eviction_policy="evict_last")
    if HAS_SCALE:
        before = tl.load(scale + cols, inside, 0.0, eviction_policy="evict_last")
    inputs_ready(PDL)
    branch += row * branch_stride + in_parts(cols, part_stride, WIDTH, PART)
    y = tl.load(branch, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    if HAS_SCALE:
        y *= before
    s = stays + share * (y * inverse_rms(y, post_eps, WIDTH))
    tl.store(h_out + row * WIDTH + cols, s, inside)
    if HAS_NORM:
        a = s * inverse_rms(s, eps, WIDTH) * factor
        tl.store(a_out + row * WIDTH + cols, rounded(a, a_out.dtype.element_ty), inside)
        if a_out.dtype.element_ty == tl.float32:
            tl.store(rounded_out + row * WIDTH + cols, rounded(a, tl.bfloat16), inside)


@triton.jit
def _blend_kernel(
    y,
    weight,
    norm,
    out,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = cols < WIDTH
    factor = tl.load(norm + cols, inside, 0.0, eviction_policy="evict_last")
    rows = tl.arange(0, ROWS)
    share = tl.load(weight + token * COUNT + rows, rows < COUNT, 0.0)
    inputs_ready(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, COUNT, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = token * COUNT + rows
        here = (rows < COUNT)[:, None] & inside[None, :]
        v = tl.load(y + at[:, None] * WIDTH + cols[None, :], here, 0.0, eviction_policy="evict_first")
        if first > 0:
            share = tl.load(weight + at, rows < COUNT, 0.0)
        v = v.to(tl.float32) * factor[None, :]
        share = share * tl.rsqrt(tl.sum(v * v, 1) / WIDTH + eps)
        # A thread holds the same columns of all rows, and adds them in ascending order.
        total += tl.sum(v * share[:, None], 0)
    tl.store(out + token * WIDTH + cols, rounded(total, out.dtype.element_ty), inside)


def normed(x: Tensor, norm: Gain | None, eps: float, dtype: torch.dtype) -> Tensor:
    """`pieces.normed` in one launch: [..., W] of any float dtype -> [..., W] in `dtype`; None: `norms.plain_norm`."""
    rows, factor = _rows(x), None if norm is None else norm.factor
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        sizes = {"HAS_NORM": norm is not None, **_whole(x.device, x.shape[-1])}
        _normed_kernel[(len(rows),)](rows, factor, out, rows.stride(0), eps, **sizes)
    return out


def join(
    h: Tensor,
    branch: Tensor,
    scale: Gain | None,
    mix: Mix,
    norm: Gain | None,
    post_eps: float,
    eps: float,
    dtype: torch.dtype,
) -> Joined:
    """`pieces.join` in one launch: h float32 [..., H], branch [P, ..., H / P] of any float dtype and any strides.

    On a device h and the vectors must not be what the kernel just before wrote.
    """
    as_it_is = norm is None or dtype != torch.float32
    h_rows, parts = _rows(h), rows_in_parts(branch)
    h_out = torch.empty(h.shape, dtype=torch.float32, device=h.device)
    a_out = h_out if norm is None else torch.empty(h.shape, dtype=dtype, device=h.device)
    also = a_out if as_it_is else torch.empty(h.shape, dtype=torch.bfloat16, device=h.device)
    if h.numel():
        _join_kernel[(len(h_rows),)](
            h_rows,
            parts,
            None if scale is None else scale.factor,
            *mix,
            None if norm is None else norm.factor,
            h_out,
            a_out,
            also,
            h_rows.stride(0),
            parts.stride(0),
            parts.stride(1),
            post_eps,
            eps,
            **{"HAS_SCALE": scale is not None, "HAS_NORM": norm is not None, "PART": parts.shape[-1]},
            **_whole(h.device, h.shape[-1], len(h_rows)),
        )
    return Joined(h_out, a_out, () if as_it_is else also)


def blend(y_TRM: Tensor, weight_TR: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """`pieces.blend` in one launch: [T, R, M] of any float dtype -> [T, M] in `dtype`.

    Routes are added in ascending order, in groups of eight (two beyond 4096 columns) where there are more. On a device
    the weights and the norm must not be what the kernel just before wrote.
    """
    tokens, count, width = y_TRM.shape
    out = torch.empty(tokens, width, dtype=dtype, device=y_TRM.device)
    if out.numel():
        rows = min(triton.next_power_of_2(count), 8 if width <= WIDEST // 2 else 2)  # as many as registers hold
        _blend_kernel[(tokens,)](
            y_TRM.contiguous(),
            weight_TR.contiguous(),
            norm.factor,
            out,
            eps,
            **{"COUNT": count, "ROWS": rows, **_whole(y_TRM.device, width, tokens, least=512)},
        )
    return out


def why_not(x: Tensor) -> str:
    """Why `normed` cannot take these rows; "" if it can."""
    return _no_floats(x) or _too_wide(x.shape[-1] if x.dim() else 0)


def why_not_in_parts(parts: Tensor, shape: Sequence[int]) -> str:
    """Why these are not rows [P, ..., W / P] of such a shape [..., W] that a program holds; "" if they are."""
    if parts.dim() != len(shape) + 1 or [*parts.shape[1:-1], len(parts) * parts.shape[-1]] != list(shape):
        return f"rows are {list(parts.shape)}: must be parts [P, ..., W / P] of {list(shape)}"
    return _no_floats(parts) or _too_wide(shape[-1])


def why_not_blend(y_TRM: Tensor) -> str:
    """Why `blend` cannot take these rows; "" if it can."""
    if y_TRM.dtype not in FLOATS or y_TRM.dim() != 3 or not y_TRM.shape[1]:
        return f"rows of routes are {y_TRM.dtype} {list(y_TRM.shape)}: must be floats of 2 or 4 bytes [T, R, M], R > 0"
    return _too_wide(y_TRM.shape[-1])


def _no_floats(x: Tensor) -> str:
    return "" if x.dtype in FLOATS else f"rows are {x.dtype}: must be one of {', '.join(map(str, FLOATS))}"


def _too_wide(width: int) -> str:
    return "" if 0 < width <= WIDEST else f"rows have {width} columns: must be 1 to {WIDEST}"


def _rows(x: Tensor) -> Tensor:
    """[rows, W] with adjacent columns; a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rows_in_parts(parts: Tensor) -> Tensor:
    """[P, rows, W / P] with adjacent columns; a view where strides allow it, as for parts that are all one."""
    rows = parts.reshape(len(parts), -1, parts.shape[-1])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _whole(device: torch.device, width: int, rows: int = MANY - 1, least: int = 256) -> dict[str, Any]:
    """Settings of a program that holds a row: threads for 16 bytes of bfloat16 each, or twice that; of many `rows`
    more, so that several programs fit on a multiprocessor; of few a warp for `least` columns. Unless said, rows are
    neither few nor many."""
    block, early = triton.next_power_of_2(width), overlaps(device)
    warps = max(block // least, 1) if rows <= FEW else min(max(block // 256, 1), 16 if rows < MANY else 8)
    return {"WIDTH": width, "BLOCK": block, "num_warps": warps, "PDL": early, "launch_pdl": early}


_JOINED = {"HAS_SCALE": True, "HAS_NORM": True, "WIDTH": 8192, "BLOCK": 8192, "PDL": True, "h_stride": 8192}
_WHOLE, _EIGHTHS = ({"PART": n, "part_stride": n, "branch_stride": n} for n in (8192, 1024))
_OF_JOIN = {
    **dict.fromkeys(("h", "branch", "scale", "alpha", "beta", "norm", "h_out"), "*fp32"),
    **{"a_out": "*bf16", "rounded_out": "*bf16", "post_eps": "fp32", "eps": "fp32"},
}
_OF_NORMED = {"x": "*fp32", "norm": "*fp32", "out": "*bf16", "eps": "fp32"}
_OF_BLEND = {"y": "*bf16", "weight": "*fp32", "norm": "*fp32", "out": "*fp32", "eps": "fp32"}
_OPTIONS = {"num_warps": 16, "launch_pdl": True}
COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    *(
        (
            _normed_kernel,
            _OF_NORMED,
            {"HAS_NORM": has_norm, "WIDTH": 8192, "BLOCK": 8192, "PDL": True, "x_stride": 8192},
            _OPTIONS,
        )
        for has_norm in (True, False)
    ),
    (_join_kernel, _OF_JOIN, {**_JOINED, **_WHOLE}, {**_OPTIONS, "num_warps": 32}),
    (_join_kernel, _OF_JOIN, {**_JOINED, **_WHOLE}, _OPTIONS),
    (_join_kernel, {**_OF_JOIN, "branch": "*bf16", "a_out": "*fp32"}, {**_JOINED, **_EIGHTHS}, _OPTIONS),
    *(
        (
            _blend_kernel,
            {**_OF_BLEND, "y": y},
            {"COUNT": 8, "ROWS": 8, "WIDTH": 4096, "BLOCK": 4096, "PDL": True},
            {**_OPTIONS, "num_warps": warps},
        )
        for y, warps in (("*bf16", 8), ("*bf16", 16), ("*fp32", 16))
    ),
]
