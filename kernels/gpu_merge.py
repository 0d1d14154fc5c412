"""Triton forms of what follows attention: parts of split keys merged, heads normed and gated; in one launch for both.

The contracts are those of `pieces.gated` and of attention (kernels/reference.py); arithmetic is float32. Float32 within
1e-5 of them, relative to the largest; bfloat16 within 2**-6. Inputs may be columns of a wider product.
"""

# pyright: basic
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import bound, inputs_ready, options, rounded

TILE = 1024  # elements of a program's heads, where there are no parts: 16 bytes a thread
MERGED = 128  # parts that are read together


class Gate(NamedTuple):
    """What heads are gated by."""

    gate_BTF: Tensor  # any float dtype, before the sigmoid
    eps: float  # of the norm of each head


@triton.jit
def gated_heads(x, g, eps, D: tl.constexpr):
    """Heads normed over D, their last dimension, and gated."""
    factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    e = tl.exp(-tl.abs(g))  # at most 1, so that nothing overflows
    return x * factor[:, None] * (tl.where(g >= 0, 1.0, e) / (1.0 + e))


@triton.jit(do_not_specialize=["R", "T"])
def _gated_kernel(
    o, gate, out, R, o_b, o_t, o_n, T, gate_row, eps,
    COUNT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH heads."""
    inputs_ready(PDL)
    item, d = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, WIDTH)[None, :]
    row, head = (item // COUNT).to(tl.int64), item % COUNT
    mask = (item < R * COUNT)[:, None] & (d < D)
    x = tl.load(o + (row // T * o_b + row % T * o_t + head * o_n)[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + (row * gate_row + head * D)[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + (row * COUNT + head)[:, None] * D + d, rounded(gated_heads(x, g, eps, D), out.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    parts, sums, out, gate, splits, gate_row, eps,
    COUNT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of one row, in the order of the splits, and what `_gated_kernel` makes of it.

    The gate must have been there before the kernel that left the parts.
    """
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    if GATED:
        g = tl.load(gate + row // COUNT * gate_row + row % COUNT * D + d, mask=d < D, other=0.0).to(tl.float32)
    inputs_ready(PDL)
    sums += 2 * row * splits
    parts += row * splits * D
    highest = tl.full([], float("-inf"), tl.float32)
    if SPLITS > STEP:
        every = tl.arange(0, SPLITS)
        highest = tl.max(tl.load(sums + 2 * every, mask=every < splits, other=float("-inf")))
    acc, total = tl.zeros([WIDTH], tl.float32), 0.0
    for start in range(0, bound(splits) if SPLITS > STEP else 1, STEP):
        i = start + tl.arange(0, STEP)
        # All are asked for at once. Nothing was stored where nothing was seen: what lies there is not used.
        top = tl.load(sums + 2 * i, mask=i < splits, other=float("-inf"))
        its = tl.load(sums + 2 * i + 1, mask=i < splits, other=0.0)
        part = tl.load(parts + i[:, None] * D + d[None, :], mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
        if SPLITS <= STEP:
            highest = tl.max(top)
        share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
        total += tl.sum(share * its)
        acc += tl.sum(share[:, None] * tl.where((share > 0)[:, None], part, 0.0), 0)
    o = (acc / tl.where(total == 0, 1.0, total)).to(out.dtype.element_ty)
    if GATED:
        y = tl.reshape(gated_heads(o.to(tl.float32)[None, :], g[None, :], eps, D), (WIDTH,))
        o = rounded(y, out.dtype.element_ty)
    tl.store(out + row * D + d, o, mask=d < D)


def merge(parts: Tensor, sums: Tensor, out_BTND: Tensor, gate: Gate | None = None) -> None:
    """Parts float32 [B * T * N, splits, D] with their maxima and sums [B * T * N, splits, 2] into out, in place; then
    normed and gated, if there is a gate.

    Each part is weighted by its share of the whole sum, in float32 and always in the same order. On a device the gate
    must not be what the kernel just before wrote.
    """
    rows, splits, width = parts.shape
    every = triton.next_power_of_2(splits)
    sizes = {"D": width, "WIDTH": triton.next_power_of_2(width), "SPLITS": every, "STEP": min(every, MERGED)}
    by = out_BTND if gate is None else gate.gate_BTF.reshape(-1, gate.gate_BTF.shape[-1])
    scalars: tuple[Any, ...] = (splits, by.stride(0), 0.0 if gate is None else gate.eps)
    sizes |= {"COUNT": out_BTND.shape[2], "GATED": gate is not None}
    _merge_kernel[(rows,)](parts, sums, out_BTND, by, *scalars, **options(out_BTND.device, **sizes))


def gated(o_BTND: Tensor, gate_BTF: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.gated in one launch."""
    batch, length, count, head_dim = o_BTND.shape
    out = torch.empty(batch, length, count * head_dim, dtype=dtype, device=o_BTND.device)
    if not out.numel():
        return out
    gate, width = gate_BTF.reshape(batch * length, -1), triton.next_power_of_2(head_dim)
    each = max(1, TILE // width)
    scalars: tuple[Any, ...] = (batch * length, *o_BTND.stride()[:3], length, gate.stride(0), eps)
    shape = options(out.device, COUNT=count, D=head_dim, WIDTH=width, EACH=each)
    _gated_kernel[(-(-batch * length * count // each),)](o_BTND, gate, out, *scalars, **shape)
    return out


_OPTIONS = {"num_warps": 4, "launch_pdl": True}
_HEADS = {"COUNT": 16, "D": 64, "WIDTH": 64, "gate_row": 2304, "PDL": True}
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    (
        _gated_kernel,
        {"o": "*bf16", "gate": "*bf16", "out": "*bf16", "R": "i32", "T": "i32", "eps": "fp32"},
        {**_HEADS, "EACH": 16, "o_b": 1024, "o_t": 1024, "o_n": 64},
        _OPTIONS,
    ),
    *(
        (
            _merge_kernel,
            {"parts": "*fp32", "sums": "*fp32", "out": "*bf16", "gate": "*bf16", "splits": "i32", "eps": "fp32"},
            {**_HEADS, "SPLITS": splits, "STEP": min(splits, MERGED), "GATED": gated},
            _OPTIONS,
        )
        for splits, gated in ((32, True), (512, True), (512, False))
    ),
]
