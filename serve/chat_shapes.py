"""The body of a chat completion, and the turn it asks for: every field is honoured, refused, or named in a warning.

Labels (user, metadata, safety_identifier) and prompt_cache_key ask for nothing that could be done here.
"""

import json
from typing import Any, NamedTuple, NoReturn, cast

from pydantic import Field

from muse_fn.serve.bodies import warnings_of
from muse_fn.serve.chat import RESERVED
from muse_fn.serve.errors import BadRequest, quoted
from muse_fn.serve.schemas import INT64, Body, SamplingFields, StreamOptions, check_model, to_asked
from muse_fn.serve.service import Service
from muse_fn.serve.structured import final_of
from muse_fn.serve.turns import Asked, Named, ToolChoice, Turn
from muse_fn.tokenizer import Json

# Field -> why it is refused whatever its value.
REFUSED = {
    "functions": "is replaced by tools",
    "function_call": "is replaced by tool_choice",
    "chat_template": "cannot be given: the prompt is written by the checkpoint's own template",
    "audio": "is not supported: answers are text",
    "prediction": "is not supported",
    "web_search_options": "is not supported: there is no web search here",
    "moderation": "is not supported: there is no moderation here",
    "best_of": "is not supported; ask for n choices",
}
# Field -> the values that change nothing, and why others are refused.
ONLY: dict[str, tuple[tuple[Json, ...], str]] = {
    "add_generation_prompt": ((True,), "an answer begins a message of its own"),
    "continue_final_message": ((False,), "an answer begins a message of its own"),
    "echo": ((False,), "the prompt is part of the request; /v1/completions can echo it"),
    "store": ((False,), "nothing is stored here"),
    "modalities": ((["text"],), "answers are text"),
}
# Field -> the values that mean what is done anyway; others are answered with a warning.
WITHOUT_EFFECT: dict[str, tuple[tuple[Json, ...], str]] = {
    "verbosity": (("medium",), "the chat template knows no verbosity"),
    "service_tier": (("auto", "default"), "there is one tier, 'default'"),
    "prompt_cache_retention": ((), "cached prompts are kept while there is room"),
    "prompt_cache_options": ((), "cached prompts are kept while there is room"),
    "skip_special_tokens": ((True,), "channels are told by control tokens, which are never part of the text"),
}


class ChatStreamOptions(StreamOptions):
    """`include_progress`: events that say how much of the prompt has been read, instead of comments."""

    include_progress: bool = False
    include_obfuscation: bool = False


class ReasoningOptions(Body):
    """Another spelling of reasoning_effort."""

    effort: str | None = None


class ChatBody(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, le=INT64)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    # A shape of our own in place of the shared one: pydantic replaces fields, which pyright takes for a mistake.
    stream_options: ChatStreamOptions | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    best_of: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    echo: Any = None
    store: Any = None
    modalities: Any = None
    verbosity: Any = None
    service_tier: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class ChatRequest(NamedTuple):
    """What a body asks for: the turn, and how it is to be told."""

    turn: Turn
    warnings: tuple[str, ...]
    includes_usage: bool
    continuous_usage: bool
    includes_progress: bool
    returns_ids: bool
    budget_field: str  # the name that was used for the number of new tokens
    final_field: str  # where the rule of the final answer stands; empty without one


def chat_request(service: Service, body: ChatBody) -> ChatRequest:
    """Checks what needs no tokens. BadRequest names the first field that is wrong and lists all such problems."""
    check_model(service, body.model)
    problems = [*_refusals(body), *_of_messages(body.messages)]
    if problems:
        raise BadRequest("; ".join(f"{path}: {why}" for path, why in problems), problems[0][0])
    options = body.stream_options or ChatStreamOptions()
    turn = Turn(
        messages=cast("Json", body.messages),
        tools=cast("Json", body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        final=final_of(body.structured_outputs, body.response_format),
        effort=_effort(body),
        variables=cast("dict[str, Json]", body.chat_template_kwargs or {}),
        asked=_asked(service, body),
    )
    told = (*warnings_of(body), *_warnings(body))
    return ChatRequest(
        turn,
        told,
        options.include_usage,
        options.continuous_usage_stats,
        options.include_progress,
        body.return_token_ids,
        budget_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        final_field=_final_field(body) if turn.final else "",
    )


def _refusals(body: ChatBody) -> list[tuple[str, str]]:
    """Path and reason for every field that is refused."""
    found = [(name, why) for name, why in REFUSED.items() if getattr(body, name) is not None]
    for name, (allowed, why) in ONLY.items():
        value = getattr(body, name)
        if value is not None and not _is_one(value, allowed):
            found.append((name, f"must be {_listed(allowed)} or absent, found {quoted(value)}: {why}"))
    if body.stream_options and body.stream_options.include_obfuscation:
        found.append(("stream_options.include_obfuscation", "is not supported"))
    for name in sorted(RESERVED & (body.chat_template_kwargs or {}).keys()):
        found.append((f"chat_template_kwargs.{name}", "is set by the server and cannot be given"))
    if body.top_logprobs and not body.logprobs:
        found.append(("top_logprobs", "needs logprobs true"))
    return found


def _of_messages(messages: list[Any]) -> list[tuple[str, str]]:
    """What a message may not have although templates would pass it over: nothing that was said is dropped."""
    advice = {"function_call": "is replaced by tool_calls", "audio": "is not supported: messages are text"}
    advice["refusal"] = "is not supported; give its text as content"
    return [
        (f"messages[{index}].{name}", why)
        for index, message in enumerate(messages)
        for name, why in advice.items()
        if isinstance(message, dict) and cast("dict[str, Any]", message).get(name) is not None
    ]


def _warnings(body: ChatBody) -> list[str]:
    found = list[str]()
    for name, (allowed, why) in WITHOUT_EFFECT.items():
        value = getattr(body, name)
        if value is not None and not _is_one(value, allowed):
            found.append(f"{name}: has no effect: {why}")
    return found


def _is_one(value: Any, allowed: tuple[Json, ...]) -> bool:
    """Equality that keeps 1 and true apart."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _listed(allowed: tuple[Json, ...]) -> str:
    return " or ".join(json.dumps(one) for one in allowed)


def _tool_choice(given: str | dict[str, Any] | None) -> ToolChoice:
    if given is None:
        return "auto"
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            _refuse("tool_choice", f"must be 'auto', 'none', 'required' or an object, found {quoted(given)}")
        return cast("ToolChoice", given)
    kind = given.get("type")
    if kind == "allowed_tools":
        _refuse("tool_choice.type", "'allowed_tools' is not supported; send only those tools")
    if kind != "function":
        _refuse("tool_choice.type", f"must be 'function', found {quoted(kind)}")
    function = given.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        _refuse("tool_choice.function.name", f"must be a string, found {quoted(name)}")
    return Named(name)


def _final_field(body: ChatBody) -> str:
    given = [key for key, value in (body.structured_outputs or {}).items() if value is not None]
    if given:
        return f"structured_outputs.{given[0]}"
    return "response_format.json_schema.schema" if "json_schema" in (body.response_format or {}) else "response_format"


def _effort(body: ChatBody) -> str | None:
    other = body.reasoning.effort if body.reasoning else None
    if body.reasoning_effort and other and body.reasoning_effort != other:
        _refuse("reasoning.effort", "differs from reasoning_effort; give one of them")
    if "" in (body.reasoning_effort, other):
        _refuse("reasoning_effort", "must not be an empty string")
    inner = (body.chat_template_kwargs or {}).get("reasoning_effort")
    given = body.reasoning_effort if body.reasoning_effort is not None else other
    if given is not None and inner is not None and inner != given:
        _refuse("chat_template_kwargs.reasoning_effort", "differs from reasoning_effort; give one of them")
    return given


def _asked(service: Service, body: ChatBody) -> Asked:
    """How to generate. max_tokens is the older name of max_completion_tokens."""
    names = ("max_completion_tokens", "max_tokens")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        if value < 1:
            _refuse(name, f"must be at least 1, found {quoted(value)}")
    if len(set(given.values())) > 1:
        _refuse("max_completion_tokens", "differs from max_tokens; give one of them")
    if body.top_logprobs > service.limits.logprobs:
        _refuse("top_logprobs", f"{quoted(body.top_logprobs)} is more than the limit of {service.limits.logprobs}")
    fields = body.model_copy(update={"max_tokens": next(iter(given.values()), None)})
    logprobs = body.top_logprobs if body.logprobs else None
    return to_asked(fields, service.limits, service.config, service.tokenizer, logprobs=logprobs)


def _refuse(path: str, problem: str) -> NoReturn:
    raise BadRequest(f"{path}: {problem}", path)
