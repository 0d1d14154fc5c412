"""Axes, ranks and peers; how a mesh is written; which layers a stage has."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.sharding.mesh import AXES, Axes, Mesh, MeshError, parse_mesh
from muse_fn.sharding.rules import stage_layers

SIZES = st.integers(1, 4)
SUBSETS: list[Axes] = [("pp",), ("ep",), ("tp",), ("ep", "tp"), ("pp", "tp"), ("pp", "ep", "tp"), ()]


@given(SIZES, SIZES, SIZES)
def test_ranks_are_the_places_in_order(ep: int, tp: int, pp: int) -> None:
    mesh = Mesh(ep, tp, pp)
    views = [mesh.at(rank) for rank in range(mesh.ranks)]
    places = [tuple(view.index((axis,)) for axis in AXES) for view in views]
    assert places == list(product(range(pp), range(ep), range(tp)))
    assert [view.index(AXES) for view in views] == list(range(mesh.ranks))


@given(SIZES, SIZES, SIZES, st.sampled_from(SUBSETS))
def test_peers_divide_the_mesh_into_groups(ep: int, tp: int, pp: int, axes: Axes) -> None:
    mesh = Mesh(ep, tp, pp)
    groups = {mesh.at(rank).peers(axes) for rank in range(mesh.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
    for rank in range(mesh.ranks):
        view = mesh.at(rank)
        assert len(view.peers(axes)) == view.size(axes)
        assert view.peers(axes)[view.index(axes)] == rank


def test_a_mesh_is_written_as_it_is_read() -> None:
    for mesh in (Mesh(2, 4), Mesh(1, 2, pp=3), Mesh(8, 1, squeeze="split")):
        assert parse_mesh(str(mesh)) == mesh
    assert parse_mesh(" tp=4, ep=2 ") == Mesh(2, 4)
    assert parse_mesh("tp=8") == Mesh(1, 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is not understood"),
        ("2x4", "'2x4' is not understood"),
        ("ep=2,dp=4", "'dp=4' is not understood"),
        ("ep=2,ep=4", "'ep=4' is not understood"),
        ("ep=-2", "'ep=-2' is not understood"),
        ("ep=²", "'ep=²' is not understood"),
        ("ep=0", "ep=0: must be a whole number from 1 to"),
        ("ep=5000", "ep=5000: must be"),
        ("pp=2,ep=64,tp=64", "mesh pp=2,ep=64,tp=64 has 8192 ranks: must be at most 4096"),
        ("squeeze=half", "must be 'replicated' or 'split'"),
    ],
)
def test_other_texts_are_refused(text: str, told: str) -> None:
    with pytest.raises(MeshError, match=re.escape(told)):
        parse_mesh(text)


@pytest.mark.parametrize("wrong", [{"ep": True}, {"tp": 1.5}, {"rank": 8}, {"rank": -1}, {"pp": 0}])
def test_other_values_are_refused_by_name(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(MeshError, match=f"{name}="):
        Mesh(**{"ep": 2, "tp": 4, **wrong})  # type: ignore[arg-type]


@given(st.integers(1, 70), st.integers(1, 9))
def test_stages_have_all_layers_and_the_last_never_more_than_another(layers: int, pp: int) -> None:
    mesh = Mesh(pp=pp)
    stages = [stage_layers(layers, mesh, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_62_layers_do_not_divide_by_4() -> None:
    assert [len(stage_layers(62, Mesh(pp=4), stage)) for stage in range(4)] == [16, 16, 15, 15]
