"""Products of few rows with plain matrices by Triton: every weight is read once, several matrices in one launch.

One program takes some rows of one matrix and all of its inputs, in steps; products and sums are float32. More rows than
MOST_ROWS go to the library's matrix product, which then reads weights about as fast.
"""

# pyright: basic
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.gpu import inputs_ready, outputs_coming, overlaps
from muse_fn.kernels.packed import Weight

MOST_ROWS = 4
MOST_MATRICES = 4
OUT = 4  # rows of a matrix that one program takes
STEP = 1024  # inputs of such a row at once


@triton.jit
def _rows(x_ptr, w_ptr, y_ptr, n, N, K: tl.constexpr, T: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr):
    """Rows n .. n + OUT of one matrix with each of T inputs."""
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
def _linears_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, n0, n1, n2, n3,
    K: tl.constexpr, T: tl.constexpr, MATRICES: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    inputs_ready(PDL)
    at = tl.program_id(0)
    p0, p1, p2 = tl.cdiv(n0, OUT), tl.cdiv(n1, OUT), tl.cdiv(n2, OUT)
    if at < p0:
        _rows(x_ptr, w0_ptr, y0_ptr, at * OUT, n0, K, T, OUT, STEP)
    elif MATRICES > 1:
        if at < p0 + p1:
            _rows(x_ptr, w1_ptr, y1_ptr, (at - p0) * OUT, n1, K, T, OUT, STEP)
        elif MATRICES > 2:
            if at < p0 + p1 + p2:
                _rows(x_ptr, w2_ptr, y2_ptr, (at - p0 - p1) * OUT, n2, K, T, OUT, STEP)
            elif MATRICES > 3:
                _rows(x_ptr, w3_ptr, y3_ptr, (at - p0 - p1 - p2) * OUT, n3, K, T, OUT, STEP)
    outputs_coming(PDL)


def linears(x: Tensor, ws: Sequence[Weight]) -> tuple[Tensor, ...]:
    """pieces.linears; by one launch where `why_not` has nothing to say."""
    if why_not(x, ws):
        return tuple(reference.linear(x, w) for w in ws)
    rows = x.flatten(0, -2).contiguous()
    count, width = rows.shape
    matrices = [w for w in ws if isinstance(w, Tensor)]
    found = [torch.empty(count, len(w), dtype=w.dtype, device=x.device) for w in matrices]
    spare = MOST_MATRICES - len(matrices)
    sizes = [len(w) for w in matrices] + [0] * spare
    programs = sum(-(-n // OUT) for n in sizes)
    pdl = overlaps(x.device)
    _linears_kernel[(programs,)](
        rows, *matrices, *matrices[:1] * spare, *found, *found[:1] * spare, *sizes,
        K=width, T=count, MATRICES=len(matrices), OUT=OUT, STEP=min(STEP, triton.next_power_of_2(width)),
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return tuple(y.unflatten(0, x.shape[:-1]) for y in found)


def linear(x: Tensor, w: Weight) -> Tensor:
    """reference.linear likewise."""
    return linears(x, (w,))[0]


def why_not(x: Tensor, ws: Sequence[Weight]) -> str:
    """Why these operands do not fit the kernel; "" if they do."""
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
