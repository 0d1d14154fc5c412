"""Compiled forms of what stands around the layers equal their meaning, and are left out where gradients are wanted."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from muse_fn.decoder import forward
from muse_fn.kernels import around, cpu_calls
from muse_fn.kernels.norms import gain, mix, plain_norm, rotary_angles
from muse_fn.kvcache import cache
from muse_fn.kvcache.cache import Places, View, init_cache, locate
from muse_fn.kvcache.layout import Layout, layout_of
from muse_fn.step import check_step
from tests.models import SEEDS, SMALL, random_params

if why := cpu_calls.why_not():
    pytest.skip(why, allow_module_level=True)

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_forms_are_for_plain_tensors_without_gradients() -> None:
    x = torch.zeros(3)
    assert around.numba_form(x) is None, "gradients are wanted"
    with torch.no_grad():
        assert around.numba_form(x).__name__ == "muse_fn.kernels.cpu_step"
        assert around.numba_form(x, torch.zeros(0)) is None, "nothing to do"
        assert around.numba_form(torch.zeros(3, device="meta")) is None
        found = torch.func.vmap(lambda x: x + float(around.numba_form(x) is None))(x)  # pyright: ignore[reportUnknownLambdaType]
        assert torch.equal(found, torch.ones(3))


@given(st.floats(-1e4, 1e4), st.sampled_from([0.0, 0.5, 20.0]), st.sampled_from([0.18, 1.0]))
def test_logits_are_scaled_then_capped(z: float, cap: float, multiplier: float) -> None:
    x = torch.tensor([z, 0.0, math.nan, math.inf, -math.inf]).to(BF16)
    with torch.no_grad():
        found = around.capped(x, multiplier, cap)
    torch.testing.assert_close(found, around.capped(x.float(), multiplier, cap), equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 5), (3, 20_000)])
def test_many_logits_in_any_order_of_memory(shape: tuple[int, int]) -> None:
    x = draw(0, *reversed(shape)).to(BF16).t()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            found = around.capped(x, 1.5, 2.0)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, around.capped(x.float(), 1.5, 2.0), rtol=1e-6, atol=0)


@given(SEEDS, st.integers(1, 4), st.integers(1, 40))
def test_rows_of_a_table(seed: int, ranks: int, width: int) -> None:
    table = draw(seed, 4 * ranks, width).to(BF16)
    ids = torch.randint(-2, 4 * ranks + 2, (5, 2), generator=torch.Generator().manual_seed(seed)).t()
    expected = around.embedding(table, ids, 3)
    with torch.no_grad():
        assert torch.equal(around.embedding(table, ids, 3), expected)
        found = around.stream_norm(expected, 1e-5)
    torch.testing.assert_close(found, plain_norm(expected, 1e-5))


@given(SEEDS, st.integers(1, 5), st.integers(1, 70), st.sampled_from([BF16, torch.float32]))
def test_vectors_of_layers(seed: int, count: int, width: int, dtype: torch.dtype) -> None:
    vectors = [*(5 * draw(seed, count, width)).to(dtype)]
    with torch.no_grad():
        factors, blends = around.gains(vectors), around.mixes(vectors, 0.7, BF16)
        exact = around.mixes(vectors, 0.7, torch.float32)
    expected = mix(torch.stack(vectors), 0.7)
    assert all(torch.equal(torch.stack(x), y) for x, y in zip(zip(*exact, strict=True), expected, strict=True))
    for vector, factor, found, *same in zip(vectors, factors, blends, *expected, strict=True):
        assert torch.equal(factor.factor, gain(vector).factor)
        torch.testing.assert_close([*found], same)


@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_a_step_is_located_alike(seed: int, rows: int, length: int, width: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    windows = (0, 5, 5, 2)
    table = torch.randint(0, 50, (rows, width, 4), generator=generator).movedim(2, 0)
    past = torch.randint(0, width * size + 2, (rows,), generator=generator)
    view = View(table, past, torch.randint(0, length + 1, (rows,), generator=generator))
    expected = locate(view, length, size, Layout(windows, (), 1))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        used: list[Any] = []
        form = cache.numba_form
        patch.setattr(cache, "numba_form", lambda *given: used.append(form(*given)) or used[-1])  # pyright: ignore
        found = locate(view, length, size, Layout(windows, (), 1))
    assert used[0] is not None
    for f, e in zip(found, expected, strict=True):
        assert isinstance(f, Places)
        for mine, plain in zip(f, e, strict=True):
            assert torch.equal(mine, plain)


def test_what_is_kept_is_made_where_numbers_are_seen() -> None:
    """Angles made first under a transform or a mode leave nothing behind for those made later."""
    pos = torch.arange(3)[None]
    around._frequencies.cache_clear()  # pyright: ignore[reportPrivateUsage]

    def cosines(pos: torch.Tensor) -> torch.Tensor:
        return around.rotary_of(pos, 8, 1e4).cos

    torch.func.functionalize(cosines)(pos)
    with FakeTensorMode(allow_non_fake_inputs=True):
        around.rotary_of(pos, 8, 1e4)
    with torch.no_grad():
        found = around.rotary_of(pos, 8, 1e4)
    for mine, expected in zip(found, rotary_angles(pos, 8, 1e4), strict=True):
        assert type(mine) is torch.Tensor
        assert mine.data_ptr() != 0
        assert torch.equal(mine, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, about what it leaves to Python
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_compiler_that_traces_a_model_gets_no_addresses(dtype: torch.dtype) -> None:
    params, tokens = random_params(SMALL, 0, dtype), torch.arange(5)[None]
    with torch.no_grad():
        expected = forward(params, tokens, SMALL)
        traced = torch.compile(lambda tokens: forward(params, tokens, SMALL), backend="eager")  # pyright: ignore
        torch.testing.assert_close(traced(tokens), expected, atol=2e-6 if dtype != BF16 else 0.1, rtol=0)


def test_tables_that_do_not_fit_the_layout_are_named_not_read() -> None:
    """Compiled forms trust what they are given: where shapes disagree the plain form raises, or does what it does."""
    tables, one = torch.randint(1, 9, (2, 2, 3)), torch.ones(2, dtype=torch.int64)
    odd = View(tables, one[:1], one)
    expected = locate(odd, 1, 4, Layout((0, 4), (), 1))
    with torch.no_grad():
        for windows in ((4,), (0, 4, 5)):
            with pytest.raises(ValueError, match="zip"):
                locate(View(tables, one, one), 1, 4, Layout(windows, (), 1))
        for found, plain in zip(locate(odd, 1, 4, Layout((0, 4), (), 1)), expected, strict=True):
            assert all(torch.equal(mine, its) for mine, its in zip(found, plain, strict=True))


@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_the_quick_look_at_a_step_is_the_long_one(seed: int, batch: int, length: int, size: int) -> None:
    """Of views that fit and of those with a block twice, beyond the cache, or a count or id out of bounds."""
    generator = torch.Generator().manual_seed(seed)
    config = replace(SMALL, window=7, max_positions=29)
    windows = layout_of(config).windows

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    columns = 30 // size
    blocks = 2 + len(windows) * batch * columns
    table = 1 + torch.randperm(blocks - 1, generator=generator)[: len(windows) * batch * columns]
    table = table.view(len(windows), batch, columns)
    view = View(table, draw(0, 29 - length, batch), draw(0, length + 1, batch))
    tokens, kv = draw(0, config.vocab_size, batch, length), init_cache(config, blocks, size)
    match seed % 6:
        case 0:
            table.view(-1)[draw(0, table.numel(), 2)] = int(table.view(-1)[draw(0, table.numel(), 1)])
        case 1:
            table.view(-1)[draw(0, table.numel(), 1)] = int(draw(-1, 2, 1)) * blocks
        case 2:
            view.count_B[0] = int(draw(-1, length + 3, 1))
        case 3:
            view.past_B[0] = (1 << 63) - 1 if seed % 4 == 1 else int(draw(-1, 32, 1))
        case 4:
            tokens[0, 0] = int(draw(-1, 2, 1)) * config.vocab_size
        case _:
            pass
    args = tokens, view, windows, (blocks, size), (0, min(columns * size, 29), config.vocab_size)
    with torch.no_grad():
        found = around.fits(*args)
    try:
        check_step(tokens, kv, view, config, 0)  # where gradients are wanted there is no quick look
    except ValueError:
        assert not found
    else:
        assert found
    assert not around.fits(*args)
