"""Calls: every value a schema allows and the notation can write, and no other; raw text has no escapes."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.serve.atem import INVOKE_END, PARAMETER_END
from muse_fn.serve.channels import parse
from muse_fn.serve.grammar import Framing, Grammars
from muse_fn.serve.grammar_calls import call_grammar, declared, loosened
from muse_fn.serve.grammar_texts import FORMATS
from muse_fn.serve.jobs import Constraint
from muse_fn.tokenizer import Control, Json, Text
from tests.serve.grammar_walk import VOCAB, allowed, tokenizer, walk
from tests.turns import call, to


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.stop()


def tools_of(schema: Json) -> Json:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def of(*properties: Json) -> dict[str, Json]:
    """Parameters a, b, ... all of them required."""
    named = dict(zip("abcdef", properties, strict=False))
    return {"type": "object", "properties": named, "required": [*named]}


def begun(grammars: Grammars, schema: Json) -> Constraint:
    blueprint = grammars.compile(Framing(tools_of(schema), "required", False))
    assert blueprint is not None
    return blueprint.begin()


def takes(grammars: Grammars, schema: Json, value: str) -> bool:
    """Whether a call whose parameter `a` is written like this can be written."""
    cursor = begun(grammars, schema)
    start = to("f").removeprefix("<|start|>assistant").removesuffix("<|message|>")
    pieces = [Text(start), Control("<|message|>"), Text(call("f", a=value)), Control("<|eot|>")]
    for token in tokenizer().encode_pieces(pieces):
        if token not in allowed(cursor):
            return False
        cursor.push(token)
    return cursor.is_done


STRINGS: dict[str, tuple[Json, list[str], list[str]]] = {
    "any": ({"type": "string"}, ["", "a\nb", "<|eot|>", "</atem:", '"', "</atem:param"], []),
    "tags": ({"type": "string"}, [], [f"a{INVOKE_END}b"]),
    "enum": ({"enum": ["a", "ab", "é\n"]}, ["a", "ab", "é\n"], ["", "abc", '"a"']),
    "const": ({"type": "string", "const": "<|eot|>"}, ["<|eot|>"], ["x", ""]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["éé", "abc", "\n\n"], ["a", "abcd"]),
    "pattern inside": ({"type": "string", "pattern": "b+"}, ["b", "abbc"], ["", "aca"]),
    "pattern whole": ({"type": "string", "pattern": "^b+$"}, ["b", "bb"], ["ab", "b\n", ""]),
    "pattern options": ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    "pattern classes": ({"type": "string", "pattern": r"^[|\]()]\|\$$"}, ["||$", "]|$", "(|$"], ["|", "a|$"]),
    "pattern digits": ({"type": "string", "pattern": r"^\d$"}, ["7"], ["\u0663", "a"]),
    "both": ({"type": "string", "pattern": "a", "maxLength": 2}, ["a", "ba"], ["bb", "aba"]),
    "null beside": ({"type": ["string", "null"]}, ["null", "x"], []),
    "anyOf": ({"anyOf": [{"enum": ["a"]}, {"type": "string", "pattern": "^z$"}, {"type": "null"}]}, ["a", "z"], ["b"]),
    "allOf": ({"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}, ["ab"], ["a", "ba"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-28", "2023-12-31"], ["2023-02-30", "2023-13-01", "x"]),
    "number": ({"type": "number"}, ["1.5", "-2", "0"], ["01", "x", ""]),
    "object": ({"type": "object"}, ['{"a": 1}', "{}"], ["[]", "{", f'{{"a": "{INVOKE_END}"}}', '{"a": 1e999}']),
}


@pytest.mark.parametrize("case", STRINGS)
def test_what_can_be_written(grammars: Grammars, case: str) -> None:
    schema, right, wrong = STRINGS[case]
    assert [value for value in right if not takes(grammars, of(schema), value)] == []
    assert [value for value in wrong if takes(grammars, of(schema), value)] == []


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_every_text_without_a_closing_tag_is_a_value(grammars: Grammars, text: str) -> None:
    assert takes(grammars, of({"type": "string"}), text) == (PARAMETER_END not in text and INVOKE_END not in text)


@pytest.mark.parametrize("tag", [PARAMETER_END, INVOKE_END])
@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "array", "items": {"type": "string"}}])
def test_json_never_spells_a_closing_tag(grammars: Grammars, schema: Json, tag: str) -> None:
    """Token by token, byte by byte, and with a tag begun before: its last byte is never allowed inside of a string."""
    opening = {"array": '["', "object": '{"a":"'}.get(str(schema.get("type")) if isinstance(schema, dict) else "", '"')
    for before in ("", "<", "</atem:", "\\\\"):
        cursor = begun(grammars, of(schema))
        head = f'<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">{opening}{before}'
        for token in tokenizer().encode_pieces([Text(" to=f"), Control("<|message|>"), Text(head)]):
            cursor.push(token)
        for byte in tag[:-1].encode():
            ids = allowed(cursor)
            spelled = {token for token in ids if tag.encode() in tokenizer().token_bytes(token)}
            assert not spelled
            cursor.push(next(token for token in ids if tokenizer().token_bytes(token) == bytes((byte,))))
        assert not [token for token in allowed(cursor) if tokenizer().token_bytes(token).startswith(b">")]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (of({"type": "string", "format": "phone"}), "properties.a.format: must be one of .*found 'phone'"),
        (of({"type": "string", "pattern": "a(?=b)"}), "look-around"),
        (of({"type": "string", "pattern": "(?i)a"}), "properties.a.pattern: flags"),
        (of({"type": "string", "enum": [f"a{PARAMETER_END}"]}), "properties.a: .*closing tag"),
        (of({"type": "array", "items": {"const": INVOKE_END}}), "properties.a: .*closing tag"),
        (of(False), "properties.a: is required, but nothing is allowed"),
        (of({"type": "string", "minLength": 3, "maxLength": 2}), "properties.a: is required, but nothing"),
        ({"required": ["a"], "additionalProperties": False}, "a: is required, but nothing"),
        ({"properties": {"a<": {}}}, "name of a parameter"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "b"}]}}}, "more than one branch"),
        ({"required": "a"}, "required: must be a list of strings"),
        ({"properties": []}, "properties: must be an object"),
        ("x", "must be a schema"),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_what_cannot_be_called_is_refused(grammars: Grammars, schema: Json, message: str) -> None:
    with pytest.raises(ValueError, match=rf"tools\[0\].function.parameters.*{message}"):
        grammars.compile(Framing(tools_of(schema), "required"))


def test_a_required_parameter_without_a_schema_is_any_json(grammars: Grammars) -> None:
    assert takes(grammars, {"required": ["a"]}, '["x"]')
    assert takes(grammars, {"required": ["a"], "additionalProperties": {"type": "integer"}}, "7")
    assert not takes(grammars, {"required": ["a"], "additionalProperties": {"type": "integer"}}, "true")


def test_names_of_all_kinds(grammars: Grammars) -> None:
    point: Json = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}
    keys = ["a/b", "a~b", "50%", "é", "a b", "$ref", "properties"]
    properties: dict[str, Json] = {
        key: {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 1} for key in keys
    }
    schema: Json = {"type": "object", "properties": properties, "required": [*keys], "$defs": {"p": point}}
    for seed in range(3):
        message = parse(tokenizer().decode_pieces(walk(begun(grammars, schema), seed)), tools_of(schema))
        (found,) = message.tool_calls
        checked: Any = schema
        assert jsonschema_rs.validator_for(checked).is_valid(json.loads(found.arguments)), found
        assert [*json.loads(found.arguments)] == keys


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_formats(grammars: Grammars, name: str) -> None:
    """What walks write is valid to a validator that checks formats; hostnames are longer than its limit sometimes."""
    schema: dict[str, Any] = of({"type": "string", "format": name, "maxLength": 60})
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(6):
        message = parse(tokenizer().decode_pieces(walk(begun(grammars, schema), seed)), tools_of(schema))
        arguments = json.loads(message.tool_calls[0].arguments)
        assert validator.is_valid(arguments), arguments


def test_loosened_tools_keep_names_and_kinds() -> None:
    schema: Json = {
        "properties": {"s": {"type": "string", "format": "phone"}, "j": {"not": {}}, "x<": {}},
        "required": ["s", "z"],
        "if": {},
    }
    (tool,) = declared(tools_of(schema))
    with pytest.raises(ValueError, match="'if'"):
        call_grammar(tool)
    loose = loosened(tool)
    assert loose.parameters == {"properties": {"s": {"type": "string"}, "j": {}}, "required": ["s"]}
    assert call_grammar(loose).texts == {b"s"}


def test_tools_of_namespaces_are_found_by_place() -> None:
    tools: Json = [{"type": "namespace", "name": "n", "tools": [{"name": "a"}, {"function": {"name": "b"}}]}]
    assert [(tool.where, tool.name) for tool in declared(tools)] == [
        ("tools[0].tools[0]", "n.a"),
        ("tools[0].tools[1].function", "n.b"),
    ]
    assert declared(None) == ()


def test_the_walk_helper_writes_calls_as_the_template_does() -> None:
    assert re.fullmatch(r'<atem:function_calls>\n.*name="a">1</atem:parameter>\n.*', call("f", a=1), re.DOTALL)
