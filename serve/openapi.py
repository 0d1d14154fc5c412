"""The table of routes as an OpenAPI 3.1 document."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from muse_fn.serve.routes import Route

REFERENCE = "#/components/schemas/{model}"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}


def document(routes: Sequence[Route], model: str) -> dict[str, Any]:
    """The whole document; `model` is the name of the model that is served."""
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    references, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        body = None if route.body is None else references[route.body, "validation"]
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "muse-fn", "version": "1", "description": f"Serves {model}. Built with Muse Spark Open."},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    errors = {
        "description": "An error, in the shape of the API.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', _path(route).lower()).strip('_')}",
        "security": [] if route.is_open else [{"key": []}],
        "responses": {"200": {"description": "As asked."}, "4XX": errors, "503": errors},
    }
    names = re.findall(r"{(\w+)", route.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _path(route: Route) -> str:
    """Without the kinds of parameters, which OpenAPI says elsewhere."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
