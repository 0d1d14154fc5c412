"""Heads on a CPU without gradients: norms of queries and keys, rotary, rows of the cache, the gate of the output.

The contracts are those of the same names in kernels/pieces.py, for rows in bfloat16; arithmetic is float32 and each
output is rounded once.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import math

import numpy as np
import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, call
from muse_fn.kernels.cpu_rows import UNIT, shared
from muse_fn.kernels.cpu_scalars import argument, bf16, f32, i64, in_any_order, inline, narrow, real, sigmoid, wide
from muse_fn.kernels.cpu_vectors import claim, workspace
from muse_fn.kernels.norms import Rotary

WIDEST = 512  # channels of a head


@in_any_order
def _read(x, width, eps, row):
    """A head as float32; what norms it. Results are written from there: they may be to replace what was read, and who
    writes what is yet to be read goes element by element."""
    given, total = bf16(x, width), np.float32(0.0)
    for k in range(width):
        row[k] = wide(given[k])
        total += row[k] * row[k]
    return np.float32(1.0) / math.sqrt(total / np.float32(width) + eps)


@inline
def head(x, width, eps, factor, cos, sin, kept, out):
    """One head normed and times a factor; rotated unless cos is 0."""
    to, row = bf16(out, width), f32(kept, width)
    scale = _read(x, width, eps, row)
    for k in range(width):
        row[k] = row[k] * scale * factor
    if not cos:
        for k in range(width):
            to[k] = narrow(row[k])
        return
    c, s, half = f32(cos, width), f32(sin, width), width // 2
    for k in range(half):
        low, high = row[k], row[k + half]
        to[k] = narrow(low * c[k] - high * s[k])
        to[k + half] = narrow(high * c[k + half] + low * s[k + half])


def _heads(a):
    """Arguments: 0 claims, 1 tokens, 2 queries and 3 keys of a token, 4 width of a head, 5 q, 6 k, 7 cos or 0, 8 sin, 9
    result of q, 10 and of k, 11 v or 0, 12 its result, 13 the place of each token's keys and values or 0; then
    qk_scale, eps."""
    queries, keys, width, scale, eps = argument(a, 2), argument(a, 3), argument(a, 4), real(a, 14), real(a, 15)
    kept, places = workspace(2048), i64(argument(a, 13), argument(a, 1))
    while True:
        first = claim(a) * UNIT
        if first >= argument(a, 1):
            break
        for n in range(first, min(argument(a, 1), first + UNIT)):
            cos = argument(a, 7) + n * width * 4 if argument(a, 7) else 0
            sin = argument(a, 8) + n * width * 4
            for h in range(queries):
                at = (n * queries + h) * width * 2
                head(argument(a, 5) + at, width, eps, scale, cos, sin, kept, argument(a, 9) + at)
            row = places[n] if argument(a, 13) else n
            for h in range(keys):
                at, to = (n * keys + h) * width * 2, (row * keys + h) * width * 2
                head(argument(a, 6) + at, width, eps, np.float32(1.0), cos, sin, kept, argument(a, 10) + to)
                if argument(a, 11):
                    source, target = bf16(argument(a, 11) + at, width), bf16(argument(a, 12) + to, width)
                    for k in range(width):
                        target[k] = source[k]


def _gated(a):
    """Arguments: 0 claims, 1 tokens, 2 heads, 3 width of a head, 4 o, 5 gate, 6 result; then eps."""
    heads, width, eps = argument(a, 2), argument(a, 3), real(a, 7)
    row = f32(workspace(2048), width)
    while True:
        first = claim(a) * UNIT
        if first >= argument(a, 1):
            break
        for n in range(first * heads, min(argument(a, 1), first + UNIT) * heads):
            at = n * width * 2
            gate, to = bf16(argument(a, 5) + at, width), bf16(argument(a, 6) + at, width)
            scale = _read(argument(a, 4) + at, width, eps, row)
            for k in range(width):
                to[k] = narrow(row[k] * scale * sigmoid(wide(gate[k])))


def angles_of(rotary: Rotary | None) -> tuple[Rotary | None, list[int]]:
    """Where angles lie, and what is to be held meanwhile."""
    if rotary is None:
        return None, [0, 0]
    both = Rotary(rotary.cos.contiguous(), rotary.sin.contiguous())
    return both, [x.data_ptr() for x in both]


def heads_of(tokens: int, queries: int, keys: int, width: int, places: list[int], real: tuple[float, float]) -> Work:
    """Rows of queries and keys as heads; `places` and `real` are the last arguments of `_heads`."""
    return shared(_heads, [0, tokens, queries, keys, width, *places], real)


def gate_of(tokens: int, heads: int, width: int, places: list[int], eps: float) -> Work:
    """Heads normed and gated; `places` are those of o, the gate and the result, which may be o's own."""
    return shared(_gated, [0, tokens, heads, width, *places], (eps,))


def heads(
    q_BTF: Tensor, k_BTF: Tensor, rotary: Rotary | None, head_dim: int, qk_scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """pieces.heads for rows in bfloat16."""
    q, k = q_BTF.contiguous(), k_BTF.contiguous()
    kept, angles = angles_of(rotary)
    made = [x.new_empty(*x.shape[:2], x.shape[2] // head_dim, head_dim) for x in (q, k)]
    places = [q.data_ptr(), k.data_ptr(), *angles, made[0].data_ptr(), made[1].data_ptr(), 0, 0, 0]
    counts = q.shape[0] * q.shape[1], made[0].shape[2], made[1].shape[2], head_dim
    call(*heads_of(*counts, places, (qk_scale, eps)))
    del kept
    return made[0], made[1]


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
    """pieces.place for rows and arenas in bfloat16."""
    q, k, v, rows = q_BTF.contiguous(), k_BTF.contiguous(), v_BTF.contiguous(), rows.contiguous()
    head_dim = k_arena.shape[-1]
    kept, angles = angles_of(rotary)
    out = q.new_empty(*q.shape[:2], q.shape[2] // head_dim, head_dim)
    written = [x.data_ptr() for x in (out, k_arena, v, v_arena, rows)]
    counts = q.shape[0] * q.shape[1], out.shape[2], k_arena.shape[2], head_dim
    call(*heads_of(*counts, [q.data_ptr(), k.data_ptr(), *angles, *written], (qk_scale, eps)))
    del kept
    return out


def gated(o_BTND: Tensor, gate_BTF: Tensor, eps: float) -> Tensor:
    """pieces.gated in bfloat16."""
    o, gate = o_BTND.contiguous(), gate_BTF.contiguous()
    out = torch.empty_like(gate)
    places = [o.data_ptr(), gate.data_ptr(), out.data_ptr()]
    call(*gate_of(o.shape[0] * o.shape[1], o.shape[2], o.shape[3], places, eps))
    return out
