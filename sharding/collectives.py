"""Collectives by axis name: tensors in, tensors out, the same call on every rank.

Three backends behind one protocol (`mesh.Link`): none for a single rank, `Distributed` here (gloo, nccl, hccl: one
process per rank), and `simulated.py` (threads of one process). Along axes of one rank each is the identity.
Gradients do not pass through the ranks of a mesh.
"""

import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muse_fn.sharding.mesh import MOST_RANKS, Axes, Link, Mesh, MeshError
from muse_fn.sharding.words import Words, connected

# What processes tell each other goes through gloo on any device: it does not wait for what the device still computes.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "hpu": "cpu:gloo,hpu:hccl"}
# The operations themselves: their Python wrapper imports sympy at the first call and doubles the host's part of each.
_ops: Any = torch.ops._c10d_functional
TIMEOUT = timedelta(minutes=10)  # the longest that ranks may be apart, loading included


class PeerError(RuntimeError):
    """Another rank is gone or does something else: the cause is to be found there."""


def psum(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """The sum over the ranks along these axes, with the same bits on each."""
    return x if mesh.size(axes) == 1 else link_of(mesh).all_sum(x.contiguous(), mesh.peers(axes))


def psum_scatter(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """[n, ...] -> [n / ranks, ...]: this rank's rows of the sum over the ranks along these axes; n must divide."""
    return x if mesh.size(axes) == 1 else link_of(mesh).sum_scatter(x.contiguous(), mesh.peers(axes))


def summed_in(mesh: Mesh, axes: Axes) -> torch.dtype | None:
    """The dtype of what sums along these axes are to add: float32; None, which is its own, where nothing is added."""
    return None if mesh.size(axes) == 1 else torch.float32


def gather(x: Tensor, mesh: Mesh, axes: Axes, dim: int = -1) -> Tensor:
    """The x of all ranks along these axes, joined along `dim` in the order of the ranks."""
    return x if mesh.size(axes) == 1 else torch.cat(stacked(x, mesh, axes).unbind(), dim)


def stacked(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """[ranks, *x.shape]: the x of all ranks along these axes."""
    return x[None] if mesh.size(axes) == 1 else link_of(mesh).all_gather(x.contiguous(), mesh.peers(axes))


def swapped(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """[n, ...] -> [ranks, n / ranks, ...]: this rank's rows of the x of all ranks along these axes; n must divide."""
    return x[None] if mesh.size(axes) == 1 else link_of(mesh).all_to_all(x.contiguous(), mesh.peers(axes))


def broadcast(x: Tensor, mesh: Mesh, axes: Axes, index: int) -> Tensor:
    """The x of the rank at place `index` along these axes; the others give a tensor of the same shape and dtype."""
    if mesh.size(axes) == 1:
        return x
    peers = mesh.peers(axes)
    return link_of(mesh).broadcast(x.contiguous(), peers[index], peers)


def tell_all(data: bytes | None, mesh: Mesh) -> bytes:
    """What rank 0 gives, on every rank; the others give None. All ranks of the mesh call it; no device takes part."""
    link, peers = link_of(mesh), tuple(range(mesh.ranks))
    return link.tell(data, peers) if isinstance(link, Distributed) else _told(data, link, peers)


def _told(data: bytes | None, link: Link, peers: tuple[int, ...]) -> bytes:
    """The same by two collectives, of how many bytes and of the bytes."""
    size = int(link.broadcast(torch.tensor([len(data or b"")]), 0, peers))
    if not size:
        return b""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
    return link.broadcast(mine, 0, peers).numpy().tobytes()


def hand_on(x: Tensor | None, mesh: Mesh, into: Tensor | None) -> Tensor | None:
    """Gives x to the next pipeline stage and returns what the previous one gives, of the shape and dtype of `into`."""
    if x is None and into is None:
        return None
    step = mesh.ranks // mesh.pp
    return link_of(mesh).pass_on(x if x is None else x.contiguous(), mesh.rank + step, into, mesh.rank - step)


def link_of(mesh: Mesh) -> Link:
    """How this rank reaches the others. Raises MeshError for a mesh that only describes."""
    if mesh.link is None:
        raise MeshError(
            f"mesh {mesh} has {mesh.ranks} ranks, and this one cannot reach the others: take a mesh from join(mesh) in "
            "processes started by torchrun, or run all ranks in this process with simulate(mesh, fn)"
        )
    return mesh.link


_made: weakref.WeakSet["Distributed"] = weakref.WeakSet()


class Distributed:
    """Ranks as processes, by torch.distributed's functional collectives over groups made when first needed."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._words: tuple[Words | None, ...] = ()  # none yet, or what `connected` found
        _made.add(self)

    def close(self) -> None:
        """Ends what `tell` has begun, and lets go of the groups: their threads end with the last who holds them, and
        one that still has a tensor to release when the interpreter ends aborts the process."""
        for words in self._words:
            if words is not None:
                words.close()
        self._words = ()
        self._groups.clear()

    @property
    def has_words(self) -> bool:
        """Whether ranks are connected for `tell`."""
        return bool(self._words) and self._words[0] is not None

    def tell(self, data: bytes | None, peers: tuple[int, ...]) -> bytes:
        """See `tell_all`; `peers` are all ranks. The first call connects them."""
        _check_joined()

        def agreed(mine: bool) -> bool:
            return bool(self.all_sum(torch.tensor([int(mine)]), peers) == len(peers))

        rank = dist.get_rank()
        try:
            if not self._words:
                found = connected(rank, len(peers), lambda told: _told(told, self, peers), agreed, TIMEOUT)
                self._words = (found,)
            (words,) = self._words
            return _told(data, self, peers) if words is None else words.tell(data)
        except (EOFError, OSError) as error:
            others = "another rank" if data is not None else "rank 0"
            raise PeerError(f"rank {rank} lost {others} ({type(error).__name__})") from error

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """See mesh.Link."""
        return self._run(lambda group: _ops.all_reduce(x, "sum", group), peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """See mesh.Link."""
        return self._run(lambda group: _ops.reduce_scatter_tensor(x, "sum", len(peers), group), peers)

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """See mesh.Link."""
        return self._run(lambda group: _ops.all_gather_into_tensor(x[None], len(peers), group), peers)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """See mesh.Link."""
        each = [len(x) // len(peers)] * len(peers)
        swapped = self._run(lambda group: _ops.all_to_all_single(x, each, each, group), peers)
        return swapped.unflatten(0, (len(peers), -1))

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        """See mesh.Link."""
        return self._run(lambda group: _ops.broadcast(x, peers.index(source), group), peers)

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        """See mesh.Link."""
        _check_joined()
        received = None if into is None else torch.empty_like(into, memory_format=torch.contiguous_format)
        steps = [] if x is None else [dist.P2POp(dist.isend, x, to)]
        steps += [] if received is None else [dist.P2POp(dist.irecv, received, source)]
        try:
            for work in dist.batch_isend_irecv(steps):
                work.wait()
        except (RuntimeError, dist.DistError) as error:
            others = " or ".join(str(step.peer) for step in steps)
            raise PeerError(f"rank {dist.get_rank()} lost rank {others} ({_first_line(error)})") from error
        return received

    def _run(self, collective: Callable[[str], Tensor], peers: tuple[int, ...]) -> Tensor:
        try:
            return _ops.wait_tensor(collective(self._group(peers).group_name))
        except (RuntimeError, dist.DistError) as error:
            raise PeerError(f"rank {dist.get_rank()} lost one of ranks {peers} ({_first_line(error)})") from error

    def _group(self, peers: tuple[int, ...]) -> dist.ProcessGroup:
        if peers not in self._groups:
            _check_joined()
            everyone = len(peers) == dist.get_world_size()
            made = dist.group.WORLD if everyone else dist.new_group(list(peers), use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup), f"{peers=}"
            self._groups[peers] = made
        return self._groups[peers]


def _check_joined() -> None:
    """Raises MeshError in a process that has left."""
    if not dist.is_initialized():
        raise MeshError("this process has left its mesh and cannot reach the others: take a mesh from join(mesh) again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Place(NamedTuple):
    """Which of the processes that were started together this is."""

    rank: int
    world: int


ALONE = Place(0, 1)


def group_place() -> Place | None:
    """What torchrun, or a launcher that does the same, says in RANK and WORLD_SIZE; None unless both are set.

    Raises MeshError naming each that cannot be true: believing it would be waiting for ranks that never come.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    world = _number("WORLD_SIZE")
    most = world if world and world <= MOST_RANKS else MOST_RANKS
    _require(WORLD_SIZE=(1, MOST_RANKS), RANK=(0, most - 1))
    return Place(_number("RANK") or 0, world or 1)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _require(**ends: tuple[int, int]) -> None:
    """Raises MeshError unless each variable is a whole number within its ends."""
    problems: list[str] = []
    for name, (low, high) in ends.items():
        number = _number(name)
        if number is None or not low <= number <= high:
            found = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
            problems.append(f"{name} {found}: must be a whole number from {low} to {high}")
    if problems:
        raise MeshError("\n  ".join(["this process cannot find the others by its environment:", *problems]))


def join(mesh: Mesh, device: str | torch.device = "cpu") -> Mesh:
    """This process's rank of the mesh, able to reach the others; every process that torchrun started calls it once.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises MeshError if one of them is wrong or the number of
    processes is not the mesh's.
    """
    place = group_place()
    if place is None:
        raise MeshError(f"mesh {mesh}: RANK and WORLD_SIZE are not set: start {mesh.ranks} processes with torchrun")
    rank, world = place
    if world != mesh.ranks:
        raise MeshError(f"mesh {mesh} has {mesh.ranks} ranks, and {world} processes were started: both must be equal")
    if not dist.is_initialized():
        if not os.environ.get("MASTER_ADDR"):
            raise MeshError("MASTER_ADDR is not set: must be the address of rank 0")
        _require(MASTER_PORT=(1, 65_535))
        backend = BACKENDS[torch.device(device).type]
        try:
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT)
        except (RuntimeError, dist.DistError) as error:
            raise PeerError(f"rank {rank} cannot join the others ({_first_line(error)})") from error
    return mesh.at(rank, Distributed())


def leave() -> None:
    """Ends the membership that `join` began, and every mesh that it gave. No rank may wait for this one any more. A
    process that ends without leaving may abort at its very end.

    Captured steps must be gone: NCCL does not end while a CUDA graph has collectives of the group in it.
    """
    for link in _made:
        link.close()
    if dist.is_initialized():
        gc.collect()  # what refers to itself may still hold such a graph
        dist.destroy_process_group()
