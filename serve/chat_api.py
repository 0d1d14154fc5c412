"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from muse_fn.params.config import Config
from muse_fn.serve import chat_render, sse
from muse_fn.serve.bodies import parse
from muse_fn.serve.chat_render import Frame, Object, Told
from muse_fn.serve.chat_shapes import ChatBody, ChatRequest, chat_request
from muse_fn.serve.conversation import Running, start
from muse_fn.serve.errors import BadRequest, Failed
from muse_fn.serve.routes import Route
from muse_fn.serve.service import Service
from muse_fn.serve.turns import Ended, Progress, PromptScores, TurnEvent


async def chat_completions(service: Service, request: Request) -> Response:
    """One chat completion, whole or as a stream."""
    body = await parse(service, request, ChatBody)
    asked = chat_request(service, body)
    running = await sse.until_disconnect(request, _start(service, asked, request.state.request_id))
    frame = _frame(service, asked, running, request.state.request_id)
    if body.stream:
        return sse.stream(service, request, _chunks(frame, asked, running), running.cancel)
    return await sse.whole(request, _whole(frame, running), running.cancel)


ROUTES = (Route("/v1/chat/completions", "POST", chat_completions, ChatBody, "Continue a conversation"),)


@lru_cache(maxsize=8)
def fingerprint(name: str, config: Config) -> str:
    """Tells models apart: equal for equal names and sizes."""
    return "fp_" + sha256(f"{name}\0{config}".encode()).hexdigest()[:12]


async def _start(service: Service, asked: ChatRequest, request_id: str) -> Running:
    """`start`, with errors about the final answer under the name of the field that asked for it."""
    try:
        return await start(service, asked.turn, request_id, budget_field=asked.budget_field)
    except BadRequest:
        raise
    except ValueError as error:
        if asked.final_field and str(error).startswith("response_format"):
            _, _, problem = str(error).partition(": ")
            raise BadRequest(f"{asked.final_field}: {problem}", asked.final_field) from None
        raise


def _frame(service: Service, asked: ChatRequest, running: Running, request_id: str) -> Frame:
    if service.tokenizer is None:
        raise BadRequest("messages: this checkpoint has no tokenizer, so there is no chat", "messages")
    return Frame(
        id=f"chatcmpl-{request_id}",
        created=int(time.time()),
        model=service.name,
        fingerprint=fingerprint(service.name, service.config),
        tokenizer=service.tokenizer,
        choices=asked.turn.asked.n,
        prompt_ids=running.prompt_ids,
        shows_logprobs=asked.turn.asked.logprobs is not None,
        shows_ids=asked.returns_ids,
        shows_usage=asked.includes_usage,
        running_usage=asked.continuous_usage,
        warnings=asked.warnings,
    )


async def _whole(frame: Frame, running: Running) -> Object:
    return chat_render.whole(frame, [_sound(event) async for event in running])


async def _chunks(frame: Frame, asked: ChatRequest, running: Running) -> AsyncGenerator[Object | str]:
    """The stream. Nothing is said before the engine has begun, so that what fails before has a status of its own."""
    told, scores, has_begun = Told(), None, False
    async with aclosing(aiter(running)) as events:
        async for event in events:
            scores = event if isinstance(event, PromptScores) else scores
            if isinstance(_sound(event), Progress | PromptScores):
                told, _ = chat_render.push(frame, told, event)
                if isinstance(event, Progress) and asked.includes_progress:
                    yield chat_render.progress(frame, event)
                continue
            for chunk in () if has_begun else chat_render.opening(frame, scores):
                yield chunk
            has_begun = True
            told, chunks = chat_render.push(frame, told, event)
            for chunk in chunks:
                yield chunk
    for chunk in chat_render.closing(frame, told):
        yield chunk
    yield "[DONE]"


def _sound(event: TurnEvent) -> TurnEvent:
    """The event. Raises Failed for a choice that the engine could not finish."""
    if isinstance(event, Ended) and event.finish == "error":
        raise Failed(event.why)
    return event
