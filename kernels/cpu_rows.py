"""What stands between products, on a CPU without gradients: each row is read once and every output rounded once.

The contracts are those of the same names in kernels/pieces.py, for streams and vectors in float32 and branches in
bfloat16. Many rows are shared among threads, few are done where they are.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, address, call, compiled, helpers, threads
from muse_fn.kernels.cpu_pool import in_parallel
from muse_fn.kernels.cpu_scalars import argument, bf16, f32, i64, inline, narrow, real, wide
from muse_fn.kernels.cpu_vectors import claim
from muse_fn.kernels.norms import Gain, Mix
from muse_fn.kernels.pieces import ROUTE_EPS, Chosen, Joined, Routes

UNIT = 16  # rows that a thread claims at once


@inline
def rounded_row(row, scale, factor, width, out, is_float):
    """row * scale * factor, in float32 or bfloat16; without a factor if its address is 0."""
    if factor and is_float:
        by, to = f32(factor, width), f32(out, width)
        for n in range(width):
            to[n] = row[n] * scale * by[n]
    elif factor:
        by, small = f32(factor, width), bf16(out, width)
        for n in range(width):
            small[n] = narrow(row[n] * scale * by[n])
    elif is_float:
        to = f32(out, width)
        for n in range(width):
            to[n] = row[n] * scale
    else:
        small = bf16(out, width)
        for n in range(width):
            small[n] = narrow(row[n] * scale)


def _normed(a):
    """Arguments: 0 claims, 1 rows, 2 width, 3 x, 4 whether float32, 5 factor, 6 result, 7 whether float32, 8 room,
    9 the helpers' state, 10 this, 11 threads; then eps."""
    width, eps = argument(a, 2), real(a, 12)
    kept = f32(argument(a, 8), argument(a, 1) * width)
    while True:
        first = claim(a) * UNIT
        if first >= argument(a, 1):
            break
        for n in range(first, min(argument(a, 1), first + UNIT)):
            row, total = kept[n * width : (n + 1) * width], np.float32(0.0)
            if argument(a, 4):
                row = f32(argument(a, 3) + n * width * 4, width)
                for k in range(width):
                    total += row[k] * row[k]
            else:
                given = bf16(argument(a, 3) + n * width * 2, width)
                for k in range(width):
                    row[k] = wide(given[k])
                    total += row[k] * row[k]
            scale = np.float32(1.0) / math.sqrt(total / np.float32(width) + eps)
            size = 4 if argument(a, 7) else 2
            rounded_row(row, scale, argument(a, 5), width, argument(a, 6) + n * width * size, argument(a, 7))


def _join(a):
    """Arguments: 0 claims, 1 rows, 2 width, 3 h, 4 branch, 5 scale or 0, 6 alpha, 7 beta, 8 norm or 0, 9 the new h, 10
    the normed one, 11 whether that is float32; then post_eps, eps."""
    width, post_eps, eps = argument(a, 2), real(a, 12), real(a, 13)
    alpha, beta = f32(argument(a, 6), width), f32(argument(a, 7), width)
    while True:
        first = claim(a) * UNIT
        if first >= argument(a, 1):
            break
        for n in range(first, min(argument(a, 1), first + UNIT)):
            old, new = f32(argument(a, 3) + n * width * 4, width), f32(argument(a, 9) + n * width * 4, width)
            branch, total = bf16(argument(a, 4) + n * width * 2, width), np.float32(0.0)
            if argument(a, 5):
                by = f32(argument(a, 5), width)
                for k in range(width):
                    new[k] = wide(branch[k]) * by[k]
                    total += new[k] * new[k]
            else:
                for k in range(width):
                    new[k] = wide(branch[k])
                    total += new[k] * new[k]
            scale, total = np.float32(1.0) / math.sqrt(total / np.float32(width) + post_eps), np.float32(0.0)
            for k in range(width):
                new[k] = alpha[k] * old[k] + beta[k] * (new[k] * scale)
                total += new[k] * new[k]
            if argument(a, 8):
                scale = np.float32(1.0) / math.sqrt(total / np.float32(width) + eps)
                size = 4 if argument(a, 11) else 2
                rounded_row(new, scale, argument(a, 8), width, argument(a, 10) + n * width * size, argument(a, 11))


def _blend(a):
    """Arguments: 0 claims, 1 tokens, 2 width, 3 rows, 4 weights, 5 routes of a token, 6 factor, 7 result, 8 room of
    two rows for each token; then eps."""
    width, routes, eps = argument(a, 2), argument(a, 5), real(a, 9)
    by, weight = f32(argument(a, 6), width), f32(argument(a, 4), argument(a, 1) * routes)
    while True:
        first = claim(a) * UNIT
        if first >= argument(a, 1):
            break
        for n in range(first, min(argument(a, 1), first + UNIT)):
            row = f32(argument(a, 8) + n * width * 8, width)
            sums = f32(argument(a, 8) + n * width * 8 + width * 4, width)
            sums[:] = np.float32(0.0)
            for r in range(routes):
                given, total = bf16(argument(a, 3) + (n * routes + r) * width * 2, width), np.float32(0.0)
                for k in range(width):
                    row[k] = wide(given[k]) * by[k]
                    total += row[k] * row[k]
                scale = weight[n * routes + r] / math.sqrt(total / np.float32(width) + eps)
                for k in range(width):
                    sums[k] += row[k] * scale
            rounded_row(sums, np.float32(1.0), 0, width, argument(a, 7) + n * width * 2, False)


@inline
def _best(score, taken, experts):
    """The highest score not taken, the first of equals; what is no number counts as the highest."""
    best = -1
    for e in range(experts):
        if not taken[e] and (
            best < 0 or score[e] > score[best] or (score[e] != score[e] and score[best] == score[best])
        ):
            best = e
    return best


def _route(a):
    """Arguments: 0 tokens, 1 experts, 2 routes of a token, 3 logits, 4 bias, 5 room for scores, 6 room for marks, 7 the
    experts chosen, 8 their weights; then multiplier, factor, epsilon."""
    experts, top_k, multiplier, factor, eps = argument(a, 1), argument(a, 2), real(a, 9), real(a, 10), real(a, 11)
    bias, score, taken = f32(argument(a, 4), experts), f32(argument(a, 5), 2 * experts), i64(argument(a, 6), experts)
    for n in range(argument(a, 0)):
        logits = f32(argument(a, 3) + n * experts * 4, experts)
        idx, weight = i64(argument(a, 7) + n * top_k * 8, top_k), f32(argument(a, 8) + n * top_k * 4, top_k)
        for e in range(experts):
            found = np.float32(1.0 / (1.0 + math.exp(-np.float64(logits[e] * multiplier))))
            score[experts + e], score[e], taken[e] = found, found + bias[e], 0
        for _ in range(top_k):
            taken[_best(score, taken, experts)] = 1
        total, r = np.float32(0.0), 0
        for e in range(experts):
            if taken[e]:
                idx[r], weight[r] = e, score[experts + e]
                total += weight[r]
                r += 1
        for r in range(top_k):
            weight[r] = weight[r] / (total + eps) * factor


def shared(form, numbers: list[int], real: tuple[float, ...]) -> Work:
    """A form whose second argument is its rows, on as many threads as they are worth."""
    many = threads(numbers[1] // UNIT)
    if many == 1:
        return Work(form, numbers, real)
    return Work(_started, [helpers(many), compiled(form)[1], many, 0, *numbers], real)


def _started(a):
    """Arguments: the helpers' state, the form, threads, 0, then the form's own."""
    in_parallel(argument(a, 0), argument(a, 1), a + 32, argument(a, 2))


def norm_of(
    x: int, is_float: bool, count: int, width: int, factor: int, eps: float, out: int, to_float: bool, room: int
) -> Work:
    """Rows at an address normed, times a factor unless its address is 0, to another; there is room for them in
    float32."""
    return shared(_normed, [0, count, width, x, is_float, factor, out, to_float, room, 0, 0, 0], (eps,))


def normed(x: Tensor, norm: Gain | None, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.normed for x in float32 or bfloat16 [..., W]; norms.plain_norm where no factor is given."""
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    is_float = x.dtype == torch.float32
    room = out if is_float else torch.empty_like(x, dtype=torch.float32)
    given = x.data_ptr(), is_float, x.numel() // width, width, address(norm and norm.factor), eps
    call(*norm_of(*given, out.data_ptr(), dtype == torch.float32, room.data_ptr()))
    return out


def join_of(
    h: int, branch: int, count: int, width: int, vectors: Sequence[int], new: int, a: int, to_float: bool,
    eps: tuple[float, float],
) -> Work:  # fmt: skip
    """A branch joined, from addresses to others; `vectors` are scale or 0, alpha, beta, norm or 0."""
    return shared(_join, [0, count, width, h, branch, *vectors, new, a, to_float], eps)


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
    """pieces.join for h in float32 and a branch in bfloat16 of one part."""
    h, branch, width = h.contiguous(), branch.contiguous(), h.shape[-1]
    new = torch.empty_like(h)
    a = new if norm is None else torch.empty_like(h, dtype=dtype)
    vectors = [address(x) for x in (scale and scale.factor, mix.alpha, mix.beta, norm and norm.factor)]
    given = h.data_ptr(), branch.data_ptr(), h.numel() // width, width, vectors
    call(*join_of(*given, new.data_ptr(), a.data_ptr(), a.dtype == torch.float32, (post_eps, eps)))
    return Joined(new, a)


def blend_of(
    y: int, weight: int, tokens: int, routes: int, width: int, factor: int, eps: float, out: int, room: int
) -> Work:
    """Rows of routes blended, from addresses to another; there is room for two rows of each token in float32."""
    return shared(_blend, [0, tokens, width, y, weight, routes, factor, out, room], (eps,))


def blend(y_TRM: Tensor, weight_TR: Tensor, norm: Gain, eps: float) -> Tensor:
    """pieces.blend for rows in bfloat16, to bfloat16."""
    y_TRM, weight_TR = y_TRM.contiguous(), weight_TR.contiguous()
    tokens, routes, width = y_TRM.shape
    out, room = y_TRM.new_empty(tokens, width), y_TRM.new_empty(tokens, 2, width, dtype=torch.float32)
    given = y_TRM.data_ptr(), weight_TR.data_ptr(), tokens, routes, width, norm.factor.data_ptr(), eps
    call(*blend_of(*given, out.data_ptr(), room.data_ptr()))
    return out


def route_of(
    logits: int, tokens: int, experts: int, top_k: int, bias: int, factors: tuple[float, float], idx: int, weight: int,
    room: int,
) -> Work:  # fmt: skip
    """Experts chosen by logits, from addresses to others; `factors` are the multiplier and what weights sum to, and
    there is room for two numbers of 8 bytes for each expert."""
    whole = [tokens, experts, top_k, logits, bias, room, room + 8 * experts, idx, weight]
    return Work(_route, whole, (*factors, ROUTE_EPS))


def choose(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    multiplier: float,
    factor: float,
    squeezed_PTm: Tensor,
    norm: Gain,
    eps: float,
    dtype: torch.dtype,
) -> Chosen:
    """pieces.choose for logits in float32 and squeezed tokens in bfloat16 of one part; of equal scores the first."""
    logits_TE = logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    idx, weight = logits_TE.new_empty(tokens, top_k, dtype=torch.int64), logits_TE.new_empty(tokens, top_k)
    room = idx.new_empty(2 * experts)
    given = logits_TE.data_ptr(), tokens, experts, top_k, bias_E.data_ptr(), (multiplier, factor)
    call(*route_of(*given, idx.data_ptr(), weight.data_ptr(), room.data_ptr()))
    return Chosen(Routes(idx, weight), normed(squeezed_PTm[0], norm, eps, dtype))
