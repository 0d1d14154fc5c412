"""Captured steps of a server against eager ones, and which of them go on with what is left on the device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from muse_fn.buckets import Bucket
from muse_fn.capture import CaptureError
from muse_fn.captured_decode import Coming, DecodeSteps, Feed, capture_decode
from muse_fn.captured_prefill import ReadSteps, capture_reads
from muse_fn.decoder import forward
from muse_fn.kernels.select import REFERENCE
from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.sample import Draw, Sampling
from muse_fn.serve.jobs import Penalties
from muse_fn.serve.replays import Replays
from muse_fn.serve.scheduler import Share
from muse_fn.serve.steps import ALONE
from tests.models import random_params
from tests.serve.running import TINY, Got, all_of, engine_of, run
from tests.serve.test_engine import crowd, job


def test_captured_steps_give_what_eager_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they leave out is done eagerly beside them. Few of them are put together on the host: the others go on
    with what the one before left, through new blocks too."""
    begun: list[int] = []
    begin = DecodeSteps.begin

    def counted(steps: DecodeSteps, tokens_B1: Tensor, view: View, draw: Draw, kv: KVCache) -> Feed:
        begun.append(len(tokens_B1))
        return begin(steps, tokens_B1, view, draw, kv)

    monkeypatch.setattr(DecodeSteps, "begin", counted)
    jobs = [
        *crowd(6),
        job((7, 8), 90),
        job((9,), 60, sampling=Sampling(1.0, seed=1)),
        job(logprobs=1),
        job(allowed=(3, 4)),
        job(bias=((5, 2.0),)),
        job(penalties=Penalties(1.0)),
    ]

    async def main(captures: bool) -> tuple[list[Got], float]:
        async with engine_of(ops=REFERENCE, starts=False, rows=4, num_blocks=120) as engine:
            if captures:
                engine.capture()
            engine.start()
            found = await all_of(engine, jobs)
            return found, engine.metrics.registry.get_sample_value("muse_fn_replays_total") or 0

    (eager, none), (captured, some) = run(lambda: main(False)), run(lambda: main(True))
    assert [got.tokens for got in captured] == [got.tokens for got in eager]
    assert none == 0 < 2 * len(begun) < some


@pytest.mark.parametrize("count", [1, ALONE, ALONE + 1])
def test_few_prompts_are_read_one_by_one_and_more_together(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In pieces where they are longer than a step may be; one whose tokens are scored is read as ever."""
    read: list[int] = []
    step = ReadSteps.__call__

    def counted(steps: ReadSteps, tokens_1T: Tensor, view: View, kv: KVCache) -> tuple[Tensor, KVCache]:
        read.append(tokens_1T.shape[1])
        return step(steps, tokens_1T, view, kv)

    monkeypatch.setattr(ReadSteps, "__call__", counted)
    prompts = [tuple(range(3 + n, 10 + 2 * n)) for n in range(count)]
    jobs = [job(prompt, 1) for prompt in prompts]
    more = [job(tuple(range(40)), 2), job((5, 6, 7), 1, prompt_logprobs=0)]

    async def main(captures: bool) -> tuple[list[Got], list[Got]]:
        async with engine_of(ops=REFERENCE, starts=False, rows=8, chunk=16 * (ALONE + 1)) as engine:
            if captures:
                engine.capture()
            engine.start()
            return await all_of(engine, jobs), await all_of(engine, more)

    eager, captured = run(lambda: main(False)), run(lambda: main(True))
    assert [[got.tokens for got in part] for part in captured] == [[got.tokens for got in part] for part in eager]
    assert sorted(read) == sorted([40, *([len(prompt) for prompt in prompts] if count <= ALONE else [])])


def test_a_server_goes_on_without_reads_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(fn: object, sizes: Sequence[object], *args: object, **more: object) -> dict[object, object]:
        if sizes:
            raise CaptureError("no room\nfor it")
        return {}

    monkeypatch.setattr("muse_fn.captured_prefill.capture_each", failing)

    async def main() -> list[Got]:
        async with engine_of(ops=REFERENCE, starts=False, rows=2) as engine:
            with caplog.at_level("WARNING"):
                engine.capture()
            engine.start()
            return await all_of(engine, [job(), job((7, 8), 3)])

    assert [got.done.finish for got in run(main)] == ["length", "length"]
    assert [record.getMessage() for record in caplog.records] == ["prompts are read without captured steps: no room"]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through new blocks too; where a sequence ends, one step is for nobody."""
    told: list[str] = []
    step, wait = DecodeSteps.__call__, Coming.wait

    def launched(steps: DecodeSteps, feed: Feed, kv: KVCache) -> tuple[Feed, KVCache]:
        told.append("launch")
        return step(steps, feed, kv)

    def fetched(coming: Coming) -> list[int]:
        told.append("fetch")
        return wait(coming)

    monkeypatch.setattr(DecodeSteps, "__call__", launched)
    monkeypatch.setattr(Coming, "wait", fetched)

    async def main() -> list[Got]:
        async with engine_of(ops=REFERENCE, starts=False, rows=2) as engine:
            engine.capture()
            engine.start()
            return await all_of(engine, [job((7, 8), 30)])

    (got,) = run(main)
    assert len(got.tokens) == 30
    # The first token is the prompt's; each of 29 steps compares what came before with what it is asked for.
    assert told == ["launch", "launch", "fetch", *["fetch", "launch", "fetch"] * 28]


@pytest.mark.parametrize("num_blocks", [90, 400])
def test_who_ends_while_a_step_runs_ahead_harms_nobody(num_blocks: int) -> None:
    """Answers that end by stop tokens, in a cache that is too small for all, as eager steps give them."""
    jobs = [replace(one, max_new=4 * one.max_new, stop_tokens=tuple(range(n % 40))) for n, one in enumerate(crowd(60))]

    async def main(captures: bool) -> tuple[list[Got], int]:
        async with engine_of(ops=REFERENCE, starts=False, rows=6, num_blocks=num_blocks) as engine:
            if captures:
                engine.capture()
            engine.start()
            return await all_of(engine, jobs), engine.preemptions

    (eager, _), (captured, preempted) = run(lambda: main(False)), run(lambda: main(True))
    assert [got.tokens for got in captured] == [got.tokens for got in eager]
    assert [got.done.finish for got in captured] == [got.done.finish for got in eager]
    assert {"stop", "length"} == {got.done.finish for got in captured}
    assert (preempted > 0) == (num_blocks < 100)


def test_who_leaves_a_step_that_runs_ahead_has_no_blocks_in_the_next_and_no_place_to_come_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fourth of four makes room, the others go on and end; read again to where its row was, it decodes anew."""
    fed: list[Tensor] = []
    step = DecodeSteps.__call__

    def watched(steps: DecodeSteps, feed: Feed, kv: KVCache) -> tuple[Feed, KVCache]:
        fed.append(feed.view.table_GBN.clone())
        return step(steps, feed, kv)

    monkeypatch.setattr(DecodeSteps, "__call__", watched)
    config, how = TINY, Sampling()
    table = own_blocks(config, 4, 8, 4)
    params, kv = random_params(config, 0), init_cache(config, 1 + table.numel(), 4)
    steps, kv = capture_decode(params, kv, config, sizes=[Bucket(4, 2), Bucket(1, 2)], ops=REFERENCE)
    reads, kv = capture_reads(params, kv, config, sizes=())
    replays = Replays(steps, reads)

    def shares(start: int, tokens: dict[int, int]) -> list[Share]:
        return [Share(n, start, np.array([x], np.int32), table[:, n].numpy(), True) for n, x in tokens.items()]

    first, kv = replays(kv, shares(0, dict.fromkeys(range(4), 7)), [how] * 4, True)
    second, kv = replays(kv, shares(1, dict(enumerate(first[:3]))), [how] * 3, True)
    assert len(second) == 3
    assert [bool(rows.any()) for rows in fed[2].unbind(1)] == [True, True, True, False]
    # What its row drew, although nobody asked for it.
    ghost = int(forward(params, torch.tensor([[7, first[3]]]), config, ops=REFERENCE)[0, -1].argmax())
    again, kv = replays(kv, shares(2, {3: ghost}), [how])
    assert [len(rows[0]) for rows in fed] == [4, 4, 4, 1], "put together anew"
    expected = forward(params, torch.tensor([[7, first[3], ghost]]), config, ops=REFERENCE)[0, -1].argmax()
    assert again == (int(expected),)
