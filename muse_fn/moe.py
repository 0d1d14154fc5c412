"""One layer's MLP: a latent mixture of experts (route, squeeze, rows, blend, expand), or a gated dense one."""

from typing import NamedTuple

from torch import Tensor

from muse_fn.kernels.norms import Gain, gain
from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.pieces import Chosen
from muse_fn.kernels.select import Ops
from muse_fn.params.config import Config
from muse_fn.params.tree import Dense, Experts, MoE
from muse_fn.sharding.collectives import stacked, summed_in
from muse_fn.sharding.division import UNDIVIDED, Division
from muse_fn.sharding.mesh import STAGE
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


def router_and_squeeze(
    p: MoE, m_tH: Tensor, rounded_tH: Tensor | tuple[()], ops: Ops, division: Division
) -> tuple[Tensor, Tensor]:
    """What every rank needs of all tokens: router logits float32 [T, E], and squeezed rows in parts [P, T, M / P]."""
    axes = rules_of(division.mesh).get("squeezed", ())
    if not axes or not division.is_divided:
        logits, squeezed = ops.linears(m_tH, (p.router.weight, p.squeeze), rounded=rounded_tH)
        return division.whole(logits), stacked(division.whole(squeezed), division.mesh, axes)
    # This rank's columns are of all tokens, which travel as the product takes them.
    rounded = rounded_tH if isinstance(rounded_tH, Tensor) and rounded_tH.dtype == p.squeeze.dtype else m_tH
    m_TH = division.whole(rounded, p.squeeze.dtype)
    logits = division.whole(ops.linear(m_tH, p.router.weight))
    return logits, stacked(ops.linear(m_TH, p.squeeze), division.mesh, axes)


def moe(
    p: MoE,
    m_tH: Tensor,
    config: Config,
    ops: Ops,
    division: Division = UNDIVIDED,
    s: MoEScales | tuple[()] = (),
    rounded_tH: Tensor | tuple[()] = (),
) -> tuple[Tensor, Tensor]:
    """The mixture of experts on normed tokens: [t, H] -> its parts [P, t, H / P], one of each rank that expands some
    columns, and the experts all tokens took, [T, R]. `rounded_tH` are the tokens in bfloat16, if they are at hand."""
    s = s or MoEScales(gain(p.squeeze_norm), gain(p.experts.norm))
    logits_TE, squeezed_PTm = router_and_squeeze(p, m_tH, rounded_tH, ops, division)
    factors = config.output_multiplier, config.routed_scaling_factor
    normed = squeezed_PTm, s.squeeze_norm, config.rms_norm_eps, p.squeeze.dtype
    chosen = ops.choose(logits_TE, p.router.bias, config.top_k, *factors, *normed)
    idx_TR, weight_TR = chosen.routes
    rows_tRM, weight_tR = rows_of_routes(p.experts, chosen, ops, division), division.own(weight_TR)
    # Rounded as it goes into the product.
    blended_tM = ops.blend(rows_tRM, weight_tR, s.expert_norm, config.post_norm_eps, p.expand.dtype)
    axes = rules_of(division.mesh).get("expanded", ())
    out = ops.linear(division.whole(blended_tM) if axes else blended_tM, p.expand)
    return division.parts(out, axes), idx_TR


def dense(p: Dense, m_tH: Tensor, ops: Ops, division: Division = UNDIVIDED) -> Tensor:
    """The gated MLP of a layer without experts: [t, H] -> [t, H]."""
    gate, up = ops.linears(division.whole(m_tH, p.gate.dtype), (p.gate, p.up))
    return division.summed(ops.linear(ops.silu(gate) * up, p.down, summed_in(division.mesh, STAGE)))


def mlp(
    p: MoE | Dense,
    m_tH: Tensor,
    config: Config,
    ops: Ops,
    division: Division = UNDIVIDED,
    s: MoEScales | tuple[()] = (),
    rounded_tH: Tensor | tuple[()] = (),
) -> tuple[Tensor, Tensor | tuple[()]]:
    """The MLP branch of a layer before its norm, in parts [P, t, H / P], and its routes [T, R]; () for a dense layer,
    which has one part. `rounded_tH`: see `moe`."""
    if isinstance(p, Dense):
        return dense(p, m_tH, ops, division)[None], ()
    return moe(p, m_tH, config, ops, division, s, rounded_tH)
