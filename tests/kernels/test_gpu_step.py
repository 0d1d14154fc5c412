"""The Triton forms around the layers, in Triton's interpreter, against the plain ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.kernels import gpu_step
from muse_fn.kernels.around import advanced, capped, embedding, rotary_of
from muse_fn.kernels.norms import rotary_angles, rotary_frequencies
from muse_fn.kvcache.cache import Places, View, locate_next
from muse_fn.kvcache.layout import Layout
from tests.models import SEEDS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where numbers overflow
WINDOWS = st.sampled_from([(0,), (5,), (0, 5, 5), (0, 0, 1), (3, 3), (0, 300)])


@settings(max_examples=40)
@given(SEEDS, WINDOWS, st.integers(1, 3), st.integers(1, 70), st.sampled_from([1, 3, 4, 16, 128]))
def test_a_step_is_located_alike(seed: int, windows: tuple[int, ...], rows: int, width: int, size: int) -> None:
    """Rows of padding, rows without a block in one group, rows at the end of their table and at the model's limit."""
    draw = torch.Generator().manual_seed(seed)
    table = 1 + torch.randint(0, 2**40, (len(windows), rows, width), generator=draw)
    table[torch.rand(table.shape, generator=draw) < 0.2 * (seed % 2)] = 0
    past = torch.randint(0, width * size + 2, (rows,), generator=draw)
    view = View(table, past, torch.randint(0, 2, (rows,), generator=draw))
    most = int(past.max()) + seed % 3
    expected, places = locate_next(view, size, Layout(windows, (), 1), most)
    assert gpu_step.why_not_locate(table, windows) == ""
    count, found = gpu_step.locate_next(*view, windows, size, most)
    assert torch.equal(count, expected.count_B)
    assert len(found) == len(places)
    for ours, theirs in zip(found, places, strict=True):
        for x, y in zip(Places(*ours), theirs, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_a_table_may_be_a_part_of_a_wider_one() -> None:
    view = View(1 + torch.arange(60).view(2, 3, 10)[:, :2, 1:9], torch.tensor([7, 31]), torch.ones(2).long())
    expected = locate_next(view, 4, Layout((0, 5), (), 1), 99)[1]
    found = gpu_step.locate_next(*view, (0, 5), 4, 99)[1]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


@given(SEEDS, st.sampled_from([1, 3, 1024, 1025]), st.integers(1, 9), st.integers(-9, 20))
def test_rows_of_the_table(seed: int, width: int, count: int, first: int) -> None:
    """Ids of other shares and of nobody too, and rows that are not finite: they are nobody else's."""
    table = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(
        [torch.float32, torch.bfloat16][seed % 2]
    )
    table[0, 0], table[-1, -1] = math.nan, -0.0
    ids = torch.randint(-2, 25, (2, 3), generator=torch.Generator().manual_seed(seed + 1))
    found, expected = gpu_step.embedding(table, ids, first), embedding(table, ids, first)
    assert found.dtype == expected.dtype == table.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert gpu_step.embedding(table, ids[:0], first).shape == (0, 3, width)


NUMBERS = st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=1030)


@given(NUMBERS, st.sampled_from([0.0, 0.5, 20.0]), st.sampled_from([0.1767766952966369, 1.0]))
def test_logits_are_capped_alike(numbers: list[float], cap: float, multiplier: float) -> None:
    z = torch.tensor(numbers)
    for given_z in (z, z.bfloat16(), z[None, :, None]):
        found, expected = gpu_step.capped(given_z, multiplier, cap), capped(given_z, multiplier, cap)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=5e-7, atol=0, equal_nan=True)


def test_the_cap_is_exact_near_0_and_falls_nowhere() -> None:
    """Every binade down to the smallest, and densely where one formula takes over from the other."""
    x = torch.cat([torch.logspace(-37, 2, 4000), torch.linspace(0.24, 0.26, 4000), torch.linspace(0, 12, 9000)])
    found, wanted = gpu_step.capped(x, 1.0, 1.0), torch.tanh(x.double())
    assert ((found.double() - wanted).abs() <= 2.0**-21 * wanted).all()
    assert torch.equal(gpu_step.capped(-x, 1.0, 1.0), -found)
    assert (gpu_step.capped(torch.linspace(0.2499, 0.2501, 2000), 1.0, 1.0).diff() >= -1e-7).all()
    assert gpu_step.capped(torch.tensor([math.inf, -math.inf, 3e38]), 1.0, 20.0).tolist() == [20.0, -20.0, 20.0]
    assert gpu_step.capped(torch.empty(0, 3), 1.0, 1.0).shape == (0, 3)


@given(SEEDS, st.sampled_from([2, 6, 64]), st.sampled_from([(1, 1), (3, 1), (2, 40)]), st.sampled_from([1e4, 5e5]))
def test_angles_are_the_plain_ones(seed: int, width: int, shape: tuple[int, int], theta: float) -> None:
    pos = torch.randint(0, 1_000_000, shape, generator=torch.Generator().manual_seed(seed))
    pos.view(-1)[0] = 0
    for wide in (pos, pos.int(), torch.cat([pos, pos], 1)[:, : shape[1]]):
        for found, expected in zip(gpu_step.rotary(wide, width, theta), rotary_angles(pos, width, theta), strict=True):
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 1), st.integers(-1, 3)), min_size=1, max_size=9))
def test_rows_advance_alike(rows: list[tuple[int, int, int]]) -> None:
    past, count, tokens = torch.tensor(rows).unbind(1)
    for given_tokens in (tokens, torch.stack([tokens, tokens], 1)[:, 0]):
        found, expected = gpu_step.advanced(past, count, given_tokens), advanced(past, count, given_tokens)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_frequencies_are_kept() -> None:
    kept = gpu_step.frequencies(8, 1e4, torch.device("cpu"))
    assert torch.equal(kept, rotary_frequencies(8, 1e4, torch.device("cpu")))
    with torch.inference_mode():
        other = gpu_step.frequencies(6, 1e4, torch.device("cpu"))
    assert not other.is_inference()
    assert gpu_step.frequencies(6, 1e4, torch.device("cpu")) is other
    pos = torch.arange(7)[None]
    for found, expected in zip(rotary_of(pos, 6, 1e4), rotary_angles(pos, 6, 1e4), strict=True):
        assert torch.equal(found, expected)


def test_what_the_forms_cannot_take_is_said() -> None:
    table = torch.ones(2, 1, 3, dtype=torch.int64)
    assert gpu_step.why_not_locate(table, (0, 4)) == gpu_step.why_not_embedding(torch.ones(3, 4)) == ""
    refused = [
        (gpu_step.why_not_locate(table.int(), (0, 4)), "torch.int32 [2, 1, 3]"),
        (gpu_step.why_not_locate(table[:, :0], (0, 4)), "[2, 0, 3]"),
        (gpu_step.why_not_locate(table, (4, 0)), "(4, 0)"),
        (gpu_step.why_not_locate(table, (4, 5)), "(4, 5)"),
        (gpu_step.why_not_embedding(torch.ones(3, 4).long()), "torch.int64"),
        (gpu_step.why_not_embedding(torch.ones(3, 4).T), "(1, 4)"),
    ]
    for reason, part in refused:
        assert part in reason
