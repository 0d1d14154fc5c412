"""What a card holds: the ranks together hold the model and the copies, byte for byte."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.footprint import (
    COMPONENTS,
    KV_DTYPES,
    held,
    kv_bytes,
    stages,
    tokens_that_fit,
    weights,
)
from muse_fn.kvcache.cache import STORAGE, init_cache
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.inventory import inventory
from muse_fn.params.quantise import is_packable, quantise_experts
from muse_fn.params.schema import dims_of, leaves
from muse_fn.params.tree import tensors
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.rules import REPEATED, axes_of, stage_layers
from muse_fn.sharding.split import shard
from tests.models import SLIDING
from tests.planned import FORMAT, MODEL, RELEASED, TIED, meshes


def copies(path: str, dims: tuple[str, ...], config: Config, mesh: Mesh) -> Fraction:
    """On how many ranks of its stages each element is: the ranks that no word's axes tell apart."""
    size = {"kv_heads": config.kv_heads}
    found = Fraction(mesh.size(STAGE))
    for word in dims:
        ranks = mesh.size(axes_of(path, word, mesh))
        found /= min(ranks, size[word]) if word in REPEATED else ranks
    return found


@given(meshes(), FORMAT, TIED)
@settings(deadline=None)
def test_all_ranks_together_hold_the_model_and_the_copies(mesh: Mesh, format: str, tied: bool) -> None:
    config = replace(MODEL, tie_word_embeddings=tied)
    on_ranks = Counter[str]()
    for rank in range(mesh.ranks):
        for item in held(config, mesh.at(rank), format):
            on_ranks[item.leaf.path] += item.bytes
    total = Fraction(0)
    for leaf in leaves(config):
        dims = tuple(word for words in dims_of(leaf.row) for word in words)
        times = copies(leaf.row.path, dims, config, mesh)
        if tied and leaf.path == "embed" and mesh.pp > 1:
            times *= 2  # the first stage looks tokens up in it, the last multiplies with it
        factors = 0
        if format == "nvfp4" and is_packable(leaf, config):  # each tp rank needs the factors of its slices
            factors = 4 * config.experts * leaf.matrices
            on_ranks[leaf.path] -= factors * mesh.tp
        total += on_ranks[leaf.path] / times + factors
    unread = sum(4 * config.experts * leaf.matrices for leaf in leaves(config) if is_packable(leaf, config))
    assert total == inventory(config).bytes[format] - (unread if format == "nvfp4" else 0)  # input scales stay on disk


@given(meshes(), FORMAT, TIED)
@settings(deadline=None)
def test_one_rank_speaks_for_its_stage(mesh: Mesh, format: str, tied: bool) -> None:
    config = replace(MODEL, tie_word_embeddings=tied)
    for first in stages(mesh):
        for rank in range(first.rank, first.rank + mesh.size(STAGE)):
            assert weights(config, mesh.at(rank), format) == weights(config, first, format)
            assert kv_bytes(config, mesh.at(rank), "bf16") == kv_bytes(config, first, "bf16")


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 4), Mesh(4, 2, squeeze="split"), Mesh(2, 2, 2)], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_bytes_are_those_of_the_tensors(mesh: Mesh, packed: bool) -> None:
    config = MODEL
    params = init_params(config, dtype=torch.bfloat16)
    params = quantise_experts(params, config) if packed else params
    for rank in range(mesh.ranks):
        tree = shard(params, config, mesh.at(rank))
        planned = weights(config, mesh.at(rank), "quark-mxfp4" if packed else "bf16")
        assert sum(planned.values()) == sum(x.numel() * x.element_size() for x in tensors(tree))


@given(st.integers(1, 3), FORMAT, st.sampled_from(["replicated", "split"]))
@settings(deadline=None)
def test_the_share_of_a_card_does_not_depend_on_how_ranks_are_arranged(
    log_ranks: int, format: str, squeeze: str
) -> None:
    """ep x tp permutations: experts are cut by ep, then by tp; only the factors of NVFP4 are repeated over tp."""
    found: set[tuple[tuple[str, int], ...]] = set()
    for ep in (2**n for n in range(log_ranks + 1)):
        mesh = Mesh(ep, 2**log_ranks // ep, squeeze=squeeze)  # type: ignore[arg-type]
        sizes = weights(MODEL, mesh, format)
        if format == "nvfp4":
            factors = [
                4 * item.shape[0] * item.leaf.matrices
                for item in held(MODEL, mesh, format)
                if is_packable(item.leaf, MODEL)
            ]
            sizes["experts"] -= sum(factors)
        found.add(tuple(sizes.items()))
    assert len(found) == 1


def test_components_are_the_inventory_s() -> None:
    found = weights(RELEASED, Mesh(), "bf16")
    counted = {line.name: line.parameters for line in inventory(RELEASED).model}
    assert list(found) == [name for name in COMPONENTS if name != "dense MLP"]
    assert found["attention"] == 2 * counted["attention"]
    assert found["squeeze and expand"] == 2 * counted["squeeze and expand"]
    assert found["experts"] == 2 * counted["experts"]
    assert found["embedding"] + found["head"] == 2 * counted["embedding and head"]
    bias = RELEASED.layers * RELEASED.experts
    assert found["router"] == 4 * (counted["routers"] - bias)


@given(meshes(), st.sampled_from(["bf16", "float32"]), st.integers(2, 5), st.integers(1, 4))
@settings(deadline=None)
def test_cache_bytes_are_those_of_the_arena(mesh: Mesh, kv: str, blocks: int, size: int) -> None:
    for stage in stages(mesh):
        made, found = init_cache(MODEL, blocks, size, dtype=STORAGE[kv], mesh=stage), kv_bytes(MODEL, stage, kv)
        assert sum(x.nbytes for x in (*made.k, *made.v)) == found.windowed * blocks * size
        each = made.k[0].nbytes * 2 // (blocks * size)
        assert found.unwindowed == each * len(stage_layers(MODEL.layers, stage))
        assert found.window == MODEL.window * found.windowed * (layout_of(MODEL).groups - 1)


@given(meshes(), st.sampled_from(list(KV_DTYPES)), st.integers(0, 10**6), st.integers(0, 9))
@settings(deadline=None)
def test_the_tokens_that_fit_do_fit_and_one_more_does_not(mesh: Mesh, kv: str, spare: int, sequences: int) -> None:
    """Windowed, in bytes: weights + windows of all sequences + tokens, against the room, on every stage."""
    held_by = [sum(weights(MODEL, stage, "bf16").values()) for stage in stages(mesh)]
    room = max(held_by) + spare
    found = tokens_that_fit(MODEL, mesh, "bf16", kv, room, sequences)
    caches = [kv_bytes(MODEL, stage, kv) for stage in stages(mesh)]

    def fits(tokens: int) -> bool:
        return all(w + sequences * c.window + tokens * c.windowed <= room for w, c in zip(held_by, caches, strict=True))

    assert found.windowed is not None
    assert fits(found.windowed) or found.windowed == 0
    assert not fits(found.windowed + 1)
    whole = [w + (found.unwindowed + 1) * c.unwindowed > room for w, c in zip(held_by, caches, strict=True)]
    assert any(whole)


def test_without_a_global_layer_there_is_no_bound_on_tokens() -> None:
    config = replace(MODEL, layer_types=(SLIDING,) * MODEL.layers)
    assert tokens_that_fit(config, Mesh(), "bf16", "bf16", 1e9, 1).windowed is None
    assert tokens_that_fit(config, Mesh(), "bf16", "bf16", 1e9, 1e9).windowed == 0
