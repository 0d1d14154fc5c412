"""Runs a function on a CPU under the rules of a captured device graph, each broken rule an error that says which.

A graph keeps operations, addresses and Python numbers as they were when it was captured and never runs Python again, so
on a device most of these mistakes give a stale or wrong result without a word. Here every operation passes a gate that
compares it with the one at the same place of the first run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from muse_fn.kernels.one_op import watcher, watching

Result = TypeVar("Result")

# What hands values to the host without an operation that could be seen, or only with harmless ones.
HOST_CALLS = {
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.__array__: "conversion to a numpy array",
    Tensor.cpu: "cpu()",
    Tensor.__repr__: "printing",
    Tensor.__format__: "printing",
    Tensor.__reduce_ex__: "pickling",
    Tensor.__dlpack__: "handing over by DLPack",
}
HOST_READS = {"item", "is_nonzero", "_local_scalar_dense", "equal", "allclose"}
VARYING_SIZES = {"where.default", "repeat_interleave.self_Tensor", "nonzero_numpy", "argwhere"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
MOVED = {"set_", "resize_", "resize_as_", "set_data"}


class CaptureError(ValueError):
    """A function, or a call of it, that a captured graph cannot hold. The message names the rule and the operation."""


class Op(NamedTuple):
    """An operation as a graph keeps it."""

    name: str
    args: tuple["Shape | Number | str", ...]  # what each is, a sequence's members one after another; then their names

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_shown, self.args))})"


class Shape(NamedTuple):
    """What a graph knows of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    constant: int  # the address of one that is neither argument nor made inside; 0 for all others


class Number(NamedTuple):
    """A Python value: 1, 1.0 and True are three."""

    kind: str
    value: str


class Recorder:
    """The operations of a function's first run, and the gate that later runs of it pass."""

    def __init__(self, readable: Mapping[int, str], writable: Mapping[int, str]) -> None:
        """Storages of the arguments by address, with their names: those only to be read, and those to be written."""
        self.ops: list[Op] = []
        self.constants: dict[int, Tensor] = {}  # kept alive: a graph reads them where they are
        self._readable, self._writable = readable, writable
        self._is_rehearsal, self._is_recording, self._next = False, True, 0
        self._made: set[int] = set()

    def rehearse(self, fn: Callable[..., object], args: Sequence[Any]) -> None:
        """fn(*args) before the first run, so that what is made once and kept, such as tables, is made: of all rules
        only those that forbid this do not hold."""
        self._is_rehearsal = True
        try:
            self.run(fn, args)
        finally:
            self._is_rehearsal, self._is_recording = False, True

    def run(self, fn: Callable[..., Result], args: Sequence[Any]) -> Result:
        """fn(*args); records if this is the first run. Raises CaptureError for what a graph cannot hold."""
        self._next, self._made = 0, set()
        if self._is_recording:
            self.ops.clear()  # of a run that failed
            self.constants.clear()
        with ExitStack() as stack:
            for mode in (torch.inference_mode(), watching(self), _HostCalls(self), _Operations(self)):
                stack.enter_context(mode)
            result = fn(*args)
        if self._next < len(self.ops):
            raise CaptureError(
                f"the call ended after {self._next} operations, the captured one had {len(self.ops)}: "
                f"{self.ops[self._next]} is missing"
            )
        self._is_recording = False
        return result

    def enter(self, name: str, args: tuple[Any, ...]) -> None:
        """A function that counts as one operation begins; see kernels/one_op.py."""
        self._note(Op(name, tuple(self._description(x, _address(x)) for x in _flat(args))))

    def leave(self, result: Any) -> None:
        """It has ended: what it made is no constant."""
        self._made.update(map(_address, _flat(result)))

    def pass_gate(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation if the rules allow it."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            if self._is_rehearsal and op is torch.ops.aten.lift_fresh.default:
                self.leave(args)
            else:
                _refuse(op, args, kwargs)
            given = _flat((*args, *kwargs.values()))
            addresses = [*map(_address, given)]
            if any(_written(op)):
                self._refuse_writes(op, args, kwargs)
            self._note(Op(str(op), (*map(self._description, given, addresses), *kwargs)))
            result = op(*args, **kwargs)
            # A result that lies where an argument lies is a view of it, whatever that is.
            self._made.update({*map(_address, _flat(result))} - {*addresses})
            return result

    def _note(self, op: Op) -> None:
        if self._is_recording:
            self.ops.append(op)
        elif self._next >= len(self.ops):
            raise CaptureError(f"{op} comes after the last operation of the captured call: {_SAME}")
        elif op != self.ops[self._next]:
            raise CaptureError(_difference(self._next, op, self.ops[self._next]))
        self._next += 1

    def _description(self, x: Any, address: int) -> Any:
        if not isinstance(x, Tensor):
            return Number(type(x).__name__, repr(x))
        constant = 0 if self._knows(address) else address
        if constant and self._is_recording:
            self.constants[constant] = x
        return Shape(x.dtype, tuple(x.shape), constant)

    def _knows(self, address: int) -> bool:
        return not address or address in self._made or address in self._readable or address in self._writable

    def _refuse_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places, names = _written(op)
        for address in map(_address, _flat([*(args[n] for n in places if n < len(args)), *map(kwargs.get, names)])):
            if address and address not in self._made and address not in self._writable:
                whose = self._readable.get(address, "a tensor from outside of the function")
                raise CaptureError(f"{op} writes into {whose}: only donated arguments may be written in place")


_SAME = "a captured graph runs the same operations at every call"


def _difference(place: int, found: Op, wanted: Op) -> str:
    """Why a graph would not do what this run does."""
    where = f"operation {place}, {found.name},"
    if found.name != wanted.name or len(found.args) != len(wanted.args):
        return f"operation {place} is {found}, when captured it was {wanted}: {_SAME}"
    new, old = next((a, b) for a, b in zip(found.args, wanted.args, strict=True) if a != b)
    if isinstance(new, Number):
        return (
            f"{where} has the Python value {_shown(new)}, when captured it was {_shown(old)}: what changes between "
            "calls must be a tensor argument"
        )
    if isinstance(new, Shape) and isinstance(old, Shape) and new[:2] == old[:2]:
        return (
            f"{where} reads another tensor than when captured, one that is no argument: a graph keeps the address, so "
            "what changes between calls must be an argument"
        )
    return f"{where} takes {_shown(new)}, when captured it was {_shown(old)}: a graph's shapes and dtypes are fixed"


def _shown(x: Any) -> str:
    if not isinstance(x, Shape):
        return x.value if isinstance(x, Number) else f"{x}="
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class _Operations(TorchDispatchMode):
    """Every operation of the thread, however it was called."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if watcher() is not self._recorder:  # inside of what counts as one
            return func(*args, **(kwargs or {}))
        return self._recorder.pass_gate(func, args, kwargs or {})


class _HostCalls(TorchFunctionMode):
    """Calls that give values to the host."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = HOST_CALLS.get(func)
        if what and watcher() is self._recorder:
            raise CaptureError(f"{what} reads a tensor on the host: {_HOST}")
        return func(*args, **(kwargs or {}))


_HOST = "a captured graph never comes back to the host"


def _refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises CaptureError if no graph can hold this operation."""
    reason = _reason(op)
    base = op.overloadpacket.__name__
    if reason is None and base in INDEXED:
        masks = [x for x in _flat(args[1]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
        reason = f"selects by a mask: {_VARYING}" if masks else None
    elif base == "scaled_dot_product_attention" or base.startswith("_scaled_dot_product"):
        reason = None if _value(op, "dropout_p", args, kwargs) == 0 else reason
    if reason is not None:
        raise CaptureError(f"{op} {reason}")


_VARYING = "the size of its result depends on values, and a graph's shapes are fixed"
_RANDOM = "draws from a random generator, whose state is no argument: draw with a key (muse_fn/sample.py)"


@lru_cache(maxsize=4096)
def _reason(op: Any) -> str | None:
    """Why no graph can hold this operation, whatever its arguments."""
    base, name = op.overloadpacket.__name__, str(op).removeprefix("aten.")
    if base in HOST_READS or torch.Tag.data_dependent_output in op.tags:
        return f"reads a value on the host: {_HOST}"
    if base in INDEXED:
        return None
    if name in VARYING_SIZES or base in VARYING_SIZES or torch.Tag.dynamic_output_shape in op.tags:
        return f"cannot be captured: {_VARYING}"
    if base == "lift_fresh":
        return "makes a tensor of host data (torch.tensor, a list as index): a graph cannot fetch it again"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return _RANDOM
    return "moves a tensor to another storage: a graph's addresses are fixed" if base in MOVED else None


@lru_cache(maxsize=4096)
def _written(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which arguments an operation writes: places of those given by position, and all their names."""
    args = op._schema.arguments
    found = [n for n, arg in enumerate(args) if arg.alias_info is not None and arg.alias_info.is_write]
    return tuple(n for n in found if not args[n].kwarg_only), tuple(args[n].name for n in found)


def _value(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gets for an argument."""
    for place, arg in enumerate(op._schema.arguments):
        if arg.name == name:
            return args[place] if place < len(args) and not arg.kwarg_only else kwargs.get(name, arg.default_value)
    return None


def _flat(x: Any) -> list[Any]:
    """The members of nested sequences, one after another."""
    found: list[Any] = []
    for member in x if isinstance(x, (list, tuple)) else (x,):
        if isinstance(member, (list, tuple)):
            found += _flat(member)
        else:
            found.append(member)
    return found


def _address(x: Any) -> int:
    """Where a tensor's storage lies; 0 for one without elements and for what is no tensor."""
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0
