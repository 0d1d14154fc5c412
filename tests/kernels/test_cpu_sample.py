"""Compiled sampling draws the tokens of the plain form, which stands where gradients are wanted."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.filters import keep
from muse_fn.kernels import cpu_calls
from muse_fn.sample import Draw, Sampling, draws, fold_in, gumbel, sample
from tests.models import SEEDS, snapshot, unchanged

if why := cpu_calls.why_not():
    pytest.skip(why, allow_module_level=True)

from muse_fn.kernels import cpu_sample, cpu_scalars


def both(logits: Tensor, draw: Draw, pos: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Tokens of the compiled form, which must be the one that runs, and of the plain one."""
    assert not cpu_sample.why_not(logits, given.get("allowed_V"), draw, pos, given.get("going_B"))
    with torch.no_grad():
        found = sample(logits, draw, pos, **given)
    return found, sample(logits, draw, pos, **given)


def check(logits: Tensor, draw: Draw, pos: Tensor, **given: Any) -> None:
    """The same tokens; with noise another one only of the same sum, as far as rounding tells."""
    found, expected = both(logits, draw, pos, **given)
    other = found != expected
    if not other.any():
        return
    assert (found[other] >= 0).all()
    assert (expected[other] >= 0).all()
    assert (draw.temperature_B[other] > 0).all()
    assert not given.get("greedy")
    allowed = given.get("allowed_V")
    z = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    scaled = (z - z.amax(-1, keepdim=True)) / draw.temperature_B.clamp_min(1e-30)[:, None]
    if given.get("filtered", True):
        scaled = keep(scaled, draw.top_k_B, draw.top_p_B, draw.min_p_B)
    sums = (scaled + gumbel(fold_in(draw.key_B, pos), logits.shape[1]))[other]
    own, best = (sums.gather(1, x[other][:, None]) for x in (found, expected))
    assert ((best - own) <= 4e-6 * best.abs().clamp_min(1.0)).all()


ROWS = st.lists(
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1e-30, 0.1, 1.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 700]),
        top_p=st.sampled_from([1.0, 1e-6, 0.3, 0.95]),
        min_p=st.sampled_from([0.0, 0.05, 1.0]),
        seed=st.integers(0, 1 << 40),
    ),
    min_size=1,
    max_size=5,
)


@given(SEEDS, ROWS, st.sampled_from([1, 2, 3, 511, 512, 513, 1500]), st.sampled_from([0.0, 0.1, 3.0, 30.0]))
def test_tokens_are_those_of_the_plain_form(seed: int, rows: list[Sampling], width: int, size: float) -> None:
    """Peaked and flat rows, ties, ids left out, rows that stand, of any settings."""
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(len(rows), width, generator=generator)
    if seed % 3 == 0:
        logits = logits.round()
    given: dict[str, Any] = {"filtered": seed % 5 > 0, "greedy": seed % 7 == 0}
    if seed % 2:
        shape = (len(rows), width) if seed % 4 == 1 else (width,)
        given["allowed_V"] = torch.rand(shape, generator=generator) < 0.5
        given["allowed_V"][..., seed % width] = True
    if seed % 11 == 0:
        given["going_B"] = torch.rand(len(rows), generator=generator) < 0.5
    pos = torch.randint(0, 1 << 20, (len(rows),), generator=generator, dtype=torch.int32 if seed % 3 else torch.int64)
    check(logits, draws(rows, width), pos, **given)


def test_many_draws_of_wide_rows() -> None:
    logits = 2 * torch.randn(64, 32_000, generator=torch.Generator().manual_seed(1))
    for settings in (Sampling(1.0, seed=1), Sampling(0.7, top_p=0.95, seed=2), Sampling(1.5, top_k=50, min_p=0.01)):
        pos = torch.arange(64)
        check(logits, draws([settings] * 64, 32_000), pos)
        found, _ = both(logits, draws([settings] * 64, 32_000), pos)
        assert len(found.unique()) > 32, "rows of different logits and noise"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 511, 512, 999])
def test_rows_that_are_not_finite_have_no_token(bad: float, place: int) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    logits[1, place] = bad
    for settings in (Sampling(), Sampling(1.0, top_p=0.9)):
        found, expected = both(logits, draws([settings] * 3, 1000), torch.arange(3))
        assert found[1] == expected[1] == -1
        assert torch.equal(found, expected)


def test_the_lowest_of_equal_ids_is_taken_and_both_zeros_are_one() -> None:
    logits = torch.full((1, 1200), -1.0)
    logits[0, [700, 900]], logits[0, 800] = -0.0, 0.0
    found, expected = both(logits, draws([Sampling()], 1200), torch.zeros(1, dtype=torch.int64))
    assert found.tolist() == expected.tolist() == [700]


def test_of_no_allowed_ids_the_first_is_taken() -> None:
    given = {"allowed_V": torch.zeros(600, dtype=torch.bool)}
    for settings in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)):
        found, expected = both(torch.randn(2, 600), draws([settings] * 2, 600), torch.zeros(2).long(), **given)
        assert found.tolist() == expected.tolist() == [0, 0]


def test_threads_neighbours_and_order_in_memory_do_not_matter() -> None:
    logits = torch.randn(9_000, 16, generator=torch.Generator().manual_seed(0)).t()
    draw, pos = draws([Sampling(0.5 + n, top_p=0.9, seed=n) for n in range(16)], 9_000), torch.arange(16)
    before = snapshot([logits, *draw, pos])
    with torch.no_grad():
        one = sample(logits, draw, pos)
        torch.set_num_threads(2)
        try:
            two = sample(logits.contiguous(), draw, pos)
        finally:
            torch.set_num_threads(1)
        alone = torch.cat(
            [sample(logits[n : n + 1], Draw(*(x[n : n + 1] for x in draw)), pos[n : n + 1]) for n in range(16)]
        )
    assert torch.equal(one, two)
    assert torch.equal(one, alone)
    unchanged([logits, *draw, pos], before)


def test_what_it_does_not_take_goes_to_the_plain_form() -> None:
    draw, pos = draws([Sampling()], 40), torch.zeros(1, dtype=torch.int64)
    assert cpu_sample.why_not(torch.zeros(1, 40, dtype=torch.float64), None, draw, pos)
    assert cpu_sample.why_not(torch.zeros(1, 40), torch.zeros(40), draw, pos)
    assert cpu_sample.why_not(torch.zeros(1, 0), None, draw, pos), "no ids"
    two, yes = torch.zeros(2, 40), torch.ones(2, 40, dtype=torch.bool)
    assert cpu_sample.why_not(two, None, draw, pos), "one setting for two rows"
    assert cpu_sample.why_not(two, None, draws([Sampling()] * 2, 40), pos), "one position"
    for allowed in (yes[:1], yes[:, :39], yes[0, :39]):
        assert cpu_sample.why_not(two, allowed, draws([Sampling()] * 2, 40), pos.expand(2)), "not as many as ids"
    for going in (yes[:1, 0], yes[:, 0].int()):
        assert cpu_sample.why_not(two, None, draws([Sampling()] * 2, 40), pos.expand(2), going)
    with torch.no_grad():
        assert sample(torch.arange(40.0).double()[None], draw, pos).tolist() == [39]


def test_logarithms_are_within_three_units_of_the_last_place() -> None:
    """Near 1 too, where what is left of the sum is small."""
    x = torch.cat(
        [torch.logspace(-37, 37, 4_000), 1 - 2.0 ** -torch.arange(1.0, 25), 1 + 2.0 ** -torch.arange(1.0, 24)]
    )
    exact = x.double().log()
    found = torch.tensor([float(cpu_scalars.log(np.float32(y))) for y in x.tolist()], dtype=torch.float64)
    unit = 2.0 ** (exact.abs().clamp_min(1e-30).log2().floor() - 23)
    assert ((found - exact).abs() <= 3 * unit).all()
