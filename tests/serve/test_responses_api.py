"""The official OpenAI client against a real server, whole and as a stream; and the same by hand where it hides."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve import responses_api
from muse_fn.serve.app import make_app
from muse_fn.serve.fields import Object
from muse_fn.serve.jobs import Done, Refused
from tests.serve.loopback import PATIENCE, answers, calls, comments, serving, thinks
from tests.serve.script import ScriptedEngine, make_service
from tests.serve.test_responses import NAMES, good_bodies
from tests.serve.turn_strategies import spoiled

PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "number"}, "note": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}
ASK: Any = {"model": "nano", "input": "Hi"}
EVERYTHING = [*thinks("Hm\u2028é"), *comments("Adding."), *calls("add", a="1", note="\u2028 <b>")]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def address(engine: ScriptedEngine) -> Iterator[str]:
    with serving(make_app(make_service(engine, keys=("secret",)), routes=responses_api.ROUTES)) as url:
        yield url


@pytest.fixture
def client(address: str, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.script, engine.refuses, engine.cached = answers("Hello"), None, 0
    with openai.OpenAI(api_key="secret", base_url=f"{address}/v1", max_retries=0, timeout=PATIENCE) as made:
        yield made


def create(client: openai.OpenAI, **changes: Any) -> Any:
    """A response, or with `stream` the events of one."""
    method: Any = client.responses.create
    return method(**{**ASK, **changes})


def post(address: str, **changes: Any) -> httpx.Response:
    headers = {"authorization": "Bearer secret"}
    return httpx.post(f"{address}/v1/responses", json={**ASK, **changes}, headers=headers, timeout=PATIENCE)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Names and data of a stream."""
    found = re.findall(r"event: (\S+)\ndata: ([^\n]*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    return [(name, json.loads(data)) for name, data in found]


def stable(response: Any) -> Any:
    """What two responses to equal requests share: all but ids and times."""
    fields = response.to_dict()
    for entry in (fields, *fields["output"]):
        entry.pop("id")
    return {name: value for name, value in fields.items() if name not in ("created_at", "completed_at")}


def test_a_response(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script, engine.cached = [*thinks("Hm"), *answers("Hello é\u2028")], 3
    response = create(client, instructions="Be brief.", metadata={"a": "b"})
    assert [one.type for one in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].to_dict() == {"type": "reasoning_text", "text": "Hm"}
    assert response.output[1].phase == "final_answer"
    assert response.output_text == "Hello é\u2028"
    assert (response.status, response.model, response.instructions) == ("completed", "nano", "Be brief.")
    assert (response.metadata, response.to_dict()["store"]) == ({"a": "b"}, False)
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(engine.jobs[-1].ids), 3)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(engine.script), 2)


def test_stream_and_whole_are_the_same(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = EVERYTHING
    same: Any = {"x-request-id": "one"}  # ids of calls come of it
    whole = create(client, tools=[TOOL], extra_headers=same)
    events = list(create(client, tools=[TOOL], stream=True, extra_headers=same))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert stable(events[-1].response) == stable(whole)
    assert [one.type for one in whole.output] == ["reasoning", "message", "function_call"]
    call = whole.output[2]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "note": "\u2028 <b>"})
    assert whole.output[1].phase == "commentary"


def test_the_client_s_own_accumulation(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = [*thinks("Hm"), *comments("Well."), *answers("Hello")]
    with client.responses.stream(**ASK) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == "Well.Hello"
    assert [one.type for one in final.output] == ["reasoning", "message", "message"]


def test_the_client_adds_a_result_and_goes_on(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = EVERYTHING
    first = create(client, tools=[TOOL])
    engine.script = answers("2")
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "two"}
    second = create(client, input=[{"role": "user", "content": "Hi"}, *first.output, result], tools=[TOOL])
    assert second.output_text == "2"


def test_the_events_of_a_stream(address: str, client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = [*thinks("H"), *calls("add")]
    response = post(address, stream=True, tools=[TOOL])
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert all(name == data["type"] for name, data in events)
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_max_output_tokens(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = [*thinks("H"), *answers("Hello")]
    response = create(client, max_output_tokens=len(thinks("H")) + 6)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [one.status for one in response.output] == ["completed", "incomplete"]
    events = list(create(client, max_output_tokens=len(thinks("H")) + 6, stream=True))
    assert events[-1].type == "response.incomplete"
    assert stable(events[-1].response) == stable(response)


def test_tokens_are_counted_as_they_are_read(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    fields: Any = {**ASK, "instructions": "Be brief.", "tools": [TOOL]}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.input_tokens == create(client, **fields).usage.input_tokens == len(engine.jobs[-1].ids)


def test_sampling_reaches_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    create(client, temperature=0.5, top_p=0.25, extra_body={"seed": 11, "top_k": 7, "cache_salt": "s"})
    job = engine.jobs[-1]
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 11)
    assert job.salts == (("salt", "s"),)


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities(client: openai.OpenAI, engine: ScriptedEngine, streams: bool) -> None:
    engine.script = [*thinks("H"), *answers("Hi")]
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if streams:
        events = list(create(client, **asked, stream=True))
        found = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    else:
        found = create(client, **asked).output[1].content[0].logprobs
    assert [(one.token, one.logprob) for one in found][-2:] == [("H", -0.5), ("i", -0.5)]
    assert all(len(one.top_logprobs) == 2 for one in found)
    assert create(client).output[1].content[0].logprobs == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [None]}, "input[0]"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"stream": "yes"}, "stream"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_mistakes_name_their_field(
    address: str, client: openai.OpenAI, changes: dict[str, Any], field: str, streams: bool
) -> None:
    response = post(address, **{"stream": streams, **changes})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(field)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_the_client_knows_our_errors(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt"):
        create(client, model="gpt")
    with pytest.raises(openai.AuthenticationError):
        create(client.with_options(api_key="wrong"))
    engine.refuses = Refused("full", 429, 7)
    with pytest.raises(openai.RateLimitError) as refused:
        create(client)
    assert refused.value.response.headers["retry-after"] == "7"


def test_no_response_is_kept(client: openai.OpenAI) -> None:
    made = create(client).id
    for method in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            method(made)
    with pytest.raises(openai.NotFoundError, match="keeps no responses"):
        client.responses.input_items.list(made)


@pytest.mark.parametrize(
    ("done", "status", "told"),
    [(Done("error", "broken"), 500, "failed"), (Done("abort", "by request"), 409, "cancelled")],
)
def test_a_response_that_fails(
    address: str, client: openai.OpenAI, engine: ScriptedEngine, done: Done, status: int, told: str
) -> None:
    engine.script = [*answers("Hello")[:-1], done]
    assert post(address).status_code == status
    last = list(create(client, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", told)
    assert last.response.output[0].status == "incomplete"


def test_unknown_fields_warn_or_are_refused(engine: ScriptedEngine, client: openai.OpenAI, address: str) -> None:
    fields: Any = {
        "mood": 1,
        "input": [{"role": "user", "content": "Hi", "colour": 1}],
        "reasoning": {"summary": "auto"},
    }
    warnings = post(address, **fields).json()["warnings"]
    assert [one.partition(":")[0] for one in warnings] == ["mood", "input[0].colour", "reasoning.summary"]
    assert events_of(post(address, **fields, stream=True).text)[0][1]["response"]["warnings"] == warnings
    service = replace(make_service(engine), strict=True)
    with serving(make_app(service, routes=responses_api.ROUTES)) as strict:
        assert post(strict, mood=1).status_code == 400
        refused = post(strict, input=fields["input"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].colour")


def test_a_response_cut_anywhere_is_the_same_in_both_modes(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """Trial 11: only whole calls are told, and what was told can be sent back."""
    engine.script = EVERYTHING
    for most in range(1, len(EVERYTHING), 5):
        asked: Any = {"max_output_tokens": most, "tools": [TOOL], "extra_headers": {"x-request-id": "one"}}
        whole = create(client, **asked)
        last = list(create(client, **asked, stream=True))[-1]
        assert (whole.status, last.type) == ("incomplete", "response.incomplete")
        assert stable(last.response) == stable(whole)
        called = [one for one in whole.output if one.type == "function_call"]
        assert [json.loads(one.arguments) for one in called] in ([], [{"a": 1, "note": "\u2028 <b>"}])
        results = [{"type": "function_call_output", "call_id": one.call_id, "output": "ok"} for one in called]
        create(client, input=[{"role": "user", "content": "Hi"}, *whole.output, *results])


@given(spoiled(good_bodies(), *NAMES), st.booleans())
def test_no_body_breaks_the_server(spoilt: Object, streams: bool) -> None:
    app = make_app(make_service(ScriptedEngine(answers("Hello"))), routes=responses_api.ROUTES)
    body = json.dumps({"model": "nano", "stream": streams, **spoilt})

    async def run() -> int:
        transport, headers = httpx.ASGITransport(app), {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            async with asyncio.timeout(PATIENCE):
                return (await client.post("/v1/responses", content=body, headers=headers)).status_code

    assert asyncio.run(run()) < 500
