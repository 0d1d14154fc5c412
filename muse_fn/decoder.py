"""The model: embed, layers, head. The residual stream is float32; each matrix product rounds its input once.

Read with the equations of the published model beside it: every line here is one of them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.attention import Step, attention
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, Places, View
from muse_fn.moe import mlp
from muse_fn.norms import (
    Gain,
    Mix,
    centred_norm,
    final_norm,
    gain,
    input_scaled_norm,
    mix,
    plain_norm,
    residual_gate,
    rotary_angles,
)
from muse_fn.params.config import Config
from muse_fn.params.tree import Layer, Params
from muse_fn.sharding.mesh import Mesh, one_rank

Cache = KVCache | tuple[()]


def forward(params: Params, tokens: Tensor, config: Config, mesh: Mesh | None = None) -> Tensor:
    """Logits of every position: tokens int64 [B, T] -> float32 [B, T, V], without a cache.

    Pure: works under torch.func.grad, vmap and torch.no_grad alike. Raises ValueError for a mesh of several ranks and
    for tokens of another shape or dtype.
    """
    one_rank(mesh)
    check_tokens(tokens)
    ops = select(params.embed.device)
    pos_BT = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    h, _ = hidden_states(params, tokens, (), (), pos_BT, config, ops)
    return logits(params, h, config, ops)


def check_tokens(tokens: Tensor) -> None:
    """Raises ValueError unless these are token ids [B, T] with B and T at least 1."""
    shaped = isinstance(tokens, Tensor) and tokens.dim() == 2 and 0 not in tokens.shape  # pyright: ignore[reportUnnecessaryIsInstance]
    if not shaped or tokens.dtype not in (torch.int64, torch.int32):
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"tokens is {found}: must be int64 or int32 [B, T], neither of them 0")


def hidden_states(
    params: Params,
    tokens_BT: Tensor,
    kv: Cache,
    view: View | Places | tuple[()],
    pos_BT: Tensor,
    config: Config,
    ops: Ops,
) -> tuple[Tensor, Cache]:
    """The residual stream after the last layer, float32 [B, T, H], and the cache with these tokens in it."""
    step = Step(pos_BT, rotary_angles(pos_BT, config.head_dim, config.rope_theta), view)
    h = embed(params, tokens_BT, config)
    for i, (p, s) in enumerate(zip(params.layers, scales(params.layers, config), strict=True)):
        h, kv = decoder_layer(p, s, h, kv, i, step, config, ops)
    return h, kv


class Scales(NamedTuple):
    """The vectors of a layer that act on the stream, worked out."""

    attn_norm: Gain
    attn_gate: Mix
    mlp_norm: Gain
    mlp_post_norm: Gain
    mlp_gate: Mix


def scales(layers: tuple[Layer, ...], config: Config) -> list[Scales]:
    """Of all layers at once: some thirty small operations a step instead of some thirty a layer."""

    def gains(vectors: list[Tensor]) -> list[Gain]:
        return [Gain(row) for row in gain(torch.stack(vectors)).factor.unbind()]

    def mixes(vectors: list[Tensor]) -> list[Mix]:
        alpha, beta = mix(torch.stack(vectors), config.residual_gate_temperature)
        return [Mix(*rows) for rows in zip(alpha.unbind(), beta.unbind(), strict=True)]

    columns = (
        gains([p.attn_norm for p in layers]),
        mixes([p.attn_residual_gate for p in layers]),
        gains([p.mlp_norm for p in layers]),
        gains([p.mlp_post_norm for p in layers]),
        mixes([p.mlp_residual_gate for p in layers]),
    )
    return [Scales(*row) for row in zip(*columns, strict=True)]


def embed(params: Params, tokens_BT: Tensor, config: Config) -> Tensor:
    """Rows of the table, normed: int64 [B, T] -> float32 [B, T, H]."""
    return plain_norm(F.embedding(tokens_BT, params.embed), config.rms_norm_eps)


def decoder_layer(
    p: Layer, s: Scales, h_BTH: Tensor, kv: Cache, layer: int, step: Step, config: Config, ops: Ops
) -> tuple[Tensor, Cache]:
    """Two branches, each between two norms and blended into the stream by its residual gate."""
    a = centred_norm(h_BTH, s.attn_norm, config.rms_norm_eps)
    b, kv = attention(p.attn, a, kv, layer, step, config, ops)
    b = plain_norm(b, config.post_norm_eps)
    h = residual_gate(h_BTH, b, s.attn_gate, config.residual_gate_temperature)

    m = centred_norm(h, s.mlp_norm, config.rms_norm_eps)
    f = mlp(p.mlp, m, config, ops)
    f = input_scaled_norm(f, s.mlp_post_norm, config.post_norm_eps)
    return residual_gate(h, f, s.mlp_gate, config.residual_gate_temperature), kv


def logits(params: Params, h: Tensor, config: Config, ops: Ops) -> Tensor:
    """Vocabulary logits of stream rows: [..., H] -> float32 [..., V], scaled, then capped smoothly at ±soft_cap."""
    head = params.head if isinstance(params.head, Tensor) else params.embed
    z = ops.linear(final_norm(h, params.norm, config.rms_norm_eps), head).float() * config.output_multiplier
    return torch.tanh(z / config.soft_cap) * config.soft_cap if config.soft_cap else z
