"""Who works on which token between products: every rank of a stage on all of them, or in a long step each on its own.

Norms, joins, the router and the blend act on each token alone. Ranks that all have the whole stream repeat that work,
and a sum that all must have whole sends twice as much as one of which each keeps a part.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.sharding.collectives import psum, psum_scatter, stacked, swapped
from muse_fn.sharding.mesh import ONE, STAGE, Axes, Mesh

# A divided step has up to four collectives more in a layer, of some 15 us each on two H200, and sends of each token at
# least 60 KB less for expert rows, 0.2 us at 300 GB/s: below this many tokens latency is what counts.
LONG = 256


def is_divided(tokens: int, mesh: Mesh) -> bool:
    """Whether a step of so many tokens is divided by them: it is long, and there are as many for each rank."""
    ranks = mesh.size(STAGE)
    return ranks > 1 and tokens >= LONG and tokens % ranks == 0


class Division(NamedTuple):
    """How the tokens of one step lie on the ranks of a stage; their order is that of the ranks.

    T are all tokens, t those of this rank: T / ranks of them if the step is divided, else all.
    """

    mesh: Mesh = ONE
    is_divided: bool = False

    def own(self, x: Tensor) -> Tensor:
        """[T, ...] that every rank has -> [t, ...]."""
        return x.unflatten(0, (self.mesh.size(STAGE), -1))[self.mesh.index(STAGE)] if self.is_divided else x

    def summed(self, x: Tensor) -> Tensor:
        """[T, ...] of every rank, added up -> [t, ...]."""
        return (psum_scatter if self.is_divided else psum)(x, self.mesh, STAGE)

    def whole(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[t, ...] -> [T, ...]; what has to travel does so in `dtype`, if one is given."""
        if not self.is_divided:
            return x
        return stacked(x.to(dtype or x.dtype), self.mesh, STAGE).flatten(0, 1)

    def parts(self, x: Tensor, axes: Axes) -> Tensor:
        """Columns that these axes, all of a stage, split -> all of them in parts: [T, W / P] -> [P, t, W / P].

        With no axes the columns are whole, and of this rank's tokens already: [t, W] -> [1, t, W].
        """
        return (swapped if self.is_divided else stacked)(x, self.mesh, axes)


UNDIVIDED = Division()


def division_of(tokens: int, mesh: Mesh) -> Division:
    """Of a step of so many tokens."""
    return Division(mesh, is_divided(tokens, mesh))
