"""An engine over a small random model, for tests: jobs in, what each got out."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from muse_fn.batch import Runner
from muse_fn.kernels.select import INVARIANT, Ops
from muse_fn.params.config import Config
from muse_fn.serve.capacity import EngineSettings
from muse_fn.serve.engine import ModelEngine
from muse_fn.serve.jobs import Done, Job, JobEvent, Logprob, New, Reading, Scored, Stream
from tests.models import random_params

T = TypeVar("T")
TINY = Config(
    vocab_size=512, hidden_size=32, intermediate_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, latent_size=16,
    expert_size=16, experts=4, top_k=2, window=8, max_positions=128, initializer_range=0.1, bos_token_id=None,
    eos_token_id=(),
)  # fmt: skip
PATIENCE = 240.0  # seconds: a guard against hanging


@dataclass
class Got:
    """What one job got."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[Logprob | None] = field(default_factory=list[Logprob | None])
    prompt: list[Logprob | None] = field(default_factory=list[Logprob | None])
    cached: int = 0
    done: Done = Done("error", "no event came")  # noqa: RUF009


async def collected(stream: Stream) -> Got:
    """Everything of a stream."""
    got = Got()
    async for event in stream:
        _take(got, event)
    return got


def _take(got: Got, event: JobEvent) -> None:
    match event:
        case New(token, logprob):
            got.tokens.append(token)
            got.logprobs.append(logprob)
        case Scored(start, found):
            assert start == len(got.prompt)
            got.prompt += found
        case Reading(_, _, cached):
            got.cached = cached
        case Done():
            got.done = event


@asynccontextmanager
async def engine_of(
    config: Config = TINY,
    seed: int = 0,
    ops: Ops | None = None,
    params: Any = None,
    starts: bool = True,
    **settings: Any,
) -> AsyncGenerator[ModelEngine]:
    """A started engine (unless not `starts`); nothing of a job is left in it when it stops."""
    chosen = replace(EngineSettings(rows=16, chunk=16, num_blocks=400, block_size=4), **settings)
    runner = Runner(params or random_params(config, seed), config, chunk=chosen.chunk, ops=ops or INVARIANT)
    engine = ModelEngine(runner, chosen)
    if starts:
        engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def all_of(engine: ModelEngine, jobs: Sequence[Job]) -> list[Got]:
    """Jobs submitted at once, each by itself."""
    streams = [engine.submit((job,))[0] for job in jobs]
    return list(await asyncio.gather(*map(collected, streams)))


def run(make: Callable[[], Awaitable[T]]) -> T:
    """A coroutine to its end, within bounds."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await make()

    return asyncio.run(bounded())


def served(jobs: Sequence[Job], **options: Any) -> list[Got]:
    """What these jobs get from an engine of their own."""

    async def main() -> list[Got]:
        async with engine_of(**options) as engine:
            found = await all_of(engine, jobs)
            assert engine.load()[:3] == (0, 0, 0), "nothing is held at the end"
            return found

    return run(main)
