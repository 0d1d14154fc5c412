"""One layer's MLP: a latent mixture of experts (route, squeeze, rows, blend, expand), or a gated dense one."""

from typing import NamedTuple

from torch import Tensor

from muse_fn.kernels.norms import Gain, gain
from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.select import Ops
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, Experts, MoE
from muse_fn.sharding.collectives import gather, psum
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.rules import rules_of


def rows_of_routes(p: Experts, u_TM: Tensor, idx_TR: Tensor, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """Each route's whole row: [T, R, M], float32 where ranks had to be summed.

    A rank computes its experts' rows from its part of their inner width; the other rows are exact zeros, so one sum
    over the stage completes the partial rows and collects the others.
    """
    local_TR = idx_TR - mesh.index(("ep",)) * logical_shape(p.down)[0]
    rows = ops.expert_rows(u_TM, local_TR, p.gate_up, p.down)
    return rows if mesh.size(STAGE) == 1 else psum(rows.float(), mesh, STAGE)


class MoEScales(NamedTuple):
    """The vectors of a mixture of experts, worked out."""

    squeeze_norm: Gain  # [M]
    expert_norm: Gain  # [M]


def moe(
    p: MoE, m_TH: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE, s: MoEScales | tuple[()] = ()
) -> tuple[Tensor, Tensor]:
    """The mixture of experts on normed tokens: [T, H] -> [T, H], and the experts each token took, [T, R]."""
    s = s or MoEScales(gain(p.squeeze_norm), gain(p.experts.norm))
    logits, squeezed = ops.linears(m_TH, (p.router.weight, p.squeeze))
    factors = config.output_multiplier, config.routed_scaling_factor
    routes = ops.route(logits, p.router.bias, config.top_k, *factors)
    squeezed = gather(squeezed, mesh, rules_of(mesh).get("squeezed", ()))
    u = ops.normed(squeezed, s.squeeze_norm, config.rms_norm_eps, p.squeeze.dtype)
    rows = rows_of_routes(p.experts, u, routes.idx_TR, ops, mesh)
    out = ops.linear(ops.blend(rows, routes.weight_TR, s.expert_norm, config.post_norm_eps), p.expand)
    return gather(out, mesh, rules_of(mesh).get("expanded", ())), routes.idx_TR


def dense(p: Dense, m_TH: Tensor, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """The gated MLP of a layer without experts: [T, H] -> [T, H]."""
    gate, up = ops.linears(m_TH, (p.gate, p.up))
    out = ops.linear(ops.silu(gate) * up, p.down)
    return psum(out.float(), mesh, STAGE)


def mlp(
    p: MoE | Dense, m_BTH: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE, s: MoEScales | tuple[()] = ()
) -> tuple[Tensor, Tensor | tuple[()]]:
    """The MLP branch of a layer before its norm, and its routes [B, T, R]; () for a dense layer."""
    m_TH = m_BTH.flatten(0, 1)
    if isinstance(p, Dense):
        return dense(p, m_TH, ops, mesh).view(m_BTH.shape), ()
    out, idx_TR = moe(p, m_TH, config, ops, mesh, s)
    return out.view(m_BTH.shape), idx_TR.view(*m_BTH.shape[:2], -1)
