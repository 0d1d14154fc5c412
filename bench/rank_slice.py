"""What one of eight cards computes at full width, alone on one card: no communication, random weights made there.

    python bench/rank_slice.py [--device cuda] [--layers 62] [--squeeze split] [--save]

The mesh is ep=2, tp=4: 16 query heads, 2 KV heads, 128 of 256 experts with an inner width of 1,024 in MXFP4, 25,256
rows of the vocabulary. Its other ranks are imitated: a sum is this rank's part, a gather this rank's part repeated. The
floor is every byte that a step must read (weights once, each expert that a token really takes once, the keys and values
that each layer sees) over the best read rate of this run; of a prefill, its products over the best bfloat16 rate.
Times are device times of captured steps, sampling included. Prints Markdown. Needs an H200 for all 62 layers.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.capture import capture
from muse_fn.captured_decode import Arenas, decode_and_sample
from muse_fn.decoder import Chunk, Scales, hidden_states, scales
from muse_fn.kernels.packed import MXFP4, Weight
from muse_fn.kernels.select import STATIC, Ops, select
from muse_fn.kvcache.cache import KVCache, View, init_cache, locate, step_positions
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.slicing import shape_of_part
from muse_fn.params.tree import MoE, Params, from_named, map_tensors, tensors
from muse_fn.sample import Draw, Sampling, draws
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.split import part_of
from muse_fn.step import prefill

BLOCK, CHUNK = 128, 4096
BF16 = torch.bfloat16


class Alone:
    """A link that reaches nobody: shapes are those of the whole mesh, values this rank's."""

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """This rank's part."""
        return x

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        """This rank's part, as often as there are ranks."""
        return x.expand(len(peers), *x.shape)

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        """What this rank would give."""
        return x

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        """Nothing comes."""
        return into


def random_slice(config: Config, mesh: Mesh, device: torch.device) -> Params:
    """This rank's parameters, made where they are: experts packed in every layer, all others in bfloat16 or float32."""
    generator = torch.Generator(device).manual_seed(0)

    def made(leaf: Leaf) -> Weight:
        shape = shape_of_part(part_of(leaf, config, mesh))
        if leaf.row.each:
            codes = torch.randint(
                0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device, generator=generator
            )
            scales = torch.randint(
                119, 121, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device=device, generator=generator
            )
            return MXFP4(codes, scales)
        dtype = torch.float32 if leaf.row.dtype == "float32" else BF16
        if leaf.row.init != "normal":
            return torch.full(shape, float(leaf.row.init == "ones"), dtype=dtype, device=device)
        return (torch.randn(shape, device=device, generator=generator) * config.initializer_range).to(dtype)

    return from_named(sparse_layers(config), {leaf.path: made(leaf) for leaf in leaves(config)})


def device_seconds(fn: Callable[[], object], repeats: int = 7, inner: int = 1) -> float:
    """The median time that the device spends on `inner` calls in a row, by its own clock, for one of them."""
    fn()
    torch.cuda.synchronize()
    spent: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            fn()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(spent)


class Rates(NamedTuple):
    """What the card does at best, in this run."""

    read: float  # bytes a second
    copied: float  # bytes read and written a second
    products: float  # bfloat16 operations a second


def rates(device: torch.device) -> Rates:
    """A large sum, a large copy by a kernel, and a large product through the library."""
    big = torch.randn(1 << 29, device=device)  # 2 GiB
    read = big.nbytes / device_seconds(lambda: big.sum())
    other = torch.empty_like(big)
    copied = 2 * big.nbytes / device_seconds(lambda: torch.add(big, 1.0, out=other))
    a, b = (torch.randn(8192, 8192, device=device).to(BF16) for _ in "ab")
    return Rates(max(read, copied), copied, 2 * 8192**3 / device_seconds(lambda: a @ b))


class State(NamedTuple):
    """A step's surroundings."""

    kv: KVCache
    view: View
    tokens: Tensor  # int64 [B, 1]


def state_of(config: Config, mesh: Mesh, batch: int, context: int, device: torch.device) -> State:
    """A cache of random values in which every sequence has context - 1 positions, blocks in random order."""
    columns, layout = -(-(context + 16) // BLOCK), layout_of(config, mesh)
    blocks = 1 + layout.groups * batch * columns if context <= 4096 else 1 + batch * columns
    kv = init_cache(config, blocks, BLOCK, dtype=BF16, device=str(device), mesh=mesh)
    for arena in (*kv.k, *kv.v):
        arena.normal_()
    order = 1 + torch.randperm(blocks - 1, device=device)
    # Contexts too long for three tables of their own share one: what is read is the same.
    table = order.view(layout.groups, batch, columns) if context <= 4096 else order.view(1, batch, columns)
    table = table.expand(layout.groups, batch, columns).contiguous()
    past = torch.full((batch,), context - 1, device=device)
    tokens = torch.randint(0, 1000, (batch, 1), device=device)
    return State(kv, View(table, past, torch.ones_like(past)), tokens)


def touched(params: Params, state: State, config: Config, mesh: Mesh, ops: Ops) -> float:
    """How many of this rank's experts the step's tokens take, on average over layers."""
    layout = layout_of(config, mesh)
    places = locate(state.view, 1, BLOCK, layout)
    chunk = Chunk(state.tokens, step_positions(state.view, 1), places)
    routes = hidden_states(params, [chunk], state.kv, config, ops, mesh).routes
    local = config.experts // mesh.ep
    counts = [len(r[(r < local)].unique()) for r in routes if isinstance(r, Tensor)]
    return sum(counts) / len(counts)


def bytes_to_read(params: Params, config: Config, mesh: Mesh, batch: int, context: int, experts: float) -> float:
    """Of one decode step; rows of the embedding and all writes are left out."""
    packed = [p.mlp.experts for p in params.layers if isinstance(p.mlp, MoE)]
    in_experts = sum(t.nbytes for e in packed for t in tensors((e.gate_up, e.down)))
    others = sum(t.nbytes for t in tensors(params)) - in_experts
    others -= params.embed.nbytes if isinstance(params.embed, Tensor) else 0
    keys = sum(min(context, config.window) if config.is_sliding(i) else context for i in range(config.layers))
    row = 2 * BF16.itemsize * config.head_dim * (config.kv_heads // (mesh.ep * mesh.tp))
    return others + in_experts * experts / (config.experts // mesh.ep) + batch * keys * row


class Row(NamedTuple):
    """One line of the table."""

    name: str
    seconds: float
    floor: float  # seconds
    bytes: float
    experts: float


def decode_rows(
    params: Params, config: Config, mesh: Mesh, cases: list[tuple[int, int]], best: Rates, device: torch.device
) -> Iterator[Row]:
    """Captured decode steps of (batch, context), greedy and drawn rows alike."""
    ops = select(device)
    for batch, context in cases:
        state = state_of(config, mesh, batch, context, device)
        experts = touched(params, state, config, mesh, ops)
        draw = map_tensors(
            lambda t: t.to(device), draws([Sampling(1.0, seed=n) for n in range(batch)], config.vocab_size)
        )

        def step(
            params: Params, tokens: Tensor, kv: Arenas, view: View, draw: Draw, every: tuple[Scales, ...]
        ) -> object:
            args = params, tokens, kv, view, draw, (), config, mesh
            return decode_and_sample(*args, filtered=False, every=every, ops=ops)

        args = (params, state.tokens, Arenas(state.kv.k, state.kv.v), state.view, draw, scales(params.layers, config))
        graph = capture(step, args, donate=(2,), fixed=(0, 5))
        seconds = device_seconds(lambda graph=graph, args=args: graph(*args), inner=5)
        size = bytes_to_read(params, config, mesh, batch, context, experts)
        yield Row(f"decode, batch {batch}, context {context:,}", seconds, size / best.read, size, experts)
        del graph, args, state
        torch.cuda.empty_cache()


def prefill_row(params: Params, config: Config, mesh: Mesh, best: Rates, device: torch.device) -> Row:
    """The first chunk of a prompt, launched from the host."""
    layout = layout_of(config, mesh)
    columns = CHUNK // BLOCK
    kv = init_cache(config, 1 + layout.groups * columns, BLOCK, dtype=BF16, device=str(device), mesh=mesh)
    table = (1 + torch.arange(layout.groups * columns, device=device)).view(layout.groups, 1, columns)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    view, tokens = View(table, zero, zero + CHUNK), torch.randint(0, 1000, (1, CHUNK), device=device)
    held = [kv]

    def run() -> None:
        _, held[0] = prefill(params, tokens, held[0], view, config, mesh, gathered=False, checked=True)

    seconds = device_seconds(run, repeats=3)
    rows = sum(t.numel() for t in tensors(params) if t.dim() == 2 and t.dtype == BF16)
    rows -= sum(t.numel() for t in (params.embed, params.head) if isinstance(t, Tensor))
    router = sum(p.mlp.router.weight.numel() for p in params.layers if isinstance(p.mlp, MoE))
    expert = (
        3 * config.latent_size * config.expert_size // mesh.tp * config.top_k / mesh.ep * sum(sparse_layers(config))
    )
    pairs = sum(
        (CHUNK * (CHUNK + 1) - (CHUNK - config.window) * (CHUNK - config.window + 1) * config.is_sliding(i)) // 2
        for i in range(config.layers)
    )
    heads = config.heads // (mesh.ep * mesh.tp) * config.head_dim
    operations = 2 * CHUNK * (rows + router + expert) + 4 * pairs * heads
    return Row(f"prefill of {CHUNK:,} tokens", seconds, operations / best.products, operations, CHUNK)


def accuracy(config: Config, mesh: Mesh, device: torch.device) -> str:
    """The hidden state after a few layers against float32, ours and the plain form's."""
    small = replace(config, layers=4, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    params = random_slice(small, mesh, device)
    exact = map_tensors(lambda t: t.float() if t.dtype == BF16 else t, params)
    tokens = torch.randint(0, 1000, (2, 64), device=device)
    pos = torch.arange(64, device=device).expand(2, 64)

    def hidden(p: Params, ops: Ops) -> Tensor:
        return hidden_states(p, [Chunk(tokens, pos, is_start=True)], (), small, ops, mesh).h_BTH

    right = hidden(exact, STATIC)
    ours, plain = ((hidden(params, ops) - right).norm() / right.norm() for ops in (select(device), STATIC))
    told = f"ours {ours:.3e}, plain PyTorch {plain:.3e}, {ours / plain:.2f} times"
    return f"Hidden state after 4 layers against float32: {told}."


def report(args: argparse.Namespace) -> Iterator[str]:
    """The lines of the report, as they come."""
    device = torch.device(args.device)
    mesh = Mesh(ep=2, tp=4, squeeze=args.squeeze).at(0, Alone())
    config = Config()
    if args.layers != config.layers:
        config = replace(config, layers=args.layers, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    best = rates(device)
    yield f"# One rank's slice, {date.today()}\n"
    name = torch.cuda.get_device_name(device)
    yield f"{name}, torch {torch.__version__}; {config.layers} layers, squeeze {args.squeeze}."
    yield f"Best of this run: {best.read / 1e12:.2f} TB/s read, {best.copied / 1e12:.2f} TB/s copied, "
    yield f"{best.products / 1e12:.0f} bfloat16 TFLOP/s. Operations: {select(device).why}.\n"
    yield accuracy(config, mesh, device) + "\n"
    params = random_slice(config, mesh, device)
    columns = ("step", "ms", "us a layer", "experts", "GB or TFLOP", "TB/s or TFLOP/s", "of the floor")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    cases = [(b, 2048) for b in (1, 4, 16, 64)] + [(1, n) for n in args.context]
    for row in decode_rows(params, config, mesh, cases, best, device):
        each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
        done = f"{row.experts:.1f} | {row.bytes / 1e9:.2f} | {rate:.2f} | {row.seconds / row.floor:.2f} x"
        yield f"| {row.name} | {row.seconds * 1e3:.2f} | {each:.1f} | {done} |"
    row = prefill_row(params, config, mesh, best, device)
    each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
    done = f"{row.bytes / 1e12:.1f} | {rate:.0f} | {row.floor / row.seconds:.0%} of the rate"
    yield f"| {row.name} | {row.seconds * 1e3:.1f} | {each:.0f} | | {done} |"


def main() -> None:
    """Prints the report, and keeps it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--squeeze", choices=("split", "replicated"), default="split")
    parser.add_argument("--context", type=int, nargs="*", default=[131_072, 1_000_000])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    lines: list[str] = []
    with torch.inference_mode():
        for line in report(args):
            lines.append(line)
            print(line, flush=True)
    if args.save:
        path = Path(__file__).parent / "results" / f"{date.today()}-rank-slice.md"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
