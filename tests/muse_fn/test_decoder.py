"""The whole forward pass as a function: what it may depend on, and under which transforms it means the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from muse_fn.decoder import Chunk, embed, forward, hidden_states, logits
from muse_fn.kernels.norms import Gain, plain_norm
from muse_fn.kernels.pieces import Joined
from muse_fn.kernels.select import EAGER, REFERENCE
from muse_fn.params.config import Config
from muse_fn.params.schema import sparse_layers
from muse_fn.params.tree import Params, from_named, map_tensors, named, tensors
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.split import shard
from tests.models import (
    FULL,
    SEEDS,
    SLIDING,
    SMALL,
    close,
    configs,
    far,
    random_params,
    random_tokens,
    snapshot,
    unchanged,
)


@torch.no_grad()
def run(params: Params, tokens: Tensor, config: Config) -> Tensor:
    return forward(params, tokens, config)


@given(configs(), SEEDS, st.integers(1, 11))
def test_earlier_logits_do_not_know_later_tokens(config: Config, seed: int, cut: int) -> None:
    params, tokens = random_params(config, seed), random_tokens(config, seed, 2, 12)
    changed = torch.cat([tokens[:, :cut], random_tokens(config, seed + 1, 2, 12 - cut)], 1)
    base = run(params, tokens, config)
    close(run(params, changed, config)[:, :cut], base[:, :cut])
    close(run(params, tokens[:, :cut], config), base[:, :cut])


ALL_SLIDING = st.integers(1, 3).flatmap(lambda n: configs(layers=n, layer_types=(SLIDING,) * n, qk_scale_factor=0.5))


@given(ALL_SLIDING, SEEDS)
def test_layers_that_slide_see_layers_times_window_minus_one_back(config: Config, seed: int) -> None:
    """By derivatives: over three windows what the furthest token adds may be below the last bit of the logits."""
    reach = config.layers * (config.window - 1)
    config = replace(config, vocab_size=reach + 3)
    params, tokens = random_params(config, seed), torch.arange(reach + 3)  # a row of the embedding for each place

    def last(embedding: Tensor) -> Tensor:
        found = forward(params._replace(embed=embedding), tokens[None], config)[0, -1]
        return found @ torch.linspace(1, 2, config.vocab_size)

    assert isinstance(params.embed, Tensor)
    *outside, edge = grad(last)(params.embed)[:3].abs().amax(-1).tolist()
    assert outside == [0, 0]
    assert edge > 0
    changed = torch.cat([tokens[:2].flip(0), tokens[2:]])
    close(run(params, changed[None], config)[:, -1], run(params, tokens[None], config)[:, -1], 1e-6)


@pytest.mark.parametrize("full", [0, 1, 2])
def test_one_global_layer_sees_everything(full: int) -> None:
    types = tuple(FULL if i == full else SLIDING for i in range(3))
    config = replace(SMALL, window=2, layer_types=types)
    params, tokens = random_params(config, 0), random_tokens(config, 0, 1, 20)
    first = torch.cat([(tokens[:, :1] + 1) % config.vocab_size, tokens[:, 1:]], 1)
    far(run(params, first, config)[:, -1], run(params, tokens, config)[:, -1], 1e-4)


@given(configs(), SEEDS)
def test_batch_neighbours_do_not_matter(config: Config, seed: int) -> None:
    params, tokens = random_params(config, seed), random_tokens(config, seed, 4, 6)
    together = run(params, tokens, config)
    for row, alone in zip(tokens, together, strict=True):
        close(run(params, row[None], config)[0], alone)


@given(configs(), SEEDS)
def test_vmap_is_the_loop(config: Config, seed: int) -> None:
    params, tokens = random_params(config, seed), random_tokens(config, seed, 3, 2, 6)
    mapped = vmap(run, in_dims=(None, 0, None))(params, tokens, config)
    close(mapped, torch.stack([run(params, rows, config) for rows in tokens]))


def loss(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Next-token loss of one sequence."""
    logp = forward(params, tokens[None, :-1], config)[0].log_softmax(-1)
    return -logp.gather(-1, tokens[1:, None]).mean()


@settings(max_examples=8)
@given(configs(max_layers=2, expert_size=6, post_norm_eps=1e-2), SEEDS)
def test_vmap_of_grad_is_the_loop(config: Config, seed: int) -> None:
    """Per-sample gradients: one call for the batch equals one gradient per sequence. The limit is a share of the
    tensor's gradient, or of all where the tensor's own is a difference of equals (a norm of one value)."""
    params, tokens = random_params(config, seed), random_tokens(config, seed, 3, 6)
    mapped = vmap(grad(loss), in_dims=(None, 0, None))(params, tokens, config)
    for i, row in enumerate(tokens):
        alone = named(grad(loss)(params, row, config))
        whole = torch.stack([x.norm() for x in tensors(alone)]).norm()
        for path, each in named(map_tensors(lambda t, i=i: t[i], mapped)).items():
            expected = alone[path]
            assert isinstance(each, Tensor)
            assert isinstance(expected, Tensor)
            assert (each - expected).norm() <= 1e-4 * expected.norm() + 1e-6 * whole, path


@given(configs(), SEEDS)
def test_nothing_is_modified_and_modes_do_not_matter(config: Config, seed: int) -> None:
    params, tokens = random_params(config, seed), random_tokens(config, seed, 2, 5)
    before = snapshot((params, tokens))
    plain = forward(params, tokens, config)
    assert plain.dtype == torch.float32
    assert torch.equal(run(params, tokens, config), plain)
    with torch.inference_mode():
        assert torch.equal(forward(params, tokens, config), plain)
    grad(loss)(params, tokens[0], config)
    unchanged((params, tokens), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tensor_is_made_in_the_default_dtype(dtype: torch.dtype) -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 2, 9)
    expected = run(params, tokens, SMALL)
    torch.set_default_dtype(dtype)
    try:
        found = run(params, tokens, SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_no_tensor_is_made_on_the_default_device() -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 2, 9)
    with torch.device("meta"):
        assert run(params, tokens, SMALL).device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_stream_is_float32_whatever_the_weights(dtype: torch.dtype) -> None:
    params, tokens = random_params(SMALL, 0, dtype), random_tokens(SMALL, 0, 2, 9)
    pos = torch.arange(9).expand(2, 9)
    h, kv, _ = hidden_states(params, [Chunk(tokens, pos)], (), SMALL, EAGER)
    assert h.dtype == torch.float32
    assert kv == ()
    out = run(params, tokens, SMALL)
    assert out.dtype == torch.float32
    wide = map_tensors(torch.Tensor.float, params)
    close(out, run(wide, tokens, SMALL), 0.05)
    # No rounding of the stream: were it in `dtype`, every value would be its own rounding.
    assert (h != h.to(dtype).float()).float().mean() > 0.9


def test_a_mesh_must_reach_its_ranks_and_the_parameters_be_its_share() -> None:
    config = replace(SMALL, vocab_size=64)
    params, tokens = random_params(config, 0), random_tokens(config, 0, 1, 3)
    assert torch.equal(forward(params, tokens, config, Mesh()), forward(params, tokens, config))
    with pytest.raises(ValueError, match=r"not this rank's.*layers\.0\.attn\.q"):
        forward(params, tokens, config, Mesh(tp=2))
    with pytest.raises(ValueError, match="cannot reach the others"):
        forward(shard(params, config, Mesh(tp=2)), tokens, config, Mesh(tp=2))


@pytest.mark.parametrize("wrong", [-1, 61, 2**40])
def test_tokens_outside_of_the_vocabulary_are_refused(wrong: int) -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 2, 3)
    tokens[1, 1] = wrong
    with pytest.raises(ValueError, match=f"id {wrong}: ids go from 0 to 60"):
        forward(params, tokens, SMALL)


def test_tokens_of_another_kind_are_refused() -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 2, 5)
    assert torch.equal(run(params, tokens.int(), SMALL), run(params, tokens, SMALL))
    for wrong in (tokens[0], tokens[None], tokens[:, :0], tokens[:0], tokens.float(), tokens.tolist()):
        with pytest.raises(ValueError, match=r"^tokens is .*: must be int64 or int32 \[B, T\], neither of them 0$"):
            forward(params, wrong, SMALL)  # pyright: ignore[reportArgumentType]


def test_a_tied_head_is_the_embedding() -> None:
    params, tokens = random_params(SMALL, 0), random_tokens(SMALL, 0, 1, 5)
    tied = run(params._replace(head=()), tokens, SMALL)
    assert torch.equal(tied, run(params._replace(head=params.embed), tokens, SMALL))
    far(tied, run(params, tokens, SMALL))


@given(SEEDS, st.sampled_from([0.0, 5.0, 20.0]), st.sampled_from([0.1767766952966369, 1.0]))
def test_head_scales_then_caps(seed: int, cap: float, multiplier: float) -> None:
    config = replace(SMALL, soft_cap=cap, output_multiplier=multiplier, rms_norm_eps=0.1)
    params, h = random_params(config, seed), torch.randn(3, 4, 16) * 2
    assert isinstance(params.head, Tensor)
    assert isinstance(params.norm, Tensor)
    z = (plain_norm(h, 0.1) * params.norm).double() @ params.head.double().T * multiplier
    close(logits(params, h, config, REFERENCE), cap * torch.tanh(z / cap) if cap else z)


@given(SEEDS, st.integers(1, 200))
def test_embedding_rows_are_normed(seed: int, scale: int) -> None:
    config = replace(SMALL, rms_norm_eps=1e-2)
    params, tokens = random_params(config, seed), random_tokens(config, seed, 2, 3)
    rows = params.embed[tokens].double()
    norm = (rows.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    close(embed(params, tokens, config), (rows / norm).flatten(0, 1), 1e-6)
    config = replace(SMALL, rms_norm_eps=1e-30)
    close(embed(params._replace(embed=params.embed * scale), tokens, config), embed(params, tokens, config), 1e-6)


@given(configs(), SEEDS, st.integers(-6, 6))
def test_the_size_of_a_branch_is_lost_in_its_norm(config: Config, seed: int, power: int) -> None:
    """Both branches are normed before the gate, so the last matrix of each may have any positive factor."""
    config = replace(config, post_norm_eps=1e-30)
    params, tokens = random_params(config, seed), random_tokens(config, seed, 1, 6)
    factor = 2.0**power

    def last(path: str) -> bool:
        return path.endswith((".o", ".expand")) or (path.endswith(".down") and "experts" not in path)

    scaled = map_last(params, config, last, factor)
    close(run(scaled, tokens, config), run(params, tokens, config))


def map_last(params: Params, config: Config, which: Callable[[str], bool], factor: float) -> Params:
    """The parameters with those whose path satisfies `which` times factor."""
    return from_named(
        sparse_layers(config),
        {path: w * factor if which(path) and isinstance(w, Tensor) else w for path, w in named(params).items()},
    )


@pytest.mark.parametrize("narrow", [0, 1])
def test_a_layer_gets_the_stream_in_its_own_dtype(narrow: int) -> None:
    """Not in that of the layer before, which norms it for this one."""
    config = replace(SMALL, layers=2, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    params, seen = random_params(config, 0), list[torch.dtype]()
    layers = [map_tensors(Tensor.bfloat16, p) if n == narrow else p for n, p in enumerate(params.layers)]

    def normed(x: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return REFERENCE.normed(x, norm, eps, dtype)

    def join(*args: Any) -> Joined:
        seen.append(args[-1])
        return REFERENCE.join(*args)

    ops = replace(REFERENCE, normed=normed, join=join)
    forward(params._replace(layers=tuple(layers)), torch.arange(6)[None], config, ops=ops)
    starts = [seen[0], seen[2]]  # normed for layer 0, a join, the join that ends layer 0
    assert starts == [torch.bfloat16 if n == narrow else torch.float32 for n in (0, 1)]
