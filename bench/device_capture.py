"""Captured steps on an accelerator: equal to eager steps bit for bit, and how long each takes.

    python bench/device_capture.py [--device cuda] [--repeats 50] [--skip-times]

First, small models in float32, bfloat16 and with packed experts: every bucket, several batch sizes, greedy and filtered
sampling, each step fed on the device with the one before; tokens and every byte of the cache must be those of the same
steps run eagerly. Likewise pieces of prompts: their logits and the cache. Then times of both kinds of decode step for a
larger model. Ends with status 1 if anything differs; asserts no time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.buckets import Bucket, Piece, buckets, pieces
from muse_fn.captured_decode import Arenas, DecodeSteps, Feed, capture_decode, decode_and_sample, pad_feed, to_host
from muse_fn.captured_prefill import capture_reads, read_logits
from muse_fn.decoder import forward
from muse_fn.kernels.packed import quantise_mxfp4, quantise_nvfp4
from muse_fn.kernels.select import REFERENCE
from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.tree import MoE, Params, map_tensors, sample_tensor
from muse_fn.sample import Sampling, draws
from muse_fn.step import prefill

BLOCK, STEPS = 16, 5
SMALL = Config(
    vocab_size=997,
    hidden_size=128,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=32,
    latent_size=64,
    expert_size=64,
    experts=12,
    top_k=3,
    window=40,
    max_positions=4096,
    initializer_range=0.2,
)
LARGE = Config(
    vocab_size=32_768,
    hidden_size=2048,
    layers=8,
    heads=16,
    kv_heads=4,
    head_dim=128,
    latent_size=1024,
    expert_size=1024,
    experts=32,
    top_k=4,
    window=512,
    max_positions=16_384,
)
KINDS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_k=20, seed=2),
    Sampling(temperature=1.0, top_p=0.7, min_p=0.01, seed=3),
)


class Run(NamedTuple):
    """Sequences whose prompts have been read."""

    params: Params
    config: Config
    kv: KVCache
    feed: Feed  # on the host


def packed(params: Params, form: str) -> Params:
    """The same model with its experts in 4 bits."""

    def quantised(mlp: MoE) -> MoE:
        gate_up, down = mlp.experts.gate_up, mlp.experts.down
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        pair = (quantise_mxfp4(gate_up), quantise_mxfp4(down))
        pair = pair if form == "mxfp4" else (quantise_nvfp4(gate_up, 2), quantise_nvfp4(down))
        return mlp._replace(experts=mlp.experts._replace(gate_up=pair[0], down=pair[1]))

    layers = [p._replace(mlp=quantised(p.mlp)) if isinstance(p.mlp, MoE) else p for p in params.layers]
    return params._replace(layers=tuple(layers))


def model(config: Config, form: str, device: torch.device) -> Params:
    """Random parameters in this form on the device."""
    params = init_params(config, seed=0, dtype=torch.float32 if form == "float32" else torch.bfloat16)
    params = map_tensors(lambda x: x.to(device), params)
    return params if form in ("float32", "bfloat16") else packed(params, form)


def prompted(params: Params, config: Config, lengths: list[int], room: int) -> Run:
    """Random prompts of these lengths read into a cache with room for more positions."""
    device, dtype = sample_tensor(params).device, sample_tensor(params).dtype
    table = own_blocks(config, len(lengths), max(lengths) + room, BLOCK)
    kv = init_cache(config, 1 + table.numel(), BLOCK, dtype=dtype, device=str(device))
    tokens = torch.randint(0, config.vocab_size, (len(lengths), max(lengths)))
    past = torch.tensor(lengths) - 1
    with torch.no_grad():
        for start in range(0, max(lengths), 512):
            count = (past - start).clamp(0, 512)
            part = View(table, past.clamp_max(start), count)
            view = map_tensors(lambda x: x.to(device), part)
            chunk = tokens[:, start : start + 512].to(device)
            _, kv = prefill(params, chunk, kv, view, config, all_logits=bool((count == 0).any()))
    sampling = [KINDS[n % len(KINDS)] for n in range(len(lengths))]
    last = tokens.gather(1, past[:, None])
    return Run(
        params, config, kv, Feed(last, View(table, past, torch.ones_like(past)), draws(sampling, config.vocab_size))
    )


def eager_step(run: Run, feed: Feed, arenas: Arenas) -> Feed:
    """One step without a graph."""
    with torch.inference_mode():
        tokens, past, count, _ = decode_and_sample(
            run.params, feed.tokens_B1, arenas, feed.view, feed.draw, (), run.config
        )
    return feed._replace(tokens_B1=tokens, view=View(feed.view.table_GBN, past, count))


def differences(run: Run, steps: DecodeSteps, kv: KVCache, bucket: Bucket) -> tuple[list[str], KVCache]:
    """What differs between captured and eager steps of this run, padded to a bucket."""
    device = sample_tensor(run.params).device
    feed = pad_feed(run.feed, bucket, run.config)
    plain = map_tensors(lambda x: x.to(device), feed)
    arenas = map_tensors(torch.clone, Arenas(kv.k, kv.v))
    found: list[str] = []
    mine = plain
    for n in range(STEPS):
        plain = eager_step(run, plain, arenas)
        mine, kv = steps(mine, kv)
        ours, theirs = to_host(mine.tokens_B1).wait(), to_host(plain.tokens_B1).wait()
        if ours != theirs:
            found.append(f"step {n}: tokens {ours} captured, {theirs} eager")
        if min(theirs[: len(run.feed.tokens_B1)]) < 0:
            found.append(f"step {n}: a row failed: {theirs}")
    for side in "kv":
        for slot, (x, y) in enumerate(zip(getattr(kv, side), getattr(arenas, side), strict=True)):
            if not torch.equal(x[1:], y[1:]):
                found.append(f"{side}[{slot}] differs by {(x[1:].float() - y[1:].float()).abs().max().item():.3g}")
    return found, kv


def check(form: str, device: torch.device) -> int:
    """Prints and counts the buckets whose captured steps are not the eager ones."""
    params, wrong = model(SMALL, form, device), 0
    tokens = torch.randint(0, SMALL.vocab_size, (2, 60))
    with torch.inference_mode():
        on_host = map_tensors(torch.Tensor.cpu, params)
        host = forward(on_host, tokens, SMALL, ops=REFERENCE)
        # This model amplifies roundings: how far apart two forms on one device are tells what the first number means.
        others = forward(params, tokens.to(device), SMALL).cpu(), forward(on_host, tokens, SMALL)
        errors = [((z - host).abs().max() / host.abs().max()).item() for z in others]
    told = f"{errors[0]:.2g} of the largest logit; the CPU's own form from it by {errors[1]:.2g}"
    print(f"{form}: forward on {device} differs from the reference on the CPU by {told}", flush=True)
    for lengths in ([37], [20, 90, 55], [70, 1, 33, 64], [3900, 1, 3000, 2000]):
        run = prompted(params, SMALL, lengths, STEPS)
        width = run.feed.view.table_GBN.shape[2]
        sizes = [b for b in buckets(5, width + 3) if b.batch >= len(lengths) and b.columns >= width]
        steps, kv = capture_decode(params, run.kv, SMALL, sizes=sizes)
        for bucket in steps.captured:
            found, kv = differences(run, steps, kv, bucket)
            wrong += bool(found)
            print(f"  {len(lengths)} sequences in {bucket}: " + ("; ".join(found) or "equal"), flush=True)
    return wrong


def padded_read(params: Params, piece: Piece, tokens: Tensor, view: View, arenas: Arenas) -> Tensor:
    """The eager step of a piece's size: tokens [1, T] and view on the host -> logits [1, V]."""
    tokens = F.pad(tokens, (0, piece.tokens - tokens.shape[1]))
    view = view._replace(table_GBN=F.pad(view.table_GBN, (0, piece.columns - view.table_GBN.shape[2])))
    tokens, view = map_tensors(lambda x: x.to(sample_tensor(params).device), (tokens, view))
    with torch.inference_mode():
        return read_logits(params, tokens, arenas, view, SMALL)


def check_reads(form: str, device: torch.device) -> int:
    """Prints and counts the pieces of prompts whose captured step is not the eager one of the same size."""
    params, wrong = model(SMALL, form, device), 0
    for past, length in ((0, 37), (0, 512), (20, 64), (3000, 200)):
        run = prompted(params, SMALL, [past + 1], length)  # all but the last token are in the cache
        view = run.feed.view._replace(count_B=torch.full_like(run.feed.view.past_B, length))
        tokens, width, kv = torch.randint(0, SMALL.vocab_size, (1, length)), view.table_GBN.shape[2], run.kv
        for piece in [p for p in pieces(512, width + 3, BLOCK) if p.tokens >= length and p.columns >= width]:
            steps, kv = capture_reads(params, kv, SMALL, sizes=[piece])
            arenas = map_tensors(torch.clone, Arenas(kv.k, kv.v))
            plain = padded_read(params, piece, tokens, view, arenas)
            mine, kv = steps(tokens, view, kv)
            pairs = (
                (mine, plain),
                *((x[1:], y[1:]) for x, y in zip((*kv.k, *kv.v), (*arenas.k, *arenas.v), strict=True)),
            )
            apart = [(x.float() - y.float()).abs().max().item() for x, y in pairs if not torch.equal(x, y)]
            told = f"{len(apart)} tensors differ, by up to {max(apart):.3g}" if apart else "equal"
            told = told if plain.isfinite().all() else f"{told}, logits are not finite"
            wrong += told != "equal"
            print(f"  {form}, {length} tokens behind {past} in {piece}: {told}", flush=True)
    return wrong


class Stepping:
    """Captured steps one after another, each fed with the one before."""

    def __init__(self, steps: DecodeSteps, feed: Feed, kv: KVCache) -> None:
        self._steps, self._feed, self._kv = steps, feed, kv

    def __call__(self) -> None:
        """One step, launched and not waited for."""
        self._feed, self._kv = self._steps(self._feed, self._kv)


def seconds(fn: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of `repeats` runs, the device idle before and after each."""
    found: list[float] = []
    for _ in range(repeats + 3):
        _wait(device)
        begun = time.perf_counter()
        fn()
        _wait(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times(form: str, device: torch.device, repeats: int) -> None:
    """Prints a table of both kinds of step for several batch sizes."""
    params = model(LARGE, form, device)
    for batch, length in ((1, 1000), (8, 1000), (32, 1000), (8, 8000)):
        run = prompted(params, LARGE, [length] * batch, 3 * repeats)
        bucket = Bucket(batch, run.feed.view.table_GBN.shape[2])
        begun = time.perf_counter()
        steps, kv = capture_decode(params, run.kv, LARGE, sizes=[bucket])
        took = time.perf_counter() - begun
        feed = map_tensors(lambda x: x.to(device), run.feed)
        arenas = map_tensors(torch.clone, Arenas(kv.k, kv.v))
        slow = seconds(partial(eager_step, run, feed, arenas), repeats, device)
        fast = seconds(Stepping(steps, feed, kv), repeats, device)
        size = steps.bytes[bucket]
        print(
            f"  {form:8} batch {batch:3}, {length:5} past: eager {slow * 1e3:8.2f} ms, captured {fast * 1e3:8.2f} ms, "
            f"{slow / fast:5.1f} times faster; capture {took:.1f} s, {(size or 0) / 2**20:.0f} MiB",
            flush=True,
        )


def main() -> int:
    """Runs the checks, then the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--skip-times", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda":
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}")
    torch.manual_seed(0)
    forms = ("float32", "bfloat16", "mxfp4", "nvfp4")
    wrong = sum(check(form, device) + check_reads(form, device) for form in forms)
    print("captured steps are the eager ones, bit for bit" if not wrong else f"{wrong} sizes differ")
    if not asked.skip_times:
        for form in ("bfloat16", "mxfp4"):
            times(form, device, asked.repeats)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
