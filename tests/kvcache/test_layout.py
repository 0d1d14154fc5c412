"""Groups and slots: every layer has one, no two layers of a group the same, and no more slots than needed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.rules import stage_layers
from tests.models import FULL, SLIDING, SMALL

KINDS = st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=30)


def test_the_released_model_has_four_groups_over_16_slots() -> None:
    layout = layout_of(Config())
    assert layout.windows == (0, 2048, 2048, 2048)
    assert layout.slots == 16
    assert [sum(group == g for group, _ in layout.places) for g in range(4)] == [16, 16, 15, 15]


@given(KINDS, st.integers(1, 4))
def test_layers_of_a_group_have_slots_of_their_own_on_every_stage(kinds: list[str], pp: int) -> None:
    pp = min(pp, len(kinds))
    config = replace(SMALL, layers=len(kinds), layer_types=tuple(kinds), layer_rope_theta=(), mlp_layer_types=())  # type: ignore[arg-type]
    whole = layout_of(config)
    assert whole.slots == (kinds.count(FULL) or kinds.count(SLIDING))
    for stage in range(pp):
        mesh = Mesh(pp=pp).at(stage)
        layout, own = layout_of(config, mesh), stage_layers(config.layers, mesh)
        assert layout.windows == whole.windows
        assert len(set(layout.places)) == len(layout.places) == len(own)
        assert all(slot < layout.slots for _, slot in layout.places)
        for layer, (group, _) in zip(own, layout.places, strict=True):
            assert layout.windows[group] == (config.window if config.is_sliding(layer) else 0)
            assert whole.places[layer][0] == group, "a layer's group is the same on every mesh"
        most = max(sum(g == group for g, _ in layout.places) for group in range(layout.groups))
        assert layout.slots == most


def test_stages_share_every_group_evenly() -> None:
    for pp in (2, 3, 4, 8):
        slots = [layout_of(Config(), Mesh(pp=pp).at(stage)).slots for stage in range(pp)]
        assert max(slots) <= -(-16 // pp) + 1
