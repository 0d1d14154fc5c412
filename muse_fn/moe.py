"""One layer's MLP: a latent mixture of experts (route, squeeze, rows, blend, expand), or a gated dense one."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels.select import Ops
from muse_fn.norms import centred_norm, input_scaled_norm
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, MoE, Router

ROUTE_EPS = 1e-15


class Routes(NamedTuple):
    """Which experts each token takes, and how much of each."""

    idx_TR: Tensor  # int64, ascending
    weight_TR: Tensor  # float32, sums to routed_scaling_factor


def route(p: Router, m_TH: Tensor, config: Config) -> Routes:
    """Sigmoid scores in float32; the bias takes part in the choice and not in the weights."""
    logits = F.linear(m_TH.float(), p.weight) * config.output_multiplier
    scores = torch.sigmoid(logits)
    idx = torch.topk(scores + p.bias, config.top_k, dim=-1, sorted=False).indices
    weight = scores.gather(-1, idx)
    weight = weight / (weight.sum(-1, keepdim=True) + ROUTE_EPS) * config.routed_scaling_factor
    # Rows are added by ascending expert id, the published model's order, whatever order topk found them in.
    idx, order = idx.sort(-1)
    return Routes(idx, weight.gather(-1, order))


def squeeze(p: MoE, m_TH: Tensor, config: Config, ops: Ops) -> Tensor:
    """The experts' input: [T, H] -> [T, M], normed, in the weights' dtype."""
    u = centred_norm(ops.linear(m_TH, p.squeeze), p.squeeze_norm, config.rms_norm_eps)
    return u.to(p.squeeze.dtype)


def blend(y_TRM: Tensor, routes: Routes, norm: Tensor, config: Config) -> Tensor:
    """Norms each route's row, weights it and sums over routes, in float32: [T, R, M] -> [T, M].

    The rows must be whole: the norm of a partial sum is not a part of the norm.
    """
    y = input_scaled_norm(y_TRM, norm, config.post_norm_eps)
    return (y * routes.weight_TR.unsqueeze(-1)).sum(1)


def moe(p: MoE, m_TH: Tensor, config: Config, ops: Ops) -> Tensor:
    """The mixture of experts on normed tokens: [T, H] -> [T, H]."""
    routes = route(p.router, m_TH, config)
    rows = ops.expert_rows(squeeze(p, m_TH, config, ops), routes.idx_TR, p.experts.gate_up, p.experts.down)
    return ops.linear(blend(rows, routes, p.experts.norm, config), p.expand)


def dense(p: Dense, m_TH: Tensor, ops: Ops) -> Tensor:
    """The gated MLP of a layer without experts: [T, H] -> [T, H]."""
    return ops.linear(F.silu(ops.linear(m_TH, p.gate)) * ops.linear(m_TH, p.up), p.down)


def mlp(p: MoE | Dense, m_BTH: Tensor, config: Config, ops: Ops) -> Tensor:
    """The MLP branch of a layer before its norm, experts or dense by what the parameters are."""
    m_TH = m_BTH.flatten(0, 1)
    out = moe(p, m_TH, config, ops) if isinstance(p, MoE) else dense(p, m_TH, ops)
    return out.view(m_BTH.shape)
