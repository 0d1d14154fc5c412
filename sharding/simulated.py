"""All ranks of a mesh in one process, a thread each: any layout against one rank without starting processes.

Sums are taken in the order of the ranks. Ranks that do not make the same calls in the same order with the same shapes
are an error that says so, where real collectives would hang or mix up.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from muse_fn.sharding.collectives import PeerError
from muse_fn.sharding.mesh import Mesh

Result = TypeVar("Result")
PATIENCE = 300.0  # seconds a rank waits for another before it gives up


class SequenceError(RuntimeError):
    """Ranks that must do the same do not: on real ranks this would hang or mix up data."""


def simulate(mesh: Mesh, fn: Callable[[Mesh], Result]) -> list[Result]:
    """fn(mesh as each rank sees it), all ranks at once; their results in order.

    Gradient and inference mode are the caller's. If ranks fail, raises the first error that is not just the loss of
    another rank.
    """
    room = _Room()
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(rank: int) -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                results[rank] = fn(mesh.at(rank, _Thread(room, rank)))
        except Exception as error:  # every kind: it is raised again below, in the caller's thread
            errors[rank] = error
            room.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(mesh.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        cause = min(errors, key=lambda rank: (isinstance(errors[rank], PeerError), rank))
        errors[cause].add_note(f"on rank {cause} of mesh {mesh}")
        raise errors[cause]
    return [results[rank] for rank in range(mesh.ranks)]


@dataclass
class _Table:
    """Where the members of one group lay down what they give, and wait for each other."""

    barrier: threading.Barrier
    given: dict[int, tuple[str, Tensor]] = field(default_factory=dict[int, tuple[str, Tensor]])


class _Room:
    """What the threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[int, ...], _Table] = {}
        self._lines: dict[tuple[int, int], SimpleQueue[Tensor | None]] = {}
        self._closed = False

    def table(self, peers: tuple[int, ...]) -> _Table:
        with self._lock:
            if peers not in self._tables:
                self._tables[peers] = _Table(threading.Barrier(len(peers), timeout=PATIENCE))
                if self._closed:
                    self._tables[peers].barrier.abort()
            return self._tables[peers]

    def line(self, source: int, to: int) -> "SimpleQueue[Tensor | None]":
        with self._lock:
            if (source, to) not in self._lines:
                self._lines[source, to] = SimpleQueue()
                if self._closed:
                    self._lines[source, to].put(None)
            return self._lines[source, to]

    def close(self) -> None:
        """Sends home whoever waits, now or later."""
        with self._lock:
            self._closed = True
            for table in self._tables.values():
                table.barrier.abort()
            for line in self._lines.values():
                line.put(None)


class _Thread:
    """One rank's way to the others; see mesh.Link."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self._rank = room, rank

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return self._exchange("all_sum", x, peers, _sum_in_order)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return self._exchange("sum_scatter", x, peers, lambda given: _sum_in_order(self._rows(given, peers)))

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return self._exchange("all_gather", x, peers, torch.stack)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return self._exchange("all_to_all", x, peers, lambda given: torch.stack(self._rows(given, peers)))

    def _rows(self, given: list[Tensor], peers: tuple[int, ...]) -> list[Tensor]:
        """This rank's rows of each."""
        return [x.unflatten(0, (len(peers), -1))[peers.index(self._rank)] for x in given]

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        return self._exchange(f"broadcast from {source}", x, peers, lambda given: given[peers.index(source)].clone())

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        if x is not None:
            self._room.line(self._rank, to).put(x.clone())
        if into is None:
            return None
        try:
            found = self._room.line(source, self._rank).get(timeout=PATIENCE)
        except Empty:
            found = None
        if found is None:
            raise PeerError(f"rank {self._rank} waits for rank {source}, which gave nothing")
        if found.shape != into.shape or found.dtype != into.dtype:
            raise SequenceError(f"rank {self._rank} expects {_kind(into)} from rank {source}, got {_kind(found)}")
        return found

    def _exchange(
        self, call: str, x: Tensor, peers: tuple[int, ...], combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        table = self._room.table(peers)
        try:
            table.given[self._rank] = f"{call} of {_kind(x)}", x
            table.barrier.wait()
            found = dict(table.given)
            calls = {rank: name for rank, (name, _) in found.items()}
            same = len(set(calls.values())) == 1
            made = combine([found[rank][1] for rank in peers]) if same else None
            # None may go on before all have read: it would lay down the next, or write into what it gave.
            table.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerError(f"rank {self._rank}, in {call}, lost one of ranks {peers}") from error
        if made is None:
            raise SequenceError(f"ranks make different calls: {calls}")
        return made


def _sum_in_order(given: list[Tensor]) -> Tensor:
    total = given[0].clone()
    for x in given[1:]:
        total += x
    return total


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
