"""The whole server in this process: the real engine over a small random model, with the embedded tokenizer, on a free
port of the loopback interface."""

import asyncio
import gc
import json
import re
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from muse_fn.batch import Runner
from muse_fn.kernels.select import INVARIANT
from muse_fn.load import Model
from muse_fn.serve.engine import EngineSettings, ModelEngine
from muse_fn.serve.jobs import Load
from muse_fn.serve.leading import Listening, http_server, listen, serving
from muse_fn.serve.service import Service
from tests.models import random_params
from tests.serve.running import PATIENCE, TINY
from tests.serve.script import nano, quick

MODEL = replace(TINY, vocab_size=nano()[0].vocab_size, max_positions=8192)
SETTINGS = EngineSettings(rows=16, chunk=64, num_blocks=6000, block_size=16)
LONG: dict[str, Any] = {"max_tokens": 5000, "ignore_eos": True, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Living:
    """A server that runs."""

    port: int
    service: Service
    engine: ModelEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counted(self, name: str, **labels: str) -> float:
        """A number of the metrics."""
        return self.service.metrics.registry.get_sample_value(f"muse_fn_{name}", labels) or 0.0

    def load(self) -> Load:
        return self.engine.load()

    async def is_empty(self) -> None:
        """Waits until nothing runs, waits or is held."""
        async with asyncio.timeout(PATIENCE):
            while self.load()[:3] != (0, 0, 0):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def living(
    limits: dict[str, Any] | None = None, *, sends: int | None = None, **settings: Any
) -> AsyncGenerator[Living]:
    """The server while it runs, with these limits and settings of the engine; `sends` is how many bytes the system may
    hold of what it sends on one connection."""
    model = Model(MODEL, random_params(MODEL, 0), nano()[1])
    chosen, listening = replace(SETTINGS, **settings), Listening()
    runner = Runner(model.params, MODEL, chunk=chosen.chunk, ops=INVARIANT)
    async with serving(model, runner, chosen, listening) as (_, service, engine):
        service = replace(service, limits=quick(**limits or {}))
        server = http_server(service, listening)
        with listen("127.0.0.1", 0) as listener:
            if sends is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sends)  # which connections inherit
            serves = asyncio.create_task(server.serve([listener]))
            try:
                yield Living(listener.getsockname()[1], service, engine)
            finally:
                await engine.stop()
                server.should_exit = server.force_exit = True
                await asyncio.wait_for(serves, PATIENCE)


def client(server: Living) -> httpx.AsyncClient:
    """Whose requests go over real connections, as many as it likes."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits)


async def chat(session: httpx.AsyncClient, **body: Any) -> tuple[int, str | None]:
    """Status and text of a whole answer, reasoning included."""
    response = await session.post(
        "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 24, "temperature": 0, **body}
    )
    if response.status_code != 200:
        return response.status_code, None
    message = response.json()["choices"][0]["message"]
    return 200, f"{message.get('reasoning')}|{message['content']}"


def request(path: str, body: dict[str, Any]) -> bytes:
    """A POST as bytes."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def opened(server: Living, *, receives: int | None = None) -> socket.socket:
    """A connection; `receives` is how many bytes the system may take in for it."""
    connection = socket.socket()
    connection.setblocking(False)
    if receives is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
    return connection


def resets(connection: socket.socket) -> None:
    """Closes it as a process does that is killed: whatever comes is answered with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def resident() -> int:
    """Bytes of memory of this process, without what is only waiting to be collected."""
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024
