"""One layer's MLP: a latent mixture of experts (route, squeeze, rows, blend, expand), or a gated dense one."""

from typing import NamedTuple

from torch import Tensor

from muse_fn.kernels.norms import Gain, gain
from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.pieces import Chosen
from muse_fn.kernels.select import Ops
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, Experts, MoE
from muse_fn.sharding.collectives import psum, stacked, summed_in
from muse_fn.sharding.division import Division, division_of
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.rules import rules_of


def rows_of_routes(p: Experts, chosen: Chosen, ops: Ops, division: Division) -> Tensor:
    """Each route's whole row, of this rank's tokens: [t, R, M], float32 where ranks had to be summed.

    A rank computes its experts' rows from its part of their inner width; the other rows are exact zeros, so one sum
    over the stage completes the partial rows and collects the others.
    """
    (idx_TR, _), u_TM, arranged_TM = chosen
    mesh = division.mesh
    first, dtype = mesh.index(("ep",)) * logical_shape(p.down)[0], summed_in(mesh, STAGE)
    rows = ops.expert_rows(u_TM, idx_TR, p.gate_up, p.down, first=first, dtype=dtype, arranged=arranged_TM)
    return division.summed(rows)


class MoEScales(NamedTuple):
    """The vectors of a mixture of experts, worked out."""

    squeeze_norm: Gain  # [M]
    expert_norm: Gain  # [M]


def moe(
    p: MoE,
    m_TH: Tensor,
    config: Config,
    ops: Ops,
    mesh: Mesh = ONE,
    s: MoEScales | tuple[()] = (),
    rounded_TH: Tensor | tuple[()] = (),
) -> tuple[Tensor, Tensor]:
    """The mixture of experts on normed tokens: [T, H] -> its parts [P, T, H / P], one of each rank that expands some
    columns, and the experts each token took, [T, R]. `rounded_TH` are the tokens in bfloat16, if they are at hand."""
    s = s or MoEScales(gain(p.squeeze_norm), gain(p.experts.norm))
    logits, squeezed = ops.linears(m_TH, (p.router.weight, p.squeeze), rounded=rounded_TH)
    factors = config.output_multiplier, config.routed_scaling_factor
    squeezed = stacked(squeezed, mesh, rules_of(mesh).get("squeezed", ()))
    normed = squeezed, s.squeeze_norm, config.rms_norm_eps, p.squeeze.dtype
    chosen = ops.choose(logits, p.router.bias, config.top_k, *factors, *normed)
    idx_TR, weight_TR = chosen.routes
    division = division_of(len(idx_TR), mesh)
    rows_tRM, dtype = rows_of_routes(p.experts, chosen, ops, division), p.expand.dtype
    # Rounded as it goes into the product.
    blended_tM = ops.blend(rows_tRM, division.own(weight_TR), s.expert_norm, config.post_norm_eps, dtype)
    if axes := rules_of(mesh).get("expanded", ()):
        return stacked(ops.linear(division.whole(blended_tM), p.expand), mesh, axes), idx_TR
    return division.whole(ops.linear(blended_tM, p.expand))[None], idx_TR


def dense(p: Dense, m_TH: Tensor, ops: Ops, mesh: Mesh = ONE) -> Tensor:
    """The gated MLP of a layer without experts: [T, H] -> [T, H]."""
    gate, up = ops.linears(m_TH, (p.gate, p.up))
    return psum(ops.linear(ops.silu(gate) * up, p.down, summed_in(mesh, STAGE)), mesh, STAGE)


def mlp(
    p: MoE | Dense,
    m_BTH: Tensor,
    config: Config,
    ops: Ops,
    mesh: Mesh = ONE,
    s: MoEScales | tuple[()] = (),
    rounded_BTH: Tensor | tuple[()] = (),
) -> tuple[Tensor, Tensor | tuple[()]]:
    """The MLP branch of a layer before its norm, in parts [P, B, T, H / P], and its routes [B, T, R]; () for a dense
    layer, which has one part. `rounded_BTH`: see `moe`."""
    tokens, m_TH = m_BTH.shape[:2], m_BTH.flatten(0, 1)
    if isinstance(p, Dense):
        return dense(p, m_TH, ops, mesh).unflatten(0, tokens)[None], ()
    rounded_TH = rounded_BTH.flatten(0, 1) if isinstance(rounded_BTH, Tensor) else ()
    out, idx_TR = moe(p, m_TH, config, ops, mesh, s, rounded_TH)
    return out.unflatten(1, tokens), idx_TR.unflatten(0, tokens)
