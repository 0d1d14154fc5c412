"""What a step does before its layers and after its head, each piece one operation: the plain-PyTorch meaning.

A CUDA device does a piece in one launch where no gradient is wanted, and a CPU in one pass; kernels/gpu_step.py and
kernels/cpu_step.py have these forms.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, device

from muse_fn.kernels.norms import Gain, Mix, Rotary, gain, mix, plain_norm, rotary_at, rotary_frequencies
from muse_fn.kernels.select import may_differentiate, sees_numbers, under_vmap, why_no_numba, why_no_triton


def embedding(table_VH: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """Rows of a table whose first row is that of id `first`: ids [...] -> [..., H] in its dtype, zeros for ids
    elsewhere."""
    form = triton_form(table_VH.device)
    if form and not form.why_not_embedding(table_VH):
        return form.embedding(table_VH, ids, first)
    if table_VH.dtype == torch.bfloat16 and table_VH.is_contiguous() and ids.dtype == torch.int64:
        form = numba_form(table_VH, ids)
        if form:
            return form.embedding(table_VH, ids, first)
    local = ids - first
    row = local.clamp(0, len(table_VH) - 1)
    return torch.where((row == local).unsqueeze(-1), F.embedding(row, table_VH), 0.0)


def gains(vectors: Sequence[Tensor]) -> list[Gain]:
    """`norms.gain` of several vectors of one width."""
    if not vectors:
        return []
    form = _form_of_vectors(vectors)
    return [*map(Gain, (form.gains(vectors) if form else gain(torch.stack([*vectors])).factor).unbind())]


def mixes(vectors: Sequence[Tensor], temperature: float, dtype: torch.dtype) -> list[Mix]:
    """`norms.mix` of several gates of one width, for a model in `dtype`: that of float32 has all its own bits."""
    form = _form_of_vectors(vectors) if dtype == torch.bfloat16 else None
    alpha, beta = form.mixes(vectors, temperature) if form else mix(torch.stack([*vectors]), temperature)
    return [*map(Mix, alpha.unbind(), beta.unbind())]


def rotary_of(pos_BT: Tensor, head_dim: int, theta: float) -> Rotary:
    """The angles of pairs at these positions; their frequencies are kept."""
    form = triton_form(pos_BT.device)
    if form:
        return form.rotary(pos_BT, head_dim, theta)
    kept = _frequencies if sees_numbers() else rotary_frequencies
    return rotary_at(pos_BT, kept(head_dim, theta, pos_BT.device))


@lru_cache
def _frequencies(head_dim: int, theta: float, where: device) -> Tensor:
    """`rotary_frequencies`, but no tensor that only inference may use."""
    with torch.inference_mode(False):
        return rotary_frequencies(head_dim, theta, where)


def stream_norm(x: Tensor, eps: float) -> Tensor:
    """`plain_norm` of embedded rows: [..., H] -> float32 [..., H]."""
    if triton_form(x.device):
        pieces = import_module("muse_fn.kernels.gpu_pieces")
        if not pieces.why_not(x):
            return pieces.normed(x, None, eps, torch.float32)
    form = numba_form(x) if x.dtype == torch.bfloat16 else None
    return form.stream_norm(x, eps) if form else plain_norm(x, eps)


def advanced(past_B: Tensor, count_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    """After a step of one token for each row, int64 [B] each: the positions that rows then have, and which go on, bool
    [B]: those that had a token to read, which is not -1."""
    form = triton_form(past_B.device)
    if form and {past_B.dtype, count_B.dtype, tokens_B.dtype} == {torch.int64}:
        return form.advanced(past_B, count_B, tokens_B)
    return past_B + count_B, (count_B > 0) & (tokens_B >= 0)


def fits(
    tokens_BT: Tensor, view: Sequence[Tensor], windows: Sequence[int], cache: Sequence[int], limits: Sequence[int]
) -> bool:
    """Whether a quick look shows that a step fits, as step.check_step has it; False where there is none, or to be told
    in words why not. `view` is [G, B, N], [B] and [B], `cache` how many blocks it has and positions of one, `limits`
    the least count of a row, and how many positions and ids there may be."""
    given = tokens_BT, *view
    form = numba_form(*given)
    if form is None or any(x.dtype != torch.int64 or not x.is_contiguous() for x in given):
        return False
    return form.fits(tokens_BT, view, windows, cache, limits)


def capped(z: Tensor, multiplier: float, cap: float) -> Tensor:
    """float32: cap * tanh(z * multiplier / cap), or z * multiplier where cap is 0; element by element."""
    form = triton_form(z.device)
    if form:
        return form.capped(z, multiplier, cap)
    form = numba_form(z) if z.dtype == torch.bfloat16 else None
    if form:
        return form.capped(z, multiplier, cap)
    z = z.float() * multiplier
    return torch.tanh(z / cap) * cap if cap else z


def triton_form(where: device) -> Any:
    """kernels/gpu_step.py where its forms can be used: on this device, without gradients, outside of vmap; or None."""
    if torch.is_grad_enabled() or under_vmap() or why_no_triton(where):
        return None
    return import_module("muse_fn.kernels.gpu_step")


def numba_form(*given: Tensor) -> Any:
    """kernels/cpu_step.py where its forms can take these tensors, as select.select and kernels/cpu_ops.py decide; or
    None."""
    if not given[0].is_cpu or may_differentiate() or why_no_numba() or _reasons().why_not(*given):
        return None
    return _cpu_step()


def _form_of_vectors(vectors: Sequence[Tensor]) -> Any:
    shape, dtype = vectors[0].shape, vectors[0].dtype
    is_known = len(shape) == 1 and dtype in (torch.float32, torch.bfloat16)
    is_known = is_known and all(x.dtype == dtype and x.shape == shape and x.is_contiguous() for x in vectors)
    return numba_form(*vectors) if is_known else None


@lru_cache
def _reasons() -> Any:
    return import_module("muse_fn.kernels.cpu_reasons")


@lru_cache
def _cpu_step() -> Any:
    return import_module("muse_fn.kernels.cpu_step")
