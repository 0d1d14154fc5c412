"""What a server on a card does before it is ready: steps of many kinds, so that few requests wait for a compiler.

A kernel is compiled anew for each of the fewest rows, and above for every power of two and by whether 16 divides them.
"""

import logging
import time
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from muse_fn.batch import Runner
from muse_fn.capture import Progress
from muse_fn.kvcache.cache import KVCache, blocks_for
from muse_fn.kvcache.layout import layout_of
from muse_fn.sample import Sampling
from muse_fn.serve.scheduler import Share
from muse_fn.serve.steps import Orders, Rule, run

log = logging.getLogger("muse_fn.serve")

FEWEST = 16
TOGETHER = (3, 16, 50, 128, 500)  # tokens of each of several prompts
WAYS = (Sampling(), Sampling(1.0), Sampling(1.0, top_k=50, top_p=0.9))


def lengths(most: int) -> list[int]:
    """Numbers of rows such that any other one up to `most` is compiled as one of them."""
    powers = [1 << n for n in range(FEWEST.bit_length(), most.bit_length() + 1)]
    found = {*range(1, FEWEST + 1), *powers, *(power - 1 for power in powers), most, most - 1, most // 16 * 16}
    return sorted(n for n in found if 1 <= n <= most)


def steps(runner: Runner, rows: int, block_size: int) -> Iterator[Orders]:
    """Prompts of these lengths at the start and behind one chunk, decodes of up to `rows` sequences, as many prompts
    together. Their tables name block 0 alone, which belongs to nobody."""
    groups, behind = len(layout_of(runner.config, runner.mesh).windows), runner.chunk
    table = np.zeros((groups, blocks_for(2 * behind + 1, block_size)), np.int64)

    def share(start: int, count: int) -> Share:
        return Share(0, start, np.ones(count, np.int32), table, True)

    def rules(count: int, way: int) -> tuple[Rule, ...]:
        return (Rule(WAYS[way % len(WAYS)]),) * count

    for n, length in enumerate(lengths(runner.chunk)):
        yield Orders((share(0, length),), (), rules(1, n), (None,))
        yield Orders((share(behind, length),), (), rules(1, n + 1), (None,))
    for n, count in enumerate(lengths(rows)):
        yield Orders((), (share(behind, 1),) * count, rules(count, n), ())
        for length in [length for length in TOGETHER if count > 1 and count * length <= runner.chunk]:
            yield Orders((share(0, length),) * count, (), rules(count, n), (None,) * count)


def rehearse(
    runner: Runner,
    kv: KVCache,
    rows: int,
    block_size: int,
    allowed_V: Tensor | None,
    progress: Progress | None = None,
) -> KVCache:
    """Runs these steps; on a mesh every rank does. Consumes `kv`: nothing but its block 0 changes."""
    every, begun = list(steps(runner, rows, block_size)), time.monotonic()
    for done, orders in enumerate(every):
        _, kv = run(runner, kv, orders, allowed_V)
        if progress is not None:
            progress(done + 1, len(every), "kernels", time.monotonic() - begun)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return kv


def watch_compiler() -> None:
    """On a card: what the compiler still has to do is said in the log, since a request waits for it."""

    def tell(kernel: str, seconds: float) -> None:
        log.warning("a step waited %.2f s for the compiler: %s", seconds, kernel)

    import_module("muse_fn.kernels.gpu").on_compile(tell)
