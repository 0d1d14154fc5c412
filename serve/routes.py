"""One row of the server's table of routes: what a path does, what it takes, and whether it works without a key."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from muse_fn.serve.service import Service

Handler: TypeAlias = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """A path such as `/v1/models/{name}` and a method; `body` is the shape of its JSON body, for OpenAPI.

    Every route asks for a key unless `is_open`. While the server starts, drains or is broken, routes with a body
    answer 503 unless `is_control`. Routes whose path begins with `/v1/messages` answer errors in Anthropic's shape.
    """

    path: str
    method: str
    handler: Handler
    body: type[BaseModel] | None
    summary: str
    is_open: bool = False
    is_control: bool = False
