"""The table of operations on a CPU without gradients: in bfloat16 compiled forms for products of few rows, for
attention and for what stands between, those of kernels/cpu.py and kernels/pieces.py for all else.

Sizes and dtypes decide, never values. Why a form was left out is said once in the log. Whoever watches the operations
sees each form as one; under any other mode of PyTorch's dispatch, which could not see it, the plain form runs.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from muse_fn.kernels import cpu, pieces, reference
from muse_fn.kernels.cpu_reasons import (
    WIDEST_PACKED,
    no_arenas,
    no_attention,
    no_experts,
    no_heads,
    no_product,
    no_rows,
    no_tiles,
    no_vectors,
    unlike,
    why_not,
)
from muse_fn.kernels.norms import Gain, Mix, Rotary
from muse_fn.kernels.one_op import one_op, watcher
from muse_fn.kernels.packed import Weight, logical_shape
from muse_fn.kernels.pieces import Chosen, Joined

Result = TypeVar("Result")


class Most(NamedTuple):
    """Rows up to which a compiled form is faster than the library's own product."""

    rows: int  # of a product
    tokens: int  # of experts in bfloat16
    packed: int  # of experts in MXFP4, which are else unpacked for each product; more would take much memory


# A product on matrix units (AMX) overtakes one on vectors early; the first line is measured, the second is careful.
MOST = {False: Most(64, 256, 512), True: Most(16, 16, 64)}
logger = logging.getLogger("muse_fn.kernels")

MOST_QUERIES = 4  # new positions of a sequence: each reads the cache anew
CROWD = 12  # routes for each expert, on the whole, from which its rows stand as columns
BF16, FLOAT = torch.bfloat16, torch.float32


@lru_cache(maxsize=256)
def say(operation: str, why: str) -> None:
    """Says in the log why a plain form is used, once."""
    logger.info("%s: the plain form is used: %s", operation, why)


def most() -> Most:
    """The bounds on this processor."""
    return MOST[cpu.has_matrix_units()]


@lru_cache
def file_of(name: str) -> Any:
    """A file of compiled forms, imported when first needed: Numba is, too."""
    return import_module(f"muse_fn.kernels.{name}")


def _either(
    operation: str, why: str, form: Callable[..., Result], plain: Callable[..., Result]
) -> Callable[..., Result]:
    if not why:
        return form
    say(operation, why)
    return plain


@one_op
def _linears(x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return file_of("cpu_linear").linears(x, ws, dtype)


def linears(
    x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None = None, *, rounded: Tensor | tuple[()] = ()
) -> tuple[Tensor, ...]:
    """pieces.linears. Of many rows, and of models in float32, nothing is said: the library's product is no lesser."""
    del rounded
    rows = x.numel() // max(1, x.shape[-1])
    is_ours = any(not isinstance(w, Tensor) or w.dtype == BF16 for w in ws)
    if not is_ours or not 0 < rows <= most().rows:
        return pieces.linears(x, ws, dtype, linear=cpu.linear)
    if why := no_product(x, ws, dtype):
        say("linears", why)
        return pieces.linears(x, ws, dtype, linear=cpu.linear)
    return _linears(x, ws, dtype)


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """reference.linear likewise."""
    return linears(x, (w,), dtype)[0]


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend: its keys are the rows of one block for each sequence. Of a few positions nothing is said."""
    args = q_BTND, k_BSKD, v_BSKD, q_pos_BT, k_pos_BS
    is_ours = q_BTND.dtype == BF16 and q_BTND.shape[1] > MOST_QUERIES
    shape = q_BTND.shape[2] // k_BSKD.shape[2], q_BTND.shape[3]
    why = "" if not is_ours else no_attention(*shape, *args[1:]) or why_not(q_BTND) or no_tiles()
    if why:
        say("attend", why)
    return _attend(*args, window) if is_ours and not why else cpu.attend(*args, window, is_start)


@one_op
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    blocks = torch.arange(len(q), device="cpu").unsqueeze(1)
    return file_of("cpu_prefill").attend_blocks(q, k.contiguous(), v.contiguous(), blocks, *rest)


@one_op
def _attend_blocks(*args: Any) -> Tensor:
    is_few = args[0].shape[1] <= MOST_QUERIES
    return file_of("cpu_attention" if is_few else "cpu_prefill").attend_blocks(*args)


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
    """reference.attend_blocks: one form for a few new positions of each sequence, which it reads the cache for one by
    one, one for more. Neither depends on `is_start`."""
    args = q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS, window
    if q_BTND.dtype != BF16:
        return cpu.attend_blocks(*args, is_start)
    shape = q_BTND.shape[2] // k_arena.shape[2], q_BTND.shape[3]
    why = no_attention(*shape, *args[1:-1]) or no_arenas(k_arena, v_arena) or why_not(q_BTND)
    if not why and q_BTND.shape[1] > MOST_QUERIES:
        why = no_tiles()
    if why:
        say("attend_blocks", why)
    return cpu.attend_blocks(*args, is_start) if why else _attend_blocks(*args)


@one_op
def _expert_rows(
    file: str, u: Tensor, idx: Tensor, gate_up: Weight, down: Weight, first: int, dtype: torch.dtype
) -> Tensor:
    return file_of(file).expert_rows(u, idx, gate_up, down, first=first, dtype=dtype)


def experts_file(tokens: int, routes: int, down: Weight) -> str:
    """Which form of experts is for so many in bfloat16; "" for the plain one."""
    experts, *widths = logical_shape(down)
    if not no_tiles() and (isinstance(down, Tensor) or max(widths) <= WIDEST_PACKED):
        if routes >= CROWD * experts:
            return "cpu_routes"
        if isinstance(down, Tensor):
            return "cpu_experts"
    return "cpu_experts" if tokens <= (most().tokens if isinstance(down, Tensor) else most().packed) else ""


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
    file = experts_file(len(u_TM), idx_TR.numel(), down_EMF) if u_TM.dtype == BF16 else ""
    why = ""
    if file:
        why = no_experts(u_TM.shape[-1], gate_up_EFM, down_EMF) or no_rows(u_TM, idx_TR, dtype or u_TM.dtype)
    if why:
        say("expert_rows", why)
    if why or not file:
        return cpu.expert_rows(u_TM, idx_TR, gate_up_EFM, down_EMF, first=first, dtype=dtype, arranged=arranged)
    return _expert_rows(file, u_TM, idx_TR, gate_up_EFM, down_EMF, first, dtype or u_TM.dtype)


@one_op
def _normed(x: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    return file_of("cpu_rows").normed(x, norm, eps, dtype)


def normed(x: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.normed: compiled where it rounds to bfloat16."""
    if dtype != BF16 or x.dtype not in (BF16, FLOAT):
        return pieces.normed(x, norm, eps, dtype)
    norm = Gain(norm.factor.float())  # the last one comes in the model's dtype
    why = no_vectors(x.shape[-1], norm.factor) or why_not(x)
    return _either("normed", why, _normed, pieces.normed)(x, norm, eps, dtype)


@one_op
def _join(*args: Any) -> Joined:
    return file_of("cpu_rows").join(*args)


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
    """pieces.join: compiled where the branch is in bfloat16 and in one part."""
    args = h, branch, scale, mix, norm, post_eps, eps, dtype
    if branch.dtype != BF16 or len(branch) > 1 or h.dtype != FLOAT or dtype not in (BF16, FLOAT):
        return pieces.join(*args)
    vectors = [gain.factor for gain in (scale, norm) if gain is not None]
    why = no_vectors(h.shape[-1], *mix, *vectors) or why_not(h, branch)
    return _either("join", why, _join, pieces.join)(*args)


@one_op
def _heads(*args: Any) -> tuple[Tensor, Tensor]:
    return file_of("cpu_heads").heads(*args)


def heads(
    q_BTF: Tensor, k_BTF: Tensor, rotary: Rotary | None, head_dim: int, qk_scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """pieces.heads: compiled for rows in bfloat16."""
    why = no_heads(head_dim, rotary, q_BTF, k_BTF) if q_BTF.dtype == BF16 else "rows in another dtype"
    return _either("heads", why, _heads, pieces.heads)(q_BTF, k_BTF, rotary, head_dim, qk_scale, eps)


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
    """pieces.place: compiled for rows and arenas in bfloat16. Who watches sees the arenas written by PyTorch."""
    if q_BTF.dtype != BF16:
        return pieces.place(q_BTF, k_BTF, v_BTF, rotary, qk_scale, eps, k_arena, v_arena, rows)
    is_whole = k_arena.dtype == v_arena.dtype == BF16 and k_arena.is_contiguous() and v_arena.is_contiguous()
    if is_whole and rows.dtype == torch.int64 and watcher() is None:
        why = no_heads(k_arena.shape[-1], rotary, q_BTF, k_BTF, v_BTF) or why_not(k_arena, v_arena, rows)
        form = _either("place", why, file_of("cpu_heads").place if not why else pieces.place, pieces.place)
        return form(q_BTF, k_BTF, v_BTF, rotary, qk_scale, eps, k_arena, v_arena, rows)
    head_dim = k_arena.shape[-1]
    q, k = heads(q_BTF, k_BTF, rotary, head_dim, qk_scale, eps)
    reference.write_rows(k_arena, k.flatten(0, 1), rows)
    reference.write_rows(v_arena, v_BTF.flatten(0, 1).unflatten(-1, (-1, head_dim)), rows)
    return q


@one_op
def _gated(o: Tensor, gate: Tensor, eps: float) -> Tensor:
    return file_of("cpu_heads").gated(o, gate, eps)


def gated(o_BTND: Tensor, gate_BTF: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.gated: compiled in bfloat16."""
    why = unlike(BF16, o_BTND, gate_BTF) or ("" if dtype == BF16 else f"the result is {dtype}") or why_not(o_BTND)
    if why:
        say("gated", why)
        return pieces.gated(o_BTND, gate_BTF, eps, dtype)
    return _gated(o_BTND, gate_BTF, eps)


@one_op
def _choose(*args: Any) -> Chosen:
    return file_of("cpu_rows").choose(*args)


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
    """pieces.choose: compiled where the tokens are in bfloat16 and in one part."""
    args = logits_TE, bias_E, top_k, multiplier, factor, squeezed_PTm, norm, eps, dtype
    if squeezed_PTm.dtype != BF16 or dtype != BF16 or len(squeezed_PTm) > 1:
        return pieces.choose(*args)
    why = no_vectors(logits_TE.shape[-1], bias_E) or no_vectors(squeezed_PTm.shape[-1], norm.factor)
    why = why or unlike(FLOAT, logits_TE) or why_not(logits_TE, squeezed_PTm)
    return _either("choose", why, _choose, pieces.choose)(*args)


@one_op
def _blend(y: Tensor, weight: Tensor, norm: Gain, eps: float) -> Tensor:
    return file_of("cpu_rows").blend(y, weight, norm, eps)


def blend(y_TRM: Tensor, weight_TR: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """pieces.blend: compiled in bfloat16."""
    if y_TRM.dtype != BF16 or dtype != BF16:
        return pieces.blend(y_TRM, weight_TR, norm, eps, dtype)
    why = no_vectors(y_TRM.shape[-1], norm.factor) or unlike(FLOAT, weight_TR) or why_not(y_TRM, weight_TR)
    if why:
        say("blend", why)
        return pieces.blend(y_TRM, weight_TR, norm, eps, dtype)
    return _blend(y_TRM, weight_TR, norm, eps)


silu = reference.silu
attend_new = None  # one after the other
