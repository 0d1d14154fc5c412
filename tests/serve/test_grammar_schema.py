"""Schemas: what cannot be enforced is refused by name, references lead where they led, circles are found."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.serve.grammar import Framing, Grammars
from muse_fn.serve.grammar_schema import DESCRIBING, ENFORCED, checked, literals, part, resolved
from muse_fn.serve.turns import Final
from muse_fn.tokenizer import Json
from tests.serve.grammar_walk import VOCAB, text_of, tokenizer, walk


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.stop()


KEYWORDS = (
    "not uniqueItems contains minContains maxContains propertyNames dependentRequired dependentSchemas dependencies if "
    "then else unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor $anchor $recursiveRef nullable foo x-a"
).split()


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize(
    ("outer", "place"),
    [
        ({}, "S"),
        ({"properties": {"p": None}}, "S.properties.p"),
        ({"items": None}, "S.items"),
        ({"anyOf": [True, None]}, r"S.anyOf\[1\]"),
        ({"$defs": {"d": {"additionalProperties": None}}}, r"S.\$defs.d.additionalProperties"),
    ],
)
def test_unknown_keywords_are_refused_wherever_they_stand(keyword: str, outer: dict[str, Any], place: str) -> None:
    inner: Json = {keyword: True}
    schema = json.loads(json.dumps(outer).replace("null", json.dumps(inner))) if outer else inner
    with pytest.raises(ValueError, match=rf"{place}: the keyword '{keyword.replace('$', chr(92) + '$')}' is not supp"):
        checked(schema, "S")


def test_what_only_describes_is_dropped_and_the_rest_kept() -> None:
    schema: Json = {"$id": "u", "type": "string", "properties": {"title": {"title": "t", "const": {"title": 1}}}}
    assert checked(schema, "S") == {"type": "string", "properties": {"title": {"const": {"title": 1}}}}
    assert not ENFORCED & DESCRIBING


def test_all_faults_are_listed() -> None:
    with pytest.raises(ValueError, match=r"'not'.*'contains'.*minLength: .*-1"):
        checked({"not": {}, "items": {"contains": {}}, "minLength": -1}, "S")


CIRCLES: list[Json] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    {"properties": {"x": {"$ref": "#/properties/x"}}},
    {"properties": {"x": {"allOf": [{"oneOf": [{"$ref": "#/properties/x"}]}]}}},
]
TREES: list[Json] = [
    {"properties": {"x": {"$ref": "#"}}},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}},
]


@pytest.mark.parametrize("schema", CIRCLES, ids=str)
def test_references_that_lead_only_to_themselves(schema: Json) -> None:
    """The compiler never comes back from these."""
    with pytest.raises(ValueError, match="leads back to itself"):
        checked(schema, "S")


@pytest.mark.parametrize("schema", TREES, ids=str)
def test_references_with_something_in_between(grammars: Grammars, schema: Json) -> None:
    checked(schema, "S")
    assert grammars.compile(Framing(final=Final("json_schema", schema))) is not None


@pytest.mark.parametrize("reference", ["#/$defs/x", "http://a/b", "#x", "other.json", "#/a/0", "#/$defs/a/type"])
def test_references_to_nowhere(reference: str) -> None:
    with pytest.raises(ValueError, match=r"S: \$ref '.*' (leads|is no local)"):
        checked({"$ref": reference, "$defs": {"a": {"type": "null"}}}, "S")


KEYS = st.text(alphabet='ab/~% é"#', max_size=4)


@given(KEYS, KEYS)
def test_a_part_means_what_it_meant(key: str, name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    inner: Json = {"items": {"$ref": f"#/$defs/{pointer}"}}
    root: Json = {"properties": {key: inner}, "$defs": {name: {"const": name}}}
    whole = part(root, ("properties", key), inner)
    assert isinstance(whole, dict)
    found = resolved(str(whole["$ref"]), whole)
    assert isinstance(found, dict)
    items = found["items"]
    assert isinstance(items, dict)
    assert resolved(str(items["$ref"]), whole) == {"const": name}


def test_a_part_without_references_is_itself() -> None:
    assert part({"properties": {"a": {"const": 1}}}, ("properties", "a"), {"const": 1}) == {"const": 1}


def test_literals_are_all_that_must_be_spelled() -> None:
    schema: Json = {"properties": {"a": {"const": ["b", {"c": "d"}]}}, "anyOf": [{"enum": ["e"]}], "required": ["f"]}
    assert {*literals(schema)} == set("abcdef")


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 400},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", "y z", 4]},
        {"const": "</atem:parameter>"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"$ref": "#/$defs/point"},
    ]
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from("abcde"), inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties] or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    arrays = inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2})
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(SCALARS, _larger, max_leaves=6), seed=st.integers(0, 99))
def test_whatever_the_schema_the_answer_is_valid(grammars: Grammars, schema: dict[str, Any], seed: int) -> None:
    point: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2}
    schema = {**schema, "$defs": {"point": point}}
    text = text_of(walk(grammars.compile_plain(Final("json_schema", schema)).begin(), seed))
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text)), text
