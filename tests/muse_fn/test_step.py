"""Steps over a cache: however a sequence is cut into steps and blocks, the logits are those of the forward pass."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.decoder import forward
from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.split import shard
from muse_fn.step import advance, decode, prefill
from tests.models import (
    SEEDS,
    SMALL,
    close,
    configs,
    copied,
    far,
    on_arrays,
    random_params,
    random_tokens,
    scattered_cache,
    snapshot,
    unchanged,
)

LENGTH = 13


class Run(NamedTuple):
    """Sequences on their way through steps: which tokens, how far each is, and what every position's logits were."""

    params: Params
    config: Config
    tokens: Tensor
    kv: KVCache
    table: Tensor
    done: list[int]
    logits: list[list[Tensor]]


def start(config: Config, seed: int, batch: int, block: int) -> Run:
    params, tokens = random_params(config, seed), random_tokens(config, seed, batch, LENGTH)
    kv, table = scattered_cache(config, batch, LENGTH, block, seed)
    return Run(params, config, tokens, kv, table, [0] * batch, [[] for _ in range(batch)])


@torch.no_grad()
def step(run: Run, counts: list[int], width: int, seed: int = 0, decoding: bool = False) -> Run:
    """One step in which row b reads its next counts[b] tokens, columns beyond them filled with random ids."""
    tokens = random_tokens(run.config, seed, len(counts), width)
    for row, (count, done) in enumerate(zip(counts, run.done, strict=True)):
        tokens[row, :count] = run.tokens[row, done : done + count]
    view = View(run.table, torch.tensor(run.done), torch.tensor(counts))
    if decoding:
        out, kv = decode(run.params, tokens, run.kv, view, run.config)
    else:
        out, kv = prefill(run.params, tokens, run.kv, view, run.config, all_logits=True)
    found = [[*old, *rows[:count]] for old, rows, count in zip(run.logits, out, counts, strict=True)]
    return run._replace(kv=kv, done=[d + c for d, c in zip(run.done, counts, strict=True)], logits=found)


def same_as_forward(run: Run, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = forward(run.params, run.tokens, run.config)
    for row, found in enumerate(run.logits):
        close(torch.stack(found), expected[row, : len(found)], tolerance)


@given(configs(), SEEDS, st.integers(1, 5), st.data())
def test_any_cutting_of_ragged_rows_equals_the_forward_pass(
    config: Config, seed: int, block: int, data: st.DataObject
) -> None:
    """Chunks of any length for each row, padded to any width, then decode steps of one or several tokens."""
    run = start(config, seed, data.draw(st.integers(1, 3)), block)
    while min(run.done) < LENGTH:
        left = [LENGTH - done for done in run.done]
        counts = [data.draw(st.integers(min(1, n), min(n, 6))) for n in left]
        rubbish = data.draw(st.integers(0, 2))
        decoding = data.draw(st.booleans())
        run = step(run, counts, max(counts) + rubbish, seed + 1, decoding)
    same_as_forward(run)


@given(configs(), SEEDS)
def test_one_token_at_a_time(config: Config, seed: int) -> None:
    run = step(start(config, seed, 2, 4), [5, 3], 5)
    for _ in range(LENGTH - 5):
        run = step(run, [1, 1], 1, decoding=True)
    same_as_forward(run)


@given(configs(), SEEDS, st.integers(1, 5), st.integers(0, 3))
def test_blocks_and_their_order_do_not_matter(config: Config, seed: int, block: int, spare: int) -> None:
    """The same steps over scattered blocks full of rubbish, over consecutive ones, and with unused columns."""
    scattered = start(config, seed, 2, block)
    table = own_blocks(config, 2, LENGTH, LENGTH)
    plain = scattered._replace(kv=init_cache(config, 1 + table.numel(), LENGTH), table=table)
    wide = scattered._replace(table=torch.nn.functional.pad(scattered.table, (0, spare)))
    wide = wide._replace(kv=copied(scattered.kv))
    results: list[Tensor] = []
    for run in (scattered, plain, wide):
        run = step(run, [7, 4], 8)
        run = step(run, [3, 3], 3, decoding=True)
        results.append(torch.cat([torch.stack(rows) for rows in run.logits]))
    close(results[1], results[0], 1e-5)
    close(results[2], results[0], 1e-5)


@given(configs(), SEEDS)
def test_padding_and_neighbours_do_not_matter(config: Config, seed: int) -> None:
    run = start(config, seed, 3, 4)
    one = step(run._replace(kv=copied(run.kv)), [2, 6, 4], 6, seed=1)
    other_tokens = run.tokens.clone()
    other_tokens[::2] = random_tokens(config, seed + 5, 2, LENGTH)
    other = step(run._replace(tokens=other_tokens), [3, 6, 1], 9, seed=2)
    close(torch.stack(other.logits[1]), torch.stack(one.logits[1]), 1e-5)


@given(configs(), SEEDS)
def test_prefill_gives_the_last_real_column(config: Config, seed: int) -> None:
    params, tokens = random_params(config, seed), random_tokens(config, seed, 3, 6)
    counts = torch.tensor([1, 6, 4])
    table = own_blocks(config, 3, 6, 4)
    view = View(table, torch.zeros(3, dtype=torch.int64), counts)
    with torch.no_grad():
        last, _ = prefill(params, tokens, init_cache(config, 1 + table.numel(), 4), view, config)
        every, _ = prefill(params, tokens, init_cache(config, 1 + table.numel(), 4), view, config, all_logits=True)
        expected = forward(params, tokens, config)
    assert last.shape == (3, config.vocab_size)
    assert last.dtype == every.dtype == torch.float32
    assert every.shape == (3, 6, config.vocab_size)
    for row, count in enumerate(counts.tolist()):
        close(last[row], expected[row, count - 1])
        close(every[row, :count], expected[row, :count])


def test_only_the_cache_is_consumed() -> None:
    run = start(SMALL, 0, 2, 4)
    view = View(run.table, torch.tensor([0, 0]), torch.tensor([5, 3]))
    tokens = run.tokens[:, :5]
    before = snapshot((run.params, tokens, view))
    _, kv = prefill(run.params, tokens, run.kv, view, SMALL)
    view_2 = advance(view)
    _, kv = decode(run.params, tokens[:, :1], kv, view_2, SMALL)
    unchanged((run.params, tokens, view), before)


def test_a_step_writes_its_rows_and_no_others() -> None:
    run = step(start(SMALL, 0, 2, 4), [6, 5], 6)
    before = copied(run.kv)
    after = step(run, [1, 1], 1, decoding=True).kv
    layout = layout_of(SMALL)
    for slot in range(layout.slots):
        groups = {group for group, own in layout.places if own == slot}
        places = sorted(int(run.table[g, b, 1]) * 4 + (2, 1)[b] for g in groups for b in (0, 1))
        for old, new in ((before.k[slot], after.k[slot]), (before.v[slot], after.v[slot])):
            same = (old == new) | (old.isnan() & new.isnan())
            assert (~same).flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == places


def test_a_bfloat16_cache_rounds_keys_and_values_once() -> None:
    run = start(SMALL, 0, 2, 4)
    narrow = run._replace(kv=on_arrays(torch.Tensor.bfloat16, run.kv))
    for _ in range(3):
        narrow = step(narrow, [3, 2], 3)
    assert all(x.dtype == torch.bfloat16 for x in (*narrow.kv.k, *narrow.kv.v))
    same_as_forward(narrow, 0.03)
    with pytest.raises(AssertionError, match="above"):
        same_as_forward(narrow, 1e-4)


def test_rows_without_new_tokens_are_harmless() -> None:
    """A decode step may hold places for sequences that are not there: no blocks, nothing past, nothing new."""
    run = step(start(SMALL, 0, 1, 4), [5], 5)
    alone = step(run._replace(kv=copied(run.kv)), [1], 1, decoding=True)
    table = torch.cat([run.table, torch.zeros_like(run.table)], 1)
    view = View(table, torch.tensor([5, 0]), torch.tensor([1, 0]))
    with torch.no_grad():
        out, kv = decode(run.params, run.tokens[[0, 0], 5:6], run.kv, view, SMALL)
    close(out[0, 0], alone.logits[0][5])
    assert out.isfinite().all()
    for mine, other in zip((*kv.k, *kv.v), (*alone.kv.k, *alone.kv.v), strict=True):
        assert torch.equal(mine[1:].isnan(), other[1:].isnan())
        close(mine[1:].nan_to_num(7.0), other[1:].nan_to_num(7.0))


def test_advance_moves_new_positions_into_the_past() -> None:
    view = View(own_blocks(SMALL, 2, 9, 4), torch.tensor([3, 0]), torch.tensor([2, 4]))
    once = advance(view)
    assert once.past_B.tolist() == [5, 4]
    assert once.count_B.tolist() == [1, 1]
    assert advance(view, 3).count_B.tolist() == [3, 3]
    assert advance(view, torch.tensor([2, 1])).count_B.tolist() == [2, 1]
    assert torch.equal(once.table_GBN, view.table_GBN)
    assert all(part.dtype == torch.int64 for part in once)
    assert view.past_B.tolist() == [3, 0], "the old view is as it was"


def test_the_window_holds_over_steps() -> None:
    """A token that all layers have left behind does not matter however the sequence was cut."""
    config = replace(SMALL, layer_types=("sliding_attention",) * 3, window=2)
    run = start(config, 0, 1, 4)
    changed = run._replace(tokens=run.tokens.clone(), kv=copied(run.kv))
    changed.tokens[:, 2] = (changed.tokens[:, 2] + 1) % config.vocab_size
    for _ in range(6):
        run, changed = step(run, [1], 1, decoding=True), step(changed, [1], 1, decoding=True)
    far(torch.stack(changed.logits[0][2:6]), torch.stack(run.logits[0][2:6]))
    assert torch.equal(changed.logits[0][1], run.logits[0][1])
    for _ in range(2):
        run, changed = step(run, [1], 1, decoding=True), step(changed, [1], 1, decoding=True)
        close(changed.logits[0][-1], run.logits[0][-1], 1e-6)


def test_parameters_and_cache_must_be_the_share_of_the_mesh() -> None:
    config = replace(SMALL, vocab_size=64)
    run = start(config, 0, 1, 4)
    view = View(run.table, torch.tensor([0]), torch.tensor([3]))
    own = shard(run.params, config, Mesh(tp=2))
    for fn in (prefill, decode):
        with pytest.raises(ValueError, match="not this rank's"):
            fn(run.params, run.tokens[:, :3], run.kv, view, config, Mesh(tp=2))
        with pytest.raises(
            ValueError, match=r"kv has 1 slots of 2 heads of 4: .*must have 1 slots of 1 heads of 4.*mesh=mesh"
        ):
            fn(own, run.tokens[:, :3], run.kv, view, config, Mesh(tp=2))


@pytest.mark.parametrize(
    ("shape", "past", "count", "block", "told"),
    [
        ((1, 4), 30, 4, 1, "row 0 would reach position 34: its table holds 32"),
        ((1, 4), -1, 4, 1, "row 0 would reach"),
        ((1, 4), 0, 5, 1, r"count_B\[0\] is 5: must be 1 to 4"),
        ((1, 4), 0, 0, 1, r"count_B\[0\] is 0"),
        ((1, 4), 0, 4, 0, r"table_GBN\[0, 0\] has \[0\]"),
        ((1, 4), 0, 4, 9, "the cache has blocks 1 to 2 to give"),
        ((2, 4), 0, 4, 1, r"view.table_GBN is \[3, 1, 2\]"),
        ((1, 0), 0, 1, 1, "tokens is torch.int64"),
    ],
)
def test_a_step_that_does_not_fit_its_blocks_is_refused(
    shape: tuple[int, int], past: int, count: int, block: int, told: str
) -> None:
    view = View(torch.tensor([[[block, 2]], [[1, 2]], [[1, 2]]]), torch.tensor([past]), torch.tensor([count]))
    with pytest.raises(ValueError, match=told):
        prefill(random_params(SMALL, 0), torch.zeros(shape, dtype=torch.int64), init_cache(SMALL, 3, 16), view, SMALL)


def test_a_view_of_other_dtypes_or_shapes_is_refused() -> None:
    tokens, table = torch.zeros(1, 4, dtype=torch.int64), own_blocks(SMALL, 1, 4, 4)
    good = View(table, torch.tensor([0]), torch.tensor([4]))
    for name, value, told in (
        ("table_GBN", table.float(), r"view.table_GBN is \[3, 1, 1\] of torch.float32"),
        ("table_GBN", torch.tensor(1), r"view.table_GBN is \[\] of torch.int64"),
        ("past_B", torch.tensor([0.0]), "view.past_B is .* of torch.float32"),
        ("count_B", torch.tensor([[4]]), r"view.count_B is \[1, 1\]"),
        ("past_B", [0], "view.past_B is list: must be tensors"),
    ):
        kv = init_cache(SMALL, 5, 4)
        with pytest.raises(ValueError, match=told):
            prefill(random_params(SMALL, 0), tokens, kv, good._replace(**{name: value}), SMALL)
        prefill(random_params(SMALL, 0), tokens, kv, good, SMALL)  # the handle lives on


@pytest.mark.parametrize("pieces", [0, -1])
def test_a_step_in_no_pieces_is_refused(pieces: int) -> None:
    view = View(own_blocks(SMALL, 1, 4, 4), torch.tensor([0]), torch.tensor([4]))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"microbatches is {pieces}: must be at least 1"):
        prefill(random_params(SMALL, 0), tokens, init_cache(SMALL, 5, 4), view, SMALL, microbatches=pieces)


def test_a_cache_of_another_head_size_is_refused_and_lives_on() -> None:
    kv, table = init_cache(SMALL, 5, 4), own_blocks(SMALL, 1, 4, 4)
    view, other = View(table, torch.tensor([0]), torch.tensor([4])), replace(SMALL, head_dim=8)
    with pytest.raises(ValueError, match=r"kv has 1 slots of 2 heads of 4.*must have 1 slots of 2 heads of 8"):
        prefill(random_params(other, 0), torch.zeros(1, 4, dtype=torch.int64), kv, view, other)
    prefill(random_params(SMALL, 0), torch.zeros(1, 4, dtype=torch.int64), kv, view, SMALL)


@pytest.mark.parametrize(("row", "column", "told"), [(1, 1, r"\[2\]"), (0, 0, None), (1, 0, r"\[2\]")])
def test_a_block_that_is_written_has_one_owner(row: int, column: int, told: str | None) -> None:
    """Rows may share what they only read: here the first block of four, not the second, which both write."""
    table = torch.arange(1, 13).view(3, 2, 2)
    table[0, row, column] = 2 if told else table[0, 1, 0]
    table[0, 0, 0] = table[0, 1, 0] if told is None else table[0, 0, 0]
    view = View(table, torch.tensor([4, 4]), torch.tensor([2, 2]))
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    if told is None:
        prefill(random_params(SMALL, 0), tokens, init_cache(SMALL, 13, 4), view, SMALL)
        return
    with pytest.raises(ValueError, match=f"view.table_GBN has blocks {told} twice: this step writes them"):
        prefill(random_params(SMALL, 0), tokens, init_cache(SMALL, 13, 4), view, SMALL)


def test_views_of_narrow_integers_go_on() -> None:
    """Tables and counts in int32 are a view like any other, also the next one that `advance` makes of them."""
    tokens, found = random_tokens(SMALL, 0, 2, 6), list[Tensor]()
    for dtype in (torch.int64, torch.int32):
        kv, table = scattered_cache(SMALL, 2, LENGTH, 4, 0)
        params = random_params(SMALL, 0)
        view = View(table.to(dtype), torch.zeros(2, dtype=dtype), torch.tensor([4, 2], dtype=dtype))
        with torch.no_grad():
            first, kv = prefill(params, tokens[:, :4], kv, view, SMALL)
            second, kv = decode(params, tokens[:, 4:5], kv, view := advance(view), SMALL)
            third, kv = decode(params, tokens[:, 5:], kv, advance(view, torch.ones(2, dtype=torch.int32)), SMALL)
        found += [first, second, third]
    for wide, narrow in zip(found[:3], found[3:], strict=True):
        assert torch.equal(wide, narrow)
