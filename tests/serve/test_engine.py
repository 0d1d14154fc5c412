"""The engine on a small model: every job gets what it would get alone, and nothing of it stays behind."""

import asyncio
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muse_fn
from muse_fn.kernels.select import INVARIANT
from muse_fn.kvcache import blocks, prefix
from muse_fn.kvcache.ints import Ints, part
from muse_fn.load import Model
from muse_fn.params.tree import map_tensors
from muse_fn.sample import Sampling
from muse_fn.serve import engine as engine_module
from muse_fn.serve.drawer import Drawer
from muse_fn.serve.jobs import Done, Job, Logprob, Penalties, Refused
from muse_fn.serve.lives import Live, newly_scored
from muse_fn.serve.streams import JobStream
from tests.models import random_params
from tests.serve.running import TINY, Got, all_of, collected, engine_of, run, served

PROMPT = tuple(range(20, 45))


def job(ids: tuple[int, ...] = PROMPT, max_new: int = 8, **more: object) -> Job:
    return Job("test", ids, max_new, **more)  # type: ignore[arg-type]


def forward_logprobs(tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        z = muse_fn.forward(random_params(TINY, 0), torch.tensor([tokens]), TINY)
    return z[0].log_softmax(-1)


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([2, 3, 8]), st.integers(70, 200))
def test_any_batch_and_cache_give_what_generate_gives(seed: int, chunk: int, rows: int, num_blocks: int) -> None:
    chance = random.Random(seed)
    stem = [chance.randrange(512) for _ in range(30)]
    prompts = [(*stem[: chance.randrange(1, 30)], chance.randrange(512)) for _ in range(6)]
    sampling = [Sampling(chance.choice([0.0, 1.0]), top_k=chance.choice([0, 5]), seed=n) for n in range(6)]
    jobs = [job(ids, 7, sampling=s) for ids, s in zip(prompts, sampling, strict=True)]
    found = served(jobs, chunk=chunk, rows=rows, num_blocks=num_blocks)
    model = Model(TINY, random_params(TINY, 0), None)
    for one, got in zip(jobs, found, strict=True):
        alone = muse_fn.Settings(7, one.sampling, block_size=4, ops=INVARIANT, stop_tokens=())
        assert got.tokens == [*muse_fn.generate(model, [one.ids], alone)[0].tokens]
        assert got.done == Done("length")


def outputs(jobs: list[Job], num_blocks: int) -> tuple[list[list[int]], int]:
    """Tokens of all jobs arriving in waves, and how often somebody had to make room."""

    async def main() -> tuple[list[list[int]], int]:
        async with engine_of(chunk=32, rows=24, num_blocks=num_blocks) as engine:
            free = engine.load()
            waits: list[asyncio.Task[Got]] = []
            for wave in range(0, len(jobs), 48):
                waits += [asyncio.create_task(collected(engine.submit((one,))[0])) for one in jobs[wave : wave + 48]]
                await asyncio.sleep(0)
            found = await asyncio.gather(*waits)
            after = engine.load()
            assert (after.waiting, after.running, after.blocks_used) == (free.waiting, free.running, free.blocks_used)
            return [got.tokens for got in found], engine.preemptions

    return run(main)


def crowd(count: int) -> list[Job]:
    """Prompts up to eight windows long, half of them sharing their beginnings."""
    chance = random.Random(5)
    stems = [[chance.randrange(512) for _ in range(64)] for _ in range(3)]
    found: list[Job] = []
    for n in range(count):
        own = [chance.randrange(512) for _ in range(chance.randrange(1, 20))]
        ids = (*chance.choice(stems)[: chance.randrange(45)], *own) if n % 2 else tuple(own)
        found.append(job(ids, chance.randrange(2, 9), sampling=Sampling(n % 3 / 2, seed=n)))
    return found


def test_isolation_under_preemption() -> None:
    """768 outputs in two runs of a cache that is far too small: each is what it is alone."""
    jobs, model = crowd(384), Model(TINY, random_params(TINY, 0), None)
    first, made_room = outputs(jobs, 70)
    second, again = outputs(jobs[::-1], 70)
    assert made_room + again >= 100
    assert second[::-1] == first
    for one, tokens in zip(jobs, first, strict=True):
        alone = muse_fn.Settings(one.max_new, one.sampling, block_size=4, ops=INVARIANT, stop_tokens=())
        assert tokens == [*muse_fn.generate(model, [one.ids], alone)[0].tokens]


def test_isolation_is_seen_to_fail_without_what_guards_it() -> None:
    """The cache knows blocks by their first token alone, as if by a weak hash: some read what others wrote."""
    jobs = [replace(one, ids=(*PROMPT[:5], *one.ids)) for one in crowd(48)]
    right, _ = outputs(jobs, 100)

    def weak(ints: Ints, start: int, stop: int) -> bytes:
        return part(ints, start, stop)[:4]

    def enter(index: prefix.Index, parent: int, tokens: bytes, *rest: Any) -> Any:
        return prefix.enter(index, parent, tokens[:4], *rest)

    with patch.object(prefix, "part", weak), patch.object(blocks, "enter", enter):
        wrong, _ = outputs(jobs, 100)
    assert [len(tokens) for tokens in wrong] == [len(tokens) for tokens in right]
    assert wrong != right


def test_a_row_that_is_not_finite_ends_alone_and_is_never_found_again() -> None:
    """Trial 26."""
    params = random_params(TINY, 0)
    broken = map_tensors(torch.clone, params)
    assert isinstance(broken.embed, torch.Tensor)
    assert isinstance(params.embed, torch.Tensor)
    row, whole = broken.embed[7], params.embed[7]
    row.fill_(torch.nan)

    async def main() -> tuple[list[Got], list[Got], float]:
        async with engine_of(params=broken) as engine:
            bad = (*PROMPT, 7)
            first = await all_of(engine, [job(bad), job(), job(bad, sampling=Sampling(1.0))])
            row.copy_(whole)  # as if the fault had been passing
            second = await all_of(engine, [job(bad)])
            return first, second, engine.metrics.registry.get_sample_value("muse_fn_nan_rows_total") or 0

    (bad, good, sampled), (again,), counted = run(main)
    assert bad.done.finish == sampled.done.finish == "error"
    assert bad.tokens == sampled.tokens == []
    assert good.tokens == served([job()])[0].tokens
    assert again.tokens == served([job((*PROMPT, 7))])[0].tokens
    assert again.done.finish == "length"
    assert counted == 2


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_prompt_that_is_all_cached(length: int) -> None:
    """Trial 27."""

    async def main() -> list[list[Got]]:
        async with engine_of(chunk=3) as engine:
            one = job(PROMPT[:length], 1)
            return [await all_of(engine, [one]), await all_of(engine, [one]), await all_of(engine, [one] * 4)]

    cold, warm, four = run(main)
    assert {tuple(got.tokens) for got in (*cold, *warm, *four)} == {tuple(cold[0].tokens)}
    assert cold[0].cached == 0
    assert warm[0].cached == four[0].cached == (length - 1) // 4 * 4


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("reuse", [True, False])
def test_cold_and_warm_answers_are_the_same(chunk: int, reuse: bool) -> None:
    """Trial 29."""

    async def main() -> list[Got]:
        async with engine_of(chunk=chunk, reuse=reuse) as engine:
            found = [(await all_of(engine, [job()]))[0] for _ in range(5)]
            return [*found, (await all_of(engine, [job(), *crowd(7)]))[0]]

    expected = served([job()])[0].tokens
    assert [got.tokens for got in run(main)] == [expected] * 6


def test_salts_keep_caches_apart() -> None:
    """Trial 30."""

    async def main() -> list[int]:
        async with engine_of() as engine:
            kinds = [(), (("salt", "X"),), (("adapter", "X"),), (("salt", "X"),), ()]
            return [(await all_of(engine, [job(salts=salts)]))[0].cached for salts in kinds]

    assert run(main) == [0, 0, 0, 24, 24]


def test_exactly_at_the_limit() -> None:
    """Trial 31: 128 positions."""
    ids = tuple(range(127))
    (got,) = served([job(ids, 1)])
    assert (len(got.tokens), got.done) == (1, Done("length"))
    for length, max_new in ((127, 2), (128, 1), (0, 1), (5, 0)):
        with pytest.raises(ValueError, match=f"{length} prompt tokens and {max_new} new ones: there is room for 128"):
            served([job(tuple(range(length)), max_new)])
    with pytest.raises(ValueError, match=r"25 prompt tokens and 60 new ones: there is room for \d+ in all"):
        served([job(max_new=60)], num_blocks=30)


def test_log_probabilities_are_those_of_a_full_forward() -> None:
    """Trial 21: whatever the chunk and the cache; and of new tokens too."""
    for chunk in (7, 64):

        async def main(chunk: int = chunk) -> tuple[Got, Got]:
            async with engine_of(chunk=chunk) as engine:
                await all_of(engine, [job()])
                one = job(prompt_logprobs=3, logprobs=5)
                return (await all_of(engine, [one]))[0], (await all_of(engine, [one]))[0]

        for got in run(main):
            tokens = [*PROMPT, *got.tokens]
            expected = forward_logprobs(tokens)
            assert got.prompt[0] is None
            assert len(got.prompt) == len(PROMPT)
            listed = [*zip(got.prompt[1:], [3] * 24, strict=True), *zip(got.logprobs, [5] * 8, strict=True)]
            for place, (found, top) in enumerate(listed):
                assert found is not None
                row, token = expected[place], tokens[place + 1]
                assert found.chosen == pytest.approx(row[token].item(), abs=1e-5)
                assert found.rank == 1 + int((row > row[token]).sum())
                assert [i for i, _ in found.top] == row.topk(top).indices.tolist()
                np.testing.assert_allclose([v for _, v in found.top], row.topk(top).values, atol=1e-5)


def test_vocabulary_logits_of_a_prompt_exist_for_few_positions_at_once() -> None:
    """Trial 21."""
    seen: list[int] = []
    from muse_fn.serve import steps

    plain = steps.to_logits

    def counting(params, h, *rest, **more):  # type: ignore[no-untyped-def]
        seen.append(h.shape[0])
        return plain(params, h, *rest, **more)

    with patch.object(steps, "to_logits", counting), patch.object(steps, "SLICE", 5):
        (got,) = served([job(tuple(range(100)), 1, prompt_logprobs=0)], chunk=64)
    assert max(seen) == 5
    assert len(got.prompt) == 100


def test_penalties_biases_and_allowed_ids() -> None:
    (plain,) = served([job(max_new=12)])
    first = plain.tokens[0]
    never, always, only, late = served(
        [
            job(bias=((first, -100.0),)),
            job(bias=((99, 100.0),)),
            job(allowed=(3, 4)),
            job(max_new=12, stop_tokens=(plain.tokens[2], first), min_new=5),
        ]
    )
    assert first not in never.tokens
    assert set(always.tokens) == {99}
    assert set(only.tokens) <= {3, 4}
    assert len(late.tokens) >= 5
    presence, repeated = served(
        [
            job(max_new=12, bias=((99, 8.0),), penalties=Penalties(presence=2.0, frequency=2.0)),
            job(max_new=12, bias=((99, 8.0),), penalties=Penalties(repetition=100.0)),
        ]
    )
    for got in (presence, repeated):
        counts = {token: got.tokens.count(token) for token in got.tokens}
        assert max(counts.values()) < 12
    stopped = served([job(max_new=12, stop_tokens=(plain.tokens[3],))])[0]
    assert stopped.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3]) + 1]
    assert stopped.done == Done("stop")


def test_cancelled_and_aborted_jobs_give_everything_back_and_harm_nobody() -> None:
    async def main() -> tuple[Got, Got, Got, int]:
        async with engine_of() as engine:
            keep, cancelled, aborted = (engine.submit((replace(job(max_new=60), request=name),))[0] for name in "abc")
            waits = [asyncio.create_task(collected(stream)) for stream in (keep, cancelled, aborted)]
            while engine.load().running < 3:
                await asyncio.sleep(0)
            cancelled.cancel()
            cancelled.cancel()
            count = engine.abort("c")
            found = [await wait for wait in waits]
            assert engine.load()[:3] == (0, 0, 0)
            return found[0], found[1], found[2], count

    kept, cancelled, aborted, count = run(main)
    assert count == 1
    assert kept.tokens == served([job(max_new=60)])[0].tokens
    assert kept.done == Done("length")
    assert cancelled.done.finish == aborted.done.finish == "abort"


def test_a_full_queue_refuses_all_jobs_of_a_request_or_none() -> None:
    async def main() -> None:
        async with engine_of(queue=2) as engine:
            streams = engine.submit((job(), job()))
            with pytest.raises(Refused, match="2 requests are waiting: the limit is 2") as refused:
                engine.submit((job(),))
            assert refused.value.status == 429
            assert engine.load().waiting == 2
            for stream in streams:
                await collected(stream)
            await collected(engine.submit((job(),))[0])

    run(main)


def test_draining_takes_nothing_new_and_ends_what_is_too_long() -> None:
    async def main() -> tuple[Got, Got]:
        async with engine_of() as engine:
            short, long = engine.submit((job(max_new=2),))[0], engine.submit((job(max_new=100),))[0]
            waits = [asyncio.create_task(collected(stream)) for stream in (short, long)]
            finished = await waits[0]
            drain = asyncio.create_task(engine.drain(0.0))
            await asyncio.sleep(0)
            with pytest.raises(Refused) as refused:
                engine.submit((job(),))
            assert refused.value.status == 503
            await drain
            return finished, await waits[1]

    short, long = run(main)
    assert short.done == Done("length")
    assert long.done == Done("abort", "the server is shutting down")


def test_a_step_that_fails_ends_its_jobs_and_no_others() -> None:
    plain, calls = engine_module.run, 0

    def failing(*args, **more):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return plain(*args, **more)

    async def main() -> tuple[list[Got], str]:
        async with engine_of(rows=2) as engine:
            with patch.object(engine_module, "run", failing):
                found = await all_of(engine, [job(), job((1, 2, 3)), job((4, 5, 6))])
            return found, engine.health

    (one, two, three), health = run(main)
    assert one.done.finish == two.done.finish == "error"
    assert three.tokens == served([job((4, 5, 6))])[0].tokens
    assert health == ""


def test_an_engine_that_fails_again_and_again_says_so() -> None:
    def failing(*args, **more):  # type: ignore[no-untyped-def]
        raise RuntimeError("the card is gone")

    async def main() -> tuple[list[Got], str]:
        async with engine_of(rows=1) as engine:
            with patch.object(engine_module, "run", failing):
                found = await all_of(engine, [job()] * 5)
            with pytest.raises(Refused) as refused:
                engine.submit((job(),))
            assert refused.value.status == 503
            return found, engine.health

    found, health = run(main)
    assert {got.done.finish for got in found} == {"error"}
    assert "3 times in a row" in health


def test_choices_of_one_request_read_its_prompt_once() -> None:
    async def main() -> list[Got]:
        async with engine_of() as engine:
            streams = engine.submit(tuple(job(sampling=Sampling(1.0, seed=n)) for n in range(4)))
            return list(await asyncio.gather(*map(collected, streams)))

    found = run(main)
    assert [got.cached for got in found] == [0, 24, 24, 24]
    assert [got.tokens for got in found] == [
        got.tokens for got in served([job(sampling=Sampling(1.0, seed=n)) for n in range(4)])
    ]
    assert len({tuple(got.tokens) for got in found}) > 1


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_log_probabilities_of_a_prompt_are_told_once_however_often_it_is_read(lives: list[list[int]]) -> None:
    """Each life reads the prompt in pieces of its own, and all but the last end early."""
    length = max(sum(pieces) for pieces in lives)
    lives = [*lives[:-1], [*lives[-1], max(1, length - sum(lives[-1]))]]
    length = sum(lives[-1])
    every = [Logprob(-float(n), 1, ()) for n in range(length)]
    own = job(tuple(range(length)), prompt_logprobs=0)
    live, told = Live(own, JobStream(print), Drawer(own, 512), 0.0), list[Logprob | None]()
    for pieces in lives:
        start = 0
        for count in pieces:
            found = newly_scored(live, start, tuple(every[start + 1 : start + 1 + count]))
            if found is not None:
                assert found.start == len(told)
                assert found.found
                told += found.found
            start += count
    assert told == [None, *every[1:]]
