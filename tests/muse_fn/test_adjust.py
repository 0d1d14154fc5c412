"""Penalties, biases, masks and log-probabilities, against the plain sentence of each, on one rank and on many."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.adjust import Bias, Likely, Seen, biased, likely, penalised, unpacked
from muse_fn.sample import Sampling, draws, sample
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.simulated import simulate
from tests.models import SEEDS, close

VOCAB = 24
MESH = Mesh(2, 2)


def share(z: Tensor, mesh: Mesh) -> Tensor:
    """This rank's columns."""
    width = z.shape[-1] // mesh.size(STAGE)
    return z[..., mesh.index(STAGE) * width :][..., :width]


def logits(seed: int, rows: int) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.lists(st.none() | st.tuples(st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 3)),
       st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 5)), min_size=1, max_size=4))  # fmt: skip
def test_penalties(seed: int, rows: list[tuple[dict[int, int], float, float, float] | None]) -> None:
    z = logits(seed, len(rows))
    expected = z.clone()
    seen: list[Seen | None] = []
    for row, given_ in enumerate(rows):
        if given_ is None:
            seen.append(None)
            continue
        counts, presence, frequency, repetition = given_
        seen.append(
            Seen(np.array([*counts], np.int64), np.array([*counts.values()], np.int64), presence, frequency, repetition)
        )
        for token, count in counts.items():
            value = z[row, token].item()
            value = value / repetition if value > 0 else value * repetition
            expected[row, token] = value - frequency * count - presence * (count > 0)
    before = z.clone()
    close(penalised(z, seen), expected, 1e-5)
    assert torch.equal(z, before)
    for rank, found in enumerate(simulate(MESH, lambda mesh: penalised(share(z, mesh), seen, mesh))):
        close(found, share(expected, MESH.at(rank)), 1e-5)


@given(SEEDS, st.lists(st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)),
       min_size=1, max_size=4))  # fmt: skip
def test_biases(seed: int, rows: list[dict[int, float] | None]) -> None:
    z = logits(seed, len(rows))
    expected = z.clone()
    for row, given_ in enumerate(rows):
        for token, value in (given_ or {}).items():
            expected[row, token] += value
    listed = [
        None if row is None else Bias(np.array([*row], np.int64), np.array([*row.values()], np.float32)) for row in rows
    ]
    close(biased(z, listed), expected, 1e-6)
    for rank, found in enumerate(simulate(MESH, lambda mesh: biased(share(z, mesh), listed, mesh))):
        close(found, share(expected, MESH.at(rank)), 1e-6)


@given(st.lists(st.none() | st.sets(st.integers(0, 69)), min_size=1, max_size=3), st.sampled_from([64, 70, 96, 100]))
def test_masks(rows: list[set[int] | None], vocab_size: int) -> None:
    words: list[np.ndarray | None] = []  # type: ignore[type-arg]
    for row in rows:
        packed = np.zeros(3, np.uint32)
        for token in row or ():
            packed[token // 32] |= np.uint32(1 << (token % 32))
        words.append(None if row is None else packed.view(np.int32))
    found = unpacked(words, vocab_size)
    for row, allowed in zip(found, rows, strict=True):
        wanted = range(vocab_size) if allowed is None else sorted(t for t in allowed if t < vocab_size)
        assert [*np.flatnonzero(row)] == [*wanted]


@given(SEEDS, st.integers(1, 3), st.integers(1, VOCAB))
def test_log_probabilities(seed: int, rows: int, top: int) -> None:
    z = logits(seed, rows)
    chosen = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(seed))
    allowed = torch.ones(VOCAB, dtype=torch.bool)
    allowed[3] = False

    def check(found: Likely) -> None:
        lp = z.double().log_softmax(-1)
        for row in range(rows):
            own = lp[row, chosen[row]].item()
            assert math.isclose(found.chosen_B[row].item(), own, abs_tol=1e-5)
            assert found.rank_B[row] == 1 + (z[row] > z[row, chosen[row]]).sum()
            order = [t for t in z[row].argsort(descending=True).tolist() if t != 3][:top]
            assert found.ids_BK[row].tolist()[: len(order)] == order
            close(found.top_BK[row][: len(order)], lp[row, order].float(), 1e-5)
        assert bool((found.top_BK <= 0).all())

    check(likely(z, chosen, top, allowed_V=allowed))
    for found in simulate(MESH, lambda mesh: likely(share(z, mesh), chosen, top, mesh, allowed_V=allowed)):
        check(found)


@given(SEEDS, st.integers(1, 4))
def test_rows_may_have_masks_of_their_own_and_greedy_rows_need_no_noise(seed: int, rows: int) -> None:
    z = logits(seed, rows)
    allowed = torch.rand(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[:, 0] = True
    draw, pos = draws([Sampling(seed=n) for n in range(rows)], VOCAB), torch.arange(rows)
    plain = sample(z, draw, pos, allowed_V=allowed)
    assert plain.tolist() == z.masked_fill(~allowed, -torch.inf).argmax(-1).tolist()
    assert torch.equal(sample(z, draw, pos, allowed_V=allowed, greedy=True, filtered=False), plain)
    warm = draws([Sampling(1.0, seed=n) for n in range(rows)], VOCAB)
    drawn = sample(z, warm, pos, allowed_V=allowed)
    assert bool(allowed.gather(1, drawn[:, None]).all())
    assert torch.equal(sample(z, warm, pos, allowed_V=allowed, mesh=ONE), drawn)
    z[0, 5] = torch.nan
    assert sample(z, draw, pos, greedy=True)[0] == -1
