"""A product of many rows with a float32 matrix on tensor cores, about as exact as float32 sums: the router's.

A tensor core multiplies float32 numbers of 11 bits. Each factor is split into two such parts, x = h + l to 22 bits, and
hh' + lh' + hl' are added; ll' is below a float32's last bit. Tensor cores round sums coarsely, so that only STEP inputs
are added there and the rest in float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu
from muse_fn.kernels.gpu import INTERPRETED, inputs_ready, overlaps

FEWEST_ROWS = 128  # below, float32 sums of the library are no slower
ROWS, OUT, STEP = 64, 128, tl.constexpr(32)  # rows of inputs and of the matrix, and inputs, of a program's tile
STAGES, WARPS = 4, 4


@triton.jit
def _part(x):
    """x to 11 bits, to nearest. What is not finite stays so, and then the other part is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _split_kernel(w_ptr, high_ptr, low_ptr, COUNT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """A matrix in two parts."""
    inputs_ready(PDL)
    at = tl.program_id(0) * STEP + tl.arange(0, STEP)
    w = tl.load(w_ptr + at, mask=at < COUNT)
    tl.store(high_ptr + at, _part(w), mask=at < COUNT)
    tl.store(low_ptr + at, w - _part(w), mask=at < COUNT)


@triton.jit
def _product(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee" if INTERPRETED else "tf32")


@triton.jit(do_not_specialize=["T"])
def _exact_kernel(
    x_ptr, high_ptr, low_ptr, y_ptr, T, N, K: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x [T, K] with OUT rows of the matrix [N, K]."""
    inputs_ready(PDL)
    t, n, k = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * OUT + tl.arange(0, OUT),
        tl.arange(0, STEP),
    )
    x_at = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_at = tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((ROWS, OUT), tl.float32)
    for step in tl.range(0, K // STEP, num_stages=STAGES):
        x = tl.load(x_at + step * STEP)
        high, low = tl.load(high_ptr + w_at + step * STEP), tl.load(low_ptr + w_at + step * STEP)
        x_high = _part(x)
        part = _product(x - x_high, high, _product(x_high, low, tl.zeros((ROWS, OUT), tl.float32)))
        acc += _product(x_high, high, part)
    tl.store(y_ptr + t[:, None].to(tl.int64) * N + n[None, :], acc, mask=(t < T)[:, None] & (n < N)[None, :])


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x float32 [..., K] by w float32 [N, K] -> float32 [..., N]."""
    rows, (out, width), pdl = x.flatten(0, -2).contiguous(), w.shape, overlaps(x.device)
    high, low = torch.empty_like(w), torch.empty_like(w)
    y = torch.empty(len(rows), out, dtype=torch.float32, device=x.device)
    step = 4096
    _split_kernel[(triton.cdiv(w.numel(), step),)](w, high, low, w.numel(), step, PDL=pdl, launch_pdl=pdl, num_warps=8)
    _exact_kernel[(triton.cdiv(len(rows), ROWS), triton.cdiv(out, OUT))](
        rows, high, low, y, len(rows), out, width, ROWS, OUT, STAGES, PDL=pdl, launch_pdl=pdl, num_warps=WARPS
    )
    return y.unflatten(0, x.shape[:-1])


def why_not(x: Tensor, w: Tensor) -> str:
    """Why these operands do not fit `linear`; "" if they do."""
    if w.dtype != torch.float32 or x.dtype != torch.float32 or w.shape[1] % STEP.value or not w.is_contiguous():
        return f"inputs are {x.dtype}, the matrix {w.dtype} {list(w.shape)}: float32 alone, by {STEP.value} columns"
    rows = x.numel() // x.shape[-1]
    return gpu.why_not(x.device) if rows >= FEWEST_ROWS else f"{rows} rows: {FEWEST_ROWS} at least"


COMPILED = [
    (
        _split_kernel,
        {"w_ptr": "*fp32", "high_ptr": "*fp32", "low_ptr": "*fp32"},
        {"COUNT": 256 * 8192, "STEP": 4096, "PDL": True},
        {"num_warps": 8, "launch_pdl": True},
    ),
    (
        _exact_kernel,
        {"x_ptr": "*fp32", "high_ptr": "*fp32", "low_ptr": "*fp32", "y_ptr": "*fp32", "T": "i32", "N": "i32"},
        {"K": 8192, "ROWS": ROWS, "OUT": OUT, "STAGES": STAGES, "PDL": True},
        {"num_warps": WARPS, "launch_pdl": True},
    ),
]
