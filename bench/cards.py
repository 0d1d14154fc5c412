"""Several cards as one mesh: tokens equal to one rank's, then times of decode and prefill with and without collectives.

    torchrun --nproc-per-node 8 bench/cards.py [--device cuda] [--layouts ep=2,tp=4 tp=8 ep=8] [--layers 62] [--save]
        [--squeeze split replicated] [--batches 1 4 16 64] [--context 2048 262144 1000000] [--chunk 4096]

First every layout answers with the embedded checkpoint in float32, eagerly and captured, collectives inside of the
steps: greedy tokens that are not those of one rank alone end the run with status 1. Then random weights of the released
config, made on each card in the published 4-bit format: captured decode steps, every batch at the first context, batch
1 at the others, and a prompt's first chunk, launched from the host. The times are device times after a meeting of all
ranks, the largest over ranks; so are those of the same step with collectives that reach nobody. What lies between both
is of the collectives, waiting for the slowest card included; routes of the two are not the same ones. Floors are of
what a card reads or computes over the best rate of this run, plans from `muse_fn/plan.py` with its assumptions about
the device. What would not fit into a card by count is told and left out. On CPUs it runs through gloo, at --tiny sizes.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from cards_report import Experts, Line, NoRoom, heading, plot, row
from slices import (
    BF16,
    BLOCK,
    Alone,
    Rates,
    blocks_of,
    bytes_to_read,
    captured_step,
    first_chunk,
    operations_of,
    rates,
    state_of,
    touched,
)
from torch import Tensor

import muse_fn
from muse_fn import devices
from muse_fn.buckets import Bucket
from muse_fn.captured_decode import capture_decode, to_host
from muse_fn.floors import decode_step, prefill_step
from muse_fn.footprint import blocks_of as packed_blocks
from muse_fn.footprint import weights
from muse_fn.generation import Settings, allowed_ids, generate
from muse_fn.kernels.select import select
from muse_fn.kvcache.cache import View, bytes_per_block, init_cache, own_blocks
from muse_fn.kvcache.layout import layout_of
from muse_fn.load import Model, load
from muse_fn.params.config import Config
from muse_fn.params.quantise import is_packable
from muse_fn.params.tree import Params, sample_tensor, tensors
from muse_fn.plan import Setup, predict
from muse_fn.random_weights import random_params
from muse_fn.sample import Sampling, draws
from muse_fn.sharding.collectives import Place, group_place, join, leave, psum, stacked, tell_all
from muse_fn.sharding.mesh import AXES, ONE, Mesh, MeshError, parse_mesh
from muse_fn.sharding.rules import problems_of_mesh
from muse_fn.sharding.split import shard
from muse_fn.step import prefill

NANO = Path(muse_fn.__file__).parent / "nano"
PROMPTS = ([1, 2, 3], [5] * 20, [7, 300, 11, 500], [*range(100, 180)])  # one is longer than the window
FORMAT, NEW, ROWS = "quark-mxfp4", 24, 16  # tokens to make, positions of a block
TINY = Config(vocab_size=1024, hidden_size=256, intermediate_size=512, layers=4, heads=8, kv_heads=8, head_dim=32,
              latent_size=64, expert_size=256, experts=16, top_k=4, window=512)  # fmt: skip


@dataclass(frozen=True)
class Cards:
    """The mesh seen from this rank, and its card."""

    mesh: Mesh
    device: torch.device

    def every(self, *values: float) -> Tensor:
        """float64 [ranks, values], on the host of each rank."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        return stacked(mine, self.mesh, AXES).cpu()

    def largest(self, value: float) -> float:
        """Over ranks."""
        return float(self.every(value).max())

    def meet(self) -> None:
        """Returns once all ranks are here and have nothing left to do."""
        self.synchronize()
        psum(torch.ones(1, device=self.device), self.mesh, AXES)
        self.synchronize()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        """Gives memory that nobody holds back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, fn: Callable[[], object], repeats: int = 7, inner: int = 1) -> float:
        """The median time of one of `inner` calls in a row, on this rank; all ranks call it at once."""
        fn()
        found: list[float] = []
        for _ in range(repeats):
            self.meet()
            found.append(self._once(fn, inner))
        return statistics.median(found)

    def _once(self, fn: Callable[[], object], inner: int) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(inner):
                fn()
            return (time.perf_counter() - began) / inner
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / inner


def embedded(mesh: Mesh, device: torch.device) -> tuple[Model, str]:
    """This rank's share of the embedded model in float32, and how its experts are kept: unpacked, where the mesh parts
    inputs that share a scale."""
    try:
        return load(NANO, device, mesh=mesh), "packed"
    except MeshError:
        whole = load(NANO, device, quantize="none")
        return whole._replace(params=shard(whole.params, whole.config, mesh)), "unpacked"


def greedy_eagerly(model: Model, mesh: Mesh) -> list[list[int]]:
    """Tokens that follow the prompts, by eager steps."""
    return [list(out.tokens) for out in generate(model, PROMPTS, Settings(NEW, stop_tokens=()), mesh)]


def greedy_captured(model: Model, mesh: Mesh) -> list[list[int]]:
    """The same by captured steps, which begin with the last token of each prompt."""
    device = sample_tensor(model.params).device
    config, rows, longest = model.config, len(PROMPTS), max(map(len, PROMPTS))
    table = own_blocks(config, rows, longest + NEW, ROWS)
    kv = init_cache(config, 1 + table.numel(), ROWS, device=str(device), mesh=mesh)
    tokens = torch.tensor([[*prompt[:-1], *[0] * (longest - len(prompt))] for prompt in PROMPTS], device=device)
    count = torch.tensor([len(prompt) - 1 for prompt in PROMPTS])
    view = View(*(x.to(device) for x in (table, torch.zeros_like(count), count)))
    with torch.inference_mode():
        _, kv = prefill(model.params, tokens, kv, view, config, mesh, gathered=False)
    sizes, allowed = [Bucket(rows, table.shape[2])], allowed_ids(model, device)
    steps, kv = capture_decode(model.params, kv, config, mesh, sizes=sizes, allowed_V=allowed)
    last = torch.tensor([prompt[-1:] for prompt in PROMPTS])
    draw = draws([Sampling()] * rows, config.vocab_size)
    feed, found = steps.begin(last, View(table, count, torch.ones_like(count)), draw, kv), list[list[int]]()
    for _ in range(NEW):
        feed, kv = steps(feed, kv)
        found.append(to_host(feed.tokens_B1).wait())
    return [list(row) for row in zip(*found, strict=True)]


def tokens_of_one(cards: Cards) -> list[list[int]]:
    """The tokens of rank 0 alone, on every rank."""
    alone = greedy_eagerly(embedded(ONE, cards.device)[0], ONE) if cards.mesh.rank == 0 else None
    told = None if alone is None else json.dumps(alone).encode()
    return json.loads(tell_all(told, cards.mesh))


def differing(cards: Cards, expected: list[list[int]]) -> dict[str, list[int]]:
    """For each way of stepping, how many of the prompts got other tokens on each rank."""
    model, kept = embedded(cards.mesh, cards.device)
    wrong: dict[str, list[int]] = {}
    for name, way in {"eager": greedy_eagerly, "captured": greedy_captured}.items():
        counted = sum(a != b for a, b in zip(way(model, cards.mesh), expected, strict=True))
        wrong[f"{name}, experts {kept}"] = [int(n) for n in cards.every(counted)[:, 0]]
    return wrong


@dataclass(frozen=True)
class Task:
    """What is measured of one layout."""

    cards: Cards
    config: Config
    best: Rates
    memory: float  # bytes that a card has to give
    given: devices.Rates  # what the plan assumes

    @property
    def mesh(self) -> Mesh:
        """This rank of the layout."""
        return self.cards.mesh

    def setup(self, context: int) -> Setup:
        """What the plan is asked for. Raises ValueError for a context that the model cannot hold."""
        return Setup(self.config, self.mesh.at(0), FORMAT, "bf16", context)

    def room_for(self, name: str, blocks: int) -> NoRoom:
        """The memory that a step takes, by count."""
        parameters = sum(weights(self.config, self.mesh.at(0), FORMAT).values())
        cache = blocks * bytes_per_block(self.config, BLOCK, BF16, self.mesh)
        return NoRoom(name, parameters, cache, self.given.reserve, self.memory)


def times(
    task: Task, made: Callable[[Mesh], Callable[[], object]], repeats: int = 7, inner: int = 1
) -> tuple[float, float]:
    """Seconds of what is made for a mesh: of this rank with the others, and without; the largest over ranks."""
    cards, mesh = task.cards, task.mesh

    def taken(each: Mesh) -> float:
        torch.manual_seed(0)  # the same tokens on every rank
        found = cards.largest(cards.seconds(made(each), repeats, inner))
        cards.clean()
        return found

    return taken(mesh), taken(mesh.at(mesh.rank, Alone()))


def decode_line(task: Task, params: Params, batch: int, context: int) -> Line | NoRoom:
    """A captured decode step."""
    cards, config, mesh = task.cards, task.config, task.mesh
    name = f"decode, batch {batch}, context {context:,}"
    plan = predict(task.setup(context), decode_step(batch, context), task.given)
    if (room := task.room_for(name, blocks_of(config, batch, context))).is_true:
        return room
    torch.manual_seed(batch + context)  # the same tokens and tables on every rank
    state = state_of(config, mesh, batch, context, cards.device)
    both = times(task, lambda each: captured_step(params, state, config, each), inner=5)
    mine = touched(params, state, config, mesh, select(cards.device))
    counts = cards.every(*mine)
    experts = Experts(float(counts.mean()), float(counts.max(0).values.mean()))
    size = bytes_to_read(params, config, mesh, batch, context, statistics.mean(mine))
    floor, size = cards.largest(size / task.best.read), cards.largest(size)
    return Line(name, batch, *both, floor, size, experts, plan)


def prefill_line(task: Task, params: Params, chunk: int) -> Line | NoRoom:
    """The first chunk of a prompt."""
    cards, config, mesh = task.cards, task.config, task.mesh
    name, plan = f"prefill of {chunk:,} tokens", predict(task.setup(chunk), prefill_step(chunk, 0), task.given)
    if (room := task.room_for(name, 1 + layout_of(config).groups * -(-chunk // BLOCK))).is_true:
        return room
    both = times(task, lambda each: first_chunk(params, config, each, chunk, cards.device), repeats=3)
    floor = cards.largest(operations_of(params, config, mesh, chunk) / task.best.products)
    return Line(name, chunk, *both, floor, None, None, plan)


def measured(task: Task, args: argparse.Namespace, into: list[Line]) -> Iterator[str]:
    """The lines about one layout; its measurements are also put into `into`."""
    cards, config, mesh = task.cards, task.config, task.mesh
    if problems := problems_of_mesh(config, mesh, packed_blocks(config, FORMAT)):
        yield "Not measured, the model does not fit this layout: " + "; ".join(problems) + "."
        return
    if (room := task.room_for("parameters", 0)).is_true:
        yield f"Not measured, it {room}."
        return
    packed = partial(is_packable, config=config)
    params = random_params(config, mesh, cards.device, is_packed=packed)
    cards.clean()
    held = cards.every(sum(t.nbytes for t in tensors(params)))
    yield f"Parameters of a card, bytes: {held.min():,.0f} to {held.max():,.0f} held, {room.parameters:,} planned.\n"
    yield heading()
    cases = [(batch, args.context[0]) for batch in args.batches] + [(1, context) for context in args.context[1:]]
    for n in range(len(cases) + 1):
        line = decode_line(task, params, *cases[n]) if n < len(cases) else prefill_line(task, params, args.chunk)
        into += [line] if isinstance(line, Line) else []
        yield row(line)
    if cards.device.type == "cuda":
        most = cards.largest(torch.cuda.max_memory_allocated(cards.device)) / 2**30
        yield f"\nThe most that a card's tensors took so far in this run, at once: {most:.2f} GiB."


def meshes_of(args: argparse.Namespace, world: int) -> tuple[list[Mesh], list[str]]:
    """Layouts of that many ranks with every form of squeeze, and the layouts that are of other numbers."""
    usual = [f"ep=2,tp={world // 2}"] * (world > 2 and world % 2 == 0) + [f"tp={world}", f"ep={world}"]
    texts: list[str] = [*dict.fromkeys(args.layouts or usual)]
    fitting = [text for text in texts if parse_mesh(text).ranks == world]
    meshes = [replace(parse_mesh(text), squeeze=squeeze) for text in fitting for squeeze in args.squeeze]
    return [*dict.fromkeys(meshes)], [text for text in texts if text not in fitting]


def report(args: argparse.Namespace, place: Place, drawn: dict[str, list[Line]]) -> Iterator[str]:
    """The lines of the report, as they come; measurements are also put into `drawn`. SystemExit(1) if tokens differ."""
    is_cuda, world = args.device == "cuda", place.world
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    meshes, others = meshes_of(args, world)
    yield f"# {world} cards as one mesh, {date.today()}\n"
    yield f"{torch.cuda.get_device_name(device) if is_cuda else 'CPU'}, {world} ranks, torch {torch.__version__}."
    if others:
        yield f"Layouts of another number of ranks, left out: {' '.join(others)}."
    if not meshes:
        return
    yield "\n## Greedy tokens of the embedded checkpoint against one rank alone\n"
    expected, failed = tokens_of_one(first := Cards(join(meshes[0], device), device)), False
    for mesh in meshes:
        wrong = differing(Cards(join(mesh, device), device), expected)
        failed |= any(map(any, wrong.values()))
        for way, counts in wrong.items():
            told = f"DIFFERENT, prompts on each rank: {counts}" if any(counts) else f"equal on all {world} ranks"
            yield f"- {mesh}, {way}: {told}, {len(PROMPTS)} prompts, {NEW} tokens each"
    if failed:
        raise SystemExit(1)
    sizes = (1 << 22, 256) if args.tiny or not is_cuda else (1 << 29, 8192)
    best = rates(device, *sizes, clock=first.seconds)
    first.clean()
    (read, _, products), assume = (first.every(*best) / 1e12).T, args.assume or ("h200" if is_cuda else "cpu")
    yield f"\nBest of this run, all cards at once: {read.min():.3f} to {read.max():.3f} TB/s read,"
    yield f"{products.min():.3f} to {products.max():.3f} bfloat16 TFLOP/s."
    yield f"Operations: {select(device).why}. Plans assume {assume}."
    yield from every_layout(args, meshes, device, best, devices.rates(devices.assumptions(assume, world)), drawn)


def every_layout(
    args: argparse.Namespace,
    meshes: list[Mesh],
    device: torch.device,
    best: Rates,
    given: devices.Rates,
    drawn: dict[str, list[Line]],
) -> Iterator[str]:
    """The measurements of one layout after the other."""
    whole = TINY if args.tiny else Config()
    config = replace(whole, layers=args.layers or whole.layers, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    for mesh in meshes:
        cards = Cards(join(mesh, device), device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else given.memory
        memory = args.memory * 2**30 if args.memory is not None else -cards.largest(-free)
        task = Task(cards, config, best, memory, given)
        yield f"\n## {mesh}, {config.layers} layers\n"
        yield from measured(task, args, drawn.setdefault(str(mesh), []))
        cards.clean()


def positive(text: str) -> int:
    """A number of an option."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layouts", nargs="+", help="such as ep=2,tp=4 tp=8; default: three of as many ranks")
    parser.add_argument("--layers", type=positive, help="default: all")
    parser.add_argument("--squeeze", nargs="+", choices=("split", "replicated"), default=["split", "replicated"])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=positive, nargs="+", default=[2048, 262_144, 1_000_000])
    parser.add_argument("--chunk", type=positive, default=4096)
    parser.add_argument("--memory", type=float, help="GiB that a card has to give; default: what the device says")
    parser.add_argument("--assume", choices=[*devices.DEVICES], help="the device whose plan is compared")
    parser.add_argument("--tiny", action="store_true", help="a model of toy sizes")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results", help="where --save writes")
    return parser.parse_args()


def main() -> None:
    """Prints the report on rank 0, and keeps it if asked to."""
    args, place = parsed(), group_place()
    if place is None:
        sys.exit("start this benchmark with torchrun --nproc-per-node N, a process for each card")
    lines, drawn = list[str](), dict[str, list[Line]]()
    with torch.inference_mode():
        for line in report(args, place, drawn):
            lines.append(line)
            if place.rank == 0:
                print(line, flush=True)
    leave()
    if args.save and place.rank == 0:
        path = args.folder / f"{date.today()}-cards.md"
        drawing = path.with_suffix(".svg")
        drawing.write_text(plot(drawn))
        path.write_text("\n".join([*lines, "", f"![Where the time of each step goes]({drawing.name})"]) + "\n")


if __name__ == "__main__":
    main()
