"""The official Anthropic client against a real server, whole and as a stream; and the same by hand where it hides."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve import messages_api
from muse_fn.serve.app import make_app
from muse_fn.serve.fields import Object
from muse_fn.serve.jobs import Done, Refused
from tests.serve.loopback import PATIENCE, answers, calls, comments, serving, thinks
from tests.serve.script import ScriptedEngine, make_service
from tests.serve.test_messages import NAMES, good_bodies
from tests.serve.turn_strategies import spoiled

TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "note": {"type": "string"}}},
}
ASK: Any = {"model": "nano", "max_tokens": 900, "messages": [{"role": "user", "content": "Hi"}]}
EVERYTHING = [*thinks("Hm\u2028é"), *comments("Adding."), *calls("add", a="1", note="\u2028 <b>")]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def address(engine: ScriptedEngine) -> Iterator[str]:
    with serving(make_app(make_service(engine, keys=("secret",)), routes=messages_api.ROUTES)) as url:
        yield url


@pytest.fixture
def client(address: str, engine: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    engine.script, engine.refuses, engine.cached = answers("Hello"), None, 0
    with anthropic.Anthropic(api_key="secret", base_url=address, max_retries=0, timeout=PATIENCE) as made:
        yield made


def create(client: anthropic.Anthropic, **changes: Any) -> Any:
    """A message, or with `stream` the events of one. The client no longer knows all fields of this API."""
    method: Any = client.messages.create
    return method(**{**ASK, **changes})


def post(address: str, **changes: Any) -> httpx.Response:
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    return httpx.post(f"{address}/v1/messages", json={**ASK, **changes}, headers=headers, timeout=PATIENCE)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Names and data of a stream."""
    found = re.findall(r"event: (\S+)\ndata: ([^\n]*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    return [(name, json.loads(data)) for name, data in found]


def test_a_message(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script, engine.cached = [*thinks("Hm"), *answers("Hello é\u2028")], 3
    message = create(client)
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
        {"type": "text", "text": "Hello é\u2028"},
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "nano")
    usage, job = message.usage, engine.jobs[-1]
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(job.ids) - 3, 3)
    assert usage.output_tokens == len(engine.script)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 2


def test_stream_and_whole_are_the_same(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = EVERYTHING
    same: Any = {"x-request-id": "one"}  # ids of calls come of it
    whole = create(client, tools=[TOOL], extra_headers=same)
    with client.messages.stream(**ASK, tools=[TOOL], extra_headers=same) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" in kinds
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in whole.content]
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    call = whole.content[2]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 1, "note": "\u2028 <b>"})


def test_the_client_adds_a_result_and_goes_on(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = EVERYTHING
    first = create(client, tools=[TOOL])
    engine.script = answers("2")
    result: Any = {"type": "tool_result", "tool_use_id": first.content[-1].to_dict()["id"], "content": "two"}
    history: Any = [*ASK["messages"], {"role": "assistant", "content": first.content}]
    second = create(client, messages=[*history, {"role": "user", "content": [result]}], tools=[TOOL])
    assert second.content[0].to_dict() == {"type": "text", "text": "2"}


def test_the_events_of_a_stream(address: str, client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = EVERYTHING
    response = post(address, stream=True, tools=[TOOL])
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]


def test_a_stop_sequence(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = answers("Hello STOP there")
    message = create(client, stop_sequences=["STOP"])
    assert message.content[0].to_dict()["text"] == "Hello "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


def test_max_tokens(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = answers("Hello")
    message = create(client, max_tokens=4)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 4)


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    fields: Any = {"model": "nano", "messages": ASK["messages"], "tools": [TOOL], "system": "Be brief."}
    counted = client.messages.count_tokens(**fields)
    message = create(client, **fields, max_tokens=9)
    assert counted.input_tokens == message.usage.input_tokens == len(engine.jobs[-1].ids)


def test_sampling_reaches_the_engine(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    create(client, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11})
    sampling = engine.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 11)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": 5}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"container": "c"}, "container"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_mistakes_are_told_in_the_api_s_own_shape(
    address: str, client: anthropic.Anthropic, changes: dict[str, Any], field: str, streams: bool
) -> None:
    response = post(address, **{"stream": streams, **changes})
    found = response.json()
    assert response.status_code == 400
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert found["error"]["message"].startswith(field)


def test_the_client_knows_our_errors(address: str, client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        create(client, model="claude")
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))
    engine.refuses = Refused("full", 429, 7)
    with pytest.raises(anthropic.RateLimitError) as refused:
        create(client)
    assert refused.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("done", "status"), [(Done("error", "broken"), 500), (Done("abort", "by request"), 409)])
def test_what_fails_before_the_first_token_has_a_status(
    address: str, client: anthropic.Anthropic, engine: ScriptedEngine, done: Done, status: int, streams: bool
) -> None:
    engine.script = [*tuple[int](), done]
    response = post(address, stream=streams)
    if not streams:
        assert response.status_code == status
    assert done.why in response.text


def test_a_stream_that_fails_ends_with_an_error(
    address: str, client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = [*answers("Hello")[:-1], Done("error", "broken")]
    names = [name for name, _ in events_of(post(address, stream=True).text)]
    assert names[-1] == "error"
    assert "message_delta" not in names
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        list(create(client, stream=True))


def test_unknown_fields_warn_or_are_refused(engine: ScriptedEngine, client: anthropic.Anthropic, address: str) -> None:
    content = [{"type": "text", "text": "Hi", "colour": 1}]
    fields: Any = {"mood": 1, "messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}}
    warnings = post(address, **fields).json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["mood", "messages[0].content[0].colour", "thinking"]
    start = events_of(post(address, **fields, stream=True).text)[0][1]
    assert start["message"]["warnings"] == warnings
    service = replace(make_service(engine), strict=True)
    with serving(make_app(service, routes=messages_api.ROUTES)) as strict:
        assert post(strict, mood=1).status_code == 400
        refused = post(strict, messages=fields["messages"])
    assert (refused.status_code, refused.json()["error"]["message"].partition(":")[0]) == (
        400,
        "messages[0].content[0].colour",
    )


def test_a_message_cut_anywhere_is_the_same_in_both_modes(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    """Trial 11: only whole calls are told, and what was told can be sent back."""
    engine.script = EVERYTHING
    for most in range(1, len(EVERYTHING), 5):
        asked: Any = {**ASK, "max_tokens": most, "tools": [TOOL], "extra_headers": {"x-request-id": "one"}}
        whole = create(client, **asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert streamed.stop_reason == whole.stop_reason == "max_tokens"
        assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
        called = [block for block in whole.content if block.type == "tool_use"]
        assert [block.input for block in called] in ([], [{"a": 1, "note": "\u2028 <b>"}])
        results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"} for block in called]
        history = [*ASK["messages"], {"role": "assistant", "content": whole.content}]
        create(client, messages=[*history, {"role": "user", "content": [*results, {"type": "text", "text": "Go on"}]}])


@given(spoiled(good_bodies(), *NAMES), st.booleans())
def test_no_body_breaks_the_server(spoilt: Object, streams: bool) -> None:
    app = make_app(make_service(ScriptedEngine(answers("Hello"))), routes=messages_api.ROUTES)
    body = json.dumps({"model": "nano", "max_tokens": 9, "stream": streams, **spoilt})

    async def run() -> int:
        transport, headers = httpx.ASGITransport(app), {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            async with asyncio.timeout(PATIENCE):
                return (await client.post("/v1/messages", content=body, headers=headers)).status_code

    assert asyncio.run(run()) < 500
