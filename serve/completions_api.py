"""POST /v1/completions and POST /generate: prompts without a conversation."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from muse_fn.serve import sse
from muse_fn.serve.bodies import off_loop, parse, warnings_of
from muse_fn.serve.chat_api import fingerprint
from muse_fn.serve.completions_out import Look, chunks, raw_chunks, whole
from muse_fn.serve.errors import BadRequest, quoted
from muse_fn.serve.guard import request_id
from muse_fn.serve.plain_run import Prompt, Run, launch
from muse_fn.serve.routes import Route
from muse_fn.serve.schemas import Ids, SamplingFields, check_model, to_asked
from muse_fn.serve.service import Service
from muse_fn.serve.structured import final_of
from muse_fn.tokenizer import Tokenizer

_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ]
}


class CompletionBody(SamplingFields):
    """Body of /v1/completions. Without max_tokens the answer may fill the model's window."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True  # a text prompt begins with the model's begin token
    response_format: dict[str, Any] | None = None


class GenerateBody(SamplingFields):
    """Body of /generate: token ids in, token ids out. Needs no tokenizer, unless there are stop strings.

    The answer has no text, so skip_special_tokens and include_stop_str_in_output, which change only that, do nothing.
    """

    token_ids: Ids
    logprobs: int | None = Field(None, ge=0)


async def completions(service: Service, request: Request) -> Response:
    """Continues each prompt n times."""
    body = await parse(service, request, CompletionBody)
    check_model(service, body.model)
    run = await sse.until_disconnect(request, _start(service, body, request_id(request)))
    look = Look(
        id=f"cmpl-{request_id(request)}",
        model=service.name,
        fingerprint=fingerprint(service.name, service.config),
        created=int(time.time()),
        tokenizer=service.tokenizer,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=body.echo,
        ids=body.return_token_ids,
        warnings=tuple(warnings_of(body)),
    )
    return await _respond(service, request, run, look, body)


async def generate(service: Service, request: Request) -> Response:
    """Continues token ids."""
    body = await parse(service, request, GenerateBody)
    check_model(service, body.model)
    ids = await off_loop(len(body.token_ids), _known_ids, service, body.token_ids, "token_ids")
    asked = to_asked(body, service.limits, service.config, service.tokenizer, logprobs=body.logprobs)
    work = launch(
        service, (Prompt(ids, ""),), asked, request_id(request), final_of(body.structured_outputs), skips=True
    )
    run = await sse.until_disconnect(request, work)
    look = Look(
        id=request_id(request),
        model=service.name,
        fingerprint=fingerprint(service.name, service.config),
        created=int(time.time()),
        tokenizer=service.tokenizer,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        raw=True,
        warnings=tuple(warnings_of(body)),
    )
    return await _respond(service, request, run, look, body)


async def prompts_of(service: Service, body: CompletionBody) -> tuple[Prompt, ...]:
    """The prompts of a body, encoded. BadRequest names the prompt that is wrong."""
    given: Any = body.prompt
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        given = [given]
    listed: list[Any] = given if isinstance(given, list) else [given]
    if not listed:
        raise BadRequest("prompt: must not be empty", "prompt")
    if len(listed) > service.limits.prompts:
        message = f"prompt: {len(listed)} prompts are more than the limit of {service.limits.prompts}"
        raise BadRequest(message, "prompt")
    if body.n * len(listed) > (limit := max(service.limits.choices, service.limits.prompts)):
        raise BadRequest(f"n: {body.n} times {len(listed)} prompts is more than the limit of {limit} choices", "n")
    size = sum(len(item) for item in listed if isinstance(item, str | list))
    return await off_loop(size, _encoded, service, listed, body.add_special_tokens)


def begin_ids(tokenizer: Tokenizer, wanted: bool) -> tuple[int, ...]:
    """The begin token, if it is wanted and there is one."""
    known = wanted and tokenizer.bos_token in tokenizer.controls
    return (tokenizer.controls[tokenizer.bos_token],) if known and tokenizer.bos_token else ()


async def _start(service: Service, body: CompletionBody, request: str) -> Run:
    _check_fields(body)
    wanted = max((count for count in (body.prompt_logprobs, body.logprobs) if count is not None), default=None)
    scored = body.model_copy(update={"prompt_logprobs": wanted}) if body.echo and body.logprobs is not None else body
    asked = to_asked(scored, service.limits, service.config, service.tokenizer, logprobs=body.logprobs)
    final = final_of(body.structured_outputs, body.response_format)
    prompts = await prompts_of(service, body)
    return await launch(service, prompts, asked, request, final, skips=body.skip_special_tokens)


def _check_fields(body: CompletionBody) -> None:
    if body.suffix:
        raise BadRequest("suffix: this model does not fill in the middle; leave it out", "suffix")
    if body.best_of not in (None, 1, body.n):
        raise BadRequest(f"best_of: must be absent, 1 or equal to n, found {quoted(body.best_of)}", "best_of")


async def _respond(service: Service, request: Request, run: Run, look: Look, body: SamplingFields) -> Response:
    found = raw_chunks(run, look) if look.raw else chunks(run, look)
    if not body.stream:
        return await sse.whole(request, whole(run, look, found), run.cancel)
    options = body.stream_options
    usage, each = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
    return sse.stream(service, request, _framed(run, look, found, usage, each), run.cancel)


async def _framed(
    run: Run, look: Look, found: AsyncGenerator[dict[str, Any]], usage: bool, each: bool
) -> AsyncGenerator[sse.Sendable]:
    """Chunks of a stream: usage is null in all but the last unless it is wanted in each."""
    head, counts = look.head(), look.count(run)
    warned: dict[str, Any] = {"warnings": list(look.warnings)} if look.warnings else {}
    async with aclosing(found):
        async for choice in found:
            counts = counts.after(choice)
            told = {"usage": counts.usage() if each else None} if usage or each else {}
            shown = {key: value for key, value in choice.items() if not key.startswith("_")}
            yield {**head, "choices": [shown], **told, **warned}
            warned = {}
    if usage:
        yield {**head, "choices": [], "usage": counts.usage(), **warned}
    yield "[DONE]"


def _encoded(service: Service, listed: list[Any], wanted: bool) -> tuple[Prompt, ...]:
    return tuple(_prompt(service, item, f"prompt[{place}]", wanted) for place, item in enumerate(listed))


def _prompt(service: Service, item: Any, path: str, wanted: bool) -> Prompt:
    tokenizer = service.tokenizer
    if isinstance(item, str):
        if tokenizer is None:
            raise BadRequest(f"{path}: this checkpoint has no tokenizer; give token ids", "prompt")
        _check_length(service, tokenizer, item, path)
        return Prompt((*begin_ids(tokenizer, wanted), *tokenizer.encode(item)), item)
    if not isinstance(item, list):
        raise BadRequest(f"{path}: must be a string or a list of token ids, found {quoted(item)}", "prompt")
    ids = _known_ids(service, item, path)
    return Prompt(ids, "" if tokenizer is None else tokenizer.decode(ids))


def _check_length(service: Service, tokenizer: Tokenizer, text: str, path: str) -> None:
    """BadRequest for a text that is too long whatever its tokens are, before seconds are spent on them."""
    least, window = -(-len(text.encode()) // longest_token(tokenizer)), service.config.max_positions
    if least >= window:
        message = f"{path}: has at least {least} tokens; with at least one more the model's limit is {window}"
        raise BadRequest(message, "prompt", code="context_length_exceeded")


@lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token that text can become."""
    return max(len(raw) for token, raw in enumerate(tokenizer.bytes_of) if raw and token not in tokenizer.names)


def _known_ids(service: Service, listed: list[Any], path: str) -> tuple[int, ...]:
    """Token ids that exist. BadRequest names the first that does not."""
    size, known = service.config.vocab_size, service.tokenizer.bytes_of if service.tokenizer else None
    for place, token in enumerate(listed):
        if type(token) is not int or not 0 <= token < size or (known and (token >= len(known) or known[token] is None)):
            raise BadRequest(f"{path}[{place}]: no token has id {quoted(token)}", path.partition("[")[0])
    return tuple(listed)


ROUTES = (
    Route("/v1/completions", "POST", completions, CompletionBody, "Continues text."),
    Route("/generate", "POST", generate, GenerateBody, "Continues token ids."),
)
