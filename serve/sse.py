"""Server-sent events, and what happens when the client goes away or does not read."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from muse_fn.serve.errors import Failed, Gone, problem_of, shape
from muse_fn.serve.jobs import Refused
from muse_fn.serve.service import Limits, Service

T = TypeVar("T")
logger = logging.getLogger("muse_fn.serve")
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}
COMMENT = b": still working\n\n"
LINE_END = re.compile(r"\r\n|\r|\n")  # of this format only: JSON may hold other characters that break lines


class Event(NamedTuple):
    """An event with a name, for the APIs that have them."""

    name: str
    data: str | dict[str, Any]


Sendable: TypeAlias = "str | dict[str, Any] | Event"


def stream(
    service: Service, request: Request, events: AsyncIterator[Sendable], on_close: Callable[[], None]
) -> Response:
    """Sends events as they come; a dict as JSON, a string such as `[DONE]` as it is.

    Nothing is sent before the first event, at most `limits.keep_alive` seconds long: what fails before it becomes a
    plain error response. A later failure becomes one error event, after which the stream ends. `on_close` is called
    exactly once, however it ends; also when the client goes away or leaves the stream unread for `limits.stall`.
    """
    return _Stream(service.limits, request.url.path, events, on_close)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, whose body has been read before. Raises Gone, and cancels it, if the client goes away."""
    gone, task = asyncio.ensure_future(_disconnected(request.receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        await _end(gone, task)


async def whole(request: Request, work: Coroutine[Any, Any, dict[str, Any]], on_close: Callable[[], None]) -> Response:
    """What the work gives, as JSON. Raises Gone if the client goes away; `on_close` is called however it ends."""
    try:
        return JSONResponse(await until_disconnect(request, work))
    finally:
        on_close()  # work that is cancelled before its first step cleans nothing up itself


def frame(event: Sendable) -> bytes:
    """One event as bytes. Lines of a string become lines of data; JSON has no line breaks."""
    named, data = (event.name, event.data) if isinstance(event, Event) else (None, event)
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    lines = "".join(f"data: {line}\n" for line in LINE_END.split(text))
    return ((f"event: {named}\n" if named else "") + lines + "\n").encode()


class _Stream(Response):
    """An ASGI response that owns its events."""

    def __init__(
        self, limits: Limits, path: str, events: AsyncIterator[Sendable], on_close: Callable[[], None]
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._limits, self._path, self._events, self._on_close = limits, path, events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self.raw_headers, self._limits.stall)
        gone, pump, beat = map(
            asyncio.ensure_future, (_disconnected(receive), self._pump(wire), _beat(wire, self._limits.keep_alive))
        )
        try:
            await asyncio.wait({gone, pump, beat}, return_when=asyncio.FIRST_COMPLETED)
            for task in (pump, beat):
                if task.done():
                    task.result()
            if not pump.done():
                raise Gone
        finally:
            self._on_close()
            await _end(gone, pump, beat)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

    async def _pump(self, wire: "_Wire") -> None:
        try:
            async for event in self._events:
                await wire.write(frame(event))
        except Gone:
            raise
        except Exception as error:
            if not wire.has_begun:
                raise
            if not isinstance(error, Failed | Refused | ValueError):
                logger.exception("a stream failed")
            await wire.write(frame(self._error_event(error)))
        await wire.end()

    def _error_event(self, error: BaseException) -> Sendable:
        told = shape(self._path, problem_of(error))
        return Event("error", told) if "type" in told else told


class _Wire:
    """The way to the client: one writer at a time, and none waits longer than `stall` seconds."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], stall: float) -> None:
        self._send, self._headers, self._stall, self._lock = send, headers, stall, asyncio.Lock()
        self.has_begun, self._has_ended = False, False
        self.last = time.monotonic()  # when something was written

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """The head, if it has not been sent, and these bytes. Raises Gone for a client that does not read."""
        try:
            async with asyncio.timeout(self._stall), self._lock:
                if self._has_ended:
                    return
                self._has_ended = not more
                if not self.has_begun:
                    self.has_begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            logger.warning("a stream was left unread and is ended", extra={"seconds": self._stall})
            raise Gone from None
        except OSError:
            raise Gone from None
        self.last = time.monotonic()
        # Sending to a connection that is closed returns at once: without a pause here, events that are all there
        # already would keep the loop from ever noticing.
        await asyncio.sleep(0)

    async def end(self) -> None:
        """No more comes."""
        await self.write(b"", more=False)


async def _beat(wire: _Wire, interval: float) -> None:
    """A comment whenever nothing was written for `interval` seconds, so that nobody takes the connection for dead."""
    while True:
        await asyncio.sleep(max(wire.last + interval - time.monotonic(), 0.001))
        if time.monotonic() - wire.last >= interval:
            await wire.write(COMMENT)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs and waits until it has ended; results and errors are not wanted any more."""
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
