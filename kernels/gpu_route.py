"""Triton form of the choice of experts: one warp a token, the scores of all experts in its registers.

The contract is that of `pieces.route`. Where two experts' sums of score and bias are equal the lower id is taken; sums
that differ by less than the rounding of a sigmoid may be ordered differently on another device. Whatever the logits
are, the ids are distinct experts: NaN counts as the largest, as in topk.
"""

# pyright: basic
import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, overlaps
from muse_fn.kernels.pieces import ROUTE_EPS, Routes

MOST = 1024  # experts
MOST_TAKEN = 32  # of them, whose places are found by comparing each with each
_EPS = tl.constexpr(ROUTE_EPS)
_LOWEST = tl.constexpr(-(1 << 31))  # below the rank of every number, infinities and NaN included


@triton.jit
def _rank(x):
    """int32 in the order of float32 values, any NaN above all. -0.0 is below 0.0, but no sum with a score is -0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _route_kernel(
    logits,
    bias,
    idx,
    weight,
    stride,
    multiplier,
    factor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token, e, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    here = e < EXPERTS
    added = tl.load(bias + e, here, 0.0).to(tl.float32)  # a parameter: no kernel of a step writes it
    inputs_ready(PDL)
    score = tl.sigmoid(tl.load(logits + token * stride + e, here, 0.0) * multiplier)
    rank = tl.where(here, _rank(score + added), _LOWEST)
    taken = BLOCK + k
    for r in range(TOP_K):
        # What has been taken and what is no expert has the lowest rank, which no expert left has.
        first = tl.min(tl.where(rank == tl.max(rank, 0), e, BLOCK), 0)
        rank = tl.where(e == first, _LOWEST, rank)
        taken = tl.where(k == r, first, taken)
    given = k < TOP_K
    score = tl.sigmoid(tl.load(logits + token * stride + taken, given, 0.0) * multiplier)
    total = tl.sum(tl.where(given, score, 0.0), 0)
    place = token * TOP_K + tl.sum((taken[None, :] < taken[:, None]).to(tl.int32), 1)
    tl.store(idx + place, taken.to(tl.int64), given)
    tl.store(weight + place, score / (total + _EPS) * factor, given)


def route(logits_TE: Tensor, bias_E: Tensor, top_k: int, multiplier: float, factor: float) -> Routes:
    """`pieces.route` in one launch: float32 logits [T, E] -> ids int64 [T, top_k] ascending, and float32 weights."""
    tokens, experts = logits_TE.shape
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    idx = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weight = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    early = overlaps(logits_TE.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits_TE,
            bias_E,
            idx,
            weight,
            logits_TE.stride(0),
            multiplier,
            factor,
            **{"EXPERTS": experts, "BLOCK": triton.next_power_of_2(experts)},
            **{"TOP_K": top_k, "PLACES": triton.next_power_of_2(top_k)},
            **{"PDL": early, "launch_pdl": early, "num_warps": 1},
        )
    return Routes(idx, weight)


def why_not(logits_TE: Tensor, bias_E: Tensor, top_k: int) -> str:
    """Why `route` cannot take these; "" if it can."""
    if logits_TE.dim() != 2 or logits_TE.dtype != torch.float32:
        return f"router logits are {logits_TE.dtype} {list(logits_TE.shape)}: must be torch.float32 [T, E]"
    experts = logits_TE.shape[1]
    if list(bias_E.shape) != [experts] or not bias_E.is_floating_point() or not bias_E.is_contiguous():
        return f"the router's bias is {bias_E.dtype} {list(bias_E.shape)}: must be floats [{experts}], adjacent"
    if not 0 < experts <= MOST:
        return f"there are {experts} experts: must be 1 to {MOST}"
    most = min(experts, MOST_TAKEN)
    return "" if 0 < top_k <= most else f"top_k is {top_k}: must be 1 to {most}"


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _route_kernel,
        {
            **{"logits": "*fp32", "bias": "*fp32", "idx": "*i64", "weight": "*fp32"},
            **{"stride": "i32", "multiplier": "fp32", "factor": "fp32"},
        },
        {"EXPERTS": 256, "TOP_K": 8, "PLACES": 8, "BLOCK": 256, "PDL": True},
        {"num_warps": 1, "launch_pdl": True},
    )
]
