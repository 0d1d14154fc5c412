"""Streams of events: framing, comments, failures, and clients that go away or do not read."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve import bodies, sse
from muse_fn.serve.app import make_app
from muse_fn.serve.errors import BadRequest, Failed, Gone
from muse_fn.serve.jobs import Refused
from muse_fn.serve.routes import Route
from muse_fn.serve.service import Service
from muse_fn.tokenizer import Tokenizer
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service, nano, quick
from tests.serve.web import call, data_of, on_loop, post, served, until

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


class Source:
    """Events that a test plays, and what became of them."""

    def __init__(self, *steps: Any) -> None:
        self.steps, self.closes, self.has_begun, self.is_over = steps, 0, False, False

    async def events(self) -> AsyncGenerator[Any]:
        self.has_begun = True
        try:
            for step in self.steps:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.is_over = True

    def close(self) -> None:
        self.closes += 1


def app_of(source: Source, path: str = "/stream", **limits: float) -> Any:
    async def handler(service: Service, request: Request) -> Response:
        return sse.stream(service, request, source.events(), source.close)

    return make_app(
        make_service(ScriptedEngine(), limits=quick(**limits)), None, (Route(path, "GET", handler, None, "S."),)
    )


def read(raw: bytes) -> list[tuple[str | None, str]]:
    """Events as the specification reads them: blocks of lines, `data` lines joined by line feeds."""
    found: list[tuple[str | None, str]] = []
    for block in raw.decode().split("\n\n")[:-1]:
        lines = block.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        names = [line[7:] for line in lines if line.startswith("event: ")]
        assert len(data) + len(names) == len(lines)
        found.append((names[0] if names else None, "\n".join(data)))
    return found


@given(st.dictionaries(TEXTS, TEXTS))
def test_json_is_one_line_and_comes_back(value: dict[str, str]) -> None:
    ((name, data),) = read(sse.frame(value))
    assert name is None
    assert json.loads(data) == value
    assert read(sse.frame(sse.Event("it", {"type": "it", **value})))[0][0] == "it"


@given(TEXTS)
def test_strings_come_back_but_for_the_kind_of_line_end(text: str) -> None:
    ((_, data),) = read(sse.frame(text))
    assert data == text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_stream_and_its_headers() -> None:
    source = Source({"a": 1}, sse.Event("named", {"b": 2}), "[DONE]")
    answer = call(app_of(source), "GET", "/stream")
    assert answer.text == 'data: {"a":1}\n\nevent: named\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert (source.closes, source.is_over) == (1, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [(Failed("why"), 500), (Refused("full", 503), 503), (BadRequest("no", "x"), 400), (ValueError("x: no"), 400)],
)
def test_what_fails_before_the_first_event_is_a_plain_error(error: Exception, status: int) -> None:
    """Trial 5: nothing that is known early hides in a 200."""
    source = Source(error)
    answer = call(app_of(source), "GET", "/stream")
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)
    assert (source.closes, source.is_over) == (1, True)


@pytest.mark.parametrize("error", [Failed("why"), ValueError("why"), RuntimeError("secret")])
def test_what_fails_later_is_one_error_event_at_the_end(error: Exception) -> None:
    """Trial 5."""
    source = Source({"a": 1}, error)
    answer = call(app_of(source), "GET", "/stream")
    first, last = data_of(answer)
    assert answer.status_code == 200
    assert first == {"a": 1}
    assert last["error"]["message"]
    assert "secret" not in answer.text
    assert "DONE" not in answer.text
    assert source.closes == 1


def test_errors_of_a_messages_stream_have_a_name() -> None:
    answer = call(app_of(Source({"a": 1}, Failed("why")), "/v1/messages"), "GET", "/v1/messages")
    name, data = read(answer.content)[-1]
    assert name == "error"
    assert json.loads(data) == {"type": "error", "error": {"type": "api_error", "message": "why"}}


def test_comments_come_while_nothing_else_does() -> None:
    source = Source(0.2, {"a": 1}, 0.2, "[DONE]")
    text = call(app_of(source, keep_alive=0.03), "GET", "/stream").text
    before, _, rest = text.partition('data: {"a":1}\n\n')
    between = rest.removesuffix("data: [DONE]\n\n")
    for comments in (before, between):
        assert comments
        assert set(comments.split("\n\n")) == {": still working", ""}


def test_no_comment_comes_in_a_busy_stream() -> None:
    text = call(app_of(Source(*({"a": n} for n in range(2000))), keep_alive=30), "GET", "/stream").text
    assert ":" not in {line[0] for line in text.split("\n") if line}


def test_a_failure_after_a_comment_is_an_event() -> None:
    """The status has been sent with the comment."""
    answer = call(app_of(Source(0.2, Failed("why")), keep_alive=0.03), "GET", "/stream")
    assert answer.status_code == 200
    assert data_of(answer)[-1]["error"]["message"] == "why"


async def connected(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_goes_away_ends_the_stream(half: bool) -> None:
    """Trial 42, also when the connection is only closed in one direction."""

    async def scene() -> None:
        source = Source({"a": 1}, asyncio.Event())
        async with served(app_of(source)) as port:
            reader, writer = await connected(port, "/stream")
            await reader.readuntil(b'data: {"a":1}')
            if half:
                writer.write_eof()
            else:
                writer.close()
            await until(lambda: source.closes)
            await until(lambda: source.is_over)
            writer.close()
        assert source.closes == 1

    on_loop(scene())


def test_a_client_that_goes_away_before_the_first_event_ends_the_stream() -> None:
    async def scene() -> None:
        source = Source(asyncio.Event())
        async with served(app_of(source)) as port:
            _, writer = await connected(port, "/stream")
            await until(lambda: source.has_begun)
            writer.close()
            await until(lambda: source.closes and source.is_over)

    on_loop(scene())


def test_a_client_that_does_not_read_is_given_up_and_others_go_on() -> None:
    """Trial 44: what waits for it is bounded by the buffers of the connection."""

    async def scene() -> None:
        counts = [0, 0]

        async def endless(place: int) -> AsyncGenerator[dict[str, str]]:
            while True:
                counts[place] += 1
                yield {"text": "x" * 10_000}

        closed: list[int] = []

        async def handler(service: Service, request: Request) -> Response:
            place = int(request.url.path[-1])
            return sse.stream(service, request, endless(place), lambda: closed.append(place))

        rows = tuple(Route(f"/{place}", "GET", handler, None, "S.") for place in (0, 1))
        app = make_app(make_service(ScriptedEngine(), limits=quick(stall=1.0)), None, rows)
        async with served(app) as port:
            slow, slow_end = await connected(port, "/0")
            other, other_end = await connected(port, "/1")
            await slow.readuntil(b"data")
            taken = 0
            while 0 not in closed:
                part = await other.read(1 << 16)
                assert part, "the other stream has ended"
                taken += len(part)
            stopped = counts[0]
            for _ in range(20):
                taken += len(await other.read(1 << 16))
            assert counts[0] == stopped, "nothing more is made for it"
            assert 1 not in closed
            assert taken > 0
            slow_end.close()
            other_end.close()
            await until(lambda: 1 in closed)

    on_loop(scene())


@pytest.mark.parametrize("tokens", [1, 50])
def test_plain_requests_are_cancelled_too_and_finished_ones_are_not(tokens: int) -> None:
    """Trial 42: cancels are as many as clients that went away, also for requests of several choices."""

    async def scene() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine([*bytes_tokens("a" * tokens), gate, *bytes_tokens("b")])
        app = make_app(make_service(engine))
        async with served(app) as port:
            for stream in (False, True):
                before = engine.cancels
                writers = [await asking(port, {"prompt": "hi", "n": 4, "stream": stream}) for _ in range(3)]
                await until(lambda: engine.running == 12)
                for _, writer in writers:
                    writer.close()
                await until(lambda: engine.running == 0)
                assert engine.cancels - before == 12
            gate.set()
            before = engine.cancels
            for _ in range(20):
                reader, writer = await asking(port, {"prompt": "hi", "n": 2, "max_tokens": tokens + 1})
                assert b"200 OK" in await reader.read()
                writer.close()
            assert engine.cancels == before
            assert engine.running == 0

    on_loop(scene())


async def asking(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    lines = "POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json"
    writer.write("\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw)
    await writer.drain()
    return reader, writer


def test_a_client_that_stops_sending_is_refused() -> None:
    async def scene() -> bytes:
        app = make_app(make_service(ScriptedEngine(), limits=quick(stall=0.1)))
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
                b'content-length: 100\r\n\r\n{"prompt'
            )
            found = await reader.read()
            writer.close()
            return found

    assert b" 408 " in on_loop(scene()).split(b"\r\n")[0]


def test_work_is_cancelled_when_the_client_goes_away() -> None:
    async def scene() -> None:
        ended, begun = list[str](), asyncio.Event()

        async def work() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def handler(service: Service, request: Request) -> Response:
            try:
                await sse.until_disconnect(request, work())
            except Gone:
                ended.append("gone")
                raise
            return JSONResponse({})

        app = make_app(make_service(ScriptedEngine()), None, (Route("/work", "GET", handler, None, "W."),))
        async with served(app) as port:
            _, writer = await connected(port, "/work")
            await begun.wait()
            writer.close()
            await until(lambda: len(ended) == 2)
        assert ended == ["cancelled", "gone"]

    on_loop(scene())


def test_long_prompts_are_parsed_and_encoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 44: the loop does nothing that grows with a body but to join its parts."""
    nano()  # loading a tokenizer encodes too
    threads: dict[str, set[bool]] = {"parsed": set(), "encoded": set()}

    def watched(name: str, work: Any) -> Any:
        def watching(*args: Any, **kwargs: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return work(*args, **kwargs)

        return watching

    monkeypatch.setattr(bodies, "load_json", watched("parsed", bodies.load_json))
    monkeypatch.setattr(Tokenizer, "encode", watched("encoded", Tokenizer.encode))
    app = make_app(make_service(ScriptedEngine(bytes_tokens("ab"))))
    text = "The quick brown fox. " * 5_000
    assert post(app, "/v1/completions", {"prompt": text}).status_code == 400, "longer than the window"
    assert post(app, "/tokenize", {"prompt": text}).status_code == 200
    assert threads == {"parsed": {False}, "encoded": {False}}
