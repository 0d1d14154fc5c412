"""Which layers share blocks: window groups and slots.

Layers fall into groups: those that attend to everything, and the sliding ones dealt out into groups no larger than
that. Layer number s of a group uses slot s, a pair of arrays K and V, under its group's block table; so one block id
is the same place in all slots, and any free block can serve any group. 16 global and 46 sliding layers make groups of
16, 16, 15 and 15 over 16 slots: a token of a long context costs 16 layers, not 62.
"""

from dataclasses import dataclass
from functools import lru_cache

from muse_fn.params.config import Config
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.rules import stage_layers


@dataclass(frozen=True)
class Layout:
    """The groups of a model, and the slots of this rank's layers. Groups are the same on every rank."""

    windows: tuple[int, ...]  # of each group, in tokens; 0: it keeps everything
    places: tuple[tuple[int, int], ...]  # of each layer of this rank's pipeline stage: its group and its slot
    slots: int

    @property
    def groups(self) -> int:
        """How many block tables a sequence has."""
        return len(self.windows)


@lru_cache(maxsize=256)
def layout_of(config: Config, mesh: Mesh = ONE) -> Layout:
    """The layout of a config on this rank's pipeline stage."""
    whole = [layer for layer in range(config.layers) if not config.is_sliding(layer)]
    sliding = [layer for layer in range(config.layers) if config.is_sliding(layer)]
    most = len(whole) or len(sliding)
    dealt = -(-len(sliding) // most)
    # Dealt like cards: every pipeline stage gets an equal share of each group.
    members = ([whole] if whole else []) + [sliding[n::dealt] for n in range(dealt)]
    own = stage_layers(config.layers, mesh)
    place = {
        layer: (group, slot)
        for group, layers in enumerate(members)
        for slot, layer in enumerate(layer for layer in layers if layer in own)
    }
    windows = ((0,) if whole else ()) + (config.window,) * dealt
    return Layout(windows, tuple(place[layer] for layer in own), 1 + max(slot for _, slot in place.values()))
