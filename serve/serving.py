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
from muse_fn.load import Model
from muse_fn.params.tree import sample_tensor
from muse_fn.serve import logs
from muse_fn.serve.capacity import EngineSettings, capture_steps, open_cache
from muse_fn.serve.config_file import ConfigFile
from muse_fn.serve.following import follow
from muse_fn.serve.guard import Settings
from muse_fn.serve.launch import launch_command
from muse_fn.serve.leading import CLOSING, Listening, lead
from muse_fn.serve.member import is_speaker, needs_launch, open_on_mesh
from muse_fn.serve.options import (
    KV_DTYPES,
    Device,
    Dtype,
    KvOption,
    MeshOption,
    ModelDir,
    Quantize,
    QuantizeOption,
    RandomOption,
)
from muse_fn.sharding.collectives import leave

GIB = 1 << 30
CPU_CACHE = 1.0  # GiB
CARD_SHARE = 0.85  # of the free memory of a card
NOISE = "random weights: the parameters were made here, every answer is noise; only speed means something"

log = logging.getLogger("muse_fn.serve")


def serve(
    model: ModelDir = None,
    device: Device = "cpu",
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Of plain parameters. Default: float32; with --random-weights bfloat16."),
    ] = None,
    quantize: QuantizeOption = Quantize.auto,
    mesh: MeshOption = None,
    random_weights: RandomOption = False,
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
    capture: Annotated[
        bool | None,
        typer.Option("--capture/--no-capture", help="Take captured steps. Default: on cuda.", show_default=False),
    ] = None,
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
    if capture and deterministic:
        raise ValueError("--capture and --deterministic: only one can be had, as the latter reads values on the host")
    keys = _keys(api_key)
    dtype = dtype or (Dtype.bfloat16 if random_weights else Dtype.float32)
    opened, place = open_on_mesh(mesh, model, device, dtype, quantize, quiet=False, is_random=random_weights)
    if needs_launch(place):
        launch_command(place, quiet=False, mercy=drain + 2 * CLOSING)
        return
    leave_a_core()
    if random_weights and is_speaker(place):
        log.warning(NOISE)
    runner = Runner(opened.params, opened.config, place, chunk, INVARIANT if deterministic else None)
    stored = None if kv is None else KV_DTYPES[kv]
    blocks = blocks_that_fit(runner, rows, cache_gib, block_size, stored)
    settings = EngineSettings(rows, chunk, blocks, block_size, stored, queue, share=share)
    captures = runner.device.type == "cuda" and not deterministic if capture is None else capture
    if is_speaker(place):
        listening = Listening(
            _name(name, model, random_weights),
            host,
            port,
            keys,
            Settings(tuple(cors_origin or ()), tuple(allowed_host or ())),
            strict,
            tls_cert,
            tls_key,
            drain,
            captures,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as loop:
            code = loop.run(lead(opened, runner, settings, listening))
        leave()
        sys.exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):  # the first rank drains, and says when to go
        signal.signal(number, signal.SIG_IGN)
    _go_along(opened, runner, settings, captures)
    leave()


def _go_along(opened: Model, runner: Runner, settings: EngineSettings, captures: bool) -> None:
    """What the ranks but the first do until they are told to go; their captured steps end with it."""
    allowed, cache = allowed_ids(opened, runner.device), open_cache(runner, settings).kv
    captured, cache = capture_steps(runner, cache, settings, allowed) if captures else (None, cache)
    follow(runner, cache, allowed, captured)


def _name(given: str | None, model: Path | None, is_random: bool) -> str:
    """What clients call the model; they can see by it that the weights are random."""
    name = given or (model.resolve().name if model else "muse-nano")
    return f"{name}-random" if is_random else name


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
        return _checked(gib, each, runner)
    free = torch.cuda.mem_get_info(runner.device)[0] * CARD_SHARE if runner.device.type == "cuda" else CPU_CACHE * GIB
    return 1 + max(1, min(rows * longest, int(free / each)))


def _checked(gib: float, each: int, runner: Runner) -> int:
    """Blocks of `each` bytes in so many GiB. Raises ValueError unless the machine has them and a prompt fits in."""
    on_card = runner.device.type == "cuda"
    there = torch.cuda.mem_get_info(runner.device)[0] if on_card else _memory()
    if gib * GIB > there:
        what = "free memory of the card" if on_card else "memory of this machine"
        raise ValueError(f"--cache-gib {gib}: must be at most the {what}, which is {there / GIB:.3g} GiB")
    blocks, least = int(gib * GIB / each), 1 + blocks_needed(runner.config, 2, 2 * runner.chunk, 1)
    if blocks < least:
        raise ValueError(f"--cache-gib {gib}: must be at least {least * each / GIB:.2g}, which is {least} blocks")
    return blocks


def _memory() -> int:
    """Bytes that this machine has; where it does not say, as good as no limit."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys, of which one option may have several between commas. Raises ValueError for an option without any: who
    gives one does not mean that everybody may come in."""
    parts = [[key.strip() for key in text.split(",")] for text in given or ()]
    if not all(any(keys) for keys in parts):
        raise ValueError("--api-key: must not be empty; without the option no key is asked")
    return tuple(key for keys in parts for key in keys if key)


def _level(name: str) -> int:
    known = logging.getLevelNamesMapping()
    if name.upper() not in known:
        raise ValueError(f"--log-level {name}: must be one of debug, info, warning, error")
    return known[name.upper()]
