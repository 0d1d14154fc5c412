"""Expert load: equal to counting by hand, blind to padding, the same on every mesh."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kvcache.cache import View, init_cache, own_blocks
from muse_fn.params.tree import MoE
from muse_fn.routing import count_routes, expert_load
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import run
from tests.models import MORE_MESHES, SEEDS, SMALL, fitting_configs, random_params, random_tokens


@given(st.data(), st.sampled_from(MORE_MESHES), SEEDS, st.integers(1, 3), st.integers(1, 6))
def test_load_counts_real_tokens_alone_on_every_mesh(
    data: st.DataObject, mesh: Mesh, seed: int, batch: int, length: int
) -> None:
    config = data.draw(fitting_configs(mesh))
    params, tokens = random_params(config, seed), random_tokens(config, seed, batch, length)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
    with torch.no_grad():
        expected = sum(
            (expert_load(params, tokens[b : b + 1, :n], config) for b, n in enumerate(lengths.tolist()) if n),
            torch.zeros(config.layers, config.experts, dtype=torch.int64),
        )
        for found in simulate(mesh, lambda m: expert_load(shard(params, config, m), tokens, config, lengths, m)):
            assert torch.equal(found, expected)
    for layer, p in enumerate(params.layers):
        assert expected[layer].sum() == (lengths.sum() * config.top_k if isinstance(p.mlp, MoE) else 0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 1), Mesh(pp=3)], ids=str)
def test_routes_of_a_step_count_no_padding_row(mesh: Mesh) -> None:
    """A chunk of two prompts of 5 and 2 tokens in 6 columns, in microbatches where there are stages."""
    config = (
        SMALL if mesh.ep == 1 else type(SMALL).from_json({**SMALL.to_json(), "num_local_experts": 6, "vocab_size": 62})
    )
    params, tokens, counts = random_params(config, 3), random_tokens(config, 3, 2, 6), torch.tensor([5, 2])
    table = own_blocks(config, 2, 6, 2)
    view = View(table, torch.tensor([0, 0]), counts)

    def load(m: Mesh) -> torch.Tensor:
        kv = init_cache(config, 1 + table.numel(), 2, mesh=m)
        return count_routes(run(shard(params, config, m), tokens, kv, view, config, m).routes, counts, config, m)

    with torch.no_grad():
        expected = expert_load(params, tokens, config, counts)
        assert expected.sum(-1).tolist() == [14, 14, 0]
        for found in simulate(mesh, load):
            assert torch.equal(found, expected)


def test_lengths_outside_of_the_columns_are_refused() -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 2, 3)
    for wrong in ([4, 1], [-1, 0], [1], [[1, 2]]):
        with pytest.raises(ValueError, match=r"lengths is .*: must be 2 numbers from 0 to 3"):
            expert_load(params, tokens, SMALL, torch.tensor(wrong))
