"""Products of a few rows with small bfloat16 matrices: weights go from memory into the tensor cores' registers.

For matrices so small that a program on each multiprocessor takes them all: many of a program's weights are then on
their way before its inputs are there. A thread reads 16 bytes, 8 neighbouring weights of a row of which four threads
read 32, and keeps them: the tensor core takes them as four inputs of each of two products, for which inputs are
numbered anew, in both factors alike. Column 8 q + 4 i + j of 32 is input 16 i + 4 q + j.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import math
from collections.abc import Iterable

import triton
import triton.language as tl

from muse_fn.kernels.gpu import dot, inputs_ready, rounded
from muse_fn.kernels.gpu_whole import own_words, words

ROWS = 8  # of a matrix for each program
WARPS = 8  # each has its part of the inputs
REGISTERS = 128  # of a thread: with what the compiler takes by itself it reads weights late
MOST = 4  # rows of inputs; the kernel has places for 16, but more of them are as fast in the usual form
MOST_CHUNKS = 8  # of 32 inputs, read together
MOST_GROUPS = 8  # of chunks: the loop over them is unrolled


def chunks(matrices: Iterable[int], width: int, count: int, processors: int) -> int:
    """How many chunks of `width` inputs are read together if `count` rows are to be multiplied with bfloat16 matrices
    of these numbers of rows; 0: another form is better."""
    programs = sum(-(-rows // ROWS) for rows in matrices)
    every, rest = divmod(width, 32 * WARPS)
    if not 1 < count <= MOST or not 0 < programs <= processors or rest:
        return 0
    together = math.gcd(every, MOST_CHUNKS)
    return together if every <= together * MOST_GROUPS else 0


@triton.jit
def _halves(x):
    """int32 [...] -> the bfloat16 in its halves, [..., 2]."""
    return tl.join(x.to(tl.int16), (x >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _weights(x, S: tl.constexpr, C: tl.constexpr):
    """Words of a group [8, S, C, 4, 2, 2], row, part, chunk, q, i and pair -> bfloat16 [S, 32 C, 8]."""
    return tl.reshape(tl.permute(_halves(x), (1, 2, 4, 3, 5, 6, 0)), (S, 32 * C, 8))


@triton.jit
def _inputs(at, own, S: tl.constexpr, C: tl.constexpr):
    """The same of up to 16 rows of inputs, addresses [2, 8, S, C, 4] -> [S, 16, 32 C]; zeros for rows that are none."""
    x = _halves(own_words(at, own))
    return tl.reshape(tl.permute(x, (2, 0, 1, 3, 5, 4, 6, 7)), (S, 16, 32 * C))


@triton.jit
def direct(
    x_ptr, w_ptr, y_ptr, n, N, T, K: tl.constexpr, S: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows n .. n + 8 of one matrix [N, K] with T rows of inputs, both bfloat16, in parts of K / S for each warp.

    While a group of C chunks is multiplied the next two are on their way.
    """
    GROUPS: tl.constexpr = K // S // (32 * C)
    r, s, c, q = tl.arange(0, 8), tl.arange(0, S), tl.arange(0, C), tl.arange(0, 4)
    k = s[:, None, None] * (K // S // 2) + c[None, :, None] * 16 + q[None, None, :] * 4  # in words
    row = tl.minimum(n + r, N - 1).to(tl.int64)  # what lies beyond is computed and not stored
    w_at = w_ptr.to(tl.pointer_type(tl.int32)) + row[:, None, None, None] * (K // 2) + k[None]
    now = words(w_at)
    coming = now
    if GROUPS > 1:
        coming = words(w_at + 16 * C)
    inputs_ready(PDL)
    m = tl.arange(0, 2)[:, None] * 8 + r[None, :]
    own = (m < T).to(tl.int32)[:, :, None, None, None] + k[None, None] * 0
    x_at = x_ptr.to(tl.pointer_type(tl.int32)) + m[:, :, None, None, None] * (K // 2) + k[None, None]
    acc = tl.zeros((S, 16, 8), tl.float32)
    x = _inputs(x_at, own, S, C)
    for g in tl.static_range(GROUPS):
        weights, inputs = now, x
        if g + 1 < GROUPS:
            x = _inputs(x_at + (g + 1) * (16 * C), own, S, C)
        now = coming
        if g + 2 < GROUPS:
            coming = words(w_at + (g + 2) * (16 * C))
        acc = dot(inputs, _weights(weights, S, C), acc)
    t, out = tl.arange(0, 16)[:, None], n + r[None, :]
    y = rounded(tl.sum(acc, 0), y_ptr.dtype.element_ty)
    tl.store(y_ptr + t.to(tl.int64) * N + out, y, mask=(t < T) & (out < N))
