"""Load for an OpenAI-compatible server, and what it showed: many streamed answers at once, and every event timed.

Times are seconds of the client's clock. They include the network and the client's own work.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import httpx
import numpy as np

Messages = list[dict[str, Any]]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
UNFINISHED = "unfinished"  # had no end when the level was cut
# Short and common, so that in most vocabularies each is one token with its space.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city name"
).split()


class Target(NamedTuple):
    """Whom to ask, and what every request says beside its messages."""

    url: str
    model: str
    key: str | None = None
    fields: dict[str, Any] = {}  # noqa: RUF012  # never changed
    timeout: float = 300.0  # of one request
    api: str = "chat"  # of PATHS

    def body(self, messages: Messages) -> dict[str, Any]:
        """Of a streamed request. A completion continues the text of the messages, and tells its tokens one by one
        whether or not there is text to show for them."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        text = "\n".join(str(message["content"]) for message in messages)
        asked = {"messages": messages} if self.api == "chat" else {"prompt": text, "return_token_ids": True}
        return {"model": self.model, **asked, **options, **self.fields}


class Sample(NamedTuple):
    """One request. `first` is None if no text came; `gaps` are the times between one event with text and the next."""

    failure: str  # empty: it succeeded
    whole: float = 0.0
    first: float | None = None
    gaps: tuple[float, ...] = ()
    prompt: int = 0  # tokens
    cached: int = 0
    output: int = 0
    has_usage: bool = False  # else tokens are events


class Level(NamedTuple):
    """What one level of the load showed. `is_cut`: it ran out of time or was interrupted."""

    concurrency: int
    seconds: float
    samples: tuple[Sample, ...]
    is_cut: bool = False
    is_interrupted: bool = False


class Spread(NamedTuple):
    """Percentiles."""

    p50: float
    p90: float
    p99: float


class Summary(NamedTuple):
    """A level in numbers; those of tokens and times are of the requests that succeeded."""

    concurrency: int
    seconds: float
    ok: int
    failed: dict[str, int]  # by kind
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    has_usage: bool  # else tokens are events
    first_token: Spread | None
    between_tokens: Spread | None
    whole: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    """Percentiles with linear interpolation between neighbours; None of nothing."""
    return Spread(*map(float, np.percentile(values, (50, 90, 99)))) if values else None


def summary(level: Level) -> Summary:
    """The numbers of a level."""
    ok = [sample for sample in level.samples if not sample.failure]
    output, seconds = sum(sample.output for sample in ok), max(level.seconds, 1e-9)
    return Summary(
        level.concurrency,
        level.seconds,
        len(ok),
        dict(Counter(sample.failure for sample in level.samples if sample.failure)),
        len(ok) / seconds,
        output / seconds,
        sum(sample.prompt for sample in ok),
        sum(sample.cached for sample in ok),
        output,
        all(sample.has_usage for sample in ok),
        spread([sample.first for sample in ok if sample.first is not None]),
        spread([gap for sample in ok for gap in sample.gaps]),
        spread([sample.whole for sample in ok]),
    )


def random_prompts(count: int, words: int, seed: str) -> list[Messages]:
    """Messages of random words."""
    draw = Random(seed)
    return [[{"role": "user", "content": " ".join(draw.choices(WORDS, k=words))}] for _ in range(count)]


def arrivals(count: int, rate: float, seed: str) -> list[float]:
    """Times of a Poisson process with so many events a second."""
    draw, time, found = Random(seed), 0.0, list[float]()
    for _ in range(count):
        time += draw.expovariate(rate)
        found.append(time)
    return found


def check_url(url: str) -> None:
    """Raises ValueError naming --url unless it can be that of a server."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--url {url}: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError(f"--url {url}: must begin with http:// or https:// and a host")


def client_of(target: Target, concurrency: int) -> httpx.AsyncClient:
    """A client with a connection for each request at a time. It goes straight there: a proxy would be measured too."""
    return httpx.AsyncClient(
        base_url=target.url.rstrip("/").removesuffix("/v1"),
        headers={"authorization": f"Bearer {target.key}"} if target.key else {},
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        timeout=target.timeout,
        trust_env=False,
    )


async def first_model(target: Target) -> str:
    """The name of the first model that is served. Raises ValueError with --url if that cannot be had."""
    try:
        async with client_of(target, 1) as client:
            response = await client.get("/v1/models")
        if response.status_code != 200:
            raise ValueError(f"--url {target.url}: /v1/models answers with status {response.status_code}")
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ValueError(f"--url {target.url}: cannot be reached ({type(error).__name__}: {error})") from error
    except (LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--url {target.url}: /v1/models lists no model; give one with --model") from error


async def run_level(
    target: Target,
    prompts: Sequence[Messages],
    concurrency: int,
    *,
    times: Sequence[float] | None = None,
    limit: float = 600.0,
    note: Callable[[Sample], None] | None = None,
) -> Level:
    """Asks all prompts, at most `concurrency` at once, each at its time if there are `times`; tells `note` of each.

    Times of a request then count from when it should have been sent, so that waiting for a place is not left out. After
    `limit` seconds, or when the task is cancelled, what has no end yet is unfinished.
    """
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(concurrency)
    samples, is_cut, is_interrupted = list[Sample](), False, False

    async def one(client: httpx.AsyncClient, number: int, started: float) -> None:
        begun = None if times is None else started + times[number]
        if begun is not None:
            await asyncio.sleep(begun - loop.time())
        async with places:
            sample = await ask(client, target, prompts[number], begun)
        samples.append(sample)
        if note:
            note(sample)

    async with client_of(target, concurrency) as client:  # reads certificates, which is no part of the load
        started = loop.time()
        try:
            async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
                for number in range(len(prompts)):
                    group.create_task(one(client, number, started))
        except TimeoutError:
            is_cut = True
        except asyncio.CancelledError:  # of what is known is told, and whoever cancelled sees it in the level
            is_cut = is_interrupted = True
        seconds = loop.time() - started
    missing = [Sample(UNFINISHED)] * (len(prompts) - len(samples))
    return Level(concurrency, seconds, (*samples, *missing), is_cut, is_interrupted)


async def ask(client: httpx.AsyncClient, target: Target, messages: Messages, begun: float | None = None) -> Sample:
    """One streamed answer. Never raises for what the server or the network does."""
    loop = asyncio.get_running_loop()
    seen = _Seen(loop.time() if begun is None else begun)
    body, path = target.body(messages), PATHS[target.api]
    try:
        async with asyncio.timeout(target.timeout), client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return Sample(f"status {response.status_code}", loop.time() - seen.begun)
            async with aclosing(events(response)) as told:
                async for event in told:
                    seen.take(event, loop.time())
        return seen.sample(loop.time())
    except (TimeoutError, httpx.TimeoutException):
        return Sample("timeout", loop.time() - seen.begun)
    except httpx.HTTPError:
        return Sample("connection", loop.time() - seen.begun)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Sample("not understood", loop.time() - seen.begun)


async def events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """The JSON of server-sent events, up to [DONE]. ValueError for what is not JSON."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data != b"[DONE]":
                yield json.loads(data)


@dataclass
class _Seen:
    """What has come of one stream."""

    begun: float
    times: list[float] = field(default_factory=list[float])  # of events with tokens, or with text where none are told
    has_ids: bool = False
    usage: dict[str, Any] | None = None
    failure: str = "cut off"  # until the answer has a finish reason

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.failure = "error in the stream"
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            said = choice.get("delta") or {"text": choice.get("text")}
            has_text = any(value for name, value in said.items() if name != "role")
            self.has_ids |= bool(ids := choice.get("token_ids"))
            if ids or (has_text and not self.has_ids):
                self.times.append(now)
            if choice.get("finish_reason") and self.failure == "cut off":
                self.failure = ""

    def sample(self, now: float) -> Sample:
        usage = self.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        gaps = tuple(later - time for time, later in zip(self.times, self.times[1:], strict=False))
        return Sample(
            self.failure,
            now - self.begun,
            self.times[0] - self.begun if self.times else None,
            gaps,
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            usage.get("completion_tokens", len(self.times)),
            self.usage is not None,
        )
