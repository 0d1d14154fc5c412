"""Who may ask, and what every answer carries: keys, request ids, headers that keep browsers from mischief."""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID = re.compile(r"[!-~]{1,128}")
POLICY = "default-src 'none'; frame-ancestors 'none'"
SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": POLICY,
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Settings:
    """How the server meets browsers. Both are closed by default: no other origin may read, and any host name is taken
    only because keys are what protects; a server without keys should name its hosts, against rebinding of names."""

    origins: tuple[str, ...] = ()  # that may call from a browser; `*` is all of them
    hosts: tuple[str, ...] = ()  # names in the Host header; none: not checked


def request_id(request: Request) -> str:
    """The id of this request: the client's x-request-id if it is short and printable, else one made here."""
    found: str = request.scope["state"]["request_id"]
    return found


def chosen_id(headers: Headers) -> str:
    """See `request_id`."""
    given = headers.get("x-request-id", "")
    return given if ID.fullmatch(given) else uuid4().hex


def has_key(keys: Iterable[str], headers: Headers) -> bool:
    """Whether one of the keys is in `Authorization: Bearer` or `x-api-key`; without any keys nobody needs one.

    Takes as long for a wrong key as for a right one: digests are compared, all of them, in constant time.
    """
    digests = [sha256(key.encode()).digest() for key in keys]
    if not digests:
        return True
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    given.append(headers.get("x-api-key", ""))
    found = False
    for text in given:
        digest = sha256(text.encode("latin-1")).digest()  # the bytes that were sent
        for wanted in digests:
            found |= hmac.compare_digest(digest, wanted) and bool(text)
    return found


def is_host(hosts: tuple[str, ...], headers: Headers) -> bool:
    """Whether the Host header names one of the hosts, whatever its port."""
    name = re.sub(r":\d*$", "", headers.get("host", "")).lower()
    return not hosts or name in [host.lower() for host in hosts]


def with_headers(send: Send, request: str) -> Send:
    """A `send` that adds the request's id and every header of SECURITY that the answer does not set itself."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = request
            for name, value in SECURITY.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def without_body(app: ASGIApp) -> ASGIApp:
    """HEAD: the same answer, of which only the head is sent, whatever the server below does about it."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await app(scope, receive, sending if scope["method"] == "HEAD" else send)

    return wrapped
