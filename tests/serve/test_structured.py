"""What an answer must look like: one rule from two fields, or a refusal that names the field."""

from typing import Any

import pytest

from muse_fn.serve.errors import BadRequest
from muse_fn.serve.structured import final_of
from muse_fn.serve.turns import Final

SCHEMA: dict[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("structured", "response_format", "final"),
    [
        (None, None, None),
        (None, {"type": "text"}, None),
        (None, {"type": "json_object"}, Final("json_object")),
        (None, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, Final("json_schema", SCHEMA)),
        (None, {"type": "json_schema", "json_schema": {"schema": True}}, Final("json_schema", True)),
        ({"json": SCHEMA}, None, Final("json_schema", SCHEMA)),
        ({"json": '{"type": "object"}', "regex": None}, None, Final("json_schema", SCHEMA)),
        ({"json": {}}, {"type": "text"}, Final("json_schema", {})),
        ({"json_object": True}, None, Final("json_object")),
        ({"regex": "a+"}, None, Final("regex", "a+")),
        ({"choice": ["a", "b"]}, None, Final("choice", ["a", "b"])),
        ({"grammar": 'start: "a"'}, None, Final("grammar", 'start: "a"')),
    ],
)
def test_rules(structured: Any, response_format: Any, final: Final | None) -> None:
    assert final_of(structured, response_format) == final


@pytest.mark.parametrize(
    ("structured", "response_format", "param"),
    [
        ({"json": "{"}, None, "structured_outputs.json"),
        ({"json": "[" * 100_000}, None, "structured_outputs.json"),
        ({"json": "5"}, None, "structured_outputs.json"),
        ({"json": []}, None, "structured_outputs.json"),
        ({"json_object": False}, None, "structured_outputs.json_object"),
        ({"json_object": 1}, None, "structured_outputs.json_object"),
        ({"choice": []}, None, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, None, "structured_outputs.choice"),
        ({"regex": ""}, None, "structured_outputs.regex"),
        ({"grammar": None}, None, "structured_outputs"),
        ({"structural_tag": "x"}, None, "structured_outputs"),
        ({"regex": "a", "grammar": "b"}, None, "structured_outputs"),
        ({"regex": "a"}, {"type": "json_object"}, "structured_outputs"),
        (None, {"type": 5}, "response_format.type"),
        (None, {"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
        (None, {"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema.schema"),
    ],
)
def test_what_is_no_rule_is_refused_by_path(structured: Any, response_format: Any, param: str) -> None:
    """Trial 17."""
    with pytest.raises(BadRequest) as found:
        final_of(structured, response_format)
    assert found.value.param == param
    assert str(found.value).startswith(param)
