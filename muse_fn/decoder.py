"""The model: embed, layers, head. The residual stream is float32; each matrix product rounds its input once.

Read with the equations of the published model beside it: every line here is one of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.attention import Step, attention
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.moe import mlp
from muse_fn.norms import centred_norm, final_norm, input_scaled_norm, plain_norm, residual_gate, rotary_angles
from muse_fn.params.config import Config
from muse_fn.params.tree import Layer, Params
from muse_fn.sharding.mesh import Mesh, one_rank

Cache = KVCache | tuple[()]


def forward(params: Params, tokens: Tensor, config: Config, mesh: Mesh | None = None) -> Tensor:
    """Logits of every position: tokens int64 [B, T] -> float32 [B, T, V], without a cache.

    Pure: works under torch.func.grad, vmap and torch.no_grad alike. Raises ValueError for a mesh of several ranks.
    """
    one_rank(mesh)
    ops = select(params.embed.device)
    pos_BT = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    h, _ = hidden_states(params, tokens, (), (), pos_BT, config, ops)
    return logits(params, h, config, ops)


def hidden_states(
    params: Params, tokens_BT: Tensor, kv: Cache, view: View | tuple[()], pos_BT: Tensor, config: Config, ops: Ops
) -> tuple[Tensor, Cache]:
    """The residual stream after the last layer, float32 [B, T, H], and the cache with these tokens in it."""
    step = Step(pos_BT, rotary_angles(pos_BT, config.head_dim, config.rope_theta), view)
    h = embed(params, tokens_BT, config)
    for i, p in enumerate(params.layers):
        h, kv = decoder_layer(p, h, kv, i, step, config, ops)
    return h, kv


def embed(params: Params, tokens_BT: Tensor, config: Config) -> Tensor:
    """Rows of the table, normed: int64 [B, T] -> float32 [B, T, H]."""
    return plain_norm(F.embedding(tokens_BT, params.embed), config.rms_norm_eps)


def decoder_layer(
    p: Layer, h_BTH: Tensor, kv: Cache, layer: int, step: Step, config: Config, ops: Ops
) -> tuple[Tensor, Cache]:
    """Two branches, each between two norms and blended into the stream by its residual gate."""
    a = centred_norm(h_BTH, p.attn_norm, config.rms_norm_eps)
    b, kv = attention(p.attn, a, kv, layer, step, config, ops)
    b = plain_norm(b, config.post_norm_eps)
    h = residual_gate(h_BTH, b, p.attn_residual_gate, config.residual_gate_temperature)

    m = centred_norm(h, p.mlp_norm, config.rms_norm_eps)
    f = mlp(p.mlp, m, config, ops)
    f = input_scaled_norm(f, p.mlp_post_norm, config.post_norm_eps)
    return residual_gate(h, f, p.mlp_residual_gate, config.residual_gate_temperature), kv


def logits(params: Params, h: Tensor, config: Config, ops: Ops) -> Tensor:
    """Vocabulary logits of stream rows: [..., H] -> float32 [..., V], scaled, then capped smoothly at ±soft_cap."""
    head = params.head if isinstance(params.head, Tensor) else params.embed
    z = ops.linear(final_norm(h, params.norm, config.rms_norm_eps), head).float() * config.output_multiplier
    return torch.tanh(z / config.soft_cap) * config.soft_cap if config.soft_cap else z
