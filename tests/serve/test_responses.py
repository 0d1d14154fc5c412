"""The responses API without HTTP: bodies to turns, and events of turns to streams and their wholes."""

import json
import re
from functools import partial
from itertools import groupby
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve import responses_out
from muse_fn.serve.chat import check_messages, check_tools
from muse_fn.serve.fields import Object
from muse_fn.serve.jobs import Logprob
from muse_fn.serve.responses_in import Read, logprobs_asked, read
from muse_fn.serve.responses_out import State
from muse_fn.serve.service import Limits
from muse_fn.serve.turns import Asked, Called, Counts, Ended, Final, Named, Piece, Said, TurnEvent
from muse_fn.tokenizer import Json
from tests.serve.script import nano, tokens_of
from tests.serve.turn_strategies import EMPTY, said, spoiled, turns, words

NAMES = (
    "role content type text input_text output_text reasoning_text summary_text message reasoning function_call "
    "function_call_output item_reference id name namespace arguments call_id output user assistant system developer "
    "phase commentary final_answer tools parameters tool_choice auto required allowed_tools function mode format "
    "json_schema json_object schema effort summary include store background truncation disabled instructions"
).split()
PATH = r"[a-z_]+[a-z_.0-9\[\]]*: [^ ]"
TOOL: Object = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
SPACE: Object = {
    "type": "namespace",
    "name": "space",
    "description": "",
    "tools": [{"type": "function", "name": "find"}],
}


def item(kind: str, **fields: Json) -> Json:
    return {"type": kind, **fields}


def ask(*items: Json, **fields: Json) -> Read:
    return read({"input": list(items) or "Hi", **fields}, Asked(), Limits())


@st.composite
def good_bodies(draw: st.DrawFn) -> Object:
    """Bodies that are accepted."""
    items: list[Json] = [{"role": "user", "content": draw(words)}]
    for index in range(draw(st.integers(0, 3))):
        thought: Json = [item("reasoning_text", text=draw(words))]
        items += [item("reasoning", id="rs_1", summary=[], content=thought)] * draw(st.integers(0, 2))
        phase = draw(st.sampled_from(["commentary", "final_answer", None]))
        content: Json = [item("output_text", text=draw(words), annotations=[])]
        items += [item("message", role="assistant", content=content, phase=phase)] * draw(st.integers(0, 2))
        items.append(item("function_call", call_id=f"c{index}", name="add", arguments='{"a": [1]}'))
        items.append(item("function_call_output", call_id=f"c{index}", output=draw(words)))
    extra: Object = {"instructions": draw(words), "reasoning": {"effort": "low"}, "truncation": "disabled"}
    extra["tool_choice"] = draw(
        st.sampled_from(["required", {"type": "function", "name": "add"}, {"type": "allowed_tools", "mode": "auto",
                        "tools": [{"type": "function", "name": "add"}]}])
    )  # fmt: skip
    extra["text"] = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    extra["include"] = ["message.output_text.logprobs"]
    kept = {name: value for name, value in extra.items() if draw(st.booleans())}
    return {"input": items, "tools": [TOOL, SPACE], **kept}


@given(good_bodies())
def test_good_bodies_are_read(good: Object) -> None:
    found = read(good, Asked(), Limits())
    assert found.unknown == ()
    assert len(check_messages(found.turn.messages)) >= 1


@given(spoiled(good_bodies(), *NAMES))
def test_any_body_is_read_or_refused_with_a_sentence(spoilt: Object) -> None:
    try:
        logprobs_asked({**spoilt, "top_logprobs": 0})
        found = read(spoilt, Asked(), Limits())
    except ValueError as refused:
        message = str(refused)
        assert re.match(PATH, message), message
        return
    check_messages(found.turn.messages)
    check_tools(found.turn.tools)


def run(events: list[TurnEvent], state: State | None = None) -> list[Object]:
    response: Object = {"id": "resp_1", "status": "in_progress", "output": []}
    state, stream = responses_out.start(state or State(response, "k", frozenset(("space",))))
    for event in events:
        state, more = responses_out.push(state, event)
        stream += more
    return stream


def simple(events: list[TurnEvent]) -> list[tuple[str, str]]:
    """Runs of text of one kind, and calls."""
    heard = [event for event in events if isinstance(event, Called) or (isinstance(event, Said) and event.text)]
    found = list[tuple[str, str]]()
    for kind, group in groupby(heard, lambda e: e.kind if isinstance(e, Said) else f"call {e.number}"):
        found.append((kind, "".join(e.text if isinstance(e, Said) else e.name + e.arguments for e in group)))
    return found


def shown(output: Any, calls: int = 0) -> list[tuple[str, str]]:
    """The same of output items."""
    found = list[tuple[str, str]]()
    kinds = {"commentary": "commentary", "final_answer": "answer"}
    for one in output:
        if one["type"] == "function_call":
            name = f"{one['namespace']}.{one['name']}" if "namespace" in one else one["name"]
            found.append((f"call {calls}", name + one["arguments"]))
            calls += 1
        else:
            text = "".join(part["text"] for part in one["content"])
            found.append(("reasoning" if one["type"] == "reasoning" else kinds[one["phase"]], text))
    return found


@given(turns())
def test_the_last_event_carries_what_was_said(events: list[TurnEvent]) -> None:
    stream = cast("list[Any]", run(events))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    output = stream[-1]["response"]["output"]
    assert shown(output) == simple(events)
    assert output == [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert len({one["id"] for one in output}) == len(output)


@given(turns())
def test_deltas_add_up_to_their_items(events: list[TurnEvent]) -> None:
    """Every item is added, filled and finished before the next; done repeats what the deltas said."""
    opened, text = None, ""
    for event in cast("list[Any]", run(events))[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert opened is None
            opened, text = event["item"], ""
            assert opened["status"] == "in_progress"
            assert opened.get("arguments", "") == "".join(part["text"] for part in opened.get("content", [])) == ""
        elif kind == "output_item.done":
            assert opened is not None
            assert opened["id"] == event["item"]["id"]
            opened = None
        else:
            assert opened is not None
            assert event["item_id"] == opened["id"]
            text += event.get("delta", "")
            if kind.endswith(".done") and "part" not in event:
                assert event.get("text", event.get("arguments")) == text
    assert opened is None


@given(turns())
def test_an_answer_can_be_sent_back(events: list[TurnEvent]) -> None:
    output = cast("Any", run(events)[-1])["response"]["output"]
    called = [event for event in events if isinstance(event, Called)]
    results = [item("function_call_output", call_id=call.id, output="ok") for call in called]
    found = ask({"role": "user", "content": "Hi"}, *output, *results)
    assert found.unknown == ()
    messages = cast("list[Any]", found.turn.messages)
    mine = [message for message in messages if message["role"] == "assistant"]
    reasoning = "".join(event.text for event in events if isinstance(event, Said) and event.kind == "reasoning")
    assert "".join(message.get("reasoning", "") for message in mine).replace("\n", "") == reasoning.replace("\n", "")
    text = "".join(event.text for event in events if isinstance(event, Said) and event.kind != "reasoning")
    assert "".join(message["content"] or "" for message in mine) == text
    calls = [call["function"] for message in mine for call in message.get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in calls] == [(c.name, json.loads(c.arguments)) for c in called]


@pytest.mark.parametrize(
    ("finish", "event", "status"),
    [
        ("stop", "response.completed", "completed"),
        ("length", "response.incomplete", "incomplete"),
        ("error", "response.failed", "failed"),
        ("abort", "response.failed", "cancelled"),
    ],
)
def test_how_a_turn_ended(finish: Any, event: str, status: str) -> None:
    last = cast("Any", run([said("answer", "x"), Ended(0, finish, "why", None, Counts(5, 2, 4, 3), ())])[-1])
    assert (last["type"], last["response"]["status"]) == (event, status)
    assert last["response"]["output"][0]["status"] == ("completed" if finish == "stop" else "incomplete")
    assert last["response"].get("incomplete_details") == (
        {"reason": "max_output_tokens"} if finish == "length" else None
    )
    assert (last["response"].get("error") or {}).get("message") == ("why" if finish == "error" else None)
    assert last["response"]["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 9,
    }


def test_log_probabilities_belong_to_messages() -> None:
    tokenizer = nano()[1]
    token = tokens_of("é")[0]
    raw = tokenizer.token_bytes(token)
    piece = Piece(token, raw, Logprob(-0.25, 1, ((token, -0.25), (7, float("-inf")))))
    state = State({"id": "r"}, "k", show=partial(responses_out.logprob, tokenizer))
    events: list[TurnEvent] = [Said(0, "reasoning", "a", (piece,)), Said(0, "answer", "b", (piece,))]
    stream = cast("list[Any]", run([*events, Ended(0, "stop", "", None, EMPTY, ())], state))
    text = raw.decode(errors="replace")
    other = tokenizer.token_bytes(7)
    expected = {
        "token": text,
        "bytes": list(raw),
        "logprob": -0.25,
        "top_logprobs": [
            {"token": text, "bytes": list(raw), "logprob": -0.25},
            {"token": other.decode(errors="replace"), "bytes": list(other), "logprob": -9999.0},
        ],
    }
    deltas = [event.get("logprobs") for event in stream if event["type"].endswith(".delta")]
    assert deltas == [None, [expected]]
    output = stream[-1]["response"]["output"]
    assert [one["content"][0].get("logprobs") for one in output] == [None, [expected]]


def test_a_conversation_becomes_chat_messages() -> None:
    found = ask(
        {"role": "developer", "content": "D"},
        item("message", role="user", content=[item("input_text", text="a"), item("input_text", text="b")]),
        item("reasoning", id="r", summary=[], content=[item("reasoning_text", text="T1")]),
        item("reasoning", id="r", summary=[item("summary_text", text="T2")]),
        item("message", role="assistant", content="C", phase="commentary"),
        item("function_call", call_id="c1", name="find", namespace="space", arguments='{"x": 1}'),
        item("function_call", call_id="c2", name="add", arguments=""),
        item("function_call_output", call_id="c2", output=[item("input_text", text="3")]),
        item("message", role="assistant", content=[item("output_text", text="A")], phase="final_answer"),
        item("function_call", call_id="c3", name="add", arguments="{}"),
        instructions="I",
    )

    def call(id: str, name: str, **arguments: Json) -> Json:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    first: Object = {"role": "assistant", "content": "C", "reasoning": "T1\nT2", "recipient": "commentary"}
    assert found.turn.messages == [
        {"role": "system", "content": "I"},
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "ab"},
        {**first, "tool_calls": [call("c1", "space.find", x=1), call("c2", "add")]},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "A", "recipient": "user"},
        {"role": "assistant", "content": None, "tool_calls": [call("c3", "add")]},
    ]


ALLOWED: Json = [{"type": "function", "name": "find", "namespace": "space"}]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["add", "space"]),
        ("none", "none", ["add", "space"]),
        ("required", "required", ["add", "space"]),
        ({"type": "function", "name": "add"}, Named("add"), ["add", "space"]),
        ({"type": "function", "name": "find", "namespace": "space"}, Named("space.find"), ["add", "space"]),
        ({"type": "allowed_tools", "mode": "required", "tools": ALLOWED}, "required", ["space"]),
    ],
)
def test_tool_choices(choice: Json, expected: object, names: list[str]) -> None:
    turn = ask(tools=[TOOL, SPACE], tool_choice=choice).turn
    tools = cast("list[Any]", turn.tools)
    assert turn.tool_choice == expected
    assert [tool["name"] if tool["type"] == "namespace" else tool["function"]["name"] for tool in tools] == names


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Final("json_object")),
        ({"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": True}, Final("json_schema", {"a": 1})),
    ],
)
def test_formats(form: Json, expected: Final | None) -> None:
    assert ask(text={"format": form}).turn.final == expected


@pytest.mark.parametrize(
    ("top", "include", "expected"),
    [(0, [], None), (3, [], 3), (0, ["message.output_text.logprobs"], 0), (2, ["message.output_text.logprobs"], 2)],
)
def test_log_probabilities_are_asked_for(top: int, include: list[Json], expected: int | None) -> None:
    assert logprobs_asked({"top_logprobs": top, "include": include}) == expected


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [item("item_reference", id="x")]}, "input[0].type"),
        ({"input": [item("web_search_call")]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [item("input_image", image_url="x")]}]}, "input[0].content[0].type"),
        ({"input": [item("function_call", call_id="c", name="f", arguments="[]")]}, "input[0].arguments"),
        ({"input": [item("function_call", call_id="c", name="f", arguments='{"a": NaN}')]}, "input[0].arguments"),
        ({"input": [item("function_call", call_id="c", name="f", arguments='{"a":' * 500)]}, "input[0].arguments"),
        ({"input": [item("function_call", call_id="c", name="f", arguments='["\\ud800"]')]}, "input[0].arguments"),
        ({"input": [item("function_call_output", call_id="c", output="x")]}, "input[0].call_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [cast("Json", TOOL)] * 257}, "tools: at most 256"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]}, "tool_choice.tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: Object, path: str) -> None:
    with pytest.raises(ValueError, match="^" + path.replace("[", r"\[").replace(".", r"\.")):
        read({"input": "Hi", **fields}, Asked(), Limits())


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
)
def test_what_has_no_effect_is_said(fields: Object, begin: str) -> None:
    (warning,) = ask(**fields).warnings
    assert warning.startswith(f"{begin}: ")


def test_unknown_fields_are_found_wherever_they_stand() -> None:
    content: Json = [item("input_text", text="Hi", colour="red")]
    found = ask({"role": "user", "content": content, "mood": 1}, tools=[{**TOOL, "price": 3}], text={"size": 2})
    assert found.unknown == ("tools[0].price", "input[0].mood", "input[0].content[0].colour", "text.size")


def test_what_was_meant_for_a_tool_is_not_lost() -> None:
    last = cast("Any", run([Ended(0, "stop", "", None, EMPTY, (), ("add 1",))])[-1])
    assert last["response"]["damaged_tool_calls"] == ["add 1"]
