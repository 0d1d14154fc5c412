"""Long steps, which ranks divide by tokens, against one rank's; what each rank then does; and which steps these are."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import muse_fn
from muse_fn.buckets import Piece
from muse_fn.captured_prefill import capture_reads
from muse_fn.decoder import forward
from muse_fn.kernels.select import EAGER, Ops
from muse_fn.kvcache.cache import View, init_cache, own_blocks
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.sharding.division import LONG, Division, is_divided
from muse_fn.sharding.mesh import STAGE, Link, Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import advance, decode, prefill
from tests.models import close, random_params, random_tokens

NANO = muse_fn.load(Path(muse_fn.__file__).parent / "nano")
MIXED = replace(NANO.config, mlp_layer_types=("sparse", "dense") * 3)
LAYOUTS = [Mesh(1, 2), Mesh(2, 1), Mesh(2, 2), Mesh(2, 4), Mesh(1, 2, pp=2), Mesh(2, 2, pp=2)]
MESHES = [replace(mesh, squeeze=squeeze) for mesh in LAYOUTS for squeeze in ("replicated", "split")]
Calls = Counter[tuple[str, torch.dtype, tuple[int, ...]]]  # kind, dtype, shape behind the first dimension


class Counting:
    """A link that counts the calls of the layers, which all have peers in their stage."""

    def __init__(self, link: Link) -> None:
        self._link, self.found = link, Calls()
        self.broadcast, self.pass_on = link.broadcast, link.pass_on

    def _count(self, kind: str, x: Tensor) -> None:
        self.found[kind, x.dtype, tuple(x.shape[1:])] += 1

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._count("sum", x)
        return self._link.all_sum(x, peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._count("scatter", x)
        return self._link.sum_scatter(x, peers)

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._count("gather", x)
        return self._link.all_gather(x, peers)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        self._count("swap", x)
        return self._link.all_to_all(x, peers)


def counted(params: Params, config: Config, mesh: Mesh, tokens: Tensor, ops: Ops = EAGER) -> list[tuple[Tensor, Calls]]:
    """The logits on every rank, and its calls."""

    def run(m: Mesh) -> tuple[Tensor, Calls]:
        assert m.link is not None
        link = Counting(m.link)
        return forward(shard(params, config, m), tokens, config, m.at(m.rank, link), ops=ops), link.found

    with torch.no_grad():
        return simulate(mesh, run)


@pytest.mark.parametrize(("batch", "length"), [(1, LONG), (3, 96), (2, 129)])
@pytest.mark.parametrize("config", [NANO.config, MIXED], ids=["nano", "mixed"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_of_long_steps_equal_one_rank(mesh: Mesh, config: Config, batch: int, length: int) -> None:
    """Four ranks and eight cannot divide 258 tokens, and sum whole rows."""
    params = NANO.params if config is NANO.config else random_params(config, 0)
    tokens = random_tokens(config, length, batch, length)
    with torch.no_grad():
        expected = forward(params, tokens, config, ops=EAGER)
    (first, _), *_ = found = counted(params, config, mesh, tokens)
    close(first, expected, 1e-5)
    for logits, calls in found:
        assert torch.equal(logits, first)
        sums = {kind for kind, _, _ in calls} - {"gather", "swap"}
        assert sums == ({"sum"} if batch * length % mesh.size(STAGE) else {"scatter"})


def layer_calls(config: Config, ranks: int, split: bool) -> Calls:
    """Of one divided step in bfloat16, every layer with experts: what travels, how often, in which dtype."""
    half, float32, layers = torch.bfloat16, torch.float32, config.layers
    hidden, latent = config.hidden_size, config.latent_size
    found = Calls({
        ("scatter", half, (hidden,)): 1,  # rows of the embedding, others zeros
        ("gather", half, (hidden,)): layers * (2 if split else 1),  # into attention; into squeeze
        ("scatter", float32, (hidden,)): layers,
        ("gather", float32, (config.experts,)): layers,
        ("gather", half, (latent // ranks if split else latent,)): layers,
        ("scatter", float32, (config.top_k, latent)): layers,
        ("gather", float32, (hidden,)): 1,  # the stream, after the last layer
        ("gather", float32, (LONG, config.vocab_size // ranks)): 1,  # logits
    })  # fmt: skip
    more = {("gather", half, (latent,)): layers, ("swap", half, (hidden // ranks,)): layers}
    return found + Calls(more) if split else found


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 4, squeeze="split")], ids=str)
def test_what_travels_in_a_divided_step(mesh: Mesh) -> None:
    """Sums of products in float32, and what a product rounds in the dtype to which it does."""
    params, tokens = random_params(NANO.config, 0, torch.bfloat16), random_tokens(NANO.config, 1, 1, LONG)
    for _, calls in counted(params, NANO.config, mesh, tokens):
        assert calls == layer_calls(NANO.config, 4, mesh.squeeze == "split")


@pytest.mark.parametrize("squeeze", ["replicated", "split"])
def test_each_rank_works_on_its_own_tokens_between_products(squeeze: Any) -> None:
    rows = dict[str, set[int]]()

    def noted(name: str, at: int) -> Any:
        def op(*args: Any, **kwargs: Any) -> Any:
            rows.setdefault(name, set()).add(args[at].shape[-2 if name == "join" else 0])
            return getattr(EAGER, name)(*args, **kwargs)

        return op

    ops = replace(EAGER, **{name: noted(name, 0) for name in ("join", "blend", "choose", "expert_rows")})
    counted(NANO.params, NANO.config, Mesh(2, 2, squeeze=squeeze), random_tokens(NANO.config, 0, 2, LONG // 2), ops)
    assert rows == {"join": {LONG // 4}, "blend": {LONG // 4}, "choose": {LONG}, "expert_rows": {LONG}}


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 2, 2, "split")], ids=str)
def test_steps_over_a_cache_equal_one_rank(mesh: Mesh) -> None:
    """Two ragged prompts in a long chunk, cut into as many as there are stages, then a step that is not divided."""
    config, length = NANO.config, 2 * LONG
    tokens, table = random_tokens(config, 0, 2, length + 1), own_blocks(config, 2, length + 1, 16)
    view = View(table, torch.tensor([0, 0]), torch.tensor([length, length - 300]))

    def steps(p: Params, m: Mesh) -> Tensor:
        kv = init_cache(config, 1 + table.numel(), 16, mesh=m)
        z, kv = prefill(p, tokens[:, :-1], kv, view, config, m, ops=EAGER)
        step, _ = decode(p, tokens[:, -1:], kv, advance(view), config, m, ops=EAGER)
        return torch.cat([z, step[:, 0]])

    with torch.no_grad():
        expected = steps(NANO.params, Mesh())
        for found in simulate(mesh, lambda m: steps(shard(NANO.params, config, m), m)):
            close(found, expected, 1e-5)


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 2, squeeze="split")], ids=str)
def test_a_captured_piece_is_divided_too(mesh: Mesh) -> None:
    """300 tokens padded to 512."""
    config, tokens, table = NANO.config, random_tokens(NANO.config, 0, 1, 300), own_blocks(NANO.config, 1, 300, 16)
    view = View(table, torch.tensor([0]), torch.tensor([300]))

    def read(m: Mesh) -> tuple[Tensor, Calls]:
        assert m.link is not None
        link, p = Counting(m.link), shard(NANO.params, config, m)
        m = m.at(m.rank, link)
        kv = init_cache(config, 1 + table.numel(), 16, dtype=torch.float32, mesh=m)
        steps, kv = capture_reads(p, kv, config, m, sizes=[Piece(512, table.shape[2])])
        found, _ = steps(tokens, view, kv)
        return found.clone(), link.found

    with torch.no_grad():
        expected = forward(NANO.params, tokens, config)[:, -1]
        found = simulate(mesh, read)
    close(torch.cat([z for z, _ in found], 1), expected, 1e-5)
    assert all({kind for kind, _, _ in calls} - {"gather", "swap"} == {"scatter"} for _, calls in found)


def test_what_is_divided() -> None:
    assert is_divided(LONG, Mesh(2, 4))
    assert not is_divided(LONG - 8, Mesh(2, 4)), "short"
    assert not is_divided(LONG + 4, Mesh(2, 4)), "not as many for each rank"
    assert not is_divided(LONG, Mesh(pp=4)), "alone in its stage"


def test_what_is_whole_of_one_rank_is_not_touched() -> None:
    x, alone = torch.ones(4, 2), Division()
    assert alone.own(x) is alone.summed(x) is alone.whole(x, torch.bfloat16) is x
    assert alone.parts(x, ()).data_ptr() == x.data_ptr()
