"""One layer's MLP: a latent mixture of experts (route, squeeze, rows, blend, expand), or a gated dense one."""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.select import REFERENCE, Ops
from muse_fn.norms import centred_norm, input_scaled_norm
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, Experts, MoE, Router
from muse_fn.sharding.collectives import gather, psum
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.rules import rules_of

ROUTE_EPS = 1e-15


class Routes(NamedTuple):
    """Which experts each token takes, and how much of each."""

    idx_TR: Tensor  # int64, ascending
    weight_TR: Tensor  # float32, sums to routed_scaling_factor


def route(p: Router, m_TH: Tensor, config: Config, ops: Ops = REFERENCE) -> Routes:
    """Sigmoid scores in float32; the bias takes part in the choice and not in the weights."""
    logits = ops.linear(m_TH.float(), p.weight) * config.output_multiplier
    scores = ops.sigmoid(logits)
    idx = torch.topk(scores + p.bias, config.top_k, dim=-1, sorted=False).indices
    weight = scores.gather(-1, idx)
    weight = weight / (weight.sum(-1, keepdim=True) + ROUTE_EPS) * config.routed_scaling_factor
    # Rows are added by ascending expert id, the published model's order, whatever order topk found them in.
    idx, order = idx.sort(-1)
    return Routes(idx, weight.gather(-1, order))


def squeeze(p: MoE, m_TH: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """The experts' input: [T, H] -> [T, M], normed, in the weights' dtype."""
    u = gather(ops.linear(m_TH, p.squeeze), mesh, rules_of(mesh).get("squeezed", ()))
    return centred_norm(u, p.squeeze_norm, config.rms_norm_eps).to(p.squeeze.dtype)


def blend(y_TRM: Tensor, routes: Routes, norm: Tensor, config: Config) -> Tensor:
    """Norms each route's row, weights it and sums over routes, in float32: [T, R, M] -> [T, M].

    The rows must be whole: the norm of a partial sum is not a part of the norm.
    """
    y = input_scaled_norm(y_TRM, norm, config.post_norm_eps)
    return (y * routes.weight_TR.unsqueeze(-1)).sum(1)


def rows_of_routes(p: Experts, u_TM: Tensor, idx_TR: Tensor, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """Each route's whole row: [T, R, M], float32 where ranks had to be summed.

    A rank computes its experts' rows from its part of their inner width; the other rows are exact zeros, so one sum
    over the stage completes the partial rows and collects the others.
    """
    local_TR = idx_TR - mesh.index(("ep",)) * logical_shape(p.down)[0]
    rows = ops.expert_rows(u_TM, local_TR, p.gate_up, p.down)
    return rows if mesh.size(STAGE) == 1 else psum(rows.float(), mesh, STAGE)


def moe(p: MoE, m_TH: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE) -> tuple[Tensor, Tensor]:
    """The mixture of experts on normed tokens: [T, H] -> [T, H], and the experts each token took, [T, R]."""
    routes = route(p.router, m_TH, config, ops)
    rows = rows_of_routes(p.experts, squeeze(p, m_TH, config, ops, mesh), routes.idx_TR, ops, mesh)
    out = ops.linear(blend(rows, routes, p.experts.norm, config), p.expand)
    return gather(out, mesh, rules_of(mesh).get("expanded", ())), routes.idx_TR


def dense(p: Dense, m_TH: Tensor, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """The gated MLP of a layer without experts: [T, H] -> [T, H]."""
    out = ops.linear(ops.silu(ops.linear(m_TH, p.gate)) * ops.linear(m_TH, p.up), p.down)
    return psum(out.float(), mesh, STAGE)


def mlp(p: MoE | Dense, m_BTH: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE) -> tuple[Tensor, Tensor | tuple[()]]:
    """The MLP branch of a layer before its norm, and its routes [B, T, R]; () for a dense layer."""
    m_TH = m_BTH.flatten(0, 1)
    if isinstance(p, Dense):
        return dense(p, m_TH, ops, mesh).view(m_BTH.shape), ()
    out, idx_TR = moe(p, m_TH, config, ops, mesh)
    return out.view(m_BTH.shape), idx_TR.view(*m_BTH.shape[:2], -1)
