"""Prompts without a conversation: submitted to the engine, and all choices' events merged in the order they come."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from muse_fn.serve import plain
from muse_fn.serve.errors import BadRequest, Failed
from muse_fn.serve.grammar import Blueprint
from muse_fn.serve.jobs import Done, Finish, Job, Logprob, New, Reading, Scored, Stream
from muse_fn.serve.plain import Rules, Token
from muse_fn.serve.service import Service
from muse_fn.serve.turns import Asked, Final

Scores: TypeAlias = tuple[Logprob | None, ...]


class Prompt(NamedTuple):
    """What is to be continued; `text` spells it, as far as there is a tokenizer."""

    ids: tuple[int, ...]
    text: str


class Begun(NamedTuple):
    """The first event of a choice: the prompt has been read."""

    choice: int
    cached: int
    scores: Scores  # of the prompt's tokens, if they were asked for


class Grown(NamedTuple):
    """Text that is settled, and the tokens drawn since the last event of this choice. Either may be empty."""

    choice: int
    text: str
    tokens: tuple[Token, ...]


class Closed(NamedTuple):
    """The last event of a choice, with the text that was held."""

    choice: int
    text: str
    finish: Finish
    stop_reason: str | int | None
    completion: int  # tokens


Event: TypeAlias = Begun | Grown | Closed


@dataclass(frozen=True)
class Run:
    """Jobs of all prompts and choices; choice i of prompt p has the number p * n + i. `events` is iterated once."""

    prompts: tuple[Prompt, ...]
    asked: Asked
    streams: tuple[Stream, ...]
    states: tuple[plain.Plain, ...]

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt that a choice continues."""
        return self.prompts[choice // self.asked.n]

    def cancel(self) -> None:
        """Gives back what the jobs hold; may be called at any time, twice too."""
        for stream in self.streams:
            stream.cancel()

    async def events(self) -> AsyncGenerator[Event]:
        """Raises Failed when the engine cannot go on with a choice; the other choices are then given up too."""
        loop = asyncio.get_running_loop()
        scores: list[asyncio.Future[Scores]] = [loop.create_future() for _ in self.prompts]
        queue = asyncio.Queue[Event | BaseException | None]()

        async def pump(choice: int) -> None:
            try:
                async for event in _choice(self, choice, scores[choice // self.asked.n]):
                    queue.put_nowait(event)
            except Exception as error:
                queue.put_nowait(error)
            finally:
                queue.put_nowait(None)

        pumps = [asyncio.create_task(pump(choice)) for choice in range(len(self.streams))]
        try:
            left = len(pumps)
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            self.cancel()
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def launch(
    service: Service, prompts: tuple[Prompt, ...], asked: Asked, request: str, final: Final | None, *, skips: bool
) -> Run:
    """Checks lengths, builds the constraint, submits. `skips` leaves control tokens out of the text.

    Raises BadRequest for what cannot be honoured, Refused when the engine takes no more.
    """
    window = service.config.max_positions
    budgets = [_budget(place, len(prompt.ids), asked.max_new, window) for place, prompt in enumerate(prompts)]
    blueprint = await _blueprint(service, final)
    tokenizer = service.tokenizer
    if asked.stop and tokenizer is None:
        raise BadRequest("stop: this checkpoint has no tokenizer, so there is no text to search", "stop")
    ends = () if asked.ignores_end else _ends(service)
    jobs = tuple(
        _job(prompt, budget, asked, choice, request, ends, blueprint)
        for prompt, budget in zip(prompts, budgets, strict=True)
        for choice in range(asked.n)
    )
    silent = frozenset(ends) | (frozenset() if asked.keeps_stop else frozenset(asked.stop_tokens))
    rules = Rules(tokenizer, silent, frozenset(asked.stop_tokens), skips)
    states = tuple(plain.begin(rules, asked.stop, asked.keeps_stop) for _ in jobs)
    return Run(prompts, asked, service.engine.submit(jobs), states)


async def _choice(run: Run, choice: int, scores: "asyncio.Future[Scores]") -> AsyncGenerator[Event]:
    """The events of one choice. The first choice of a prompt scores it for all."""
    stream, state, has_begun, cached = run.streams[choice], run.states[choice], False, 0
    found: list[Logprob | None] = []
    done = Done("error", "the engine ended without a word")
    try:
        async for event in stream:
            if isinstance(event, Reading):
                cached = event.cached
            elif isinstance(event, Scored):
                found += event.found
            if isinstance(event, New | Done) and not has_begun:
                has_begun = True
                if choice % run.asked.n == 0:
                    scores.set_result(tuple(found))
                yield Begun(choice, cached, await scores)
            if isinstance(event, New) and run.asked.max_new != 0:
                state, text, token = plain.push(state, event.token, event.logprob)
                yield Grown(choice, text, (token,))
            if isinstance(event, Done) or state.stopped is not None or (has_begun and run.asked.max_new == 0):
                done = event if isinstance(event, Done) else Done("length")
                stream.cancel("stop")  # nothing, where the job is over
                break
    finally:
        stream.cancel()
        if choice % run.asked.n == 0 and not scores.done():
            scores.set_result(())
    if done.finish == "error":
        raise Failed(done.why)
    text, finish, reason = plain.finish(state, done)
    yield Closed(choice, text, "length" if run.asked.max_new == 0 else finish, reason, state.drawn)


def _job(
    prompt: Prompt,
    budget: int,
    asked: Asked,
    choice: int,
    request: str,
    ends: tuple[int, ...],
    blueprint: Blueprint | None,
) -> Job:
    return Job(
        request=request,
        ids=prompt.ids,
        max_new=max(budget, 1),
        sampling=replace(asked.sampling, seed=asked.sampling.seed + choice),
        penalties=asked.penalties,
        bias=asked.bias,
        allowed=asked.allowed,
        stop_tokens=tuple(dict.fromkeys((*ends, *asked.stop_tokens))),
        min_new=asked.min_new,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs if choice == 0 else None,
        constraint=blueprint.begin() if blueprint else None,
        priority=asked.priority,
        salts=(("salt", asked.salt),) if asked.salt is not None else (),
    )


async def _blueprint(service: Service, final: Final | None) -> Blueprint | None:
    if final is None:
        return None
    if service.grammars is None:
        raise BadRequest("structured_outputs: this server has no tokenizer to enforce it with", "structured_outputs")
    return await service.metrics.timing_grammar(service.grammars.build_plain(final))


def _ends(service: Service) -> tuple[int, ...]:
    if service.tokenizer is not None:
        return service.tokenizer.stop_ids
    return service.config.eos_token_id


def _budget(place: int, length: int, asked: int | None, window: int) -> int:
    """How many tokens may be drawn: as asked, else up to the limit of the model. BadRequest with the numbers."""
    if length == 0:
        raise BadRequest(f"prompt[{place}]: has no tokens", "prompt")
    if length >= window:
        message = f"prompt[{place}]: has {length} tokens; with at least one more the model's limit is {window}"
        raise BadRequest(message, "prompt", code="context_length_exceeded")
    if asked is not None and length + asked > window:
        message = (
            f"max_tokens: {asked} and the {length} tokens of prompt[{place}] are {length + asked}, more than the "
            f"model's limit of {window}; at most {window - length} are left"
        )
        raise BadRequest(message, "max_tokens", code="context_length_exceeded")
    return window - length if asked is None else asked
