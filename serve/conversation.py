"""A turn of a conversation: checked, rendered, submitted, and its jobs' events as `TurnEvent`s."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from muse_fn.serve import reply
from muse_fn.serve.channels import CHANNELS
from muse_fn.serve.chat import check_tools, render_chat
from muse_fn.serve.errors import BadRequest
from muse_fn.serve.grammar import Blueprint, Framing
from muse_fn.serve.jobs import Done, Job, JobEvent, Logprob, New, Reading, Scored, Stream
from muse_fn.serve.service import Limits, Service
from muse_fn.serve.turns import Asked, Named, Progress, PromptScores, Turn, TurnEvent
from muse_fn.tokenizer import Json, Tokenizer

T = TypeVar("T")
log = logging.getLogger("muse_fn.serve")
MESSAGES = 16384  # of one conversation: templates need a while for each, however short
TOO_LONG = "context_length_exceeded"  # by which clients know that they should shorten the conversation
_UNSPEAKABLE = re.compile(r'[\s"<>]')  # what a header or a call could not carry
_CHANNELS = ", ".join(filter(None, CHANNELS))


@dataclass(frozen=True)
class Running:
    """A turn that has been submitted. Iterate it once; `cancel` it when the rest is not wanted."""

    prompt_ids: tuple[int, ...]
    streams: tuple[Stream, ...]
    states: tuple[reply.ReplyState, ...]

    async def __aiter__(self) -> AsyncGenerator[TurnEvent]:
        try:
            async with aclosing(_merged([self._choice(index) for index in range(len(self.streams))])) as events:
                async for event in events:
                    yield event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Gives back what the jobs hold; may be called at any time, twice too."""
        for stream in self.streams:
            stream.cancel()

    async def _choice(self, index: int) -> AsyncGenerator[TurnEvent]:
        """The events of one choice. What the engine throws becomes its end, so that the others go on."""
        stream, state, total = self.streams[index], self.states[index], len(self.prompt_ids)
        cached, scores, done = 0, list[Logprob | None](), Done("error", "the engine ended without a word")
        try:
            async for event in stream:
                cached = event.cached if isinstance(event, Reading) else cached
                scores += event.found if isinstance(event, Scored) else ()
                for shown in _of_prompt(index, event, scores, total):
                    yield shown
                if isinstance(event, New):
                    state, said, stopped = reply.push(state, event.token, event.logprob)
                    for shown in said:
                        yield shown
                    if stopped:
                        stream.cancel("stop")
                if isinstance(event, Done) or state.stopped is not None:
                    done = event if isinstance(event, Done) else Done("stop")
                    break
        except Exception:
            log.exception("request %s: choice %d ended by an error of the engine", state.rules.request, index)
            done = Done("error", "the engine failed while it generated this answer")
        for shown in reply.finish(state, done, total, cached):
            yield shown


async def start(service: Service, turn: Turn, request_id: str, *, budget_field: str = "max_tokens") -> Running:
    """Renders, checks and submits a turn. Everything that can be known before the first token is raised here.

    ValueError names the field of the request at fault, `budget_field` being what it calls the number of new tokens;
    Refused when the engine takes no more.
    """
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ValueError("messages: this checkpoint has no tokenizer, so there is no chat; give token ids as a prompt")
    _check_tools(turn, service.limits)
    ids = await prompt_ids(tokenizer, turn)
    max_new = budget(len(ids), turn.asked.max_new, service.config.max_positions, budget_field)
    blueprint = await _blueprint(service, turn)
    jobs = tuple(_job(tokenizer, turn.asked, i, ids, max_new, blueprint, request_id) for i in range(turn.asked.n))
    states = tuple(_begin(tokenizer, turn, i, request_id) for i in range(turn.asked.n))
    return Running(ids, service.engine.submit(jobs), states)


async def prompt_ids(tokenizer: Tokenizer, turn: Turn) -> tuple[int, ...]:
    """The prompt of a turn. In a thread: a long conversation takes longer than other requests should wait.

    With tool_choice none the prompt knows no tools. Raises ValueError naming the field, the template's refusals too.
    """
    if isinstance(turn.messages, list) and len(turn.messages) > MESSAGES:
        raise ValueError(f"messages: {len(turn.messages)} messages are more than the limit of {MESSAGES}")
    return await asyncio.to_thread(_prompt_ids, tokenizer, turn)


def budget(prompt: int, asked: int | None, limit: int, field: str = "max_tokens") -> int:
    """How many tokens may be generated: as asked, else up to the limit. BadRequest has the three numbers."""
    if prompt >= limit:
        message = f"messages: the prompt has {prompt} tokens, which leaves no room for an answer: the maximum context "
        raise BadRequest(message + f"length is {limit} tokens for both", "messages", code=TOO_LONG)
    if asked is not None and prompt + asked > limit:
        message = f"{field} is {asked}: with the {prompt} tokens of the prompt that is {prompt + asked}, above the "
        message += f"maximum context length of {limit} tokens; at most {limit - prompt} are left"
        raise BadRequest(message, field, code=TOO_LONG)
    return limit - prompt if asked is None else asked


def function_names(tools: Json) -> tuple[str, ...]:
    """The names a call may have, in order; those of a namespace's functions are `namespace.function`."""
    return _names(check_tools(tools), "")


def _count(tools: Json) -> int:
    """How many functions there are at most, before anything about them is known: in time that floods cannot stretch."""
    listed = tools if isinstance(tools, list) else []
    inner = (tool.get("tools") for tool in listed if isinstance(tool, dict))
    return len(listed) + sum(len(tools) - 1 for tools in inner if isinstance(tools, list))


def _names(tools: Json, prefix: str) -> tuple[str, ...]:
    found = list[str]()
    for tool in tools if isinstance(tools, list) else []:
        entry = tool if isinstance(tool, dict) else {}
        if entry.get("type") == "namespace" and not prefix:
            found += _names(entry.get("tools"), f"{entry.get('name')}.")
            continue
        function = entry.get("function", entry)
        found += [f"{prefix}{function.get('name')}"] if isinstance(function, dict) else []
    return tuple(found)


def _check_tools(turn: Turn, limits: Limits) -> None:
    """Whether each tool can be called by its name, and whether the tools can do what tool_choice wants."""
    if (count := _count(turn.tools)) > limits.tools:
        raise ValueError(f"tools: {count} functions are more than the limit of {limits.tools}")
    names = function_names(turn.tools)
    for name in names:
        if len(name) > limits.name:
            raise ValueError(f"tools: a name of {len(name)} characters is longer than the limit of {limits.name}")
        if name in CHANNELS or _UNSPEAKABLE.search(name):
            raise ValueError(f"tools: the name {name!a} cannot be called: must not be a channel ({_CHANNELS}) or have "
                             'white space, quotation marks or angle brackets in it')  # fmt: skip
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"tools: {twice[0]!r} is declared more than once")
    choice = turn.tool_choice
    if isinstance(choice, Named) and choice.name not in names:
        declared = ", ".join(names[:8]) or "none"
        raise ValueError(f"tool_choice: names {choice.name[:60]!a}, which is not among the tools: {declared}")
    if choice == "required" and not names:
        raise ValueError("tool_choice: is 'required', but the request has no tools")


def _offered(turn: Turn) -> Json:
    return None if turn.tool_choice == "none" else turn.tools


def _prompt_ids(tokenizer: Tokenizer, turn: Turn) -> tuple[int, ...]:
    try:
        pieces = render_chat(
            tokenizer, turn.messages, tools=_offered(turn), reasoning_effort=turn.effort, variables=turn.variables
        )
    except ValueError as error:
        # The template's own sentence names the field; what runs it only gets in the way.
        said = str(error).removeprefix("chat template: ")
        raise ValueError(said) if said.startswith("reasoning_effort") else error from None
    return tuple(tokenizer.encode_pieces(pieces))


async def _blueprint(service: Service, turn: Turn) -> Blueprint | None:
    if service.grammars is not None:
        framing = Framing(_offered(turn), turn.tool_choice, turn.parallel_tool_calls, turn.final)
        if framing.is_free:
            return None
        return await service.metrics.timing_grammar(service.grammars.build(framing))
    if turn.final is not None or turn.tool_choice not in ("auto", "none"):
        raise ValueError("tool_choice, response_format: this server has nothing to enforce them with")
    return None


def _stops(tokenizer: Tokenizer, asked: Asked) -> tuple[int, ...]:
    return () if asked.ignores_end else tokenizer.stop_ids


def _job(
    tokenizer: Tokenizer,
    asked: Asked,
    index: int,
    ids: tuple[int, ...],
    max_new: int,
    blueprint: Blueprint | None,
    request_id: str,
) -> Job:
    """One choice. Prompt scores are the same for all, so the first choice alone makes them."""
    return Job(
        request=request_id,
        ids=ids,
        max_new=max_new,
        sampling=replace(asked.sampling, seed=asked.sampling.seed + index),
        penalties=asked.penalties,
        bias=asked.bias,
        allowed=asked.allowed,
        stop_tokens=tuple(dict.fromkeys((*_stops(tokenizer, asked), *asked.stop_tokens))),
        min_new=asked.min_new,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs if index == 0 else None,
        constraint=blueprint.begin(max_new) if blueprint else None,
        priority=asked.priority,
        salts=(("salt", asked.salt),) if asked.salt is not None else (),
    )


def _begin(tokenizer: Tokenizer, turn: Turn, index: int, request_id: str) -> reply.ReplyState:
    return reply.begin(
        tokenizer,
        request=request_id,
        choice=index,
        tools=_offered(turn),
        stops=turn.asked.stop,
        keeps_stop=turn.asked.keeps_stop,
        stop_tokens=turn.asked.stop_tokens,
        ends=_stops(tokenizer, turn.asked),
        allows_calls=bool(_offered(turn)),
    )


def _of_prompt(index: int, event: JobEvent, scores: list[Logprob | None], total: int) -> list[TurnEvent]:
    """What is said about the prompt: by the first choice, for all of them."""
    if index == 0 and isinstance(event, Reading):
        return [Progress(event.done, event.total, event.cached)]
    if index == 0 and isinstance(event, Scored) and len(scores) == total:
        return [PromptScores(tuple(scores))]
    return []


async def _merged(sources: list[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """All events in the order in which they come.

    The queue has no bound, so that a source ends even if nobody reads: the engine bounds what a job may say.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for event in events:
                yield event
        return
    queue = asyncio.Queue[tuple[T] | None]()

    async def pump(source: AsyncGenerator[T]) -> None:
        try:
            async for event in source:
                queue.put_nowait((event,))
        finally:
            queue.put_nowait(None)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(pumps)
        while left:
            if (item := await queue.get()) is None:
                left -= 1
            else:
                yield item[0]
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
