"""Triton forms of what top_k, top_p and min_p keep: the counting of muse_fn/filters.py, a few launches for each digit.

Which of a row's tokens have less than a limit of weight ranking before them is found digit by digit of the last such
token's logit. Weights are whole numbers: no order of programs, blocks or ranks shows. A question is its state, int64
[3, B]: the digits found so far, the weight of what ranks above them, and the limit.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels import gpu_sample
from muse_fn.kernels.gpu import inputs_ready, overlaps
from muse_fn.kernels.gpu_sample import BLOCK, blocks

DIGIT, BITS = tl.constexpr(8), 32
BINS = tl.constexpr(256)
UNIT = tl.constexpr(2.0**40)  # the weight of the likeliest token


class Rows(NamedTuple):
    """What every launch reads."""

    logits_BV: Tensor  # float32
    allowed: Tensor | None  # bool [B, V]
    tops_P3BC: Tensor  # of gpu_sample.tops, from all ranks
    temperature_B: Tensor  # float32; 0 counts as 1


class Answer(NamedTuple):
    """Which tokens a question keeps: those above the last one, and of its equals those of lower ids."""

    state_3B: Tensor
    ties_PBC: Tensor  # int64: the weight of the last one's equals in each block, from all ranks
    rank: int  # which of them is this one


@triton.jit
def _scaled(
    logits, allowed, tops, temperature, row, cols, here, stride, allowed_stride, plane, rank_stride,
    HAS_MASK: tl.constexpr, COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Logits as they are, counted from the largest and divided, and their order as int64 from 0 to 2^32 - 1."""
    _, masked = gpu_sample.masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK)
    at, there = gpu_sample.parts(tops, row, rank_stride, COUNT, RANKS, PARTS)
    top, _ = gpu_sample.best(at, plane, there)
    t = tl.load(temperature + row)
    x = tl.div_rn(masked - top, tl.where(t > 0, t, 1.0))
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return masked, x, order


@triton.jit
def _state(state, row, ROWS):
    return tl.load(state + row), tl.load(state + ROWS + row), tl.load(state + 2 * ROWS + row)


@triton.jit
def _kept(
    order, weight, state, ties, row, block, rows, rank, COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Whether the tokens before each of these weigh less than the limit."""
    last, above, limit = _state(state, row, rows)
    i = tl.arange(0, PARTS)
    earlier = (i // COUNT < rank) | ((i // COUNT == rank) & (i % COUNT < block))
    at = ties + (i // COUNT * rows + row) * COUNT + i % COUNT
    before = tl.sum(tl.load(at, earlier & (i < RANKS * COUNT), 0), 0) + above
    tied = tl.where(order == last, weight, 0)
    before += tl.cumsum(tied, 0) - tied
    return (order > last) | ((order == last) & (before < limit))


@triton.jit
def _weight(
    x, order, here, first, first_ties, row, block, rows, rank,
    WEIGHED: tl.constexpr, COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """1, or of what the first question keeps the probability in units."""
    one = here.to(tl.int64)
    if WEIGHED:
        kept = _kept(order, one, first, first_ties, row, block, rows, rank, COUNT, RANKS, PARTS)
        one = tl.where(kept & here, (tl.exp(x).to(tl.float64) * UNIT + 0.5).to(tl.int64), 0)
    return one


@triton.jit(do_not_specialize=["rows", "rank", "shift"])
def _count_kernel(
    logits, allowed, tops, temperature, first, first_ties, state, out, rows, rank, shift,
    stride, allowed_stride, plane, rank_stride,
    WEIGHED: tl.constexpr, ENDS: tl.constexpr, HAS_MASK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds a block's weights to those of each next digit, int64 [B, BINS], of tokens whose digits so far are the last
    one's; or, once all digits are known (ENDS), leaves their sum, int64 [B, C]."""
    inputs_ready(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH + tl.arange(0, WIDTH)
    here = cols < COLUMNS
    _, x, order = _scaled(
        logits, allowed, tops, temperature, row, cols, here, stride, allowed_stride, plane, rank_stride,
        HAS_MASK, COUNT, RANKS, PARTS,
    )  # fmt: skip
    weight = _weight(x, order, here, first, first_ties, row, block, rows, rank, WEIGHED, COUNT, RANKS, PARTS)
    last = tl.load(state + row)
    if ENDS:
        tl.store(out + row * COUNT + block, tl.sum(tl.where(order == last, weight, 0), 0))
    else:
        alike = here & ((order >> (shift + DIGIT)) == last)
        digit = ((order >> shift) & (BINS - 1)).to(tl.int32)
        if WEIGHED:
            tl.atomic_add(out + row * BINS + digit, weight, mask=alike & (weight > 0), sem="relaxed")
        else:
            found = tl.histogram(tl.where(alike, digit, BINS), 2 * BINS)
            bins = tl.arange(0, 2 * BINS)
            tl.atomic_add(out + row * BINS + bins, found.to(tl.int64), mask=(bins < BINS) & (found > 0), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _pick_kernel(counts, state, share, out, rows, FIRST: tl.constexpr, WEIGHED: tl.constexpr, PDL: tl.constexpr):
    """The next digit of the last token within the limit; of a share of the weight the limit is set at the first."""
    inputs_ready(PDL)
    row, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BINS)
    last, above, limit = _state(state, row, rows)
    count = tl.load(counts + row * BINS + bins)
    if FIRST and WEIGHED:
        total = tl.sum(count, 0).to(tl.float64)
        limit = tl.ceil(tl.load(share + row).to(tl.float64) * total).to(tl.int64)
    from_top = tl.cumsum(count, 0, reverse=True) + above
    digit = tl.maximum(tl.sum((from_top >= limit).to(tl.int64), 0) - 1, 0)
    above = tl.sum(tl.where(bins == digit, from_top - count, 0), 0)
    tl.store(out + row, last * BINS + digit)
    tl.store(out + rows + row, above)
    tl.store(out + 2 * rows + row, limit)


@triton.jit(do_not_specialize=["rows", "rank"])
def _keep_kernel(
    logits, allowed, tops, temperature, first, first_ties, second, second_ties, top_p, min_p, out, rows, rank,
    stride, allowed_stride, plane, rank_stride,
    HAS_MASK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The logits of what both questions and min_p keep, -inf for all others."""
    inputs_ready(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH + tl.arange(0, WIDTH)
    here = cols < COLUMNS
    masked, x, order = _scaled(
        logits, allowed, tops, temperature, row, cols, here, stride, allowed_stride, plane, rank_stride,
        HAS_MASK, COUNT, RANKS, PARTS,
    )  # fmt: skip
    kept = _kept(order, here.to(tl.int64), first, first_ties, row, block, rows, rank, COUNT, RANKS, PARTS)
    weight = _weight(x, order, here, first, first_ties, row, block, rows, rank, True, COUNT, RANKS, PARTS)
    share = tl.load(top_p + row)
    within = _kept(order, weight, second, second_ties, row, block, rows, rank, COUNT, RANKS, PARTS)
    kept = kept & (within | (tl.zeros_like(x) + share >= 1.0)) & (tl.exp(x) >= tl.load(min_p + row))
    tl.store(out + row * COLUMNS + cols, tl.where(kept, masked, -float("inf")), here)


def question(limit_B: Tensor) -> Tensor:
    """The state of a question with these limits, int64 [B], before its first digit."""
    return torch.cat([torch.zeros(2, len(limit_B), dtype=torch.int64, device=limit_B.device), limit_B[None]])


def count(rows: Rows, state_3B: Tensor, shift: int, first: Answer | None = None) -> Tensor:
    """int64 [B, BINS]: the weight of this rank's tokens by their digit at bit `shift`; each token's is 1, or its
    probability if it is among what `first` keeps."""
    out = torch.zeros(len(rows.logits_BV), BINS.value, dtype=torch.int64, device=rows.logits_BV.device)
    _launch_count(rows, state_3B, out, shift, first, ends=False)
    return out


def ties(rows: Rows, state_3B: Tensor, first: Answer | None = None) -> Tensor:
    """int64 [B, C]: the weight, in each block of this rank, of the tokens that equal the last one."""
    out = torch.empty(len(rows.logits_BV), blocks(rows.logits_BV), dtype=torch.int64, device=rows.logits_BV.device)
    _launch_count(rows, state_3B, out, 0, first, ends=True)
    return out


def _launch_count(rows: Rows, state: Tensor, out: Tensor, shift: int, first: Answer | None, *, ends: bool) -> None:
    before = (state, state, 0) if first is None else first
    grid, shape, constants = _common(rows)
    if grid[0]:
        _count_kernel[grid](
            *_inputs(rows), before[0], before[1], state, out, grid[0], before[2], shift, *shape,
            WEIGHED=first is not None, ENDS=ends, **constants,
        )  # fmt: skip


def pick(counts_BN: Tensor, state_3B: Tensor, shift: int, share_B: Tensor | None = None) -> Tensor:
    """The state with one digit more, by the weights of all ranks. Limits of `share_B` of the weight, float32 [B], are
    set at the first digit."""
    out, early = torch.empty_like(state_3B), overlaps(state_3B.device)
    size = state_3B.shape[1]
    constants = {
        "FIRST": shift == BITS - DIGIT.value,
        "WEIGHED": share_B is not None,
        "PDL": early,
        "launch_pdl": early,
    }
    share = state_3B if share_B is None else share_B.contiguous()
    if size:
        _pick_kernel[(size,)](counts_BN, state_3B, share, out, size, **constants, num_warps=1)
    return out


def keep(rows: Rows, first: Answer, second: Answer, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """The logits [B, V] of what top_k (`first`), top_p (`second`) and min_p all keep; -inf elsewhere, and where ids are
    not allowed."""
    out = torch.empty(rows.logits_BV.shape, dtype=torch.float32, device=rows.logits_BV.device)
    grid, shape, constants = _common(rows)
    if grid[0]:
        _keep_kernel[grid](
            *_inputs(rows), *first[:2], *second[:2], top_p_B.contiguous(), min_p_B.contiguous(), out, grid[0],
            first.rank, *shape, **constants,
        )  # fmt: skip
    return out


def _inputs(rows: Rows) -> tuple[Any, ...]:
    return rows.logits_BV, rows.allowed, rows.tops_P3BC, rows.temperature_B


def _common(rows: Rows) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid, strides, and what kernels are compiled for."""
    logits, allowed, tops = rows.logits_BV, rows.allowed, rows.tops_P3BC
    size, columns, early = len(logits), blocks(logits), overlaps(logits.device)
    strides = logits.stride(0), 0 if allowed is None else allowed.stride(0), size * columns, tops.stride(0)
    constants = {"HAS_MASK": allowed is not None, "COLUMNS": logits.shape[1], "WIDTH": BLOCK, "COUNT": columns}
    constants |= {"RANKS": len(tops), "PARTS": triton.next_power_of_2(len(tops) * columns)}
    return (size, columns), strides, {**constants, "PDL": early, "launch_pdl": early, "num_warps": 4}


def rows_of(logits_BV: Tensor, allowed: Tensor | None, tops_P3BC: Tensor, temperature_B: Tensor) -> Rows:
    """What the launches read, its columns adjacent. `allowed`: bool [V] or [B, V], of these columns."""
    (logits, mask), _ = gpu_sample.rows_of(logits_BV, allowed)
    return Rows(logits, mask, tops_P3BC, temperature_B.contiguous())


_STRIDES = dict.fromkeys(("stride", "allowed_stride", "plane", "rank_stride"), "i32")
_ROWS = {"logits": "*fp32", "allowed": "*i1", "tops": "*i32", "temperature": "*fp32"}
_ANSWERS = dict.fromkeys(("first", "first_ties", "second", "second_ties"), "*i64")
_SHARE = {"HAS_MASK": True, "COLUMNS": 25256, "WIDTH": BLOCK, "COUNT": 25, "RANKS": 8, "PARTS": 256, "PDL": True}
_OPTIONS = {"num_warps": 4, "launch_pdl": True}
_COUNTED = {
    **_ROWS,
    "first": "*i64",
    "first_ties": "*i64",
    "state": "*i64",
    "out": "*i64",
    "rows": "i32",
    "rank": "i32",
}
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    *(
        (_count_kernel, {**_COUNTED, "shift": "i32", **_STRIDES}, {"WEIGHED": w, "ENDS": e, **_SHARE}, _OPTIONS)
        for w in (False, True)
        for e in (False, True)
    ),
    *(
        (
            _pick_kernel,
            {"counts": "*i64", "state": "*i64", "share": "*fp32", "out": "*i64", "rows": "i32"},
            {"FIRST": first, "WEIGHED": True, "PDL": True},
            {"num_warps": 1, "launch_pdl": True},
        )
        for first in (False, True)
    ),
    (
        _keep_kernel,
        {
            **_ROWS,
            **_ANSWERS,
            "top_p": "*fp32",
            "min_p": "*fp32",
            "out": "*fp32",
            "rows": "i32",
            "rank": "i32",
            **_STRIDES,
        },
        _SHARE,
        _OPTIONS,
    ),
]
