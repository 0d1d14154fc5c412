"""The table of operations on a CUDA device: Triton forms where they fit, those of kernels/static.py where they do not.

Sizes, dtypes and the device decide, never values. Why a form was left out is said once in the log.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from muse_fn.kernels import (
    gpu_attention,
    gpu_decode,
    gpu_experts,
    gpu_heads,
    gpu_linear,
    gpu_linear_form,
    gpu_merge,
    gpu_pieces,
    gpu_prefill,
    gpu_route,
    pieces,
    reference,
    static,
)
from muse_fn.kernels.norms import Gain, Mix, Rotary
from muse_fn.kernels.packed import Weight
from muse_fn.kernels.pieces import Chosen, Context, Joined, Projected

Result = TypeVar("Result")
logger = logging.getLogger("muse_fn.kernels")


@lru_cache(maxsize=256)
def _say(operation: str, why: str) -> None:
    logger.info("%s: the plain form is used: %s", operation, why)


def _either(
    operation: str, why: str, form: Callable[..., Result], plain: Callable[..., Result]
) -> Callable[..., Result]:
    if not why:
        return form
    _say(operation, why)
    return plain


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend."""
    why = gpu_prefill.why_not(q_BTND, k_BSKD, v_BSKD)
    form = _either("attend", why, gpu_prefill.attend, static.attend)
    return form(q_BTND, k_BSKD, v_BSKD, q_pos_BT, k_pos_BS, window, is_start)


def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend_blocks: split over keys while the queries are few, in tiles of queries above."""
    few = not gpu_attention.why_not(q_BTND, k_arena, v_arena)
    why = "" if few else gpu_prefill.why_not(q_BTND, k_arena, v_arena)
    best = gpu_attention.attend_blocks if few else gpu_prefill.attend_blocks
    form = _either("attend_blocks", why, best, static.attend_blocks)
    return form(q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS, window, is_start)


def expert_rows(
    u_TM: Tensor,
    idx_TR: Tensor,
    gate_up_EFM: Weight,
    down_EMF: Weight,
    *,
    first: int = 0,
    dtype: torch.dtype | None = None,
    arranged: Tensor | tuple[()] | None = None,
) -> Tensor:
    """reference.expert_rows."""
    why = gpu_experts.why_not(u_TM, gate_up_EFM, down_EMF)
    form = _either("expert_rows", why, gpu_experts.expert_rows, static.expert_rows)
    return form(u_TM, idx_TR, gate_up_EFM, down_EMF, first=first, dtype=dtype, arranged=arranged)


def normed(x: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.normed."""
    form = _either("normed", gpu_pieces.why_not(x), gpu_pieces.normed, pieces.normed)
    return form(x, norm, eps, dtype)


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
    """pieces.join."""
    why = gpu_pieces.why_not(h) or gpu_pieces.why_not_in_parts(branch, h.shape)
    form = _either("join", why, gpu_pieces.join, pieces.join)
    return form(h, branch, scale, mix, norm, post_eps, eps, dtype)


def heads(
    q_BTF: Tensor, k_BTF: Tensor, rotary: Rotary | None, head_dim: int, qk_scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """pieces.heads."""
    form = _either("heads", gpu_heads.why_not(head_dim, q_BTF, k_BTF), gpu_heads.heads, pieces.heads)
    return form(q_BTF, k_BTF, rotary, head_dim, qk_scale, eps)


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
    """pieces.place."""
    why = gpu_heads.why_not(k_arena.shape[-1], q_BTF, k_BTF, v_BTF, k_arena, v_arena)
    form = _either("place", why, gpu_heads.place, pieces.place)
    return form(q_BTF, k_BTF, v_BTF, rotary, qk_scale, eps, k_arena, v_arena, rows)


def attend_new(
    rows: Projected,
    rotary: Rotary | None,
    qk_scale: float,
    eps: float,
    k_arena: Tensor,
    v_arena: Tensor,
    at: Context,
    dtype: torch.dtype,
) -> Tensor:
    """`place`, `attend_blocks` and `gated`: for one new token of each sequence in one. Else nothing is said of it:
    these say it for themselves."""
    if not gpu_decode.why_not(rows, k_arena, v_arena, at, dtype):
        return gpu_decode.attend_new(rows, rotary, qk_scale, eps, k_arena, v_arena, at, dtype)
    q_BTND = place(*rows[:3], rotary, qk_scale, eps, k_arena, v_arena, at.write)
    return gated(attend_blocks(q_BTND, k_arena, v_arena, *at[1:]), rows.gate_BTF, eps, dtype)


def gated(o_BTND: Tensor, gate_BTF: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.gated."""
    why = gpu_heads.why_not(o_BTND.shape[-1], o_BTND, gate_BTF)
    return _either("gated", why, gpu_merge.gated, pieces.gated)(o_BTND, gate_BTF, eps, dtype)


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
    """pieces.choose."""
    why = gpu_route.why_not(logits_TE, bias_E, top_k, squeezed_PTm)
    form = _either("choose", why, gpu_route.choose, pieces.choose)
    return form(logits_TE, bias_E, top_k, multiplier, factor, squeezed_PTm, norm, eps, dtype)


def blend(y_TRM: Tensor, weight_TR: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.blend."""
    form = _either("blend", gpu_pieces.why_not_blend(y_TRM), gpu_pieces.blend, pieces.blend)
    return form(y_TRM, weight_TR, norm, eps, dtype)


def linears(
    x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None = None, *, rounded: Tensor | tuple[()] = ()
) -> tuple[Tensor, ...]:
    """pieces.linears. For many rows the library's product is no lesser form: nothing is said of it."""
    if 0 < x.numel() // max(1, x.shape[-1]) <= gpu_linear_form.MOST_ROWS and (why := gpu_linear.why_not(x, ws)):
        _say("linears", why)
    return gpu_linear.linears(x, ws, dtype, rounded=rounded)


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """reference.linear likewise."""
    return linears(x, (w,), dtype)[0]


silu = reference.silu
