"""The least work of a step: it grows with the batch, and all ranks together do the model's and the repeated work."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.floors import Step, collectives, keys_read, keys_seen, work_of_stage
from muse_fn.footprint import (
    stages,
    weights,
)
from muse_fn.kvcache.cache import View, init_cache, own_blocks
from muse_fn.params.init import init_params
from muse_fn.plan import bytes_of
from muse_fn.sample import Sampling, draws, sample
from muse_fn.sharding import division
from muse_fn.sharding.division import LONG
from muse_fn.sharding.mesh import STAGE, Link, Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import prefill
from tests.planned import FORMAT, MODEL, meshes, step_of


@given(meshes(), st.integers(1, 40), st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_floors_grow_with_the_batch_and_stay_below_what_is_held(mesh: Mesh, batch: int, context: int) -> None:
    now, later = (step_of(MODEL, mesh, size, context) for size in (batch, batch + 1))
    for name in now.mean:
        assert now.mean[name].bytes <= later.mean[name].bytes
        assert now.mean[name].flops <= later.mean[name].flops
    assert now.total <= later.total * 1.02  # the slowest card of several tokens is simulated
    assert bytes_of(now.mean) <= bytes_of(now.slowest) * 1.02
    kept = {"cache", "embedding"}
    largest = max(sum(weights(MODEL, stage, "quark-mxfp4").values()) for stage in stages(mesh))
    assert sum(work.bytes for name, work in now.slowest.items() if name not in kept) <= largest


@given(meshes(), st.integers(1, 9), FORMAT)
@settings(deadline=None)
def test_operations_of_all_ranks_are_the_model_s_and_the_repeated_ones(mesh: Mesh, batch: int, format: str) -> None:
    """Attention, experts, dense layers and head are computed once; routers, and squeeze if replicated, everywhere."""
    step = Step(batch, 1, 3)
    one = work_of_stage(MODEL, Mesh(), format, "bf16", step, 8)
    ranks = mesh.size(STAGE)
    together = Counter[str]()
    for stage in stages(mesh):
        for name, work in work_of_stage(MODEL, stage, format, "bf16", step, 8 / mesh.ep).items():
            together[name] += round(ranks * (work.flops + work.float32_flops) * 840)
    repeated_kv = 1 if ranks <= MODEL.kv_heads else ranks // MODEL.kv_heads
    for name in ("cache", "experts", "dense MLP", "head"):
        assert together[name] == round(one[name].flops * 840), name
    k_and_v = 2 * batch * MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim * MODEL.hidden_size
    assert together["attention"] == 840 * (one["attention"].flops + k_and_v * (repeated_kv - 1))
    assert together["router"] == 840 * ranks * one["router"].float32_flops
    times = ranks if mesh.squeeze == "replicated" else 1
    assert together["squeeze and expand"] == 840 * times * one["squeeze and expand"].flops


@given(meshes(), st.integers(1, 2))
@settings(deadline=None)
def test_a_divided_step_repeats_no_router_and_no_squeeze(mesh: Mesh, batch: int) -> None:
    step = Step(batch, LONG, 0)
    works = [work_of_stage(MODEL, stage, "bf16", "bf16", step, 8 / mesh.ep) for stage in stages(mesh)]
    one = work_of_stage(MODEL, Mesh(), "bf16", "bf16", step, 8)
    for name in ("router", "squeeze and expand"):
        together = sum(
            mesh.size(STAGE) * (work[name].flops + work[name].float32_flops) for work in works if name in work
        )
        assert together == one[name].flops + one[name].float32_flops, name


@given(st.integers(0, 20), st.integers(1, 20), st.sampled_from([None, 1, 3, 6, 50]))
def test_keys_are_counted_as_attention_sees_them(past: int, new: int, window: int | None) -> None:
    step = Step(1, new, past)
    seen = [
        {key for key in range(past + new) if key <= query and (window is None or query - key < window)}
        for query in range(past, past + new)
    ]
    assert keys_seen(step, window) == sum(map(len, seen))
    assert keys_read(step, window) == len(set[int]().union(*seen))


@given(meshes(), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_collectives_of_a_step(mesh: Mesh, batch: int, chunk: int) -> None:
    found = {row.name: row for row in collectives(MODEL, mesh, Step(batch, chunk, 0))}
    n, tokens = mesh.size(STAGE), batch * chunk
    if n == 1:
        assert set(found) == ({"stage to stage", "logits to all stages"} if mesh.pp > 1 else set())
        return
    rows = found["expert rows: sum"]
    assert (rows.times, found["dense output: sum"].times, found["attention output: sum"].times) == (4, 1, 5)
    assert rows.bytes == pytest.approx(2 * (n - 1) / n * 4 * tokens * MODEL.top_k * MODEL.latent_size)
    assert found["embedding: sum"].bytes == pytest.approx(2 * (n - 1) / n * 2 * tokens * MODEL.hidden_size)
    assert ("squeeze: gather" in found) == ("expand: gather" in found) == (mesh.squeeze == "split")
    if mesh.squeeze == "split":
        assert found["squeeze: gather"].bytes == pytest.approx((n - 1) / n * 2 * tokens * MODEL.latent_size)
        assert found["expand: gather"].times == 4
    handed = found["stage to stage"].times if mesh.pp > 1 else 0
    assert handed == mesh.pp - 1


class Counting:
    """A link that notes what its rank exchanges: kind, and the bytes it sends in a ring."""

    def __init__(self, link: Link, found: Counter[tuple[str, float]]) -> None:
        self._link, self._found = link, found

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._found["sum", 2 * (len(peers) - 1) / len(peers) * x.nbytes] += 1
        return self._link.all_sum(x, peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._found["scatter", (len(peers) - 1) / len(peers) * x.nbytes] += 1
        return self._link.sum_scatter(x, peers)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._found["swap", (len(peers) - 1) / len(peers) * x.nbytes] += 1
        return self._link.all_to_all(x, peers)

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._found["gather", (len(peers) - 1) * x.nbytes] += 1
        return self._link.all_gather(x, peers)

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        self._found["to all stages", x.nbytes] += 1
        return self._link.broadcast(x, source, peers)

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        if x is not None:
            self._found["stage to stage", x.nbytes] += 1
        return self._link.pass_on(x, to, into, source)


@pytest.mark.parametrize(("batch", "new"), [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize(
    "mesh", [Mesh(2, 4), Mesh(4, 2, squeeze="split"), Mesh(2, 1, 3), Mesh(1, 2, 2, "split")], ids=str
)
def test_collectives_are_those_of_the_program(
    mesh: Mesh, batch: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step and its draw, counted on one rank of every stage, against the plan: kinds, numbers and bytes. Eight tokens
    are a long step here."""
    monkeypatch.setattr(division, "LONG", 8)
    assert division.is_divided(batch * new, mesh) == (new > 1)
    params = init_params(MODEL, dtype=torch.bfloat16)
    table = own_blocks(MODEL, batch, 8, 4)
    view = View(table, torch.full((batch,), 2), torch.full((batch,), new))
    counts = {stage.rank: Counter[tuple[str, float]]() for stage in stages(mesh)}

    def run(own: Mesh) -> None:
        assert own.link is not None
        own = own.at(own.rank, Counting(own.link, counts.get(own.rank, Counter())))
        kv = init_cache(MODEL, 1 + table.numel(), 4, dtype=torch.bfloat16, mesh=own)
        share, tokens = shard(params, MODEL, own), torch.zeros(batch, new, dtype=torch.int64)
        logits, _ = prefill(share, tokens, kv, view, MODEL, own, gathered=False, microbatches=1)
        draw = draws([Sampling()] * batch, MODEL.vocab_size)
        sample(logits, draw, view.past_B + new, filtered=False, mesh=own)

    with torch.no_grad():
        simulate(mesh, run)
    found = sum(counts.values(), Counter[tuple[str, float]]())
    planned = Counter[tuple[str, float]]()
    for row in collectives(MODEL, mesh, Step(batch, new, 2)):
        kind = row.name.rpartition(": ")[2] if ":" in row.name else row.name.removeprefix("logits ")
        once_a_stage = row.name in ("logits to all stages", "largest logits: gather", "choices: gather")
        planned[kind, row.bytes] += row.times * (mesh.pp if once_a_stage else 1)
    assert found == planned
