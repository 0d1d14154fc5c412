"""Device in, one table of operations out, each with the reason why that form was chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, device
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from muse_fn.kernels import cpu, reference
from muse_fn.kernels.packed import Weight


@dataclass(frozen=True)
class Ops:
    """The operations a decoder is made of; contracts in kernels/reference.py."""

    linear: Callable[[Tensor, Weight], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    attend_blocks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    expert_rows: Callable[[Tensor, Tensor, Weight, Weight], Tensor]
    why: str


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


def select(where: device) -> Ops:
    """The operations for tensors on this device, inside or outside of a function transform."""
    del where  # no device has forms of its own yet
    return REFERENCE if under_vmap() else EAGER


def under_vmap() -> bool:
    """Whether a torch.func.vmap is active: sizes that depend on data (routes per expert) do not exist there."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
