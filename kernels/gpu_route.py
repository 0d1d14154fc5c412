"""Triton form of what follows the router: the choice of experts, and the norm of what goes into them, in one launch.

The contract is that of `pieces.choose`. Where two experts' sums of score and bias are equal the lower id is taken; sums
that differ by less than the rounding of a sigmoid may be ordered differently on another device. Whatever the logits
are, the ids are distinct experts: NaN counts as the largest, as in topk.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, overlaps, rounded
from muse_fn.kernels.gpu_experts import ALONE, is_few
from muse_fn.kernels.gpu_pieces import in_parts, inverse_rms, rows_in_parts, why_not_in_parts
from muse_fn.kernels.gpu_unpack import GROUP
from muse_fn.kernels.gpu_whole import store_quantised, width
from muse_fn.kernels.norms import Gain
from muse_fn.kernels.pieces import ROUTE_EPS, Chosen, Routes

MOST = 1024  # experts
MOST_TAKEN = 32  # of them, whose places are found by comparing each with each
WARPS = tl.constexpr(4)
_EPS = tl.constexpr(ROUTE_EPS)
NONE, WHOLE, FEW, MANY = (tl.constexpr(n) for n in range(4))  # what is made of rows for the experts' products
_LOWEST = tl.constexpr(-(1 << 31))  # below the rank of every number, infinities and NaN included


@triton.jit
def _rank(x):
    """int32 in the order of float32 values, any NaN above all. -0.0 is below 0.0, but no sum with a score is -0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _route(
    logits, bias, idx, weight, token, stride, multiplier, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's experts. Every warp has all of them, 32 at a time one a lane, so that none waits for another."""
    n = tl.arange(0, BLOCK * WARPS)
    # Neighbours are exchanged, or the compiler would see adjacent addresses and give a thread several of them, which
    # would bring the lanes of a reduction into different warps.
    e = n // (32 * WARPS) * 32 + (n % 32 ^ 1)
    here = e < EXPERTS
    added = tl.load(bias + e, here, 0.0).to(tl.float32)  # a parameter: no kernel of a step writes it
    inputs_ready(PDL)
    logits += token * stride
    score = tl.sigmoid(tl.load(logits + e, here, 0.0) * multiplier)
    rank = tl.where(here, _rank(score + added), _LOWEST)
    rank, e = tl.reshape(rank, (BLOCK // 32, WARPS, 32)), tl.reshape(e, (BLOCK // 32, WARPS, 32))
    k = tl.arange(0, PLACES)[:, None, None]
    every = tl.zeros((PLACES, WARPS, 32), tl.int32) + BLOCK  # what is taken, in each lane
    for r in range(TOP_K):
        # What has been taken and what is no expert has the lowest rank, which no expert left has.
        top = tl.max(tl.max(rank, 0), 1)
        first = tl.min(tl.min(tl.where(rank == top[None, :, None], e, BLOCK), 0), 1)
        rank = tl.where(e == first[None, :, None], _LOWEST, rank)
        every = tl.where(k == r, first[None, :, None], every)
    # A lane for each: its place is the number of those below it.
    taken = tl.sum(tl.where(k == tl.arange(0, 32)[None, None, :], every, 0), 0)
    place = tl.reshape(tl.sum((every < taken[None]).to(tl.int32), 0), (WARPS * 32,)) + token * TOP_K
    taken, n = tl.reshape(taken, (WARPS * 32,)), tl.arange(0, WARPS * 32)
    score = tl.sigmoid(tl.load(logits + taken, n % 32 < TOP_K, 0.0) * multiplier)
    total = tl.sum(tl.reshape(tl.where(n % 32 < TOP_K, score, 0.0), (WARPS, 32)), 1)
    total = tl.reshape(tl.broadcast_to(total[:, None], (WARPS, 32)), (WARPS * 32,))
    tl.store(idx + place, taken.to(tl.int64), n < TOP_K)
    tl.store(weight + place, score / (total + _EPS) * factor, n < TOP_K)


@triton.jit
def _norm(
    squeezed, norm, u, arranged, token, part_stride, stride, eps,
    ORDER: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's squeezed row, in parts."""
    cols = tl.arange(0, COLUMNS)
    inside = cols < WIDTH
    scale = tl.load(norm + cols, inside, 0.0, eviction_policy="evict_last")
    inputs_ready(PDL)
    v = tl.load(squeezed + token * stride + in_parts(cols, part_stride, WIDTH, PART), inside, 0.0).to(tl.float32)
    v = rounded(v * inverse_rms(v, eps, WIDTH) * scale, u.dtype.element_ty)
    tl.store(u + token * WIDTH + cols, v, inside)
    if ORDER == WHOLE:
        store_quantised(arranged + token * width(WIDTH), v.to(tl.float32), 0, WIDTH, COLUMNS // 16)
    elif ORDER != NONE:
        # Column k goes to (k & -128) + gpu_unpack.column(k & 127, …), which renumbers the bits q q s s l h p of k.
        v = tl.reshape(v, (COLUMNS // 128, 4, 4, 2, 2, 2))
        if ORDER == FEW:
            v = tl.permute(v, (0, 5, 2, 1, 4, 3))
        else:
            v = tl.permute(v, (0, 5, 2, 4, 1, 3))
        tl.store(arranged + token * WIDTH + cols, tl.reshape(v, (COLUMNS,)), inside)


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    logits, bias, idx, weight, squeezed, norm, u, arranged,
    T, stride, multiplier, factor, part_stride, squeezed_stride, eps,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
    ORDER: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. T - 1 route a token each, programs T .. 2 T - 1 norm one."""
    token = tl.program_id(0).to(tl.int64)
    if token < T:
        _route(logits, bias, idx, weight, token, stride, multiplier, factor, EXPERTS, TOP_K, PLACES, BLOCK, PDL)
    else:
        token -= T
        _norm(
            squeezed, norm, u, arranged, token, part_stride, squeezed_stride, eps,
            ORDER, PART, WIDTH, COLUMNS, PDL,
        )  # fmt: skip


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
    """`pieces.choose` in one launch: float32 logits [T, E], and rows of any float dtype in parts of any strides.

    bfloat16 rows of whole groups of columns are given a second time, as `gpu_experts.arranged_for` gives them. On a
    device the bias and the norm must not be what the kernel just before wrote.
    """
    (tokens, experts), device = logits_TE.shape, logits_TE.device
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    parts, columns, early = rows_in_parts(squeezed_PTm), len(squeezed_PTm) * squeezed_PTm.shape[-1], overlaps(device)
    idx = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weight = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    u = torch.empty(tokens, columns, dtype=dtype, device=device)
    order, arranged = NONE.value, u
    if dtype == torch.bfloat16 and columns % GROUP == 0:
        order = WHOLE.value if idx.numel() <= ALONE else FEW.value if is_few(idx.numel()) else MANY.value
        arranged = u.new_empty(tokens, width(columns), dtype=torch.int8) if order == WHOLE else torch.empty_like(u)
    if tokens:
        _choose_kernel[(2 * tokens,)](
            logits_TE, bias_E, idx, weight, parts, norm.factor, u, arranged,
            tokens, logits_TE.stride(0), multiplier, factor, *parts.stride()[:2], eps,
            EXPERTS=experts, BLOCK=max(triton.next_power_of_2(experts), 32),
            TOP_K=top_k, PLACES=triton.next_power_of_2(top_k), ORDER=order,
            PART=parts.shape[-1], WIDTH=columns, COLUMNS=triton.next_power_of_2(columns),
            PDL=early, launch_pdl=early, num_warps=WARPS.value,
        )  # fmt: skip
    return Chosen(Routes(idx, weight), u, () if order == NONE else arranged)


def why_not(logits_TE: Tensor, bias_E: Tensor, top_k: int, squeezed_PTm: Tensor) -> str:
    """Why `choose` cannot take these; "" if it can."""
    if logits_TE.dim() != 2 or logits_TE.dtype != torch.float32:
        return f"router logits are {logits_TE.dtype} {list(logits_TE.shape)}: must be torch.float32 [T, E]"
    tokens, experts = logits_TE.shape
    if list(bias_E.shape) != [experts] or not bias_E.is_floating_point() or not bias_E.is_contiguous():
        return f"the router's bias is {bias_E.dtype} {list(bias_E.shape)}: must be floats [{experts}], adjacent"
    if not 0 < experts <= MOST:
        return f"there are {experts} experts: must be 1 to {MOST}"
    most = min(experts, MOST_TAKEN)
    if not 0 < top_k <= most:
        return f"top_k is {top_k}: must be 1 to {most}"
    return why_not_in_parts(squeezed_PTm, (tokens, len(squeezed_PTm) * squeezed_PTm.shape[-1]))


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _choose_kernel,
        {
            **{"logits": "*fp32", "bias": "*fp32", "idx": "*i64", "weight": "*fp32"},
            **{"squeezed": "*bf16", "norm": "*fp32", "u": "*bf16", "arranged": "*i8" if part == 512 else "*bf16"},
            **{"T": "i32", "multiplier": "fp32", "factor": "fp32", "eps": "fp32"},
        },
        {
            **{"EXPERTS": 256, "TOP_K": 8, "PLACES": 8, "BLOCK": 256, "stride": 256},
            **{"ORDER": (WHOLE if part == 512 else MANY).value, "WIDTH": 4096, "COLUMNS": 4096, "PDL": True},
            **{"PART": part, "part_stride": part, "squeezed_stride": part},
        },
        {"num_warps": WARPS.value, "launch_pdl": True},
    )
    for part in (4096, 512)
]
