"""Pydantic shapes shared by the OpenAI-like routes, and how their sampling fields become what the engine is asked."""

import secrets
from collections.abc import Callable, Iterator
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from muse_fn.params.config import Config
from muse_fn.sample import Sampling
from muse_fn.serve.errors import BadRequest, quoted
from muse_fn.serve.jobs import Penalties
from muse_fn.serve.service import Limits, Service
from muse_fn.serve.turns import Asked
from muse_fn.tokenizer import Tokenizer

INT64 = 1 << 63
BIAS = 100.0  # of one token, either way
Ids = Annotated[list[int], Field(fail_fast=True)]  # one problem is enough to tell of a million
Texts = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all bodies: nothing is converted ("5" and true are no numbers), numbers are finite, null is the default.

    Unknown fields are kept in `model_extra`, for `bodies.warnings_of`.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, value: Any) -> Any:
        """Null of a field is as good as its absence."""
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in cast("dict[str, Any]", value).items() if inner is not None}


class StreamOptions(Body):
    """What a stream says beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Body):
    """The fields that every generating route of the OpenAI family has, with the ranges that are documented for them."""

    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=0, le=INT64)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT64)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=INT64)
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: int = Field(0, ge=-INT64, lt=INT64)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def options_need_stream(self) -> "SamplingFields":
        """Options of a stream make no sense without one."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options: only allowed with stream true")
        return self


def to_asked(
    fields: SamplingFields,
    limits: Limits,
    config: Config,
    tokenizer: Tokenizer | None,
    *,
    max_new: int | None = None,
    logprobs: int | None = None,
) -> Asked:
    """What the fields ask for, checked against the limits and the vocabulary.

    `max_new` stands in for max_tokens where an API has another name for it; `logprobs` is the number of likeliest
    tokens, which every API spells differently. Without a seed a random one is drawn. BadRequest lists all problems.
    """
    problems = list(_problems(fields, limits, _has_token(config, tokenizer), logprobs))
    if problems:
        raise BadRequest("; ".join(problems), problems[0].partition(":")[0].partition("[")[0])
    seed = secrets.randbits(63) if fields.seed is None else fields.seed
    return Asked(
        n=fields.n,
        max_new=fields.max_tokens if max_new is None else max_new,
        sampling=Sampling(fields.temperature, fields.top_k, fields.top_p, fields.min_p, seed),
        penalties=Penalties(fields.presence_penalty, fields.frequency_penalty, fields.repetition_penalty),
        bias=tuple((int(key), value) for key, value in (fields.logit_bias or {}).items()),
        allowed=None if fields.allowed_token_ids is None else tuple(dict.fromkeys(fields.allowed_token_ids)),
        stop=stops(fields),
        stop_tokens=tuple(dict.fromkeys(fields.stop_token_ids or ())),
        keeps_stop=fields.include_stop_str_in_output,
        ignores_end=fields.ignore_eos,
        min_new=fields.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        priority=fields.priority,
        salt=fields.cache_salt,
    )


def stops(fields: SamplingFields) -> tuple[str, ...]:
    """The stop strings, each once."""
    given = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return tuple(dict.fromkeys(given))


def check_model(service: Service, name: str | None) -> None:
    """BadRequest 404 for the name of a model that is not served; no name is the one that is."""
    if name is not None and name != service.name:
        message = f"model: {quoted(name)} is not served here, only {quoted(service.name)}"
        raise BadRequest(message, "model", status=404, code="model_not_found")


def usage(prompt: int, cached: int, completion: int, reasoning: int | None = None) -> dict[str, Any]:
    """The usage object of the OpenAI API."""
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return told if reasoning is None else {**told, "completion_tokens_details": {"reasoning_tokens": reasoning}}


def _has_token(config: Config, tokenizer: Tokenizer | None) -> Callable[[int], bool]:
    known = () if tokenizer is None else tokenizer.bytes_of

    def has(token: int) -> bool:
        inside = 0 <= token < config.vocab_size
        return inside and (tokenizer is None or (token < len(known) and known[token] is not None))

    return has


def _problems(
    fields: SamplingFields, limits: Limits, has: Callable[[int], bool], logprobs: int | None
) -> Iterator[str]:
    yield from _counts(fields, limits, logprobs)
    given = stops(fields)
    if "" in given:
        yield "stop: an empty string would match everywhere"
    if any(len(text) > limits.stop_length for text in given):
        yield f"stop: a string is longer than the limit of {limits.stop_length} characters"
    if fields.allowed_token_ids == []:
        yield "allowed_token_ids: must name at least one id"
    for name in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate((getattr(fields, name) or [])[: limits.bias]):
            if not has(token):
                yield f"{name}[{place}]: no token has id {quoted(token)}"
                break
    if len(fields.logit_bias or {}) <= limits.bias:
        yield from _bias(fields.logit_bias or {}, has)
    if fields.max_tokens is not None and fields.min_tokens > max(fields.max_tokens, 1):
        yield f"min_tokens: {fields.min_tokens} is more than max_tokens {fields.max_tokens}"


def _counts(fields: SamplingFields, limits: Limits, logprobs: int | None) -> Iterator[str]:
    found = {
        "n": (fields.n, limits.choices),
        "stop": (len(stops(fields)), limits.stops),
        "stop_token_ids": (len(fields.stop_token_ids or ()), limits.bias),
        "allowed_token_ids": (len(fields.allowed_token_ids or ()), limits.bias),
        "logit_bias": (len(fields.logit_bias or {}), limits.bias),
        "logprobs": (logprobs or 0, limits.logprobs),
        "prompt_logprobs": (fields.prompt_logprobs or 0, limits.logprobs),
    }
    for name, (value, limit) in found.items():
        if value > limit:
            yield f"{name}: {quoted(value)} is more than the limit of {limit}"


def _bias(given: dict[str, float], has: Callable[[int], bool]) -> Iterator[str]:
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and has(int(key))):
            yield f"logit_bias: {quoted(key)} is not the id of a token"
            return
        if abs(value) > BIAS:
            yield f"logit_bias: {quoted(value)} of {key} must be from {-BIAS:g} to {BIAS:g}"
            return
    if len({int(key) for key in given}) < len(given):
        yield "logit_bias: one id is given twice"
