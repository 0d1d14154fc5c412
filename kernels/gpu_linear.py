"""Products of few rows with plain matrices by Triton: every weight is read once, several matrices in one launch.

One row, or a float32 matrix: a program takes a few rows of the matrix and all inputs of FEW tokens, in float32. More
rows with a bfloat16 matrix: 16 rows of it on tensor cores, each warp a part of the inputs. Above MOST_ROWS the
library's matrix product reads weights about as fast.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.gpu import dot, inputs_ready, overlaps, prefetch, rounded
from muse_fn.kernels.packed import Weight

FEW = tl.constexpr(4)
MOST_ROWS = 16
MOST_MATRICES = 4
OUT, STEP = 2, 1024  # rows of a matrix that one program takes, and inputs of such a row at once
DOT_OUT, DOT_STEPS, DOT_STAGES = tl.constexpr(16), (128, 64), 4  # the same on tensor cores, for each warp
WARPS = tl.constexpr(4)


@triton.jit
def _input(x_ptr, token, T, k, here, K: tl.constexpr, dtype: tl.constexpr):
    """Some inputs of one token, or of the last one, rounded to the matrix's dtype."""
    at = x_ptr + tl.minimum(token, T - 1).to(tl.int64) * K + k
    return rounded(tl.load(at, mask=here, other=0.0).to(tl.float32), dtype).to(tl.float32)[None, :]


@triton.jit
def _rows(x_ptr, w_ptr, y_ptr, n, first, N, T, K: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
          ALONE: tl.constexpr):  # fmt: skip
    """Rows n .. n + OUT of one matrix with the inputs of FEW tokens from `first` on, in float32."""
    out = n + tl.arange(0, OUT)
    valid = out < N
    dtype = w_ptr.dtype.element_ty
    # A sum for every token; of those beyond one that is ALONE nothing is computed.
    a = tl.zeros((OUT, STEP), tl.float32)
    b = tl.zeros((OUT, STEP), tl.float32)
    c = tl.zeros((OUT, STEP), tl.float32)
    d = tl.zeros((OUT, STEP), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        here = k < K
        w = tl.load(w_ptr + out[:, None].to(tl.int64) * K + k[None, :], mask=valid[:, None] & here[None, :], other=0.0)
        w = w.to(tl.float32)
        a += w * _input(x_ptr, first, T, k, here, K, dtype)
        if not ALONE:
            b += w * _input(x_ptr, first + 1, T, k, here, K, dtype)
            c += w * _input(x_ptr, first + 2, T, k, here, K, dtype)
            d += w * _input(x_ptr, first + 3, T, k, here, K, dtype)
    y_ptr += first.to(tl.int64) * N + out
    tl.store(y_ptr, rounded(tl.sum(a, 1), dtype), mask=valid)
    if not ALONE:
        tl.store(y_ptr + N, rounded(tl.sum(b, 1), dtype), mask=valid & (first + 1 < T))
        tl.store(y_ptr + 2 * N, rounded(tl.sum(c, 1), dtype), mask=valid & (first + 2 < T))
        tl.store(y_ptr + 3 * N, rounded(tl.sum(d, 1), dtype), mask=valid & (first + 3 < T))


@triton.jit
def _dots(x_ptr, w_ptr, y_ptr, n, N, T, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr):
    """Rows n .. n + DOT_OUT of one matrix with T inputs, ROWS at most; K is a multiple of WARPS * STEP."""
    out, t, k = n + tl.arange(0, DOT_OUT), tl.arange(0, ROWS), tl.arange(0, STEP)
    part = tl.arange(0, WARPS) * (K // WARPS)
    row = tl.minimum(out, N - 1).to(tl.int64) * K  # what lies beyond is computed and not stored: no masks in the loop
    token = tl.minimum(t, T - 1).to(tl.int64) * K
    acc = tl.zeros((WARPS, DOT_OUT, ROWS), tl.float32)
    for step in tl.range(0, K // (WARPS * STEP), num_stages=STAGES):
        w = tl.load(w_ptr + row[None, :, None] + part[:, None, None] + step * STEP + k[None, None, :])
        x = tl.load(x_ptr + token[None, None, :] + part[:, None, None] + step * STEP + k[None, :, None])
        if x.dtype != w.dtype:
            x = rounded(x, w.dtype)
        acc = dot(w, x, acc)
    to = y_ptr + t[None, :].to(tl.int64) * N + out[:, None]
    tl.store(to, rounded(tl.sum(acc, 0), w_ptr.dtype.element_ty), mask=(out < N)[:, None] & (t < T)[None, :])


@triton.jit
def _ask_for(w_ptr, n, N, K: tl.constexpr, OUT: tl.constexpr):
    """Rows n .. n + OUT of one matrix, line by line of 128 bytes."""
    line: tl.constexpr = 128 * 8 // w_ptr.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = triton.next_power_of_2(OUT * K // line + 1)
    last = (tl.minimum(n + OUT, N) - n).to(tl.int64) * K - 1
    prefetch(w_ptr + n.to(tl.int64) * K + tl.minimum(tl.arange(0, lines) * line, last))


@triton.jit
def _programs(w_ptr, N, T, OUT: tl.constexpr, DOTS: tl.constexpr):
    if DOTS and w_ptr.dtype.element_ty == tl.bfloat16:
        return tl.cdiv(N, DOT_OUT)
    else:
        return tl.cdiv(N, OUT) * tl.cdiv(T, FEW)


@triton.jit
def _one(x_ptr, w_ptr, y_ptr, at, N, T, K: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
         DOT_STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if DOT_STEP and w_ptr.dtype.element_ty == tl.bfloat16:
        n = at * DOT_OUT
        if PDL:
            _ask_for(w_ptr, n, N, K, DOT_OUT)
        inputs_ready(PDL)
        _dots(x_ptr, w_ptr, y_ptr, n, N, T, K, ROWS, DOT_STEP, STAGES)
    else:
        groups = tl.cdiv(T, FEW)
        n = at // groups * OUT
        if PDL:
            _ask_for(w_ptr, n, N, K, OUT)
        inputs_ready(PDL)
        _rows(x_ptr, w_ptr, y_ptr, n, at % groups * FEW, N, T, K, OUT, STEP, ROWS == 1)


@triton.jit
def _linears_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, n0, n1, n2, n3, T,
    K: tl.constexpr, ROWS: tl.constexpr, MATRICES: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
    DOT_STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    p0 = _programs(w0_ptr, n0, T, OUT, DOT_STEP != 0)
    p1 = p0 + _programs(w1_ptr, n1, T, OUT, DOT_STEP != 0)
    p2 = p1 + _programs(w2_ptr, n2, T, OUT, DOT_STEP != 0)
    if at < p0:
        _one(x_ptr, w0_ptr, y0_ptr, at, n0, T, K, ROWS, OUT, STEP, DOT_STEP, STAGES, PDL)
    elif MATRICES > 1:
        if at < p1:
            _one(x_ptr, w1_ptr, y1_ptr, at - p0, n1, T, K, ROWS, OUT, STEP, DOT_STEP, STAGES, PDL)
        elif MATRICES > 2:
            if at < p2:
                _one(x_ptr, w2_ptr, y2_ptr, at - p1, n2, T, K, ROWS, OUT, STEP, DOT_STEP, STAGES, PDL)
            elif MATRICES > 3:
                _one(x_ptr, w3_ptr, y3_ptr, at - p2, n3, T, K, ROWS, OUT, STEP, DOT_STEP, STAGES, PDL)


def linears(x: Tensor, ws: Sequence[Weight]) -> tuple[Tensor, ...]:
    """pieces.linears, by one launch where `why_not` has nothing to say."""
    if why_not(x, ws):
        return tuple(reference.linear(x, w) for w in ws)
    rows = x.flatten(0, -2).contiguous()
    (count, width), matrices = rows.shape, [w for w in ws if isinstance(w, Tensor)]
    found = [torch.empty(count, len(w), dtype=w.dtype, device=x.device) for w in matrices]
    spare = MOST_MATRICES - len(matrices)
    sizes = [len(w) for w in matrices] + [0] * spare
    dot_step = 0 if count == 1 else next((n for n in DOT_STEPS[x.itemsize // 4 :] if width % (WARPS.value * n) == 0), 0)
    groups = -(-count // FEW.value)
    programs = (
        -(-len(w) // DOT_OUT.value) if dot_step and w.dtype == torch.bfloat16 else -(-len(w) // OUT) * groups
        for w in matrices
    )
    pdl = overlaps(x.device)
    _linears_kernel[(sum(programs),)](
        rows, *matrices, *matrices[:1] * spare, *found, *found[:1] * spare, *sizes, count,
        K=width, ROWS=1 if count == 1 else MOST_ROWS, MATRICES=len(matrices), OUT=OUT,
        STEP=min(STEP, triton.next_power_of_2(width)), DOT_STEP=dot_step, STAGES=DOT_STAGES, PDL=pdl, launch_pdl=pdl,
        num_warps=WARPS.value,
    )  # fmt: skip
    return tuple(y.unflatten(0, x.shape[:-1]) for y in found)


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


_OPTIONS = {"num_warps": WARPS.value, "launch_pdl": True}
COMPILED = [  # kernel, types of its arguments, constants, options: the heads of a card, then the router with squeeze
    (
        _linears_kernel,
        {
            **{"x_ptr": x, **{f"{side}{n}_ptr": types[n] for side in "wy" for n in range(MOST_MATRICES)}},
            **{f"n{n}": "i32" for n in range(MOST_MATRICES)}, **({} if "T" in rows else {"T": "i32"}),
        },
        {"K": 8192, "MATRICES": count, "OUT": OUT, "STEP": STEP, "STAGES": DOT_STAGES, "PDL": True, **rows},
        _OPTIONS,
    )
    for x, types, count in (("*bf16", ("*bf16",) * 4, 4), ("*fp32", ("*fp32", "*bf16", "*fp32", "*fp32"), 2))
    for rows in ({"T": 1, "ROWS": 1, "DOT_STEP": 0}, {"ROWS": MOST_ROWS, "DOT_STEP": DOT_STEPS[x == "*fp32"]})
]  # fmt: skip
