"""How the server is: health, readiness, load, metrics, version, the model; and giving up requests by their id."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve.bodies import parse, warnings_of
from muse_fn.serve.routes import Route
from muse_fn.serve.schemas import Body, check_model
from muse_fn.serve.service import Service

BUILT_WITH = "Built with Muse Spark Open"


class AbortBody(Body):
    """Body of /abort."""

    request_id: str = Field(min_length=1, max_length=128)


async def health(service: Service, request: Request) -> Response:
    """200 while the process is of use, 503 with the reason when it should be started anew."""
    wrong = service.engine.health
    return JSONResponse({"status": "broken" if wrong else "ok", "reason": wrong or None}, 503 if wrong else 200)


async def ready(service: Service, request: Request) -> Response:
    """200 while new requests are taken."""
    wrong = service.engine.health
    stage = "broken" if wrong else service.stage.name
    return JSONResponse({"status": stage, "reason": wrong or None}, 200 if stage == "ready" else 503)


async def load(service: Service, request: Request) -> Response:
    """How busy the engine is."""
    return JSONResponse({**service.engine.load()._asdict(), "stage": service.stage.name})


async def metrics(service: Service, request: Request) -> Response:
    """The metrics in the text format of Prometheus."""
    accept = request.headers.get("accept", "")
    text, kind = await asyncio.to_thread(service.metrics.text, service.engine.load(), accept)
    return Response(text, headers={"content-type": kind})


async def show_version(service: Service, request: Request) -> Response:
    """What runs here."""
    return JSONResponse({"version": _version(), "model": service.name, "built_with": BUILT_WITH})


async def models(service: Service, request: Request) -> Response:
    """The models that are served: one."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(service: Service, request: Request) -> Response:
    """The model of this name."""
    check_model(service, request.path_params["name"])
    return JSONResponse(_card(service))


async def abort(service: Service, request: Request) -> Response:
    """Ends all choices of a request, with finish reason `abort`."""
    body = await parse(service, request, AbortBody)
    count = service.engine.abort(body.request_id)
    warned = {"warnings": found} if (found := warnings_of(body)) else {}
    return JSONResponse({"request_id": body.request_id, "aborted": count, **warned})


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "muse-fn",
        "max_model_len": service.config.max_positions,
        "meta": {"built_with": BUILT_WITH, "vocab_size": service.config.vocab_size},
    }


def _version() -> str:
    try:
        return version("muse-fn")
    except PackageNotFoundError:  # run from a source folder
        return "unknown"


ROUTES = (
    Route("/health", "GET", health, None, "Whether the process lives.", is_open=True),
    Route("/ready", "GET", ready, None, "Whether new requests are taken.", is_open=True),
    Route("/load", "GET", load, None, "How busy the engine is."),
    Route("/metrics", "GET", metrics, None, "Metrics for Prometheus."),
    Route("/version", "GET", show_version, None, "What runs here."),
    Route("/v1/models", "GET", models, None, "The models that are served."),
    Route("/v1/models/{name:path}", "GET", model, None, "The model of this name."),
    Route("/abort", "POST", abort, AbortBody, "Ends a request by its id.", is_control=True),
)
