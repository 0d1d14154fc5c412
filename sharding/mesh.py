"""The mesh of ranks: named axes, their sizes, and where one rank stands on them.

rank = (pp_index * ep + ep_index) * tp + tp_index        the last axis varies fastest

pp   pipeline stages: consecutive layers
ep   experts
tp   the inner width of each expert
STAGE = (ep, tp)   all ranks of a stage together: attention heads, vocabulary, the width of dense layers
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Protocol

from torch import Tensor

Axis = Literal["pp", "ep", "tp"]
Axes = tuple[Axis, ...]
AXES: Axes = ("pp", "ep", "tp")
STAGE: Axes = ("ep", "tp")
MOST_RANKS = 4096


class MeshError(ValueError):
    """A mesh that cannot hold this model. The message lists every problem: axis, size found, sizes allowed."""


class Link(Protocol):
    """How ranks reach each other. `peers` are ranks of the mesh in ascending order, the caller among them."""

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """The sum of every peer's x, the same bits on each."""
        ...

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """[n, ...] -> [n / peers, ...]: of the sum of every peer's x each gets its rows, in the order of the peers."""
        ...

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """[peers, *x.shape]: every peer's x."""
        ...

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """[n, ...] -> [peers, n / peers, ...]: of every peer's x the rows that are this one's, in the order of both."""
        ...

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        """The x of rank `source`."""
        ...

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        """Sends x to one rank and receives a tensor like `into` from another, either of which may be left out."""
        ...


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes, the one choice of layout, and which rank this is.

    `Mesh(ep=2, tp=4)` describes; `join` and `simulate` give a rank that can also reach the others. Hashable; two
    meshes are equal if they describe the same rank of the same layout.
    """

    ep: int = 1
    tp: int = 1
    pp: int = 1
    squeeze: Literal["replicated", "split"] = "replicated"  # squeeze and expand: whole on every rank, or rows split
    rank: int = 0
    link: Link | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            size: object = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_RANKS:
                raise MeshError(f"mesh has {axis}={size!r}: must be a whole number from 1 to {MOST_RANKS}")
        if self.squeeze not in ("replicated", "split"):
            raise MeshError(f"mesh has squeeze={self.squeeze!r}: must be 'replicated' or 'split'")
        if self.ranks > MOST_RANKS:
            raise MeshError(f"mesh {self} has {self.ranks} ranks: must be at most {MOST_RANKS}")
        if not 0 <= self.rank < self.ranks:
            raise MeshError(f"mesh has rank={self.rank!r}: must be 0 to {self.ranks - 1}")

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return self.pp * self.ep * self.tp

    def at(self, rank: int, link: Link | None = None) -> "Mesh":
        """The same mesh seen from another rank."""
        return replace(self, rank=rank, link=link)

    def size(self, axes: Axes) -> int:
        """How many ranks these axes have together."""
        found = 1
        for axis in axes:
            found *= getattr(self, axis)
        return found

    def index(self, axes: Axes) -> int:
        """This rank's place along these axes taken as one, the last varying fastest."""
        place = {"tp": self.rank % self.tp, "ep": self.rank // self.tp % self.ep, "pp": self.rank // self.size(STAGE)}
        found = 0
        for axis in axes:
            found = found * getattr(self, axis) + place[axis]
        return found

    def peers(self, axes: Axes) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only, itself included, ascending."""
        return _peers(self, axes)

    @property
    def is_first(self) -> bool:
        """Whether this rank belongs to the first stage, which embeds."""
        return self.index(("pp",)) == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank belongs to the last stage, which has the head."""
        return self.index(("pp",)) == self.pp - 1

    def __str__(self) -> str:
        pipeline = f"pp={self.pp}," if self.pp > 1 else ""
        return f"{pipeline}ep={self.ep},tp={self.tp}" + (",squeeze=split" if self.squeeze == "split" else "")


@lru_cache(maxsize=1024)
def _peers(mesh: Mesh, axes: Axes) -> tuple[int, ...]:
    others: Axes = tuple(axis for axis in AXES if axis not in axes)
    views = (mesh.at(rank) for rank in range(mesh.ranks))
    return tuple(view.rank for view in views if view.index(others) == mesh.index(others))


ONE = Mesh()


def parse_mesh(text: str) -> Mesh:
    """ "ep=2,tp=4", with `pp=` and `squeeze=replicated|split` if wanted -> Mesh. Raises MeshError."""
    values: dict[str, int | str] = {}
    for piece in text.split(","):
        key, equals, value = piece.strip().partition("=")
        known = key in (*AXES, "squeeze") and key not in values
        if not equals or not known or (key != "squeeze" and not (value.isascii() and value.isdecimal())):
            need = "sizes of ep, tp and pp such as ep=2,tp=4, each once; squeeze=split may be added"
            raise MeshError(f"mesh {text!r}: {piece.strip()!r} is not understood: needs {need}")
        values[key] = value if key == "squeeze" else int(value)
    return Mesh(**values)  # type: ignore[arg-type]
