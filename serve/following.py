"""Ranks that serve together: the first plans and tells the others each step, and all run it on their share."""

import pickle
from typing import cast

from torch import Tensor

from muse_fn.batch import Runner
from muse_fn.kvcache.cache import KVCache
from muse_fn.serve.replays import Replays
from muse_fn.serve.steps import Orders, run
from muse_fn.sharding.collectives import tell_all
from muse_fn.sharding.mesh import Mesh

NOTHING = Orders((), (), (), ())  # a sign of life: who does not hear such words for long is missed


def announce(orders: Orders | None, mesh: Mesh) -> None:
    """The first rank tells the others what comes next; None: nothing, they may go."""
    if mesh.ranks > 1:
        tell_all(pickle.dumps(orders), mesh)


def follow(runner: Runner, kv: KVCache, allowed_V: Tensor | None, captured: Replays | None = None) -> None:
    """What every other rank does until it is told to go. Consumes `kv`."""
    while True:
        # What the first rank of this very program wrote; ranks trust each other with their memory anyway.
        orders = cast("Orders | None", pickle.loads(tell_all(None, runner.mesh)))
        if orders is None:
            return
        if orders != NOTHING:
            _, kv = run(runner, kv, orders, allowed_V, captured)
