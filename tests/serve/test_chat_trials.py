"""Reports of real users as trials of the chat route, under their numbers: whole and streamed always tell the same."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.jobs import Done, Job
from muse_fn.serve.reply import begin
from muse_fn.serve.turns import Called
from tests.serve.asking import HELLO, answer, ask, both, choices, post, refused, stream
from tests.serve.cutting import control, cut, embedded, end_of, events_of, raw_ids, runs
from tests.serve.script import ScriptedEngine, make_service, nano
from tests.turns import TOOLS, call, to, tool

ANSWERING = " to=user<|message|>"
INTRO = {"get_weather": {"city": "Oslo", "days": 3}, "write_file": {"path": "a", "content": "b"}}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    found = choice["message"].get("tool_calls", ())
    return [(c["function"]["name"], strict(c["function"]["arguments"])) for c in found]


def strict(text: str) -> Any:
    """JSON as every client reads it: no NaN, no infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def said_alike(text: str, **options: Any) -> list[tuple[str, str]]:
    """What a turn says, the same for a cut at every place, for single bytes, and for tokens drawn at random."""
    state = begin(embedded(), request="r", tools=TOOLS, **options)
    whole = events_of(state, embedded().encode_pieces(embedded().split_spelled(text)))
    ways = [cut(text), *(cut(text, random.Random(seed), 9) for seed in range(6))]
    ways += [halves(text, at) for at in range(1, len(text))]
    for ids in ways:
        events = events_of(state, ids)
        assert runs(events) == runs(whole)
        assert end_of(events).finish == end_of(whole).finish
        assert end_of(events).damaged == end_of(whole).damaged
    return [(kind, text.partition(" ")[2].partition(" ")[2] if kind == "call" else text) for kind, text in runs(whole)]


def halves(text: str, at: int) -> list[int]:
    """The turn with one more cut between two tokens; a marker is never cut."""
    ids, place = list[int](), 0
    for piece in embedded().split_spelled(text):
        written = piece.text if hasattr(piece, "text") else ""  # type: ignore[union-attr]
        if not written:
            ids += embedded().encode_pieces([piece])
            place += len(piece.name)  # type: ignore[union-attr]
            continue
        inner = min(max(at - place, 0), len(written))
        ids += [*embedded().encode(written[:inner]), *embedded().encode(written[inner:])]
        place += len(written)
    return ids


# 1. A character split over tokens


@pytest.mark.parametrize("text", ["ď", "👨‍👩‍👧‍👦", "한국어", "e\u0301ď👍x"])
def test_1_split_characters_come_whole(text: str) -> None:
    assert said_alike(ANSWERING + text + "<|eot|>") == [("answer", text)]
    ids = cut(ANSWERING + text + "<|eot|>")
    choice = answer(ids, logprobs=True)
    assert choice["message"]["content"] == text
    assert [bytes(t["bytes"]) for t in choice["logprobs"]["content"]] == [embedded().token_bytes(i) for i in ids]
    assert answer(cut(ANSWERING + text + "END more<|eot|>"), stop=["END"])["message"]["content"] == text


def test_1_a_character_cut_off_is_one_replacement_at_the_very_end() -> None:
    ids = [*cut(ANSWERING + "ok "), *raw_ids("👍".encode()[:2])]
    assert answer(ids)["message"]["content"] == "ok \ufffd"
    texts = [c["choices"][0]["delta"].get("content", "") for c in stream(ScriptedEngine(ids)).events]
    (last,) = [text for text in texts if "\ufffd" in text]
    assert last in ("\ufffd", " \ufffd")  # the space may have begun a header
    assert [text for text in texts if text][-1] == last


# 2. A stop string over several chunks


def test_2_stop_strings() -> None:
    text = ANSWERING + "ABCDEFGHIJK<|eot|>"
    assert said_alike(text, stops=("DEFGHIJ",)) == [("answer", "ABC")]
    choice = answer(cut(text), stop=["DEFGHIJ"])
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ABC", "stop", "DEFGHIJ")
    assert said_alike(ANSWERING + "DEFGHIX<|eot|>", stops=("DEFGHIJ",)) == [("answer", "DEFGHIX")]
    assert answer(cut(ANSWERING + "DEFGHIX<|eot|>"), stop="DEFGHIJ")["message"]["content"] == "DEFGHIX"
    assert said_alike(text, stops=("DEFG", "DEF")) == [("answer", "ABC")]
    assert answer(cut(text), stop=["DEFG", "DEF"])["stop_reason"] == "DEF"
    assert answer(cut(text), stop=["HI", "EF"], include_stop_str_in_output=True)["message"]["content"] == "ABCDEF"


# 4. The usage chunk


@pytest.mark.parametrize("ids", [cut(ANSWERING + "Hi<|eot|>"), [control("<|eot|>")]], ids=["said", "empty"])
@pytest.mark.parametrize("n", [1, 2])
def test_4_usage_comes_once_and_only_when_asked_for(ids: list[int], n: int) -> None:
    engine = ScriptedEngine(ids)
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        plain = stream(engine, n=n, **options)
        assert plain.done
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain.events)
    counted = stream(engine, n=n, stream_options={"include_usage": True})
    *chunks, last = counted.events
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == ask(engine, n=n)["usage"]
    assert last["usage"]["completion_tokens"] == n * len(ids)


def test_4_running_usage_grows_to_the_last() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(ScriptedEngine(cut(ANSWERING + "Hi<|eot|>")), stream_options=options).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == len(cut(ANSWERING + "Hi<|eot|>"))


def test_4_options_of_a_stream_need_one() -> None:
    response = post(ScriptedEngine(), {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


# 5. A failure hidden in a stream of status 200


def test_5_what_is_known_before_the_first_token_is_a_status() -> None:
    engine = ScriptedEngine(cut(ANSWERING + "Hi<|eot|>"))
    assert refused(engine, messages=[{"role": "user", "content": "word " * 3000}])["status"] == 400
    assert refused(engine, model="unknown")["status"] == 404
    for step in (RuntimeError("boom"), Done("error", "a row of logits is not finite")):
        for streams in (False, True):
            response = post(ScriptedEngine([step]), {"messages": HELLO, "stream": streams})
            assert response.status_code == 500
            assert response.json()["error"]["message"]
            assert "boom" not in response.text


@pytest.mark.parametrize("step", [RuntimeError("boom"), Done("error", "a row of logits is not finite")])
def test_5_a_later_failure_is_one_error_event_and_no_success(step: Any) -> None:
    ids = cut(ANSWERING + "Hi")
    streamed = stream(ScriptedEngine([*ids, step]))
    assert not streamed.done
    *chunks, last = streamed.events
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert last["error"]["message"]
    assert "boom" not in str(last)
    assert post(ScriptedEngine([*ids, step]), {"messages": HELLO}).status_code == 500


# 6. Part of a marker shown as text

TAGS = (
    "<atem:function_calls>",
    '<atem:invoke name="lookup">',
    '<atem:parameter name="city">',
    "</atem:parameter>",
    "</atem:invoke>",
    "</atem:function_calls>",
)
WHOLE = to("lookup") + call("lookup", city="Oslo")


def cuts_of_tags() -> Iterator[str]:
    """The call up to every character of each of its tags."""
    for tag in TAGS:
        start = WHOLE.index(tag)
        yield from (WHOLE[: start + size] for size in range(1, len(tag) + 1))


def test_6_no_part_of_a_tag_is_content_wherever_the_output_ends() -> None:
    done = WHOLE.index("</atem:invoke>") + len("</atem:invoke>")
    for text in cuts_of_tags():
        for prefix in (" to=self<|message|>hm<|eom|>", ""):
            state = begin(embedded(), tools=TOOLS)
            events = events_of(state, cut(prefix + (text if prefix else text[len("<|start|>assistant") :])), "length")
            assert [kind for kind, _ in runs(events) if kind not in ("reasoning", "call")] == []
            assert sum(isinstance(event, Called) for event in events) == (len(text) >= done)
            assert end_of(events).finish == "length"


def test_6_a_tag_cut_anywhere_and_continued_is_a_call() -> None:
    found = said_alike(" to=self<|message|>hm<|eom|>" + WHOLE + "<|eot|>")
    assert found == [("reasoning", "hm"), ("call", 'lookup {"city": "Oslo"}')]


def test_6_tags_without_framing_are_no_content_either() -> None:
    """Framing is lost, so the whole text is searched for calls."""
    for text in cuts_of_tags():
        bare = text[len(to("lookup")) :]
        events = events_of(begin(embedded(), tools=TOOLS), cut("Look: " + bare), "length")
        said = [found for kind, found in runs(events) if kind == "answer"]
        assert said in (["Look: "], ["Look: <"] if bare == "<" else ["Look: "])


def test_6_prose_passes_without_delay() -> None:
    text = "the <atem: prefix and a < b"
    assert said_alike(ANSWERING + text + "<|eot|>") == [("answer", text)]
    events = stream(ScriptedEngine(cut(ANSWERING + text))).events
    shown = [chunk["choices"][0]["delta"].get("content") for chunk in events]
    assert "".join(part for part in shown if part) == text
    assert sum(part is not None for part in shown) > len(text) // 2


# 8. A parameter's tag swallowed, its name glued to the invoke's


def test_8_glued_names_are_repaired_only_for_registered_tools() -> None:
    def glued(name: str) -> str:
        return to("read") + f'<atem:function_calls>\n<atem:invoke name="{name}">a.txt</atem:parameter>\n</atem:invoke>'

    def at(text: str) -> dict[str, Any]:
        said_alike(text[len("<|start|>assistant") :])
        return answer(cut(text[len("<|start|>assistant") :] + "<|eot|>"))

    assert calls_of(at(glued("read.filePath"))) == [("read", {"filePath": "a.txt"})]
    for name in ("other.filePath", "read.path", "filePath", "xread.filePath"):
        choice = at(glued(name))
        assert calls_of(choice) == []
        assert choice["finish_reason"] == "stop"
        assert name in choice["damaged_tool_calls"][0]
    assert calls_of(at(to("read") + call("read.read", filePath="b"))) == [("read", {"filePath": "b"})]


# 9. A boundary of channels damages calls


def test_9_channel_boundaries() -> None:
    full = call("write_file", path="a", content="b")
    broken = (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="c'
    )
    text = broken + "<|eom|>" + to("write_file") + full + "<|eot|>"
    said_alike(text)
    choice = answer(cut(text))
    assert calls_of(choice) == [("write_file", {"path": "a", "content": "b"})]
    assert (
        stream(ScriptedEngine(cut(text)), tools=TOOLS).events[-2]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    )
    assert len(choice["damaged_tool_calls"]) == 1

    text = " to=self<|message|>thinking to=noargs<|message|>" + call("noargs") + "<|eot|>"
    assert said_alike(text) == [("reasoning", "thinking"), ("call", "noargs {}")]
    choice = answer(cut(text))
    assert (choice["message"]["reasoning"], calls_of(choice)) == ("thinking", [("noargs", {})])

    text = " to=noargs<|message|>" + call("noargs") + to("user") + "visible<|eot|>"
    assert said_alike(text) == [("call", "noargs {}"), ("answer", "visible")]
    choice = answer(cut(text))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("visible", "tool_calls")


def test_9_parallel_calls_keep_order_and_ids() -> None:
    first, second = call("get_weather", city="Oslo", days=3), call("write_file", path="a", content="b")
    one_block = " to=get_weather<|message|>" + first.removesuffix("\n</atem:function_calls>")
    one_block += second.removeprefix("<atem:function_calls>") + "<|eot|>"
    two = " to=get_weather<|message|>" + first + "<|eom|>" + to("write_file") + second + "<|eot|>"
    for text in (one_block, two):
        said_alike(text)
        choice = answer(cut(text))
        assert calls_of(choice) == list(INTRO.items())
        assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2


# 11. A call cut by max_tokens


def test_11_a_call_cut_by_the_budget() -> None:
    text = (
        " to=self<|message|>so<|eom|>" + to("add") + call("add", a=1, b=2) + "<|eom|>" + to("noargs") + call("noargs")
    )
    ids = [*cut(text, random.Random(3), 9), control("<|eot|>")]
    replies = list[Any]()
    for budget in range(1, len(ids) + 2):
        choice = answer(ids, max_tokens=budget)
        assert choice["finish_reason"] == ("tool_calls" if budget >= len(ids) else "length")
        assert all(isinstance(arguments, dict) for _, arguments in calls_of(choice))
        assert "atem" not in (choice["message"]["content"] or "")
        message = choice["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message.get("tool_calls", ())]
        if (message, results) not in replies:
            replies.append((message, results))
            assert ask(ScriptedEngine(ids), tools=TOOLS, messages=[*HELLO, message, *results])
    assert [len(results) for _, results in replies][-1] == 2


# 12. required without a call; the table of finish reasons (see also test_reply.test_the_finish_table)


def test_12_never_tool_calls_without_a_call() -> None:
    broken = " to=add<|message|>" + call("add", a=1)[:-30]
    for text in (ANSWERING + "Hello", broken, " to=add<|message|>", " to=self<|message|>add it", ""):
        choice = answer([*cut(text), control("<|eot|>")])
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_12_choices_that_cannot_be_met_are_refused() -> None:
    engine = ScriptedEngine()
    named = {"type": "function", "function": {"name": "undeclared"}}
    assert refused(engine, tools=TOOLS, tool_choice=named)["param"] == "tool_choice"
    assert refused(engine, tool_choice="required")["param"] == "tool_choice"


# 13. Odd headers

ODD = [
    " to=functions.web-browsing<|message|>x",
    " to=<|message|>x",
    " to=a b<|message|>x",
    " to=self extra<|message|>x",
    "<|message|>x<|message|>y",
    ANSWERING + "x<|message|>y",
    " to=user",
    " to=user<|message|>",
    "<|start|>system<|message|>x<|eot|>" + to("user") + "y",
    "garbage before" + to("user") + "x",
    "<|start|><|start|>",
    "<|eom|><|eom|>",
    "<|begin_of_text|>x<|eot|>",
]


@pytest.mark.parametrize("text", ODD)
def test_13_odd_headers(text: str) -> None:
    found = said_alike(text)
    assert not any("<|" in said for _, said in found)
    for end in ("<|eot|>", ""):
        answer(cut(text + end))


def test_13_random_tokens_never_fail() -> None:
    """Seeds 0 to 999 as events; some of them over HTTP, whole and streamed."""
    tokenizer = embedded()
    frames = [*tokenizer.names, *cut(' to=self user add\n</atem:invoke><atem:invoke name="add">')]
    for seed in range(1000):
        draw = random.Random(seed)
        ids = [draw.choice(frames) if draw.random() < 0.5 else draw.randrange(len(tokenizer)) for _ in range(60)]
        events = events_of(begin(tokenizer, tools=TOOLS), ids)
        assert [p.token for event in events for p in event.pieces] == ids
        if seed % 40 == 0:
            answer(ids, logprobs=True, return_token_ids=True)


# 16. Names of the reasoning, empty content, stop strings in the reasoning


def test_16_reasoning() -> None:
    text = " to=self<|message|>is it 9.8 or 9.11?<|eom|>" + to("user") + "It is 9.8 of them<|eot|>"
    choice = answer(cut(text), stop=["9.8"])
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "is it 9.8 or 9.11?"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is ", "stop")
    short = both(ScriptedEngine(cut(text)), max_tokens=16)
    (choice,) = short["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    head = len(cut(" to=self<|message|>"))
    assert short["usage"]["completion_tokens_details"]["reasoning_tokens"] == 16 - head


def test_16_history_may_have_either_name() -> None:
    engine = ScriptedEngine(cut(ANSWERING + "ok<|eot|>"))
    for fields in ({"reasoning": "so"}, {"reasoning_content": "so"}, {"reasoning": "so", "reasoning_content": "so"}):
        ask(engine, messages=[*HELLO, {"role": "assistant", "content": "x", **fields}, *HELLO])
    assert len({job.ids for job in engine.jobs}) == 1
    assert "to=self<|message|>so<|eom|>" in embedded().decode(engine.jobs[0].ids)


# 31. Exactly at the window


def prompt_of(length: int) -> list[dict[str, Any]]:
    """Messages whose prompt has so many tokens."""
    for size in range(1, 200):
        messages = [{"role": "user", "content": "\x00" * size}]
        ids = ask(ScriptedEngine([]), messages=messages, return_token_ids=True)["prompt_token_ids"]
        if len(ids) == length:
            return messages
    raise AssertionError(length)


def test_31_at_the_window() -> None:
    def at(window: int) -> tuple[ScriptedEngine, Any]:
        engine = ScriptedEngine(cut(ANSWERING + "long " * 50))
        return engine, make_service(engine, config=replace(nano()[0], max_positions=window))

    for length in (126, 127, 128, 129):
        messages = prompt_of(length)
        for budget in (None, 1, 2):
            engine, service = at(128)
            if length + (budget or 1) > 128:
                error = refused(service, messages=messages, max_tokens=budget)
                message = error["message"]
                assert error["code"] == "context_length_exceeded"
                assert str(length) in message
                assert "128" in message
                assert length >= 128 or f"max_tokens is {budget}" in message
                continue
            whole = both(service, messages=messages, max_tokens=budget)
            assert whole["usage"]["completion_tokens"] == (budget or 128 - length)
            assert whole["choices"][0]["finish_reason"] == "length"
            assert engine.jobs[0].max_new == (budget or 128 - length)
    message = refused(at(128)[1], messages=prompt_of(100), max_tokens=29)["message"]
    assert all(number in message for number in ("100", "29", "129", "128", "28"))


# 45. Wrong shapes

WRONG: list[dict[str, Any]] = [
    {"messages": 5},
    {"messages": []},
    {"messages": [None]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    {"tools": {}},
    {"tools": [5]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "x"},
    {"response_format": 5},
    {"response_format": {"type": "json_schema"}},
    *({"max_tokens": value} for value in (-1, 0, 1e30, "5", True, [])),
    *({"temperature": value} for value in (-1, 3, "1", True)),
    {"top_p": 0},
    {"stop": [""]},
    {"stop": 5},
    {"n": 0},
    {"n": 10**6},
    {"logit_bias": {"a": 1}},
    {"stream_options": 5},
    {"chat_template_kwargs": {"now": {"deep": [[[[]]] * 3]}}, "reasoning_effort": 5},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: json.dumps(fields)[:60])
def test_45_wrong_shapes_are_named(fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    error = refused(engine, **fields)
    assert error["status"] == 400
    assert error["message"]
    assert error["param"].startswith(tuple(fields))
    assert engine.jobs == []


def test_45_stream_must_be_true_or_false() -> None:
    response = post(ScriptedEngine(), {"messages": HELLO, "stream": "yes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


def test_45_wrong_bodies() -> None:
    for raw in (b"", b"[]", b"5", b'{"messages": ', b"[" * 10000, b'{"a": NaN}', b'{"stop": "a", "stop": "b"}'):
        response = post(ScriptedEngine(), raw)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


# 47. Half of a surrogate pair, bad UTF-8

HALF = "\ud83d"
HALVES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": HALF}]},
    "messages[0].content": {"messages": [{"role": "system", "content": "a" + HALF}, *HELLO]},
    "messages[0].content[0].text": {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    "messages[1]": {"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": HALF}]},
    "tools": {"tools": [tool("x" + HALF)]},
    "stop": {"stop": [HALF]},
    "logit_bias": {"logit_bias": {HALF: 1}},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [HALF]}}}
    },
    "model": {"model": HALF},
    "chat_template_kwargs": {"chat_template_kwargs": {"x": HALF}},
}


@pytest.mark.parametrize("param", HALVES)
def test_47_halves_of_pairs_are_refused(param: str) -> None:
    error = refused(ScriptedEngine(), **HALVES[param])
    assert error["status"] in (400, 404)
    assert error["param"].startswith(param)


def test_47_bad_bytes_are_refused_and_good_pairs_pass() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    for raw in (
        b"\xff" + body,
        b"\xef\xbb\xbf" + body,
        body.replace(b"Hello", b"\xff"),
        body.replace(b"Hello", b"\x00"),
    ):
        assert post(ScriptedEngine(), raw).status_code == 400
    engine = ScriptedEngine(cut(ANSWERING + "ok<|eot|>"))
    for text in ("\U0001f600", "\x00", "\ufeff"):
        ask(engine, messages=[{"role": "user", "content": text}])
        assert text in embedded().decode(engine.jobs[-1].ids)


# Traps of decoding arguments


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 1000 + "]" * 1000, '{"a": NaN}', '"\\ud83d"'])
def test_values_that_are_no_json_stay_text(value: str) -> None:
    engine = ScriptedEngine(cut(" to=add<|message|>" + call("add", a=value) + "<|eot|>"))
    roomy = make_service(engine, config=replace(nano()[0], max_positions=8192))
    (choice,) = both(roomy, tools=TOOLS)["choices"]
    assert calls_of(choice) == [("add", {"a": value})]


def test_optional_strings_stay_strings_and_the_last_of_a_key_counts() -> None:
    tools = [tool("f", a={"anyOf": [{"type": "string"}, {"type": "null"}]}, b={"type": ["string", "null"]}, c={})]
    twice = call("f", a=12345, b=6, c=7).replace(
        "</atem:invoke>", '<atem:parameter name="c">8</atem:parameter></atem:invoke>'
    )
    (choice,) = both(ScriptedEngine(cut(" to=f<|message|>" + twice + "<|eot|>")), tools=tools)["choices"]
    assert calls_of(choice) == [("f", {"a": "12345", "b": "6", "c": 8})]


numbers = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(numbers.filter(lambda value: "</atem:" not in json.dumps(value) and not isinstance(value, str)))
def test_json_arguments_come_as_they_were_written(value: Any) -> None:
    text = " to=f<|message|>" + call("f", x=json.dumps(value)) + "<|eot|>"
    (choice,) = both(ScriptedEngine(cut(text)), tools=[tool("f", x={})])["choices"]
    assert calls_of(choice) == [("f", {"x": value})]


def by_prompt(answers: dict[str, list[int]]) -> Callable[[Job], list[int]]:
    """A script that answers by what the prompt says."""
    return lambda job: next(ids for word, ids in answers.items() if word in embedded().decode(job.ids))


def test_a_whole_conversation_with_tools_can_be_sent_back() -> None:
    calling = cut(" to=self<|message|>so<|eom|>" + to("add") + call("add", a=1, b=2) + "<|eot|>")
    engine = ScriptedEngine(by_prompt({"tool_output": cut(ANSWERING + "It is 3<|eot|>"), "Hello": calling}))
    first = choices(both(engine, tools=TOOLS))[0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    second = choices(both(engine, tools=TOOLS, messages=[*HELLO, first, result]))[0]
    assert (second["message"]["content"], second["finish_reason"]) == ("It is 3", "stop")
    written = embedded().decode(engine.jobs[-1].ids)
    assert "to=self<|message|>so<|eom|>" in written
    assert '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>' in written
    assert '<tool_output name="add">\n3\n</tool_output>' in written
