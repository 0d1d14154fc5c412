"""How many experts a step reads on a card, when every token draws its top_k experts uniformly at random.

E experts lie in `groups` equal groups, one for each index along ep; a token takes R different ones. The steps of a mesh
wait for the card that has most to read, so both the mean over cards and the expectation of the maximum matter.
"""

from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np

TRIALS = 4000
SEED = 0
NEGLIGIBLE = 1e-9


class Touched(NamedTuple):
    """Expected number of different experts read on one card."""

    mean: float  # over cards
    slowest: float  # on the card with most of them
    how: str  # how `slowest` was found


def touched(experts: int, top_k: int, groups: int, tokens: int) -> Touched:
    """Both expectations; `groups` must divide `experts`. The same arguments give the same numbers."""
    mean = expected(experts, top_k, groups, tokens)
    each = experts // groups
    if groups == 1:
        return Touched(mean, mean, "exact: one group")
    if groups * (each - mean) < NEGLIGIBLE:
        return Touched(mean, float(each), "exact: all experts are read")
    if tokens == 1:
        return Touched(mean, float(slowest_of_one(experts, top_k, groups)), "exact: counted")
    slowest = simulated(experts, top_k, groups, tokens).max(1).mean()
    return Touched(mean, float(slowest), f"simulated: {TRIALS} trials, seed {SEED}")


def expected(experts: int, top_k: int, groups: int, tokens: int) -> float:
    """The mean: each of the E/groups local experts is missed by all tokens with probability (1 - R/E)^tokens."""
    return experts / groups * (1 - (1 - top_k / experts) ** tokens)


@lru_cache(maxsize=256)
def slowest_of_one(experts: int, top_k: int, groups: int) -> Fraction:
    """The expected maximum over groups of one token's experts, exactly.

    The counts per group are multivariate hypergeometric. Of the C(E, R) choices, those with at most m in every group
    are the coefficient of x^R in (sum over j <= m of C(E/groups, j) x^j)^groups; the mean is the sum of P(max > m).
    """
    each, every = experts // groups, comb(experts, top_k)
    found = Fraction(0)
    for m in range(top_k):
        choices = _power([comb(each, j) for j in range(min(m, each) + 1)], groups, top_k)
        found += 1 - Fraction(choices, every)
    return found


def _power(polynomial: list[int], exponent: int, degree: int) -> int:
    """The coefficient of x^degree in polynomial^exponent."""
    found = [1]
    for _ in range(exponent):
        product = [0] * min(len(found) + len(polynomial) - 1, degree + 1)
        for i, a in enumerate(found):
            for j, b in enumerate(polynomial[: len(product) - i]):
                product[i + j] += a * b
        found = product
    return found[degree] if degree < len(found) else 0


@lru_cache(maxsize=256)
def simulated(
    experts: int, top_k: int, groups: int, tokens: int, trials: int = TRIALS
) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """int64 [trials, groups]: different experts of each group that `tokens` tokens touched, in `trials` random steps.

    Only counts are drawn: of a token's R experts, those not touched before in group after group are hypergeometric.
    """
    rng = np.random.default_rng(SEED)
    new = np.full((trials, groups), experts // groups)  # not touched yet
    for _ in range(tokens):
        if not new.any():
            break
        left, others = np.full(trials, top_k), np.full(trials, experts)  # draws, and experts they may fall on
        for g in range(groups):
            fresh = new[:, g].copy()
            others -= fresh
            drawn = rng.hypergeometric(fresh, others, left)
            new[:, g] -= drawn
            left -= drawn
    return experts // groups - new
