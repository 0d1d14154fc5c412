"""The host's loop: the same answer alone and in a batch, stops, budgets, scores."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muse_fn
from muse_fn.generation import stream
from muse_fn.stops import StopWatch, cut
from muse_fn.tokenizer import load_tokenizer
from tests.toy_tokenizer import build

CONFIG = muse_fn.Config(
    vocab_size=400,
    hidden_size=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    latent_size=16,
    expert_size=16,
    experts=4,
    top_k=2,
    window=5,
    max_positions=64,
    initializer_range=0.3,
    eos_token_id=(),
)


@pytest.fixture(scope="module")
def model() -> muse_fn.Model:
    return muse_fn.Model(CONFIG, muse_fn.init_params(CONFIG, seed=1), None)


def settings(count: int, seed: int | None = None) -> muse_fn.Settings:
    sampling = muse_fn.Sampling() if seed is None else muse_fn.Sampling(temperature=1.0, top_k=50, seed=seed)
    return muse_fn.Settings(max_new_tokens=count, sampling=sampling)


prompts = st.lists(st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=20), min_size=1, max_size=4)


@given(prompts, st.one_of(st.none(), st.integers(0, 2**32)))
def test_an_answer_is_the_same_alone_and_in_a_batch(
    model: muse_fn.Model, batch: list[list[int]], seed: int | None
) -> None:
    together = muse_fn.generate(model, batch, settings(9, seed))
    alone = [muse_fn.generate(model, [prompt], settings(9, seed))[0] for prompt in batch]
    assert together == alone


def test_greedy_tokens_are_those_of_the_full_forward(model: muse_fn.Model) -> None:
    ids = [5, 9, 77, 3]
    answer = muse_fn.generate(model, [ids], settings(12))[0]
    for token in answer.tokens:
        logits = muse_fn.forward(model.params, torch.tensor([ids]), model.config)
        assert token == logits[0, -1].argmax().item()
        ids = [*ids, token]


def test_seeds_differ_and_repeat(model: muse_fn.Model) -> None:
    answers = [muse_fn.generate(model, [[1, 2]], settings(16, seed))[0].tokens for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_long_prompts_are_read_in_chunks(model: muse_fn.Model) -> None:
    ids = list(range(40))
    whole = muse_fn.generate(model, [ids], settings(8))
    for chunk in (1, 7, 39, 40):
        assert muse_fn.generate(model, [ids], replace(settings(8), chunk=chunk)) == whole


def test_a_stop_token_ends_and_is_part_of_the_tokens(model: muse_fn.Model) -> None:
    free = muse_fn.generate(model, [[1, 2, 3]], settings(10))[0].tokens
    stopped = muse_fn.generate(model, [[1, 2, 3]], muse_fn.Settings(max_new_tokens=10, stop_tokens=(free[4],)))[0]
    first = free.index(free[4])
    assert stopped == (free[: first + 1], "stop")


@pytest.mark.parametrize(("length", "count", "made"), [(63, None, 1), (62, 2, 2), (1, None, 63), (40, 24, 24)])
def test_an_answer_may_fill_the_limit(model: muse_fn.Model, length: int, count: int | None, made: int) -> None:
    answer = muse_fn.generate(model, [[7] * length], muse_fn.Settings(max_new_tokens=count))[0]
    assert (len(answer.tokens), answer.finish) == (made, "length")


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        ([7] * 64, None, "prompt 0 has 64 tokens.*limit is 64"),
        ([7] * 60, 5, "60 tokens.*5 new ones.*64"),
        ([], 1, "prompt 0 is empty"),
        ([400], 1, "id 400 at 0.*0 to 399"),
        ([1, -1], 1, "id -1 at 1"),
        ([1], 0, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    model: muse_fn.Model, ids: list[int], count: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        muse_fn.generate(model, [ids], muse_fn.Settings(max_new_tokens=count))


def test_events_name_the_end_once_per_prompt(model: muse_fn.Model) -> None:
    events = list(stream(model, [[1], [2, 3]], settings(3)))
    assert [e.row for e in events if e.finish] == [0, 1]
    assert sorted(e.row for e in events) == [0, 0, 0, 1, 1, 1]


def test_score_equals_the_full_forward(model: muse_fn.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(CONFIG.vocab_size, (50,))
    logp = muse_fn.forward(model.params, ids[None], model.config).log_softmax(-1)[0, :-1]
    expected = logp.gather(-1, ids[1:, None])[:, 0].tolist()
    for chunk in (256, 7, 49, 50):
        monkeypatch.setattr("muse_fn.generation.SCORE_CHUNK", chunk)
        found = muse_fn.score(model, ids.tolist())
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=1e-5)
    assert muse_fn.score(model, [3]) == [None]


def test_stop_strings_are_found_across_tokens_and_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build(tmp_path))
    text = "one ďábel stops here"
    for stop in ("ďá", "stops", " h", "one"):
        watch, ended = StopWatch((), (stop,), tokenizer), False
        seen: list[int] = []
        for token in tokenizer.encode(text):
            seen.append(token)
            ended, watch = watch.push(token)
            if ended:
                break
        assert ended
        assert cut(tokenizer.decode(seen), (stop,)) == text[: text.index(stop)]
    watch = StopWatch((), ("zebra",), tokenizer)
    for token in tokenizer.encode(text):
        ended, watch = watch.push(token)
        assert not ended


def test_the_earliest_stop_string_counts() -> None:
    assert cut("abcDEFGHI", ("FGH", "DE")) == "abc"
    assert cut("abc", ("x", "yz")) == "abc"


def test_stop_strings_need_a_tokenizer_and_some_text(model: muse_fn.Model) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        muse_fn.generate(model, [[1]], muse_fn.Settings(max_new_tokens=1, stop=("x",)))
    with pytest.raises(ValueError, match="empty string"):
        muse_fn.generate(model, [[1]], muse_fn.Settings(max_new_tokens=1, stop=("",)))


def test_a_row_that_is_not_finite_is_an_error_and_its_neighbour_an_answer(model: muse_fn.Model) -> None:
    assert isinstance(model.params.embed, torch.Tensor)
    embed = model.params.embed.clone()
    embed[7] = torch.nan
    broken = model._replace(params=model.params._replace(embed=embed))
    for seed in (None, 3):
        bad, good = muse_fn.generate(broken, [[1, 7], [1, 2]], settings(5, seed))
        assert bad == ((), "error")
        assert good == muse_fn.generate(model, [[1, 2]], settings(5, seed))[0]
    with pytest.raises(ValueError, match="not finite"):
        muse_fn.score(broken, [1, 7, 2])


def test_a_cap_gives_way_to_the_limit(model: muse_fn.Model) -> None:
    for length, made in ((60, 4), (10, 9)):
        answer = muse_fn.generate(model, [[7] * length], muse_fn.Settings(cap=9))[0]
        assert len(answer.tokens) == made


@pytest.mark.parametrize("name", ["max_new_tokens", "cap", "chunk", "block_size", "num_blocks"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_a_setting_out_of_range_is_refused(model: muse_fn.Model, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}: must be a whole number, at least 1"):
        muse_fn.generate(model, [[1, 2]], replace(muse_fn.Settings(), **{name: value}))  # type: ignore[arg-type]
