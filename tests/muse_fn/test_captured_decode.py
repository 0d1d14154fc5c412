"""Captured decode steps: the eager step bit for bit, the plain loop's tokens, and nothing that padding can change."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.buckets import Bucket
from muse_fn.capture import CaptureError
from muse_fn.captured_decode import (
    Arenas,
    DecodeSteps,
    Feed,
    capture_decode,
    decode_and_sample,
    decode_logits,
    empty_feed,
    pad_feed,
    to_host,
)
from muse_fn.generation import Settings, generate
from muse_fn.kernels.around import triton_form
from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.kvcache.layout import layout_of
from muse_fn.load import Model
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, tensors
from muse_fn.sample import Draw, Sampling, draws
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import decode, prefill
from tests.models import (
    SEEDS,
    SMALL,
    close,
    configs,
    copied,
    fitting_configs,
    on_arrays,
    random_params,
    random_tokens,
    scattered_cache,
    snapshot,
    unchanged,
)

BLOCK = 4
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**40),
)


class Batch(NamedTuple):
    """Sequences whose prompts have been read, ready for their next step."""

    params: Params
    tokens: Tensor  # int64 [B, 1]: the last of each prompt
    kv: KVCache
    view: View
    draw: Draw


def prompted(config: Config, seed: int, lengths: Sequence[int], room: int, sampling: Sequence[Sampling],
             dtype: torch.dtype = torch.float32) -> Batch:  # fmt: skip
    """Prompts of these lengths, all but the last token in the cache, and blocks for `room` more positions."""
    params = random_params(config, seed, dtype)
    positions = max(lengths) + room
    kv, table = scattered_cache(config, len(lengths), positions, BLOCK, seed)
    kv = on_arrays(lambda t: t.to(dtype), kv)
    tokens = random_tokens(config, seed, len(lengths), max(lengths))
    zeros = torch.zeros(len(lengths), dtype=torch.int64)
    past = torch.tensor(lengths) - 1
    with torch.no_grad():
        _, kv = prefill(params, tokens, kv, View(table, zeros, past), config, all_logits=True)
    last = tokens.gather(1, past[:, None])
    return Batch(params, last, kv, View(table, past, torch.ones_like(past)), draws(list(sampling), config.vocab_size))


def copy_of(batch: Batch) -> Batch:
    return batch._replace(kv=copied(batch.kv))


def run(steps: DecodeSteps, batch: Batch, count: int) -> tuple[list[list[int]], KVCache]:
    """Tokens of each of `count` steps, every step fed with what the one before returned, and the cache."""
    feed, kv = steps.begin(batch.tokens, batch.view, batch.draw, batch.kv), batch.kv
    coming = []
    for _ in range(count):
        feed, kv = steps(feed, kv)
        coming.append(to_host(feed.tokens_B1))  # fetched when all steps are on their way
    return [c.wait()[: len(batch.tokens)] for c in coming], kv


def capture_for(
    batch: Batch, config: Config, sizes: Sequence[Bucket], *, filtered: bool = True, strict: bool = True
) -> tuple[DecodeSteps, Batch]:
    steps, kv = capture_decode(batch.params, batch.kv, config, sizes=sizes, filtered=filtered, strict=strict)
    return steps, batch._replace(kv=kv)


def eager(
    batch: Batch, config: Config, bucket: Bucket, count: int, *, filtered: bool = True
) -> tuple[list[list[int]], Batch]:
    """The same steps without capture, at the size of the bucket."""
    feed = pad_feed(Feed(batch.tokens, batch.view, batch.draw), bucket, config)
    arenas, found = Arenas(batch.kv.k, batch.kv.v), list[list[int]]()
    with torch.inference_mode():
        for _ in range(count):
            tokens, past, new, arenas = decode_and_sample(
                batch.params, feed.tokens_B1, arenas, feed.view, feed.draw, (), config, filtered=filtered
            )
            feed = feed._replace(tokens_B1=tokens, view=View(feed.view.table_GBN, past, new))
            found.append(tokens.flatten().tolist()[: len(batch.tokens)])
    return found, batch


def same_bits(one: KVCache, other: KVCache, start: int = 0) -> None:
    """Raises unless these caches hold the same from block `start` on."""
    for x, y in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        assert torch.equal(x[start:].nan_to_num(7.0), y[start:].nan_to_num(7.0))


@given(configs(), SEEDS, st.integers(1, 3), st.integers(1, 3), DTYPES)
def test_the_step_without_its_host_side_is_the_step(
    config: Config, seed: int, rows: int, length: int, dtype: torch.dtype
) -> None:
    """Several new tokens per row too, some of them padding."""
    batch = prompted(config, seed, [1 + (seed + n) % 6 for n in range(rows)], 3, [Sampling()] * rows, dtype)
    tokens = random_tokens(config, seed + 1, rows, length)
    view = batch.view._replace(count_B=torch.tensor([(seed + n) % (length + 1) for n in range(rows)]))
    mine = copied(batch.kv)
    with torch.no_grad():
        expected, kv = decode(batch.params, tokens, batch.kv, view, config)
        found = decode_logits(batch.params, tokens, Arenas(mine.k, mine.v), view, config)
    assert torch.equal(found, expected)
    same_bits(mine, kv)


@given(configs(), SEEDS, st.lists(SAMPLINGS, min_size=1, max_size=3), st.data(), DTYPES)
def test_captured_is_eager_bit_for_bit(
    config: Config, seed: int, sampling: list[Sampling], data: st.DataObject, dtype: torch.dtype
) -> None:
    lengths = [data.draw(st.integers(1, 9)) for _ in sampling]
    batch = prompted(config, seed, lengths, 4, sampling, dtype)
    columns = batch.view.table_GBN.shape[2]
    bucket = Bucket(len(sampling) + data.draw(st.integers(0, 2)), columns + data.draw(st.integers(0, 2)))
    expected, plain = eager(copy_of(batch), config, bucket, 4)
    steps, batch = capture_for(batch, config, [bucket], strict=data.draw(st.booleans()))
    same_bits(batch.kv, prompted(config, seed, lengths, 4, sampling, dtype).kv, 1)  # capture writes into block 0 only
    found, kv = run(steps, batch, 4)
    assert found == expected
    same_bits(kv, plain.kv, 1)
    assert min(min(row) for row in found) >= 0


@given(configs(vocab_size=97), SEEDS, st.lists(st.integers(1, 9), min_size=1, max_size=3), SAMPLINGS)
def test_tokens_are_those_of_the_plain_loop(config: Config, seed: int, lengths: list[int], sampling: Sampling) -> None:
    config = replace(config, eos_token_id=(), max_positions=64)
    batch = prompted(config, seed, lengths, 5, [sampling] * len(lengths))
    ids = random_tokens(config, seed, len(lengths), max(lengths))
    prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    asked = Settings(max_new_tokens=5, sampling=sampling)
    expected = [out.tokens for out in generate(Model(config, batch.params, None), prompts, asked)]
    steps, batch = capture_for(batch, config, [Bucket(4, batch.view.table_GBN.shape[2])], strict=False)
    found, _ = run(steps, batch, 5)
    assert [*zip(*found, strict=True)] == expected


@settings(max_examples=10)
@given(SEEDS, st.lists(SAMPLINGS, min_size=1, max_size=2), st.integers(1, 3), st.integers(0, 3))
def test_padding_changes_nothing(seed: int, sampling: list[Sampling], rows: int, columns: int) -> None:
    """More rows, more columns, and rubbish in the rows of padding: the same tokens, the same cache."""
    batch = prompted(SMALL, seed, [5, 3][: len(sampling)], 4, sampling)
    width = batch.view.table_GBN.shape[2]
    sizes = [Bucket(len(sampling), width), Bucket(len(sampling) + rows, width + columns)]
    results: list[tuple[list[list[int]], KVCache]] = []
    for size in sizes:
        steps, own = capture_for(copy_of(batch), SMALL, [size], strict=False)
        results.append(run(steps, own, 3))

    steps, own = capture_for(copy_of(batch), SMALL, sizes[1:], strict=False)
    feed, kv = steps.begin(own.tokens, own.view, own.draw, own.kv), own.kv
    rest = slice(len(sampling), None)
    feed.tokens_B1[rest] = random_tokens(SMALL, seed, rows, 1)
    feed.view.table_GBN[:, rest] = 1 + seed % 3
    feed.view.past_B[rest] = seed % 7
    feed.draw.temperature_B[rest] = 1.0
    found: list[list[int]] = []
    for _ in range(3):
        feed, kv = steps(feed, kv)
        assert feed.tokens_B1[rest].tolist() == [[-1]] * rows
        assert feed.view.past_B[rest].tolist() == [seed % 7] * rows
        found.append(feed.tokens_B1[: len(sampling), 0].tolist())
    results.append((found, kv))
    for tokens, kv in results[1:]:
        assert tokens == results[0][0]
        for x, y in zip(tensors((kv.k, kv.v)), tensors((results[0][1].k, results[0][1].v)), strict=True):
            close(x[1:].nan_to_num(7.0), y[1:].nan_to_num(7.0))


@pytest.fixture(scope="module")
def small() -> tuple[DecodeSteps, Batch]:
    """One cache with steps of four sizes, for tests that bring their own blocks' contents."""
    batch = prompted(SMALL, 0, [5, 3, 6], 6, [Sampling(temperature=1.0, seed=n) for n in range(3)])
    return capture_for(batch, SMALL, [Bucket(1, 2), Bucket(4, 3), Bucket(2, 4), Bucket(2, 2)], strict=False)


def fresh(batch: Batch) -> Batch:
    """The batch with a living handle of the same arrays: a module's tests share them."""
    return batch._replace(kv=batch.kv._replace(alive=torch.tensor(True)))


def part(batch: Batch, rows: int, columns: int) -> tuple[Tensor, View, Draw]:
    view = View(batch.view.table_GBN[:, :rows, :columns], batch.view.past_B[:rows], batch.view.count_B[:rows])
    return batch.tokens[:rows], view, Draw(*(x[:rows] for x in batch.draw))


@pytest.mark.parametrize(
    ("rows", "columns", "bucket"),
    [(1, 2, (1, 2)), (2, 2, (2, 2)), (1, 3, (2, 4)), (2, 3, (2, 4)), (3, 2, (4, 3)), (3, 3, (4, 3))],
)
def test_the_smallest_bucket_that_fits_is_taken(
    small: tuple[DecodeSteps, Batch], rows: int, columns: int, bucket: tuple[int, int]
) -> None:
    steps, batch = small[0], fresh(small[1])
    feed = steps.begin(*part(batch, rows, columns), batch.kv)
    assert feed.view.table_GBN.shape[1:] == bucket
    after, kv = steps(feed, batch.kv)
    assert after.view.table_GBN.shape[1:] == bucket
    assert (after.tokens_B1[:rows] >= 0).all()
    unpadded, _ = steps(Feed(*part(batch, rows, columns)), kv)  # a feed of another size is padded on the device
    assert torch.equal(unpadded.tokens_B1, after.tokens_B1)


def test_a_size_that_no_bucket_holds_is_refused(small: tuple[DecodeSteps, Batch]) -> None:
    steps, batch = small[0], fresh(small[1])
    for rows, columns in ((4, 4), (5, 1), (1, 5)):
        size = Bucket(rows, columns)
        with pytest.raises(ValueError, match=rf"{size} fits no captured step: the largest is batch 4, 3 columns"):
            steps(empty_feed(size, SMALL), batch.kv)
    steps(empty_feed(Bucket(1, 1), SMALL), batch.kv)


def test_a_consumed_handle_is_refused(small: tuple[DecodeSteps, Batch]) -> None:
    steps, batch = small[0], fresh(small[1])
    feed = steps.begin(*part(batch, 2, 3), batch.kv)
    feed, kv = steps(feed, batch.kv)
    for fn in (lambda: steps(feed, batch.kv), lambda: decode(batch.params, *part(batch, 2, 3)[:1], batch.kv,
               part(batch, 2, 3)[1], SMALL), lambda: capture_decode(batch.params, batch.kv, SMALL)):  # fmt: skip
        with pytest.raises(ValueError, match="consumed by an earlier step"):
            fn()
    steps(feed, kv)


def test_capture_takes_the_cache_over() -> None:
    kv = init_cache(SMALL, 3, 4)
    capture_decode(random_params(SMALL, 0), kv, SMALL, sizes=[Bucket(1, 1)])
    with pytest.raises(ValueError, match="consumed"):
        prefill(random_params(SMALL, 0), torch.tensor([[1]]), kv, View(*[torch.ones(1)] * 3), SMALL)


def test_another_cache_is_refused_and_stays_alive(small: tuple[DecodeSteps, Batch]) -> None:
    steps, batch = small[0], fresh(small[1])
    other = copied(batch.kv)
    feed = steps.begin(*part(batch, 2, 3), batch.kv)
    with pytest.raises(CaptureError, match=r"kv.k.0 is not the tensor it was when captured"):
        steps(feed, other)
    assert other.alive


def test_capture_goes_from_the_largest_to_the_smallest_and_tells() -> None:
    told: list[tuple[int, int, str, float]] = []
    steps, _ = capture_decode(
        random_params(SMALL, 0), init_cache(SMALL, 3, 4), SMALL, max_batch=2, max_columns=3,
        progress=lambda done, total, name, seconds: told.append((done, total, name, seconds)),
    )  # fmt: skip
    order = [(2, 3), (2, 2), (2, 1), (1, 3), (1, 2), (1, 1)]
    assert [*steps.captured] == order
    assert [now[:3] for now in told] == [(n + 1, 6, str(Bucket(*size))) for n, size in enumerate(order)]
    seconds = [now[3] for now in told]
    assert seconds == sorted(seconds)
    assert steps.bytes == dict.fromkeys(map(Bucket._make, order)), "a CPU does not say"


def test_a_row_that_is_not_finite_fails_for_good_and_alone() -> None:
    batch = prompted(SMALL, 0, [5, 3], 4, [Sampling(temperature=1.0, seed=n) for n in range(2)])
    steps, own = capture_for(copy_of(batch), SMALL, [Bucket(2, 3)])
    expected, _ = run(steps, own, 3)
    assert isinstance(batch.params.embed, Tensor)
    embed = batch.params.embed.clone()
    embed[batch.tokens[0, 0]] = torch.nan
    broken = batch._replace(params=batch.params._replace(embed=embed))
    assert batch.tokens[0, 0] not in [row[1] for row in expected]
    steps, broken = capture_for(broken, SMALL, [Bucket(2, 3)])
    found, _ = run(steps, broken, 3)
    assert found == [[-1, row[1]] for row in expected]


def test_a_row_that_has_failed_stays_so_whatever_its_logits(small: tuple[DecodeSteps, Batch]) -> None:
    steps, batch = small[0], fresh(small[1])
    tokens, view, draw = part(batch, 2, 3)
    feed, kv = steps(Feed(torch.tensor([[-1], [int(tokens[1, 0])]]), view, draw), batch.kv)
    for _ in range(2):
        assert [token < 0 for token in to_host(feed.tokens_B1).wait()] == [True, False]
        feed, kv = steps(feed, kv)


def test_a_row_without_a_block_for_its_position_becomes_padding() -> None:
    """Steps run ahead of the host: a row that has ended may be stepped further, and must harm nobody."""
    batch = prompted(SMALL, 0, [6, 3], 2, [Sampling(), Sampling()])  # two blocks each
    table = batch.view.table_GBN.clone()
    table[-1, 1, 1:] = 0  # of the second row the host has taken one back, in one window group
    batch = batch._replace(view=batch.view._replace(table_GBN=table))
    before = copied(batch.kv)
    steps, batch = capture_for(batch, SMALL, [Bucket(2, 2)])
    found, kv = run(steps, batch, 6)
    assert [[token < 0 for token in row] for row in found] == [[False, False]] * 2 + [[False, True]] + [
        [True, True]
    ] * 3
    own = {*table.flatten().tolist()}
    for x, y in zip((*before.k, *before.v), (*kv.k, *kv.v), strict=True):
        for block in {*range(1, len(x))} - own:
            assert torch.equal(x[block].nan_to_num(7.0), y[block].nan_to_num(7.0))


def test_the_limit_of_the_model_ends_a_row() -> None:
    config = replace(SMALL, max_positions=7)
    batch = prompted(config, 0, [6], 1, [Sampling()])
    batch = batch._replace(
        view=batch.view._replace(table_GBN=torch.cat([batch.view.table_GBN, 1 + 0 * batch.view.table_GBN], 2))
    )
    steps, batch = capture_for(batch, config, [Bucket(1, 4)])
    found, _ = run(steps, batch, 3)
    assert [row[0] < 0 for row in found] == [False, False, True]


def test_an_old_feed_is_refused() -> None:
    batch = prompted(SMALL, 0, [5], 4, [Sampling()])
    steps, batch = capture_for(batch, SMALL, [Bucket(1, 3)])
    first, kv = steps(steps.begin(batch.tokens, batch.view, batch.draw, batch.kv), batch.kv)
    _, kv = steps(first, kv)
    with pytest.raises(CaptureError, match=r"(?s)tokens is an output of call 1, which call 2 has overwritten"):
        steps(first, kv)


def test_tables_may_grow_on_the_way() -> None:
    batch = prompted(SMALL, 0, [3, 2], 9, [Sampling(temperature=1.0, seed=n) for n in range(2)])
    sizes = [Bucket(2, 1), Bucket(2, 2), Bucket(2, 3)]
    steps, own = capture_for(copy_of(batch), SMALL, sizes[2:])
    expected, _ = run(steps, own, 9)
    steps, batch = capture_for(batch, SMALL, sizes)
    feed = steps.begin(batch.tokens, batch.view._replace(table_GBN=batch.view.table_GBN[..., :1]), batch.draw, batch.kv)
    kv, found, widths = batch.kv, list[list[int]](), list[int]()
    for n in range(9):
        feed = steps.with_tables(feed, batch.view.table_GBN[..., : 1 + (n + 3) // 4])
        feed, kv = steps(feed, kv)
        found.append(to_host(feed.tokens_B1).wait())
        widths.append(feed.view.table_GBN.shape[2])
    assert found == expected
    assert widths == [1] + [2] * 4 + [3] * 4
    with pytest.raises(ValueError, match=r"table_GBN is \[3, 3, 3\]: the feed has 2 rows"):
        steps.with_tables(feed, torch.zeros(3, 3, 3, dtype=torch.int64))


def test_filters_need_steps_captured_with_them() -> None:
    batch = prompted(SMALL, 0, [5, 3], 4, [Sampling(temperature=1.0, seed=n) for n in range(2)])
    steps, own = capture_for(copy_of(batch), SMALL, [Bucket(2, 3)])
    expected, _ = run(steps, own, 3)
    steps, batch = capture_for(batch, SMALL, [Bucket(2, 3)], filtered=False)
    filtering = draws([Sampling(), Sampling(temperature=1.0, top_p=0.5)], SMALL.vocab_size)
    with pytest.raises(ValueError, match=r"rows \[1\] use top_k, top_p or min_p: .*filtered=False"):
        steps.begin(batch.tokens, batch.view, filtering, batch.kv)
    assert run(steps, batch, 3)[0] == expected


def test_ids_that_are_not_allowed_are_never_drawn() -> None:
    batch = prompted(SMALL, 0, [5, 3], 6, [Sampling(temperature=9.0, seed=n) for n in range(2)])
    allowed = torch.zeros(SMALL.vocab_size, dtype=torch.bool)
    allowed[[4, 7, 9]] = True
    steps, kv = capture_decode(batch.params, batch.kv, SMALL, sizes=[Bucket(2, 3)], allowed_V=allowed)
    found, _ = run(steps, batch._replace(kv=kv), 6)
    assert {token for row in found for token in row} == {4, 7, 9}


def test_what_begin_refuses(small: tuple[DecodeSteps, Batch]) -> None:
    steps, batch = small[0], fresh(small[1])
    tokens, view, draw = part(batch, 2, 3)
    for bad, told in (
        ((tokens.expand(-1, 2), view, draw), r"tokens is \[2, 2\]: a captured step takes one new token"),
        ((tokens + SMALL.vocab_size, view, draw), "tokens holds id"),
        ((tokens, view._replace(past_B=view.past_B + 40), draw), "row 0 would reach position 45"),
        ((tokens, view._replace(table_GBN=view.table_GBN * 0), draw), r"view.table_GBN\[0, 0\] has"),
    ):
        with pytest.raises(ValueError, match=told):
            steps.begin(*bad, batch.kv)


def test_a_step_leaves_its_feed_as_it_is() -> None:
    batch = prompted(SMALL, 0, [5, 3], 4, [Sampling(), Sampling()])
    steps, batch = capture_for(batch, SMALL, [Bucket(4, 4)])
    feed = Feed(batch.tokens, batch.view, batch.draw)
    before = snapshot((feed, batch.params))
    steps(feed, batch.kv)
    unchanged((feed, batch.params), before)


def test_an_empty_feed_is_the_padding_of_nothing() -> None:
    one = empty_feed(Bucket(1, 1), SMALL)
    for x, y in zip(tensors(pad_feed(one, Bucket(3, 2), SMALL)), tensors(empty_feed(Bucket(3, 2), SMALL)), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert one.view.table_GBN.shape[0] == layout_of(SMALL).groups


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where a row is not finite
def test_the_forms_of_a_device_step_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device, by Triton's interpreter: whole steps, with rows that go on, that have failed, that are
    padding, that run out of blocks, and one that is not finite."""
    heat = [0.0, 0.8, 1.0, 1.0, 1.0, 1.0]
    batch = prompted(SMALL, 0, [9, 5, 6, 3, 6, 4], 9, [Sampling(temperature=t, seed=n) for n, t in enumerate(heat)])
    assert isinstance(batch.params.embed, Tensor)
    embed = batch.params.embed.clone()
    batch.tokens[5] = 60  # which no other row draws
    embed[60] = torch.nan
    batch.tokens[2], batch.view.count_B[3] = -1, 0
    batch.view.table_GBN[-1, 4, 2:] = 0
    batch = batch._replace(params=batch.params._replace(embed=embed))
    args = SMALL, Bucket(6, batch.view.table_GBN.shape[2]), 4
    expected, plain = eager(copy_of(batch), *args, filtered=False)
    for place in ("kernels.around", "sample"):
        monkeypatch.setattr(f"muse_fn.{place}.why_no_triton", lambda where: "")  # pyright: ignore[reportUnknownLambdaType]
    with torch.inference_mode():
        assert triton_form(batch.tokens.device), "or plain forms are compared with themselves"
    found, batch = eager(batch, *args, filtered=False)
    assert found == expected
    assert [[token < 0 for token in row] for row in zip(*found, strict=True)] == [
        [False] * 4, [False] * 4, [True] * 4, [True] * 4, [False] * 3 + [True], [True] * 4,
    ]  # fmt: skip
    for x, y in zip((*batch.kv.k, *batch.kv.v), (*plain.kv.k, *plain.kv.v), strict=True):
        close(x[1:].nan_to_num(7.0), y[1:].nan_to_num(7.0))


STEP_MESHES = (Mesh(1, 2), Mesh(2, 2), Mesh(1, 1, pp=2))


@pytest.mark.parametrize("mesh", STEP_MESHES, ids=str)
@settings(max_examples=3)  # each captures on every rank
@given(data=st.data(), seed=SEEDS, sampling=st.lists(SAMPLINGS, min_size=1, max_size=2))
def test_on_a_mesh(mesh: Mesh, data: st.DataObject, seed: int, sampling: list[Sampling]) -> None:
    """Collectives stand inside of the step, and all ranks draw the tokens of one."""
    config = data.draw(fitting_configs(mesh, 2))
    params, tokens = random_params(config, seed), random_tokens(config, seed, len(sampling), 1)
    table = own_blocks(config, len(sampling), 4, BLOCK)
    past = torch.zeros(len(sampling), dtype=torch.int64)
    view, draw = View(table, past, torch.ones_like(past)), draws(sampling, config.vocab_size)

    def ran(params: Params, mesh: Mesh) -> list[list[int]]:
        kv = init_cache(config, 1 + table.numel(), BLOCK, mesh=mesh)
        steps, kv = capture_decode(params, kv, config, mesh, sizes=[Bucket(len(sampling), 1)])
        return run(steps, Batch(params, tokens, kv, view, draw), 4)[0]

    expected = ran(params, ONE)
    assert simulate(mesh, lambda m: ran(shard(params, config, m), m)) == [expected] * mesh.ranks
