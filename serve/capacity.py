"""What an engine has room for: its settings, its cache, its captured steps."""

import logging
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_fn.batch import Batch, Runner, blocks_needed, open_batch
from muse_fn.capture import CaptureError, Progress
from muse_fn.captured_decode import capture_decode
from muse_fn.captured_prefill import ReadSteps, capture_reads
from muse_fn.generation import BLOCK
from muse_fn.kvcache.cache import KVCache, blocks_for
from muse_fn.serve.rehearsal import rehearse, watch_compiler
from muse_fn.serve.replays import Replays

log = logging.getLogger("muse_fn.serve")


@dataclass(frozen=True)
class EngineSettings:
    """How to serve."""

    rows: int = 64  # sequences stepped together
    chunk: int = 512  # prompt tokens read in one step
    num_blocks: int = 4096  # of the cache
    block_size: int = BLOCK
    kv_dtype: torch.dtype | None = None
    queue: int = 1024  # jobs that may wait
    queue_tokens: int = 1 << 22  # prompt tokens that may wait
    share: float = 0.2  # of the time, what long prompts may take while others are answered
    reuse: bool = True  # equal beginnings of prompts are read once


def positions_that_fit(runner: Runner, settings: EngineSettings) -> int:
    """The longest sequence: the model's limit, or what the cache holds if that is less."""

    def needs(positions: int) -> int:
        # Twice the chunk: the next one is planned before the last one's blocks have left the windows.
        return blocks_needed(runner.config, positions, 2 * settings.chunk, settings.block_size)

    return bisect_right(range(runner.config.max_positions + 1), settings.num_blocks - 1, key=needs) - 1


def open_cache(runner: Runner, settings: EngineSettings) -> Batch:
    """The empty cache of these settings."""
    return open_batch(runner, settings.num_blocks, settings.block_size, dtype=settings.kv_dtype)


def capture_steps(
    runner: Runner, kv: KVCache, settings: EngineSettings, allowed_V: Tensor | None, progress: Progress | None = None
) -> tuple[Replays, KVCache]:
    """Decode steps for up to all rows and the longest sequence, and steps that read pieces of prompts. On a card many
    kinds of steps are run before, so that their kernels are compiled. Consumes `kv`."""
    if runner.device.type == "cuda":
        kv = rehearse(runner, kv, settings.rows, settings.block_size, allowed_V, progress)
    columns = blocks_for(positions_that_fit(runner, settings), settings.block_size)
    reads, kv = _capture_reads(runner, kv, columns, progress)
    steps, kv = capture_decode(
        runner.params,
        kv,
        runner.config,
        runner.mesh,
        max_batch=settings.rows,
        max_columns=columns,
        allowed_V=allowed_V,
        ops=runner.ops,
        progress=progress,
    )
    if runner.device.type == "cuda":
        watch_compiler()
    return Replays(steps, reads), kv


def _capture_reads(runner: Runner, kv: KVCache, columns: int, progress: Progress | None) -> tuple[ReadSteps, KVCache]:
    """Steps that read pieces of prompts. Where they cannot be had one rank alone goes on without, by eager steps; of
    several all must do alike."""
    given, ops = (runner.params, kv, runner.config, runner.mesh), runner.ops
    try:
        return capture_reads(*given, chunk=runner.chunk, max_columns=columns, ops=ops, progress=progress)
    except (CaptureError, torch.OutOfMemoryError) as error:
        if runner.mesh.ranks > 1:
            raise
        log.warning("prompts are read without captured steps: %s", str(error).partition("\n")[0])
        return capture_reads(*given, sizes=(), ops=ops)
