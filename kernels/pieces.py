"""What stands between the large matrix products of a layer, each piece one operation: the plain-PyTorch meaning.

A device form does a piece in one pass over its tensors; the equations are those of kernels/norms.py, in float32.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.norms import Gain, Mix, Rotary, centred_norm, input_scaled_norm, plain_norm, residual_gate, rotate
from muse_fn.kernels.packed import Weight
from muse_fn.kernels.reference import linear, sigmoid, write_rows

ROUTE_EPS = 1e-15
Linear = Callable[[Tensor, Weight, torch.dtype | None], Tensor]
Elementwise = Callable[[Tensor], Tensor]


def linears(
    x: Tensor,
    ws: Sequence[Weight],
    dtype: torch.dtype | None = None,
    *,
    rounded: Tensor | tuple[()] = (),
    linear: Linear = linear,
) -> tuple[Tensor, ...]:
    """Several products of one input [..., in]: each as `linear`. `rounded` is x in bfloat16, for forms that ask."""
    del rounded
    return tuple(linear(x, w, dtype) for w in ws)


def whole(parts: Tensor) -> Tensor:
    """Rows in parts [P, ..., W / P], in the order of their columns -> [..., W]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts.unbind(), -1)


def normed(x: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """The centred norm over the last dimension, rounded to `dtype` once. The norm's factor is of any float dtype."""
    return centred_norm(x, Gain(norm.factor.float()), eps).to(dtype)


class Joined(NamedTuple):
    """A stream after a branch."""

    h: Tensor  # float32 [..., H]
    a: Tensor  # what the next branch starts from: h normed, or h itself where no norm follows
    rounded: Tensor | tuple[()] = ()  # a float32 `a` in bfloat16 too, if the form made that


def join(
    h: Tensor,
    branch: Tensor,
    scale: Gain | None,
    mix: Mix,
    norm: Gain | None,
    post_eps: float,
    eps: float,
    dtype: torch.dtype,
) -> Joined:
    """The branch normed (input-scaled where `scale` is given), blended into the stream h [..., H], which is normed.

    The branch is in parts [P, ..., H / P], as `whole` takes them.
    h' = alpha h + beta b with b = y / rms(y), y = branch or branch * scale; a = h' / rms(h') * norm, in `dtype`.
    """
    branch = whole(branch)
    b = plain_norm(branch, post_eps) if scale is None else input_scaled_norm(branch, scale, post_eps)
    h = residual_gate(h, b, mix)
    return Joined(h, h if norm is None else normed(h, norm, eps, dtype))


def heads(
    q_BTF: Tensor, k_BTF: Tensor, rotary: Rotary | None, head_dim: int, qk_scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Projected rows -> queries [B, T, N, D] and keys [B, T, K, D] in the rows' dtype.

    Each head is normed, queries times qk_scale, then both are rotated if the layer has rotary.
    """
    dtype, count = q_BTF.dtype, q_BTF.shape[-1] // head_dim
    q, k = (plain_norm(x.unflatten(-1, (-1, head_dim)), eps) for x in (q_BTF, k_BTF))
    q = q * qk_scale
    if rotary is not None:
        q, k = rotate(torch.cat([q, k], 2), rotary).split([count, k.shape[2]], 2)
    return q.to(dtype), k.to(dtype)


def place(
    q_BTF: Tensor,
    k_BTF: Tensor,
    v_BTF: Tensor,
    rotary: Rotary | None,
    qk_scale: float,
    eps: float,
    k_arena: Tensor,
    v_arena: Tensor,
    rows: Tensor,
) -> Tensor:
    """`heads`, and keys and values written into the arenas' rows int64 [B*T] -> queries [B, T, N, D].

    Several padding columns may name one row of block 0; which of them it keeps is not said.
    """
    head_dim = k_arena.shape[-1]
    q, k = heads(q_BTF, k_BTF, rotary, head_dim, qk_scale, eps)
    write_rows(k_arena, k.flatten(0, 1), rows)
    write_rows(v_arena, v_BTF.flatten(0, 1).unflatten(-1, (-1, head_dim)), rows)
    return q


class Projected(NamedTuple):
    """A layer's products of the normed stream, any float dtype; features of heads one after the other."""

    q_BTF: Tensor
    k_BTF: Tensor
    v_BTF: Tensor
    gate_BTF: Tensor  # before the sigmoid


class Context(NamedTuple):
    """What a step's tokens see and where they go, for the layers of one window group."""

    write: Tensor  # int64 [B*T], as `place` takes it
    blocks_BC: Tensor  # int64, and the rest as reference.attend_blocks takes it
    q_pos_BT: Tensor
    k_pos_BS: Tensor
    window: int
    is_start: bool = False


def gated(o_BTND: Tensor, gate_BTF: Tensor, eps: float, dtype: torch.dtype, sigmoid: Elementwise = sigmoid) -> Tensor:
    """Each head's output normed, times the sigmoid of its gate -> [B, T, N * D] in `dtype`."""
    return (plain_norm(o_BTND, eps).flatten(2) * sigmoid(gate_BTF.float())).to(dtype)


class Routes(NamedTuple):
    """Which experts each token takes, and how much of each."""

    idx_TR: Tensor  # int64, ascending
    weight_TR: Tensor  # float32, sums to the routed scaling factor


def route(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, multiplier: float, factor: float, sigmoid: Elementwise = sigmoid
) -> Routes:
    """Sigmoid scores of float32 logits times `multiplier`; the bias takes part in the choice and not in the weights.

    The weights of a token's `top_k` experts sum to `factor`.
    """
    scores = sigmoid(logits_TE * multiplier)
    idx = torch.topk(scores + bias_E, top_k, dim=-1, sorted=False).indices
    weight = scores.gather(-1, idx)
    weight = weight / (weight.sum(-1, keepdim=True) + ROUTE_EPS) * factor
    # Rows are added by ascending expert id, the published model's order, whatever order topk found them in.
    idx, order = idx.sort(-1)
    return Routes(idx, weight.gather(-1, order))


class Chosen(NamedTuple):
    """The experts of each token, and what goes into them."""

    routes: Routes
    u_TM: Tensor
    # Its rows once more, as the forms for packed experts take so many routes; () where no form wants them.
    arranged_TM: Tensor | tuple[()] = ()


def choose(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    multiplier: float,
    factor: float,
    squeezed_PTm: Tensor,
    norm: Gain,
    eps: float,
    dtype: torch.dtype,
    sigmoid: Elementwise = sigmoid,
) -> Chosen:
    """`route`, and the squeezed tokens, in parts as `whole` takes them, normed and rounded to `dtype`."""
    routes = route(logits_TE, bias_E, top_k, multiplier, factor, sigmoid)
    return Chosen(routes, normed(whole(squeezed_PTm), norm, eps, dtype))


def blend(y_TRM: Tensor, weight_TR: Tensor, norm: Gain, eps: float, dtype: torch.dtype) -> Tensor:
    """Norms each route's row (input-scaled), weights it, sums over routes in float32: [T, R, M] -> [T, M] in `dtype`.

    The rows must be whole: the norm of a partial sum is not a part of the norm.
    """
    return (input_scaled_norm(y_TRM, norm, eps) * weight_TR.unsqueeze(-1)).sum(1).to(dtype)


class Block(NamedTuple):
    """The parameters of a layer with experts on one rank, vectors worked out, and the norm of the layer after it."""

    q: Weight
    k: Weight
    v: Weight
    gate: Weight
    o: Weight
    attn_mix: Mix
    mlp_norm: Gain
    router: Tensor
    bias: Tensor
    squeeze: Weight
    squeeze_norm: Gain
    gate_up: Weight
    down: Weight
    expert_norm: Gain
    expand: Weight
    post_norm: Gain
    mlp_mix: Mix
    coming: Gain | None  # None: this layer is the last


class Numbers(NamedTuple):
    """A layer's numbers, as the operations above take them."""

    head_dim: int
    window: int
    top_k: int
    qk_scale: float
    multiplier: float
    factor: float
    eps: float
    post_eps: float
