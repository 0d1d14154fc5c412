"""The latent mixture of experts: against the equations in float64, and the laws of routing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import pieces
from muse_fn.kernels.norms import gain
from muse_fn.kernels.pieces import Chosen, Routes
from muse_fn.kernels.select import EAGER, REFERENCE, Ops
from muse_fn.moe import MoEScales, dense, mlp, moe
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, Experts, MoE, Router
from tests.models import SEEDS, SMALL, close, configs, far, random_params, snapshot, unchanged

OPS = st.sampled_from([EAGER, REFERENCE])
SPARSE = configs(layers=1, mlp_layer_types=("sparse",))


def tokens(config: Config, seed: int, count: int) -> Tensor:
    """Rows of a normed stream, as the block gets them."""
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def sparse(config: Config, seed: int) -> MoE:
    p = random_params(config, seed).layers[0].mlp
    assert isinstance(p, MoE)
    return p


def weights(expert: Experts) -> tuple[Tensor, Tensor]:
    assert isinstance(expert.gate_up, Tensor)
    assert isinstance(expert.down, Tensor)
    return expert.gate_up, expert.down


def route(p: Router, m: Tensor, config: Config) -> Routes:
    """The experts of each token, as `moe` finds them."""
    logits = REFERENCE.linear(m.float(), p.weight)
    factors = config.output_multiplier, config.routed_scaling_factor
    return pieces.route(logits, p.bias, config.top_k, *factors)


def mixed(p: MoE, m: Tensor, config: Config, ops: Ops, s: MoEScales | tuple[()] = ()) -> Tensor:
    """What `moe` makes of the tokens, its one part."""
    (out,), _ = moe(p, m, config, ops, s=s)
    return out


def unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def routes_by_hand(p: Router, m: Tensor, config: Config) -> dict[int, Tensor]:
    """Expert -> weight for one token, in float64."""
    scores = 1 / (1 + (-(p.weight.double() @ m.double()) * config.output_multiplier).exp())
    order = sorted(range(config.experts), key=lambda e: -(scores[e] + p.bias[e].double()).item())
    chosen = order[: config.top_k]
    total = sum(scores[e].item() for e in chosen) + 1e-15
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


def by_hand(p: MoE, m: Tensor, config: Config) -> Tensor:
    """The published equations for one token, expert by expert, in float64."""
    u = unit(p.squeeze.double() @ m.double(), config.rms_norm_eps) * (1 + p.squeeze_norm.double())
    gate_up, down = (w.double() for w in weights(p.experts))
    out = torch.zeros(config.latent_size, dtype=torch.float64)
    for e, weight in routes_by_hand(p.router, m, config).items():
        gate, up = gate_up[e, : config.expert_size] @ u, gate_up[e, config.expert_size :] @ u
        y = down[e] @ (silu(gate) * up)
        out += unit(y * (1 + p.experts.norm.double()), config.post_norm_eps) * weight
    return p.expand.double() @ out


@given(SPARSE, SEEDS, st.integers(1, 9), OPS)
def test_matches_the_equations_in_float64(config: Config, seed: int, count: int, ops: Ops) -> None:
    p, m = sparse(config, seed), tokens(config, seed + 1, count)
    close(mixed(p, m, config, ops), torch.stack([by_hand(p, row, config) for row in m]), 1e-5)


@given(configs(layers=1, mlp_layer_types=("sparse",), rms_norm_eps=0.5, post_norm_eps=0.1), SEEDS)
def test_eps_of_both_norms_is_felt(config: Config, seed: int) -> None:
    p, m = sparse(config, seed), tokens(config, seed + 1, 3)
    close(mixed(p, m, config, EAGER), torch.stack([by_hand(p, row, config) for row in m]), 1e-5)


@given(configs(layers=1, mlp_layer_types=("dense",)), SEEDS, OPS)
def test_dense_matches_the_equations_in_float64(config: Config, seed: int, ops: Ops) -> None:
    p, m = random_params(config, seed).layers[0].mlp, tokens(config, seed + 1, 4)
    assert isinstance(p, Dense)
    gate, up, down = (w.double() for w in p)
    close(dense(p, m, ops), (silu(m.double() @ gate.T) * (m.double() @ up.T)) @ down.T, 1e-5)


@given(SPARSE, SEEDS, st.integers(1, 9))
def test_routes(config: Config, seed: int, count: int) -> None:
    p, m = sparse(config, seed).router, tokens(config, seed + 1, count)
    routes = route(p, m, config)
    assert routes.idx_TR.dtype == torch.int64
    assert routes.weight_TR.dtype == torch.float32
    for row, idx, weight in zip(m, *routes, strict=True):
        expected = routes_by_hand(p, row, config)
        assert idx.tolist() == sorted(expected), "each expert once, in ascending order"
        close(weight, torch.stack([expected[e] for e in idx.tolist()]), 1e-6)
    close(routes.weight_TR.sum(-1), torch.full((count,), config.routed_scaling_factor), 1e-6)


@given(SPARSE, SEEDS, st.floats(-3, 3))
def test_bias_changes_the_choice_and_never_the_weights(config: Config, seed: int, strength: float) -> None:
    p, m = sparse(config, seed).router, tokens(config, seed + 1, 20)
    bias = strength * torch.randn(config.experts, generator=torch.Generator().manual_seed(seed + 2))
    routes = route(p._replace(bias=bias), m, config)
    scores = torch.sigmoid(m @ p.weight.T * config.output_multiplier)
    chosen = scores.gather(-1, routes.idx_TR)
    close(routes.weight_TR, chosen / chosen.sum(-1, keepdim=True) * config.routed_scaling_factor, 1e-6)
    worst = (scores + bias).gather(-1, routes.idx_TR).amin(-1, keepdim=True)
    better = (scores + bias > worst).sum(-1)
    assert (better < config.top_k).all(), "no expert left out has a higher biased score than one taken"


def test_bias_does_change_the_choice() -> None:
    config = replace(SMALL, top_k=2)
    p, m = sparse(config, 0).router, tokens(config, 1, 20)
    wanted = torch.zeros(config.experts)
    wanted[[1, 4]] = 10.0
    assert (route(p._replace(bias=wanted), m, config).idx_TR == torch.tensor([1, 4])).all()
    assert not (route(p, m, config).idx_TR == torch.tensor([1, 4])).all()


def test_without_router_weights_the_bias_alone_chooses_and_weights_are_equal() -> None:
    config = replace(SMALL, experts=6, top_k=3, routed_scaling_factor=1.0)
    p = Router(torch.zeros(6, config.hidden_size), torch.tensor([0.3, -1.0, 0.9, 0.1, 0.2, -2.0]))
    routes = route(p, tokens(config, 0, 4), config)
    assert (routes.idx_TR == torch.tensor([0, 2, 4])).all()
    close(routes.weight_TR, torch.full((4, 3), 1 / 3), 1e-7)


def test_scores_too_small_to_normalise_stay_small() -> None:
    """The sum of the chosen scores has 1e-15 added: experts that all score 4e-18 are not blown up to weight 1."""
    config = replace(SMALL, output_multiplier=1.0, routed_scaling_factor=1.0)
    p = Router(torch.full((config.experts, config.hidden_size), -40.0), torch.zeros(config.experts))
    m = torch.zeros(1, config.hidden_size)
    m[0, 0] = 1.0
    score = torch.sigmoid(torch.tensor(-40.0)).item()
    close(route(p, m, config).weight_TR / score, torch.full((1, 2), 1 / (2 * score + 1e-15)), 1e-6)


@given(SPARSE, SEEDS, st.data(), OPS)
def test_experts_have_no_order(config: Config, seed: int, data: st.DataObject, ops: Ops) -> None:
    """Experts permuted together with their router rows and biases: same output up to the order of the sum."""
    p, m = sparse(config, seed), tokens(config, seed + 1, 7)
    order = data.draw(st.permutations(range(config.experts)))
    gate_up, down = weights(p.experts)
    shuffled = p._replace(
        router=Router(p.router.weight[order], p.router.bias[order]),
        experts=p.experts._replace(gate_up=gate_up[order], down=down[order]),
    )
    close(mixed(shuffled, m, config, ops), mixed(p, m, config, ops), 1e-5)


@given(SPARSE, SEEDS, st.permutations(range(8)), OPS)
def test_tokens_do_not_meet(config: Config, seed: int, order: list[int], ops: Ops) -> None:
    p, m = sparse(config, seed), tokens(config, seed + 1, 8)
    out = mixed(p, m, config, ops)
    close(mixed(p, m[order], config, ops), out[order], 1e-5)
    close(mixed(p, m[:1], config, ops), out[:1], 1e-5)


@given(SPARSE, SEEDS, st.integers(-8, 8))
def test_a_row_counts_by_its_direction_only(config: Config, seed: int, power: int) -> None:
    """Each route's row is normed before it is weighted: its size, and so the size of down, is lost."""
    config = replace(config, post_norm_eps=1e-30)
    p, m = sparse(config, seed), tokens(config, seed + 1, 5)
    _, down = weights(p.experts)
    scaled = p._replace(experts=p.experts._replace(down=down * 2.0**power))
    close(mixed(scaled, m, config, EAGER), mixed(p, m, config, EAGER), 1e-5)


def watched(seen: dict[str, list[Tensor]]) -> Ops:
    """EAGER, each result of `choose` (what goes into the experts), `expert_rows` and `blend` also put into `seen`."""

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            found = getattr(EAGER, name)(*args, **more)
            seen.setdefault(name, []).append(found.u_TM if isinstance(found, Chosen) else found)
            return found

        return call

    return replace(EAGER, **{name: watch(name) for name in ("choose", "expert_rows", "blend")})


def test_dtypes_in_bfloat16() -> None:
    """The router stays float32; expert inputs and products, and what is projected back, are bfloat16."""
    config = replace(SMALL, layers=1, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    p = random_params(config, 0, torch.bfloat16).layers[0].mlp
    assert isinstance(p, MoE)
    m = tokens(config, 1, 4)
    routes = route(p.router, m, config)
    assert torch.equal(routes.weight_TR, route(sparse(config, 0).router, m, config).weight_TR)
    seen: dict[str, list[Tensor]] = {}
    out, idx = moe(p, m, config, watched(seen))
    assert torch.equal(idx, routes.idx_TR)
    dtypes = {name: [x.dtype for x in found] for name, found in seen.items()}
    assert dtypes == {"choose": [torch.bfloat16], "expert_rows": [torch.bfloat16], "blend": [torch.bfloat16]}
    assert out.dtype == torch.bfloat16


@given(SPARSE, SEEDS, OPS)
def test_scales_worked_out_before_change_no_bit(config: Config, seed: int, ops: Ops) -> None:
    p, m = sparse(config, seed), tokens(config, seed + 1, 3)
    s = MoEScales(gain(p.squeeze_norm), gain(p.experts.norm))
    assert torch.equal(mixed(p, m, config, ops, s=s), mixed(p, m, config, ops))
    assert torch.equal(mlp(p, m, config, ops, s=s)[0], mlp(p, m, config, ops)[0])


def test_the_scales_given_are_the_ones_used() -> None:
    p, m = sparse(SMALL, 0), tokens(SMALL, 1, 3)
    found = mixed(p, m, SMALL, EAGER)
    norms = gain(p.squeeze_norm), gain(p.experts.norm)
    for changed in (MoEScales(gain(-p.squeeze_norm), norms[1]), MoEScales(norms[0], gain(-p.experts.norm))):
        far(mixed(p, m, SMALL, EAGER, s=changed), found)


def test_shape_is_kept_and_inputs_are_not_modified() -> None:
    p = sparse(SMALL, 0)
    m = torch.randn(6, SMALL.hidden_size)
    before = snapshot((p, m))
    for ops in (EAGER, REFERENCE):
        (out,), _ = mlp(p, m, SMALL, ops)
        assert out.shape == m.shape
        close(out[5], by_hand(p, m[5], SMALL), 1e-5)
    unchanged((p, m), before)
