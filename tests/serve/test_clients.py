"""The official clients against the real command on the embedded model: it answers, reasons and calls a tool."""

import json
from collections.abc import Generator
from typing import Any

import anthropic
import openai
import pytest

from tests.serve.commanded import commanded

QUESTION = "What is 3 + 4?"
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    with commanded("--port", "0", "--rows", "8", "--cache-gib", "0.2") as command:
        yield command.address()


@pytest.fixture
def ours(address: str) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def theirs(address: str) -> Generator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(ours: openai.OpenAI) -> None:
    (card,) = ours.models.list().data
    assert card.id == "muse-nano"
    assert ours.models.retrieve(card.id).id == card.id
    with pytest.raises(openai.NotFoundError):
        ours.models.retrieve("another")


def test_chat_answers_and_reasons(ours: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "muse-nano",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = ours.chat.completions.create(**asked)
    message: Any = whole.choices[0].message
    assert "7" in message.content
    assert message.reasoning == message.reasoning_content != ""
    assert whole.choices[0].finish_reason == "stop"
    streamed = ours.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks: list[Any] = [*streamed]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_chat_calls_a_tool(ours: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
    for stream in (False, True):
        asked: dict[str, Any] = {
            "model": "muse-nano",
            "messages": [{"role": "user", "content": "Use the tool: add 3 and 4."}],
            "tools": [tool],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 300,
        }
        if stream:
            chunks: list[Any] = [*ours.chat.completions.create(**asked, stream=True)]
            calls = [call for c in chunks for call in (c.choices[0].delta.tool_calls or [])]
            finish = chunks[-1].choices[0].finish_reason
        else:
            choice = ours.chat.completions.create(**asked).choices[0]
            calls, finish = [*(choice.message.tool_calls or [])], choice.finish_reason
        assert finish == "tool_calls"
        assert calls
        for call in calls:
            assert call.function.name == "add"
            arguments = json.loads(call.function.arguments)
            assert set(arguments) == {"a", "b"}
            assert all(type(value) is int for value in arguments.values())


def test_chat_by_a_schema(ours: openai.OpenAI) -> None:
    rule: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE, "strict": True}}
    messages: Any = [{"role": "user", "content": QUESTION}]
    found = ours.chat.completions.create(
        model="muse-nano", messages=messages, response_format=rule, max_tokens=300, temperature=0
    )
    assert set(json.loads(found.choices[0].message.content or "")) == {"n"}


def test_completions(ours: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "muse-nano", "prompt": "3 + 4 =", "max_tokens": 8, "n": 2, "temperature": 0}
    whole = ours.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text == whole.choices[1].text != ""
    pieces = ["", ""]
    for chunk in ours.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in whole.choices]


def test_responses(ours: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "muse-nano", "input": QUESTION, "max_output_tokens": 80, "temperature": 0}
    whole = ours.responses.create(**asked)
    assert "7" in whole.output_text
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    events: list[Any] = [*ours.responses.create(**asked, stream=True)]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    tool: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True}
    called = ours.responses.create(
        model="muse-nano",
        input="Use the tool: add 3 and 4.",
        tools=[tool],
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=300,
        temperature=0,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    assert all(call.name == "add" and set(json.loads(call.arguments)) == {"a", "b"} for call in calls)


def test_messages(theirs: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "muse-nano",
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": {"temperature": 0},  # the newest of these clients has no argument for it
        "max_tokens": 80,
    }
    count = theirs.messages.count_tokens(model="muse-nano", messages=asked["messages"])
    whole = theirs.messages.create(**asked)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == count.input_tokens
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.stop_reason == "end_turn"
    with theirs.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[1] == whole.content[1] or "7" in str(final.content[1])
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": ADD}
    asked["messages"] = [{"role": "user", "content": "Use the tool: add 3 and 4."}]
    asked["max_tokens"] = 300
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "add"}]
    for choice in choices:
        called = theirs.messages.create(**asked, tools=[tool], tool_choice=choice)
        uses: list[Any] = [block for block in called.content if block.type == "tool_use"]
        assert called.stop_reason == "tool_use"
        assert uses
        assert all(use.name == "add" and set(use.input) == {"a", "b"} for use in uses)
