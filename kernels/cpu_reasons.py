"""Why compiled forms on a CPU cannot take these tensors: a sentence for the log, "" if they can.

Sizes and dtypes decide, never values.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from operator import attrgetter

import torch
from torch import Tensor

from muse_fn.kernels import cpu, cpu_calls
from muse_fn.kernels.norms import Rotary
from muse_fn.kernels.one_op import watcher
from muse_fn.kernels.packed import MXFP4, Weight, logical_shape

GROUP = 32  # inputs that a product reads at a time
WIDEST_HEAD = 256
WIDEST_PACKED = 4096  # inputs of packed experts, of which a form for many tokens unpacks 16 rows into 128 KiB
BF16, FLOAT = torch.bfloat16, torch.float32
_dispatch = attrgetter("__torch_dispatch__")  # a class of tensors that has its own need not hold numbers
_PLAIN = _dispatch(Tensor)


def why_not(*tensors: Tensor) -> str:
    """Why no compiled form can take these tensors, whatever their dtypes."""
    if torch.compiler.is_compiling():
        return "a compiler traces it, which would keep this call's addresses"
    if why := cpu_calls.why_not():
        return why
    for x in tensors:  # each look counts: there are sixty calls a step
        if not x.is_cpu or (type(x) is not Tensor and _dispatch(type(x)) is not _PLAIN):
            return "a tensor is not a plain one on the CPU"
        if not x.numel():
            return "a tensor is empty"
        if x.is_neg():
            return "a tensor is a view that turns signs"
    if watcher() is None and torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportAttributeAccessIssue]
        return "a mode of PyTorch's dispatch is on, which would not see it"
    return ""


def unlike(dtype: torch.dtype, *tensors: Tensor) -> str:
    """Why not for tensors that have to be of one dtype."""
    for x in tensors:
        if x.dtype is not dtype:
            return f"{x.dtype} where it takes {dtype}"
    return ""


def no_product(x: Tensor, ws: Sequence[Weight], dtype: torch.dtype | None) -> str:
    """For pieces.linears."""
    if x.shape[-1] % GROUP or x.dtype not in (BF16, FLOAT) or dtype not in (None, BF16, FLOAT):
        return f"{x.shape[-1]} inputs of {x.dtype}: it takes multiples of {GROUP} in bfloat16 or float32"
    for w in ws:
        whole = w.codes if isinstance(w, MXFP4) else w
        if not isinstance(whole, Tensor) or whole.dim() != 2 or not whole.is_contiguous():
            return "a weight that is no contiguous matrix in bfloat16, float32 or MXFP4"
        if logical_shape(w)[1] != x.shape[-1]:
            return f"{x.shape[-1]} inputs beside a weight of {logical_shape(w)[1]}"
        if isinstance(w, MXFP4) and (x.dtype != BF16 or not w.scales.is_contiguous()):
            return f"MXFP4 times {x.dtype}: it takes bfloat16"
        if isinstance(w, Tensor) and (w.dtype not in (BF16, FLOAT) or (w.dtype == FLOAT and x.dtype != FLOAT)):
            return f"{x.dtype} times {w.dtype}"
    return why_not(x, *(part for w in ws for part in ((w,) if isinstance(w, Tensor) else w)))


def no_attention(heads: int, width: int, k: Tensor, v: Tensor, *places: Tensor) -> str:
    """For reference.attend and attend_blocks with so many heads to a key, as far as queries do not decide."""
    if width % GROUP or width > WIDEST_HEAD or heads > 16:
        return f"{heads} heads of {width} to a key: it takes 16 at most, of a multiple of {GROUP} up to {WIDEST_HEAD}"
    return unlike(BF16, k, v) or unlike(torch.int64, *places) or why_not(k, v, *places)


def no_arenas(k: Tensor, v: Tensor) -> str:
    """Why keys and values cannot be read where they lie."""
    return "" if k.is_contiguous() and v.is_contiguous() else "an arena is a view of another tensor"


def no_tiles() -> str:
    """Why no form for many rows, as far as the processor decides."""
    if why := cpu_calls.why_not():
        return why
    if cpu.has_matrix_units():
        return "the library's has matrix units (AMX)"
    return "" if _has_dots() else "the processor does not multiply pairs of bfloat16"


@lru_cache
def _has_dots() -> bool:
    return import_module("muse_fn.kernels.cpu_vectors").HAS_DOTS


def no_experts(latent: int, gate_up: Weight, down: Weight) -> str:
    """For reference.expert_rows on tokens of this width."""
    parts = [part for w in (gate_up, down) for part in ((w,) if isinstance(w, Tensor) else w)]
    experts, width, inner = logical_shape(down)
    if tuple(logical_shape(gate_up)) != (experts, 2 * inner, latent) or width != latent:
        return "tokens, routes and experts of sizes that do not belong together"
    if type(gate_up) is not type(down) or not isinstance(down, (Tensor, MXFP4)):
        return "experts in neither bfloat16 nor MXFP4"
    if latent % GROUP or (down if isinstance(down, Tensor) else down.codes).shape[-1] % (GROUP // 2):
        return f"widths that are no multiples of {GROUP}"
    if any(not part.is_contiguous() for part in parts):
        return "a part of the weights is a view of another tensor"
    if isinstance(down, Tensor) and down.shape[-1] % GROUP:
        return f"widths that are no multiples of {GROUP}"
    plain = unlike(BF16, gate_up, down) if isinstance(gate_up, Tensor) and isinstance(down, Tensor) else ""
    return plain or why_not(*parts)


def no_rows(u: Tensor, idx: Tensor, dtype: torch.dtype) -> str:
    """For its tokens, their routes and the dtype of its result."""
    if u.dim() != 2 or len(u) != len(idx) or dtype not in (BF16, FLOAT):
        return "tokens and routes of sizes that do not belong together, or a result in neither bfloat16 nor float32"
    return unlike(torch.int64, idx) or why_not(u, idx)


def no_vectors(width: int, *vectors: Tensor) -> str:
    """Why not for vectors that act on rows of this width."""
    for x in vectors:
        if x.dim() != 1 or x.numel() != width or x.dtype is not FLOAT or not x.is_contiguous():
            return "a vector that is not float32, not of the width of the rows, or a view of another tensor"
    return ""


def no_heads(head_dim: int, rotary: Rotary | None, *rows: Tensor) -> str:
    """For pieces.heads, place."""
    if head_dim > 2 * WIDEST_HEAD or head_dim % 2:
        return f"heads of {head_dim}: it takes even widths up to {2 * WIDEST_HEAD}"
    angles = () if rotary is None else rotary
    if any(x.numel() * rows[0].shape[-1] != rows[0].numel() * head_dim for x in angles):
        return "angles of other positions"
    return unlike(BF16, *rows) or unlike(FLOAT, *angles) or why_not(*rows, *angles)
