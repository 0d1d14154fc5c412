"""Keys, headers, hosts and origins: every route of the table is closed unless it says that it is open."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve.app import ROUTES, make_app
from muse_fn.serve.guard import SECURITY, Settings, chosen_id, has_key
from muse_fn.serve.routes import Route
from tests.serve.script import ScriptedEngine, make_service
from tests.serve.web import call, on_loop

KEYS = ("first-key", "second \u00e9 key")
OPEN = {"/health", "/ready"}
GOOD: list[dict[str, str]] = [
    {"authorization": "Bearer first-key"},
    {"authorization": "bearer first-key"},
    {"authorization": "Bearer  first-key "},
    {"x-api-key": "first-key"},
    {"authorization": "Bearer wrong", "x-api-key": "first-key"},
]
BAD: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "bearer first-ke"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "first-key"},
    {"authorization": "Basic first-key"},
    {"authorization": "Bearer first-key second"},
    {"authorization": "Bearer first -key"},
    {"x-api-key": ""},
    {"x-api-key": "Bearer first-key"},
    {"x-api-key": "FIRST-KEY"},
    {"cookie": "key=first-key"},
]


def app_of(routes: tuple[Route, ...] = ROUTES, settings: Settings | None = None, **changes: Any) -> Any:
    changes = {"keys": KEYS, **changes}
    return make_app(make_service(ScriptedEngine(), **changes), settings, routes)


def concrete(path: str) -> str:
    return path.replace("{name:path}", "nano").replace("{response_id}", "r")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_asks_for_a_key(route: Route) -> None:
    """Trial 49: the walk over the table covers routes that are added later."""
    app, path = app_of(), concrete(route.path)
    for method in {route.method, "GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE", "WAT"}:
        is_open = path in {row.path for row in ROUTES if row.is_open} and method in ("GET", "HEAD")
        for headers in BAD:
            answer = call(app, method, path, headers=headers)
            assert (answer.status_code == 401) != is_open, (method, headers, answer.status_code)
            if not is_open and method != "HEAD":
                assert "key" in answer.json()["error"]["message"]
            assert is_open or answer.headers["www-authenticate"] == "Bearer"
    for headers in GOOD:
        assert call(app, route.method, path, headers=headers).status_code != 401


def test_only_these_are_open() -> None:
    """Trial 49. The page's own files may come to this list, nothing that tells of requests or of the model."""
    assert {route.path for route in ROUTES if route.is_open} - {"/", "/page.js", "/page.css"} == OPEN
    assert all(route.method == "GET" for route in ROUTES if route.is_open)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/v1/../health",
        "/health/..%2fv1/models",
        "/health/",
        "/health/x",
        "/healthy",
        "/HEALTH",
        "/%68ealth/../v1/models",
        "/v1/models/",
        "/v1/models;/health",
        "/invocations",
        "/ping",
        "/docs",
        "/",
        "/\u00e9",
        "/v1/models?x=/health",
        "/health%00",
        "/health%2f",
    ],
)
def test_no_other_spelling_opens_a_path(path: str) -> None:
    """Trial 49."""
    routes = tuple(route for route in ROUTES if route.path != "/")
    assert raw(app_of(routes), path, {}) == 401
    assert raw(app_of(routes), path, {"x-api-key": "first-key"}) in (200, 404)


@pytest.mark.parametrize("root", ["", "/health", "/ready/", "/api"])
@pytest.mark.parametrize("path", ["/v1/models", "/health/v1/models", "/api/v1/models", "/ready/v1/models"])
def test_a_root_path_opens_nothing(root: str, path: str) -> None:
    """Trial 49."""
    assert raw(app_of(), path, {}, root) == 401


def raw(app: Any, path: str, headers: dict[str, str], root: str = "") -> int:
    """The status for a path exactly as a server hands it on, which no client library makes neat."""
    name, _, query = path.partition("?")
    name = name.replace("%00", "\0").replace("%2f", "/").replace("%68", "h")
    scope = {
        "type": "http",
        "method": "GET",
        "path": name,
        "raw_path": path.encode(),
        "root_path": root,
        "query_string": query.encode(),
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
    }
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    on_loop(app(scope, receive, send))
    (status,) = statuses
    return status


def test_websockets_are_closed() -> None:
    """Trial 49."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    on_loop(app_of()({"type": "websocket", "path": "/health", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_new_route_is_closed_and_an_open_one_is_open() -> None:
    async def hello(service: object, request: Request) -> Response:
        return JSONResponse("hello")

    rows = (Route("/new", "GET", hello, None, "New."), Route("/free", "GET", hello, None, "Free.", is_open=True))
    assert call(app_of(rows), "GET", "/new").status_code == 401
    assert call(app_of(rows), "GET", "/free").status_code == 200
    assert call(app_of(rows, keys=()), "GET", "/new").status_code == 200


def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    async def parts() -> AsyncGenerator[bytes]:
        yield b"x"
        raise AssertionError("the body was read")

    headers = {"content-type": "application/json"}

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of()), base_url="http://test") as session:
            return (await session.post("/v1/completions", content=parts(), headers=headers)).status_code

    assert on_loop(ask()) == 401


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.text())
def test_only_the_keys_are_keys(keys: list[str], other: str) -> None:
    def asked(text: str) -> bool:
        return has_key(keys, Headers(raw=[(b"x-api-key", text.encode())]))

    assert asked(other) == (other in keys)
    assert all(map(asked, keys))


def test_keys_beyond_ascii_work_as_bytes() -> None:
    assert has_key(KEYS, Headers(raw=[(b"x-api-key", KEYS[1].encode())]))
    assert has_key((), Headers(raw=[]))
    assert not has_key(KEYS, Headers(raw=[(b"x-api-key", b"\xff\xfe")]))


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope"])
def test_every_answer_has_the_security_headers_and_an_id(path: str) -> None:
    answer = call(app_of(), "GET", path, headers={"x-request-id": "my-id.1"})
    assert {name: answer.headers[name] for name in SECURITY} == SECURITY
    assert answer.headers["x-request-id"] == "my-id.1"
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers


@given(st.text(max_size=200))
def test_request_ids_are_short_and_printable(text: str) -> None:
    found = chosen_id(Headers(raw=[(b"x-request-id", text.encode("latin-1", "replace"))]))
    assert found.isascii()
    assert found.isprintable()
    assert 0 < len(found) <= 128
    assert " " not in found


@pytest.mark.parametrize(
    ("method", "headers"),
    [("GET", {}), ("OPTIONS", {"access-control-request-method": "GET", "access-control-request-headers": "x-api-key"})],
)
def test_origins_are_closed_by_default_and_configurable(method: str, headers: dict[str, str]) -> None:
    asked = {"origin": "https://a.example", **headers}
    closed = call(app_of(), method, "/v1/models", headers=asked)
    assert closed.status_code == 401
    assert "access-control-allow-origin" not in closed.headers
    opened = call(app_of(settings=Settings(("https://a.example",))), method, "/v1/models", headers=asked)
    assert opened.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in opened.headers
    assert opened.status_code == (200 if method == "OPTIONS" else 401)
    assert opened.headers["x-request-id"]
    other = call(app_of(settings=Settings(("https://b.example",))), method, "/v1/models", headers=asked)
    assert "access-control-allow-origin" not in other.headers


def test_options_that_are_no_preflight_need_a_key() -> None:
    app = app_of(settings=Settings(("https://a.example",)))
    assert call(app, "OPTIONS", "/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("model.example", 200),
        ("MODEL.example:8000", 200),
        ("evil.example", 400),
        ("", 400),
        ("model.example.evil", 400),
    ],
)
def test_hosts_can_be_named(host: str, status: int) -> None:
    app = app_of(settings=Settings(hosts=("model.example",)))
    assert call(app, "GET", "/health", headers={"host": host}).status_code == status


def test_errors_of_the_messages_api_have_its_shape() -> None:
    answer = call(app_of(), "POST", "/v1/messages")
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"
