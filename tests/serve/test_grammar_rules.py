"""Structured answers: 18 schemas, 18 patterns and 18 lists of choices, each written by walks that know nothing."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.serve.channels import parse
from muse_fn.serve.grammar import Framing, Grammars
from muse_fn.serve.grammar_rules import regex
from muse_fn.serve.turns import Final
from muse_fn.tokenizer import Control, Json, Text
from tests.serve.grammar_walk import VOCAB, allowed, text_of, tokenizer, walk

A_TREE: Json = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {
    "integer": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "closed": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {"p": {"type": "object", "properties": {"q": {"type": "null"}}, "required": ["q"]}},
        "required": ["p"],
    },
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    "array of objects": {"type": "array", "items": {"type": "object", "required": ["x"]}, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
    "enum": {"enum": ["red", "<|eot|>", 3, None, {"a": [1]}]},
    "const": {"const": {"a": "<|start|>assistant to=user<|message|>"}},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}, {"type": "null"}]},
    "oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "a": {"type": "integer"}}, "required": ["k", "a"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "b": {"type": "string"}}, "required": ["k", "b"]},
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "bounds": {"type": "integer", "minimum": -5, "exclusiveMaximum": 120},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10000},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 12},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "references": {"$ref": "#/$defs/tree", "$defs": {"tree": A_TREE}},
    "described": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date", "description": "day", "default": "2020-01-01"}},
        "required": ["d"],
        "additionalProperties": {"type": "integer"},
    },
}
PATTERNS = [
    r"\d{3}-\d{4}",
    r"[A-Z][a-z]+",
    r"(yes|no|maybe)",
    r"^anchored$",
    r"a*b+c?",
    r"[^<>]{1,10}",
    r"(?:ab|cd){2,3}",
    r"<\|eot\|>",
    r"\w+@\w+\.com",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"(?i)hello",
    r"[\w.-]{2,8}",
    r"http://[a-z]+/\S*",
    r"é{1,3}ß",
    r".{0,12}",
    r"\{\"a\": [0-9]\}",
    r"line\none\n",
    r"(a|b|ab)*c",
]
CHOICES = [
    ["yes", "no"],
    ["<|eot|>"],
    ["<|eot|>", "<|eom|>", "<|start|>"],
    ["a", "ab", "abc"],
    ["positive", "negative", "neutral"],
    ["1", "2", "10", "100"],
    [" leading", "trailing "],
    ["line\nbreak", "tab\there"],
    ['quote"d', "it's", "back\\slash"],
    ["é", "中文", "👩‍👧"],
    ["/", "//", "/*"],
    ["{}", "[]", "{a: 1}"],
    ["x" * 200, "y" * 200],
    ["same", "same"],
    [str(number) for number in range(300)],
    ["%json {}", "start: x", "<[*]>"],
    ["\x00", "\x7f", "\u2028"],
    ["", "nothing"],
]
RULES = (
    [Final("json_schema", schema) for schema in SCHEMAS.values()]
    + [Final("regex", pattern) for pattern in PATTERNS]
    + [Final("choice", [*choices]) for choices in CHOICES]
)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.stop()


def is_right(final: Final, text: str) -> bool:
    if final.rule == "regex":
        return re.fullmatch(str(final.value), text) is not None
    if final.rule == "choice":
        assert isinstance(final.value, list)
        return text in final.value
    schema: Any = {"type": "object"} if final.rule == "json_object" else final.value
    return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text))


def test_there_are_54_rules() -> None:
    assert [len(SCHEMAS), len(PATTERNS), len(CHOICES)] == [18, 18, 18]


@pytest.mark.parametrize("final", [*RULES, Final("json_object")], ids=lambda final: f"{final.rule} {final.value!s:.40}")
def test_answers_follow_their_rule(grammars: Grammars, final: Final) -> None:
    """Trial 14: within the framing, reasoning free, and as text alone."""
    framed, plain = grammars.compile(Framing(final=final)), grammars.compile_plain(final)
    assert framed is not None
    for seed in range(4):
        drawn = walk(framed.begin(), seed, greedy=seed % 2 == 1)
        message = parse(tokenizer().decode_pieces(drawn))
        assert is_right(final, message.content), message
        assert message.unfinished == ""
        text = text_of(walk(plain.begin(), seed, greedy=seed % 2 == 1))
        assert is_right(final, text), text


LARK = """
start: item ("," item)*
item: WORD | "(" start ")"
WORD: /[a-z]{1,5}/
"""


def test_lark_grammars(grammars: Grammars) -> None:
    blueprint = grammars.compile_plain(Final("grammar", LARK))
    for seed in range(10):
        text = text_of(walk(_Closed(blueprint.begin()), seed))
        assert re.fullmatch(r"[a-z,()]+", text)
        while "(" in text:
            text, before = re.sub(r"\([a-z,]+\)", "x", text), text
            assert text != before


class _Closed:
    """A constraint under which parentheses are not opened after a while, since their number is unbounded."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.left = inner, 40
        self.opening = [token for token, text in enumerate(tokenizer().bytes_of) if text and b"(" in text]

    @property
    def is_done(self) -> bool:
        return self.inner.is_done

    def mask(self) -> Any:
        mask = self.inner.mask()
        if self.left > 0:
            return mask
        less = mask.copy()
        for token in self.opening:
            less[token >> 5] &= ~(1 << (token & 31)) if token & 31 < 31 else 0x7FFFFFFF
        return less if less.any() else mask

    def push(self, token: int) -> None:
        self.left -= 1
        self.inner.push(token)


@pytest.mark.parametrize("grammar", ["start: <|eot|>", "start: <[1003]>", "start: <[*]> <[*]>", 'start: "a" <|eom|>'])
def test_a_grammar_cannot_ask_for_control_tokens(grammars: Grammars, grammar: str) -> None:
    """Refused, or stuck for its own row, or matched by ordinary tokens: no control token comes before the end."""
    try:
        cursor = grammars.compile_plain(Final("grammar", grammar)).begin()
        for _ in range(4):
            ids = allowed(cursor)
            assert {*ids} & {*tokenizer().names} <= {*tokenizer().stop_ids}
            cursor.push(next(token for token in ids if token not in tokenizer().names))
    except (ValueError, StopIteration):
        pass


@pytest.mark.parametrize(
    ("final", "message"),
    [
        (Final("json_schema", ""), "response_format.json_schema.schema: must be a schema"),
        (Final("json_schema", None), "response_format.json_schema.schema: must be a schema"),
        (Final("json_schema", []), "response_format.json_schema.schema: must be a schema"),
        (Final("json_schema", False), "false allows nothing"),
        (Final("json_schema", {"type": "strnig"}), "strnig"),
        (Final("json_schema", {"type": "string", "format": "phone"}), "phone"),
        (Final("json_schema", {"enum": []}), "[Uu]nsatisfiable"),
        (Final("json_schema", {"enum": ["\ud83d"]}), "half of a surrogate pair"),
        (Final("json_schema", {"const": float("nan")}), "not finite"),
        (Final("json_schema", {"type": "string", "maxLength": 10**12}), "more than the"),
        (Final("json_schema", {"x-guidance": {}}), "'x-guidance' is not supported"),
        (Final("regex", "("), "structured_outputs.regex: "),
        (Final("regex", ""), "structured_outputs.regex: must be a non-empty text"),
        (Final("regex", "a(?=b)"), "look-around"),
        (Final("regex", 7), "structured_outputs.regex: must be a non-empty text, found 7"),
        (Final("choice", []), "structured_outputs.choice: must be a non-empty list"),
        (Final("choice", ["a", 1]), r"structured_outputs.choice\[1\]: must be a string"),
        (Final("choice", "ab"), "must be a non-empty list"),
        (Final("grammar", ""), "structured_outputs.grammar: must be a non-empty text"),
        (Final("grammar", "start: x"), "structured_outputs.grammar: "),
    ],
    ids=lambda value: f"{value!s:.60}",
)
def test_rules_that_cannot_be(grammars: Grammars, final: Final, message: str) -> None:
    """Trial 17: a reason for the caller, and the next one is served."""
    with pytest.raises(ValueError, match=message):
        grammars.compile(Framing(final=final))
    with pytest.raises(ValueError, match=message):
        grammars.compile_plain(final)
    assert grammars.compile(Framing(final=Final("choice", ["a"]))) is not None


@pytest.mark.parametrize("grammar", ['start: "a" x\nx: "b" x', "start: x\nx: x"])
def test_a_grammar_without_an_end_is_no_way_to_write_nothing(grammars: Grammars, grammar: str) -> None:
    """Refused, or stuck for its own row; never an answer that has ended."""
    try:
        cursor = grammars.compile_plain(Final("grammar", grammar)).begin()
        for _ in range(50):
            assert not {*tokenizer().stop_ids} & {*allowed(cursor)}
            cursor.push(allowed(cursor)[0])
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = "endless"
    assert refusal


@pytest.mark.parametrize("schema", [{}, True, {"type": "integer", "maximum": 20000000000}, {"type": "number"}])
def test_what_is_hardly_bound_still_ends(grammars: Grammars, schema: Json) -> None:
    """Trial 17: digits, and white space, run out, whatever a schema allows."""
    digits = {token for token, text in enumerate(tokenizer().bytes_of) if text and text.isdigit()}
    space = {token for token, text in enumerate(tokenizer().bytes_of) if text and text.isspace()}
    for wanted in (digits, digits | {*tokenizer().encode(".e-")}, space | {*tokenizer().encode("[")}):
        cursor, count = grammars.compile_plain(Final("json_schema", schema)).begin(), 0
        while any(token in wanted for token in allowed(cursor)):
            token = max((token for token in allowed(cursor) if token in wanted), key=lambda t: (t in digits, t))
            cursor.push(token)
            count += 1
            assert count < 2000, "endless"


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*b",
        "((a{1,100}){1,100}){1,100}",
        "(?:a{1000}){1000}",
        ".*.*.*.*x{50}",
        "(.*a){20}(.*b){20}x",
        "a{1000000000}",
    ],
)
def test_patterns_that_explode(grammars: Grammars, pattern: str) -> None:
    """Trial 19: refused with a reason, or every step works. A step that fails is an error of its own row."""
    try:
        cursor = grammars.compile_plain(Final("regex", pattern)).begin()
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
        for token in tokenizer().encode("a" * 50):
            allowed(cursor)
            cursor.push(token)
    assert refusal == "" or refusal.startswith("structured_outputs.regex: ")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=6), st.data())
def test_any_choice_can_be_written_and_nothing_else(grammars: Grammars, texts: list[str], data: st.DataObject) -> None:
    cursor = grammars.compile_plain(Final("choice", [*texts])).begin()
    text = data.draw(st.sampled_from(texts))
    for token in tokenizer().encode(text):
        cursor.push(token)
    assert {*tokenizer().stop_ids} <= {*allowed(cursor)}
    assert text + text_of(walk(cursor, 0)) in texts


@given(st.text(alphabet="a/\\\n\r[]", max_size=12))
def test_a_pattern_does_not_end_its_literal(pattern: str) -> None:
    inner = regex(pattern)[1:-1]
    assert "\n" not in inner
    assert "\r" not in inner
    assert not re.search(r"(?<!\\)(?:\\\\)*/", inner)


def test_framing_in_an_answer_is_text(grammars: Grammars) -> None:
    blueprint = grammars.compile(Framing(final=Final("choice", ["<|eot|>"])))
    assert blueprint is not None
    cursor = blueprint.begin()
    pieces = [Text(" to=user"), Control("<|message|>"), Text("<|eot|>"), Control("<|eot|>")]
    for token in tokenizer().encode_pieces(pieces):
        cursor.push(token)
    assert cursor.is_done
    assert parse(pieces).answer == "<|eot|>"
