"""Odds of touching experts: exact where they can be, and close to all cases where they are simulated."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.devices import assumptions, rates
from muse_fn.floors import decode_step
from muse_fn.footprint import (
    weights,
)
from muse_fn.plan import Setup, predict
from muse_fn.sharding.mesh import Mesh
from muse_fn.touched import SEED, expected, simulated, slowest_of_one, touched
from tests.planned import RELEASED


def brute_force(experts: int, top_k: int, groups: int, tokens: int) -> tuple[Fraction, Fraction]:
    """Mean and expected maximum over all choices of all tokens."""
    each, mean, most, cases = experts // groups, 0, 0, 0
    for chosen in product(combinations(range(experts), top_k), repeat=tokens):
        counts = Counter(expert // each for expert in set[int]().union(*chosen))
        mean, most, cases = mean + counts.total(), most + max(counts.values()), cases + 1
    return Fraction(mean, cases * groups), Fraction(most, cases)


@pytest.mark.parametrize("size", [(4, 2, 2, 1), (6, 3, 3, 1), (8, 3, 2, 1), (8, 8, 4, 1), (4, 1, 4, 2), (6, 2, 2, 3)])
def test_odds_are_those_of_all_cases(size: tuple[int, int, int, int]) -> None:
    experts, top_k, groups, tokens = size
    mean, most = brute_force(*size)
    found = touched(*size)
    assert found.mean == pytest.approx(float(mean), rel=1e-12)
    if tokens == 1:
        assert slowest_of_one(experts, top_k, groups) == most
        assert found.slowest == float(most)
    else:
        assert found.slowest == pytest.approx(float(most), abs=0.05)
        assert f"seed {SEED}" in found.how


@pytest.mark.parametrize(("groups", "tokens"), [(2, 1), (4, 1), (8, 1), (2, 4), (8, 16), (2, 64)])
def test_simulation_and_exact_agree(groups: int, tokens: int) -> None:
    """Five standard errors of the simulated mean; the maximum of one token against its exact expectation."""
    trials = simulated(RELEASED.experts, RELEASED.top_k, groups, tokens)
    mean, error = trials[:, 0].mean(), trials[:, 0].std() / len(trials) ** 0.5
    assert abs(mean - expected(RELEASED.experts, RELEASED.top_k, groups, tokens)) < 5 * error
    if tokens == 1:
        assert (trials.sum(1) == RELEASED.top_k).all()
        most = trials.max(1)
        exact = float(slowest_of_one(RELEASED.experts, RELEASED.top_k, groups))
        assert abs(most.mean() - exact) < 5 * most.std() / len(most) ** 0.5


@given(st.sampled_from([1, 2, 4]), st.integers(1, 8), st.integers(1, 60))
@settings(deadline=None)
def test_more_tokens_touch_more_experts_and_never_more_than_there_are(groups: int, top_k: int, tokens: int) -> None:
    now, later = (touched(8, top_k, groups, n) for n in (tokens, tokens + 1))
    assert top_k / groups - 1e-9 <= now.mean <= later.mean <= 8 / groups
    assert now.mean <= now.slowest + 0.1
    assert now.slowest <= 8 / groups
    assert touched(8, top_k, groups, tokens) == now


def test_at_last_all_experts_are_touched() -> None:
    for groups in (1, 2, 8, 256):
        found = touched(RELEASED.experts, RELEASED.top_k, groups, 4096)
        assert found.mean == found.slowest == RELEASED.experts / groups
    setup = Setup(RELEASED, Mesh(2, 4), context=1)
    found = predict(setup, decode_step(10**6, 1), rates(assumptions("gaudi2", 8)))
    assert found.slowest["experts"].bytes == weights(RELEASED, Mesh(2, 4), "quark-mxfp4")["experts"]
