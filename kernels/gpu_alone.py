"""Expert products of few routes, each by itself, in whole numbers (kernels/gpu_whole.py).

Gate and up with the activation between them are one launch, which leaves the inner row quantised, and down another.
What two tokens share of an expert comes from the level-2 cache the second time.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, overlaps, rounded
from muse_fn.kernels.gpu_product import MX, NV
from muse_fn.kernels.gpu_unpack import GROUP
from muse_fn.kernels.gpu_whole import BLOCK, product, store_quantised, width


@triton.jit
def _quantise_kernel(x_ptr, out_ptr, K: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    inputs_ready(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEP
    k = first + tl.arange(0, STEP)
    v = tl.load(x_ptr + row * K + k, k < K, 0.0).to(tl.float32)
    store_quantised(out_ptr + row * width(K), v, first, K, STEP // BLOCK)


def quantised_rows(x_TM: Tensor) -> Tensor:
    """Rows [T, M] of any float dtype, M a multiple of 16 -> int8 [T, 2 M + M / 4]."""
    (tokens, inputs), early = x_TM.shape, overlaps(x_TM.device)
    out = torch.empty(tokens, width(inputs), dtype=torch.int8, device=x_TM.device)
    step = min(1024, triton.next_power_of_2(inputs))
    _quantise_kernel[tokens, triton.cdiv(inputs, step)](
        x_TM.contiguous(), out, K=inputs, STEP=step, PDL=early, launch_pdl=early, num_warps=4
    )
    return out


@triton.jit
def _expert(idx_ptr, route, E, first):
    """The expert of a route, counted from `first`; -1: none of these E."""
    expert = tl.load(idx_ptr + route).to(tl.int32) - first
    return tl.where((expert < 0) | (expert >= E), -1, expert)


@triton.jit
def _alone_gate_up_kernel(
    x_ptr, idx_ptr, codes_ptr, scales_ptr, global_ptr, h_ptr, out_ptr, E, first,
    R: tl.constexpr, K: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr,
    BN: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of BN / 2 inner columns for the route of program id 1, quantised."""
    inputs_ready(PDL)
    route = tl.program_id(1)
    expert = _expert(idx_ptr, route, E, first)
    if expert < 0:
        # Down has nothing to do with this route: zeros are written here.
        EACH: tl.constexpr = (K * BN + 2 * F - 1) // (2 * F)
        k = tl.arange(0, triton.next_power_of_2(EACH))
        n = tl.program_id(0) * EACH + k
        tl.store(
            out_ptr + route.to(tl.int64) * K + n, tl.zeros_like(k).to(out_ptr.dtype.element_ty), (k < EACH) & (n < K)
        )
        return
    f = tl.program_id(0) * (BN // 2)
    x_row = x_ptr + (route // R).to(tl.int64) * width(K)
    first_row = expert.to(tl.int64) * (2 * F) + f
    both = product(x_row, codes_ptr, scales_ptr, first_row, F, K, FORMAT, BN, S, False)
    gate, up = tl.split(tl.permute(tl.reshape(both, (BN // 16, 2, 8)), (0, 2, 1)))
    if FORMAT == NV:
        gate *= tl.load(global_ptr + expert * PARTS)
        up *= tl.load(global_ptr + expert * PARTS + PARTS - 1)
    h = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BN // 2,))
    store_quantised(h_ptr + route.to(tl.int64) * width(F), h, f, F, BN // 32)


@triton.jit
def _alone_down_kernel(
    h_ptr, idx_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, E, first,
    K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of down for the route of program id 1, if its expert is here: which expert that is was written by the
    kernel before the previous one."""
    route, begin = tl.program_id(1), tl.program_id(0) * BN
    expert = _expert(idx_ptr, route, E, first)
    n = begin + tl.arange(0, BN)
    if expert < 0:
        # Who waits for this launch counts on the one before it, which wrote this route's zeros, being done as well.
        if begin == 0:
            inputs_ready(PDL)
        return
    h_row = h_ptr + route.to(tl.int64) * width(K)
    out = product(h_row, codes_ptr, scales_ptr, expert.to(tl.int64) * N + begin, 0, K, FORMAT, BN, S, PDL)
    if FORMAT == NV:
        out *= tl.load(global_ptr + expert)
    tl.store(out_ptr + route.to(tl.int64) * N + n, rounded(out, out_ptr.dtype.element_ty))


class Packed(NamedTuple):
    """A matrix of each expert."""

    codes: Tensor  # int32, eight codes in each
    scales: Tensor  # uint8: e8m0 of 32 inputs, or e4m3 of 16
    global_scale: Tensor  # float32 [experts, parts], of NVFP4
    parts: int
    form: int  # MX or NV
    inputs: int


class Shape(NamedTuple):
    """How a launch cuts its work."""

    rows: int  # of a matrix that one program takes
    warps: int  # each has its part of the inputs


# Cut best on an H200: gate and up for one token and for four, and down. For gate and up of MXFP4 the compiler would use
# so few registers that it reads late what it is told to read early; for NVFP4 it then runs out of them.
FEWEST, FEWEST_ROUTES, FEW, DOWN = Shape(32, 8), 8, Shape(32, 4), Shape(16, 4)
REGISTERS = {MX.value: 128, NV.value: None}


def shape_of(shape: Shape, inputs: int) -> Shape:
    """The same for a matrix of so many inputs."""
    return shape._replace(warps=math.gcd(inputs // GROUP, shape.warps))


def expert_rows(
    x_TM: Tensor, idx_TR: Tensor, gate_up: Packed, down: Packed, out_TRM: Tensor, experts: int, first: int
) -> None:
    """reference.expert_rows of quantised rows int8 [T, 2 M + M / 4] into `out_TRM`; all of them are contiguous."""
    (tokens, top_k, latent), early = out_TRM.shape, overlaps(x_TM.device)
    routes, inner = tokens * top_k, down.inputs
    wide, narrow = shape_of(FEWEST if routes <= FEWEST_ROUTES else FEW, latent), shape_of(DOWN, inner)
    h = torch.empty(routes, width(inner), dtype=torch.int8, device=x_TM.device)
    common = {"FORMAT": down.form, "PDL": early, "launch_pdl": early}
    _alone_gate_up_kernel[2 * inner // wide.rows, routes](
        x_TM, idx_TR, *gate_up[:3], h, out_TRM, experts, first,
        R=top_k, K=latent, F=inner, PARTS=gate_up.parts, maxnreg=REGISTERS[gate_up.form], **_cut(wide), **common,
    )  # fmt: skip
    _alone_down_kernel[latent // narrow.rows, routes](
        h, idx_TR, *down[:3], out_TRM, experts, first, K=inner, N=latent, **_cut(narrow), **common
    )


def _cut(shape: Shape) -> dict[str, int]:
    return {"BN": shape.rows, "S": shape.warps, "num_warps": shape.warps}


def _compiled(routes: int, form: int) -> list[tuple[Any, ...]]:
    """Both products for a card that has 128 experts, a quarter of each."""
    types = {"idx_ptr": "*i64", "codes_ptr": "*i32", "scales_ptr": "*u8", "global_ptr": "*fp32", "out_ptr": "*bf16"}
    types |= {"E": "i32", "first": "i32"}
    cuts = [_cut(cut) for cut in (FEWEST if routes <= FEWEST_ROUTES else FEW, DOWN)]
    options = [{"num_warps": cut.pop("num_warps"), "launch_pdl": True} for cut in cuts]
    options[0]["maxnreg"] = REGISTERS[form]
    common = {"FORMAT": form, "PDL": True}
    gate_up = {"R": 8, "K": 4096, "F": 1024, "PARTS": form, **cuts[0], **common}
    down = {"K": 1024, "N": 4096, **cuts[1], **common}
    return [
        (_alone_gate_up_kernel, {"x_ptr": "*i8", "h_ptr": "*i8", **types}, gate_up, options[0]),
        (_alone_down_kernel, {"h_ptr": "*i8", **types}, down, options[1]),
    ]


COMPILED = [  # kernel, types of its arguments, constants, options: as for the released model
    (
        _quantise_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*i8"},
        {"K": 4096, "STEP": 1024, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    ),
    *(entry for routes in (8, 32) for form in (MX.value, NV.value) for entry in _compiled(routes, form)),
]
