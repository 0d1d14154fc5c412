"""Whether packed experts stay packed: the rule of `load(quantize="auto")`.

Devices whose kernels multiply packed matrices keep them. So does a CPU whose compiled forms do (kernels/cpu_ops.py):
MXFP4 beside bfloat16, where they were measured to be as fast as with unpacked ones, without matrix units. Elsewhere on
a CPU a packed matrix is unpacked for every product, which takes longer than reading it plain. There it is unpacked
once, while it is read, if all that is loaded then takes at most half of the memory that the machine has to give.
"""

import math
from collections.abc import Set
from pathlib import Path

import torch

from muse_fn.kernels.cpu import has_matrix_units
from muse_fn.kernels.cpu_calls import why_not as why_no_numba
from muse_fn.params.checkpoint import Checkpoint, parts_of
from muse_fn.params.quantise import to_node
from muse_fn.params.schema import Leaf
from muse_fn.params.slicing import Share, shape_of_part
from muse_fn.params.tree import Weight

SHARE = 0.5  # of the memory available, that an unpacked model may take
MEMORY = Path("/proc/meminfo")


def is_better_unpacked(
    checkpoint: Checkpoint, share: Share, device: str | torch.device, dtype: torch.dtype | None
) -> bool:
    """Whether what this rank reads of a checkpoint is to be unpacked on the way, by the rule above."""
    if torch.device(device).type != "cpu" or all(plan.format.node == "plain" for plan in checkpoint.plans):
        return False
    if is_multiplied_packed({plan.format.node for plan in checkpoint.plans}, dtype):
        return False
    available = available_memory()
    return available is not None and bytes_unpacked(checkpoint, share, dtype) <= SHARE * available


def is_multiplied_packed(nodes: Set[str], dtype: torch.dtype | None) -> bool:
    """Whether matrices in these formats, beside plain ones in `dtype`, None standing for bfloat16, are multiplied as
    they are on this CPU, and no slower than unpacked ones."""
    has_forms = not why_no_numba() and not has_matrix_units()
    return has_forms and nodes <= {"plain", "mxfp4"} and dtype in (None, torch.bfloat16)


def bytes_unpacked(checkpoint: Checkpoint, share: Share, dtype: torch.dtype | None) -> int:
    """What a rank's parameters take if none is packed: in `dtype`, None standing for bfloat16, or in float32."""
    size = (dtype or torch.bfloat16).itemsize
    return sum(
        math.prod(shape_of_part(part)) * (4 if plan.leaf.row.dtype == "float32" else size)
        for plan, part in parts_of(checkpoint, share)
    )


def available_memory() -> int | None:
    """Bytes that new work can have without others being pushed out, as Linux counts them; None where it cannot say."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def unpacked(leaf: Leaf, weight: Weight, dtype: torch.dtype | None) -> Weight:
    """A packed parameter in `dtype`, None standing for bfloat16, in which MXFP4 is exact; any other as it is."""
    return weight if isinstance(weight, torch.Tensor) else to_node(leaf, weight, "plain", dtype or torch.bfloat16)
