"""What a prompt is in tokens, without generating anything: tokenize, detokenize, render."""

import asyncio
from typing import Any

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muse_fn.serve.bodies import parse, warnings_of
from muse_fn.serve.chat import render_chat
from muse_fn.serve.chat_shapes import ChatBody, chat_request
from muse_fn.serve.completions_api import CompletionBody, begin_ids, prompts_of
from muse_fn.serve.completions_out import token_text
from muse_fn.serve.conversation import prompt_ids
from muse_fn.serve.errors import BadRequest, quoted
from muse_fn.serve.routes import Route
from muse_fn.serve.schemas import Body, Ids, check_model, to_asked
from muse_fn.serve.service import Service
from muse_fn.tokenizer import Json, Tokenizer


class TokenizeBody(Body):
    """Body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def one_of_both(self) -> "TokenizeBody":
        """Either a prompt or messages, and with a prompt nothing that only a conversation has."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        for name in ("tools", "reasoning_effort", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise BadRequest(f"{name}: only allowed with messages", name)
        return self


class DetokenizeBody(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids


async def tokenize(service: Service, request: Request) -> Response:
    """The tokens of a text or a conversation."""
    body = await parse(service, request, TokenizeBody)
    check_model(service, body.model)
    tokenizer = _tokenizer(service)
    ids = await asyncio.to_thread(_tokens, tokenizer, body)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": service.config.max_positions, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = [token_text(tokenizer.token_bytes(id)) for id in ids]
    return JSONResponse({**told, **_warned(body)})


async def detokenize(service: Service, request: Request) -> Response:
    """The text of tokens, control tokens spelled out."""
    body = await parse(service, request, DetokenizeBody)
    check_model(service, body.model)
    tokenizer, size = _tokenizer(service), service.config.vocab_size
    for place, token in enumerate(body.tokens):
        if not 0 <= token < min(size, len(tokenizer)) or tokenizer.bytes_of[token] is None:
            raise BadRequest(f"tokens[{place}]: no token has id {quoted(token)}", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text, **_warned(body)})


async def render_completion(service: Service, request: Request) -> Response:
    """The prompts of a completions body."""
    body = await parse(service, request, CompletionBody)
    check_model(service, body.model)
    to_asked(body, service.limits, service.config, service.tokenizer, logprobs=body.logprobs)
    prompts = [{"prompt": prompt.text, "token_ids": prompt.ids} for prompt in await prompts_of(service, body)]
    return JSONResponse({"object": "list", "model": service.name, "data": prompts, **_warned(body)})


async def render_conversation(service: Service, request: Request) -> Response:
    """The prompt that the template makes of a chat body."""
    body = await parse(service, request, ChatBody)
    tokenizer, asked = _tokenizer(service), chat_request(service, body)
    ids = await prompt_ids(tokenizer, asked.turn)
    told = {"model": service.name, "prompt": tokenizer.decode(ids), "token_ids": ids, "count": len(ids)}
    return JSONResponse({**told, **({"warnings": asked.warnings} if asked.warnings else {})})


def _tokens(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return [*begin_ids(tokenizer, body.add_special_tokens), *tokenizer.encode(body.prompt)]
    messages: Json = body.messages
    pieces = render_chat(
        tokenizer,
        messages,
        tools=body.tools,
        reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    return tokenizer.encode_pieces(pieces)


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise BadRequest("this checkpoint has no tokenizer", status=404)
    return service.tokenizer


def _warned(body: Body) -> dict[str, Any]:
    found = warnings_of(body)
    return {"warnings": found} if found else {}


ROUTES = (
    *(
        Route(f"{prefix}/{name}", "POST", handler, body, summary)
        for prefix in ("", "/v1")
        for name, handler, body, summary in (
            ("tokenize", tokenize, TokenizeBody, "The tokens of a text or a conversation."),
            ("detokenize", detokenize, DetokenizeBody, "The text of tokens."),
        )
    ),
    Route("/v1/completions/render", "POST", render_completion, CompletionBody, "The prompts of a completions body."),
    Route("/v1/chat/completions/render", "POST", render_conversation, ChatBody, "The prompt of a chat body."),
)
