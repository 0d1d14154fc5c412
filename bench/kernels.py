"""Single operations on a CUDA device: each Triton form against its plain meaning, then its time against its floor.

    python bench/kernels.py [--only experts,attention] [--tokens 1 4 16 64] [--save]

Sizes are those of one of eight cards of the released model. First every form is compared with the plain one on random,
boundary and adversarial inputs; a difference beyond its bound ends the run with status 1. Then times: captured,
operands rotated so that the level-2 cache does not help, the median of several replays. The floor is the bytes that the
operation must read over the best read rate of this run. Prints Markdown; asserts no time.
"""

# pyright: reportUnknownLambdaType=false

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from kernel_checks import CHECKS, differences, rules
from operands import (
    BF16,
    BLOCK,
    CUDA,
    EPS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LATENT,
    TOP_K,
    mxfp4,
    randn,
    routes,
)

from muse_fn.kernels import gpu_ops, reference
from muse_fn.kernels.norms import Gain, Mix, rotary_angles
from muse_fn.kernels.pieces import Context, Projected
from muse_fn.sample import draws, sample


def microseconds(calls: Sequence[Callable[[], object]], rounds: int = 3) -> float:
    """Of one call, in a captured graph that goes through all of them `rounds` times: the median of nine replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    spent: list[float] = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) * 1e3 / rounds / len(calls))
    return statistics.median(spent)


class Time(NamedTuple):
    """One line: what, how long, the bytes it must read or the operations it must do."""

    name: str
    spent: float  # microseconds
    bytes: float
    operations: float = 0.0


def expert_times(tokens: Sequence[int]) -> Iterator[Time]:
    """Both products, four local routes a token, over six sets of weights."""
    sets = [(mxfp4(EXPERTS, 2 * INNER, LATENT), mxfp4(EXPERTS, LATENT, INNER)) for _ in range(6)]
    each = 3 * LATENT * INNER * (0.5 + 1 / 32)
    for count in (*tokens, 4096):
        chosen = [routes(count, seed=n) for n in range(len(sets) if count < 4096 else 2)]
        inputs = [randn(count, LATENT, dtype=BF16) for _ in chosen]
        calls = [partial(gpu_ops.expert_rows, u, i, *w) for u, i, w in zip(inputs, chosen, sets, strict=False)]
        touched = sum(len(i[i >= 0].unique()) for i in chosen) / len(chosen)
        work = 2.0 * 3 * LATENT * INNER * TOP_K / 2 * count if count == 4096 else 0.0
        yield Time(f"experts, {count:,} tokens", microseconds(calls), touched * each, work)


def attention_times() -> Iterator[Time]:
    """Decode over windows and long contexts, and chunks of a prompt."""
    for batch, context, window in (
        (1, 2048, 2048),
        (16, 2048, 2048),
        (64, 2048, 2048),
        (1, 131_072, 0),
        (1, 1 << 20, 0),
    ):
        columns, layers = context // BLOCK, max(2, min(16, (32 << 20) // (batch * context)))
        shape = (batch * columns + 1, BLOCK, KV_HEADS, HEAD_DIM)
        arenas = [tuple(randn(*shape, dtype=BF16) for _ in "kv") for _ in range(layers)]
        blocks = (1 + torch.randperm(batch * columns, device=CUDA)).view(batch, columns)
        where = torch.full((batch, 1), context - 1, device=CUDA), torch.arange(context, device=CUDA).repeat(batch, 1)
        q = randn(batch, 1, HEADS, HEAD_DIM, dtype=BF16)
        calls = [partial(gpu_ops.attend_blocks, q, k, v, blocks, *where, window) for k, v in arenas]
        size = batch * context * 2 * KV_HEADS * HEAD_DIM * 2
        yield Time(f"attention, batch {batch}, context {context:,}", microseconds(calls), size)
        rows = Projected(*randn(batch, 1, 36 * HEAD_DIM, dtype=BF16).split([n * HEAD_DIM for n in (16, 2, 2, 16)], -1))
        write = blocks[:, -1] * BLOCK + BLOCK - 1
        given = rows, rotary_angles(where[0], HEAD_DIM, 5e5), 1.0, EPS
        at = Context(write, blocks, *where, window)
        calls = [partial(gpu_ops.attend_new, *given, k, v, at, BF16) for k, v in arenas]
        yield Time(f"the same from rows to gated heads, batch {batch}, context {context:,}", microseconds(calls), size)
    for new, keys, window in ((4096, 4096, 0), (4096, 6272, 2048), (4096, 65_536, 0)):
        arenas = [randn(keys // BLOCK + 1, BLOCK, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in "kv"]
        blocks, k_pos = 1 + torch.arange(keys // BLOCK, device=CUDA)[None], torch.arange(keys, device=CUDA)[None]
        q_pos, q = keys - new + torch.arange(new, device=CUDA)[None], randn(1, new, HEADS, HEAD_DIM, dtype=BF16)
        call = partial(gpu_ops.attend_blocks, q, *arenas, blocks, q_pos, k_pos, window)
        seen = int((q_pos + 1).clamp_max(window or keys).sum())
        yield Time(f"attention, chunk of {new:,} on {keys:,}, window {window}", microseconds([call] * 2),
                   keys * 512, 4.0 * seen * HEADS * HEAD_DIM)  # fmt: skip


def linear_times(tokens: Sequence[int]) -> Iterator[Time]:
    """The products of a layer outside its experts, and the head; beside each the library's. Inputs as join leaves them:
    rounded to bfloat16 beside their float32, where the router takes that."""
    cases: dict[str, tuple[list[tuple[int, int, torch.dtype]], torch.dtype, int]] = {
        "q, k, v, gate": ([(n, HIDDEN, BF16) for n in (1024, 128, 128, 1024)], BF16, 8),
        "router, squeeze": ([(256, HIDDEN, torch.float32), (512, HIDDEN, BF16)], torch.float32, 16),
        "o": ([(HIDDEN, 1024, BF16)], BF16, 16),
        "expand": ([(1024, LATENT, BF16)], BF16, 24),
        "head": ([(25_256, HIDDEN, BF16)], torch.float32, 2),
    }
    for name, (shapes, dtype, count) in cases.items():
        sets = [[randn(n, k, dtype=kind, scale=0.01) for n, k, kind in shapes] for _ in range(count)]
        size = sum(w.nbytes for w in sets[0])
        for rows in tokens:
            x = randn(rows, shapes[0][1], dtype=dtype)
            calls = [partial(gpu_ops.linears, x, ws, rounded=x.to(BF16)) for ws in sets]
            yield Time(f"{name}, {rows} rows", microseconds(calls), size)
            plain = [lambda ws=ws, x=x: [reference.linear(x, w) for w in ws] for ws in sets]
            yield Time(f"{name}, {rows} rows, library", microseconds(plain), size)


def piece_times(tokens: Sequence[int]) -> Iterator[Time]:
    """What stands between products."""
    gain, mix = Gain(torch.rand(HIDDEN, device=CUDA)), Mix(*torch.rand(2, HIDDEN, device=CUDA))
    small, bias = Gain(torch.rand(LATENT, device=CUDA)), randn(256)
    arenas = [torch.zeros(600, 16, KV_HEADS, HEAD_DIM, dtype=BF16, device=CUDA) for _ in "kv"]
    for rows in (*tokens, 4096):
        h, branch = randn(1, rows, HIDDEN), randn(1, 1, rows, HIDDEN, dtype=BF16)
        q, k, v = (randn(1, rows, n * HEAD_DIM, dtype=BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
        pos = torch.arange(rows, device=CUDA)[None] + 7
        rotary, o, gate = rotary_angles(pos, HEAD_DIM, 5e5), randn(1, rows, HEADS, HEAD_DIM, dtype=BF16), q
        y, weight, logits = randn(rows, TOP_K, LATENT, dtype=BF16), randn(rows, TOP_K), randn(rows, 256)
        calls: dict[str, tuple[Callable[[], object], float]] = {
            "join": (partial(gpu_ops.join, h, branch, None, mix, gain, EPS, EPS, torch.float32), 14.0 * rows * HIDDEN),
            "normed": (partial(gpu_ops.normed, h, gain, EPS, BF16), 6.0 * rows * HIDDEN),
            "place": (partial(gpu_ops.place, q, k, v, rotary, 1.0, EPS, *arenas, pos.flatten()), 5.0 * rows * 1280),
            "gated": (partial(gpu_ops.gated, o, gate, EPS, BF16), 6.0 * rows * 1024),
            "choose": (
                partial(gpu_ops.choose, logits, bias, TOP_K, 1.0, 2.5, y[None, :, 0], small, EPS, BF16),
                4.0 * rows * 256 + 6.0 * rows * LATENT,
            ),
            "blend": (
                partial(gpu_ops.blend, y, weight, small, EPS, BF16),
                2.0 * rows * TOP_K * LATENT + 4 * rows * LATENT,
            ),
        }
        for name, (call, size) in calls.items():
            yield Time(f"{name}, {rows:,} rows", microseconds([call] * 4), size)
    for rows, filtered in ((rows, f) for rows in tokens for f in (False, True)):
        z, on = randn(rows, 25_256), draws(rules(rows, filtered), 25_256, "cuda")
        call = partial(sample, z, on, torch.arange(rows, device=CUDA), filtered=filtered)
        yield Time(f"draw{' filtered' * filtered}, {rows:,} rows", microseconds([call] * 4), z.nbytes)


def read_rate() -> float:
    """Bytes a second that a large sum reads."""
    big = randn(1 << 29)
    return big.nbytes / microseconds([big.sum]) * 1e6


def report(chosen: set[str], tokens: list[int], failed: list[str]) -> Iterator[str]:
    """The lines of the report, as they come; what is beyond its bound goes to `failed`."""
    yield f"# Single operations, {date.today()}\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}.\n"
    for name in [n for n in CHECKS if n in chosen]:
        worst, count = 0.0, 0
        for what, error, good in differences(CHECKS[name]()):
            worst, count = max(worst, error), count + 1
            if not good:
                failed.append(what)
                yield f"WRONG: {what}: {error:.2e}"
        yield f"{name}: {count} comparisons with the plain form, largest difference {worst:.1e}"
    best = read_rate()
    yield f"\nRead rate {best / 1e12:.2f} TB/s. What small operations read may stay in the level-2 cache.\n"
    yield "| operation | us | MB | TB/s | of the floor | TFLOP/s |\n|---|---|---|---|---|---|"
    times = {
        "experts": partial(expert_times, tokens),
        "attention": attention_times,
        "linear": partial(linear_times, tokens),
        "pieces": partial(piece_times, tokens),
    }
    for name in [n for n in times if n in chosen]:
        for t in times[name]():
            rate = f"{t.operations / t.spent / 1e6:.0f}" if t.operations else ""
            floor = t.bytes / best * 1e6
            done = f"{t.bytes / 1e6:.1f} | {t.bytes / t.spent / 1e6:.2f} | {t.spent / floor:.2f} x"
            yield f"| {t.name} | {t.spent:.1f} | {done} | {rate} |"
        torch.cuda.empty_cache()


def main() -> None:
    """Prints the report, and keeps it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(CHECKS), help="of " + ",".join(CHECKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    lines, failed = list[str](), list[str]()
    with torch.inference_mode():
        for line in report(set(args.only.split(",")), args.tokens, failed):
            lines.append(line)
            print(line, flush=True)
    if args.save:
        path = Path(__file__).parent / "results" / f"{date.today()}-kernels.md"
        path.write_text("\n".join(lines) + "\n")
    if failed:
        sys.exit(f"{len(failed)} forms differ from the plain one")


if __name__ == "__main__":
    main()
