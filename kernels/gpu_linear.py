"""Products of few rows with plain matrices by Triton: every weight is read once, several matrices in one launch.

One row: a program takes a few rows of one matrix and all of its inputs, in float32. Two to MOST_ROWS: a program of one
warp takes 16 rows of a matrix on tensor cores; float32 matrices go by the first way up to FEW rows. Above, the
library's matrix product reads weights about as fast.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.gpu import dot, inputs_ready, outputs_coming, overlaps
from muse_fn.kernels.packed import Weight

FEW = 4
MOST_ROWS = 16
MOST_MATRICES = 4
OUT, STEP = 2, 1024  # rows of a matrix that one program takes, and inputs of such a row at once
DOT_OUT, DOT_STEP, DOT_STAGES = 16, 256, 5  # the same on tensor cores


@triton.jit
def _rows(x_ptr, w_ptr, y_ptr, n, N, K: tl.constexpr, T: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr):
    """Rows n .. n + OUT of one matrix with each of T inputs, 4 at most, in float32."""
    out = n + tl.arange(0, OUT)
    valid = out < N
    column = tl.arange(0, STEP)
    dtype = w_ptr.dtype.element_ty
    # A sum for every row of the input; those beyond T are never touched and cost nothing.
    a = tl.zeros((OUT, STEP), tl.float32)
    b = tl.zeros((OUT, STEP), tl.float32)
    c = tl.zeros((OUT, STEP), tl.float32)
    d = tl.zeros((OUT, STEP), tl.float32)
    for start in range(0, K, STEP):
        k = start + column
        here = k < K
        w = tl.load(w_ptr + out[:, None].to(tl.int64) * K + k[None, :], mask=valid[:, None] & here[None, :], other=0.0)
        w = w.to(tl.float32)
        a += w * tl.load(x_ptr + k, mask=here, other=0.0).to(dtype).to(tl.float32)[None, :]
        if T > 1:
            b += w * tl.load(x_ptr + K + k, mask=here, other=0.0).to(dtype).to(tl.float32)[None, :]
        if T > 2:
            c += w * tl.load(x_ptr + 2 * K + k, mask=here, other=0.0).to(dtype).to(tl.float32)[None, :]
        if T > 3:
            d += w * tl.load(x_ptr + 3 * K + k, mask=here, other=0.0).to(dtype).to(tl.float32)[None, :]
    tl.store(y_ptr + out, tl.sum(a, 1).to(dtype), mask=valid)
    if T > 1:
        tl.store(y_ptr + N + out, tl.sum(b, 1).to(dtype), mask=valid)
    if T > 2:
        tl.store(y_ptr + 2 * N + out, tl.sum(c, 1).to(dtype), mask=valid)
    if T > 3:
        tl.store(y_ptr + 3 * N + out, tl.sum(d, 1).to(dtype), mask=valid)


@triton.jit
def _dots(x_ptr, w_ptr, y_ptr, n, N, T, K: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    """Rows n .. n + OUT of one matrix with T inputs of its dtype, ROWS at most. K is a multiple of STEP."""
    out, t, k = n + tl.arange(0, OUT), tl.arange(0, ROWS), tl.arange(0, STEP)
    row = tl.minimum(out, N - 1).to(tl.int64) * K  # what lies beyond is computed and not stored: no masks in the loop
    token = tl.minimum(t, T - 1).to(tl.int64) * K
    acc = tl.zeros((OUT, ROWS), tl.float32)
    for step in tl.range(0, K // STEP, num_stages=STAGES):
        w = tl.load(w_ptr + row[:, None] + step * STEP + k[None, :])
        x = tl.load(x_ptr + token[None, :] + step * STEP + k[:, None])
        acc = dot(w, x, acc)
    to = y_ptr + t[None, :].to(tl.int64) * N + out[:, None]
    tl.store(to, acc.to(w_ptr.dtype.element_ty), mask=(out < N)[:, None] & (t < T)[None, :])


@triton.jit
def _one(x_ptr, w_ptr, y_ptr, n, N, T, K: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
         STAGES: tl.constexpr, DOTS: tl.constexpr):  # fmt: skip
    if DOTS:
        _dots(x_ptr, w_ptr, y_ptr, n, N, T, K, ROWS, OUT, STEP, STAGES)
    else:
        _rows(x_ptr, w_ptr, y_ptr, n, N, K, ROWS, OUT, STEP)


@triton.jit
def _linears_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, n0, n1, n2, n3, T,
    K: tl.constexpr, ROWS: tl.constexpr, MATRICES: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, DOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    inputs_ready(PDL)
    at = tl.program_id(0)
    p0, p1, p2 = tl.cdiv(n0, OUT), tl.cdiv(n1, OUT), tl.cdiv(n2, OUT)
    if at < p0:
        _one(x_ptr, w0_ptr, y0_ptr, at * OUT, n0, T, K, ROWS, OUT, STEP, STAGES, DOTS)
    elif MATRICES > 1:
        if at < p0 + p1:
            _one(x_ptr, w1_ptr, y1_ptr, (at - p0) * OUT, n1, T, K, ROWS, OUT, STEP, STAGES, DOTS)
        elif MATRICES > 2:
            if at < p0 + p1 + p2:
                _one(x_ptr, w2_ptr, y2_ptr, (at - p0 - p1) * OUT, n2, T, K, ROWS, OUT, STEP, STAGES, DOTS)
            elif MATRICES > 3:
                _one(x_ptr, w3_ptr, y3_ptr, (at - p0 - p1 - p2) * OUT, n3, T, K, ROWS, OUT, STEP, STAGES, DOTS)
    outputs_coming(PDL)


def linears(x: Tensor, ws: Sequence[Weight]) -> tuple[Tensor, ...]:
    """pieces.linears: one launch for all matrices of a dtype where `why_not` has nothing to say."""
    if why_not(x, ws):
        return tuple(reference.linear(x, w) for w in ws)
    rows = x.flatten(0, -2).contiguous()
    matrices = [w for w in ws if isinstance(w, Tensor)]
    if len(rows) == 1:
        found = _launch(rows, matrices, dots=False)
    else:
        found = [torch.empty(0)] * len(ws)
        for dtype in {w.dtype for w in matrices}:
            places = [n for n, w in enumerate(matrices) if w.dtype == dtype]
            mine = [matrices[n] for n in places]
            dots = dtype == torch.bfloat16 and rows.shape[1] % DOT_STEP == 0
            if not dots and len(rows) > FEW:
                made = [reference.linear(rows, w) for w in mine]
            else:
                made = _launch(rows.to(dtype) if dots else rows, mine, dots=dots)
            for n, y in zip(places, made, strict=True):
                found[n] = y
    return tuple(y.unflatten(0, x.shape[:-1]) for y in found)


def _launch(rows: Tensor, matrices: list[Tensor], *, dots: bool) -> list[Tensor]:
    count, width = rows.shape
    found = [torch.empty(count, len(w), dtype=w.dtype, device=rows.device) for w in matrices]
    spare = MOST_MATRICES - len(matrices)
    sizes = [len(w) for w in matrices] + [0] * spare
    out, step = (DOT_OUT, DOT_STEP) if dots else (OUT, min(STEP, triton.next_power_of_2(width)))
    pdl = overlaps(rows.device)
    _linears_kernel[(sum(-(-n // out) for n in sizes),)](
        rows, *matrices, *matrices[:1] * spare, *found, *found[:1] * spare, *sizes, count,
        K=width, ROWS=MOST_ROWS if dots else count, MATRICES=len(matrices), OUT=out,
        STEP=step, STAGES=DOT_STAGES, DOTS=dots, PDL=pdl, launch_pdl=pdl, num_warps=out // 16 if dots else 4,
    )  # fmt: skip
    return found


def linear(x: Tensor, w: Weight) -> Tensor:
    """reference.linear likewise."""
    return linears(x, (w,))[0]


def why_not(x: Tensor, ws: Sequence[Weight]) -> str:
    """Why these operands do not fit the kernels; "" if they do."""
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= MOST_ROWS:
        return f"{rows} rows: from 1 to {MOST_ROWS} alone"
    if len(ws) > MOST_MATRICES:
        return f"{len(ws)} matrices: {MOST_MATRICES} at most"
    for w in ws:
        if not isinstance(w, Tensor) or w.dtype not in (torch.bfloat16, torch.float32):
            return "a matrix is packed or neither bfloat16 nor float32"
        if not w.is_contiguous():
            return "a matrix is not contiguous"
    return "" if x.dtype in (torch.bfloat16, torch.float32) else f"inputs are {x.dtype}: bfloat16 and float32 alone"
