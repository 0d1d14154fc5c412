"""What one of eight cards computes at full width, alone on one card: no communication, random weights made there.

    python bench/rank_slice.py [--device cuda] [--layers 62] [--squeeze split] [--batches 1 4 16 64] [--save]

The mesh is ep=2, tp=4: 16 query heads, 2 KV heads, 128 of 256 experts with an inner width of 1,024 in MXFP4, 25,256
rows of the vocabulary. Its other ranks are imitated: a sum is this rank's part, a gather this rank's part repeated.
In a prompt's chunk, divided by tokens (sharding/division.py), it norms, scores for routing and blends an eighth. The
floor is every byte that a step must read (weights once, each expert that a token really takes once, the keys and values
that each layer sees) over the best read rate of this run; of a prefill, its products over the best bfloat16 rate.
Times are device times of captured steps, sampling included. Below them, in the same run, stands transformers' decoder
layer at a rank's sizes, if it is installed. Prints Markdown; `--save` keeps it and a plot. Needs an H200 for 62 layers.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from slices import (
    BF16,
    Alone,
    Rates,
    both_seconds,
    bytes_to_read,
    captured_chunk,
    captured_step,
    device_seconds,
    experts_of,
    first_chunk,
    operations_of,
    rates,
    state_of,
    touched,
)
from torch import Tensor

from muse_fn.capture import CaptureError
from muse_fn.decoder import Chunk, hidden_states
from muse_fn.kernels.select import STATIC, Ops, select
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, map_tensors
from muse_fn.random_weights import random_params
from muse_fn.sharding.mesh import Mesh

CHUNK = 4096
DRAWS = 8  # rows of tokens that a line is at least the mean of
DECODE = "decode, batch {}, context {:,}"


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
    """Captured decode steps of (batch, context); of few rows for several draws of tokens, since a layer takes longer if
    one expert more is here than run at once."""
    for batch, context in cases:
        state = state_of(config, mesh, batch, context, device)
        drawn = [torch.randint(0, 1000, (batch, 1), device=device) for _ in range(-(-DRAWS // batch))]
        every = [touched(params, state._replace(tokens=t), config, mesh, select(device)) for t in drawn]
        experts = statistics.mean(n for layers in every for n in layers)
        step = captured_step(params, state, config, mesh, drawn)
        seconds = device_seconds(step, inner=len(drawn) * -(-5 // len(drawn)))
        size = bytes_to_read(params, config, mesh, batch, context, experts)
        yield Row(DECODE.format(batch, context), seconds, size / best.read, size, experts)
        del step, state
        torch.cuda.empty_cache()


def prefill_rows(params: Params, config: Config, mesh: Mesh, best: Rates, device: torch.device) -> Iterator[Row]:
    """The first chunk of a prompt: launched by the host, by itself and one of several in a row, and as a graph. By
    itself a chunk begins with the host's way to its first kernel. Raises CaptureError where no graph can hold it."""
    operations, given = operations_of(params, config, mesh, CHUNK), (params, config, mesh, CHUNK, device)
    forms = ("by itself", first_chunk, 1), ("one of four in a row", first_chunk, 4), ("captured", captured_chunk, 1)
    for name, make, inner in forms:
        seconds = device_seconds(make(*given), repeats=3, inner=inner)
        yield Row(f"prefill of {CHUNK:,} tokens, {name}", seconds, operations / best.products, operations, CHUNK)


def accuracy(config: Config, mesh: Mesh, device: torch.device) -> str:
    """The hidden state after a few layers against float32, ours and the plain form's."""
    small = replace(config, layers=4, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    params = random_params(small, mesh, device, is_packed=experts_of)
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
    params = random_params(config, mesh, device, is_packed=experts_of)
    columns = ("step", "ms", "us a layer", "experts", "GB or TFLOP", "TB/s or TFLOP/s", "of the floor")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    cases = [(b, 2048) for b in args.batches] + [(1, n) for n in args.context]
    for row in decode_rows(params, config, mesh, cases, best, device):
        rows.append(row)
        each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
        done = f"{row.experts:.1f} | {row.bytes / 1e9:.2f} | {rate:.2f} | {row.seconds / row.floor:.2f} x"
        yield f"| {row.name} | {row.seconds * 1e3:.2f} | {each:.1f} | {done} |"
    try:
        for row in prefill_rows(params, config, mesh, best, device):
            each, rate = row.seconds / config.layers * 1e6, row.bytes / row.seconds / 1e12
            done = f"{row.bytes / 1e12:.1f} | {rate:.0f} | {row.floor / row.seconds:.1%} of the rate"
            yield f"| {row.name} | {row.seconds * 1e3:.1f} | {each:.0f} | | {done} |"
    except CaptureError as error:
        yield f"\nThe chunk was not captured: {str(error).partition(chr(10))[0]}"
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
