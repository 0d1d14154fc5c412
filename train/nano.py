"""Trains the embedded checkpoint from nothing.

    python -m train.nano --device cuda --steps 9000 --seed 0 --out FOLDER

Writes FOLDER/trained.safetensors (float32, by accessor path) and the log. Package it with `python -m train.package`.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from muse_fn.load import Model
from muse_fn.params.config import Config
from train.data import Batch, Codec, batch, codec_of
from train.evaluate import cases, report, score
from train.model import NANO, Pace, State, start, stepper, stored

WARMUP = 200
PACKED_FROM = 0.7  # the share of the run after which the inner experts are seen in 4 bits


class Batches(Dataset[Batch]):
    """Batch number -> batch, so that any number of workers makes the same run."""

    def __init__(self, seed: int, steps: int, rows: int, length: int) -> None:
        self.seed, self.steps, self.rows, self.length = seed, steps, rows, length
        self.code: Codec | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> Batch:
        if self.code is None:  # in the worker: a template does not travel between processes
            self.code = codec_of()
        return batch(self.seed, number, self.rows, self.length, self.code)


def pace(number: int, steps: int, peak: float, device: str) -> Pace:
    """Linear warm-up, then a cosine to zero; the balancing of experts slows down alike."""
    at = min(1.0, (number + 1) / min(WARMUP, steps))
    share = at * 0.5 * (1 + math.cos(math.pi * number / steps))
    return Pace(*(torch.tensor(x, device=device) for x in (peak * share, 2e-3 * share, float(number + 1))))


class Log:
    """Lines to the terminal and to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def train(args: argparse.Namespace, config: Config, log: Log) -> State:
    """The whole run: batches in, state out."""
    device, dtype = args.device, torch.bfloat16 if args.device == "cuda" else torch.float32
    step = stepper(config, args.compile)
    state = start(config, args.seed, device)
    if args.begin:
        state = State({path: leaf.to(device) for path, leaf in load_file(args.begin).items()}, *state[1:])
    log(f"{sum(v.numel() for v in state.values.values())} parameters, torch {torch.__version__}, {vars(args)}")
    since, seen = time.perf_counter(), 0
    for number, rows in enumerate(loaded(args)):
        packed = number >= PACKED_FROM * args.steps or args.begin is not None
        there = Batch(*(x.to(device, non_blocking=True) for x in rows))
        with torch.no_grad():
            params = stored(state.values, config, dtype, packed)
        state, value, aux = step(state, params, there, pace(number, args.steps, args.rate, device))
        seen += there.tokens.numel()
        if number % args.every == args.every - 1 or number < 3 or number == args.steps - 1:
            load = aux.loads.float()
            peak = (load.amax(-1) / load.mean(-1)).max().item()
            took = time.perf_counter() - since
            told = f"loss {value.item():.4f}  right {aux.right.item():.4f}  load {peak:.2f}"
            log(f"step {number + 1:6d}  {told}  {seen / took:9.0f} tokens/s{'  packed' if packed else ''}")
            since, seen = time.perf_counter(), 0
        if args.seconds and time.perf_counter() - args.begun > args.seconds:
            log(f"stopped after {number + 1} steps: {args.seconds} s are over")
            break
    return state


def loaded(args: argparse.Namespace) -> Iterator[Batch]:
    """The batches of a run, made ahead by worker processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return iter(
        DataLoader(
            Batches(args.seed, args.steps, args.rows, args.length),
            batch_size=None,
            num_workers=args.workers,
            prefetch_factor=4 if args.workers else None,
            pin_memory=args.device == "cuda",
        )
    )


def evaluate(state: State, config: Config, args: argparse.Namespace, log: Log) -> None:
    """Held-out conversations to the log, answered by what the checkpoint will hold."""
    code = codec_of()
    wanted = cases(code, 0, args.count)
    model = Model(config, stored(state.values, config, torch.float32, packed=True), None)
    log(report(score(model, wanted, [code.ids(case.prompt) for case in wanted], code)))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the embedded checkpoint from nothing.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--rows", type=int, default=30, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile the step")
    parser.add_argument("--every", type=int, default=100, help="steps between log lines")
    parser.add_argument("--count", type=int, default=100, help="held-out conversations per task at the end, 0 for none")
    parser.add_argument("--seconds", type=float, default=0, help="stop early after so many seconds")
    parser.add_argument("--begin", type=Path, help="trained.safetensors of an earlier run to go on from")
    parser.add_argument("--out", type=Path, default=Path("train/out"))
    parser.set_defaults(begun=time.perf_counter())
    return parser.parse_args()


def main() -> int:
    """Trains, evaluates, writes."""
    args = arguments()
    torch.manual_seed(args.seed)
    log = Log(args.out / "nano.log")
    state = train(args, NANO, log)
    save_file({path: value.cpu() for path, value in state.values.items()}, args.out / "trained.safetensors")
    if args.count:
        evaluate(state, NANO, args, log)
    log(f"{time.perf_counter() - args.begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
