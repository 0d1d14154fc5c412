"""A prompt of 1,040,011 tokens through prefill and decode on a very small model: finite, exact, in a bounded workspace.

    python bench/long_context.py [--device cuda] [--length 1040011] [--chunk 4096]

The last logits are compared with the same step whose attention is computed in float64 over the same keys. Memory is
what the device's allocator saw beyond parameters and arena, on a CPU what the process grew by beyond the arena. Prints
Markdown. The weights are random.
"""

import argparse
import resource
import sys
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.batch import Runner, blocks_needed, open_batch, read, step
from muse_fn.kernels.reference import rows_of, visible
from muse_fn.kernels.select import select
from muse_fn.kvcache.blocks import NoRoom, stats
from muse_fn.kvcache.cache import KVCache, bytes_per_block
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.tree import map_tensors

CONFIG = Config(
    vocab_size=64, hidden_size=16, intermediate_size=16, layers=3, heads=2, kv_heads=1, head_dim=8, latent_size=16,
    expert_size=16, experts=2, top_k=1, initializer_range=0.3, bos_token_id=None, eos_token_id=(),
)  # fmt: skip
BLOCK = 128
NEW = 8


def float64_attention(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    window: int,
    _: bool,
) -> Tensor:
    """The equation itself, all keys at once, in float64."""
    k, v = (rows_of(arena, blocks_BC, k_pos, torch.float64) for arena in (k_arena, v_arena))
    q = q_BTND.double().unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("btkgd,bskd->bkgts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(q_pos, k_pos, window)[:, None, None], -torch.inf)
    return torch.einsum("bkgts,bskd->btkgd", scores.softmax(-1), v).flatten(2, 3).to(q_BTND.dtype)


def peak(device: torch.device) -> int:
    """Bytes of memory at the highest so far: of the device, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Found(NamedTuple):
    """What one run showed."""

    prefill: float  # seconds
    decode: float  # seconds a token
    is_finite: bool
    blocks: int  # held at the end of the prompt
    extra: int  # bytes beyond parameters and arena
    error: float  # of the last logits, against attention in float64
    largest: float  # of these logits


def run(config: Config, length: int, chunk: int, device: torch.device) -> Found:
    """Reads the prompt, decodes NEW tokens, and does the last step once more in float64."""
    params = map_tensors(lambda t: t.to(device), init_params(config, seed=1))
    runner = Runner(params, config, chunk=chunk)
    tokens = torch.randint(0, 64, (length + NEW,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = open_batch(runner, 1 + blocks_needed(config, length + NEW, chunk, BLOCK), BLOCK)
    before, started = peak(device), time.perf_counter()

    def progress(done: int, total: int) -> None:
        # The work still to do grows with the square of the position.
        spent = time.perf_counter() - started
        left = spent * ((total / max(done, 1)) ** 2 - 1)
        print(f"\rread {done:,} of {total:,}, {spent:.0f} s, about {left:.0f} s left ", end="", file=sys.stderr)

    logits, batch = read(runner, batch, 0, tokens[:length], progress=progress)
    assert not isinstance(logits, NoRoom)
    is_finite = bool(logits.isfinite().all())  # waits for the device
    prefill, held, started = time.perf_counter() - started, stats(batch.pool).used, time.perf_counter()
    for at in range(length, length + NEW - 1):
        logits, batch = step(runner, batch, [0], [tokens[at]])
        assert not isinstance(logits, NoRoom)
        is_finite &= bool(logits.isfinite().all())
    arena = 0 if device.type == "cuda" else sum(t.nbytes for t in (*batch.kv.k, *batch.kv.v))  # untouched until now
    decode, extra = (time.perf_counter() - started) / (NEW - 1), peak(device) - before - arena
    copy = KVCache(tuple(t.clone() for t in batch.kv.k), tuple(t.clone() for t in batch.kv.v), torch.tensor(True))
    exact = replace(select(device), attend_blocks=float64_attention, attend_new=None)
    other, _ = step(replace(runner, ops=exact), batch._replace(kv=copy), [0], [tokens[-1]])
    logits, _ = step(runner, batch, [0], [tokens[-1]])
    assert not isinstance(logits, NoRoom)
    assert not isinstance(other, NoRoom)
    error, largest = (logits - other).abs().max().item(), other.abs().max().item()
    return Found(prefill, decode, is_finite, held, extra, error, largest)


def main() -> None:
    """Runs and prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=1_040_011)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=2)
    args = parser.parse_args()
    device, config = torch.device(args.device), replace(CONFIG, heads=args.heads)
    with torch.inference_mode():
        found = run(config, args.length, args.chunk, device)
    layout, each = layout_of(config), bytes_per_block(config, BLOCK, torch.float32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = {
        "device": f"{name}, torch {torch.__version__}",
        "prompt": f"{args.length:,} tokens by {args.chunk:,}; {layout.groups} groups over {layout.slots} slots",
        "prefill": f"{found.prefill:.1f} s",
        "decode": f"{found.decode * 1e3:.1f} ms a token",
        "all logits finite": str(found.is_finite),
        "cache held": f"{found.blocks:,} blocks of {each:,} bytes, {found.blocks * each / args.length:.1f} a token",
        "memory beyond parameters and arena": f"{found.extra / 2**20:.1f} MiB",
        "last logits against float64 attention": f"{found.error:.2e} at {found.largest:.2f}",
    }
    print("\n| | |\n|---|---|")
    for key, value in rows.items():
        print(f"| {key} | {value} |")
    if not found.is_finite or found.error > 1e-4 * max(1.0, found.largest):
        sys.exit("not what it should be")


if __name__ == "__main__":
    main()
