"""Long steps, which ranks divide by tokens, against one rank's; and which steps these are."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import muse_fn
from muse_fn.decoder import forward
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.sharding.division import LONG, is_divided
from muse_fn.sharding.mesh import STAGE, Link, Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from tests.models import close, random_tokens

NANO = Path(muse_fn.__file__).parent / "nano"
LAYOUTS = [Mesh(1, 2), Mesh(2, 1), Mesh(2, 2), Mesh(2, 4), Mesh(1, 2, pp=2), Mesh(2, 2, pp=2)]
MESHES = [Mesh(m.ep, m.tp, m.pp, squeeze) for m in LAYOUTS for squeeze in ("replicated", "split")]


Calls = Counter[tuple[str, tuple[int, ...]]]  # of a kind, for tensors of this shape behind their first dimension


class Counting:
    """A link that counts its calls: kinds and shapes."""

    def __init__(self, link: Link) -> None:
        self._link, self.found = link, Calls()
        self.broadcast, self.pass_on = link.broadcast, link.pass_on

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self.found["all_sum", tuple(x.shape[1:])] += 1
        return self._link.all_sum(x, peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self.found["sum_scatter", tuple(x.shape[1:])] += 1
        return self._link.sum_scatter(x, peers)

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self.found["all_gather", tuple(x.shape[1:])] += 1
        return self._link.all_gather(x, peers)


def counted(params: Params, config: Config, mesh: Mesh, tokens: Tensor) -> list[tuple[Tensor, Calls]]:
    """The logits on every rank, and its calls."""

    def run(m: Mesh) -> tuple[Tensor, Calls]:
        assert m.link is not None
        link = Counting(m.link)
        return forward(shard(params, config, m), tokens, config, m.at(m.rank, link)), link.found

    with torch.no_grad():
        return simulate(mesh, run)


@pytest.mark.parametrize(("batch", "length"), [(1, LONG), (3, 96), (2, 129)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_of_long_steps_equal_one_rank(mesh: Mesh, batch: int, length: int) -> None:
    """Rows of routes are summed whole only where the step is not divided: 258 tokens, by four or eight ranks."""
    model = muse_fn.load(NANO)
    tokens = random_tokens(model.config, length, batch, length)
    with torch.no_grad():
        expected = forward(model.params, tokens, model.config)
    row = model.config.top_k, model.config.latent_size
    (first, _), *_ = found = counted(model.params, model.config, mesh, tokens)
    close(first, expected, 1e-5)
    for logits, calls in found:
        assert torch.equal(logits, first)
        kind = "all_sum" if batch * length % mesh.size(STAGE) else "sum_scatter"
        assert {name for name, shape in calls if shape == row} == {kind}


def test_what_is_divided() -> None:
    assert is_divided(LONG, Mesh(2, 4))
    assert not is_divided(LONG - 8, Mesh(2, 4)), "short"
    assert not is_divided(LONG + 4, Mesh(2, 4)), "not as many for each rank"
    assert not is_divided(LONG, Mesh(pp=4)), "alone in its stage"
