"""The way of a request through the application: routes, methods, stages, refusals, failures, logs."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from muse_fn.serve.app import ROUTES, make_app
from muse_fn.serve.jobs import Refused
from muse_fn.serve.logs import Lines, configure
from muse_fn.serve.routes import Route
from muse_fn.serve.service import Stage
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service
from tests.serve.web import call, post

ASK = {"prompt": "hi", "max_tokens": 2}
WITH_BODY = [route for route in ROUTES if route.body is not None]


def test_a_path_and_a_method_have_one_row() -> None:
    rows = [(route.path, route.method) for route in ROUTES]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/completions/x", "/V1/models", "/v1/models/../completions"])
def test_unknown_paths_are_404(path: str) -> None:
    answer = call(make_app(make_service(ScriptedEngine())), "GET", path)
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_other_methods_are_405(route: Route) -> None:
    app = make_app(make_service(ScriptedEngine()))
    answer = call(app, "PATCH", route.path.replace("{name:path}", "nano"))
    assert answer.status_code == 405
    assert route.method in answer.headers["allow"].split(", ")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nope"])
def test_head_is_get_without_its_body(path: str) -> None:
    app = make_app(make_service(ScriptedEngine()))
    head, get = call(app, "HEAD", path), call(app, "GET", path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_no_work_is_taken_while_starting_draining_or_broken(route: Route) -> None:
    stages = (Stage("starting"), ""), (Stage("draining"), ""), (Stage("ready"), "out of memory")
    for stage, health in stages:
        engine = ScriptedEngine(health=health)
        app = make_app(make_service(engine, stage=stage))
        answer = post(app, route.path, {"request_id": "r"})
        assert answer.status_code == (200 if route.is_control else 503)
        assert route.is_control or int(answer.headers["retry-after"]) > 0
        assert engine.jobs == []


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/chat/completions"])
def test_a_full_queue_is_told_with_retry_after(path: str, stream: bool, status: int) -> None:
    engine = ScriptedEngine(refuses=Refused("the queue is full", status, 7))
    service = make_service(engine)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": ASK,
        "/generate": {"token_ids": [1]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    answer = post(make_app(service), path, {**bodies[path], "stream": stream})
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["message"] == "the queue is full"
    assert b"muse_fn_refusals_total 1.0" in service.metrics.text(None)[0]


def test_an_error_that_nobody_foresaw_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(service: object, request: Request) -> Response:
        raise RuntimeError("secret prompt")

    service = make_service(ScriptedEngine())
    app = make_app(service, None, (Route("/broken", "GET", broken, None, "Broken."),))
    with caplog.at_level(logging.CRITICAL, "muse_fn.serve"):
        answer = call(app, "GET", "/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert b'http_responses_total{route="/broken",status="500"} 1.0' in service.metrics.text(None)[0]


def test_responses_are_counted_by_row_and_never_by_what_was_sent() -> None:
    service = make_service(ScriptedEngine(bytes_tokens("ab")))
    app = make_app(service)
    for path in ("/v1/models/nano", "/v1/models/other", "/made/up", "/made/up/2"):
        call(app, "GET", path)
    text = service.metrics.text(None)[0].decode()
    assert 'http_responses_total{route="/v1/models/{name:path}",status="200"} 1.0' in text
    assert 'http_responses_total{route="/v1/models/{name:path}",status="404"} 1.0' in text
    assert 'http_responses_total{route="none",status="404"} 2.0' in text
    assert "made" not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_logs_show_no_prompt_and_no_answer(as_json: bool) -> None:
    lines, logger = io.StringIO(), logging.getLogger("muse_fn.serve")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        configure(logging.DEBUG, as_json, lines)
        for script in (bytes_tokens("QQanswerQQ"), [ValueError("QQraisedQQ")], [KeyError("QQraisedQQ")]):
            app = make_app(make_service(ScriptedEngine(script)))
            headers = {"x-request-id": "the-id"}
            for body in ({"prompt": "QQpromptQQ"}, {"prompt": "QQ", "QQfieldQQ": 1}, {"prompt": "QQ", "n": "QQ"}):
                for stream in (False, True):
                    post(app, "/v1/completions", {**body, "stream": stream}, headers=headers)
            call(app, "GET", "/QQpathQQ?QQ")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    assert "the-id" in lines.getvalue()
    assert "QQ" not in lines.getvalue()
    if as_json:
        told = [json.loads(line) for line in lines.getvalue().splitlines()]
        assert {"time", "level", "message"} <= set.intersection(*(set(line) for line in told))
        assert {"/v1/completions", "none"} <= {line.get("route") for line in told}


def test_a_line_cannot_be_forged() -> None:
    record = logging.makeLogRecord({"msg": "answered", "levelname": "INFO", "route": "a\nINFO forged x=1"})
    assert len(Lines().format(record).splitlines()) == 1
    assert len(Lines(as_json=True).format(record).splitlines()) == 1


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file"])
@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:9/x.png",
        "file:///etc/passwd",
        "data:image/png;base64,iVBORw0KGgo=",
        "/etc/passwd",
        "ftp://x/y",
    ],
)
def test_nothing_is_fetched_or_decoded(kind: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials 50 and 52: parts that are not text are refused, and what they point to is not even told."""
    monkeypatch.setattr(Path, "open", _never)
    monkeypatch.setattr("socket.getaddrinfo", _never)
    part = {"type": kind, kind: {"url": target}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
    app = make_app(make_service(ScriptedEngine()))
    for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"):
        answer = post(app, path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[1].type"
        assert target not in answer.text


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("something was opened")
