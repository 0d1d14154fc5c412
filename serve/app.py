"""The server as one ASGI application: one table of routes, and what happens to every request on its way through it."""

import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.routing import Route as Pattern
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muse_fn.serve import chat_api, completions_api, messages_api, page, responses_api, state_api, token_api
from muse_fn.serve.errors import BadRequest, Failed, Gone, Problem, answer, problem_of
from muse_fn.serve.guard import Settings, chosen_id, has_key, is_host, with_headers, without_body
from muse_fn.serve.jobs import Refused
from muse_fn.serve.openapi import document
from muse_fn.serve.routes import Route
from muse_fn.serve.service import Service

logger = logging.getLogger("muse_fn.serve")


async def openapi(service: Service, request: Request) -> Response:
    """The table of routes as an OpenAPI document."""
    return JSONResponse(document(ROUTES, service.name))


ROUTES: tuple[Route, ...] = (
    *state_api.ROUTES,
    *chat_api.ROUTES,
    *completions_api.ROUTES,
    *responses_api.ROUTES,
    *messages_api.ROUTES,
    *token_api.ROUTES,
    *page.ROUTES,
    Route("/openapi.json", "GET", openapi, None, "This description of the API."),
)


def make_app(service: Service, settings: Settings | None = None, routes: Sequence[Route] = ROUTES) -> ASGIApp:
    """The application. It keeps nothing but what is in `service`."""
    settings = settings or Settings()
    app: ASGIApp = without_body(_Table(service, settings, routes))
    if settings.origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.origins,
            allow_methods=sorted({row.method for row in routes}),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return _Envelope(service, app)


class _Envelope:
    """Outermost: ids, headers, the log line, the count, and the answer to errors that nobody foresaw."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        self.service, self.app = service, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0
        request = chosen_id(Headers(scope=scope))
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": request, "route": "none"}}

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        sending = with_headers(counting, request)
        try:
            await self.app(scope, receive, sending)
        except (Gone, ClientDisconnect):
            status = status or 499
        except Exception as error:
            logger.exception("a request failed", extra={"request": request})
            if not status:
                await answer(scope["path"], problem_of(error))(scope, receive, sending)
        finally:
            route = scope["state"]["route"]
            self.service.metrics.response(route, status or 499)
            seconds = round(time.monotonic() - began, 6)
            told = {"request": request, "method": scope["method"], "route": route, "status": status or 499}
            logger.info("answered", extra={**told, "seconds": seconds})


class _Table:
    """Finds the row, asks for the key, and runs the handler; errors become answers in the API's own shape."""

    def __init__(self, service: Service, settings: Settings, routes: Sequence[Route]) -> None:
        self.service, self.settings = service, settings
        self.rows = [(Pattern(row.path, _unused, methods=[row.method]), row) for row in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def starting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await self._response(scope, receive)
            await response(scope, receive, starting)
        except (Refused, Failed, ValueError) as error:
            if started:
                raise
            if isinstance(error, Refused):
                self.service.metrics.refused()
            elif not isinstance(error, BadRequest):
                # The sentence may quote what the client wrote, which the log never shows.
                logger.info("a request was refused late", extra={"kind": type(error).__name__})
            await answer(scope["path"], problem_of(error))(scope, receive, send)

    async def _response(self, scope: Scope, receive: Receive) -> Response:
        row, allowed = self._find(scope)
        scope["state"]["route"] = row.path if row else "none"
        headers = Headers(scope=scope)
        if not is_host(self.settings.hosts, headers):
            return answer(scope["path"], Problem(400, "host: this name is not served here", "host"))
        if not (row and row.is_open) and not has_key(self.service.keys, headers):
            text = "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            return answer(scope["path"], Problem(401, text, code="invalid_api_key"))
        if row is None and allowed:
            text = f"the method must be one of {', '.join(allowed)}"
            return answer(scope["path"], Problem(405, text), {"allow": ", ".join(allowed)})
        if row is None:
            return answer(scope["path"], Problem(404, "there is no such path", code="not_found"))
        if row.body is not None and not row.is_control:
            check_open(self.service)
        return await row.handler(self.service, Request(scope, receive))

    def _find(self, scope: Scope) -> tuple[Route | None, list[str]]:
        """The row of this path and method, whose path parameters are added to the scope; else the path's methods."""
        allowed: set[str] = set()
        for pattern, row in self.rows:
            match, found = pattern.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                return row, []
            if match is Match.PARTIAL:
                allowed |= pattern.methods or set()
        return None, sorted(allowed)


def check_open(service: Service) -> None:
    """Raises Refused while the server takes no work."""
    if service.stage.name != "ready":
        word = "starts" if service.stage.name == "starting" else "is shutting down"
        raise Refused(f"the server {word} and takes no requests", 503, 5)
    if service.engine.health:
        raise Refused(f"the engine does not work: {service.engine.health}", 503, 30)


async def _live(receive: Receive, send: Send) -> None:
    """Starting and ending are the command's business; servers only want to be answered."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _unused(request: Request) -> Response:
    raise NotImplementedError
