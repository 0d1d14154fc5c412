"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic messages API."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve import messages_in, messages_out, sse
from muse_fn.serve.bodies import parse, warnings_of
from muse_fn.serve.conversation import Running, prompt_ids, start
from muse_fn.serve.errors import BadRequest, Failed
from muse_fn.serve.fields import Object, refuse, told_unknown
from muse_fn.serve.guard import request_id
from muse_fn.serve.messages_in import Read, Settings
from muse_fn.serve.routes import Route
from muse_fn.serve.schemas import INT64, Body, check_model
from muse_fn.serve.service import Service
from muse_fn.serve.turns import Ended, TurnEvent
from muse_fn.tokenizer import Tokenizer

ABSENT = ("container", "mcp_servers")  # what the server would have to run or fetch by itself
WITHOUT_EFFECT = {
    "context_management": "nothing is cleared from a conversation here",
    "inference_geo": "the answer is made where the server is",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
}


class CountBody(Body):
    """What makes a prompt. The fields without a type here are read by `messages_in`."""

    model: str
    messages: list[Any] = Field(fail_fast=True, description="user, assistant and system turns: text or blocks")
    system: Any = Field(None, description="a string or a list of text blocks")
    tools: list[Any] | None = Field(None, fail_fast=True, description="tools with name and input_schema")
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = Field(None, description="chooses the strength of reasoning and whether it shows")
    output_config: dict[str, Any] | None = Field(None, description="effort, and format: a JSON schema")
    cache_control: dict[str, Any] | None = Field(None, description="not needed: every prefix is cached")
    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    speed: str | None = None


class MessagesBody(CountBody):
    """A request for one message."""

    max_tokens: int = Field(ge=1, le=INT64)
    stop_sequences: list[str] = Field(default_factory=list[str], fail_fast=True)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT64)
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="an extension: equal seeds draw alike")
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


async def create_message(service: Service, request: Request) -> Response:
    """One message, whole or as a stream."""
    body = await parse(service, request, MessagesBody)
    check_model(service, body.model)
    read, warnings = _read(service, body, _settings(body))
    running = await sse.until_disconnect(request, start(service, read.turn, request_id(request)))
    events = _events(running, service, body, read, warnings)
    if body.stream:
        return sse.stream(service, request, events, running.cancel)
    return await sse.whole(request, _whole(events), running.cancel)


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    body = await parse(service, request, CountBody)
    check_model(service, body.model)
    read, _ = _read(service, body, Settings(None))
    ids = await prompt_ids(_tokenizer(service), read.turn)
    return JSONResponse({"input_tokens": len(ids)})


def _settings(body: MessagesBody) -> Settings:
    seed = secrets.randbits(63) if body.seed is None else body.seed
    stops = tuple(dict.fromkeys(body.stop_sequences))
    return Settings(body.max_tokens, body.temperature, body.top_p, body.top_k, stops, seed)


def _read(service: Service, body: CountBody, settings: Settings) -> tuple[Read, tuple[str, ...]]:
    """The turn, and everything that the client should know."""
    fields = cast("Object", dict(body))
    for name in ABSENT:
        if fields.get(name):
            refuse(name, "is not supported: this server runs no code and calls no other server")
    idle = [f"{name}: has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if _asks(fields, name)]
    read = messages_in.read(fields, settings, service.limits)
    unknown = told_unknown(read.unknown, service.strict)
    return read, (*warnings_of(body), *unknown, *idle, *read.warnings)


def _asks(fields: Object, name: str) -> bool:
    """Whether a field asks for something else than what happens anyway."""
    return fields.get(name) not in (None, "auto", "standard", "standard_only")


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise BadRequest("messages: this checkpoint has no tokenizer, so there is no chat", "messages")
    return service.tokenizer


async def _events(
    running: Running, service: Service, body: MessagesBody, read: Read, warnings: tuple[str, ...]
) -> AsyncGenerator[sse.Event]:
    """The stream. Nothing is said before the engine has begun, so that what fails before has a status of its own."""
    state, begun = messages_out.State(body.max_tokens, read.shows_thinking), False
    async with aclosing(aiter(running)) as turn:
        async for event in turn:
            check_end(event)
            found = list[Object]()
            if not begun:
                begun, id = True, f"msg_{secrets.token_hex(12)}"
                found = messages_out.start(id, service.name, len(running.prompt_ids), warnings)
            state, more = messages_out.push(state, event)
            for one in (*found, *more):
                yield sse.Event(cast("str", one["type"]), one)


async def _whole(events: AsyncGenerator[sse.Event]) -> Object:
    async with aclosing(events):
        return messages_out.whole([cast("Object", event.data) async for event in events])


def check_end(event: TurnEvent) -> None:
    """Failed, or BadRequest 409 for what was aborted by request, if this event is the end of a turn without success."""
    if isinstance(event, Ended) and event.finish == "error":
        raise Failed(event.why or "the engine failed")
    if isinstance(event, Ended) and event.finish == "abort":
        raise BadRequest(event.why or "the request was aborted", status=409, code="aborted")


ROUTES = (
    Route("/v1/messages", "POST", create_message, MessagesBody, "One message in Anthropic's format."),
    Route("/v1/messages/count_tokens", "POST", count_tokens, CountBody, "Tokens of a prompt in Anthropic's format."),
)
