"""The model as it is trained: its size, the operations in a form with gradients, the loss, one step of the optimiser.

Nothing of the architecture is written here: the loss runs muse_fn.decoder on a parameter tree.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.decoder import Chunk, hidden_states, logits
from muse_fn.kernels import pieces, reference
from muse_fn.kernels.packed import Weight, dequantise, quantise_mxfp4
from muse_fn.kernels.select import Ops
from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.schema import leaves, sparse_layers
from muse_fn.params.tree import Params, from_named, named
from train.data import Batch

Leaves = dict[str, Tensor]  # the parameter tree by accessor path

# output_multiplier is 1 / sqrt(hidden_size / 256) as in the released model; qk_scale_factor is the released value.
NANO = Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    layers=6,
    heads=8,
    kv_heads=2,
    head_dim=32,
    latent_size=96,
    expert_size=128,
    experts=8,
    top_k=2,
    window=64,
    max_positions=2048,
    rope_theta=10_000.0,
    output_multiplier=1.0,
)


def training_ops(doc_BT: Tensor, loads: list[Tensor]) -> Ops:
    """The operations of a packed batch: no token sees another conversation; expert loads are added to `loads`."""
    same = (doc_BT[:, :, None] == doc_BT[:, None, :]).unsqueeze(1)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int, is_start: bool = False
    ) -> Tensor:
        seen = same & reference.visible(q_pos[:1], k_pos[:1], window).unsqueeze(1)
        k, v = (x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen).transpose(1, 2)

    def expert_rows(
        u: Tensor,
        idx: Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        first: int = 0,
        dtype: torch.dtype | None = None,
        arranged: Tensor | tuple[()] | None = None,
    ) -> Tensor:
        del arranged
        assert isinstance(gate_up, Tensor)
        idx = idx - first
        loads.append(F.one_hot(idx, gate_up.shape[0]).sum((0, 1)))
        return every_expert(u, idx, gate_up, cast("Tensor", down)).to(dtype or u.dtype)

    return Ops(
        reference.linear,
        attend,
        reference.attend_blocks,
        expert_rows,
        pieces.linears,
        "training: packed rows, every expert computed",
    )


def every_expert(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Tensor, down_EMF: Tensor) -> Tensor:
    """reference.expert_rows by computing all experts and picking: more products, no sizes that depend on data."""
    gate, up = torch.einsum("tm,efm->etf", u_TM, gate_up_EFM).chunk(2, -1)
    rows = torch.einsum("etf,emf->tem", F.silu(gate) * up, down_EMF)
    return rows.gather(1, idx_TR.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


class Aux(NamedTuple):
    """What a step says besides its loss."""

    right: Tensor  # share of learned tokens predicted
    loads: Tensor  # routes per layer and expert


def loss(params: Params, batch: Batch, config: Config) -> tuple[Tensor, Aux]:
    """Mean cross-entropy of the learned tokens."""
    loads: list[Tensor] = []
    ops = training_ops(batch.doc, loads)
    pos_BT = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand(batch.tokens.shape)
    h = hidden_states(params, [Chunk(batch.tokens, pos_BT, is_start=True)], (), config, ops).h_BTH
    z = logits(params, h[:, :-1], config, ops)
    target, wanted = batch.tokens[:, 1:], batch.learned[:, 1:]
    each = F.cross_entropy(z.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    total = wanted.sum().clamp_min(1)
    right = ((z.argmax(-1) == target) & wanted).sum() / total
    return (each * wanted).sum() / total, Aux(right, torch.stack(loads))


def stored(values: Leaves, config: Config, dtype: torch.dtype, packed: bool) -> Params:
    """The tree a checkpoint would give back: rounded to `dtype`, and with `packed` the inner experts to MXFP4.

    Gradients taken here and applied to `values` are the straight-through rule of quantisation-aware training.
    """
    table = list(leaves(config))
    seen = {leaf.path: values[leaf.path].to(torch.float32 if leaf.row.dtype == "float32" else dtype) for leaf in table}
    for kind in ("gate_up", "down") if packed else ():
        paths = [leaf.path for leaf in table if leaf.path.endswith("experts." + kind) and is_packed(leaf.path, config)]
        through = dequantise(quantise_mxfp4(torch.stack([values[path] for path in paths])), dtype)
        seen.update(zip(paths, through.unbind(0), strict=True))
    return from_named(sparse_layers(config), seen)


def is_packed(path: str, config: Config) -> bool:
    """Whether the checkpoint keeps this leaf in 4 bits: the experts of all but the first and last layer."""
    words = path.split(".")
    return words[-1] in ("gate_up", "down") and "experts" in words and 0 < int(words[1]) < config.layers - 1


class State(NamedTuple):
    """The optimiser's state: float32 parameters and Adam's two moments, by path."""

    values: Leaves
    first: Leaves
    second: Leaves


def start(config: Config, seed: int, device: str) -> State:
    """Random parameters, moments at zero."""
    values = {path: cast("Tensor", leaf).to(device) for path, leaf in named(init_params(config, seed)).items()}
    return State(values, *({path: torch.zeros_like(leaf) for path, leaf in values.items()} for _ in range(2)))


class Pace(NamedTuple):
    """What changes from step to step, as scalar tensors so that a compiled step need not know the numbers."""

    rate: Tensor
    balance: Tensor
    step: Tensor


def update(state: State, grads: Leaves, loads: Tensor, pace: Pace) -> State:
    """One step of AdamW with a clipped gradient, and of the selection biases towards equal loads."""
    norm = torch.stack([grad.float().pow(2).sum() for grad in grads.values()]).sum().sqrt()
    scale = (1.0 / (norm + 1e-6)).clamp_max(1.0)
    layers = 0
    values, first, second = {}, {}, {}
    for path, value in state.values.items():
        grad = grads[path].float() * scale
        m = first[path] = 0.9 * state.first[path] + 0.1 * grad
        v = second[path] = 0.98 * state.second[path] + 0.02 * grad * grad
        if path.endswith("router.bias"):
            load = loads[layers].float()
            values[path] = value + pace.balance * torch.sign(load.mean() - load)
            layers += 1
            continue
        step = m / (1 - 0.9**pace.step) / ((v / (1 - 0.98**pace.step)).sqrt() + 1e-9)
        decay = 0.05 if value.dim() > 1 else 0.0
        values[path] = value - pace.rate * (step + decay * value)
    return State(values, first, second)


Step = Callable[[State, Params, Batch, Pace], tuple[State, Tensor, Aux]]


def stepper(config: Config, compiled: bool) -> Step:
    """A training step as a pure function: (state, what is stored of it, batch, pace) -> (state, loss, aux)."""
    both = torch.func.grad_and_value(partial(loss, config=config), has_aux=True)

    def step(state: State, params: Params, batch: Batch, pace: Pace) -> tuple[State, Tensor, Aux]:
        grads, (value, aux) = both(params, batch)
        return update(state, cast("Leaves", named(grads)), aux.loads, pace), value, aux

    if not compiled:
        return step
    both = cast("Callable[..., tuple[Params, tuple[Tensor, Aux]]]", torch.compile(both))
    update_ = torch.compile(update)

    def fast(state: State, params: Params, batch: Batch, pace: Pace) -> tuple[State, Tensor, Aux]:
        grads, (value, aux) = both(params, batch)
        return update_(state, cast("Leaves", named(grads)), aux.loads, pace), value, aux

    return fast
