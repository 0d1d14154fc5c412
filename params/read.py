"""A verified checkpoint in, a tree of parameters out: memory-mapped where a stored tensor is the parameter already."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight
from muse_fn.params.checkpoint import Checkpoint, refuse
from muse_fn.params.formats import Role
from muse_fn.params.matching import Index, LeafPlan
from muse_fn.params.safetensors_header import Stored
from muse_fn.params.schema import Leaf, sparse_layers
from muse_fn.params.tree import Params, from_named

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the parameter just read
ReadTensor = Callable[[Stored, Index], Tensor]
Finish = Callable[[Leaf, Weight], Weight]

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
NODES: dict[str, Callable[[dict[Role, Tensor]], Weight]] = {
    "plain": lambda tensors: tensors["values"],
    "mxfp4": lambda tensors: MXFP4(tensors["codes"], tensors["scales"]),
    "nvfp4": lambda tensors: NVFP4(tensors["codes"], tensors["scales"], tensors["global_scale"]),
}


def read_params(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    finish: Finish | None = None,
) -> Params:
    """Every parameter of a verified checkpoint.

    Router and residual gates become float32, other plain tensors `dtype` (None: as stored), packed ones stay packed.
    On the CPU a parameter that is one stored tensor of that dtype is the file itself, mapped copy-on-write. `finish`
    may replace each parameter as soon as it is read, before the cast. Raises CheckpointError naming every tensor whose
    values cannot stand for numbers.
    """
    values: dict[str, Weight] = {}
    problems: list[str] = []
    done, total = 0, checkpoint.bytes
    with open_files() as read:
        for plan in checkpoint.plans:
            weight = read_leaf(plan, read, device)
            problems += VALUE_CHECKS[plan.format.node](plan, weight)
            weight = finish(plan.leaf, weight) if finish and not problems else weight
            values[plan.leaf.path] = cast_leaf(plan.leaf, weight, dtype)
            done += plan.bytes
            if progress:
                progress(done, total, plan.leaf.path)
        if checkpoint.head_copy:
            problems += _problems_of_copy(checkpoint.head_copy, read, values["embed"])
    if problems:
        refuse(checkpoint.folder, problems)
    return from_named(sparse_layers(checkpoint.config), values)


@contextmanager
def open_files() -> Generator[ReadTensor]:
    """A function that reads a stored tensor or a slice of it, opening each file once. () is the whole tensor.

    A slice is a view of the mapped file: only the pages it covers are read.
    """
    handles: dict[Path, Any] = {}
    with ExitStack() as stack:

        def read(stored: Stored, index: Index) -> Tensor:
            if stored.file not in handles:
                handles[stored.file] = stack.enter_context(safe_open(stored.file, framework="pt"))
            handle = handles[stored.file]
            return handle.get_slice(stored.name)[index] if index else handle.get_tensor(stored.name)

        yield read


def read_leaf(plan: LeafPlan, read: ReadTensor, device: str | torch.device) -> Weight:
    """One parameter as stored, its pieces copied into one tensor unless there is only one."""
    tensors: dict[Role, Tensor] = {}
    roles: dict[Role, None] = dict.fromkeys(piece.part.role for piece in plan.pieces)
    for role in roles:
        pieces = [piece for piece in plan.pieces if piece.part.role == role]
        shape = plan.shape(role)
        if pieces[0].at == ():
            whole = read(pieces[0].stored, ()).reshape(shape)
            tensors[role] = _aligned(whole).to(device)
            continue
        dtype = reduce(torch.promote_types, (DTYPES[piece.stored.dtype] for piece in pieces))
        tensors[role] = torch.empty(shape, dtype=dtype, device=device)
        for piece in pieces:
            place = tensors[role][piece.at]
            values = read(piece.stored, ()).reshape(place.shape)
            place.copy_(values.reciprocal() if piece.part.divides else values)
    return NODES[plan.format.node](tensors)


def _aligned(tensor: Tensor) -> Tensor:
    """A copy if the file puts the tensor at an odd address, which the format allows and kernels may not."""
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def cast_leaf(leaf: Leaf, weight: Weight, dtype: torch.dtype | None) -> Weight:
    """A plain parameter in the dtype its row asks for; a packed one as it is."""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(torch.float32 if leaf.row.dtype == "float32" else dtype or weight.dtype)


def _named_where(plan: LeafPlan, role: Role, bad: Tensor, what: str) -> list[str]:
    """One sentence per stored tensor that has a bad element; `bad` is shaped like the node's tensor."""
    if not bad.any():
        return []
    pieces = [piece for piece in plan.pieces if piece.part.role == role]
    return [f"{piece.stored}: {what}" for piece in pieces if bad[piece.at].any()]


def _problems_of_mxfp4(plan: LeafPlan, weight: Weight) -> list[str]:
    """E8M0 byte 255 is NaN; 254 and 253 leave float32 with codes from 2 and from 4 on."""
    assert isinstance(weight, MXFP4), f"{plan.leaf.path=}"
    codes, scales = weight
    if not scales.numel() or scales.max() < 253:
        return []
    largest = torch.maximum(codes & 7, codes >> 4 & 7).unflatten(-1, (scales.shape[-1], -1)).amax(-1)
    huge = (scales == 254) & (largest >= 4) | (scales == 253) & (largest >= 6)
    return [
        *_named_where(plan, "scales", scales == 255, "scale byte 255 (E8M0 NaN) is not allowed"),
        *_named_where(plan, "scales", huge, "scale byte 253 or 254 beside codes so large that float32 overflows"),
    ]


def _problems_of_nvfp4(plan: LeafPlan, weight: Weight) -> list[str]:
    """E4M3 bytes 0x7f and 0xff are NaN; a global scale must be finite."""
    assert isinstance(weight, NVFP4), f"{plan.leaf.path=}"
    return [
        *_named_where(plan, "scales", weight.scales.view(torch.uint8) & 0x7F == 0x7F, "holds E4M3 NaN scales"),
        *_named_where(plan, "global_scale", ~weight.global_scale.isfinite(), "holds a scale that is not finite"),
    ]


VALUE_CHECKS: dict[str, Callable[[LeafPlan, Weight], list[str]]] = {
    "plain": lambda plan, weight: [],
    "mxfp4": _problems_of_mxfp4,
    "nvfp4": _problems_of_nvfp4,
}


def _problems_of_copy(plan: LeafPlan, read: ReadTensor, embed: Weight) -> list[str]:
    assert isinstance(embed, Tensor), f"{plan.leaf.path=}"
    (piece,) = plan.pieces
    if torch.equal(embed, read(piece.stored, ()).to(embed.device, embed.dtype)):
        return []
    return [f"{piece.stored}: differs from the embedding, while config.json says tie_word_embeddings"]
