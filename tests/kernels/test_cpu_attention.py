"""Compiled attention over a cache equals the reference in float64 within what bfloat16 results explain."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import reference
from tests.models import SEEDS

cpu_attention: Any = pytest.importorskip("muse_fn.kernels.cpu_attention", reason="Numba is not installed")
BF16 = torch.bfloat16


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(found: Tensor, *args: Any) -> None:
    """Half a unit of bfloat16's last place, and float32's part by the size of the values."""
    q, k, v, *rest = args
    exact = reference.attend_blocks(q.double(), k.double(), v.double(), *rest)
    _, _, _, blocks, q_pos, k_pos, window = args
    seen = reference.visible(q_pos, k_pos, window).any(-1)
    size = v[blocks.flatten()].double().abs().nan_to_num().max()
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-16 * size)[seen].all()
    assert found.isfinite()[~seen].all(), "finite also for a query that sees no key"


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 16), st.integers(1, 3))


@given(SEEDS, st.integers(1, 3), st.integers(1, 4), SIZES, st.integers(1, 5), st.integers(1, 40), st.integers(0, 20))
def test_attention_is_that_of_the_reference(
    seed: int, batch: int, length: int, heads: tuple[int, int, int], columns: int, block: int, window: int
) -> None:
    """Unordered positions, empty places, blocks shared and torn into stretches, blocks of any size."""
    kv_heads, group, width = heads[0], heads[1], 32 * heads[2]
    k, v = draw(seed, 2, 7, block, kv_heads, width).to(BF16)
    q = (2 * draw(seed + 1, batch, length, kv_heads * group, width)).to(BF16)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 7, (batch, columns), generator=generator)
    k_pos = torch.randint(-1, 30, (batch, columns * block), generator=generator)
    if seed % 2:  # as a cache has them
        k_pos = torch.arange(columns * block).expand(batch, -1).clone()
        k_pos[:, seed % (columns * block + 1) :] = -1
    q_pos = torch.randint(0, 30, (batch, length), generator=generator)
    args = q, k, v, blocks, q_pos, k_pos, window
    check(cpu_attention.attend_blocks(*args), *args)


@pytest.mark.parametrize("heads", [1, 15, 16])
def test_any_number_of_keys_that_are_seen(heads: int) -> None:
    """Up to as many heads as there may be, of which none touches what another has found."""
    k, v = draw(0, 2, 1, 70, 1, 32).to(BF16)
    q, block = (2 * draw(1, 1, 1, heads, 32)).to(BF16), torch.zeros(1, 1, dtype=torch.int64)
    for seen in range(1, 71):
        args = q, k, v, block, torch.tensor([[seen - 1]]), torch.arange(70)[None], 0
        check(cpu_attention.attend_blocks(*args), *args)


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4])
def test_scores_of_any_size(size: float) -> None:
    """With large ones a single key has all the weight, wherever it stands and whatever was the highest before."""
    k, v = draw(0, 2, 5, 16, 2, 64).to(BF16)
    q = (size * draw(1, 2, 1, 8, 64)).to(BF16)
    args = q, k, v, torch.tensor([[1, 2, 3], [4, 0, 2]]), torch.tensor([[47], [40]]), torch.arange(48).expand(2, 48), 0
    check(cpu_attention.attend_blocks(*args), *args)


def test_keys_that_are_not_seen_are_not_read() -> None:
    k, v = draw(0, 2, 4, 8, 1, 32).to(BF16)
    q, blocks, q_pos = draw(1, 1, 1, 4, 32).to(BF16), torch.tensor([[1, 2, 3]]), torch.tensor([[17]])
    k_pos = torch.arange(24)[None].clone()
    k_pos[0, 5], window = -1, 14
    clean = cpu_attention.attend_blocks(q, k, v, blocks, q_pos, k_pos, window)
    for arena in (k, v):
        arena[0] = arena[1, :4] = arena[1, 5] = arena[3, 2:] = float("nan")
    assert torch.equal(cpu_attention.attend_blocks(q, k, v, blocks, q_pos, k_pos, window), clean)
    v[2, 0] = float("nan")
    assert cpu_attention.attend_blocks(q, k, v, blocks, q_pos, k_pos, window).isnan().all()
    v[2, 0], k[2, 0] = 0.0, float("nan")
    assert cpu_attention.attend_blocks(q, k, v, blocks, q_pos, k_pos, window).isnan().all()


def test_two_threads_make_the_same_bits_as_one_and_order_in_memory_does_not_matter() -> None:
    k, v = draw(0, 2, 9, 16, 3, 64).to(BF16)
    q = draw(1, 64, 6, 2, 5).to(BF16).permute(3, 2, 1, 0)
    blocks, q_pos = torch.randint(0, 9, (2, 5)).t(), torch.tensor([[70, 71]]).expand(5, 2)
    k_pos = torch.arange(32).expand(5, 32)
    one = cpu_attention.attend_blocks(q, k, v, blocks, q_pos, k_pos, 50)
    torch.set_num_threads(2)
    try:
        two = cpu_attention.attend_blocks(q.contiguous(), k, v, blocks.contiguous(), q_pos.contiguous(), k_pos, 50)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(width: int) -> None:
    """However many heads of how many sequences a thread takes at once. Results are rounded: another order of sums would
    show in one of some ten thousand, so there are many."""
    batch = 8192 // width
    k, v = draw(0, 2, 60, 16, 4, width).to(BF16)
    q = (4 * draw(1, batch, 1, 16, width) / width**0.5).to(BF16)
    blocks = torch.randint(0, 60, (batch, 9), generator=torch.Generator().manual_seed(2))
    pos, q_pos = torch.arange(144).expand(batch, 144), 143 - torch.arange(batch)[:, None] % 70
    for window in (0, 50):
        whole = cpu_attention.attend_blocks(q, k, v, blocks, q_pos, pos, window)
        torch.set_num_threads(2)
        try:
            for n in range(batch):
                one = slice(n, n + 1)
                found = cpu_attention.attend_blocks(q[one], k, v, blocks[one], q_pos[one], pos[one], window)
                assert torch.equal(found, whole[one])
        finally:
            torch.set_num_threads(1)
