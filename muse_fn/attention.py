"""One layer's attention: project, norm, rotate, attend, norm each head, gate, project back."""

from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.select import Ops
from muse_fn.kvcache.cache import KVCache, Places, append
from muse_fn.norms import Rotary, plain_norm, rotate
from muse_fn.params.config import Config
from muse_fn.params.tree import Attention
from muse_fn.sharding.collectives import psum
from muse_fn.sharding.mesh import ONE, STAGE, Mesh


class Step(NamedTuple):
    """What all layers of one step share."""

    pos_BT: Tensor  # int64 positions of the step's tokens
    rotary: Rotary
    places: tuple[Places, ...] = ()  # for each window group; none without a cache: its tokens are the whole context
    slots: tuple[tuple[int, int], ...] = ()  # for each layer its group and its slot in the cache
    is_start: bool = False  # the tokens are those at positions 0, 1, 2 …


def attention(
    p: Attention,
    a_BTH: Tensor,
    kv: KVCache | tuple[()],
    layer: int,
    step: Step,
    config: Config,
    ops: Ops,
    mesh: Mesh = ONE,
) -> tuple[Tensor, KVCache | tuple[()]]:
    """a, the normed stream -> the branch [B, T, H] before its norm, and the cache with this step in it.

    Each rank has its heads, and their columns of the projection back, whose products are summed in float32.
    """
    a_BTH = a_BTH.to(p.q.dtype)  # once for its four products
    q, k, v = heads(p, a_BTH, step.rotary if config.has_rotary(layer) else None, config, ops)
    window = config.window if config.is_sliding(layer) else 0
    if isinstance(kv, KVCache):
        group, slot = step.slots[layer]
        at = step.places[group]
        kv = append(kv, slot, k, v, at)
        arenas = kv.k[slot], kv.v[slot]
        o = ops.attend_blocks(q, *arenas, at.blocks_BC, step.pos_BT, at.pos_BS, window, step.is_start)
    else:
        o = ops.attend(q, k, v, step.pos_BT, step.pos_BT, window, step.is_start)
    o = plain_norm(o, config.rms_norm_eps).flatten(2)
    b = ops.linear(o * ops.sigmoid(ops.linear(a_BTH, p.gate).float()), p.o)
    return psum(b.float(), mesh, STAGE), kv


def heads(
    p: Attention, a_BTH: Tensor, rotary: Rotary | None, config: Config, ops: Ops
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, T, N, D], keys and values [B, T, K, D] of the step and of this rank's heads, in the weights' dtype.

    Queries and keys are normed per head, queries times qk_scale_factor, then both rotated if the layer has rotary.
    """
    q, k, v = (ops.linear(a_BTH, w).unflatten(-1, (-1, config.head_dim)) for w in (p.q, p.k, p.v))
    q = plain_norm(q, config.rms_norm_eps) * config.qk_scale_factor
    k = plain_norm(k, config.rms_norm_eps)
    if rotary is not None:
        both = rotate(torch.cat([q, k], 2), rotary).to(v.dtype)
        q, k = both.split([q.shape[2], k.shape[2]], 2)
    return q.to(v.dtype), k.to(v.dtype), v
