"""A verified checkpoint in, a tree of parameters out: memory-mapped where the file holds a parameter in one stretch.

A rank reads its share only: the slices of stored tensors that its parts of the parameters meet.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight
from muse_fn.params.checkpoint import Checkpoint, parts_of, refuse
from muse_fn.params.formats import Role
from muse_fn.params.matching import LeafPlan, Slice
from muse_fn.params.safetensors_header import Stored
from muse_fn.params.schema import Leaf
from muse_fn.params.slicing import Part, Share, Slices, everything, shape_of_part
from muse_fn.params.tree import Params, from_named

Progress = Callable[[int, int, str], None]  # bytes done, this rank's bytes in all, the parameter just read
ReadTensor = Callable[[Stored, Slices], Tensor]
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
    share: Share | None = None,
) -> Params:
    """Every parameter of a verified checkpoint, or a rank's share of them; no byte outside of it is read.

    Router and residual gates become float32, other plain tensors `dtype` (None: as stored), packed ones stay packed.
    On the CPU a parameter that is one stretch of one stored tensor, in that dtype, is the file itself, mapped
    copy-on-write; another device takes one slice at a time from the host. `finish` may replace each parameter as soon
    as it is read, before the cast; it is given the model's leaf, and of its weight the rank's part. Raises
    CheckpointError naming every tensor whose values, as far as they were read, cannot stand for numbers.
    """
    share = share or everything(checkpoint.config)
    values: dict[str, Weight] = {}
    problems: list[str] = []
    planned = [(plan, part, plan.bytes_of(part)) for plan, part in parts_of(checkpoint, share)]
    done, total = 0, sum(size for _, _, size in planned)
    with open_files() as read:
        for plan, part, size in planned:
            weight = read_leaf(plan, part, read, device)
            if plan is checkpoint.head_copy:
                problems += _problems_of_copy(plan, weight, values["embed"])
            else:
                problems += VALUE_CHECKS[plan.format.node](plan, part, weight)
                weight = finish(plan.leaf, weight) if finish and not problems else weight
                values[share.path(plan.leaf)] = cast_leaf(plan.leaf, weight, dtype)
            done += size
            if progress:
                progress(done, total, plan.leaf.path)
    if problems:
        refuse(checkpoint.folder, problems)
    return from_named(share.sparse, values)


@contextmanager
def open_files() -> Generator[ReadTensor]:
    """A function that reads a slice of a stored tensor, () being all of it, and opens each file when first asked for.

    What it returns is a view of the mapped file, strided where the slice is: nothing is read until it is copied or
    computed with, and then only the pages that the slice touches.
    """
    handles: dict[Path, Any] = {}
    with ExitStack() as stack:

        def read(stored: Stored, slices: Slices) -> Tensor:
            if stored.file not in handles:
                handles[stored.file] = stack.enter_context(safe_open(stored.file, framework="pt"))
            handle = handles[stored.file]
            # Measured with safetensors 0.5.0 and 0.8.0: get_slice maps and never copies, rows or columns, float8 too.
            # Only a scalar refuses slices.
            return handle.get_slice(stored.name)[slices] if slices else handle.get_tensor(stored.name)

        yield read


def read_leaf(plan: LeafPlan, part: Part, read: ReadTensor, device: str | torch.device) -> Weight:
    """A part of one parameter as stored: mapped if it is one stretch of one stored tensor, else copied together."""
    return NODES[plan.format.node]({role: _read_role(plan, role, part, read, device) for role in plan.roles})


def _read_role(plan: LeafPlan, role: Role, part: Part, read: ReadTensor, device: str | torch.device) -> Tensor:
    # Of all pieces, those of other ranks too: every rank must come to the same dtype.
    stored = (piece.stored.dtype for piece in plan.pieces if piece.part.role == role)
    dtype = reduce(torch.promote_types, (DTYPES[name] for name in stored))
    slices = list(plan.slices(role, part))
    if len(slices) == 1:
        return _aligned(_values(slices[0], read).contiguous()).to(device, dtype)
    found = torch.empty(shape_of_part(plan.part(role, part)), dtype=dtype, device=device)
    for one in slices:
        found[one.target].copy_(_values(one, read))
    return found


def _values(one: Slice, read: ReadTensor) -> Tensor:
    values = read(one.piece.stored, one.read).reshape(one.shape)
    return values.reciprocal() if one.piece.part.divides else values


def _aligned(tensor: Tensor) -> Tensor:
    """A copy if the file puts the tensor at an odd address, which the format allows and kernels may not."""
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def cast_leaf(leaf: Leaf, weight: Weight, dtype: torch.dtype | None) -> Weight:
    """A plain parameter in the dtype its row asks for; a packed one as it is."""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(torch.float32 if leaf.row.dtype == "float32" else dtype or weight.dtype)


def _named_where(plan: LeafPlan, part: Part, role: Role, bad: Tensor, what: str) -> list[str]:
    """One sentence per stored tensor that has a bad element; `bad` is shaped like the tensor of the part's node."""
    if not bad.any():
        return []
    names = [f"{one.piece.stored}: {what}" for one in plan.slices(role, part) if bad[one.target].any()]
    return list(dict.fromkeys(names))


def _problems_of_mxfp4(plan: LeafPlan, part: Part, weight: Weight) -> list[str]:
    """E8M0 byte 255 is NaN; 254 and 253 leave float32 with codes from 2 and from 4 on."""
    assert isinstance(weight, MXFP4), f"{plan.leaf.path=}"
    codes, scales = weight
    if not scales.numel() or scales.max() < 253:
        return []
    largest = torch.maximum(codes & 7, codes >> 4 & 7).unflatten(-1, (scales.shape[-1], -1)).amax(-1)
    huge = (scales == 254) & (largest >= 4) | (scales == 253) & (largest >= 6)
    return [
        *_named_where(plan, part, "scales", scales == 255, "scale byte 255 (E8M0 NaN) is not allowed"),
        *_named_where(plan, part, "scales", huge, "scale byte 253 or 254 beside codes so large that float32 overflows"),
    ]


def _problems_of_nvfp4(plan: LeafPlan, part: Part, weight: Weight) -> list[str]:
    """E4M3 bytes 0x7f and 0xff are NaN; a global scale must be finite."""
    assert isinstance(weight, NVFP4), f"{plan.leaf.path=}"
    return [
        *_named_where(plan, part, "scales", weight.scales.view(torch.uint8) & 0x7F == 0x7F, "holds E4M3 NaN scales"),
        *_named_where(plan, part, "global_scale", ~weight.global_scale.isfinite(), "holds a scale that is not finite"),
    ]


VALUE_CHECKS: dict[str, Callable[[LeafPlan, Part, Weight], list[str]]] = {
    "plain": lambda plan, part, weight: [],
    "mxfp4": _problems_of_mxfp4,
    "nvfp4": _problems_of_nvfp4,
}


def _problems_of_copy(plan: LeafPlan, head: Weight, embed: Weight) -> list[str]:
    assert isinstance(head, Tensor), f"{plan.leaf.path=}"
    assert isinstance(embed, Tensor), f"{plan.leaf.path=}"
    if torch.equal(embed, head.to(embed.dtype)):
        return []
    (piece,) = plan.pieces
    return [f"{piece.stored}: differs from the embedding, while config.json says tie_word_embeddings"]
