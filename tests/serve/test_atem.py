"""One call: values by their schema, arguments that are always JSON, tools by their names."""

import json
from typing import Any

import pytest

from muse_fn.serve.atem import Call, parse_invoke, tools_by_name
from muse_fn.serve.channels import parse
from muse_fn.tokenizer import Json
from tests.turns import INVOKE, NUMBER, STRING, call, pieces, to, tool


def decode_value(raw: str, schema: Json) -> Any:
    """A parameter's value as it ends in the arguments of a call, which are always JSON that can be sent."""
    text = f'{INVOKE}f"><atem:parameter name="k">{raw}</atem:parameter>'
    found, beside = parse_invoke(text, tools_by_name([tool("f", k=schema)]))
    assert found
    assert not beside
    found.arguments.encode("utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(found.arguments, parse_constant=refuse)["k"]


DEEP = "[" * 33 + "]" * 33
OBJECT: Json = {"type": "object"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", STRING, "42"),
        ("42", NUMBER, 42),
        ("42", None, 42),
        ("42", {"type": ["string", "null"]}, "42"),
        ("null", {"anyOf": [{"type": "integer"}, STRING]}, "null"),
        ("null", {"oneOf": [{"allOf": [{"type": "null"}, STRING]}]}, "null"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, "2"]}, 1),
        ("007", NUMBER, "007"),
        ("NaN", NUMBER, "NaN"),
        ("[NaN]", NUMBER, "[NaN]"),
        ("-Infinity", NUMBER, "-Infinity"),
        ("[1e999]", NUMBER, "[1e999]"),
        ("9" * 5000, NUMBER, "9" * 5000),
        ('{"a": [true]}', OBJECT, {"a": [True]}),
        ('{"a": 1, "a": 2}', OBJECT, {"a": 2}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        (DEEP, {"type": "array"}, DEEP),
        (DEEP[1:-1], {"type": "array"}, json.loads(DEEP[1:-1])),
        ('"\\ud83d"', OBJECT, '"\\ud83d"'),
        ('"\\uD83D\\uDE00"', OBJECT, "\U0001f600"),
        (" x ", STRING, " x "),
        (" 1 ", NUMBER, 1),
        ("", NUMBER, ""),
    ],
)
def test_values(text: str, schema: Json, value: Json) -> None:
    assert decode_value(text, schema) == value


def test_references_of_a_schema_are_followed_once() -> None:
    loop: Json = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, {"$ref": "elsewhere"}]}
    text: Json = {"$ref": "#/$defs/a~1b"}
    definitions: dict[str, Json] = {"loop": loop, "a/b": STRING}
    parameters: Json = {"properties": {"x": loop, "y": text}, "$defs": definitions}
    found = tools_by_name([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert found["f"].names == {"x", "y"}
    assert found["f"].strings == {"y"}


@pytest.mark.parametrize(
    "tools", [5, [5], [{}], [{"function": 5}], [{"function": {"name": "f", "parameters": {"properties": 5}}}]]
)
def test_malformed_tools_are_passed_over(tools: Json) -> None:
    assert not any(known.names for known in tools_by_name(tools).values())


def test_arguments_are_json_and_the_last_duplicate_wins() -> None:
    values = "".join(f'<atem:parameter name="k">{value}</atem:parameter>' for value in (1, '"é"'))
    assert parse_invoke(f'{INVOKE}f">{values}', {}) == (Call("f", '{"k": "é"}'), "")


def test_namespaces_name_their_functions() -> None:
    tools: list[Json] = [{"type": "namespace", "name": "db", "tools": [tool("get", key=STRING)]}]
    assert tools_by_name(tools)["db.get"].strings == {"key"}
    message = parse(pieces(to("db.get") + call("db.get", key=7)), tools)
    assert message.tool_calls == (Call("db.get", '{"key": "7"}'),)
