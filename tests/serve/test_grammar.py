"""Tool choice over the framing: whatever a model draws, the parser finds what was asked for."""

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.serve.channels import Message, parse
from muse_fn.serve.grammar import ROOM, Blueprint, Framing, Grammars
from muse_fn.serve.turns import Final, Named, ToolChoice
from muse_fn.tokenizer import Control, Json, Text
from tests.serve.grammar_walk import VOCAB, allowed, tokenizer, walk

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 10},
        "hours": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        "unit": {"enum": ["C", "F", "<|eot|>"]},
        "time": {"anyOf": [{"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"], "maxLength": 20},
        "any": {},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"in": {"$ref": "#/$defs/place"}}, "additionalProperties": False}
    },
}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping"}},
    {"type": "namespace", "name": "db", "tools": [{"name": "get", "parameters": {"properties": {"id": True}}}]},
]
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "ping": {}, "db.get": {"type": "object"}}
NUMBER: Json = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.stop()


def built(grammars: Grammars, framing: Framing) -> Blueprint:
    blueprint = grammars.compile(framing)
    assert blueprint is not None
    return blueprint


def turn(blueprint: Blueprint, seed: int, greedy: bool) -> Message:
    """A random turn; every call in it must be valid."""
    drawn = walk(blueprint.begin(), seed, greedy=greedy, tools=TOOLS)
    message = parse(tokenizer().decode_pieces(drawn), TOOLS)
    assert message.damaged == ()
    assert message.unfinished == ""
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        assert jsonschema_rs.validator_for(SCHEMAS[call.name]).is_valid(arguments), (call, arguments)
    return message


WALKS = [(seed, greedy) for seed in range(10) for greedy in (False, True)]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", Named("get_weather"), Named("ping"), Named("db.get")])
def test_calls_come_when_they_must(grammars: Grammars, choice: ToolChoice, parallel: bool) -> None:
    """Trial 12: ten of ten, and only of what was named; exactly one where only one may come."""
    blueprint = built(grammars, Framing(TOOLS, choice, parallel))
    counts = set[int]()
    for seed, greedy in WALKS:
        message = turn(blueprint, seed, greedy)
        counts.add(len(message.tool_calls))
        assert message.answer == ""
        if isinstance(choice, Named):
            assert {call.name for call in message.tool_calls} == {choice.name}
    assert min(counts) >= 1
    assert parallel or counts == {1}


@pytest.mark.parametrize("budget", [40, 128, 160, 300, 700])
@pytest.mark.parametrize("choice", ["required", Named("ping"), "none"])
def test_what_must_come_has_room_in_the_budget(grammars: Grammars, choice: ToolChoice, budget: int) -> None:
    """Trial 12: a model that never ends its reasoning by itself does not use up the room for the call or the answer."""
    final = Final("choice", ["yes"]) if choice == "none" else None
    cursor, draw, drawn = built(grammars, Framing(TOOLS[1:2], choice, final=final)).begin(budget), Random(budget), []
    ends = [tokenizer().controls[name] for name in ("<|eom|>", "<|eot|>")]
    bound = max(0, min(budget // 2, budget - ROOM))
    while not cursor.is_done:
        ids = allowed(cursor)
        others = [token for token in ids if token not in ends]  # never ends anything unless it must
        drawn.append(draw.choice((others if len(drawn) < bound else []) or ids))
        cursor.push(drawn[-1])
    message = parse(tokenizer().decode_pieces(drawn), TOOLS)
    assert len(drawn) - bound <= ROOM
    assert {call.name for call in message.tool_calls} == (set() if final else {"ping"})
    assert message.answer == ("yes" if final else "")
    assert bool(message.reasoning + message.commentary) <= bool(bound)


@pytest.mark.parametrize("final", [None, Final("json_schema", NUMBER)])
def test_no_call_comes_with_none(grammars: Grammars, final: Final | None) -> None:
    blueprint = built(grammars, Framing(TOOLS, "none", final=final))
    for seed, greedy in WALKS:
        message = turn(blueprint, seed, greedy)
        assert message.tool_calls == ()
        assert final is None or isinstance(json.loads(message.content)["n"], int)


def test_auto_is_free_unless_something_is_asked(grammars: Grammars) -> None:
    assert grammars.compile(Framing()) is None
    assert grammars.compile(Framing(TOOLS)) is None
    assert grammars.compile(Framing(None, "auto", False)) is None


@pytest.mark.parametrize("final", [None, Final("json_schema", NUMBER)])
@pytest.mark.parametrize("parallel", [True, False])
def test_auto_calls_or_answers(grammars: Grammars, parallel: bool, final: Final | None) -> None:
    if parallel and final is None:
        return
    blueprint = built(grammars, Framing(TOOLS, "auto", parallel, final))
    called, answered = 0, 0
    for seed, greedy in WALKS:
        message = turn(blueprint, seed, greedy)
        assert parallel or len(message.tool_calls) <= 1
        called += bool(message.tool_calls)
        answered += not message.tool_calls
        if final is not None and not message.tool_calls:
            assert isinstance(json.loads(message.content)["n"], int)
    assert called
    assert answered


def test_under_auto_a_schema_that_cannot_be_enforced_is_loosened(grammars: Grammars) -> None:
    odd: Json = {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    tools: Json = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    assert grammars.compile(Framing(tools, "auto", False)) is not None
    with pytest.raises(ValueError, match=r"tools\[0\].function.parameters.properties.a: the keyword 'uniqueItems'"):
        grammars.compile(Framing(tools, "required"))


@pytest.mark.parametrize(
    ("framing", "message"),
    [
        (Framing(None, "required"), "tool_choice: 'required' needs tools"),
        (Framing([], "required"), "tool_choice: 'required' needs tools"),
        (Framing(TOOLS, Named("fly")), "tool_choice: no tool is named 'fly'; declared: db.get, get_weather, ping"),
        (Framing(None, Named("fly")), "tool_choice: .*declared: none"),
        (Framing([{"type": "function", "function": {"name": "a b"}}], "required"), r"tools\[0\].function.name: 'a b'"),
        (Framing([{"type": "function", "function": {"name": "user"}}], "required"), "recipient of the format itself"),
        (Framing([TOOLS[1], TOOLS[1]], "required"), r"tools\[1\].*names two tools"),
        (
            Framing([{"type": "function", "function": {"name": "f", "parameters": {"anyOf": []}}}], "required"),
            "'anyOf' is not supported at the top",
        ),
        (
            Framing([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], "required"),
            "parameters.type: must be 'object', found 'array'",
        ),
    ],
)
def test_refusals_name_the_field(grammars: Grammars, framing: Framing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammars.compile(framing)


def test_every_step_of_a_written_turn_is_allowed(grammars: Grammars) -> None:
    """The turn as the format's own example spells it, through every control token."""
    blueprint = built(grammars, Framing(TOOLS, "required"))
    call = (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Köln\n</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n<atem:parameter name="unit"><|eot|></atem:parameter>\n'
        '<atem:parameter name="any">{"a": ["</atem:", 1.5e3]}</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    pieces = [Text(" to=self"), Control("<|message|>"), Text("so"), Control("<|eom|>"), Control("<|start|>")]
    pieces += [Text("assistant to=commentary"), Control("<|message|>"), Text("<|eot|>"), Control("<|eom|>")]
    for end in ("<|eom|>", "<|eot|>"):
        pieces += [Control("<|start|>"), Text("assistant to=get_weather"), Control("<|message|>"), Text(call)]
        pieces += [Control(end)]
    cursor = blueprint.begin()
    for token in tokenizer().encode_pieces(pieces):
        assert not cursor.is_done
        assert token in allowed(cursor), tokenizer().token_bytes(token)
        cursor.push(token)
    assert cursor.is_done
    found = parse(pieces, TOOLS).tool_calls
    assert [json.loads(call.arguments)["any"] for call in found] == [{"a": ["</atem:", 1500.0]}] * 2


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(grammars: Grammars) -> None:
    cursor = built(grammars, Framing(TOOLS, "required")).begin()
    for token in (tokenizer().controls["<|eot|>"], VOCAB - 1, -1, 1 << 40, tokenizer().encode("x")[0]):
        with pytest.raises(ValueError, match="not allowed"):
            cursor.push(token)
    cursor.push(tokenizer().encode(" ")[0])


@settings(max_examples=20, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_reasoning_is_free(grammars: Grammars, text: str) -> None:
    cursor = built(grammars, Framing(TOOLS, "required")).begin()
    pieces = [Text(" to=self"), Control("<|message|>"), Text(text + "<|eot|>"), Control("<|eom|>")]
    for token in tokenizer().encode_pieces(pieces):
        cursor.push(token)
    assert allowed(cursor) == [tokenizer().controls["<|start|>"]]


def test_free_text_is_everything_but_control_tokens(grammars: Grammars) -> None:
    cursor = built(grammars, Framing(None, "none")).begin()
    for token in tokenizer().encode_pieces([Text(" to=user"), Control("<|message|>")]):
        cursor.push(token)
    ordinary = {token for token, text in enumerate(tokenizer().bytes_of) if text and token not in tokenizer().names}
    assert set(allowed(cursor)) == ordinary | {tokenizer().controls["<|eot|>"]}


def test_blueprints_are_kept_and_cursors_are_not_shared(grammars: Grammars) -> None:
    one, two = (built(grammars, Framing(TOOLS, "required")) for _ in range(2))
    assert one is two
    first, second = one.begin(), one.begin()
    first.push(tokenizer().encode(" to=self")[0])
    second.push(tokenizer().encode(" to=self")[0])


def test_building_leaves_the_loop_free_and_closing_ends_the_workers() -> None:
    async def scenario() -> None:
        made = Grammars(tokenizer(), VOCAB, seconds=1)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        try:
            assert await made.build(Framing(TOOLS)) is None
            await made.warm()
            assert await made.build(Framing(TOOLS, "required")) is not None
            assert ticks > 10
            cursor = (await made.build_plain(Final("choice", ["a"]))).begin()
            cursor.push(tokenizer().encode("a")[0])
            assert set(allowed(cursor)) == set(tokenizer().stop_ids)
        finally:
            ticking.cancel()
            await made.close()
        with pytest.raises((ValueError, RuntimeError)):
            await made.build(Framing(TOOLS, Named("ping")))

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_rules_that_are_too_long_are_refused() -> None:
    made = Grammars(tokenizer(), VOCAB, size=1000)
    try:
        with pytest.raises(ValueError, match=r"structured_outputs.choice: .*more than the 1000"):
            made.compile_plain(Final("choice", ["x" * 2000]))
        with pytest.raises(ValueError, match=r"tools, response_format: .*more than the 1000"):
            made.compile(Framing(TOOLS, "required", final=Final("json_object", "x" * 2000)))
    finally:
        made.stop()
