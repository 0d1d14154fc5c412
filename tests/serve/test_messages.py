"""The messages API without HTTP: bodies to turns, and events of turns to streams and their wholes."""

import json
import re
from itertools import groupby
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muse_fn.serve import messages_out
from muse_fn.serve.channels import Kind
from muse_fn.serve.chat import check_messages, check_tools
from muse_fn.serve.fields import Object
from muse_fn.serve.messages_in import Read, Settings, read
from muse_fn.serve.service import Limits
from muse_fn.serve.turns import Called, Counts, Ended, Named, Said, TurnEvent
from muse_fn.tokenizer import Json
from tests.serve.turn_strategies import EMPTY, said, spoiled, turns, words

NAMES = (
    "role content type text tool_use tool_result thinking signature id name input tool_use_id is_error user assistant "
    "system messages tools input_schema tool_choice auto any tool none budget_tokens enabled disabled adaptive effort "
    "output_config format json_schema schema display omitted redacted_thinking data"
).split()
PATH = r"[a-z_]+[a-z_.0-9\[\]]*: [^ ]"
TOOL: Object = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


def block(kind: str, **fields: Json) -> Json:
    return {"type": kind, **fields}


def body(*messages: Json, **fields: Json) -> Object:
    return {"messages": list(messages), **fields}


def ask(*messages: Json, max_tokens: int = 5000, **fields: Json) -> Read:
    return read(body(*(messages or ({"role": "user", "content": "Hi"},)), **fields), Settings(max_tokens), Limits())


@st.composite
def good_bodies(draw: st.DrawFn) -> Object:
    """Bodies that are accepted."""
    messages: list[Json] = [{"role": "user", "content": draw(words)}]
    calls = 0
    for _ in range(draw(st.integers(0, 3))):
        content: list[Json] = [block("thinking", thinking=draw(words), signature="x")] * draw(st.integers(0, 2))
        content += [block("text", text=draw(words))] * draw(st.integers(0, 2))
        content += [block("tool_use", id=f"c{calls}", name="add", input={"a": draw(words)})]
        results: Json = [block("tool_result", tool_use_id=f"c{calls}", content=draw(words)), block("text", text="and")]
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": results})
        calls += 1
    extra: Object = {"system": [block("text", text=draw(words))]}
    extra["thinking"] = draw(st.sampled_from([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]))
    extra["tool_choice"] = draw(st.sampled_from([{"type": "any"}, {"type": "tool", "name": "add"}, None]))
    extra["output_config"] = {"effort": "low", "format": {"type": "json_schema", "schema": {}}}
    kept = {name: value for name, value in extra.items() if draw(st.booleans())}
    return body(*messages, **kept, tools=[TOOL])


@given(good_bodies())
def test_good_bodies_are_read(good: Object) -> None:
    found = read(good, Settings(5000), Limits())
    assert found.unknown == ()
    assert len(check_messages(found.turn.messages)) >= 1


@given(spoiled(good_bodies(), *NAMES))
def test_any_body_is_read_or_refused_with_a_sentence(spoilt: Object) -> None:
    try:
        found = read(spoilt, Settings(5000), Limits())
    except ValueError as refused:
        message = str(refused)
        assert re.match(PATH, message), message
        return
    check_messages(found.turn.messages)
    check_tools(found.turn.tools)


def run(events: list[TurnEvent], *, shows: bool = True) -> list[Object]:
    state = messages_out.State(9, shows)
    stream = messages_out.start("msg_1", "nano", 10)
    for event in events:
        state, more = messages_out.push(state, event)
        stream += more
    return stream


def simple(events: list[TurnEvent], shows: bool) -> list[tuple[str, str]]:
    """Runs of text of one kind, and calls."""
    heard = [event for event in events if isinstance(event, Called) or (isinstance(event, Said) and event.text)]
    heard = [event for event in heard if shows or isinstance(event, Called) or event.kind != "reasoning"]
    found = list[tuple[str, str]]()
    for kind, group in groupby(heard, lambda e: e.kind if isinstance(e, Said) else f"call {e.number}"):
        joined = "".join(e.text if isinstance(e, Said) else e.arguments for e in group)
        found.append(({"reasoning": "thinking"}.get(kind, "tool_use" if "call" in kind else "text"), joined))
    return found


@given(turns(), st.booleans())
def test_a_stream_opens_and_closes_one_block_after_the_other(events: list[TurnEvent], shows: bool) -> None:
    stream = [event for event in run(events, shows=shows) if event["type"] != "ping"]
    kinds = [cast("str", event["type"]) for event in stream]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    index, is_open = -1, False
    for event in stream[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                index, is_open = index + 1, True
            case "content_block_stop":
                assert is_open
                is_open = False
            case other:
                assert (other, is_open) == ("content_block_delta", True)
        assert event["index"] == index
    assert not is_open


@given(turns(), st.booleans())
def test_the_whole_says_what_was_said(events: list[TurnEvent], shows: bool) -> None:
    whole = cast("Any", messages_out.whole(run(events, shows=shows)))
    texts = {"thinking": "thinking", "text": "text"}
    found = [
        (b["type"], json.dumps(b["input"], ensure_ascii=False) if b["type"] == "tool_use" else b[texts[b["type"]]])
        for b in whole["content"]
    ]
    assert found == simple(events, shows)
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10
    assert whole["stop_reason"] is not None


@given(turns())
def test_an_answer_can_be_sent_back(events: list[TurnEvent]) -> None:
    whole = messages_out.whole(run(events))
    results = [block("tool_result", tool_use_id=f"call_{i}") for i in range(99)]
    called = [event for event in events if isinstance(event, Called)]
    content: Json = [*results[: len(called)], block("text", text="go on")]
    history: Json = {"role": "assistant", "content": whole["content"]}
    found = ask({"role": "user", "content": "Hi"}, history, {"role": "user", "content": content}).turn.messages
    assert isinstance(found, list)
    mine = [cast("Any", message) for message in found if cast("Any", message)["role"] == "assistant"]
    reasoning = "".join(event.text for event in events if isinstance(event, Said) and event.kind == "reasoning")
    assert "".join(message.get("reasoning", "") for message in mine).replace("\n", "") == reasoning.replace("\n", "")
    text = "".join(event.text for event in events if isinstance(event, Said) and event.kind != "reasoning")
    assert "".join(message["content"] or "" for message in mine) == text
    calls = [call["function"] for message in mine for call in message.get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in calls] == [(c.name, json.loads(c.arguments)) for c in called]


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(0, "stop", "", None, EMPTY, ()), ("end_turn", None)),
        (Ended(0, "stop", "", "END", EMPTY, ()), ("stop_sequence", "END")),
        (Ended(0, "stop", "", 5, EMPTY, ()), ("end_turn", None)),
        (Ended(0, "tool_calls", "", None, EMPTY, ()), ("tool_use", None)),
        (Ended(0, "length", "", None, Counts(1, 0, 9, 0), ()), ("max_tokens", None)),
        (Ended(0, "length", "", None, Counts(1, 0, 8, 0), ()), ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(ended: Ended, expected: tuple[str, str | None]) -> None:
    assert messages_out.stop_reason(ended, 9) == expected


def test_events_of_a_turn_with_everything() -> None:
    kinds: list[tuple[Kind, str]] = [
        ("reasoning", "Hm"),
        ("reasoning", "m"),
        ("commentary", "Let me add."),
    ]
    events: list[TurnEvent] = [said(kind, text) for kind, text in kinds]
    events += [Called(0, 0, "call_x", "add", '{"a": 1}', ()), Ended(0, "tool_calls", "", None, Counts(5, 2, 9, 3), ())]
    stream = run(events)
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 9}
    thinking: Object = {"type": "thinking", "thinking": "", "signature": ""}
    call: Object = {"type": "tool_use", "id": "call_x", "name": "add", "input": {}}
    assert stream[2:] == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me add."}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": call},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {**usage, "output_tokens_details": {"thinking_tokens": 3}},
        },
        {"type": "message_stop"},
    ]


def test_a_conversation_becomes_chat_messages() -> None:
    found = ask(
        {"role": "user", "content": [block("text", text="a"), block("text", text="b", cache_control=None)]},
        {
            "role": "assistant",
            "content": [
                block("thinking", thinking="T", signature="s"),
                block("text", text="C"),
                block("tool_use", id="c1", name="add", input={"x": 1}),
                block("text", text="D"),
            ],
        },
        {
            "role": "user",
            "content": [
                block("tool_result", tool_use_id="c1", is_error=True, content=[block("text", text="bad")]),
                block("text", text="E"),
            ],
        },
        system=[block("text", text="S1"), block("text", text="S2")],
    )
    call: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    assert found.turn.messages == [
        {"role": "system", "content": "S1\n\nS2"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "C", "reasoning": "T", "tool_calls": [call]},
        {"role": "assistant", "content": "D"},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: bad"},
        {"role": "user", "content": "E"},
    ]


@pytest.mark.parametrize(
    ("thinking", "effort", "expected", "shows"),
    [
        (None, None, None, True),
        ({"type": "adaptive"}, None, None, True),
        ({"type": "adaptive", "display": "omitted"}, "max", "xhigh", False),
        ({"type": "disabled"}, None, "low", False),
        ({"type": "disabled"}, "high", "high", False),
        ({"type": "enabled", "budget_tokens": 1024}, None, "low", True),
        ({"type": "enabled", "budget_tokens": 4096}, None, "medium", True),
        ({"type": "enabled", "budget_tokens": 16384}, None, "high", True),
        ({"type": "enabled", "budget_tokens": 32768}, None, "xhigh", True),
        ({"type": "enabled", "budget_tokens": 32768}, "low", "low", True),
    ],
)
def test_thinking_chooses_an_effort(thinking: Json, effort: Json, expected: str | None, shows: bool) -> None:
    found = ask(thinking=thinking, output_config={"effort": effort}, max_tokens=99999)
    assert (found.turn.effort, found.shows_thinking) == (expected, shows)
    asked = thinking or {}
    assert isinstance(asked, dict)
    assert bool(found.warnings) == (asked.get("type") == "disabled" or "budget_tokens" in asked)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add"}, Named("add"), True),
    ],
)
def test_tool_choices(choice: Json, expected: object, parallel: bool) -> None:
    turn = ask(tools=[TOOL], tool_choice=choice).turn
    assert (turn.tool_choice, turn.parallel_tool_calls) == (expected, parallel)
    function: Json = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert turn.tools == [{"type": "function", "function": function}]


USER: Json = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        (body(), "messages"),
        (body(USER, {"role": "assistant", "content": "I"}), "messages[1].role"),
        (body({"role": "wizard", "content": "Hi"}), "messages[0].role"),
        (body({"role": "user", "content": None}), "messages[0].content"),
        (body({"role": "user", "content": [block("image", source={})]}), "messages[0].content[0].type"),
        (body({"role": "user", "content": [block("tool_result", tool_use_id="x")]}), "messages[0].content[0].tool_use"),
        (body(USER, tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
        (body(USER, tools=[{"name": "f"}]), "tools[0].input_schema"),
        (body(USER, tools=[cast("Json", TOOL)] * 257), "tools: at most 256"),
        (body(USER, tool_choice={"type": "any"}), "tool_choice"),
        (body(USER, tools=[TOOL], tool_choice={"type": "tool", "name": "sub"}), "tool_choice.name"),
        (body(USER, thinking={"type": "enabled"}), "thinking.budget_tokens"),
        (body(USER, thinking={"type": "enabled", "budget_tokens": 5000}), "thinking.budget_tokens"),
        (body(USER, thinking={"type": "between_tools"}), "thinking.type"),
        (body(USER, output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(wrong: Object, path: str) -> None:
    with pytest.raises(ValueError, match="^" + path.replace("[", r"\[").replace(".", r"\.")):
        read(wrong, Settings(5000), Limits())


def test_unknown_fields_are_found_wherever_they_stand() -> None:
    content: Json = [block("text", text="Hi", colour="red")]
    found = ask({"role": "user", "content": content, "mood": 1}, tools=[{**TOOL, "price": 3}])
    assert found.unknown == ("tools[0].price", "messages[0].mood", "messages[0].content[0].colour")


@given(st.lists(words, max_size=20))
@example(["x"] * 17)
def test_stop_sequences_are_checked(stops: list[str]) -> None:
    settings = Settings(5, stop_sequences=tuple(stops))
    if len(stops) <= Limits().stops and all(stops):
        assert read(body(USER), settings, Limits()).turn.asked.stop == tuple(stops)
    else:
        with pytest.raises(ValueError, match=r"^stop_sequences"):
            read(body(USER), settings, Limits())


def test_what_was_meant_for_a_tool_is_not_lost() -> None:
    whole = messages_out.whole(run([Ended(0, "stop", "", None, EMPTY, (), ("add 1",))]))
    assert whole["damaged_tool_calls"] == ["add 1"]
