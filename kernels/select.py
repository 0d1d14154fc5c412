"""Device in, one table of operations out, each with the reason why that form was chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, device
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from muse_fn.kernels import cpu, invariant, reference, static
from muse_fn.kernels.packed import Weight


@dataclass(frozen=True)
class Ops:
    """The operations a decoder is made of; contracts in kernels/reference.py."""

    linear: Callable[[Tensor, Weight], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    attend_blocks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    expert_rows: Callable[[Tensor, Tensor, Weight, Weight], Tensor]
    why: str
    sigmoid: Callable[[Tensor], Tensor] = reference.sigmoid
    silu: Callable[[Tensor], Tensor] = reference.silu


REFERENCE = Ops(
    reference.linear,
    reference.attend,
    reference.attend_blocks,
    reference.expert_rows,
    "plain PyTorch: the meaning of each op",
)
EAGER = Ops(
    cpu.linear,
    cpu.attend,
    cpu.attend_blocks,
    cpu.expert_rows,
    "weights on the left, routes sorted by expert, fused attention, long contexts in tiles",
)

INVARIANT = Ops(
    invariant.linear,
    invariant.attend,
    invariant.attend_blocks,
    invariant.expert_rows,
    "the same bits for a row alone, in any batch, chunk or cache state; slower",
    invariant.sigmoid,
    invariant.silu,
)

STATIC = Ops(
    reference.linear,
    static.attend,
    static.attend_blocks,
    static.expert_rows,
    "no size depends on data, so that a captured graph holds it; workspaces bounded by tiles",
)


def select(where: device) -> Ops:
    """The operations for tensors on this device, inside or outside of a function transform."""
    if under_vmap():
        return REFERENCE
    return EAGER if where.type == "cpu" else STATIC


def under_vmap() -> bool:
    """Whether a torch.func.vmap is active: sizes that depend on data (routes per expert) do not exist there."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
