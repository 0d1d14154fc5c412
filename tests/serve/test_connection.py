"""Connections of clients that are slow or send without end: over a real socket, in front of the real application."""

import asyncio
import contextlib

import pytest

from muse_fn.serve import bodies, connection
from muse_fn.serve.app import make_app
from muse_fn.serve.connection import HEAD_BYTES, Connection
from muse_fn.serve.service import Limits
from tests.serve.script import ScriptedEngine, make_service
from tests.serve.web import on_loop, served

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
BODY = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"


def answer_to(*pieces: bytes, pause: float = 0.0, limits: Limits | None = None) -> bytes:
    """All that comes back until the server ends the connection. The last piece is sent again and again until then."""

    async def scene() -> bytes:
        service = make_service(ScriptedEngine([]), limits=limits or Limits())
        async with served(make_app(service), http=Connection, timeout_keep_alive=1) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = asyncio.create_task(reader.read())
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                for piece in pieces[:-1]:
                    writer.write(piece)
                    await writer.drain()
                while not found.done():
                    writer.write(pieces[-1])
                    await writer.drain()
                    await asyncio.sleep(pause)
            with contextlib.suppress(ConnectionError):
                return await found
            return b""

    return on_loop(scene())


@pytest.mark.parametrize("start", [b"GET /", HEALTH, HEALTH + b"x: "])
def test_a_head_without_end_is_refused(start: bytes) -> None:
    """Whether the refusal can still be read depends on the network; that the connection ends does not."""
    answer_to(start, b"a" * 4096)


def test_a_head_that_is_a_little_too_large_is_told_so() -> None:
    half = b"x: " + b"a" * (HEAD_BYTES // 2) + b"\r\n"
    assert answer_to(HEALTH, half, half, b"").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("start", [b"", b"GET /hea", HEALTH, HEALTH + b"\r\n" + HEALTH])
@pytest.mark.parametrize("drip", [b"", b"l"])
def test_a_slow_head_is_refused(monkeypatch: pytest.MonkeyPatch, start: bytes, drip: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    found = answer_to(start, drip if start else b"", pause=0.02)
    assert b"HTTP/1.1 408 " in found
    assert found.startswith(b"HTTP/1.1 200 ") == (start.count(b"GET") > 1)


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something now and then is not enough."""
    monkeypatch.setattr(bodies, "RATE", 1000)
    found = answer_to(BODY, b" ", pause=0.02, limits=Limits(stall=0.3))
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"body: came too slowly" in found


def test_large_bodies_and_several_requests_are_no_heads() -> None:
    """What is sent in one piece is told apart."""
    text = b'{"prompt": "' + b"a " * HEAD_BYTES + b'"}'
    body = BODY.replace(b"900", b"%d" % len(text))[:-1] + text
    found = answer_to(body + HEALTH + b"\r\n" + HEALTH + b"connection: close\r\n\r\n", b"")
    assert found.count(b"HTTP/1.1 200 ") == 3
