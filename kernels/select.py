"""Device in, one table of operations out, each with the reason why that form was chosen."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from torch import _C, Tensor, device, dtype, is_grad_enabled
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from muse_fn.kernels import cpu, invariant, pieces, reference, static
from muse_fn.kernels.norms import Gain, Mix, Rotary
from muse_fn.kernels.packed import Weight
from muse_fn.kernels.pieces import Block, Chosen, Context, Joined, Numbers, Projected


class Linear(Protocol):
    """reference.linear."""

    def __call__(self, x: Tensor, w: Weight, /, dtype: dtype | None = None) -> Tensor: ...


class Linears(Protocol):
    """pieces.linears."""

    def __call__(
        self, x: Tensor, ws: Sequence[Weight], /, dtype: dtype | None = None, *, rounded: Tensor | tuple[()] = ()
    ) -> tuple[Tensor, ...]: ...


class ExpertRows(Protocol):
    """reference.expert_rows."""

    def __call__(
        self,
        u: Tensor,
        idx: Tensor,
        gate_up: Weight,
        down: Weight,
        /,
        *,
        first: int = 0,
        dtype: dtype | None = None,
        arranged: Tensor | tuple[()] | None = None,
    ) -> Tensor: ...


AttendNew = Callable[[Projected, Rotary | None, float, float, Tensor, Tensor, Context, dtype], Tensor]


class Site(NamedTuple):
    """What a step is to a layer."""

    rotary: Rotary | None
    k_arena: Tensor
    v_arena: Tensor
    at: Context


class WholeLayer(Protocol):
    """What `Ops.prepare` makes of a block. It is called with itself and the layers that follow it, each with its site:
    as many of them from the first on as take the step are one operation. -> The stream after them and the experts that
    each took, int64 [B * T, R]; None if the first does not take it."""

    block: Block

    def __call__(
        self, stream: Joined, layers: "Iterable[tuple[WholeLayer, Site]]"
    ) -> tuple[Joined, Sequence[Tensor]] | None: ...


@dataclass(frozen=True)
class Ops:
    """The operations a decoder is made of; contracts in kernels/reference.py and kernels/pieces.py."""

    linear: Linear
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    attend_blocks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    expert_rows: ExpertRows
    linears: Linears
    why: str
    silu: Callable[[Tensor], Tensor] = reference.silu
    normed: Callable[[Tensor, Gain, float, dtype], Tensor] = pieces.normed
    join: Callable[[Tensor, Tensor, Gain | None, Mix, Gain | None, float, float, dtype], Joined] = pieces.join
    heads: Callable[[Tensor, Tensor, Rotary | None, int, float, float], tuple[Tensor, Tensor]] = pieces.heads
    place: Callable[[Tensor, Tensor, Tensor, Rotary | None, float, float, Tensor, Tensor, Tensor], Tensor] = (
        pieces.place
    )
    gated: Callable[[Tensor, Tensor, float, dtype], Tensor] = pieces.gated
    # All of `place`, `attend_blocks` and `gated`, if no row sees another's new position; None: one after the other.
    attend_new: AttendNew | None = None
    choose: Callable[[Tensor, Tensor, int, float, float, Tensor, Gain, float, dtype], Chosen] = pieces.choose
    blend: Callable[[Tensor, Tensor, Gain, float, dtype], Tensor] = pieces.blend
    # Makes all of a layer one operation, once for many steps: its parameters stay where they are. None: there is no
    # such form, for the table or for this layer.
    prepare: Callable[[Block, Numbers], WholeLayer | None] | None = None


REFERENCE = Ops(
    reference.linear,
    reference.attend,
    reference.attend_blocks,
    reference.expert_rows,
    pieces.linears,
    "plain PyTorch: the meaning of each op",
)
EAGER = Ops(
    cpu.linear,
    cpu.attend,
    cpu.attend_blocks,
    cpu.expert_rows,
    partial(pieces.linears, linear=cpu.linear),
    "products in the order of factors that is faster here, routes sorted by expert, attention fused and in tiles",
)

INVARIANT = Ops(
    invariant.linear,
    invariant.attend,
    invariant.attend_blocks,
    invariant.expert_rows,
    partial(pieces.linears, linear=invariant.linear),
    "the same bits for a row alone, in any batch, chunk or cache state; slower",
    silu=invariant.silu,
    gated=partial(pieces.gated, sigmoid=invariant.sigmoid),
    choose=partial(pieces.choose, sigmoid=invariant.sigmoid),
)

STATIC = Ops(
    reference.linear,
    static.attend,
    static.attend_blocks,
    static.expert_rows,
    pieces.linears,
    "no size depends on data, so that a captured graph holds it; workspaces bounded by tiles",
)


def select(where: device) -> Ops:
    """The operations for tensors on this device, inside or outside of a function transform."""
    if under_vmap():
        return REFERENCE
    if where.type == "cpu":
        return EAGER if may_differentiate() or why_no_numba() else _compiled()
    return STATIC if is_grad_enabled() or why_no_triton(where) else _triton()


def why_no_triton(where: device) -> str:
    """Why the Triton forms cannot run on this device; "" if they can. Under gradients they are left out in any case."""
    if where.type != "cuda":
        return f"they are for CUDA devices, not for {where.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return import_module("muse_fn.kernels.gpu").why_not(where)


def why_no_numba() -> str:
    """Why compiled forms are not there on a CPU; "" if they are. Under gradients they are left out in any case."""
    return "" if find_spec("numba") else 'Numba is not installed: pip install "muse-fn[cpu]"'


def may_differentiate() -> bool:
    """Whether gradients may be wanted, backwards or forwards: a compiled form has none, and sees numbers only."""
    forwards = forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    return is_grad_enabled() or forwards or bool(retrieve_all_functorch_interpreters())


def sees_numbers() -> bool:
    """Whether tensors made now are plain ones, which may be kept: no transform, mode or compiler looks on."""
    watched = retrieve_all_functorch_interpreters() or _C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportAttributeAccessIssue]
    return not (watched or is_compiling())


@lru_cache
def _compiled() -> Ops:
    names = [field.name for field in fields(Ops) if field.name not in ("why", "prepare")]
    forms, whole = (import_module(f"muse_fn.kernels.{name}") for name in ("cpu_ops", "cpu_whole"))
    why = "Numba: in bfloat16 weights read once for a few rows, attention in tiles, one pass between products"
    return Ops(why=why, prepare=whole.prepare, **{name: getattr(forms, name) for name in names})


@lru_cache
def _triton() -> Ops:
    """Imported when first needed: a machine without Triton has no such file to import."""
    forms = import_module("muse_fn.kernels.gpu_ops")
    names = [field.name for field in fields(Ops) if field.name not in ("why", "prepare")]
    why = "Triton: packed experts read once, one launch for what stands between products, attention split over keys"
    return Ops(why=why, **{name: getattr(forms, name) for name in names})


def under_vmap() -> bool:
    """Whether a torch.func.vmap is active: sizes that depend on data (routes per expert) do not exist there."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
