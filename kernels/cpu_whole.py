"""Layers prepared for steps of few tokens on a CPU: their parameters are checked once, a step checks what is its own.

kernels/cpu_ops.py has each operation alone; what is not taken here goes there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from muse_fn.kernels import cpu_calls, cpu_ops, cpu_reasons
from muse_fn.kernels.cpu_ops import BF16, FLOAT, MOST_QUERIES
from muse_fn.kernels.one_op import watcher
from muse_fn.kernels.packed import logical_shape
from muse_fn.kernels.pieces import Block, Joined, Numbers
from muse_fn.kernels.select import Site


class Prepared:
    """A layer, and how it is run for each size of step that came and each place where its parameters lay: these are
    addresses, so a copy, in this process or another, begins without."""

    def __init__(self, block: Block, numbers: Numbers) -> None:
        self.block, self.numbers, self.plans = block, numbers, dict[Any, Any]()
        self.held: list[Tensor] = [t for x in block for t in ((x,) if isinstance(x, Tensor) else x or ())]
        self.kept = logical_shape(block.k)[0] // numbers.head_dim, numbers.head_dim  # a position's in an arena

    def __call__(self, stream: Joined, layers: Iterable[tuple[Any, Site]]) -> tuple[Joined, Sequence[Tensor]] | None:
        """`WholeLayer`."""
        return _run(stream, layers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, (self.block, self.numbers)


def prepare(block: Block, numbers: Numbers) -> Prepared | None:
    """`Ops.prepare`: for bfloat16, experts in MXFP4 perhaps."""
    if why := _why_not_block(block, numbers):
        cpu_ops.say("prepare", why)
        return None
    return Prepared(block, numbers)


def _why_not_block(p: Block, n: Numbers) -> str:
    """Why a layer of these parameters is none; what it would be given is stood for by rows of zeros."""
    dense = p.q, p.k, p.v, p.gate, p.o, p.squeeze, p.expand
    if any(not isinstance(w, Tensor) or w.dtype != BF16 for w in dense) or p.router.dtype != FLOAT:
        return "a matrix outside of the experts that is not in bfloat16, or a router that is not in float32"
    (width, features), keys, latent = logical_shape(p.o), logical_shape(p.k)[0], logical_shape(p.squeeze)[0]
    into, mixed = torch.zeros(1, width, dtype=BF16), torch.zeros(1, latent, dtype=BF16)
    coming = () if p.coming is None else (p.coming.factor,)
    streams = *p.attn_mix, *p.mlp_mix, p.mlp_norm.factor, p.post_norm.factor, *coming
    arena = torch.zeros(2, 1, 1, n.head_dim, dtype=BF16)
    return (
        cpu_reasons.no_product(into, (p.q, p.k, p.v, p.gate), None)
        or cpu_reasons.no_product(torch.zeros(1, features, dtype=BF16), (p.o,), None)
        or cpu_reasons.no_product(into.float(), (p.router, p.squeeze), None)
        or cpu_reasons.no_product(mixed, (p.expand,), None)
        or cpu_reasons.no_experts(latent, p.gate_up, p.down)
        or cpu_reasons.no_attention(features // keys, n.head_dim, arena, arena)
        or cpu_reasons.no_heads(n.head_dim, None, into)
        or cpu_reasons.no_vectors(width, *streams)
        or cpu_reasons.no_vectors(latent, p.squeeze_norm.factor, p.expert_norm.factor)
        or cpu_reasons.no_vectors(len(p.router), p.bias)
        or cpu_reasons.why_not(p.bias, *streams)
    )


def _run(stream: Joined, layers: Iterable[tuple[Prepared, Site]]) -> tuple[Joined, Sequence[Tensor]] | None:
    """As many of these layers as take the step, in one call; None if the first does not."""
    form, known, plans = cpu_ops.file_of("cpu_layer"), set[int](), list[Any]()
    for made, site in layers:
        plan = _plan_of(made, stream, site, known)
        if plan is None:
            break
        plans.append((plan, site))
        if made.block.coming is None:
            break
    return form.run_layers(plans, stream) if plans else None


def _plan_of(made: Prepared, stream: Joined, site: Site, known: set[int]) -> Any:
    """How a layer is run on a step, or None for a step that it does not take."""
    if not _takes(made, stream, site, known):
        return None
    (batch, length), count = site.at.q_pos_BT.shape, torch.get_num_threads()
    size = batch, length, site.k_arena.shape[1], count, cpu_calls.helpers(count)
    key = size, *(t.data_ptr() for t in made.held)  # whose storage may be another one by now
    plan = made.plans.get(key)
    if plan is None:  # one thread's is as good as another's
        form = cpu_ops.file_of("cpu_layer")
        plan = made.plans[key] = form.whole(made.block, made.numbers, form.Size(*size))
    return plan


def _takes(made: Prepared, stream: Joined, site: Site, known: set[int]) -> bool:
    """Whether a step has few rows, whose tensors are whole; those that are `known` to be are not looked at again. Who
    watches is to see the arenas written by PyTorch."""
    (h, a, _), (tokens, width) = stream, stream.h.shape
    at, angles, (batch, length) = site.at, site.rotary or (), site.at.q_pos_BT.shape
    if watcher() is not None or length > MOST_QUERIES or not tokens == batch * length <= cpu_ops.most().rows:
        return False
    if cpu_ops.experts_file(tokens, tokens * made.numbers.top_k, made.block.down) != "cpu_experts":
        return False
    arenas, places = (site.k_arena, site.v_arena), (at.write, at.blocks_BC, at.q_pos_BT, at.k_pos_BS)
    kinds = (FLOAT, (h,)), (BF16, (a, *arenas)), (FLOAT, angles), (torch.int64, places)
    new = [(x, dtype) for dtype, tensors in kinds for x in tensors if id(x) not in known]
    known.update(id(x) for x, _ in new)
    return (
        a.shape == h.shape == (tokens, width)
        and arenas[0].shape == arenas[1].shape
        and arenas[0].shape[2:] == made.kept
        and all(x.numel() == tokens * made.numbers.head_dim for x in angles)
        and all(x.is_contiguous() and x.dtype == dtype for x, dtype in new)
        and not cpu_reasons.why_not(*(x for x, _ in new))
    )
