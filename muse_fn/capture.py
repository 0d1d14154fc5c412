"""A function with static shapes, captured once and called again and again: a device graph, or its strict stand-in.

Everything that changes between calls is a tensor in the arguments. Donated arguments are taken over: the function
writes into them where they lie, and who called must use what comes back. Fixed arguments, such as parameters, are read
where they lie. All others are copied into buffers of the captured function's own. Outputs are buffers too: valid until
the next call.
"""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from muse_fn.params.tree import map_tensors, named, tensors
from muse_fn.recorder import CaptureError, Recorder

Result = TypeVar("Result")
Size = TypeVar("Size", bound=tuple[int, ...])
Progress = Callable[[int, int, str, float], None]  # functions done, in all, the last one's name, seconds so far
WARM_UPS = 2  # runs before a device graph is captured: libraries choose their forms and take their workspaces in them


def capture(
    fn: Callable[..., Result],
    example_args: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    fixed: Sequence[int] = (),
    backend: str | None = None,
    strict: bool = True,
    beside: "Captured[Any] | None" = None,
) -> "Captured[Result]":
    """`fn` for arguments of the shapes, dtypes and device of `example_args`, each a tree of tensors.

    `donate` and `fixed` are places of arguments (see above); both keep their storage from call to call. fn runs a few
    times on the example arguments, so it writes into the donated ones. `backend` is the arguments' device unless given:
    "cuda" captures a graph, whose intermediates share memory with those of `beside` (the two may not run at once);
    "cpu" runs fn under the rules of a graph, `strict=False` only checking the arguments once it has been recorded.
    Raises CaptureError, a ValueError, for what no graph can hold.
    """
    problems = [
        f"{name} names argument {n}: there are {len(example_args)}"
        for name, places in (("donate", donate), ("fixed", fixed))
        for n in places
        if not 0 <= n < len(example_args)
    ]
    problems += [f"argument {n} is both donated and fixed" for n in sorted({*donate} & {*fixed})]
    if problems:
        raise CaptureError("\n".join(problems))
    args = Arguments(fn, example_args, frozenset(donate), frozenset(fixed))
    backend = backend or args.device.type
    if backend == "hpu":
        raise CaptureError(
            'backend "hpu" comes in a later version: nothing here has run on a Gaudi. Use "cuda" or "cpu"'
        )
    if backend not in ("cuda", "cpu"):
        raise CaptureError(f"there is no backend {backend!r}: use 'cuda' or 'cpu'")
    if args.device.type != backend:
        raise CaptureError(f"backend {backend!r} cannot take arguments on {args.device}")
    return _Graph(fn, args, beside) if backend == "cuda" else _Recorded(fn, args, strict)


def capture_each(
    fn: Callable[..., Result],
    sizes: Iterable[Size],
    args_of: Callable[[Size], Sequence[Any]],
    *,
    donate: Sequence[int] = (),
    fixed: Sequence[int] = (),
    backend: str | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> "dict[Size, Captured[Result]]":
    """`fn` for the arguments of each size, largest first, so that each finds its memory in the one before; see
    `capture`."""
    wanted, begun = sorted(set(sizes), reverse=True), time.monotonic()
    found: dict[Size, Captured[Result]] = {}
    last: Captured[Result] | None = None
    for size in wanted:
        args = args_of(size)
        last = capture(fn, args, donate=donate, fixed=fixed, backend=backend, strict=strict, beside=last)
        found[size] = last
        if progress:
            progress(len(found), len(wanted), str(size), time.monotonic() - begun)
    return found


class Known(NamedTuple):
    """What a captured function knows of one tensor of its arguments."""

    name: str
    tensor: Tensor  # where the function reads it


class Arguments:
    """The arguments of a captured function: what they must be, and where the function reads them."""

    def __init__(
        self, fn: Callable[..., Any], example: Sequence[Any], donated: frozenset[int], fixed: frozenset[int]
    ) -> None:
        names = _names(fn, len(example))
        found = [_leaves(arg, name) for arg, name in zip(example, names, strict=True)]
        strange = [f"{n} is {type(x).__name__}" for leaves in found for n, x in leaves.items() if not _is_tensor(x)]
        if strange:
            raise CaptureError("arguments must be trees of tensors: " + ", ".join(strange))
        devices = {x.device for leaves in found for x in leaves.values()}
        if len(devices) != 1:
            raise CaptureError(f"arguments lie on {sorted(map(str, devices)) or 'no device'}: must be on one")
        (self.device,) = devices
        self.donated, self.fixed, self._names = donated, fixed, names
        kept = donated | fixed
        self.static = [arg if n in kept else map_tensors(owned, arg) for n, arg in enumerate(example)]
        self._known = [
            [Known(*leaf) for leaf in _leaves(arg, name).items()] for arg, name in zip(self.static, names, strict=True)
        ]

    def storages(self, *, donated: bool) -> dict[int, str]:
        """Addresses of the storages that may be written, or of all others, with the names of their tensors."""
        chosen = [known for n, known in enumerate(self._known) if (n in self.donated) == donated]
        return {x.untyped_storage().data_ptr(): name for known in chosen for name, x in known}

    def take(self, args: Sequence[Any], check: Callable[[str, Tensor], None]) -> None:
        """Copies what is not kept into the buffers; `check` sees every tensor first. Raises CaptureError, with every
        argument that is not what it was when captured."""
        if len(args) != len(self.static):
            raise CaptureError(f"{len(args)} arguments: captured with {len(self.static)}, {', '.join(self._names)}")
        problems: list[str] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for n, (arg, static) in enumerate(zip(args, self.static, strict=True)):
            if arg is static:
                continue
            leaves = _leaves(arg, self._names[n])
            if [*leaves] != [known.name for known in self._known[n]]:
                problems.append(f"{self._names[n]} is another tree than when captured")
                continue
            for name, wanted in self._known[n]:
                if problem := _mismatch(leaves[name], wanted, n in self.donated or n in self.fixed):
                    problems.append(f"{name} {problem}")
                    continue
                check(name, leaves[name])
                copies.append((wanted, leaves[name]))
        if problems:
            raise CaptureError("\n".join(problems))
        # One launch for all that are whole: each is small, and a launch takes longer than its copy.
        together: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        buffers = {into.untyped_storage().data_ptr() for into, _ in copies}
        for into, given in copies:
            if (into.data_ptr(), into.stride()) != (given.data_ptr(), given.stride()):
                # What lies in a buffer that is written meanwhile, as another argument or in another order, is kept.
                given = given.clone() if given.untyped_storage().data_ptr() in buffers else given
                into, given = _as_bytes(into, given)
                together.setdefault((into.dtype, given.device), []).append((into, given))
        for pairs in together.values():
            sides = [list(side) for side in zip(*pairs, strict=True)]
            torch._foreach_copy_(*sides, non_blocking=True)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _as_bytes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory as bytes, where all are whole; tensors of any dtype are then copied together."""
    if all(x.is_contiguous() and x.device.type in ("cpu", "cuda") and not (x.is_conj() or x.is_neg()) for x in tensors):
        return tuple(x.flatten().view(torch.uint8) for x in tensors)
    return tensors


class Captured(ABC, Generic[Result]):
    """A captured function: call it like the function itself."""

    backend: str
    bytes: int | None = None  # what the graph takes beside its arguments, where the device says it

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    @abstractmethod
    def __call__(self, *args: Any) -> Result:
        """The function's result, in buffers that the next call overwrites; donated tensors come back themselves.

        Raises CaptureError for arguments that are not like those of the capture.
        """

    def check_valid(self, tree: Any) -> None:
        """Raises CaptureError if a tensor of this tree is an output that a later call has overwritten, where the
        backend knows: the strict one does."""


class _Recorded(Captured[Result]):
    """The stand-in on a CPU."""

    backend = "cpu"

    def __init__(self, fn: Callable[..., Result], arguments: Arguments, strict: bool) -> None:
        super().__init__(arguments)
        self._fn, self._strict = fn, strict
        self._recorder = Recorder(arguments.storages(donated=False), arguments.storages(donated=True))
        self._calls, self._handed, self._call_of = 0, list[Tensor](), WeakIdKeyDictionary()
        self._recorder.rehearse(fn, arguments.static)
        self._outputs = outputs(self._recorder.run(fn, arguments.static), arguments)

    def __call__(self, *args: Any) -> Result:
        self._arguments.take(args, self._check)
        if not self._strict:
            with torch.inference_mode():
                result = self._fn(*self._arguments.static)
            return filled(self._outputs, result)
        for x in self._handed:  # who still holds an output of the call before shall see it
            x.fill_(_poison(x.dtype))
        self._calls += 1
        result = outputs(self._recorder.run(self._fn, self._arguments.static), self._arguments)
        donated = {id(x) for n in self._arguments.donated for x in tensors(self._arguments.static[n])}
        self._handed = [x for x in tensors(result) if id(x) not in donated]
        for x in self._handed:
            self._call_of[x] = self._calls
        return result

    def check_valid(self, tree: Any) -> None:
        for name, x in _leaves(tree, "").items():
            self._check(name or "this tensor", x)

    def _check(self, name: str, x: Tensor) -> None:
        call = self._call_of.get(x, self._calls)
        if call != self._calls:
            raise CaptureError(
                f"{name} is an output of call {call}, which call {self._calls} has overwritten: clone what must survive"
            )


class _Graph(Captured[Result]):
    """A CUDA graph."""

    backend = "cuda"

    def __init__(self, fn: Callable[..., Result], arguments: Arguments, beside: Captured[Any] | None) -> None:
        super().__init__(arguments)
        self.pool: Any = beside.pool if isinstance(beside, _Graph) else torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        device = arguments.device
        with torch.cuda.device(device), torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    fn(*arguments.static)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(device)
            try:
                with torch.cuda.graph(self._graph, pool=self.pool, stream=stream):
                    result = fn(*arguments.static)
            except RuntimeError as error:
                raise CaptureError(f"CUDA cannot capture {_name(fn)}: {error}") from error
            self._outputs = outputs(result, arguments, copied=False)
            self.bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def __call__(self, *args: Any) -> Result:
        self._arguments.take(args, lambda name, x: None)
        with torch.cuda.device(self._arguments.device):
            self._graph.replay()
        return self._outputs


def outputs(result: Result, arguments: Arguments, *, copied: bool = True) -> Result:
    """The result as a caller gets it: donated tensors themselves, of all others copies unless `copied` is False.

    Raises CaptureError for what is no tree of tensors and for views of donated arguments, which change under the
    caller's hands.
    """
    strange = {type(x).__name__ for x in tensors(result) if not _is_tensor(x)}
    if strange:
        raise CaptureError(f"the result holds {', '.join(sorted(strange))}: must be a tree of tensors")
    donated = {id(x) for n in arguments.donated for x in tensors(arguments.static[n])}
    storages = arguments.storages(donated=True)

    def handed(x: Tensor) -> Tensor:
        if id(x) in donated:
            return x
        whose = storages.get(x.untyped_storage().data_ptr())
        if whose and x.numel():
            raise CaptureError(f"the result holds a view of {whose}, which is donated: return it whole, or a copy")
        return owned(x) if copied else x

    return map_tensors(handed, result)


def filled(buffers: Result, result: Result) -> Result:
    """The buffers with this result in them."""
    for into, given in zip(tensors(buffers), tensors(result), strict=True):
        if into is not given:
            into.copy_(given)
    return buffers


def owned(x: Tensor) -> Tensor:
    """A copy that may be written in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().clone() if not x.is_inference() else x.clone()


def _poison(dtype: torch.dtype) -> float | int | bool:
    """What no step gives out."""
    return torch.nan if dtype.is_floating_point else True if dtype == torch.bool else -1


def _mismatch(found: Any, wanted: Tensor, kept: bool) -> str | None:
    if not isinstance(found, Tensor):
        return f"is {type(found).__name__}: must be a tensor"
    kinds = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}" for x in (found, wanted)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}: captured with {kinds[1]}"
    if kept and (found.data_ptr() != wanted.data_ptr() or found.stride() != wanted.stride()):
        return "is not the tensor it was when captured: donated and fixed arguments keep their storage"
    return None


def _leaves(tree: Any, name: str) -> dict[str, Any]:
    """Every tensor of an argument by its name, the parts of packed matrices alone."""
    found: dict[str, Any] = {}
    for path, leaf in named((tree,)).items():
        own = name + path[1:]
        parts = {own: leaf} if not isinstance(leaf, tuple) else {f"{own}.{f}": x for f, x in leaf._asdict().items()}
        found.update({key.lstrip("."): x for key, x in parts.items()})
    return found


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its arguments, or their places."""
    try:
        found = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        found = []
    return [found[n] if n < len(found) else f"argument {n}" for n in range(count)]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)
