"""`POST /v1/responses` and `/v1/responses/input_tokens`: the OpenAI responses API. No response is kept."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve import responses_in, responses_out, sse
from muse_fn.serve.bodies import parse, warnings_of
from muse_fn.serve.conversation import Running, prompt_ids, start
from muse_fn.serve.errors import BadRequest, Failed
from muse_fn.serve.fields import Object, told_unknown
from muse_fn.serve.guard import request_id
from muse_fn.serve.messages_api import check_end
from muse_fn.serve.responses_in import STATELESS, Read
from muse_fn.serve.routes import Route
from muse_fn.serve.schemas import INT64, Body, SamplingFields, check_model, to_asked
from muse_fn.serve.service import Service
from muse_fn.serve.turns import Asked
from muse_fn.tokenizer import Json

ECHOED = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class PromptBody(Body):
    """What makes a prompt. The fields without a type here are read by `responses_in`."""

    model: str | None = None
    input: str | list[Any] = Field(description="a user's text, or messages, reasoning, calls and their outputs")
    instructions: str | None = None
    tools: list[Any] | None = Field(None, fail_fast=True, description="functions, or namespaces of functions")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    previous_response_id: str | None = Field(None, description="refused: no response is kept")
    conversation: Any = Field(None, description="refused: no conversation is kept")


class ResponsesBody(PromptBody):
    """A request for one response."""

    max_output_tokens: int | None = Field(None, ge=1, le=INT64)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT64, description="an extension")
    min_p: float = Field(0.0, ge=0, le=1, description="an extension")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="an extension: equal seeds draw alike")
    priority: int = Field(0, ge=-INT64, lt=INT64, description="an extension: lower goes first")
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="an extension")
    top_logprobs: int = Field(0, ge=0, le=INT64)
    include: list[Any] | None = Field(None, fail_fast=True)
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(None, description="include_obfuscation: nothing is ever padded")
    metadata: dict[Key, Value] | None = Field(None, max_length=16)
    store: bool = Field(False, description="true is refused: no response is kept")
    background: bool = Field(False, description="true is refused")
    max_tool_calls: int | None = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


async def create_response(service: Service, request: Request) -> Response:
    """One response, whole or as a stream."""
    body = await parse(service, request, ResponsesBody)
    check_model(service, body.model)
    read, warnings = _read(service, body, _asked(service, body))
    running = await sse.until_disconnect(
        request, start(service, read.turn, request_id(request), budget_field="max_output_tokens")
    )
    events = _events(running, _state(service, body, read, warnings))
    if body.stream:
        return sse.stream(service, request, events, running.cancel)
    return await sse.whole(request, _whole(events), running.cancel)


async def count_input(service: Service, request: Request) -> Response:
    """How many tokens the prompt of a response would have."""
    body = await parse(service, request, PromptBody)
    check_model(service, body.model)
    if service.tokenizer is None:
        raise BadRequest("input: this checkpoint has no tokenizer, so there is no chat", "input")
    read, _ = _read(service, body, Asked())
    ids = await prompt_ids(service.tokenizer, read.turn)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


async def no_response(service: Service, request: Request) -> Response:
    """What is asked of a response that was made before: it is not here."""
    raise BadRequest(f"response_id: there is no response of this id: {STATELESS}", "response_id", status=404)


def _read(service: Service, body: PromptBody, asked: Asked) -> tuple[Read, tuple[str, ...]]:
    """The turn, and everything that the client should know."""
    read = responses_in.read(cast("Object", dict(body)), asked, service.limits)
    unknown = told_unknown(read.unknown, service.strict)
    return read, (*warnings_of(body), *unknown, *read.warnings)


def _asked(service: Service, body: ResponsesBody) -> Asked:
    if body.top_logprobs > (most := service.limits.logprobs):
        raise BadRequest(f"top_logprobs: {body.top_logprobs} is more than the limit of {most}", "top_logprobs")
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt")
    return to_asked(
        SamplingFields.model_validate({name: getattr(body, name) for name in names}),
        service.limits,
        service.config,
        service.tokenizer,
        max_new=body.max_output_tokens,
        logprobs=responses_in.logprobs_asked(cast("Object", dict(body))),
    )


def _state(service: Service, body: ResponsesBody, read: Read, warnings: tuple[str, ...]) -> responses_out.State:
    """The response as it is before anything was said."""
    key, warned = secrets.token_hex(12), list[Json](warnings)
    response: Object = {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": service.name,
        "output": [],
        "metadata": cast("Json", body.metadata or {}),
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "reasoning": {"effort": read.turn.effort, "summary": None},
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "truncation": "disabled",
        "service_tier": "default",
    }
    response |= {name: cast("Json", getattr(body, name)) for name in ECHOED}
    response |= dict.fromkeys(("error", "incomplete_details", "usage", "previous_response_id"))
    response |= {"store": False, "background": False} | ({"warnings": warned} if warned else {})
    show = None
    if (tokenizer := service.tokenizer) is not None and read.turn.asked.logprobs is not None:
        show = partial(responses_out.logprob, tokenizer)
    return responses_out.State(response, key, read.namespaces, show)


async def _events(running: Running, state: responses_out.State) -> AsyncGenerator[sse.Event]:
    """The stream. Nothing is said before the engine has begun, so that what fails before has a status of its own."""
    begun = False
    async with aclosing(aiter(running)) as turn:
        async for event in turn:
            found = list[Object]()
            if not begun:
                check_end(event)
                begun = True
                state, found = responses_out.start(state)
            state, more = responses_out.push(state, event)
            for one in (*found, *more):
                yield sse.Event(cast("str", one["type"]), one)


async def _whole(events: AsyncGenerator[sse.Event]) -> Object:
    """What the last event carries. Failed if that is a failure, BadRequest 409 if it was aborted by request."""
    last = Object()
    async with aclosing(events):
        async for event in events:
            last = cast("Object", event.data)
    response = cast("Object", last["response"])
    if response["status"] == "cancelled":
        raise BadRequest("the request was aborted", status=409, code="aborted")
    if response["status"] == "failed":
        raise Failed(str(cast("Object", response["error"])["message"]))
    return response


ROUTES = (
    Route("/v1/responses", "POST", create_response, ResponsesBody, "One response."),
    Route("/v1/responses/input_tokens", "POST", count_input, PromptBody, "Tokens of a response's prompt."),
    Route("/v1/responses/{response_id}", "GET", no_response, None, "Always 404: no response is kept."),
    Route("/v1/responses/{response_id}", "DELETE", no_response, None, "Always 404: no response is kept."),
    Route("/v1/responses/{response_id}/cancel", "POST", no_response, None, "Always 404: no response is kept."),
    Route("/v1/responses/{response_id}/input_items", "GET", no_response, None, "Always 404: no response is kept."),
)
