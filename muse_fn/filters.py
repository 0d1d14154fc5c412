"""Which tokens top_k, top_p and min_p keep: found by counting instead of sorting, with the same result on any mesh.

A token ranks before another if its logit is larger, or equal and its id lower. top_k and top_p are one question: which
tokens have less than a limit of weight ranking before them, each weighing 1, or its probability. Weights are whole
numbers, so that no order of summation matters; the last token within the limit is found digit by digit of its logit,
and of each digit the ranks only exchange a histogram.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from muse_fn.sharding.collectives import psum, stacked
from muse_fn.sharding.mesh import ONE, STAGE, Mesh

DIGIT = 8  # bits; four digits make a float32
UNIT = 2.0**40  # the weight of the likeliest token; of 2^18 tokens the sum stays below 2^58


def keep(scaled_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, mesh: Mesh = ONE) -> Tensor:
    """The logits with every token outside top_k, top_p or min_p at -inf; the likeliest is always kept.

    Logits are float32 and counted from the largest, which is 0; on a mesh, this rank's share. top_k acts first, then
    top_p on what is left renormalised, then min_p relative to the likeliest; top_k V and top_p 1 keep all.
    """
    rank = ordered(scaled_BV)
    kept = within(rank, torch.ones_like(rank), top_k_B, mesh)
    p = scaled_BV.exp()
    weight = torch.where(kept, (p.double() * UNIT).round().long(), 0)
    total_B = psum(weight.sum(-1), mesh, STAGE)
    limit_B = (top_p_B.double() * total_B).ceil().long()
    kept &= within(rank, weight, limit_B, mesh) | (top_p_B >= 1)[:, None]
    kept &= p >= min_p_B[:, None]
    return scaled_BV.masked_fill(~kept, -torch.inf)


def ordered(x: Tensor) -> Tensor:
    """int64 from 0 to 2^32 - 1 in the order of these float32 values, the two zeros equal."""
    bits = (x + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long() + (1 << 31)


def within(rank_BV: Tensor, weight_BV: Tensor, limit_B: Tensor, mesh: Mesh = ONE) -> Tensor:
    """bool [B, V]: whether the tokens before this one, larger rank first and lower id first among equals, weigh less
    than the limit. Weights are int64 from 0 on, limits at least 1."""
    limit_B1, last_B1 = limit_B[:, None], torch.zeros_like(limit_B)[:, None]
    above_B1 = torch.zeros_like(last_B1)  # weight of the tokens whose leading digits are larger than those of the last
    for shift in range(32 - DIGIT, -1, -DIGIT):
        alike = rank_BV >> (shift + DIGIT) == last_B1
        counts = torch.zeros(len(rank_BV), 1 << DIGIT, dtype=torch.int64, device=rank_BV.device)
        digit_BV = (rank_BV >> shift) & ((1 << DIGIT) - 1)
        counts = psum(counts.scatter_add(1, digit_BV, torch.where(alike, weight_BV, 0)), mesh, STAGE)
        from_top = counts.flip(-1).cumsum(-1).flip(-1) + above_B1
        digit_B1 = ((from_top >= limit_B1).sum(-1, keepdim=True) - 1).clamp_min(0)
        above_B1 = from_top.gather(1, digit_B1) - counts.gather(1, digit_B1)
        last_B1 = (last_B1 << DIGIT) + digit_B1
    ties = torch.where(rank_BV == last_B1, weight_BV, 0)
    lower_ids = stacked(ties.sum(-1, keepdim=True), mesh, STAGE)[: mesh.index(STAGE)].sum(0)
    before = ties.cumsum(-1) - ties + lower_ids + above_B1
    return (rank_BV > last_B1) | ((rank_BV == last_B1) & (before < limit_B1))


def keep_by_kernels(
    logits_BV: Tensor,
    allowed: Tensor | None,
    tops_P3BC: Tensor,
    temperature_B: Tensor,
    limits: tuple[Tensor, Tensor, Tensor],
    mesh: Mesh = ONE,
) -> Tensor:
    """`keep` by kernels/gpu_filter.py, on logits as they are: float32 [B, V], or this rank's share, and -inf where
    top_k, top_p and min_p [B] keep nothing or `allowed` is False.

    `tops` are gpu_sample.tops of all ranks. Probabilities may differ from those of `keep` in their last bit.
    """
    form: Any = import_module("muse_fn.kernels.gpu_filter")
    rows = form.rows_of(logits_BV, allowed, tops_P3BC, temperature_B)
    top_k_B, top_p_B, min_p_B = limits

    def answered(limit_B: Tensor, share_B: Tensor | None, first: Any) -> Any:
        state = form.question(limit_B)
        for shift in range(32 - DIGIT, -1, -DIGIT):
            state = form.pick(psum(form.count(rows, state, shift, first), mesh, STAGE), state, shift, share_B)
        return form.Answer(state, stacked(form.ties(rows, state, first), mesh, STAGE), mesh.index(STAGE))

    first = answered(top_k_B, None, None)
    return form.keep(rows, first, answered(torch.zeros_like(top_k_B), top_p_B, first), top_p_B, min_p_B)
