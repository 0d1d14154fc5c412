"""What one of eight cards computes at full width, alone on one card: no communication, random weights made there.

    python bench/rank_slice.py [--device cuda] [--layers 62] [--squeeze split] [--batches 1 4 16 64] [--save]

The mesh is ep=2, tp=4: 16 query heads, 2 KV heads, 128 of 256 experts with an inner width of 1,024 in MXFP4, 25,256
rows of the vocabulary. Its other ranks are imitated: a sum is this rank's part, a gather this rank's part repeated. The
floor is every byte that a step must read (weights once, each expert that a token really takes once, the keys and values
that each layer sees) over the best read rate of this run; of a prefill, its products over the best bfloat16 rate.
Times are device times of captured steps, sampling included. Below them, in the same run, stands transformers' decoder
layer at a rank's sizes, if it is installed. Prints Markdown; `--save` keeps it and a plot. Needs an H200 for 62 layers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

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
DECODE = "decode, batch {}, context {:,}"


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

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    def made(leaf: Leaf) -> Weight:
        *outer, inner = shape = shape_of_part(part_of(leaf, config, mesh))
        if leaf.row.each:
            return MXFP4(random_bytes(0, 256, *outer, inner // 2), random_bytes(119, 121, *outer, inner // 32))
        dtype = torch.float32 if leaf.row.dtype == "float32" else BF16
        if leaf.row.init != "normal":
            return torch.full(shape, float(leaf.row.init == "ones"), dtype=dtype, device=device)
        return (torch.randn(shape, device=device, generator=generator) * config.initializer_range).to(dtype)

    return from_named(sparse_layers(config), {leaf.path: made(leaf) for leaf in leaves(config)})


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
    table = order.view(-1, batch, columns).expand(layout.groups, batch, columns).contiguous()
    past = torch.full((batch,), context - 1, device=device)
    tokens = torch.randint(0, 1000, (batch, 1), device=device)
    return State(kv, View(table, past, torch.ones_like(past)), tokens)


def touched(params: Params, state: State, config: Config, mesh: Mesh, ops: Ops) -> float:
    """How many of this rank's experts the step's tokens take, on average over layers."""
    places = locate(state.view, 1, BLOCK, layout_of(config, mesh))
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
        settings = [Sampling(1.0, seed=n) for n in range(batch)]
        draw = map_tensors(lambda t: t.to(device), draws(settings, config.vocab_size))

        def step(p: Params, tokens: Tensor, kv: Arenas, view: View, draw: Draw, every: tuple[Scales, ...]) -> object:
            args = p, tokens, kv, view, draw, (), config, mesh
            return decode_and_sample(*args, filtered=False, every=every, ops=ops)

        args = (params, state.tokens, Arenas(state.kv.k, state.kv.v), state.view, draw, scales(params.layers, config))
        graph = capture(step, args, donate=(2,), fixed=(0, 5))
        seconds = device_seconds(lambda graph=graph, args=args: graph(*args), inner=5)
        size = bytes_to_read(params, config, mesh, batch, context, experts)
        yield Row(DECODE.format(batch, context), seconds, size / best.read, size, experts)
        del graph, args, state
        torch.cuda.empty_cache()


def prefill_row(params: Params, config: Config, mesh: Mesh, best: Rates, device: torch.device) -> Row:
    """The first chunk of a prompt. Nothing is captured: the time is between events and includes gaps of launching."""
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
    expert = 3 * config.latent_size * config.expert_size // mesh.tp * config.top_k / mesh.ep
    expert *= sum(sparse_layers(config))
    triangle, hidden = CHUNK * (CHUNK + 1), (CHUNK - config.window) * (CHUNK - config.window + 1)
    pairs = sum(triangle - hidden * config.is_sliding(i) for i in range(config.layers)) // 2
    heads = config.heads // (mesh.ep * mesh.tp) * config.head_dim
    operations = 2 * CHUNK * (rows + router + expert) + 4 * pairs * heads
    name = f"prefill of {CHUNK:,} tokens, launched from the host"
    return Row(name, seconds, operations / best.products, operations, CHUNK)


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


class Peer(NamedTuple):
    """transformers' layer, ready for a decode step."""

    call: Callable[[], Tensor]
    cache: Any
    experts: float  # that uniform routes are expected to take
    bytes: float  # that a call must read


def peer_of(config: Config, batch: int, context: int, device: torch.device) -> Peer:
    """The layer with random weights in its own dtypes, made on the device, after `context` positions of random keys.

    Mask and angles are made as its model makes them, once for all layers of a step, so they are not part of a call.
    """
    theirs: Any = import_module("transformers.models.muse_spark.modeling_muse_spark")
    forms = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    text = theirs.MuseSparkTextConfig(**config.to_json(), **forms)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with device:
            layer = theirs.MuseSparkTextDecoderLayer(text, 0).eval()
            past = torch.randn(2, batch, config.kv_heads, context, config.head_dim)
            x, pos = torch.randn(batch, 1, config.hidden_size), torch.full((1, 1), context)
    finally:
        torch.set_default_dtype(usual)
    for weight in layer.parameters():
        weight.normal_(std=config.initializer_range)
    given = {"position_ids": pos, "cache": (cache := theirs.DynamicCache(config=text))}
    cache.update(*past, 0)
    mask = theirs.create_sliding_window_causal_mask(config=text, inputs_embeds=x, attention_mask=None, **given)
    given |= {"attention_mask": mask, "position_embeddings": theirs.MuseSparkTextRotaryEmbedding(text)(x, pos)}
    taken = config.experts * (1 - (1 - config.top_k / config.experts) ** batch)
    idle = (layer.mlp.experts.gate_up_proj.nbytes + layer.mlp.experts.down_proj.nbytes) * (1 - taken / config.experts)
    keys = past.nbytes * min(context + 1, config.window) / context
    return Peer(lambda: layer(x, **given), cache, taken, sum(t.nbytes for t in layer.parameters()) - idle + keys)


def graph_seconds(peer: Peer) -> float | str:
    """Device time of a call replayed from a graph, or why no graph can hold it."""
    _held = [(layer.keys, layer.values) for layer in peer.cache.layers]  # the graph reads them, the cache drops them
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            peer.call()
        return device_seconds(graph.replay, inner=20)
    except RuntimeError as error:
        return "no: " + str(error).partition("\n")[0]


def peer_line(config: Config, batch: int, ours: float, device: torch.device) -> str:
    """transformers' layer at this batch beside our seconds a layer."""
    peer = peer_of(config, batch, 2048, device)
    (eager, host), graph = both_seconds(peer.call, 7, 20), graph_seconds(peer)
    fast, ratio = (f"{graph * 1e6:.1f}", f"{graph / ours:.2f}") if isinstance(graph, float) else (graph, "")
    cells = f"{batch} | {eager * 1e6:.1f} | {host * 1e6:.1f} | {fast} | {peer.experts:.1f} | {peer.bytes / 1e6:.0f}"
    return f"| {cells} | {ours * 1e6:.1f} | {eager / ours:.2f} | {ratio} |"


def peer_lines(config: Config, mesh: Mesh, rows: list[Row], device: torch.device) -> Iterator[str]:
    """transformers' layer beside ours. Whatever is wrong with it is told in a line: our rows stand without it."""
    parts, ours = mesh.ep * mesh.tp, {row.name: row.seconds / config.layers for row in rows}
    kind = {"layer_types": ("sliding_attention",), "layer_rope_theta": (config.rope_theta,), "mlp_layer_types": ()}
    sizes = {"heads": config.heads // parts, "kv_heads": config.kv_heads // parts, "experts": config.experts // mesh.ep}
    sizes["top_k"] = config.top_k // mesh.ep  # of a token's routes, as many as lead to a rank's experts on average
    small = replace(config, layers=1, expert_size=config.expert_size // mesh.tp, **sizes, **kind)
    try:
        lines = [peer_line(small, n, ours.get(DECODE.format(n, 2048), float("nan")), device) for n in (1, 4)]
    except Exception as error:
        yield f"\ntransformers' layer was not timed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return
    yield f"\ntransformers {metadata.version('transformers')}, one sliding layer, {small.experts} experts of bfloat16"
    yield f"(ours MXFP4), {small.top_k} routes, sdpa, grouped_mm; squeeze and expand are whole (ours {mesh.squeeze})."
    yield "Ours is a whole step over its layers, with embedding, head and sampling.\n"
    columns = ("batch", "us", "us by the host's clock", "us captured", "experts", "MB", "ours, us", "us / ours")
    yield f"| {' | '.join((*columns, 'captured / ours'))} |\n|{'---|' * 9}"
    yield from lines


def plot(rows: list[Row]) -> str:
    """An SVG drawing: what each row achieved, a bar on one as long as the read rate of the run."""
    lines: list[str] = []
    for n, row in enumerate(rows):
        y, rate = 10 + 28 * n, row.bytes / row.seconds / 1e12
        for width, colour in ((420, "#dddddd"), (420 * row.floor / row.seconds, "#3465a4")):
            lines.append(f'<rect x="260" y="{y}" width="{width:.1f}" height="20" fill="{colour}"/>')
        lines.append(f'<text x="252" y="{y + 15}" text-anchor="end">{row.name}</text>')
        lines.append(f'<text x="688" y="{y + 15}">{rate:.2f}</text>')
    best = max((row.bytes / row.floor / 1e12 for row in rows), default=0.0)
    told = f"TB/s achieved; a whole bar is the read rate of this run, {best:.2f} TB/s"
    lines.append(f'<text x="260" y="{28 * len(rows) + 30}">{told}</text>')
    size = f'width="740" height="{28 * len(rows) + 45}" font-family="sans-serif" font-size="13"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *lines, "</svg>"]) + "\n"


def report(args: argparse.Namespace, rows: list[Row]) -> Iterator[str]:
    """The lines of the report, as they come; the decode steps are also put into `rows`."""
    device = torch.device(args.device)
    mesh = Mesh(ep=2, tp=4, squeeze=args.squeeze).at(0, Alone())
    config = replace(Config(), layers=args.layers, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
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
    cases = [(b, 2048) for b in args.batches] + [(1, n) for n in args.context]
    for row in decode_rows(params, config, mesh, cases, best, device):
        rows.append(row)
        each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
        done = f"{row.experts:.1f} | {row.bytes / 1e9:.2f} | {rate:.2f} | {row.seconds / row.floor:.2f} x"
        yield f"| {row.name} | {row.seconds * 1e3:.2f} | {each:.1f} | {done} |"
    row = prefill_row(params, config, mesh, best, device)
    each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
    done = f"{row.bytes / 1e12:.1f} | {rate:.0f} | {row.floor / row.seconds:.0%} of the rate"
    yield f"| {row.name} | {row.seconds * 1e3:.1f} | {each:.0f} | | {done} |"
    yield from peer_lines(config, mesh, rows, device)


def main() -> None:
    """Prints the report, and keeps it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--squeeze", choices=("split", "replicated"), default="split")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, nargs="*", default=[131_072, 1_000_000])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    lines, rows = list[str](), list[Row]()
    with torch.inference_mode():
        for line in report(args, rows):
            lines.append(line)
            print(line, flush=True)
    if args.save:
        path = Path(__file__).parent / "results" / f"{date.today()}-rank-slice.md"
        drawing = path.with_suffix(".svg")
        drawing.write_text(plot(rows))
        path.write_text("\n".join([*lines, "", f"![TB/s achieved by each decode step]({drawing.name})"]) + "\n")


if __name__ == "__main__":
    main()
