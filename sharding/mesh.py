"""The mesh of ranks a model is spread over. This version runs one rank; the axes have their names already."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes: experts over `ep`, heads, vocabulary and expert widths over `tp`."""

    ep: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return self.ep * self.tp


def one_rank(mesh: Mesh | None) -> None:
    """Raises ValueError unless the mesh has one rank, the only size this version runs."""
    if mesh is not None and mesh.ranks != 1:
        raise ValueError(f"mesh is ep={mesh.ep}, tp={mesh.tp}: this version runs one rank (ep=1, tp=1)")
