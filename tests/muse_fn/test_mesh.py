"""The model on every mesh against one rank: logits, steps over a cache, drawn tokens, routes; simulated ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muse_fn
from muse_fn.decoder import forward
from muse_fn.generation import Output, Settings, generate, score
from muse_fn.kvcache.cache import View, init_cache, own_blocks
from muse_fn.params.config import Config
from muse_fn.params.tree import MoE, Params
from muse_fn.sample import Sampling
from muse_fn.sharding.mesh import Link, Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import advance, decode, prefill
from tests.models import (
    MESHES,
    MORE_MESHES,
    SEEDS,
    SMALL,
    close,
    fitting_configs,
    on_arrays,
    random_params,
    random_tokens,
)

NANO = Path(muse_fn.__file__).parent / "nano"
Result = TypeVar("Result")


def on_ranks(params: Params, config: Config, mesh: Mesh, fn: Callable[[Params, Mesh], Result]) -> list[Result]:
    """fn(this rank's parameters, mesh) on every rank, without gradients."""
    with torch.no_grad():
        return simulate(mesh, lambda m: fn(shard(params, config, m), m))


def all_close(found: list[Tensor], expected: Tensor) -> None:
    """Raises unless every rank has the expected values, and all the same bits."""
    close(found[0], expected, 1e-5)
    for other in found[1:]:
        assert torch.equal(found[0], other)


@given(st.data(), st.sampled_from(MORE_MESHES), SEEDS, st.integers(1, 2), st.sampled_from([1, 2, 3, 7]))
def test_logits_equal_one_rank(data: st.DataObject, mesh: Mesh, seed: int, batch: int, length: int) -> None:
    config = data.draw(fitting_configs(mesh))
    params, tokens = random_params(config, seed), random_tokens(config, seed, batch, length)
    with torch.no_grad():
        expected = forward(params, tokens, config)
    all_close(on_ranks(params, config, mesh, lambda p, m: forward(p, tokens, config, m)), expected)


@pytest.mark.parametrize("length", [1, 2, 3, 20])
@pytest.mark.parametrize("mesh", MORE_MESHES, ids=str)
def test_logits_of_the_embedded_model_equal_one_rank(mesh: Mesh, length: int) -> None:
    model = muse_fn.load(NANO)
    tokens = random_tokens(model.config, length, 1, length)
    with torch.no_grad():
        expected = forward(model.params, tokens, model.config)
    all_close(on_ranks(model.params, model.config, mesh, lambda p, m: forward(p, tokens, model.config, m)), expected)


@given(st.data(), st.sampled_from(MORE_MESHES), SEEDS, st.integers(1, 9), st.integers(1, 4))
def test_steps_over_a_cache_equal_one_rank(
    data: st.DataObject, mesh: Mesh, seed: int, length: int, microbatches: int
) -> None:
    """Two ragged prompts in one chunk cut into microbatches, then two decode steps; every logit gathered or shared."""
    config = data.draw(fitting_configs(mesh))
    params, tokens = random_params(config, seed), random_tokens(config, seed, 2, length + 2)
    counts = torch.tensor([length, 1 + seed % length])
    table = own_blocks(config, 2, length + 2, 4)

    def steps(p: Params, m: Mesh) -> list[Tensor]:
        kv = init_cache(config, 1 + table.numel(), 4, mesh=m)
        view, found = View(table, torch.tensor([0, 0]), counts), list[Tensor]()
        for n in range(3):
            if n == 0:
                z, kv = prefill(p, tokens[:, :length], kv, view, config, m, microbatches=microbatches)
            else:
                z, kv = decode(p, tokens[:, length + n - 1 :][:, :1], kv, view, config, m)
            found.append(z.flatten(0, -2))
            view = advance(view)
        return found

    with torch.no_grad():
        expected = torch.cat(steps(params, Mesh()))
    all_close([torch.cat(found) for found in on_ranks(params, config, mesh, steps)], expected)


@pytest.mark.parametrize("mesh", [m for m in MESHES if m.ranks > 1], ids=str)
def test_shares_of_the_logits_are_the_logits(mesh: Mesh) -> None:
    model = muse_fn.load(NANO)
    config, tokens, table = model.config, random_tokens(model.config, 0, 1, 5), own_blocks(model.config, 1, 5, 4)
    view = View(table, torch.tensor([0]), torch.tensor([5]))

    def both(p: Params, m: Mesh) -> list[Tensor]:
        found: list[Tensor] = []
        for gathered in (True, False):
            kv = init_cache(config, 1 + table.numel(), 4, mesh=m)
            found.append(prefill(p, tokens, kv, view, config, m, gathered=gathered)[0])
        return found

    each = config.vocab_size // mesh.size(("ep", "tp"))
    for rank, (whole, share) in enumerate(on_ranks(model.params, config, mesh, both)):
        start = mesh.at(rank).index(("ep", "tp")) * each
        assert torch.equal(share, whole[:, start : start + each])


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, seed=4),
    Sampling(temperature=3.0, top_p=0.7, seed=5),
]


@pytest.mark.parametrize(
    ("mesh", "sampling"),
    [(mesh, sampling) for mesh in MORE_MESHES for sampling in SAMPLINGS[::2]]
    + [(mesh, sampling) for mesh in (Mesh(2, 4), Mesh(1, 2, pp=2)) for sampling in SAMPLINGS[1::2]],
    ids=str,
)
def test_drawn_tokens_are_identical(mesh: Mesh, sampling: Sampling) -> None:
    model = muse_fn.load(NANO)
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text) for text in ("two plus two", "a", "Hello there, how")]
    settings = Settings(max_new_tokens=8, sampling=sampling, stop_tokens=())
    expected = generate(model, prompts, settings)
    for found in on_ranks(
        model.params, model.config, mesh, lambda p, m: generate(model._replace(params=p), prompts, settings, m)
    ):
        assert found == expected


@pytest.mark.parametrize("mesh", [Mesh(2, 4), Mesh(1, 2, pp=2)], ids=str)
def test_scores_equal_one_rank(mesh: Mesh) -> None:
    model = muse_fn.load(NANO)
    ids = random_tokens(model.config, 1, 30).tolist()
    expected = torch.tensor(score(model, ids)[1:])
    for found in on_ranks(model.params, model.config, mesh, lambda p, m: score(model._replace(params=p), ids, m)):
        assert found[0] is None
        close(torch.tensor(found[1:]), expected, 1e-5)


class Listening:
    """A link that notes the dtype and width of every sum."""

    def __init__(self, link: Link, heard: list[tuple[torch.dtype, int]]) -> None:
        self._link, self._heard = link, heard
        self.all_gather, self.broadcast, self.pass_on = link.all_gather, link.broadcast, link.pass_on
        self.sum_scatter, self.all_to_all = link.sum_scatter, link.all_to_all

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._heard.append((x.dtype, x.shape[-1]))
        return self._link.all_sum(x, peers)


def test_partial_products_are_summed_in_float32_whatever_the_weights() -> None:
    """One sum per layer for attention, one for its experts' rows or its dense part; the embedding adds zeros only."""
    config = replace(SMALL, vocab_size=62, latent_size=14, mlp_layer_types=("sparse", "dense", "sparse"))
    params, tokens = random_params(config, 0, torch.bfloat16), random_tokens(config, 0, 1, 3)

    def sums(p: Params, m: Mesh) -> list[tuple[torch.dtype, int]]:
        assert m.link is not None
        heard: list[tuple[torch.dtype, int]] = []
        forward(p, tokens, config, m.at(m.rank, Listening(m.link, heard)))
        return heard

    for (first, _), *others in on_ranks(params, config, Mesh(tp=2), sums):
        assert first == torch.bfloat16
        assert others == [(torch.float32, width) for width in (16, 14, 16, 16, 16, 14)]


def towards(params: Params, expert: int) -> Params:
    """Every token takes this expert, and those with the lowest ids beside it."""

    def pull(mlp: MoE) -> MoE:
        ids = torch.arange(len(mlp.router.bias))
        return mlp._replace(router=mlp.router._replace(bias=100.0 - ids + 1000.0 * (ids == expert)))

    layers = [p._replace(mlp=pull(p.mlp)) if isinstance(p.mlp, MoE) else p for p in params.layers]
    return params._replace(layers=tuple(layers))


@pytest.mark.parametrize("expert", [0, 7])
@pytest.mark.parametrize("mesh", [Mesh(8, 1), Mesh(2, 4), Mesh(4, 2)], ids=str)
def test_ranks_without_work_give_zeros_and_nothing_uninitialised_is_read(mesh: Mesh, expert: int) -> None:
    """Trial 34: all tokens to two experts of one or two ranks, caches full of NaN outside of what is written, twice."""
    model = muse_fn.load(NANO)
    params = towards(model.params, expert)
    tokens, table = random_tokens(model.config, 0, 1, 6), own_blocks(model.config, 1, 8, 2)

    def steps(p: Params, m: Mesh) -> Tensor:
        found: list[Tensor] = []
        for _ in range(2):
            kv = init_cache(model.config, 3 + table.numel(), 2, mesh=m)
            kv = on_arrays(lambda t: torch.full_like(t, torch.nan), kv)
            view = View(table, torch.tensor([0]), torch.tensor([5]))
            z, kv = prefill(p, tokens[:, :5], kv, view, model.config, m)
            step, kv = decode(p, tokens[:, 5:], kv, advance(view), model.config, m)
            found += [z, step[:, 0]]
        return torch.cat(found)

    with torch.no_grad():
        expected = steps(params, Mesh())
    assert torch.isfinite(expected).all()
    assert torch.equal(expected[:2], expected[2:])
    all_close(on_ranks(params, model.config, mesh, steps), expected)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_row_that_is_bad_on_one_rank_is_an_error_on_all_and_its_neighbour_an_answer(rank: int) -> None:
    """Only one rank's share of the vocabulary has the NaN, and only after a certain token."""
    model, mesh = muse_fn.load(NANO), Mesh(2, 4)
    settings = Settings(max_new_tokens=4, stop_tokens=())
    (expected,) = generate(model, [[5, 6]], settings)

    def run(p: Params, m: Mesh) -> list[Output]:
        assert isinstance(p.embed, Tensor)
        embed = p.embed.clone()
        if m.rank == rank:  # its row of the table is NaN: token 7 or 647 makes a NaN on every rank
            embed[7] = torch.nan
        bad = 7 + rank * len(embed)
        return generate(model._replace(params=p._replace(embed=embed)), [[5, bad], [5, 6]], settings, m)

    for bad, good in on_ranks(model.params, model.config, mesh, run):
        assert bad == ((), "error")
        assert good == expected


def test_one_rank_needs_no_link() -> None:
    config = replace(muse_fn.load(NANO).config, vocab_size=24)
    params, tokens = random_params(config, 0), random_tokens(config, 0, 1, 3)
    assert torch.equal(forward(params, tokens, config, Mesh()), forward(params, tokens, config))


class Watched:
    """A rank's link that remembers the dtypes of what is summed, but for the rows of the embedding."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sums: list[torch.dtype] = []

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self.sums.append(x.dtype)
        return self.link.all_sum(x, peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        raise AssertionError("a short step is not divided")

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        raise AssertionError("a short step is not divided")

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return self.link.all_gather(x, peers)

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        return self.link.broadcast(x, source, peers)

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        return self.link.pass_on(x, to, into, source)


def test_partial_rows_of_a_bfloat16_model_are_summed_in_float32() -> None:
    """Once for the embedding, whose rows are on one rank each, then twice a layer: attention, and experts or dense."""
    config = replace(muse_fn.load(NANO).config, mlp_layer_types=("sparse", "dense") * 3)
    params, tokens = random_params(config, 0, torch.bfloat16), random_tokens(config, 0, 1, 3)

    def run(p: Params, m: Mesh) -> list[torch.dtype]:
        assert m.link is not None
        watched = Watched(m.link)
        forward(p, tokens, config, m.at(m.rank, watched))
        return watched.sums

    for sums in on_ranks(params, config, Mesh(2, 2), run):
        assert sums == [torch.bfloat16] + [torch.float32] * 12
