"""Products of few rows with plain matrices by Triton: every weight is read once, several matrices in one launch.

One row, and up to FEW of a float32 matrix: a program sums a few rows of the matrix in float32; its first weights are on
their way before the inputs are there. More rows: bfloat16 matrices on tensor cores, each warp a part of the inputs,
small ones from registers (kernels/gpu_direct.py); float32 matrices by float32 sums, since to split each factor into
parts for tensor cores would take more instructions than these few products do. Above MOST_ROWS, and for large matrices
above one row, the library's matrix product reads weights about as fast.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu_exact, reference
from muse_fn.kernels.gpu import dot, inputs_ready, overlaps, processors, rounded
from muse_fn.kernels.gpu_direct import direct
from muse_fn.kernels.gpu_linear_form import MOST_ROWS, form_of, most_registers
from muse_fn.kernels.packed import Weight

MOST_MATRICES = 4
LIBRARY_OUTPUTS = 1 << 16  # of a bfloat16 matrix and more than one row from which on the library is faster


@triton.jit
def _part_of_row(x_ptr, x_k, left, K: tl.constexpr, STEP: tl.constexpr, wide: tl.constexpr, dtype: tl.constexpr):
    """The next inputs of one row, rounded to `dtype`, float32 [STEP / wide, 1, wide]."""
    x = tl.load(x_ptr + x_k, mask=(x_k < left) | (K % STEP == 0), other=0.0).to(tl.float32)
    return tl.reshape(rounded(x, dtype).to(tl.float32), (STEP // wide, 1, wide))


@triton.jit
def _few_rows(
    x_ptr, w_ptr, y_ptr, n, N, T,
    K: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows n .. n + OUT of one matrix with one row of inputs, or up to four, in float32. Some are loaded while others
    are summed.

    Columns stand first, those next to each other last: so a thread has the same columns of all rows and of the inputs,
    16 bytes of a row at once, and adds up what it has. The caches are to keep what is read again, and no weights.
    """
    dtype = w_ptr.dtype.element_ty
    wide: tl.constexpr = 128 // dtype.primitive_bitwidth
    x_wide: tl.constexpr = min(wide, 128 // x_ptr.dtype.element_ty.primitive_bitwidth)
    out, group = n + tl.arange(0, OUT), tl.arange(0, STEP // wide) * wide
    row = tl.minimum(out, N - 1).to(tl.int64) * K  # what lies beyond is computed and not stored, of tokens too
    k = group[:, None, None] + tl.arange(0, wide)[None, None, :]
    part = tl.arange(0, wide // x_wide)[:, None] * x_wide + tl.arange(0, x_wide)[None, :]
    x_k = group[:, None, None, None] + part[None, None, :, :]
    at = w_ptr + row[None, :, None] + k
    w = tl.load(at, mask=(k < K) | (K % STEP == 0), other=0.0, eviction_policy="evict_first")
    inputs_ready(PDL)
    a = tl.zeros((STEP // wide, OUT), tl.float32)
    b, c, d = a, a, a
    for start in range(0, K, STEP):
        left = K - start
        if K % STEP:
            ahead = tl.load(at + start + STEP, mask=k < left - STEP, other=0.0, eviction_policy="evict_first")
        else:
            ahead = tl.load(at + start + STEP, mask=left > STEP, other=0.0, eviction_policy="evict_first")
        w = w.to(tl.float32)
        x_at = x_ptr + start
        a += tl.sum(w * _part_of_row(x_at, x_k, left, K, STEP, wide, dtype), 2)
        if TOKENS > 1:
            b += tl.sum(w * _part_of_row(x_at + K, x_k, left, K, STEP, wide, dtype), 2)
            c += tl.sum(w * _part_of_row(x_at + tl.minimum(2, T - 1) * K, x_k, left, K, STEP, wide, dtype), 2)
            d += tl.sum(w * _part_of_row(x_at + tl.minimum(3, T - 1) * K, x_k, left, K, STEP, wide, dtype), 2)
        w = ahead
    y_ptr += out
    tl.store(y_ptr, rounded(tl.sum(a, 0), y_ptr.dtype.element_ty), mask=out < N)
    if TOKENS > 1:
        tl.store(y_ptr + N, rounded(tl.sum(b, 0), y_ptr.dtype.element_ty), mask=out < N)
        tl.store(y_ptr + 2 * N, rounded(tl.sum(c, 0), y_ptr.dtype.element_ty), mask=(out < N) & (T > 2))
        tl.store(y_ptr + 3 * N, rounded(tl.sum(d, 0), y_ptr.dtype.element_ty), mask=(out < N) & (T > 3))


@triton.jit
def _sums(
    x_ptr, w_ptr, y_ptr, n, first, N, T,
    K: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows n .. n + OUT of one matrix with TOKENS rows of inputs from `first` on, in float32."""
    dtype = w_ptr.dtype.element_ty
    wide: tl.constexpr = 128 // dtype.primitive_bitwidth
    out, t, k = n + tl.arange(0, OUT), first + tl.arange(0, TOKENS), tl.arange(0, STEP)[None, None, :]
    w_at = w_ptr + out.to(tl.int64)[:, None, None] * K + k
    x_at = x_ptr + t[None, :, None] * K + k
    mine, asked = (out < N)[:, None, None], (t < T)[None, :, None]  # no memory is read for others
    acc = tl.zeros((OUT, TOKENS, STEP // wide), tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        here = (k < K - start) | (K % STEP == 0)
        w = tl.load(w_at + start, mask=mine & here, other=0.0).to(tl.float32)
        x = tl.load(x_at + start, mask=asked & here, other=0.0).to(tl.float32)
        both = w * rounded(x, dtype).to(tl.float32)
        acc += tl.sum(tl.reshape(both, (OUT, TOKENS, STEP // wide, wide)), 3)  # what one thread has
    to = y_ptr + t[None, :].to(tl.int64) * N + out[:, None]
    y = rounded(tl.sum(acc, 2), y_ptr.dtype.element_ty)
    tl.store(to, y, mask=(out < N)[:, None] & (t < T)[None, :])


@triton.jit
def _dots(
    x_ptr, w_ptr, y_ptr, n, N, T, out,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT_STEP: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows n .. n + out of one matrix, BLOCK at most, with T rows of inputs, for which ROWS have a place."""
    dtype = w_ptr.dtype.element_ty
    steps: tl.constexpr = (K + WARPS * DOT_STEP - 1) // (WARPS * DOT_STEP)
    row, t = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    k = tl.arange(0, WARPS)[:, None] * (steps * DOT_STEP) + tl.arange(0, DOT_STEP)[None, :]
    mine, asked = (row < out) & (n + row < N), t < T  # no memory is read for others
    w_at = w_ptr + (n + row).to(tl.int64)[None, :, None] * K + k[:, None, :]
    x_at = x_ptr + t[None, None, :] * K + k[:, :, None]
    acc = tl.zeros((WARPS, BLOCK, ROWS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        if K % (WARPS * DOT_STEP):
            here = k < K - step * DOT_STEP
            w = tl.load(w_at + step * DOT_STEP, mask=mine[None, :, None] & here[:, None, :], other=0.0)
            x = tl.load(x_at + step * DOT_STEP, mask=asked[None, None, :] & here[:, :, None], other=0.0)
        else:
            w = tl.load(w_at + step * DOT_STEP, mask=mine[None, :, None], other=0.0)
            x = tl.load(x_at + step * DOT_STEP, mask=asked[None, None, :], other=0.0)
        if x.dtype != dtype:
            x = rounded(x, dtype)
        acc = dot(w, x, acc)
    to = y_ptr + t[None, :].to(tl.int64) * N + n + row[:, None]
    tl.store(to, rounded(tl.sum(acc, 0), y_ptr.dtype.element_ty), mask=mine[:, None] & asked[None, :])


@triton.jit
def _find(
    ws, ys, ns, at, T, out, FIRST: tl.constexpr, LAST: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Of matrices FIRST .. LAST - 1 that of program `at`: weights, results, rows, the program's place among its own;
    and how many programs all take. Without OUT each takes `out` rows and all inputs."""
    w_ptr, y_ptr, n, place, begin = ws[FIRST], ys[FIRST], ns[FIRST], at, 0
    for i in tl.static_range(FIRST, LAST):
        mine = at >= begin
        w_ptr, y_ptr = tl.where(mine, ws[i], w_ptr), tl.where(mine, ys[i], y_ptr)
        n, place = tl.where(mine, ns[i], n), tl.where(mine, at - begin, place)
        begin += tl.cdiv(ns[i], OUT) * tl.cdiv(T, TOKENS) if OUT else tl.cdiv(ns[i], out)
    return w_ptr, y_ptr, n, place, begin


@triton.jit(do_not_specialize=["T", "out"])
def _linears_kernel(
    x_ptr, half_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, n0, n1, n2, n3, T, out,
    K: tl.constexpr, FLOATS: tl.constexpr, MATRICES: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT_STEP: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, FLOAT_STAGES: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FLOATS float32 matrices first, which take the inputs x, then bfloat16 ones, which take `half`. Those of a dtype
    share their instructions, for which each processor waits anew."""
    ws, ys, ns = (w0_ptr, w1_ptr, w2_ptr, w3_ptr), (y0_ptr, y1_ptr, y2_ptr, y3_ptr), (n0, n1, n2, n3)
    at, floats = tl.program_id(0), 0
    if FLOATS:
        w_ptr, y_ptr, n, place, floats = _find(ws, ys, ns, at, T, out, 0, FLOATS, OUT, TOKENS)
        if at < floats:
            if FLOAT_STAGES:
                inputs_ready(PDL)
                groups = tl.cdiv(T, TOKENS)
                start, first = place // groups * OUT, place % groups * TOKENS
                _sums(x_ptr, w_ptr, y_ptr, start, first, n, T, K, OUT, TOKENS, STEP, FLOAT_STAGES)
            else:
                _few_rows(x_ptr, w_ptr, y_ptr, place * OUT, n, T, K, OUT, TOKENS, STEP, PDL)
    if FLOATS < MATRICES:
        if at >= floats:
            each: tl.constexpr = 0 if BLOCK or CHUNKS else OUT
            m_ptr, to_ptr, m, its, _ = _find(ws, ys, ns, at - floats, T, out, FLOATS, MATRICES, each, TOKENS)
            if CHUNKS:
                direct(half_ptr, m_ptr, to_ptr, its * out, m, T, K, WARPS, CHUNKS, PDL)
            elif BLOCK:
                inputs_ready(PDL)
                _dots(half_ptr, m_ptr, to_ptr, its * out, m, T, out, K, ROWS, BLOCK, DOT_STEP, WARPS, STAGES)
            else:
                _few_rows(half_ptr, m_ptr, to_ptr, its * OUT, m, T, K, OUT, TOKENS, STEP, PDL)


def _launch(x: Tensor, half: Tensor, ws: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    rows, halves = (t.flatten(0, -2).contiguous() for t in (x, half))
    (count, width), spare, pdl = rows.shape, MOST_MATRICES - len(ws), overlaps(x.device)
    order = sorted(range(len(ws)), key=lambda i: ws[i].dtype != torch.float32)
    sizes = tuple((len(ws[i]), ws[i].dtype == torch.float32) for i in order)
    is_direct = half.dtype == torch.bfloat16 and all(t.data_ptr() % 16 == 0 for t in (halves, *ws))
    form = form_of(sizes, width, count, half.itemsize, processors(x.device), is_direct)
    found = [torch.empty(count, len(w), dtype=dtype or w.dtype, device=x.device) for w in ws]
    first = order[0]
    _linears_kernel[(sum(form.programs(size, count) for size in sizes),)](
        rows, halves, *[ws[i] for i in order], *[ws[first]] * spare,
        *[found[i] for i in order], *[found[first]] * spare,
        *[len(ws[i]) for i in order], *[0] * spare, count,
        **form._asdict(), K=width, FLOATS=sum(is_float for _, is_float in sizes), MATRICES=len(ws),
        PDL=pdl, launch_pdl=pdl, num_warps=form.WARPS, maxnreg=most_registers(sizes, form),
    )  # fmt: skip
    return [y.unflatten(0, x.shape[:-1]) for y in found]


def _library(x: Tensor, w: Weight, dtype: torch.dtype | None, half: Tensor) -> Tensor:
    """The library's product, but for many rows and a float32 matrix. On a CUDA device its sums of bfloat16 products can
    be had as they are."""
    if isinstance(w, Tensor) and not gpu_exact.why_not(x, w):
        return gpu_exact.linear(x, w)
    x = half if isinstance(w, Tensor) and w.dtype == half.dtype else x
    if isinstance(w, Tensor) and w.is_cuda and w.dtype == torch.bfloat16 and dtype == torch.float32:
        rows = x.to(w.dtype).flatten(0, -2)
        return torch.mm(rows, w.t(), out_dtype=dtype).unflatten(0, x.shape[:-1])
    y = reference.linear(x, w)
    return y if dtype is None else y.to(dtype)


def by_library(rows: int, w: Tensor) -> bool:
    """Whether the library is better for such a product, though the kernel could do it."""
    return rows > 1 and w.dtype == torch.bfloat16 and rows * len(w) >= LIBRARY_OUTPUTS


def linears(
    x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None = None, *, rounded: Tensor | tuple[()] = ()
) -> tuple[Tensor, ...]:
    """pieces.linears, by one launch where `why_not` has nothing to say, but for matrices that are the library's.

    dtype is that of all results, None each matrix's. Sums are in float32 and rounded once. bfloat16 matrices take their
    inputs as they are `rounded` already, if they are.
    """
    half = rounded if isinstance(rounded, Tensor) and rounded.dtype == torch.bfloat16 else x
    if why_not(x, ws):
        return tuple(_library(x, w, dtype, half) for w in ws)
    rows = x.numel() // x.shape[-1]
    ours = [w for w in ws if isinstance(w, Tensor) and not by_library(rows, w)]
    found = iter(_launch(x, half, ours, dtype) if ours else ())
    return tuple(_library(x, w, dtype, half) if by_library(rows, w) else next(found) for w in ws)


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """reference.linear likewise."""
    return linears(x, (w,), dtype)[0]


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


def _compiled(
    width: int, x: str, ws: tuple[tuple[int, str], ...], count: int, result: str | None = None
) -> tuple[object, ...]:
    """A launch for the released model on an H200, for a test that compiles it: matrices by their rows and types."""
    spare = ws[:1] * (MOST_MATRICES - len(ws))
    sizes = tuple((rows, kind == "fp32") for rows, kind in ws)
    half = "bf16" if "fp32" in [kind for _, kind in ws] else x
    form = form_of(sizes, width, count, 2 if half == "bf16" else 4, 132, half == "bf16")
    scalars = {f"n{n}": "i32" for n in range(MOST_MATRICES)} | ({} if count == 1 else {"T": "i32", "out": "i32"})
    types = {"x_ptr": f"*{x}", "half_ptr": f"*{half}", **scalars}
    for n, (_, kind) in enumerate(ws + spare):
        types |= {f"w{n}_ptr": f"*{kind}", f"y{n}_ptr": f"*{result or kind}"}
    constants = {name: value for name, value in form._asdict().items() if name not in scalars}
    constants |= {"K": width, "FLOATS": sum(kind == "fp32" for _, kind in ws), "MATRICES": len(ws), "PDL": True} | (
        {"T": 1} if count == 1 else {}
    )
    options = {"num_warps": form.WARPS, "launch_pdl": True, "maxnreg": most_registers(sizes, form)}
    return _linears_kernel, types, constants, options


COMPILED = [
    _compiled(*launch, count, *result)
    for launch, counts, *result in (
        ((8192, "bf16", ((1024, "bf16"), (128, "bf16"), (128, "bf16"), (1024, "bf16"))), (1, 4, 16)),  # heads, gate
        ((8192, "fp32", ((256, "fp32"), (512, "bf16"))), (1, 4, 16)),  # router, squeeze
        ((1024, "bf16", ((8192, "bf16"),)), (1, 4, 16)),
        ((1024, "bf16", ((8192, "bf16"),)), (1, 16), "fp32"),  # to be summed over ranks
        ((4096, "bf16", ((1024, "bf16"),)), (1, 4, 16)),  # expand
        ((8192, "fp32", ((25256, "bf16"),)), (1,)),  # head
    )
    for count in counts
]
