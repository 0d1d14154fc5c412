"""`muse-fn serve`: the model behind an OpenAI-compatible HTTP server."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from muse_fn.batch import Runner, blocks_needed
from muse_fn.generation import BLOCK, allowed_ids
from muse_fn.kernels.select import INVARIANT
from muse_fn.kvcache.cache import bytes_per_block
from muse_fn.params.tree import sample_tensor
from muse_fn.serve import logs
from muse_fn.serve.config_file import ConfigFile
from muse_fn.serve.engine import EngineSettings, open_cache
from muse_fn.serve.following import follow
from muse_fn.serve.guard import Settings
from muse_fn.serve.launch import launch_command
from muse_fn.serve.leading import Listening, lead
from muse_fn.serve.member import is_speaker, needs_launch, open_on_mesh
from muse_fn.serve.options import (
    KV_DTYPES,
    Device,
    Dtype,
    DtypeOption,
    KvOption,
    MeshOption,
    ModelDir,
    QuantizeOption,
)
from muse_fn.sharding.collectives import leave

GIB = 1 << 30
CPU_CACHE = 1.0  # GiB
CARD_SHARE = 0.85  # of the free memory of a card


def serve(
    model: ModelDir = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Of the model, as clients call it.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", envvar="MUSE_FN_API_KEY", help="May be given several times. Default: none is asked."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Sequences stepped together.")] = 64,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Prompt tokens read in one step.")] = 512,
    cache_gib: Annotated[
        float | None, typer.Option("--cache-gib", min=0.0, help="Size of the KV cache on each rank.")
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Positions of a block of the cache.")] = BLOCK,
    kv: KvOption = None,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait; more get 429.")] = 1024,
    share: Annotated[
        float, typer.Option("--share", min=0.01, max=1.0, help="Of the time for long prompts beside answers.")
    ] = 0.2,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a CPU in float32, bits depend on the request alone.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown fields instead of warning.")] = False,
    cors_origin: Annotated[list[str] | None, typer.Option("--cors-origin", help="May call from a browser.")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option("--allowed-host", help="Names this server has.")] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate file (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Key file (PEM).")] = None,
    drain: Annotated[
        float, typer.Option("--drain", min=0.0, help="Seconds that running requests have at the end.")
    ] = 30,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    config: ConfigFile = None,
) -> None:
    """Serves the model until SIGTERM or Ctrl-C; requests in flight then have --drain seconds to end."""
    logs.configure(_level(log_level), log_json)
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key: both or neither must be given")
    opened, place = open_on_mesh(mesh, model, device, dtype, quantize, quiet=False)
    if needs_launch(place):
        launch_command(place, quiet=False, mercy=drain + 5)
        return
    leave_a_core()
    runner = Runner(opened.params, opened.config, place, chunk, INVARIANT if deterministic else None)
    stored = None if kv is None else KV_DTYPES[kv]
    blocks = blocks_that_fit(runner, rows, cache_gib, block_size, stored)
    settings = EngineSettings(rows, chunk, blocks, block_size, stored, queue, share=share)
    if is_speaker(place):
        listening = Listening(
            name or (model.resolve().name if model else "muse-nano"),
            host,
            port,
            tuple(key for given in api_key or () for key in given.split(",") if key),
            Settings(tuple(cors_origin or ()), tuple(allowed_host or ())),
            strict,
            tls_cert,
            tls_key,
            drain,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as loop:
            code = loop.run(lead(opened, runner, settings, listening))
        leave()
        sys.exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):  # the first rank drains, and says when to go
        signal.signal(number, signal.SIG_IGN)
    follow(runner, open_cache(runner, settings).kv, allowed_ids(opened, runner.device))
    leave()


def leave_a_core() -> None:
    """One core is for the event loop: threads that wait for each other in every operation must not wait for it too."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one for this system."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def blocks_that_fit(runner: Runner, rows: int, gib: float | None, block_size: int, stored: torch.dtype | None) -> int:
    """Blocks of the cache on this rank: what was asked for in GiB, else as many as `rows` longest sequences need or a
    fixed part of the memory holds, whichever is less."""
    dtype = stored or sample_tensor(runner.params).dtype
    each = bytes_per_block(runner.config, block_size, dtype, runner.mesh)
    longest = blocks_needed(runner.config, runner.config.max_positions, 2 * runner.chunk, block_size)
    if gib is not None:
        return max(2, int(gib * GIB / each))
    free = torch.cuda.mem_get_info(runner.device)[0] * CARD_SHARE if runner.device.type == "cuda" else CPU_CACHE * GIB
    return 1 + max(1, min(rows * longest, int(free / each)))


def _level(name: str) -> int:
    known = logging.getLevelNamesMapping()
    if name.upper() not in known:
        raise ValueError(f"--log-level {name}: must be one of debug, info, warning, error")
    return known[name.upper()]
