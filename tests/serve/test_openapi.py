"""The description of the API is valid, complete, and true: requests made from it never break the server."""

import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from muse_fn.serve.app import ROUTES, make_app
from muse_fn.serve.openapi import document
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service
from tests.serve.web import call

EXAMPLES = int(os.environ.get("MUSE_FN_API_EXAMPLES", "200"))  # of all operations together; 2000 for acceptance
TAKING = [row for row in ROUTES if row.body is not None]
SERVICE = make_service(ScriptedEngine(bytes_tokens("An answer. ") * 3))
SCHEMA: Any = schemathesis.openapi.from_asgi("/openapi.json", make_app(SERVICE))


def test_the_document_is_the_table() -> None:
    found = call(make_app(SERVICE), "GET", "/openapi.json").json()
    assert found == json.loads(json.dumps(document(ROUTES, "nano")))
    assert found["openapi"] == "3.1.0"
    operations = {(path, method) for path, methods in found["paths"].items() for method in methods}
    assert len(operations) == len(ROUTES)
    for row in ROUTES:
        operation = found["paths"][row.path.replace(":path}", "}")][row.method.lower()]
        assert operation["summary"] == row.summary
        assert (operation["security"] == []) == row.is_open
        assert ("requestBody" in operation) == (row.body is not None)
    names = [found["paths"][path][method]["operationId"] for path, method in operations]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere() -> None:
    found = document(ROUTES, "nano")
    text = json.dumps(found)
    for part in text.split('"$ref": "')[1:]:
        *_, kind, name = part.partition('"')[0].split("/")
        assert kind == "schemas"
        assert name in found["components"]["schemas"]


def test_the_document_is_valid() -> None:
    """By the published schema of OpenAPI 3.1, as schemathesis carries it."""
    SCHEMA.validate()


@pytest.mark.parametrize("stream", [False, True])
@SCHEMA.parametrize()
@settings(
    max_examples=max(1, EXAMPLES // len(ROUTES)),
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
def test_no_request_breaks_the_server(case: Any, stream: bool) -> None:
    """Trial 45: whatever fits the description, and what does not, is answered, and never with a 5xx."""
    if stream and isinstance(case.body, dict):
        case.body["stream"] = True
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
    assert response.status_code < 500
