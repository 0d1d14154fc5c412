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
from torch import Tensor

from muse_fn.kernels import gpu_ops, pieces, reference
from muse_fn.kernels.norms import Gain, Mix, rotary_angles
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight
from muse_fn.kernels.pieces import Chosen
from muse_fn.sample import Sampling, draws, sample

HIDDEN, LATENT, INNER, EXPERTS, TOP_K = 8192, 4096, 1024, 128, 8
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 2, 64, 128
BF16, EPS = torch.bfloat16, 1e-5
CUDA = torch.device("cuda")
EXACT, ROUNDED = 1e-5, 2**-6  # bounds, relative to the largest: float32 results, and those rounded to bfloat16


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device."""
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def mxfp4(*shape: int, low: int = 116, high: int = 120) -> MXFP4:
    """Random codes, and scales 2^(low - 127) to 2^(high - 127)."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=CUDA)
    scales = torch.randint(low, high + 1, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device=CUDA)
    return MXFP4(codes, scales)


def nvfp4(*shape: int, parts: int = 1) -> NVFP4:
    """Random codes and scales."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=CUDA)
    scales = (torch.rand(*shape[:-1], shape[-1] // 16, device=CUDA) * 400).to(torch.float8_e4m3fn)
    return NVFP4(codes, scales, torch.rand(shape[0], parts, device=CUDA) * 1e-4)


def routes(tokens: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    """Half of each token's experts are here, all different; the others are on another rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(tokens):
        here = torch.randperm(experts, generator=generator)[: TOP_K // 2]
        rows.append(torch.cat([here, torch.full((TOP_K - len(here),), -1)])[torch.randperm(TOP_K, generator=generator)])
    return torch.stack(rows).to(CUDA)


class Check(NamedTuple):
    """A form and its meaning on the same inputs."""

    name: str
    found: Callable[[], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]
    bound: float


def expert_checks() -> Iterator[Check]:
    """Formats, numbers of tokens, one expert taking all, none here, scales at the ends of their range."""
    forms: dict[str, Callable[[], tuple[Weight, Weight]]] = {
        "MXFP4": lambda: (mxfp4(8, 2 * INNER, LATENT), mxfp4(8, LATENT, INNER)),
        "MXFP4, smallest scales": lambda: (mxfp4(8, 2 * INNER, LATENT, low=0, high=2), mxfp4(8, LATENT, INNER)),
        "MXFP4, large scales": lambda: (mxfp4(8, 2 * INNER, LATENT, low=180, high=220), mxfp4(8, LATENT, INNER)),
        "NVFP4": lambda: (nvfp4(8, 2 * INNER, LATENT, parts=2), nvfp4(8, LATENT, INNER)),
        "bfloat16": lambda: (randn(8, 2 * INNER, LATENT, dtype=BF16, scale=0.02), randn(8, LATENT, INNER, dtype=BF16)),
    }
    # The reference gathers a matrix for every route: of a few tokens only.
    size = {"MXFP4, smallest scales": 2.0**110, "MXFP4, large scales": 2.0**-90}
    for form, make in forms.items():
        gate_up, down = make()
        exact = [w.float() if isinstance(w, Tensor) else w for w in (gate_up, down)]
        for tokens in (1, 2, 5, 40, 300):
            u = randn(tokens, LATENT, dtype=BF16, scale=size.get(form, 1.0))
            for kind, idx in (
                ("spread", routes(tokens, 8)),
                ("one takes all", torch.full((tokens, 1), 3, device=CUDA)),
                ("none here", torch.full((tokens, 2), 9, device=CUDA)),
            ):
                yield Check(
                    f"experts, {form}, {tokens} tokens, {kind}",
                    lambda u=u, idx=idx, w=(gate_up, down): [gpu_ops.expert_rows(u, idx, *w)[:4].float()],
                    lambda u=u, idx=idx, w=exact: [reference.expert_rows(u[:4].float(), idx[:4], *w)],
                    ROUNDED,
                )


def piece_checks() -> Iterator[Check]:
    """What stands between products."""
    gain, scale = Gain(torch.rand(HIDDEN, device=CUDA)), Gain(torch.rand(HIDDEN, device=CUDA) + 0.5)
    mix, small = Mix(*torch.rand(2, HIDDEN, device=CUDA)), Gain(torch.rand(LATENT, device=CUDA) + 0.5)
    for tokens in (1, 3, 64, 4096):
        h, branch = randn(1, tokens, HIDDEN), randn(8, 1, tokens, HIDDEN // 8, dtype=BF16)
        for name, args, bound in (
            ("join, float32", (h, branch, None, mix, gain, EPS, EPS, torch.float32), EXACT),
            ("join, bfloat16", (h, branch, scale, mix, gain, EPS, EPS, BF16), ROUNDED),
            ("join, no norm", (h, branch, scale, mix, None, EPS, EPS, BF16), EXACT),
        ):
            yield Check(f"{name}, {tokens}", partial(gpu_ops.join, *args), partial(pieces.join, *args), bound)
        rows, weight = randn(tokens, TOP_K, LATENT, dtype=BF16), torch.rand(tokens, TOP_K, device=CUDA)
        yield Check(
            f"blend, {tokens}",
            lambda y=rows, w=weight: [gpu_ops.blend(y, w, small, EPS, torch.float32)],
            lambda y=rows, w=weight: [pieces.blend(y, w, small, EPS, torch.float32)],
            EXACT,
        )
        q, k, v = (randn(1, tokens, n * HEAD_DIM, dtype=BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
        pos = torch.arange(tokens, device=CUDA)[None] + 7
        for rotary in (rotary_angles(pos, HEAD_DIM, 5e5), None):
            for dtype in (BF16, torch.float8_e4m3fn):
                args = (q, k, v, rotary, dtype, pos.flatten())
                yield Check(f"place, {dtype}, {tokens}", partial(placed, gpu_ops.place, *args),
                            partial(placed, pieces.place, *args), 2**-3 if dtype != BF16 else ROUNDED)  # fmt: skip
        o, gate = randn(1, tokens, HEADS, HEAD_DIM, dtype=BF16), randn(1, tokens, HEADS * HEAD_DIM, dtype=BF16)
        yield Check(
            f"gated, {tokens}",
            lambda o=o, g=gate: [gpu_ops.gated(o, g, EPS, BF16)],
            lambda o=o, g=gate: [pieces.gated(o, g, EPS, BF16)],
            ROUNDED,
        )
        args = (randn(tokens, 256), randn(256, scale=0.1), TOP_K, 1.0, 2.5, randn(8, tokens, LATENT // 8, dtype=BF16))
        for what, bound in (("routes", EXACT), ("u", ROUNDED)):
            yield Check(f"choose, {what}, {tokens}", partial(chosen_by, gpu_ops.choose, what, *args, small, EPS, BF16),
                        partial(chosen_by, pieces.choose, what, *args, small, EPS, BF16), bound)  # fmt: skip


def chosen_by(form: Callable[..., Chosen], what: str, *args: object) -> list[Tensor]:
    """The routes, or what goes into the experts."""
    found = form(*args)
    return [x.float() for x in found.routes] if what == "routes" else [found.u_TM]


def placed(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, rotary: object, dtype: torch.dtype,
           rows: Tensor) -> list[Tensor]:  # fmt: skip
    """Queries, and arenas after a write."""
    arenas = [torch.zeros(len(rows) // 16 + 3, 16, KV_HEADS, HEAD_DIM, device=CUDA).to(dtype) for _ in "kv"]
    out = form(q, k, v, rotary, 1.3, EPS, *arenas, rows)
    return [x.float() for x in (out, *arenas)]


def attention_checks() -> Iterator[Check]:
    """Few queries and many, ragged sequences, windows, blocks in any order, what lies in block 0 never seen."""
    cases = ((1, 1, 16, 0), (3, 1, 40, 2048), (2, 4, 50, 100), (1, 300, 40, 0), (1, 2048, 32, 2048), (2, 500, 20, 200))
    for batch, new, columns, window in cases:
        for dtype in (BF16, torch.float32, torch.float8_e4m3fn):
            keys, shape = columns * BLOCK, (batch * columns + 1, BLOCK, KV_HEADS, HEAD_DIM)
            arenas = [torch.randn(shape, device=CUDA).to(dtype) for _ in "kv"]
            if dtype != torch.float8_e4m3fn:
                for arena in arenas:
                    arena[0] = torch.nan
            blocks = (1 + torch.randperm(batch * columns, device=CUDA)).view(batch, columns)
            past = keys - new - torch.arange(batch, device=CUDA) * 37 - 5
            q_pos = past[:, None] + torch.arange(new, device=CUDA)
            k_pos = torch.arange(keys, device=CUDA).expand(batch, keys)
            k_pos = torch.where(k_pos < (past + new)[:, None], k_pos, -1)
            q = randn(batch, new, HEADS, HEAD_DIM, dtype=torch.float32 if dtype == torch.float32 else BF16)
            args = (q, *arenas, blocks, q_pos, k_pos, window)
            yield Check(
                f"attention, {batch} x {new} on {columns} blocks, window {window}, {dtype}",
                lambda args=args: [gpu_ops.attend_blocks(*args)],
                lambda args=args: [reference.attend_blocks(*args)],
                EXACT if dtype == torch.float32 else 2**-5,
            )


def other_checks() -> Iterator[Check]:
    """Products of few rows, the router's against float64, and the draw."""
    for tokens in (1, 2, 4, 16, 17, 4096):
        x, ws = randn(tokens, HIDDEN), [randn(256, HIDDEN, scale=0.01), randn(512, HIDDEN, dtype=BF16, scale=0.01)]
        yield Check(f"linears, {tokens}", lambda x=x, ws=ws: [y.float() for y in gpu_ops.linears(x, ws)],
                    lambda x=x, ws=ws: [reference.linear(x, w).float() for w in ws], ROUNDED)  # fmt: skip
        yield Check(f"router, {tokens}", lambda x=x, w=ws[0]: [gpu_ops.linear(x, w)],
                    lambda x=x, w=ws[0]: [(x.double() @ w.double().T).float()], EXACT / 4)  # fmt: skip
    for rows in (1, 5, 64):
        logits, pos = randn(rows, 25_256, scale=3.0), torch.arange(rows, device=CUDA)
        draw = draws([Sampling(0.0 if n % 3 == 0 else 0.8, seed=n) for n in range(rows)], 25_256, "cuda")
        whole = draws([Sampling(0.0 if n % 3 == 0 else 0.8, seed=n) for n in range(rows)], 25_256)
        yield Check(
            f"draw, {rows}",
            lambda z=logits, d=draw, p=pos: [sample(z, d, p, filtered=False).float()],
            lambda z=logits, d=whole, p=pos: [sample(z.cpu(), d, p.cpu(), filtered=False).float().to(CUDA)],
            0.0,
        )


def differences(checks: Iterator[Check]) -> Iterator[tuple[str, float, bool]]:
    """Of each check its name, the difference relative to the largest, and whether it is within its bound twice."""
    for check in checks:
        pairs = [(a.float(), b.float()) for a, b in zip(check.found(), check.wanted(), strict=True)]
        again = [(a.float(), b) for a, (b, _) in zip(check.found(), pairs, strict=True)]
        error = max(
            ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)).item() for a, b in pairs
        )
        yield check.name, error, error <= check.bound and all(torch.equal(a, b) for a, b in again)


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
        where = torch.full((batch, 1), context - 1, device=CUDA), torch.arange(context, device=CUDA).expand(batch, -1)
        q = randn(batch, 1, HEADS, HEAD_DIM, dtype=BF16)
        calls = [partial(gpu_ops.attend_blocks, q, k, v, blocks, *where, window) for k, v in arenas]
        size = batch * context * 2 * KV_HEADS * HEAD_DIM * 2
        yield Time(f"attention, batch {batch}, context {context:,}", microseconds(calls), size)
    for new, keys, window in ((4096, 4096, 0), (4096, 6272, 2048), (4096, 65_536, 0)):
        arenas = [randn(keys // BLOCK + 1, BLOCK, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in "kv"]
        blocks, k_pos = 1 + torch.arange(keys // BLOCK, device=CUDA)[None], torch.arange(keys, device=CUDA)[None]
        q_pos, q = keys - new + torch.arange(new, device=CUDA)[None], randn(1, new, HEADS, HEAD_DIM, dtype=BF16)
        call = partial(gpu_ops.attend_blocks, q, *arenas, blocks, q_pos, k_pos, window)
        seen = int((q_pos + 1).clamp_max(window or keys).sum())
        yield Time(f"attention, chunk of {new:,} on {keys:,}, window {window}", microseconds([call] * 2),
                   keys * 512, 4.0 * seen * HEADS * HEAD_DIM)  # fmt: skip


def linear_times(tokens: Sequence[int]) -> Iterator[Time]:
    """The products of a layer outside its experts, and the head; beside each the library's."""
    cases: dict[str, tuple[list[tuple[int, int, torch.dtype]], torch.dtype, int]] = {
        "q, k, v, gate": ([(n, HIDDEN, BF16) for n in (1024, 128, 128, 1024)], BF16, 8),
        "router, squeeze": ([(256, HIDDEN, torch.float32), (512, HIDDEN, BF16)], torch.float32, 16),
        "o": ([(HIDDEN, 1024, BF16)], BF16, 16),
        "expand": ([(1024, LATENT, BF16)], torch.float32, 24),
        "head": ([(25_256, HIDDEN, BF16)], torch.float32, 2),
    }
    for name, (shapes, dtype, count) in cases.items():
        sets = [[randn(n, k, dtype=kind, scale=0.01) for n, k, kind in shapes] for _ in range(count)]
        size = sum(w.nbytes for w in sets[0])
        for rows in tokens:
            x = randn(rows, shapes[0][1], dtype=dtype)
            yield Time(f"{name}, {rows} rows", microseconds([partial(gpu_ops.linears, x, ws) for ws in sets]), size)
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


def read_rate() -> float:
    """Bytes a second that a large sum reads."""
    big = randn(1 << 29)
    return big.nbytes / microseconds([big.sum]) * 1e6


CHECKS = {"experts": expert_checks, "pieces": piece_checks, "attention": attention_checks, "linear": other_checks}


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
