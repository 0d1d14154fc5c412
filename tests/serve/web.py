"""Asking an application in tests: straight through ASGI, or over a real server where connections matter."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import ASGIApp

T = TypeVar("T")


def on_loop(work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Runs a test's coroutine; the bound only keeps a broken test from hanging."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


def client(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    """A client whose requests go straight to the application, errors of which are raised."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60, **options)


def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """One request and its whole answer."""

    async def asking() -> httpx.Response:
        async with client(app) as session:
            return await session.request(method, path, **options)

    return on_loop(asking())


def post(app: ASGIApp, path: str, body: object, **options: Any) -> httpx.Response:
    """One request with a JSON body."""
    return call(app, "POST", path, json=body, **options)


def data_of(response: httpx.Response) -> list[Any]:
    """The data of the events of a finished stream, `[DONE]` as it is."""
    frames = [frame for frame in response.text.split("\n\n") if frame and not frame.startswith(":")]
    texts = ["\n".join(line[6:] for line in frame.split("\n") if line.startswith("data: ")) for frame in frames]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def until(condition: Any, seconds: float = 30) -> None:
    """Waits for what other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def served(app: ASGIApp, **options: Any) -> AsyncGenerator[int]:
    """The port of a real server on loopback, on this loop."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())  # pyright: ignore[reportPrivateUsage]  # `serve` takes over signals
    try:
        await until(lambda: server.started or task.done())
        assert server.started
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task
