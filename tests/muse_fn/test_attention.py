"""One attention layer: against the equations written out in float64, and by what it can and cannot see."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.attention import Step, attention
from muse_fn.kernels.norms import rotary_angles
from muse_fn.kernels.select import EAGER, REFERENCE, Ops
from muse_fn.params.config import Config
from muse_fn.params.tree import Attention
from tests.models import FULL, SEEDS, SLIDING, SMALL, close, configs, far, random_params, snapshot, unchanged

OPS = st.sampled_from([EAGER, REFERENCE])
ONE = replace(SMALL, layers=1, heads=6, layer_types=(FULL,), layer_rope_theta=(1e4,), mlp_layer_types=("dense",))


def stream(config: Config, seed: int, batch: int, length: int) -> Tensor:
    """A normed stream, as a layer gets it."""
    return torch.randn(batch, length, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def layer(p: Attention, a: Tensor, config: Config, ops: Ops, pos: Tensor | None = None, index: int = 0) -> Tensor:
    """The layer's branch without a cache, at positions 0, 1, … unless given."""
    pos = torch.arange(a.shape[1]).expand(a.shape[:2]) if pos is None else pos
    step = Step(pos, rotary_angles(pos, config.head_dim, config.rope_theta), ())
    return attention(p, a.flatten(0, 1), (), index, step, config, ops)[0].unflatten(0, pos.shape)


def unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt()


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, each pair (j, j + D/2) turned by position * theta^(-2j/D)."""
    half, out = len(x) // 2, x.clone()
    for j in range(half):
        angle = torch.tensor(position * theta ** (-2 * j / len(x)), dtype=torch.float64)
        out[j] = x[j] * angle.cos() - x[j + half] * angle.sin()
        out[j + half] = x[j + half] * angle.cos() + x[j] * angle.sin()
    return out


def by_hand(p: Attention, a_TH: Tensor, config: Config, index: int) -> Tensor:
    """The published equations for one sequence, head by head and key by key, in float64."""
    q_w, k_w, v_w, gate_w, o_w = (w.double() for w in p)
    a_TH, d, eps = a_TH.double(), config.head_dim, config.rms_norm_eps
    rows: list[Tensor] = []
    for i, a in enumerate(a_TH):
        outs: list[Tensor] = []
        for n in range(config.heads):
            kv = n // (config.heads // config.kv_heads)
            mine, theirs = slice(n * d, n * d + d), slice(kv * d, kv * d + d)
            q = unit(q_w[mine] @ a, eps) * config.qk_scale_factor
            seen = [j for j in range(i + 1) if not config.is_sliding(index) or i - j < config.window]
            ks = [unit(k_w[theirs] @ a_TH[j], eps) for j in seen]
            if config.layer_rope_theta[index]:
                q = turned(q, i, config.rope_theta)
                ks = [turned(k, j, config.rope_theta) for j, k in zip(seen, ks, strict=True)]
            scores = torch.stack([q @ k for k in ks]) / d**0.5
            p_S = (scores - scores.max()).exp()
            o = sum((x * (v_w[theirs] @ a_TH[j]) for x, j in zip(p_S / p_S.sum(), seen, strict=True)), torch.zeros(d))
            outs.append(unit(o, eps) * torch.sigmoid(gate_w[mine] @ a))
        rows.append(o_w @ torch.cat(outs))
    return torch.stack(rows)


@given(configs(max_layers=2), SEEDS, st.integers(1, 9), OPS)
def test_matches_the_equations_in_float64(config: Config, seed: int, length: int, ops: Ops) -> None:
    params, a = random_params(config, seed), stream(config, seed + 1, 2, length)
    for i, p in enumerate(params.layers):
        expected = torch.stack([by_hand(p.attn, rows, config, i) for rows in a])
        close(layer(p.attn, a, config, ops, index=i), expected, 1e-5)


@given(configs(layers=1, rms_norm_eps=0.3), SEEDS, OPS)
def test_eps_of_query_key_and_output_norms_is_felt(config: Config, seed: int, ops: Ops) -> None:
    p, a = random_params(config, seed).layers[0].attn, stream(config, seed + 1, 1, 5)
    close(layer(p, a, config, ops), by_hand(p, a[0], config, 0)[None], 1e-5)


@given(configs(layers=1, layer_types=(SLIDING,), qk_scale_factor=0.5), SEEDS, OPS)
def test_exact_window_edge(config: Config, seed: int, ops: Ops) -> None:
    """The key W - 1 back is seen, the one W back is not: not a bit of the output depends on it."""
    p, w = random_params(config, seed).layers[0].attn, config.window
    a = stream(config, seed + 1, 1, w + 3)
    base = layer(p, a, config, ops)[:, -1]
    for back in range(w + 3):
        changed = a.clone()
        changed[:, -1 - back] = stream(config, seed + 2, 1, 1)[:, 0]
        now = layer(p, changed, config, ops)[:, -1]
        assert torch.equal(now, base) == (back >= w), f"{back=} {w=}"


@given(configs(layers=1), SEEDS, OPS)
def test_later_tokens_are_not_seen(config: Config, seed: int, ops: Ops) -> None:
    p, a = random_params(config, seed).layers[0].attn, stream(config, seed + 1, 2, 8)
    base = layer(p, a, config, ops)
    for t in range(1, 8):
        changed = a.clone()
        changed[:, t:] = stream(config, seed + 2, 2, 8 - t)
        assert torch.equal(layer(p, changed, config, ops)[:, :t], base[:, :t])


@given(configs(layers=1, layer_rope_theta=(5e5,)), SEEDS, st.integers(1, 300), OPS)
def test_rotary_layers_know_distances_only(config: Config, seed: int, shift: int, ops: Ops) -> None:
    """A shift of all positions changes nothing beyond the rounding of angles, 2^-24 of their size, times scores of up
    to qk_scale_factor * sqrt(D) = 15. The output norm divides by the output's size, so its eps is kept large."""
    config = replace(config, rms_norm_eps=1e-2)
    p, a = random_params(config, seed).layers[0].attn, stream(config, seed + 1, 1, 7)
    pos = torch.arange(7)[None]
    close(layer(p, a, config, ops, pos + shift), layer(p, a, config, ops, pos), 1e-3)


def test_rotary_layers_do_know_distances() -> None:
    p, a = random_params(ONE, 0).layers[0].attn, stream(ONE, 1, 1, 7)
    pos = torch.arange(7)[None]
    far(layer(p, a, ONE, EAGER, pos * 2)[:, -1], layer(p, a, ONE, EAGER, pos)[:, -1], 1e-2)


@given(configs(layers=1, layer_types=(FULL,), layer_rope_theta=(0.0,)), SEEDS, st.permutations(range(6)), OPS)
def test_global_layers_know_no_position(config: Config, seed: int, order: list[int], ops: Ops) -> None:
    """The last query's output is that of a set, up to the order of summation: any order of context, any positions."""
    p, a = random_params(config, seed).layers[0].attn, stream(config, seed + 1, 1, 7)
    base = layer(p, a, config, ops)
    close(layer(p, a[:, [*order, 6]], config, ops)[:, -1], base[:, -1], 1e-5)
    spread = torch.tensor([[0, 1, 5, 100, 101, 7000, 900_000]])
    assert torch.equal(layer(p, a, config, ops, spread), base)


def test_a_kv_head_serves_consecutive_query_heads() -> None:
    p, a = random_params(ONE, 0).layers[0].attn, stream(ONE, 1, 1, 5)
    o = torch.eye(ONE.heads * ONE.head_dim)
    base = layer(p._replace(o=o), a, ONE, EAGER).unflatten(-1, (6, 4))
    changed = p.v.clone()
    changed[4:] += 1  # values of KV head 1
    now = layer(p._replace(v=changed, o=o), a, ONE, EAGER).unflatten(-1, (6, 4))
    assert torch.equal(now[:, :, :3], base[:, :, :3])
    far(now[:, :, 3:], base[:, :, 3:], 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_come_in_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    p = random_params(ONE, 0, dtype).layers[0].attn
    a = stream(ONE, 1, 2, 3)
    q, k = EAGER.linears(a, (p.q, p.k))
    rotary = rotary_angles(torch.arange(3).expand(2, 3), 4, 1e4)
    q, k = EAGER.heads(q, k, rotary, 4, ONE.qk_scale_factor, ONE.rms_norm_eps)
    assert (q.shape, k.shape) == ((2, 3, 6, 4), (2, 3, 2, 4))
    assert q.dtype == k.dtype == dtype
    # Turning keeps the length, so the queries' is still that of norm and scale.
    close(q.float().square().mean(-1).sqrt(), torch.full((2, 3, 6), ONE.qk_scale_factor), 3e-2)
    close(k.float().square().mean(-1).sqrt(), torch.ones(2, 3, 2), 3e-2)


def test_inputs_are_not_modified() -> None:
    p, a = random_params(ONE, 0).layers[0].attn, stream(ONE, 1, 2, 5)
    before = snapshot((p, a))
    layer(p, a, ONE, EAGER)
    layer(p, a, ONE, REFERENCE)
    unchanged((p, a), before)
