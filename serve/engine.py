"""The engine: one task owns all sequences and the cache, one thread runs the steps, and both work at the same time.

    arrivals, cancels -> plan -> launch ==step in the thread==> settle -> ends -> (next launch) -> events
                                   \\-- meanwhile: events of the step before, plan of the step after

All methods are called on the event loop. Nothing here knows text: stop strings and channels are the callers'.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muse_fn.batch import Runner
from muse_fn.capture import Progress
from muse_fn.kvcache.blocks import new_pool, stats
from muse_fn.kvcache.cache import KVCache
from muse_fn.serve.capacity import EngineSettings, capture_steps, open_cache, positions_that_fit
from muse_fn.serve.drawer import Drawer
from muse_fn.serve.following import NOTHING, announce
from muse_fn.serve.jobs import Done, Finish, Job, Load, New, Reading, Refused
from muse_fn.serve.lives import Live, end_of, newly_scored, scoring_of
from muse_fn.serve.metrics import Metrics
from muse_fn.serve.pace import Pace
from muse_fn.serve.replays import Replays
from muse_fn.serve.scheduler import Budget, Plan, Row, State, Work, add, end, launch, plan, settle
from muse_fn.serve.steps import Drawn, Found, Orders, Scoring, replays, run
from muse_fn.serve.streams import JobStream
from muse_fn.sharding.collectives import PeerError

PULSE = 60.0  # seconds without work after which the other ranks hear that all is well
FAILURES = 3  # steps that may fail one after the other before the engine gives up

log = logging.getLogger("muse_fn.serve")


class _Outcome(NamedTuple):
    """What a step gave, with the jobs it was for as they were when it began."""

    work: Work
    lives: dict[int, Live]
    found: Found
    seconds: float
    scorings: tuple[Scoring | None, ...] = ()


@dataclass
class ModelEngine:
    """See jobs.Engine. `start` before the first job, `stop` at the end. Times of `clock` are seconds.

    `limit` is the most positions that prompt and answer of one job may have together.
    """

    runner: Runner
    settings: EngineSettings = field(default_factory=EngineSettings)
    allowed_V: Tensor | None = None  # bool: ids that have a token; None: all
    metrics: Metrics = field(default_factory=Metrics)
    clock: Callable[[], float] = time.monotonic
    health: str = "not started"
    is_draining: bool = False

    def __post_init__(self) -> None:
        batch = open_cache(self.runner, self.settings)
        self._kv: KVCache = batch.kv
        self._captured: Replays | None = None
        self.limit = positions_that_fit(self.runner, self.settings)
        self._state = State(batch.pool)
        self._lives: dict[int, Live] = {}
        self._names, self._failures = 0, 0
        self._pace = Pace(self.settings.share)
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "steps")
        self._task: asyncio.Task[None] | None = None
        self._waiting_tokens = 0
        self._untold: _Outcome | None = None  # of which the streams have not heard yet

    def capture(self, progress: Progress | None = None) -> None:
        """Captures steps of all sizes, before the start. On a mesh every rank does, see `follow`."""
        self._captured, self._kv = capture_steps(self.runner, self._kv, self.settings, self.allowed_V, progress)
        self.metrics.captured(len(self._captured.steps.captured) + len(self._captured.reads.captured))

    def start(self) -> None:
        """Begins to run jobs."""
        self.health = ""
        self._task = asyncio.get_running_loop().create_task(self._main())

    async def drain(self, seconds: float) -> None:
        """Takes no more jobs; those it has may go on for so long, then they are aborted."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._until_idle()
        except TimeoutError:
            for live in list(self._lives.values()):
                self._finish(live, Done("abort", "the server is shutting down"))

    async def ended(self) -> None:
        """Until it has stopped or failed for good."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Ends everything at once. What is stopped already stays so."""
        if self.health == "stopped":
            return
        failed, self.is_draining, self.health = bool(self.health), True, "stopped"
        for live in list(self._lives.values()):
            self._finish(live, Done("abort", "the server is shutting down"))
        self._wake.set()
        if self._task is not None:
            await self._task
            if not failed:  # else the other ranks are as good as gone
                await self._announce(None)
        self._thread.shutdown()

    def submit(self, jobs: tuple[Job, ...]) -> tuple[JobStream, ...]:
        """See jobs.Engine."""
        if self.health:
            raise Refused(f"the engine is not running: {self.health}", 503, 5)
        if self.is_draining:
            raise Refused("the server is shutting down", 503, 5)
        for job in jobs:
            self._check(job)
        waiting, tokens = len(self._state.waiting) + len(jobs), sum(len(job.ids) for job in jobs)
        if len(self._state.waiting) and waiting > self.settings.queue:
            raise Refused(f"{len(self._state.waiting)} requests are waiting: the limit is {self.settings.queue}")
        if self._waiting_tokens and self._waiting_tokens + tokens > self.settings.queue_tokens:
            limit = self.settings.queue_tokens
            raise Refused(f"{self._waiting_tokens} prompt tokens are waiting: the limit is {limit}")
        twin: dict[tuple[object, ...], int] = {}
        found: list[JobStream] = []
        for job in jobs:
            same = (job.ids, *job.salts)
            found.append(self._enter(job, twin.get(same)))
            twin.setdefault(same, self._names)
        self._wake.set()
        return tuple(found)

    def abort(self, request: str) -> int:
        """See jobs.Engine."""
        own = [live for live in self._lives.values() if live.job.request == request]
        for live in own:
            self._finish(live, Done("abort", "aborted by request"))
        return len(own)

    @property
    def preemptions(self) -> int:
        """How often a job had to make room for others."""
        return self._state.preemptions

    def load(self) -> Load:
        """See jobs.Engine."""
        state = self._state
        blocks = stats(state.pool)
        held = len(state.reading) + len(state.running)
        return Load(len(state.waiting), held, blocks.used, blocks.cached, state.pool.num_blocks - 1)

    def _check(self, job: Job) -> None:
        """Raises ValueError for a job that can never run."""
        if not job.ids or job.max_new < 1 or len(job.ids) + job.max_new > self.limit:
            asked = f"{len(job.ids)} prompt tokens and {job.max_new} new ones"
            raise ValueError(f"{asked}: there is room for {self.limit} in all")

    def _enter(self, job: Job, twin: int | None) -> JobStream:
        self._names += 1
        name = self._names
        stream = JobStream(partial(self._cancel, name))
        drawer = Drawer(job, self.runner.config.vocab_size)
        self._lives[name] = Live(job, stream, drawer, self.clock())
        row = Row(
            name,
            np.array(job.ids, np.int32),
            len(job.ids) + job.max_new - 1,
            job.priority,
            job.salts,
            self.settings.reuse and job.prompt_logprobs is None,
            twin,
        )
        self._state = add(self._state, row)
        self._waiting_tokens += len(job.ids)
        return stream

    def _cancel(self, name: int, finish: Finish) -> None:
        live = self._lives.get(name)
        if live is not None:
            if finish == "abort":
                self.metrics.aborted()
            self._finish(live, Done(finish, "the client does not want the rest" if finish == "abort" else ""))

    def _finish(self, live: Live, done: Done, *, trusted: bool = True) -> None:
        """The job is over: its blocks are given back now, its stream hears of it."""
        name = next((name for name, other in self._lives.items() if other is live), None)
        if name is None:
            return
        del self._lives[name]
        self._state = end(self._state, name, trusted=trusted)
        if live.cached is None:  # it has never joined
            self._waiting_tokens -= len(live.job.ids)
        live.stream.push(done)
        self.metrics.finished(done.finish, self.clock() - live.arrived)
        self._wake.set()

    async def _until_idle(self) -> None:
        while self._lives:
            self._idle.clear()
            await self._idle.wait()

    async def _main(self) -> None:
        try:
            await self._loop()
        except PeerError as error:
            log.error("the engine has failed: %s", error)
            self._give_up(str(error))
        except Exception as error:
            log.exception("the engine has failed")
            self._give_up(f"internal error: {type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self.health = why
        self._publish()  # who has ended already hears of that
        for live in list(self._lives.values()):
            self._finish(live, Done("error", why))
        self._idle.set()

    async def _loop(self) -> None:
        ahead, preempted = Plan(), 0
        loop = asyncio.get_running_loop()
        while not self.health:
            self._state, now = plan(self._state, self._budget(), None if ahead.is_empty else ahead)
            self._state, work = launch(self._state, now)
            ahead = Plan()
            if not (work.reads or work.decodes):
                self._publish()
                if now.is_empty:
                    await self._rest()
                continue
            self._note_joined(now)
            lives = {s.name: self._lives[s.name] for s in (*work.reads, *work.decodes)}
            step = loop.run_in_executor(self._thread, self._step, work, lives)
            self._publish()
            # What this step reads of a long prompt is not paid for yet.
            later = self._budget()._replace(long=0) if work.reads and work.decodes else self._budget()
            self._state, ahead = plan(self._state, later)
            self._untold = self._settle(await step)
            self.metrics.preempted(self._state.preemptions - preempted)
            preempted = self._state.preemptions

    async def _rest(self) -> None:
        """Until something happens."""
        if not self._lives:
            self._idle.set()
        self._wake.clear()
        assert self._state.is_idle, f"nothing can go on: {self.load()=}"
        while not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PULSE):
                    await self._wake.wait()
            await self._announce(NOTHING)

    async def _announce(self, orders: Orders | None) -> None:
        """In the thread, as all that ranks do together."""
        if self.runner.mesh.ranks > 1:
            await asyncio.get_running_loop().run_in_executor(self._thread, announce, orders, self.runner.mesh)

    def _budget(self) -> Budget:
        chosen, spare = self.settings, int(self._captured is not None)  # captured steps are launched one ahead
        return Budget(chosen.rows, chosen.chunk, chosen.chunk, self._pace.tokens(chosen.chunk), spare)

    def _note_joined(self, now: Plan) -> None:
        for read in now.reads:
            live = self._lives.get(read.name)
            if live is not None and live.cached is None:
                live.cached = read.cached
                self._waiting_tokens -= len(live.job.ids)
                self.metrics.queued(self.clock() - live.arrived)
                self.metrics.prompt_tokens(len(live.job.ids), read.cached)

    def _step(self, work: Work, lives: dict[int, Live]) -> _Outcome | Exception:
        """In the thread: one step of the model, and what it means for each sequence's next draw."""
        started = self.clock()
        shares = (*work.reads, *work.decodes)
        drawing = [lives[share.name].drawer for share in shares if share.draws]
        scorings = tuple(scoring_of(lives[s.name].job, s.start, len(s.tokens)) for s in work.reads)
        try:
            orders = Orders(work.reads, work.decodes, tuple(d.rule() for d in drawing), scorings)
            announce(orders, self.runner.mesh)
            self.metrics.replayed(replays(self._captured, orders))
            found, self._kv = run(self.runner, self._kv, orders, self.allowed_V, self._captured)
        except PeerError as error:
            log.error("a step has failed: %s", error)
            return error
        except Exception as error:
            log.exception("a step has failed")
            return error
        for drawer, drawn in zip(drawing, found.drawn, strict=True):
            if drawn.token >= 0 and not drawer.broken:
                drawer.push(drawn.token)
        return _Outcome(work, lives, found, self.clock() - started, scorings)

    def _settle(self, outcome: "_Outcome | Exception") -> _Outcome | None:
        """Takes in a step: the state first, then who has ended; events are published later."""
        if isinstance(outcome, Exception):
            self._recover(outcome)
            return None
        self._failures = 0
        work, lives, found = outcome.work, outcome.lives, outcome.found
        names = [share.name for share in (*work.reads, *work.decodes) if share.draws]
        drawn = dict(zip(names, found.drawn, strict=True))
        self._state = settle(self._state, work, {name: one.token for name, one in drawn.items()})
        self._pace = self._pace.after(work, outcome.seconds, self.settings.chunk)
        for name, one in drawn.items():
            live = lives[name]
            done = end_of(live, one)
            if done is not None and name in self._lives:
                live.finish = done
                del self._lives[name]
                self._state = end(self._state, name, trusted=one.token >= 0)
        return outcome

    def _recover(self, error: Exception) -> None:
        """A step has failed: those who were in the cache end, a new cache is made, those who wait go on."""
        self._failures += 1
        why = f"the step failed: {type(error).__name__}"
        waiting = {row.name for row in self._state.waiting}
        for name, live in list(self._lives.items()):
            if name not in waiting:
                self._finish(live, Done("error", why))
        if self._failures >= FAILURES or self.runner.mesh.ranks > 1:
            self._give_up(f"{why}, {self._failures} times in a row")
            return
        # The same arrays, since captured steps know them by their addresses; nothing in them is found any more.
        self._kv = KVCache(self._kv.k, self._kv.v, torch.tensor(True))
        pool = self._state.pool
        self._state = self._state._replace(pool=new_pool(pool.num_blocks, pool.block_size, pool.windows))

    def _publish(self) -> None:
        """Tells the streams of the last step; the next one runs meanwhile."""
        outcome, self._untold, now = self._untold, None, self.clock()
        if outcome is None:
            return
        for share, scoring, scores in zip(outcome.work.reads, outcome.scorings, outcome.found.scores, strict=True):
            live = outcome.lives[share.name]
            done = share.start + len(share.tokens)
            if done <= len(live.job.ids):
                live.stream.push(Reading(done, len(live.job.ids), live.cached or 0))
            new = None if scoring is None else newly_scored(live, share.start, scores)
            if new is not None:
                live.stream.push(new)
        shares = [share for share in (*outcome.work.reads, *outcome.work.decodes) if share.draws]
        for share, one in zip(shares, outcome.found.drawn, strict=True):
            self._tell(outcome.lives[share.name], one, now)

    def _tell(self, live: Live, one: Drawn, now: float) -> None:
        if one.token >= 0 and (live.finish is None or live.finish.finish in ("stop", "length")):
            live.stream.push(New(one.token, one.logprob))
            note = self.metrics.first_token if live.last is None else self.metrics.next_token
            note(now - (live.arrived if live.last is None else live.last))
            self.metrics.generated()
            live.last = now
        if live.finish is not None:
            live.stream.push(live.finish)
            if one.token < 0:
                self.metrics.bad_row()
            self.metrics.finished(live.finish.finish, now - live.arrived)
            self._idle.set()
