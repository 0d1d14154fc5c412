"""Server-sent events, and what happens when the client goes away or does not read."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
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
        gone = asyncio.ensure_future(_disconnected(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({gone, pump}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                raise Gone
            pump.result()
        finally:
            self._on_close()
            await _end(gone, pump)

    async def _pump(self, send: Send) -> None:
        upcoming = asyncio.ensure_future(_next(self._events))
        try:
            await asyncio.wait({upcoming}, timeout=self._limits.keep_alive)
            if upcoming.done():
                upcoming.result()
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (data := await self._data(upcoming)) is not None:
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
                if upcoming.done():
                    failed = upcoming.exception() is not None
                    if failed:
                        break
                    upcoming = asyncio.ensure_future(_next(self._events))
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _end(upcoming)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

    async def _data(self, upcoming: "asyncio.Future[Sendable | None]") -> bytes | None:
        """What to send next: an event, a comment when there is none for long, an error event; None at the end."""
        await asyncio.wait({upcoming}, timeout=self._limits.keep_alive)
        if not upcoming.done():
            return COMMENT
        error = upcoming.exception()
        if error is not None:
            if not isinstance(error, Failed | Refused | ValueError):
                logger.error("a stream failed", exc_info=error)
            return frame(self._error_event(error))
        event = upcoming.result()
        return None if event is None else frame(event)

    def _error_event(self, error: BaseException) -> Sendable:
        told = shape(self._path, problem_of(error))
        return Event("error", told) if "type" in told else told

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._limits.stall)
        except TimeoutError:
            logger.warning("a stream was left unread and is ended", extra={"seconds": self._limits.stall})
            raise Gone from None


async def _next(events: AsyncIterator[Sendable]) -> Sendable | None:
    return await anext(events, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs and waits until it has ended; results and errors are not wanted any more."""
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
