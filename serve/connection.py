"""One HTTP connection: how large and how slow the head of a request may be. The server below has no bound for either.

Bodies have theirs in `muse_fn.serve.bodies`, answers in `muse_fn.serve.sse`.
"""

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_SECONDS = 20.0  # from the connection, or the first byte of a later request, to the end of the headers
LINGER_SECONDS = 1.0  # what a client still sends after a refusal is taken: a closed socket would answer with a reset
TOO_SLOW = (408, "Request Timeout", "the headers took too long")
TOO_LARGE = (431, "Request Header Fields Too Large", f"the headers are larger than {HEAD_BYTES} bytes")


class Connection(HttpToolsProtocol):
    """uvicorn's own, which is also told when a head begins and ends."""

    _timer: asyncio.TimerHandle | None = None
    _is_head = True
    _heads = 0  # that have ended
    _size = 0  # bytes of the head that has not
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pieces that belong to a head as a whole are counted; after a refusal none is read.

        What belongs to no request to be answered, such as the rest of a body that was answered early, is borne for as
        long as a head.
        """
        if self._is_refused:
            return
        was_head, heads = self._is_head, self._heads
        super().data_received(data)
        if self._is_refused:
            return
        if was_head and heads == self._heads:
            self._size += len(data)
            if self._size > HEAD_BYTES:
                self._refuse(TOO_LARGE)
        if self._timer is None and not self._is_answering():
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused like the others."""
        self._refuse((400, "Bad Request", msg))

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if not self._is_head:
            self._await_head()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_head, self._heads = False, self._heads + 1
        self._stop_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._is_head, self._size = True, 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, TOO_SLOW)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, why: tuple[int, str, str]) -> None:
        """Says why, after the answer to an earlier request if there is one, and ends the connection.

        A reset may reach the client before the reason is read, so where the transport can end one direction alone (TLS
        cannot), the other stays open a little.
        """
        self._stop_timer()
        if self.transport.is_closing():
            return
        if why is TOO_SLOW and self.flow.read_paused:  # what is missing waits for us
            self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, why)
            return
        self._is_refused = True
        if self._is_answering():
            self._timer = self.loop.call_later(LINGER_SECONDS, self._refuse, why)
            return
        self.transport.write(_answer(*why))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = vars(self)["cycle"]  # None at first, though its annotation says otherwise
        return cycle is not None and not cycle.response_complete


def _answer(status: int, phrase: str, text: str) -> bytes:
    """A whole answer in the APIs' form of errors, after which the connection ends."""
    body = json.dumps({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}})
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n{body}".encode()
