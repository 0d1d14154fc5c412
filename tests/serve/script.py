"""An engine for tests that plays what it is told, and a service around it: no weights, no threads, no clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

from muse_fn.params.config import Config
from muse_fn.serve.jobs import Done, Finish, Job, JobEvent, Load, Logprob, New, Reading, Refused, Scored
from muse_fn.serve.options import EMBEDDED
from muse_fn.serve.service import Limits, Service
from muse_fn.tokenizer import Tokenizer, load_tokenizer

Step: TypeAlias = "JobEvent | int | BaseException | asyncio.Event"
Script: TypeAlias = "Iterable[Step] | Callable[[Job], Iterable[Step]]"
WINDOW = 4096  # prompt and answer together


@dataclass
class ScriptedStream:
    """The events of one job as the script has them. Its budget and its stop tokens end it as they would any job."""

    job: Job
    steps: tuple[Step, ...]
    engine: "ScriptedEngine"
    ended: bool = False
    cancels: int = 0  # how often it was cancelled before it had ended
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self, finish: Finish = "abort") -> None:
        if not self.ended:
            self.cancels += 1
            self.engine.cancels += 1
            self.end(finish)

    def end(self, finish: Finish) -> None:
        if not self.ended:
            self.ended = True
            self.finish: Finish = finish
            self.stopped.set()
            self.engine.running -= 1

    async def __aiter__(self) -> AsyncIterator[JobEvent]:
        count = 0
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                await self._wait(step)
            if self.ended:
                break
            if isinstance(step, BaseException):
                self.end("error")
                raise step
            event = New(step, self.engine.logprob(self.job, step)) if isinstance(step, int) else step
            if isinstance(event, asyncio.Event):
                continue
            await asyncio.sleep(0)
            if isinstance(event, Done):
                self.end(event.finish)
                yield event
                return
            yield event
            if isinstance(event, New):
                count += 1
                if event.token in self.job.stop_tokens:
                    self.end("stop")
                elif count == self.job.max_new:
                    self.end("length")
        self.end("stop")
        yield Done(self.finish)

    async def _wait(self, gate: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(gate.wait()), asyncio.ensure_future(self.stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


@dataclass
class ScriptedEngine:
    """Plays a script for every job: token ids, job events, exceptions to raise, events to wait for.

    A script may be a function of the job. What is left out is added: a `Reading` of the whole prompt, scores if they
    are asked for, the end. `jobs` are all that were submitted, `cancels` counts those cancelled before their end.
    """

    script: Script = ()
    window: int = WINDOW
    cached: int = 0  # prompt tokens said to be known
    refuses: Refused | None = None
    health: str = ""
    jobs: list[Job] = field(default_factory=list[Job])
    streams: list[ScriptedStream] = field(default_factory=list[ScriptedStream])
    running: int = 0
    cancels: int = 0

    def submit(self, jobs: tuple[Job, ...]) -> tuple[ScriptedStream, ...]:
        if self.refuses is not None:
            raise self.refuses
        for job in jobs:
            if not job.ids:
                raise ValueError("prompt: has no tokens")
            if len(job.ids) >= self.window:
                raise ValueError(f"prompt: has {len(job.ids)} tokens; the limit is {self.window - 1}")
        streams = tuple(ScriptedStream(job, self._steps(job), self) for job in jobs)
        self.jobs += jobs
        self.streams += streams
        self.running += len(jobs)
        return streams

    def abort(self, request: str) -> int:
        found = [stream for stream in self.streams if stream.job.request == request and not stream.ended]
        for stream in found:
            stream.end("abort")
        return len(found)

    def load(self) -> Load:
        return Load(0, self.running, self.running, 0, 100)

    def logprob(self, job: Job, token: int) -> Logprob | None:
        """A made-up one: the chosen token first, then the ids after it."""
        if job.logprobs is None:
            return None
        return Logprob(-0.5, 1, tuple((token + place, -0.5 - place) for place in range(job.logprobs)))

    def _steps(self, job: Job) -> tuple[Step, ...]:
        steps = tuple(self.script(job) if callable(self.script) else self.script)
        total = len(job.ids)
        first: list[Step] = [Reading(total, total, min(self.cached, total))]
        if job.prompt_logprobs is not None:
            wanted = replace(job, logprobs=job.prompt_logprobs)
            first.append(Scored(0, (None, *(self.logprob(wanted, token) for token in job.ids[1:]))))
        return (*first, *steps)


@cache
def nano() -> tuple[Config, Tokenizer]:
    """Config and tokenizer of the embedded checkpoint."""
    return Config.from_json(EMBEDDED), load_tokenizer(EMBEDDED)


def tokens_of(*texts: str) -> list[int]:
    """One or more ids for each text, so that tests decide where tokens are cut; a control token by its name."""
    tokenizer = nano()[1]
    return [
        id
        for text in texts
        for id in ([tokenizer.controls[text]] if text in tokenizer.controls else tokenizer.encode(text))
    ]


def bytes_tokens(text: str) -> list[int]:
    """One id for each byte of the text."""
    single = {raw: token for token, raw in enumerate(nano()[1].bytes_of) if raw is not None and len(raw) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def make_service(engine: ScriptedEngine, **changes: object) -> Service:
    """A service named `nano` over this engine; changes are fields of Service, `limits` a Limits."""
    config, tokenizer = nano()
    base = Service("nano", config, tokenizer, engine, None, Limits())
    return replace(base, **changes)  # type: ignore[arg-type]


def quick(**changes: object) -> Limits:
    """Limits with these changes."""
    return replace(Limits(), **changes)  # type: ignore[arg-type]
