"""The model: embed, layers, head. The residual stream is float32; each matrix product rounds its input once.

Read with the equations of the published model beside it: every line here is one of them. On a mesh every rank runs the
same lines on its part of the parameters; `summed`, `whole` and `parts` of a `Division`, and `gather`, are where the
parts meet. Between products a layer works on a division's rows: all tokens [T, H] of the step, or this rank's, [t, H].
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.attention import Step, attention, seen_by
from muse_fn.kernels.around import capped, embedding, gains, mixes, rotary_of, stream_norm
from muse_fn.kernels.norms import Gain, Mix
from muse_fn.kernels.pieces import Block, Joined, Numbers
from muse_fn.kernels.select import Ops, Site, WholeLayer, select, under_vmap
from muse_fn.kvcache.cache import KVCache, Places
from muse_fn.kvcache.layout import layout_of
from muse_fn.moe import MoEScales, mlp
from muse_fn.params.config import Config
from muse_fn.params.tree import Layer, MoE, Params, sample_tensor
from muse_fn.sharding.collectives import broadcast, gather, hand_on
from muse_fn.sharding.division import UNDIVIDED, Division, division_of
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.split import check_shard, stage_config

Cache = KVCache | tuple[()]


def forward(
    params: Params, tokens: Tensor, config: Config, mesh: Mesh | None = None, *, ops: Ops | None = None
) -> Tensor:
    """Logits of every position: tokens int64 [B, T] -> float32 [B, T, V], without a cache.

    Pure: works under torch.func.grad, vmap and torch.no_grad alike. On a mesh of several ranks `params` are this rank's
    (`load` or `shard` with the same mesh), every rank calls with the same tokens and gets all logits; no gradients
    there. `ops` are the fastest for the device unless given. Raises ValueError for tokens of another shape or dtype or
    outside of the vocabulary.
    """
    mesh = mesh or ONE
    check_tokens(tokens, config)
    check_shard(params, config, mesh)
    ops = ops or select(sample_tensor(params).device)
    pos_BT = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    h = hidden_states(params, [Chunk(tokens, pos_BT, is_start=True)], (), config, ops, mesh).h_BTH
    return logits(params, h, config, ops, mesh)


def check_tokens(tokens: Tensor, config: Config) -> None:
    """Raises ValueError unless these are token ids [B, T] with B and T at least 1; reads them on the host."""
    check_tokens_shape(tokens)
    if under_vmap():
        return
    low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"tokens holds id {wrong}: ids go from 0 to {config.vocab_size - 1}")


def check_tokens_shape(tokens: Tensor) -> None:
    """Raises ValueError unless these are integers [B, T] with B and T at least 1."""
    shaped = isinstance(tokens, Tensor) and tokens.dim() == 2 and 0 not in tokens.shape  # pyright: ignore[reportUnnecessaryIsInstance]
    if not shaped or tokens.dtype not in (torch.int64, torch.int32):
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"tokens is {found}: must be int64 or int32 [B, T], neither of them 0")


class Chunk(NamedTuple):
    """Consecutive columns of a step."""

    tokens_BT: Tensor
    pos_BT: Tensor
    places: tuple[Places, ...] = ()  # for each window group of the cache; none without one
    is_start: bool = False  # nothing precedes these tokens, and their positions are 0, 1, 2 …


class Hidden(NamedTuple):
    """What the layers of this rank's pipeline stage make of a step."""

    h_BTH: Tensor  # the residual stream after them, float32
    kv: Cache  # with the step in it
    routes: tuple[Tensor | tuple[()], ...]  # for each layer the experts that each token took, int64 [B, T, R]


def hidden_states(
    params: Params,
    chunks: Sequence[Chunk],
    kv: Cache,
    config: Config,
    ops: Ops,
    mesh: Mesh = ONE,
    every: "Sequence[Scales]" = (),
) -> Hidden:
    """Runs chunks, which follow each other, through this stage's layers, each as soon as the previous stage has it.

    With one stage that is all layers. In tick t stage s works on chunk t - s: all stages work at once on a long step.
    `every` is `scales` of this tree's layers, worked out here unless given. Raises ValueError, before anything is
    written, for layers that were prepared with other matrices.
    """
    every = every or scales(params.layers, config)
    _check_prepared(params.layers, every)
    own, stage = stage_config(config, mesh), mesh.index(("pp",))
    done: list[Hidden] = []
    given: Tensor | None = None
    for first in range(-stage, len(chunks) + mesh.pp - 1 - stage):  # the chunk of this tick, if there is one
        made = None
        if 0 <= first < len(chunks):
            chunk = chunks[first]
            division = division_of(chunk.tokens_BT.numel(), mesh)
            h_tH = _stream_into(params, chunk, given, config, division)
            done.append(stage_layers(params, h_tH, kv, _step_of(chunk, config, mesh), own, ops, division, every))
            made, kv = done[-1].h_BTH, done[-1].kv
        coming = not mesh.is_first and 0 <= first + 1 < len(chunks)
        into = _stream_like(chunks[first + 1], config) if coming else None
        given = hand_on(None if mesh.is_last else made, mesh, into)
    if len(done) == 1:
        return done[0]
    routes = tuple(
        torch.cat(parts, 1) if parts[0] != () else () for parts in zip(*(d.routes for d in done), strict=True)
    )
    return Hidden(torch.cat([d.h_BTH for d in done], 1), kv, routes)


def _stream_into(params: Params, chunk: Chunk, given: Tensor | None, config: Config, division: Division) -> Tensor:
    """What this stage starts from, [t, H]: the stream that the previous one gave, or none did and it embeds."""
    if given is None:
        return embed(params, chunk.tokens_BT, config, division)
    return division.own(given.flatten(0, 1))


def _stream_like(chunk: Chunk, config: Config) -> Tensor:
    return torch.empty(*chunk.tokens_BT.shape, config.hidden_size, device=chunk.tokens_BT.device)


def _step_of(chunk: Chunk, config: Config, mesh: Mesh) -> Step:
    rotary = rotary_of(chunk.pos_BT, config.head_dim, config.rope_theta)
    return Step(chunk.pos_BT, rotary, chunk.places, layout_of(config, mesh).places, chunk.is_start)


def stage_layers(
    params: Params,
    h_tH: Tensor,
    kv: Cache,
    step: Step,
    config: Config,
    ops: Ops,
    division: Division,
    every: "Sequence[Scales]",
) -> Hidden:
    """All layers of this tree on a stream; `config` has these layers and no others."""
    routes: list[Tensor | tuple[()]] = []
    tokens = step.pos_BT.shape
    # Each layer ends with the norm that the next one starts with, in its dtype.
    first, *coming = [Coming(s.attn_norm, p.attn.q.dtype) for p, s in zip(params.layers, every, strict=True)]
    coming.append(Coming(None, torch.float32))
    assert first.norm is not None
    a = ops.normed(h_tH, first.norm, config.rms_norm_eps, first.dtype)
    while (i := len(routes)) < len(params.layers):
        p, s, stream = params.layers[i], every[i], Joined(h_tH, a)
        at_once = _at_once(every, stream, kv, i, step, config, ops, division)
        if at_once is not None:
            (h_tH, a, _), found = at_once
        else:
            (h_tH, a, _), kv, one = decoder_layer(p, s, coming[i], stream, kv, i, step, config, ops, division)
            found = (one,)
        routes += (x.unflatten(0, tokens) if isinstance(x, Tensor) else x for x in found)
    return Hidden(division.whole(h_tH).unflatten(0, tokens), kv, tuple(routes))


class Coming(NamedTuple):
    """What the layer after this one wants of the stream."""

    norm: Gain | None  # None: there is none
    dtype: torch.dtype


class Scales(NamedTuple):
    """The vectors of a layer that act on the stream, worked out."""

    attn_norm: Gain
    attn_gate: Mix
    mlp_norm: Gain
    mlp_post_norm: Gain
    mlp_gate: Mix
    moe: MoEScales | tuple[()]  # for layers with experts
    whole: WholeLayer | None = None  # all of the layer, if a device does that in one and it was prepared


def scales(layers: tuple[Layer, ...], config: Config) -> tuple[Scales, ...]:
    """Of all layers at once: a few operations a step instead of a few a layer."""
    sparse = [p.mlp for p in layers if isinstance(p.mlp, MoE)]
    norms = iter(gains([x for p in layers for x in (p.attn_norm, p.mlp_norm, p.mlp_post_norm)]))
    latent = iter(gains([x for p in sparse for x in (p.squeeze_norm, p.experts.norm)]))
    gates = [x for p in layers for x in (p.attn_residual_gate, p.mlp_residual_gate)]
    blends = iter(mixes(gates, config.residual_gate_temperature, layers[0].attn.q.dtype))
    return tuple(
        Scales(
            attn_norm=next(norms),
            mlp_norm=next(norms),
            mlp_post_norm=next(norms),
            attn_gate=next(blends),
            mlp_gate=next(blends),
            moe=MoEScales(next(latent), next(latent)) if isinstance(p.mlp, MoE) else (),
        )
        for p in layers
    )


def prepared(params: Params, config: Config, mesh: Mesh = ONE, *, ops: Ops | None = None) -> tuple[Scales, ...]:
    """`scales` of this stage's layers for many steps, which take them as `every`, and each layer prepared where the
    device has a form of all of it. They hold what the parameters are now, and where they lie."""
    ops, own = ops or select(sample_tensor(params).device), stage_config(config, mesh)
    every = scales(params.layers, config)
    if ops.prepare is None or mesh.size(STAGE) > 1:
        return every
    norms = [*(s.attn_norm for s in every[1:]), None]
    coming = [*(p.attn.q.dtype for p in params.layers[1:]), params.layers[-1].attn.q.dtype]
    wholes = [  # of what leaves its rows to the next layer in its own dtype
        ops.prepare(_block_of(p, s, norm), _numbers_of(own, i))
        if isinstance(p.mlp, MoE) and p.attn.q.dtype == dtype
        else None
        for i, (p, s, norm, dtype) in enumerate(zip(params.layers, every, norms, coming, strict=True))
    ]
    return tuple(s._replace(whole=whole) for s, whole in zip(every, wholes, strict=True))


def _check_prepared(layers: Sequence[Layer], every: Sequence[Scales]) -> None:
    for n, (p, s) in enumerate(zip(layers, every, strict=True)):
        if s.whole is not None and (s.whole.block.q is not p.attn.q or s.whole.block.o is not p.attn.o):
            raise ValueError(f"every[{n}] was prepared for other parameters than these: prepare them anew")


def _block_of(p: Layer, s: Scales, coming: Gain | None) -> Block:
    attn, m = p.attn, p.mlp
    assert isinstance(m, MoE)
    assert isinstance(s.moe, MoEScales)
    return Block(
        *(attn.q, attn.k, attn.v, attn.gate, attn.o, s.attn_gate, s.mlp_norm),
        *(m.router.weight, m.router.bias, m.squeeze, s.moe.squeeze_norm),
        *(m.experts.gate_up, m.experts.down, s.moe.expert_norm, m.expand, s.mlp_post_norm, s.mlp_gate, coming),
    )


def _numbers_of(config: Config, layer: int) -> Numbers:
    window = config.window if config.is_sliding(layer) else 0
    factors = config.qk_scale_factor, config.output_multiplier, config.routed_scaling_factor
    return Numbers(config.head_dim, window, config.top_k, *factors, config.rms_norm_eps, config.post_norm_eps)


def embed(params: Params, tokens_BT: Tensor, config: Config, division: Division = UNDIVIDED) -> Tensor:
    """Rows of the table, normed: int64 [B, T] -> float32 [t, H]."""
    assert isinstance(params.embed, Tensor), "the first stage embeds"
    # Each rank has some rows of the table, and zeros for the ids of the others; an id below 0 is nobody's.
    rows = embedding(params.embed, tokens_BT, division.mesh.index(STAGE) * len(params.embed))
    return stream_norm(division.summed(rows.flatten(0, 1)), config.rms_norm_eps)


def decoder_layer(
    p: Layer,
    s: Scales,
    coming: Coming,
    stream: Joined,
    kv: Cache,
    layer: int,
    step: Step,
    config: Config,
    ops: Ops,
    division: Division,
) -> tuple[Joined, Cache, Tensor | tuple[()]]:
    """Two branches, each between two norms and blended into the stream by its residual gate; and the routes taken.

    The stream comes normed for the first branch and leaves normed for what is `coming`.
    """
    post_eps, eps = config.post_norm_eps, config.rms_norm_eps
    h, a, _ = stream
    b, kv = attention(p.attn, a, kv, layer, step, config, ops, division)
    h, m, rounded = ops.join(h, b[None], None, s.attn_gate, s.mlp_norm, post_eps, eps, torch.float32)
    f, taken = mlp(p.mlp, m, config, ops, division, s.moe, rounded)
    return ops.join(h, f, s.mlp_post_norm, s.mlp_gate, coming.norm, post_eps, eps, coming.dtype), kv, taken


def _at_once(
    every: "Sequence[Scales]",
    stream: Joined,
    kv: Cache,
    first: int,
    step: Step,
    config: Config,
    ops: Ops,
    division: Division,
) -> tuple[Joined, Sequence[Tensor]] | None:
    """Layers from the `first` on as one operation: as many as were prepared and as take this step; None if it is not
    among them."""
    whole = every[first].whole
    if whole is None or ops.prepare is None or not isinstance(kv, KVCache) or division.mesh.size(STAGE) > 1:
        return None
    return whole(stream, _sites(every, kv, first, step, config))


def _sites(
    every: "Sequence[Scales]", kv: KVCache, first: int, step: Step, config: Config
) -> Iterator[tuple[WholeLayer, Site]]:
    """The prepared layers from the `first` on, up to one that is not."""
    for layer in range(first, len(every)):
        whole = every[layer].whole
        if whole is None:
            return
        slot, rotary = step.slots[layer][1], step.rotary if config.has_rotary(layer) else None
        yield whole, Site(rotary, kv.k[slot], kv.v[slot], seen_by(layer, step, config))


def logits(params: Params, h: Tensor, config: Config, ops: Ops, mesh: Mesh = ONE, *, gathered: bool = True) -> Tensor:
    """Vocabulary logits of stream rows: [..., H] -> float32 [..., V], scaled, then capped smoothly at ±soft_cap.

    On a mesh each rank computes its share of the vocabulary; `gathered=False` leaves it at that: [..., V / ranks].
    """
    if mesh.is_last:
        z = capped_logits(params, h, config, ops)
    else:  # the last stage has the head
        z = torch.empty(*h.shape[:-1], config.vocab_size // mesh.size(STAGE), device=h.device)
    z = broadcast(z, mesh, ("pp",), mesh.pp - 1)
    return gather(z, mesh, STAGE) if gathered else z


def capped_logits(params: Params, h: Tensor, config: Config, ops: Ops) -> Tensor:
    """The head's equations on this rank's rows of the vocabulary: [..., H] -> float32 [..., V or its share]."""
    head = params.head if isinstance(params.head, Tensor) else params.embed
    assert isinstance(head, Tensor), "the last stage has the head"
    assert isinstance(params.norm, Tensor), "the last stage has the final norm"
    x = ops.normed(h, Gain(params.norm), config.rms_norm_eps, head.dtype)
    return capped(ops.linear(x, head), config.output_multiplier, config.soft_cap)
