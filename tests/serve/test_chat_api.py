"""Chat completions over HTTP: each field of the API, stream and whole, errors, the official client."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any, get_type_hints

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from muse_fn.serve import chat_api
from muse_fn.serve.app import make_app
from muse_fn.serve.chat_shapes import ONLY, REFUSED, WITHOUT_EFFECT, ChatBody, ChatStreamOptions
from muse_fn.serve.jobs import Done, Job, Logprob, New, Reading, Refused
from tests.serve.asking import HELLO, PATH, SECONDS, ask, both, choices, folded, limited, post, refused, send, stream
from tests.serve.cutting import control, cut, embedded
from tests.serve.loopback import serving
from tests.serve.script import ScriptedEngine, make_service, quick
from tests.turns import TOOLS, call, to, tool

HEADER = " to=user<|message|>"
THOUGHT = " to=self<|message|>hm<|eom|>"
ANSWER = cut(THOUGHT + to("user") + "Hi there<|eot|>")
CALLING = cut(THOUGHT + to("add") + call("add", a=1, b=2.5) + "<|eom|>" + to("noargs") + call("noargs") + "<|eot|>")


def playing(ids: list[int] = ANSWER, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(ids, **options)


def test_a_whole_completion() -> None:
    whole = ask(playing(cached=3), user="me", metadata={"a": "b"}, store=False, service_tier="auto")
    assert whole["object"] == "chat.completion"
    assert whole["id"] == "chatcmpl-same"
    assert whole["model"] == "nano"
    assert whole["system_fingerprint"].startswith("fp_")
    assert "warnings" not in whole
    (choice,) = whole["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hi there",
        "refusal": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(ANSWER)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(ANSWER)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}])
@pytest.mark.parametrize("ids", [ANSWER, CALLING, [], [control("<|eot|>")], ANSWER[:5]], ids=len)
def test_stream_and_whole_tell_the_same(ids: list[int], fields: dict[str, Any]) -> None:
    whole = both(playing(ids), tools=TOOLS, **fields)
    assert len(whole["choices"]) == fields.get("n", 1)


def test_calls_come_whole_and_content_is_null_beside_them() -> None:
    (choice,) = both(playing(CALLING), tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "add", {"a": 1, "b": 2.5}),
        ("function", "noargs", {}),
    ]
    assert len({c["id"] for c in calls}) == 2
    deltas = [
        d for e in stream(playing(CALLING), tools=TOOLS).events for d in e["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [d["index"] for d in deltas] == [0, 1]
    assert all(d["id"] and d["function"]["name"] and json.loads(d["function"]["arguments"]) is not None for d in deltas)


def test_empty_answers_are_empty_strings() -> None:
    (choice,) = both(playing([]))["choices"]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"] is None


def test_choices_draw_with_seeds_of_their_own() -> None:
    engine = playing(lambda job: cut(HEADER + f"{job.sampling.seed}<|eot|>"))  # type: ignore[arg-type]
    whole = both(engine, n=3, seed=7)
    assert [c["message"]["content"] for c in whole["choices"]] == ["7", "8", "9"]
    assert [job.sampling.seed for job in engine.jobs] == [7, 8, 9] * 2
    unseeded = playing()
    ask(unseeded)
    ask(unseeded)
    assert unseeded.jobs[0].sampling.seed != unseeded.jobs[1].sampling.seed


def test_logprobs_are_those_of_all_tokens_with_their_bytes() -> None:
    ids = cut(THOUGHT + to("user") + "ď👍<|eot|>")
    (choice,) = both(playing(ids), logprobs=True, top_logprobs=2, return_token_ids=True)["choices"]
    content = choice["logprobs"]["content"]
    assert choice["token_ids"] == ids
    assert [bytes(token["bytes"]) for token in content] == [embedded().bytes_of[i] for i in ids]
    assert all(token["logprob"] == -0.5 and len(token["top_logprobs"]) == 2 for token in content)
    (bare,) = both(playing(ids), logprobs=True)["choices"]
    assert [token["top_logprobs"] for token in bare["logprobs"]["content"]] == [[] for _ in ids]


def test_ids_and_scores_of_the_prompt() -> None:
    engine = playing()
    whole = ask(engine, return_token_ids=True, prompt_logprobs=1)
    ids = list(engine.jobs[0].ids)
    assert whole["prompt_token_ids"] == ids
    assert whole["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in whole["prompt_logprobs"][1:]] == [str(token) for token in ids[1:]]
    entry = whole["prompt_logprobs"][1][str(ids[1])]
    assert entry == {"logprob": -0.5, "rank": 1, "decoded_token": "<|start|>"}
    first, *others = stream(engine, return_token_ids=True, prompt_logprobs=1).events
    assert (first["prompt_token_ids"], first["prompt_logprobs"]) == (ids, whole["prompt_logprobs"])
    assert not any("prompt_token_ids" in chunk or "prompt_logprobs" in chunk for chunk in others)


def test_progress_is_told_as_events_only_where_asked_for() -> None:
    script = [Reading(5, 30, 2), Reading(30, 30, 2), *ANSWER]
    told = stream(ScriptedEngine(script), stream_options={"include_progress": True}).events
    shown = [(chunk["choices"], chunk["prompt_progress"]) for chunk in told if "prompt_progress" in chunk]
    assert shown[-2:] == [([], {"processed": n, "total": 30, "cached": 2}) for n in (5, 30)]
    assert not any("prompt_progress" in chunk for chunk in stream(ScriptedEngine(script)).events)


def test_while_nothing_comes_there_are_comments() -> None:
    async def slow() -> str:
        gate = asyncio.Event()
        service = make_service(ScriptedEngine([Reading(1, 9, 0), gate, *ANSWER]), limits=quick(keep_alive=0.01))
        asyncio.get_running_loop().call_later(0.2, gate.set)
        return (await send(service, {"messages": HELLO, "stream": True})).text

    text = limited(slow())
    assert text.startswith(":")
    assert text.endswith("data: [DONE]\n\n")


def test_every_field_of_the_official_client_is_known() -> None:
    named = {*get_type_hints(CompletionCreateParamsBase), "stream"}
    assert named - ChatBody.model_fields.keys() == set()
    assert get_type_hints(ChatCompletionStreamOptionsParam).keys() - ChatStreamOptions.model_fields.keys() == set()


@pytest.mark.parametrize("field", sorted(ChatBody.model_fields.keys() - {"messages"}))
def test_null_is_the_default(field: str) -> None:
    engine = playing()
    assert "warnings" not in ask(engine, **{field: None})
    assert engine.jobs


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_what_is_not_supported_is_refused(field: str) -> None:
    for value in ([], {}, "x", 1, False):
        error = refused(playing(), **{field: value})
        assert (error["status"], error["param"]) == (400, field)


@pytest.mark.parametrize("field", sorted(ONLY))
def test_values_that_cannot_be_honoured_are_refused(field: str) -> None:
    assert "warnings" not in ask(playing(), **{field: ONLY[field][0][0]})
    for value in (1, "x", [], {}, ["text", "audio"], not ONLY[field][0][0]):
        assert refused(playing(), **{field: value})["param"] == field


@pytest.mark.parametrize("field", sorted(WITHOUT_EFFECT))
def test_values_without_effect_are_warned_of(field: str) -> None:
    for value in WITHOUT_EFFECT[field][0]:
        assert "warnings" not in ask(playing(), **{field: value})
    other = False if field == "skip_special_tokens" else "high"
    (warning,) = ask(playing(), **{field: other})["warnings"]
    assert warning.startswith(f"{field}: has no effect")


def test_unknown_fields_are_warned_of_or_refused() -> None:
    fields = {"flavour": 1, "reasoning": {"effort": "low", "mood": 2}}
    told = ["flavour: unknown field, ignored", "reasoning.mood: unknown field, ignored"]
    assert ask(playing(), **fields)["warnings"] == told
    first, *others = stream(playing(), **fields).events
    assert first["warnings"] == told
    assert not any("warnings" in chunk for chunk in others)
    assert refused(make_service(playing(), strict=True), **fields)["param"] == "flavour"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tool_choice": "x"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [tool("user")]}, "tools"),
    ({"tools": [tool(f"t{i}") for i in range(257)]}, "tools"),
    ({"tools": [tool("x" * 1000)]}, "tools"),
    ({"reasoning_effort": "none"}, "reasoning_effort"),
    ({"reasoning_effort": "minimal"}, "reasoning_effort"),
    ({"reasoning": {"effort": "huge"}}, "reasoning_effort"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "chat_template_kwargs.reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"response_format": {"type": "wizard"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "", "regex": "a"}}, "structured_outputs"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
    ({"messages": [{"role": "user", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "y"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    engine = playing()
    error = refused(engine, **fields)
    assert (error["status"], error["param"]) == (400, param), error
    assert error["message"]
    assert engine.jobs == []


def test_all_problems_of_one_kind_are_listed() -> None:
    message = refused(playing(), functions=[], echo=True, audio={})["message"]
    assert all(field in message for field in ("functions:", "echo:", "audio:"))


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh"])
def test_three_spellings_of_the_effort(effort: str) -> None:
    engine = playing()
    ask(engine, reasoning_effort=effort)
    ask(engine, reasoning={"effort": effort})
    ask(engine, chat_template_kwargs={"reasoning_effort": effort})
    ask(engine, reasoning_effort=effort, reasoning={"effort": effort})
    assert len({job.ids for job in engine.jobs}) == 1


def test_template_variables_reach_the_template() -> None:
    engine = playing()
    ask(engine, chat_template_kwargs={"current_date": "2026-10-01"})
    assert "2026-10-01" in embedded().decode(engine.jobs[0].ids)


def test_both_names_of_the_budget() -> None:
    engine = playing()
    for fields in ({"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 9}):
        ask(engine, **fields)
    assert [job.max_new for job in engine.jobs] == [9, 9, 9]


def test_what_later_choices_found_is_not_called_cached() -> None:
    """The first choice read the prompt; the others found its work."""

    def script(job: Job) -> list[Any]:
        return [Reading(len(job.ids), len(job.ids), 4 if job.sampling.seed == 0 else len(job.ids) - 1), *ANSWER]

    usage = both(ScriptedEngine(script), n=3, seed=0)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_unknown_model_is_404() -> None:
    assert refused(playing(), model="gpt-x")["status"] == 404
    assert ask(playing(), model="nano")["model"] == "nano"


def test_a_full_queue_is_429_and_says_when_to_try_again() -> None:
    full = playing(refuses=Refused("the queue is full", retry_after=7))
    for streams in (False, True):
        response = post(full, {"messages": HELLO, "stream": streams})
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")


def test_an_aborted_choice_keeps_what_it_said() -> None:
    (choice,) = both(ScriptedEngine([*cut(HEADER + "half"), Done("abort", "asked to")]))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "half")


def test_one_failed_choice_fails_the_answer() -> None:
    def second_fails(job: Job) -> list[Any]:
        return [*ANSWER[:6], Done("error", "not a number")] if job.sampling.seed == 1 else ANSWER

    engine = ScriptedEngine(second_fails)
    response = post(engine, {"messages": HELLO, "n": 2, "seed": 0})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "not a number")
    assert engine.running == 0


@pytest.mark.parametrize("streams", [False, True])
def test_whoever_goes_away_gives_everything_back(streams: bool) -> None:
    async def leave() -> ScriptedEngine:
        begun = asyncio.Event()

        def script(job: Job) -> list[Any]:
            begun.set()
            return [*ANSWER[:9], asyncio.Event()]

        engine, bodies = ScriptedEngine(script), [json.dumps({"messages": HELLO, "n": 2, "stream": streams}).encode()]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await begun.wait()
            return {"type": "http.disconnect"}

        async def swallow(message: MutableMapping[str, Any]) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"content-type", b"application/json")]}
        app = make_app(make_service(engine), routes=chat_api.ROUTES)
        await app({**scope, "query_string": b""}, receive, swallow)
        return engine

    engine = limited(leave())
    assert (len(engine.jobs), engine.running, engine.cancels) == (2, 0, 2)


def test_probabilities_of_zero_and_one_are_finite_numbers() -> None:
    def odd(job: Job) -> list[Any]:
        return [New(control("<|eot|>"), Logprob(float("-inf"), 9, ((5, 1e-6),)))]

    (choice,) = both(ScriptedEngine(odd), logprobs=True, top_logprobs=1)["choices"]
    (token,) = choice["logprobs"]["content"]
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-9999.0, 0.0)


@given(st.lists(st.sampled_from([*ANSWER, *CALLING, 5, 99, 300]), max_size=30), st.integers(1, 3))
def test_any_tokens_are_told_alike(ids: list[int], n: int) -> None:
    both(playing(ids), tools=TOOLS, n=n, logprobs=True, return_token_ids=True, max_tokens=40)


def test_the_official_client() -> None:
    def script(job: Job) -> list[int]:
        return CALLING if b"lookup" in b"".join(embedded().token_bytes(i) for i in job.ids) else ANSWER

    app = make_app(make_service(ScriptedEngine(script), keys=("key",)), routes=chat_api.ROUTES)
    with (
        serving(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", timeout=SECONDS, max_retries=0) as client,
    ):
        plain = client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "Hi"}], logprobs=True
        )
        assert plain.choices[0].message.content == "Hi there"
        assert plain.choices[0].message.model_extra == {"reasoning": "hm", "reasoning_content": "hm"}
        assert plain.choices[0].logprobs is not None
        assert plain.usage is not None
        assert plain.usage.completion_tokens_details is not None
        assert plain.usage.completion_tokens_details.reasoning_tokens == 2

        called = client.chat.completions.create(
            model="nano",
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,  # type: ignore[arg-type]
        )
        message = called.choices[0].message
        assert called.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None
        assert [c.function.name for c in message.tool_calls if c.type == "function"] == ["add", "noargs"]
        again = [{"role": "user", "content": "Hi"}, message.model_dump()]
        again += [{"role": "tool", "tool_call_id": c.id, "content": "3.5"} for c in message.tool_calls]
        assert client.chat.completions.create(model="nano", messages=again).choices[0].message  # type: ignore[call-overload]

        with client.chat.completions.stream(
            model="nano",
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        ) as events:
            final = events.get_final_completion()
        assert final.usage == called.usage
        assert [c.model_dump() for c in final.choices[0].message.tool_calls or ()] != []
        assert final.choices[0].finish_reason == "tool_calls"

        with pytest.raises(openai.BadRequestError, match="reasoning_effort") as caught:
            client.chat.completions.create(
                model="nano", messages=[{"role": "user", "content": "Hi"}], reasoning_effort="minimal"
            )
        assert caught.value.param == "reasoning_effort"


def test_folding_and_choices_can_differ() -> None:
    """The comparison that the other tests rest on sees what is lost."""
    whole = ask(playing())
    assert folded(stream(playing())) == choices(whole)
    assert folded(stream(playing(CALLING), tools=TOOLS)) != choices(whole)
    assert folded(stream(playing(ANSWER[:-2]))) != choices(whole)


@pytest.mark.parametrize("field", [{"reasoning_effort": ""}, {"reasoning": {"effort": ""}}])
def test_an_empty_effort_is_not_taken_for_none_given(field: dict[str, Any]) -> None:
    """Templates take it for the default."""
    assert refused(ScriptedEngine([]), **field)["param"] == "reasoning_effort"
