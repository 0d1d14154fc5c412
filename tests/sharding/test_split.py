"""Cutting a tree and joining it again, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kernels.packed import quantise_nvfp4
from muse_fn.params.config import Config
from muse_fn.params.quantise import quantise_leaf
from muse_fn.params.schema import leaves, sparse_layers
from muse_fn.params.slicing import shape_of_part
from muse_fn.params.tree import from_named, named
from muse_fn.sharding.mesh import Mesh, MeshError
from muse_fn.sharding.rules import check_mesh, holds
from muse_fn.sharding.split import check_shard, part_of, shard, stage_config, unshard
from tests.models import MORE_MESHES, SEEDS, SMALL, fitting_configs, random_params
from tests.tiny_checkpoint import TINY, equal, params_of

EIGHT = Config(
    vocab_size=64, hidden_size=16, intermediate_size=16, layers=3, heads=8, kv_heads=2, head_dim=4, latent_size=64,
    expert_size=128, experts=8, top_k=2, window=4, max_positions=64, bos_token_id=1, eos_token_id=(2,),
)  # fmt: skip
SMALL_EVEN = replace(EIGHT, heads=2, kv_heads=2, experts=2)


@given(st.data(), st.sampled_from(MORE_MESHES), SEEDS)
def test_joining_the_shards_is_the_inverse_of_cutting(data: st.DataObject, mesh: Mesh, seed: int) -> None:
    config = data.draw(fitting_configs(mesh))
    params = random_params(config, seed)
    assert equal(unshard([shard(params, config, mesh.at(r)) for r in range(mesh.ranks)], config, mesh), params)


@pytest.mark.parametrize("mesh", MORE_MESHES, ids=str)
@pytest.mark.parametrize("packed", ["mxfp4", "nvfp4"])
def test_packed_parameters_are_cut_and_joined_likewise(mesh: Mesh, packed: str) -> None:
    values = named(params_of(EIGHT))
    for leaf in leaves(EIGHT):
        weight = values[leaf.path]
        if leaf.row.each and packed == "mxfp4":
            values[leaf.path] = quantise_leaf(leaf, weight, EIGHT)
        elif leaf.row.each:
            assert isinstance(weight, torch.Tensor)
            values[leaf.path] = quantise_nvfp4(weight, leaf.matrices)
    params = from_named(sparse_layers(EIGHT), values)
    assert equal(unshard([shard(params, EIGHT, mesh.at(r)) for r in range(mesh.ranks)], EIGHT, mesh), params)


@pytest.mark.parametrize("mesh", MORE_MESHES, ids=str)
def test_the_parts_of_all_ranks_cover_every_parameter_evenly(mesh: Mesh) -> None:
    for leaf in leaves(EIGHT):
        seen = torch.zeros(leaf.shape, dtype=torch.int64)
        for rank in range(mesh.ranks):
            view = mesh.at(rank)
            if holds(leaf, EIGHT, view):
                part = part_of(leaf, EIGHT, view)
                index = [torch.tensor([i for a, b in ranges for i in range(a, b)]) for ranges in part]
                seen[torch.meshgrid(*index, indexing="ij")] += 1
        assert seen.min() >= 1, leaf.path
        assert seen.min() == seen.max(), leaf.path


def test_what_a_rank_holds_of_the_released_model() -> None:
    mesh, config = Mesh(2, 4).at(6), Config()  # expert group 1, third quarter
    parts = {leaf.row.path: part_of(leaf, config, mesh) for leaf in leaves(config) if leaf.layer in (None, 5)}
    assert parts["layers.*.mlp.experts.gate_up"] == (((128, 256),), ((2048, 3072), (6144, 7168)), ((0, 4096),))
    assert parts["layers.*.mlp.experts.down"] == (((128, 256),), ((0, 4096),), ((2048, 3072),))
    assert parts["layers.*.attn.k"] == (((768, 896),), ((0, 8192),))
    assert parts["layers.*.attn.o"] == (((0, 8192),), ((6144, 7168),))
    assert parts["head"] == (((151_536, 176_792),), ((0, 8192),))
    assert shape_of_part(parts["layers.*.mlp.squeeze"]) == (4096, 8192)
    split = Mesh(2, 4, squeeze="split").at(6)
    squeeze, expand = (next(x for x in leaves(config) if x.path == f"layers.0.mlp.{n}") for n in ("squeeze", "expand"))
    assert part_of(squeeze, config, split) == (((3072, 3584),), ((0, 8192),))
    assert part_of(expand, config, split) == (((6144, 7168),), ((0, 4096),))


@pytest.mark.parametrize("ep", [3, 5])
def test_experts_that_do_not_divide_are_refused_with_the_sizes_that_do(ep: int) -> None:
    """Trial 34."""
    with pytest.raises(MeshError) as refused:
        check_mesh(EIGHT, Mesh(ep=ep))
    told = str(refused.value)
    assert f"ep is {ep}: experts is 8, so ep must be 1, 2, 4 or 8" in told
    assert f"no ep and tp of {ep} ranks fit; the largest smaller ones are " in told
    assert "\n  " in told, "all problems are listed together"
    assert f"ep*tp is {ep}: heads is 8" in told


@pytest.mark.parametrize(
    ("width", "block", "tp", "good"), [(128, 32, 8, "1, 2 or 4"), (96, 32, 2, "1 or 3"), (64, 16, 8, "1, 2 or 4")]
)
def test_blocks_that_share_a_scale_stay_together(width: int, block: int, tp: int, good: str) -> None:
    """Trial 41."""
    config = Config.from_json({**EIGHT.to_json(), "moe_intermediate_size": width})
    check_mesh(config, Mesh(tp=tp))
    with pytest.raises(
        MeshError, match=rf"tp is {tp}: .*layers\.1\.mlp\.experts\.down.* block of {block}.*tp must be {good}"
    ):
        check_mesh(config, Mesh(tp=tp), {"layers.1.mlp.experts.down": block, "layers.1.mlp.experts.gate_up": block})


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(MeshError, match="pp is 4: the model has 3 layers, so pp must be 1 to 3"):
        check_mesh(SMALL, Mesh(pp=4))


def test_meshes_that_fit_are_named() -> None:
    with pytest.raises(MeshError, match=r"with 8 ranks these fit: ep=2,tp=4; ep=4,tp=2"):
        check_mesh(
            Config.from_json({**EIGHT.to_json(), "num_local_experts": 12, "moe_intermediate_size": 36}), Mesh(ep=8)
        )


def test_what_is_named_keeps_the_stages_and_fits() -> None:
    """3 ranks would fit as pp=3: only ep and tp are ruled out."""
    with pytest.raises(MeshError, match=r"no ep and tp of 3 ranks fit; .* pp=2,ep=1,tp=2,squeeze=split; pp=2,ep=2,tp"):
        check_mesh(SMALL_EVEN, Mesh(tp=3, pp=2, squeeze="split").at(4))
    check_mesh(SMALL_EVEN, Mesh(ep=2, pp=2, squeeze="split"))
    with pytest.raises(MeshError) as refused:
        check_mesh(SMALL_EVEN, Mesh(tp=2, pp=50))
    assert str(refused.value).splitlines()[1:] == ["  pp is 50: the model has 3 layers, so pp must be 1 to 3"]


def test_shards_of_another_mesh_are_refused() -> None:
    params = params_of(EIGHT)
    own = shard(params, EIGHT, Mesh(2, 4).at(1))
    check_shard(own, EIGHT, Mesh(2, 4).at(1))
    for wrong in (Mesh(4, 2), Mesh(2, 2), Mesh(), Mesh(1, 2, pp=2)):
        with pytest.raises(MeshError, match="not this rank's share"):
            check_shard(own, EIGHT, wrong)
    with pytest.raises(MeshError, match="7 trees were given: mesh ep=2,tp=4 has 8 ranks"):
        unshard([own] * 7, EIGHT, Mesh(2, 4))


def test_a_stage_has_the_settings_of_its_layers() -> None:
    stages = [stage_config(TINY, Mesh(pp=3).at(rank)) for rank in range(3)]
    assert sum((stage.layer_types for stage in stages), ()) == TINY.layer_types
    assert [stage.layers for stage in stages] == [2, 1, 1]
    assert {stage.vocab_size for stage in stages} == {TINY.vocab_size}
