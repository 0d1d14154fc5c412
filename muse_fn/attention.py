"""One layer's attention: project, norm, rotate, attend, norm each head, gate, project back."""

from typing import NamedTuple

from torch import Tensor

from muse_fn.kernels.norms import Rotary
from muse_fn.kernels.pieces import Context, Projected
from muse_fn.kernels.select import Ops
from muse_fn.kvcache.cache import KVCache, Places
from muse_fn.params.config import Config
from muse_fn.params.tree import Attention
from muse_fn.sharding.collectives import summed_in
from muse_fn.sharding.division import UNDIVIDED, Division
from muse_fn.sharding.mesh import STAGE


class Step(NamedTuple):
    """What all layers of one step share."""

    pos_BT: Tensor  # int64 positions of the step's tokens
    rotary: Rotary
    places: tuple[Places, ...] = ()  # for each window group; none without a cache: its tokens are the whole context
    slots: tuple[tuple[int, int], ...] = ()  # for each layer its group and its slot in the cache
    is_start: bool = False  # the tokens are those at positions 0, 1, 2 …


def seen_by(layer: int, step: Step, config: Config) -> Context:
    """What a layer's tokens see in the cache, and where they go."""
    at, window = step.places[step.slots[layer][0]], config.window if config.is_sliding(layer) else 0
    return Context(at.write, at.blocks_BC, step.pos_BT, at.pos_BS, window, step.is_start)


def attention(
    p: Attention,
    a_tH: Tensor,
    kv: KVCache | tuple[()],
    layer: int,
    step: Step,
    config: Config,
    ops: Ops,
    division: Division = UNDIVIDED,
) -> tuple[Tensor, KVCache | tuple[()]]:
    """a, the normed stream -> the branch [t, H] before its norm, and the cache with this step in it.

    Each rank has its heads, for all tokens, and their columns of the projection back, whose products are summed in
    float32.
    """
    a_TH = division.whole(a_tH.to(p.q.dtype))  # rounded once for its four products
    a_BTH = a_TH.unflatten(0, step.pos_BT.shape)
    q, k, v, gate = ops.linears(a_BTH, (p.q, p.k, p.v, p.gate))
    rotary = step.rotary if config.has_rotary(layer) else None
    window = config.window if config.is_sliding(layer) else 0
    eps, width = config.rms_norm_eps, config.head_dim
    if isinstance(kv, KVCache):
        slot, seen = step.slots[layer][1], seen_by(layer, step, config)
        arenas = kv.k[slot], kv.v[slot]
        if ops.attend_new is not None:
            given = Projected(q, k, v, gate), rotary, config.qk_scale_factor, eps
            o_BTF = ops.attend_new(*given, *arenas, seen, p.o.dtype)
        else:
            q_BTND = ops.place(q, k, v, rotary, config.qk_scale_factor, eps, *arenas, seen.write)
            o_BTF = ops.gated(ops.attend_blocks(q_BTND, *arenas, *seen[1:]), gate, eps, p.o.dtype)
    else:
        q_BTND, k_BTKD = ops.heads(q, k, rotary, width, config.qk_scale_factor, eps)
        v_BTKD = v.unflatten(-1, (-1, width))
        o = ops.attend(q_BTND, k_BTKD, v_BTKD, step.pos_BT, step.pos_BT, window, step.is_start)
        o_BTF = ops.gated(o, gate, eps, p.o.dtype)
    b = ops.linear(o_BTF, p.o, summed_in(division.mesh, STAGE))
    return division.summed(b.flatten(0, 1)), kv
