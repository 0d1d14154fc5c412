"""Connections of clients that are slow or send without end: over a real socket, in front of the real application."""

import asyncio
import contextlib
import socket

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from muse_fn.serve import bodies, connection
from muse_fn.serve.app import make_app
from muse_fn.serve.connection import HEAD_BYTES, Connection
from muse_fn.serve.service import Limits
from tests.serve.script import ScriptedEngine, make_service
from tests.serve.web import on_loop, served

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
BODY = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"


async def read_all(sock: socket.socket) -> bytes:
    """What has come counts, even if a reset follows it."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            found += piece
    return found


def scripted(limits: Limits | None = None) -> ASGIApp:
    return make_app(make_service(ScriptedEngine([]), limits=limits or Limits()))


async def late(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that takes its time."""
    await asyncio.sleep(0.5)
    await PlainTextResponse("late")(scope, receive, send)


def answer_to(*pieces: bytes, pause: float = 0.0, app: ASGIApp | None = None) -> bytes:
    """All that comes back until the server ends the connection. The last piece is sent again and again until then."""

    async def scene() -> bytes:
        loop = asyncio.get_running_loop()
        async with served(app or scripted(), http=Connection, timeout_keep_alive=1) as port:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setblocking(False)
                found = asyncio.create_task(read_all(sock))
                with contextlib.suppress(ConnectionError):
                    for piece in pieces[:-1]:
                        await loop.sock_sendall(sock, piece)
                    while not found.done():
                        await loop.sock_sendall(sock, pieces[-1])
                        await asyncio.sleep(pause)
                return await found

    return on_loop(scene())


@pytest.mark.parametrize("start", [b"GET /", HEALTH, HEALTH + b"x: "])
def test_a_head_without_end_is_refused(start: bytes) -> None:
    """The client can still read why, although it goes on sending."""
    assert answer_to(start, b"a" * 4096).startswith(b"HTTP/1.1 431 ")


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


@pytest.mark.parametrize(("drip", "status"), [(b"l", b"408"), (b"l" * HEAD_BYTES, b"431")])
def test_a_refused_head_costs_no_answer_to_an_earlier_request(
    monkeypatch: pytest.MonkeyPatch, drip: bytes, status: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1 if status == b"408" else 20)
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.1)
    found = answer_to(HEALTH + b"\r\n" + HEALTH, drip, pause=0.02, app=late)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"late" in found
    assert b"HTTP/1.1 %b " % status in found


def test_a_head_that_waits_for_an_earlier_answer_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """While two requests are under way nothing is read: the time of a third does not run."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    found = answer_to(HEALTH + b"\r\n", HEALTH + b"\r\n" + HEALTH, b"connection: close\r\n\r\n", b"", app=late)
    assert found.count(b"HTTP/1.1 200 ") == found.count(b"HTTP/1.1 ") == 3


@pytest.mark.parametrize("app", [None, late])
def test_what_is_no_http_is_told_so_after_the_answers_before_it(app: ASGIApp | None) -> None:
    """And whatever else is sent."""
    found = answer_to(HEALTH + b"\r\n", b"\x01\r\n\r\n" * 9999, b"more", app=app)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.count(b"HTTP/1.1 400 ") == 1
    assert found.count(b"HTTP/1.1 ") == 2


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something now and then is not enough; nor is the rest of the body awaited without end."""
    monkeypatch.setattr(bodies, "RATE", 1000)
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    found = answer_to(BODY, b" ", pause=0.02, app=scripted(Limits(stall=0.3)))
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"body: came too slowly" in found


def test_what_is_no_request_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty lines that a parser takes between two requests, after an answer."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    found = answer_to(HEALTH + b"\r\n", b"\r\n", pause=0.02)
    assert found.count(b"HTTP/1.1 ") == found.count(b"HTTP/1.1 200 ") == 1


def test_large_bodies_and_several_requests_are_no_heads() -> None:
    """What is sent in one piece is told apart."""
    text = b'{"prompt": "' + b"a " * HEAD_BYTES + b'"}'
    body = BODY.replace(b"900", b"%d" % len(text))[:-1] + text
    found = answer_to(body + HEALTH + b"\r\n" + HEALTH + b"connection: close\r\n\r\n", b"")
    assert found.count(b"HTTP/1.1 200 ") == 3
