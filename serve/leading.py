"""The process that listens: engine, grammars and HTTP server, from the warm-up to the drain."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from rich import progress as bars

from muse_fn.batch import Runner
from muse_fn.capture import Progress
from muse_fn.generation import allowed_ids
from muse_fn.load import Model
from muse_fn.serve.app import make_app
from muse_fn.serve.capacity import EngineSettings
from muse_fn.serve.connection import Connection
from muse_fn.serve.engine import ModelEngine
from muse_fn.serve.grammar import Grammars
from muse_fn.serve.guard import Settings
from muse_fn.serve.jobs import Job
from muse_fn.serve.metrics import Metrics
from muse_fn.serve.options import err
from muse_fn.serve.service import Service, Stage

CLOSING = 5  # seconds that answers which are complete have to be sent
WARM_UP = 8  # tokens, so that whatever is made at the first use is made before the first request

log = logging.getLogger("muse_fn.serve")


@dataclass(frozen=True)
class Listening:
    """Where, to whom and under which name a server answers."""

    name: str = "muse-nano"
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    keys: tuple[str, ...] = ()
    guard: Settings = field(default_factory=Settings)
    strict: bool = False
    certificate: Path | None = None
    key: Path | None = None
    drain: float = 30.0  # seconds that running requests have at the end
    captures: bool = False  # take captured steps


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def lead(model: Model, runner: Runner, settings: EngineSettings, listening: Listening) -> int:
    """Serves until SIGTERM or SIGINT; then takes nothing new, and what runs has `drain` seconds. Returns the exit code.

    A second signal ends the wait at once; so does an engine that has failed for good, with code 1.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    with closing(listen(listening.host, listening.port)) as listener:
        async with serving(model, runner, settings, listening) as (server, service, engine):
            serves = loop.create_task(server.serve([listener]))
            _greet(listening, listener)
            await _first(stop.wait(), engine.ended(), asyncio.shield(serves))
            failed, service.stage.name = bool(engine.health), "draining"
            log.info("draining", extra={"seconds": listening.drain, "failed": engine.health or None})
            await _first(engine.drain(listening.drain), hurry.wait())
            await engine.stop()  # what is left hears of it before its connection goes
            server.should_exit = True
            await _first(asyncio.shield(serves), hurry.wait())
            server.force_exit = hurry.is_set()
            await serves
    return 1 if failed else 0


@asynccontextmanager
async def serving(
    model: Model, runner: Runner, settings: EngineSettings, listening: Listening
) -> AsyncGenerator[tuple[uvicorn.Server, Service, ModelEngine]]:
    """A warm engine and an HTTP server that is about to serve it; both end with the context."""
    metrics, tokenizer = Metrics(), model.tokenizer
    engine = ModelEngine(runner, settings, allowed_ids(model, runner.device), metrics)
    grammars = None if tokenizer is None else Grammars(tokenizer, model.config.vocab_size)
    service = Service(
        listening.name,
        replace(model.config, max_positions=engine.limit),
        tokenizer,
        engine,
        grammars,
        keys=listening.keys,
        created=int(time.time()),
        strict=listening.strict,
        metrics=metrics,
        stage=Stage("starting"),
    )
    if listening.captures:
        with capturing_bar() as progress:
            engine.capture(progress)
    engine.start()
    try:
        await warm_up(engine)
        service.stage.name = "ready"
        yield http_server(service, listening), service, engine
    finally:
        await engine.stop()
        if grammars is not None:
            await grammars.close()


@contextlib.contextmanager
def capturing_bar() -> Generator[Progress]:
    """Draws how many steps have been captured, and how long the others may take, on standard error."""
    with bars.Progress(
        bars.TextColumn("preparing {task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as drawn:
        task = drawn.add_task("steps", total=None)

        def progress(done: int, total: int, what: str, seconds: float) -> None:
            drawn.update(task, completed=done, total=total, description=what)

        yield progress


def http_server(service: Service, listening: Listening) -> uvicorn.Server:
    """uvicorn over the application, without a log or signals of its own."""
    chosen = uvicorn.Config(
        make_app(service, listening.guard),
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.key,
    )
    try:
        chosen.load()
    except OSError as error:  # SSLError is one
        files = f"--tls-cert {listening.certificate} --tls-key {listening.key}"
        raise ValueError(f"{files}: must be a certificate and its key, as PEM without a password ({error})") from error
    return _Server(chosen)


async def warm_up(engine: ModelEngine) -> None:
    """One short job through all that a request needs."""
    (stream,) = engine.submit((Job("warm-up", (0,), min(WARM_UP, engine.limit - 1)),))
    async for _ in stream:
        pass


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError naming --host and --port if that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot be listened on ({error.strerror or error})") from error


def _greet(listening: Listening, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if listening.certificate else "http"
    shown = f"[{host}]" if ":" in host else host
    keys = "with a key" if listening.keys else "without a key"
    err.print(f"{listening.name} on {scheme}://{shown}:{port} ({keys})", markup=False, soft_wrap=True)


async def _first(*waits: "Coroutine[Any, Any, Any] | asyncio.Future[Any]") -> None:
    """Until one of these is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
