"""Sequences over one cache: whatever is shared, cut, freed, preempted or poisoned, every answer is its own."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muse_fn
from muse_fn.batch import Batch, Runner, blocks_needed, leave, open_batch, read, resume, step, suspend
from muse_fn.generation import Output, Settings, generate
from muse_fn.kernels.select import INVARIANT
from muse_fn.kvcache.blocks import NoRoom, stats, table
from muse_fn.kvcache.integrity import check_integrity
from muse_fn.load import Model
from muse_fn.sample import Sampling
from tests.models import SEEDS, SMALL, close, configs, copied, on_arrays, random_params, random_tokens

TRIAL = replace(  # the reports' `tiny`
    SMALL, hidden_size=64, layers=6, heads=8, kv_heads=2, head_dim=8, window=8, experts=8, top_k=2, expert_size=32,
    latent_size=32, vocab_size=512, max_positions=128, layer_types=(), layer_rope_theta=(), mlp_layer_types=(),
    eos_token_id=(), bos_token_id=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TRIAL, random_params(TRIAL, 0), None)


def poisoned(batch: Batch) -> Batch:
    """NaN in every block that no table has, and in block 0: none of it may be read."""
    pool, kv = batch
    used = {int(b) for name in pool.rows for b in table(pool, name).flatten() if b}
    cached = {block for block in pool.blocks if block not in used}
    free = torch.tensor([b for b in range(pool.num_blocks) if b not in used | cached])
    return batch._replace(kv=on_arrays(lambda t: t.float().index_fill(0, free, torch.nan).to(t.dtype), kv))


def take(logits: Tensor | NoRoom) -> Tensor:
    assert isinstance(logits, Tensor)
    return logits


@given(configs(), SEEDS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 12))
def test_a_freed_or_foreign_block_is_never_read(
    config: muse_fn.Config, seed: int, chunk: int, block: int, shared: int
) -> None:
    """A prompt, another with the same beginning, steps; all other blocks are NaN before every event."""
    runner = Runner(random_params(config, seed), config, chunk=chunk)
    tokens = random_tokens(config, seed, 2, 24)
    tokens[1, :shared] = tokens[0, :shared]
    batch = open_batch(runner, 1 + 2 * blocks_needed(config, 24, chunk, block), block)
    with torch.no_grad():
        expected = muse_fn.forward(runner.params, tokens, config)
        for name in (0, 1):
            logits, batch = read(runner, poisoned(batch), name, tokens[name, :16].tolist())
            close(take(logits)[0], expected[name, 15], 1e-5)
        for at in range(16, 24):
            logits, batch = step(runner, poisoned(batch), (0, 1), tokens[:, at].tolist())
            close(take(logits), expected[:, at], 1e-5)
            check_integrity(batch.pool)


@given(SEEDS, st.data())
def test_prefill_decode_and_forward_have_the_same_bits_when_asked(seed: int, data: st.DataObject) -> None:
    """Any chunk, block, window off the block, prefix hit and interleaving, against one forward pass; float32."""
    config = data.draw(configs())
    block, chunk, shared = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20)), data.draw(st.integers(0, 15))
    runner = Runner(random_params(config, seed), config, chunk=chunk, ops=INVARIANT)
    tokens = random_tokens(config, seed, 3, 20)
    tokens[1:, :shared] = tokens[0, :shared]
    batch = open_batch(runner, 1 + 3 * blocks_needed(config, 20, chunk, block), block)
    with torch.no_grad():
        expected = muse_fn.forward(runner.params, tokens, config, ops=INVARIANT)
        close(expected, muse_fn.forward(runner.params, tokens, config), 1e-5)
        running: list[int] = []
        for name in range(3):
            length = data.draw(st.integers(1, 16))
            logits, batch = read(runner, poisoned(batch), name, tokens[name, :length].tolist())
            assert torch.equal(take(logits)[0], expected[name, length - 1])
            running.append(length)
            for _ in range(data.draw(st.integers(0, 2))):
                names = list(range(len(running)))
                logits, batch = step(runner, poisoned(batch), names, [int(tokens[n, running[n]]) for n in names])
                assert torch.equal(take(logits), torch.stack([expected[n, running[n]] for n in names]))
                running = [n + 1 for n in running]
                if max(running) == 20:
                    return


def preemptions(model: Model, prompts: list[list[int]], room: int) -> int:
    """How often a sequence had to make room."""
    counted = 0

    def counting(batch: Batch, name: int) -> object:
        nonlocal counted
        counted += 1
        return suspend(batch, name)

    with patch("muse_fn.generation.suspend", counting):
        answers(model, prompts, max_new_tokens=30, num_blocks=room, chunk=64, swap=True)
    return counted


def answers(model: Model, prompts: list[list[int]], **changes: object) -> list[Output]:
    settings = Settings(max_new_tokens=6, stop_tokens=(), block_size=4)
    return generate(model, prompts, replace(settings, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 16, 31])
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_cold_and_warm_answers_are_equal(model: Model, length: int, chunk: int) -> None:
    """Trials 27 and 29: lengths around a multiple of the block, the same prompt four times at once, one new token."""
    prompt = random_tokens(TRIAL, length, length).tolist()
    alone = answers(model, [prompt], reuse=False)
    assert answers(model, [prompt] * 4, chunk=chunk) == alone * 4
    assert answers(model, [prompt] * 4, chunk=chunk, max_new_tokens=1) == [(a.tokens[:1], "length") for a in alone * 4]


def test_the_same_prompt_has_the_same_bits_five_times(model: Model) -> None:
    """Trial 29, logits and not only answers: cache on and off, chunks, alone and with seven others."""
    prompt = random_tokens(TRIAL, 5, 21).tolist()
    others = [random_tokens(TRIAL, 50 + n, 3 + 4 * n).tolist() for n in range(7)]
    runner = Runner(model.params, TRIAL, ops=INVARIANT)
    seen: list[Tensor] = []
    with torch.no_grad():
        for chunk in (1, 5, 64):
            for crowd in ([], others):
                batch = open_batch(replace(runner, chunk=chunk), 400, 4)
                for name, tokens in enumerate(crowd):
                    _, batch = read(replace(runner, chunk=chunk), batch, 100 + name, tokens)
                for name in range(5):
                    logits, batch = read(replace(runner, chunk=chunk), batch, name, prompt, reuse=name % 2 == 0)
                    seen.append(take(logits))
                names = [*range(5), *(100 + n for n in range(len(crowd)))]
                logits, batch = step(replace(runner, chunk=chunk), batch, names, [7] * len(names))
                seen += [row[None] for row in take(logits)[:5]] if chunk == 1 and not crowd else []
    first = seen[:5]
    assert all(torch.equal(x, first[0]) for x in first)
    assert all(torch.equal(x, seen[5]) for x in seen[5:10])
    assert all(torch.equal(x, first[0]) for x in seen[10:])


def test_blocks_are_shared_only_when_filled_and_a_hit_is_counted(model: Model) -> None:
    prompt = random_tokens(TRIAL, 1, 9).tolist()
    runner = Runner(model.params, TRIAL, chunk=3)
    batch = open_batch(runner, 100, 4)
    with torch.no_grad():
        for name, hit in ((0, 0), (1, 8), (2, 16)):
            _, batch = read(runner, batch, name, prompt)
            assert stats(batch.pool).counts.hit == hit
            check_integrity(batch.pool)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "drawn"])
def test_a_cache_too_small_for_all_gives_the_same_answers(model: Model, sampling: Sampling) -> None:
    """Sequences wait, are preempted and are read again: each draws what it draws alone."""
    prompts = [random_tokens(TRIAL, n, 5 + 6 * n).tolist() for n in range(5)]
    free = answers(model, prompts, max_new_tokens=30, sampling=sampling)
    alone = [answers(model, [p], max_new_tokens=30, sampling=sampling)[0] for p in prompts]
    assert free == alone
    least = 1 + blocks_needed(TRIAL, 29 + 30, 64, 4)
    for room in (least, least + 5, 2 * least):
        for swap in (False, True):
            small = {"num_blocks": room, "chunk": 64, "sampling": sampling, "swap": swap}
            assert answers(model, prompts, max_new_tokens=30, **small) == alone
    assert preemptions(model, prompts, least) > 1, "there is something to be tested"
    with pytest.raises(ValueError, match=f"num_blocks is {least - 1}: the longest prompt needs {least}"):
        answers(model, prompts, max_new_tokens=30, num_blocks=least - 1, chunk=64)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_a_broken_row_wrote_is_never_used(model: Model, value: float) -> None:
    """Trial 26: one sequence is NaN from its third block on; it ends as an error, its neighbours go on, and the same
    prompt is read afresh and answered once the cause is gone."""
    assert isinstance(model.params.embed, Tensor)
    prompt, neighbour = random_tokens(TRIAL, 3, 12).tolist(), random_tokens(TRIAL, 4, 10).tolist()
    good, bad = Runner(model.params, TRIAL), model.params.embed.clone()
    bad[prompt[9]] = value
    assert prompt[9] not in neighbour
    broken = replace(good, params=model.params._replace(embed=bad))
    batch = open_batch(good, 200, 4)
    with torch.no_grad():
        expected, batch = read(good, batch, "reference", prompt, reuse=False)  # type: ignore[arg-type]
        batch = leave(batch, "reference", trusted=False)  # type: ignore[arg-type]
        logits, batch = read(broken, batch, 0, prompt)
        assert not take(logits).isfinite().all()
        beside, batch = read(broken, batch, 1, neighbour)
        batch = leave(batch, 0, trusted=False)
        again, batch = read(good, batch, 2, prompt)
        close(take(again), take(expected), 1e-6)
        alone, _ = read(good, open_batch(good, 100, 4), 1, neighbour)
        close(take(beside), take(alone), 1e-6)


@pytest.mark.parametrize(("length", "asked", "made"), [(126, None, 2), (127, None, 1), (127, 1, 1), (126, 2, 2)])
def test_an_answer_may_end_exactly_at_the_window(model: Model, length: int, asked: int | None, made: int) -> None:
    """Trial 31."""
    (found,) = answers(model, [[5] * length], max_new_tokens=asked)
    assert (len(found.tokens), found.finish) == (made, "length")


@pytest.mark.parametrize(("length", "asked"), [(128, None), (129, None), (127, 2), (100, 29), (128, 1)])
def test_beyond_the_window_is_refused_with_the_numbers(model: Model, length: int, asked: int | None) -> None:
    """Trial 31."""
    with pytest.raises(ValueError, match=rf"prompt 0 has {length} tokens: no room for .*the limit is 128 in all"):
        answers(model, [[5] * length], max_new_tokens=asked)


def test_salts_of_different_kinds_never_meet(model: Model) -> None:
    """Trial 30."""
    prompt = random_tokens(TRIAL, 1, 17).tolist()
    runner = Runner(model.params, TRIAL)
    salts = [(), (("cache_salt", "X"),), (("adapter", "X"),), (("media", "one", 2),), (("media", "two", 2),)]
    batch = open_batch(runner, 300, 4)
    with torch.no_grad():
        for name, salt in enumerate(salts):
            _, batch = read(runner, batch, name, prompt, salt)
        assert stats(batch.pool).counts.hit == 0
        for name, salt in enumerate(salts):
            _, batch = read(runner, batch, 10 + name, prompt, salt)
        assert stats(batch.pool).counts.hit == 16 * len(salts)


@given(configs(), SEEDS, st.integers(1, 5), st.integers(1, 12), st.sampled_from([torch.float32, torch.float8_e4m3fn]))
def test_a_sequence_carried_to_the_host_and_back_goes_on_as_if_nothing_had_been(
    config: muse_fn.Config, seed: int, block: int, length: int, dtype: torch.dtype
) -> None:
    runner = Runner(random_params(config, seed), config, chunk=5)
    tokens = random_tokens(config, seed, length + 4).tolist()
    batch = open_batch(runner, 1 + 2 * blocks_needed(config, length + 4, 5, block), block, dtype=dtype)
    with torch.no_grad():
        _, batch = read(runner, batch, 0, tokens[:length])
        _, batch = step(runner, batch, [0], tokens[length : length + 1])
        stays, _ = step(runner, batch._replace(kv=copied(batch.kv)), [0], tokens[length + 1 : length + 2])
        kept, batch = suspend(batch, 0)
        _, batch = read(runner, batch, 1, tokens[::-1])
        back, batch = resume(batch, 0, tokens[: length + 1], kept)
        assert back
        check_integrity(batch.pool)
        found, batch = step(runner, poisoned(batch), [0], tokens[length + 1 : length + 2])
        assert torch.equal(take(found), take(stays))


@pytest.mark.parametrize("chunk", [4, 9])
def test_sequences_longer_than_their_window_come_back_where_they_fitted_before(model: Model, chunk: int) -> None:
    """What a sequence needs to come back from the host is not more than it held, however long it has become."""
    prompts = [random_tokens(TRIAL, n, 30 + 6 * n).tolist() for n in range(4)]
    alone = [answers(model, [p], max_new_tokens=30, reuse=False)[0] for p in prompts]
    least = 1 + blocks_needed(TRIAL, 48 + 30, chunk, 4)
    for room in (least + 3, least + 15):
        assert answers(model, prompts, max_new_tokens=30, num_blocks=room, chunk=chunk, swap=True) == alone


def test_what_came_back_is_found_by_its_own_tokens_only(model: Model) -> None:
    """A sequence with a token drawn and not yet read leaves and comes back; nothing else has a block of it. What the
    index says of it afterwards is true: a prompt that is its text so far, and one that is the beginning."""
    runner, tokens = Runner(model.params, TRIAL, chunk=4, ops=INVARIANT), random_tokens(TRIAL, 8, 41).tolist()
    batch = open_batch(runner, 1 + 2 * blocks_needed(TRIAL, 44, 4, 4), 4)
    with torch.no_grad():
        expected = muse_fn.forward(runner.params, torch.tensor([tokens]), TRIAL, ops=INVARIANT)[0]
        _, batch = read(runner, batch, 0, tokens[:32])
        kept, batch = suspend(batch, 0)
        _, batch = read(runner, batch, 1, tokens[::-1])  # two others take all blocks
        _, batch = read(runner, batch, 2, tokens[1::-1] * 21)
        batch = leave(leave(batch, 1, trusted=False), 2, trusted=False)
        back, batch = resume(batch, 0, tokens[:33], kept)
        assert back
        for at in range(32, 40):
            logits, batch = step(runner, batch, [0], tokens[at : at + 1])
            assert torch.equal(take(logits)[0], expected[at])
            check_integrity(batch.pool)
        batch = leave(batch, 0)
        for name, length in ((3, 10), (4, 41)):
            logits, batch = read(runner, poisoned(batch), name, tokens[:length])
            assert torch.equal(take(logits)[0], expected[length - 1])
            batch = leave(batch, name)
        assert stats(batch.pool).counts.hit == 40


def test_a_quantised_cache_answers_almost_alike(model: Model) -> None:
    """e4m3 keeps 3 bits behind the first: logits move by its rounding, not by more."""
    prompt = random_tokens(TRIAL, 0, 40).tolist()
    runner = Runner(model.params, TRIAL)
    found: dict[torch.dtype, Tensor] = {}
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            logits, _ = read(replace(runner, chunk=7), open_batch(runner, 200, 4, dtype=dtype), 0, prompt)
            found[dtype] = take(logits)
    error = {dtype: (z - found[torch.float32]).pow(2).mean().sqrt().item() for dtype, z in found.items()}
    assert 0 < error[torch.bfloat16] < 0.02
    assert error[torch.bfloat16] < error[torch.float8_e4m3fn] < 0.3
