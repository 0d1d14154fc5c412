"""Forms whose bits depend on a row alone: equal to the reference within rounding, and to themselves exactly."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kernels import invariant, reference
from muse_fn.kernels.packed import quantise_mxfp4
from tests.models import SEEDS, close


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.integers(1, 40), st.sampled_from([3, 5, 7, 15, 16, 33, 64, 300]), st.integers(1, 70))
def test_linear_rows_depend_on_themselves(seed: int, rows: int, width: int, out: int) -> None:
    x, w = noise(seed, rows, width), noise(seed + 1, out, width)
    found = invariant.linear(x, w)
    close(found, reference.linear(x, w), 1e-5)
    for n in range(1, rows):
        assert torch.equal(torch.cat([invariant.linear(x[:n], w), invariant.linear(x[n:], w)]), found)


@given(
    SEEDS, st.integers(1, 9), st.integers(0, 200), st.integers(0, 90), st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    st.sampled_from([2, 5, 6, 8, 11, 16]),
)  # fmt: skip
def test_a_query_depends_on_what_it_sees(
    seed: int, length: int, past: int, window: int, heads: tuple[int, int], width: int
) -> None:
    """Keys in another order, with empty places, without those out of sight; queries one by one."""
    n, k = heads
    q, keys, values = (
        noise(seed, 1, length, n, width),
        noise(seed + 1, 1, past + length, k, width),
        noise(seed + 2, 1, past + length, k, width),
    )
    q_pos, k_pos = torch.arange(past, past + length)[None], torch.arange(past + length)[None]
    found = invariant.attend(q, keys, values, q_pos, k_pos, window)
    close(found, reference.attend(q, keys, values, q_pos, k_pos, window), 1e-5)
    order = torch.randperm(past + length, generator=torch.Generator().manual_seed(seed))
    empty = torch.nn.functional.pad(k_pos[:, order], (2, 3), value=-1)
    shuffled = [
        torch.nn.functional.pad(x[:, order], (0, 0, 0, 0, 2, 3), value=torch.nan).nan_to_num(9.0)
        for x in (keys, values)
    ]
    assert torch.equal(invariant.attend(q, shuffled[0], shuffled[1], q_pos, empty, window), found)
    for t in range(length):
        first = max(0, past + t - window + 1) if window else 0
        seen = slice(first, past + t + 1)
        alone = invariant.attend(
            q[:, t : t + 1], keys[:, seen], values[:, seen], q_pos[:, t : t + 1], k_pos[:, seen], window
        )
        assert torch.equal(alone[:, 0], found[:, t])


@given(SEEDS, st.integers(1, 12), st.booleans())
def test_expert_rows_depend_on_their_token(seed: int, tokens: int, packed: bool) -> None:
    u, gate_up, down = noise(seed, tokens, 32), noise(seed + 1, 5, 64, 32) / 6, noise(seed + 2, 5, 32, 32) / 6
    idx = torch.randint(-2, 7, (tokens, 3), generator=torch.Generator().manual_seed(seed))
    weights = (quantise_mxfp4(gate_up), quantise_mxfp4(down)) if packed else (gate_up, down)
    found = invariant.expert_rows(u, idx, *weights)
    close(found, reference.expert_rows(u, idx, *weights), 1e-5)
    for t in range(tokens):
        assert torch.equal(invariant.expert_rows(u[t : t + 1], idx[t : t + 1], *weights)[0], found[t])
