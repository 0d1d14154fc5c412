"""What benchmarks of a rank's share have in common: random weights and states, steps over them, what these must do.

The floor of a decode step is every byte that it must read: weights once, each expert that a token really takes once,
the keys and values that each layer sees.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.buckets import Piece
from muse_fn.capture import capture
from muse_fn.captured_decode import Arenas, decode_and_sample, linked_as_one_op
from muse_fn.captured_prefill import capture_reads
from muse_fn.decoder import Chunk, Scales, hidden_states, scales
from muse_fn.kernels.select import Ops, select
from muse_fn.kvcache.cache import KVCache, View, init_cache, locate, step_positions
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, sparse_layers
from muse_fn.params.tree import MoE, Params, map_tensors, tensors
from muse_fn.sample import Draw, Sampling, draws
from muse_fn.sharding.division import is_divided
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.split import local_kv_heads
from muse_fn.step import prefill

BLOCK = 128
BF16 = torch.bfloat16


class Alone:
    """A link that reaches nobody: shapes are those of the whole mesh, values this rank's. See mesh.Link."""

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.unflatten(0, (len(peers), -1))[0]

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.expand(len(peers), *x.shape)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.unflatten(0, (len(peers), -1))

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        return x

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        return into


def experts_of(leaf: Leaf) -> bool:
    """Whether a parameter is of experts, in whatever layer."""
    return bool(leaf.row.each)


def both_seconds(fn: Callable[[], object], repeats: int, inner: int) -> tuple[float, float]:
    """Median times of one of `inner` calls in a row: between events on the device, and by the host's clock."""
    fn()
    spent: list[tuple[float, float]] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        for _ in range(inner):
            fn()
        end.record()
        torch.cuda.synchronize()
        spent.append((start.elapsed_time(end) / 1e3 / inner, (time.perf_counter() - began) / inner))
    device, host = zip(*spent, strict=True)
    return statistics.median(device), statistics.median(host)


def device_seconds(fn: Callable[[], object], repeats: int = 7, inner: int = 1) -> float:
    """The median time that the device spends on `inner` calls in a row, by its own clock, for one of them."""
    return both_seconds(fn, repeats, inner)[0]


class Rates(NamedTuple):
    """What the card does at best, in this run."""

    read: float  # bytes a second
    copied: float  # bytes read and written a second
    products: float  # bfloat16 operations a second


Clock = Callable[[Callable[[], object]], float]  # seconds of a call


def rates(device: torch.device, floats: int = 1 << 29, side: int = 8192, clock: Clock = device_seconds) -> Rates:
    """A large sum (of 2 GiB), a large copy by a kernel, and a large product through the library."""
    big = torch.randn(floats, device=device)
    read = big.nbytes / clock(lambda: big.sum())
    other = torch.empty_like(big)
    copied = 2 * big.nbytes / clock(lambda: torch.add(big, 1.0, out=other))
    a, b = (torch.randn(side, side, device=device).to(BF16) for _ in "ab")
    return Rates(max(read, copied), copied, 2 * side**3 / clock(lambda: a @ b))


class State(NamedTuple):
    """A step's surroundings."""

    kv: KVCache
    view: View
    tokens: Tensor  # int64 [B, 1]


def blocks_of(config: Config, batch: int, context: int) -> int:
    """Blocks of a step's cache. Contexts too long for a table of each group share one: what is read is the same."""
    each = batch * -(-(context + 16) // BLOCK)
    return 1 + (layout_of(config).groups * each if context <= 4096 else each)


def state_of(config: Config, mesh: Mesh, batch: int, context: int, device: torch.device) -> State:
    """A cache of random values in which every sequence has context - 1 positions, blocks in random order."""
    groups, blocks = layout_of(config).groups, blocks_of(config, batch, context)
    kv = init_cache(config, blocks, BLOCK, dtype=BF16, device=str(device), mesh=mesh)
    for arena in (*kv.k, *kv.v):
        arena.normal_()
    order = 1 + torch.randperm(blocks - 1, device=device)
    table = order.view(-1, batch, -(-(context + 16) // BLOCK)).expand(groups, -1, -1).contiguous()
    past = torch.full((batch,), context - 1, device=device)
    tokens = torch.randint(0, 1000, (batch, 1), device=device)
    return State(kv, View(table, past, torch.ones_like(past)), tokens)


def touched(params: Params, state: State, config: Config, mesh: Mesh, ops: Ops) -> list[int]:
    """How many of this rank's experts the step's tokens take, in each layer."""
    places = locate(state.view, 1, BLOCK, layout_of(config, mesh))
    chunk = Chunk(state.tokens, step_positions(state.view, 1), places)
    routes = hidden_states(params, [chunk], state.kv, config, ops, mesh).routes
    first = mesh.index(("ep",)) * (local := config.experts // mesh.ep)
    return [len(r[(r >= first) & (r < first + local)].unique()) for r in routes if isinstance(r, Tensor)]


def bytes_to_read(params: Params, config: Config, mesh: Mesh, batch: int, context: int, experts: float) -> float:
    """Of one decode step; rows of the embedding and all writes are left out."""
    packed = [p.mlp.experts for p in params.layers if isinstance(p.mlp, MoE)]
    in_experts = sum(t.nbytes for e in packed for t in tensors((e.gate_up, e.down)))
    others = sum(t.nbytes for t in tensors(params)) - in_experts
    others -= params.embed.nbytes if isinstance(params.embed, Tensor) else 0
    keys = sum(min(context, config.window) if config.is_sliding(i) else context for i in range(config.layers))
    row = 2 * BF16.itemsize * config.head_dim * local_kv_heads(config, mesh)
    return others + in_experts * experts / (config.experts // mesh.ep) + batch * keys * row


def captured_step(
    params: Params, state: State, config: Config, mesh: Mesh, drawn: Sequence[Tensor] = ()
) -> Callable[[], object]:
    """A decode step as a graph, rows drawn, the next position always the same: a call makes it with the next of the
    `drawn` tokens in turn, or with the state's."""
    batch, device, ops = len(state.tokens), state.tokens.device, select(state.tokens.device)
    settings, inner = [Sampling(1.0, seed=n) for n in range(batch)], linked_as_one_op(mesh)
    draw = map_tensors(lambda t: t.to(device), draws(settings, config.vocab_size))

    def step(p: Params, tokens: Tensor, kv: Arenas, view: View, draw: Draw, every: tuple[Scales, ...]) -> object:
        args = p, tokens, kv, view, draw, (), config, inner
        return decode_and_sample(*args, filtered=False, every=every, ops=ops)

    args = (params, state.tokens, Arenas(state.kv.k, state.kv.v), state.view, draw, scales(params.layers, config))
    graph = capture(step, args, donate=(2,), fixed=(0, 5), strict=False)
    turns = cycle([partial(graph, params, tokens, *args[2:]) for tokens in drawn or (state.tokens,)])
    return lambda: next(turns)()


def _prompt_of(config: Config, mesh: Mesh, length: int, device: torch.device) -> tuple[KVCache, View, Tensor]:
    """A cache on the device, and the view and the tokens of a prompt at its start, on the host."""
    groups, columns = layout_of(config).groups, -(-length // BLOCK)
    kv = init_cache(config, 1 + groups * columns, BLOCK, dtype=BF16, device=str(device), mesh=mesh)
    table, zero = (1 + torch.arange(groups * columns)).view(groups, 1, columns), torch.zeros(1, dtype=torch.int64)
    return kv, View(table, zero, zero + length), torch.randint(0, 1000, (1, length))


def first_chunk(params: Params, config: Config, mesh: Mesh, length: int, device: torch.device) -> Callable[[], None]:
    """A call reads the first `length` tokens of a prompt into a cache of its own."""
    kv, view, tokens = _prompt_of(config, mesh, length, device)
    view, tokens = map_tensors(lambda t: t.to(device), view), tokens.to(device)
    held = [kv]

    def run() -> None:
        _, held[0] = prefill(params, tokens, held[0], view, config, mesh, gathered=False, checked=True)

    return run


def captured_chunk(params: Params, config: Config, mesh: Mesh, length: int, device: torch.device) -> Callable[[], None]:
    """The same as one graph. Raises CaptureError where it cannot be."""
    kv, view, tokens = _prompt_of(config, mesh, length, device)
    sizes = [Piece(length, view.table_GBN.shape[2])]
    steps, kv = capture_reads(params, kv, config, mesh, sizes=sizes, strict=False)
    held = [kv]

    def run() -> None:
        _, held[0] = steps(tokens, view, held[0])

    return run


def operations_of(params: Params, config: Config, mesh: Mesh, length: int) -> float:
    """Of the products of a prompt's first `length` tokens on this rank: with matrices that all ranks hold whole it
    multiplies its own tokens only, if these are divided."""
    rows = sum(t.numel() for t in tensors(params) if t.dim() == 2 and t.dtype == BF16)
    rows -= sum(t.numel() for t in (params.embed, params.head) if isinstance(t, Tensor))
    sparse = [p.mlp for p in params.layers if isinstance(p.mlp, MoE)]
    shared = sum(p.router.weight.numel() for p in sparse)
    if mesh.squeeze == "replicated":
        both = sum(p.squeeze.numel() + p.expand.numel() for p in sparse)
        rows, shared = rows - both, shared + both
    shared /= mesh.size(STAGE) if is_divided(length, mesh) else 1
    expert = 3 * config.latent_size * config.expert_size // mesh.tp * config.top_k / mesh.ep
    expert *= sum(sparse_layers(config))
    triangle, beyond = length * (length + 1), max(0, length - config.window)
    pairs = sum(triangle - beyond * (beyond + 1) * config.is_sliding(i) for i in range(config.layers)) // 2
    heads = config.heads // (mesh.ep * mesh.tp) * config.head_dim
    return 2 * length * (rows + shared + expert) + 4 * pairs * heads
