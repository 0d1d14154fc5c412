"""Whole layers with experts in one call on a CPU, for few rows in bfloat16: all their forms, one after the other.

What one leaves to the next lies in one piece of memory, which goes when the call is over. The forms, and so the bits,
are those that a layer takes one by one.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.cpu_attention import Seen, attention_of
from muse_fn.kernels.cpu_calls import Work
from muse_fn.kernels.cpu_experts import experts_of, room_of
from muse_fn.kernels.cpu_heads import gate_of, heads_of
from muse_fn.kernels.cpu_linear import matrix, products_of
from muse_fn.kernels.cpu_plan import Plan, follow, planned, unknown
from muse_fn.kernels.cpu_rows import blend_of, join_of, norm_of, route_of
from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.pieces import Block, Joined, Numbers
from muse_fn.kernels.select import Site

LINE = 64  # bytes that memory is read by
H, A, NEW_H, NEW_A, IDX, COS, SIN, K, V, WRITE, BLOCKS, COLUMNS, Q_POS, K_POS, ROOM = map(unknown, range(1, 16))


class Size(NamedTuple):
    """What a plan of a layer is made for."""

    batch: int
    length: int
    block: int  # positions of a block of the cache
    threads: int
    helpers: int  # those of this process, which a forked one does not have


class Whole(NamedTuple):
    """A plan and what it needs."""

    plan: Plan
    room: int  # bytes
    top_k: int
    is_last: bool


class Left(NamedTuple):
    """Where forms leave what others read: offsets from the beginning of a call's memory."""

    laid: int
    q: int
    k: int
    v: int
    gate: int
    o: int  # queries at first, then what they find, then that gated: each form reads a head before it writes it
    branch: int
    h: int
    m: int
    logits: int
    squeezed: int
    u: int
    weight: int
    rows: int
    blended: int
    room: int
    end: int


def _left(p: Block, n: Numbers, tokens: int) -> Left:
    features, keys, width = p.q.shape[0], p.k.shape[0], p.o.shape[0]
    experts, latent, inner = logical_shape(p.down)
    room = max(room_of(tokens, n.top_k, experts, latent, inner), 8 * tokens * latent, 16 * experts)
    each = (
        8 * max(width, features, latent), 2 * features, 2 * keys, 2 * keys, 2 * features, 2 * features, 2 * width,
        4 * width, 4 * width, 4 * experts, 2 * latent, 2 * latent, 4 * n.top_k, 2 * n.top_k * latent, 2 * latent,
    )  # fmt: skip
    sizes = [*(tokens * size for size in each), room]
    return Left(0, *accumulate(-(-size // LINE) * LINE for size in sizes))


def _attention(p: Block, n: Numbers, size: Size, at: Left) -> list[Work]:
    """From the normed stream to the next branch's."""
    tokens, width = size.batch * size.length, p.o.shape[0]
    heads, keys = p.q.shape[0] // n.head_dim, p.k.shape[0] // n.head_dim
    seen = Seen(K, V, size.block, keys, BLOCKS, COLUMNS, Q_POS, K_POS, n.window)
    products = [matrix(w, to, False) for w, to in ((p.q, at.q), (p.k, at.k), (p.v, at.v), (p.gate, at.gate))]
    vectors = 0, p.attn_mix.alpha.data_ptr(), p.attn_mix.beta.data_ptr(), p.mlp_norm.factor.data_ptr()
    places = [at.q, at.k, COS, SIN, at.o, K, at.v, V, WRITE]
    return [
        products_of(A, False, tokens, width, products, at.laid),
        heads_of(tokens, heads, keys, n.head_dim, places, (n.qk_scale, n.eps)),
        attention_of(at.o, (size.batch, size.length, heads, n.head_dim), seen, at.o),
        gate_of(tokens, heads, n.head_dim, [at.o, at.gate, at.o], n.eps),
        products_of(at.o, False, tokens, p.q.shape[0], [matrix(p.o, at.branch, False)], at.laid),
        join_of(H, at.branch, tokens, width, vectors, at.h, at.m, True, (n.post_eps, n.eps)),
    ]


def _mixture(p: Block, n: Numbers, size: Size, at: Left) -> list[Work]:
    """From there to the next layer's."""
    tokens, width, (experts, latent, _) = size.batch * size.length, p.o.shape[0], logical_shape(p.down)
    products = [matrix(p.router, at.logits, True), matrix(p.squeeze, at.squeezed, False)]
    factors, shape = (n.multiplier, n.factor), (tokens, n.top_k)
    squeeze_norm, expert_norm = p.squeeze_norm.factor.data_ptr(), p.expert_norm.factor.data_ptr()
    coming = 0 if p.coming is None else p.coming.factor.data_ptr()
    vectors = p.post_norm.factor.data_ptr(), p.mlp_mix.alpha.data_ptr(), p.mlp_mix.beta.data_ptr(), coming
    return [
        products_of(at.m, True, tokens, width, products, at.laid),
        route_of(at.logits, tokens, experts, n.top_k, p.bias.data_ptr(), factors, IDX, at.weight, at.room),
        norm_of(at.squeezed, False, tokens, latent, squeeze_norm, n.eps, at.u, False, at.room),
        experts_of(at.u, IDX, shape, p.gate_up, p.down, 0, at.rows, False, at.room),
        blend_of(at.rows, at.weight, tokens, n.top_k, latent, expert_norm, n.post_eps, at.blended, at.room),
        products_of(at.blended, False, tokens, latent, [matrix(p.expand, at.branch, False)], at.laid),
        join_of(at.h, at.branch, tokens, width, vectors, NEW_H, NEW_A, False, (n.post_eps, n.eps)),
    ]


def whole(p: Block, n: Numbers, size: Size) -> Whole:
    """A layer of these parameters as one plan, which holds where they lie: they must live as long."""
    left = _left(p, n, size.batch * size.length)
    at = Left(*(ROOM + place for place in left))
    plan = planned(_attention(p, n, size, at) + _mixture(p, n, size, at))
    return Whole(plan, left.end, n.top_k, p.coming is None)


def run_layers(layers: Sequence[tuple[Whole, Site]], stream: Joined) -> tuple[Joined, Sequence[Tensor]]:
    """The stream after layers one after the other, and the experts that each took, int64 [B*T, R]. Writes into the
    arenas. No layer but the last may be the model's last."""
    h, a, _ = stream
    taken = [site.at.write.new_empty(len(h), made.top_k) for made, site in layers]
    streams = [torch.empty_like(h) for _ in layers[:2]]  # each layer reads one and writes the other
    normed = [torch.empty_like(a) for _ in streams]
    room = h.new_empty(max(made.room for made, _ in layers), dtype=torch.uint8)
    read, numbers = (h.data_ptr(), a.data_ptr()), list[Sequence[int]]()
    for n, ((made, site), idx) in enumerate(zip(layers, taken, strict=True)):
        write = streams[n % 2].data_ptr(), (streams if made.is_last else normed)[n % 2].data_ptr()
        angles = (0, 0) if site.rotary is None else (site.rotary.cos.data_ptr(), site.rotary.sin.data_ptr())
        at = site.at
        numbers.append((
            *read, *write, idx.data_ptr(), *angles, site.k_arena.data_ptr(), site.v_arena.data_ptr(),
            at.write.data_ptr(), at.blocks_BC.data_ptr(), at.blocks_BC.shape[1], at.q_pos_BT.data_ptr(),
            at.k_pos_BS.data_ptr(), room.data_ptr(),
        ))  # fmt: skip
        read = write
    follow([made.plan for made, _ in layers], numbers)
    last = (len(layers) - 1) % 2
    return Joined(streams[last], (streams if layers[-1][0].is_last else normed)[last]), taken
