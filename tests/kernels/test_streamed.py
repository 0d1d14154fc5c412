"""Attention in tiles: equal to the reference whatever the tiles, within its workspace, blind to empty places."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muse_fn.kernels import reference, streamed
from tests.models import SEEDS, close


def context(seed: int, batch: int, columns: int, block: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arenas full of NaN but for the blocks of the context, in any order; the last row of each sequence is empty."""
    draw = torch.Generator().manual_seed(seed)
    total = batch * columns
    blocks = 1 + torch.randperm(total + 3, generator=draw)[:total].view(batch, columns)
    k, v = (torch.full((total + 4, block, kv_heads, 8), torch.nan) for _ in "kv")
    for arena in (k, v):
        arena[blocks.flatten()] = torch.randn(total, block, kv_heads, 8, generator=draw)
    pos = torch.arange(columns * block).expand(batch, -1).clone()
    pos[:, -1] = -1
    for arena in (k, v):
        arena[blocks[:, -1], block - 1] = torch.nan
    return k, v, blocks, pos


@given(SEEDS, st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.integers(2, 5), st.integers(0, 12),
       st.sampled_from([(4, 2), (3, 1), (2, 2)]), st.integers(9, 22))  # fmt: skip
def test_any_tiles_equal_the_reference(
    seed: int, batch: int, length: int, columns: int, block: int, window: int, heads: tuple[int, int], bits: int
) -> None:
    k, v, blocks, pos = context(seed, batch, columns, block, heads[1])
    q = torch.randn(batch, length, heads[0], 8, generator=torch.Generator().manual_seed(seed + 1))
    q_pos = torch.arange(columns * block - 1 - length, columns * block - 1).clamp_min(0).expand(batch, -1)
    expected = reference.attend_blocks(q, k, v, blocks, q_pos, pos, window)
    with patch.object(streamed, "WORKSPACE", 1 << bits):
        found = streamed.attend_blocks(q, k, v, blocks, q_pos, pos, window)
    assert found.isfinite().all()
    close(found, expected, 1e-5)


def test_a_query_that_sees_nothing_gets_finite_values() -> None:
    k, v, blocks, _ = context(0, 1, 3, 4, 1)
    q, nowhere = torch.randn(1, 2, 2, 8), torch.full((1, 12), -1)
    assert streamed.attend_blocks(q, k, v, blocks, torch.tensor([[5, 6]]), nowhere, 0).isfinite().all()


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor, and of all tensors, that operations in here make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("columns", [64, 512, 4096])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 100), (16, 1)])
def test_no_tensor_grows_with_the_context(columns: int, batch: int, length: int) -> None:
    block, kv_heads, heads = 16, 2, 8
    arena = torch.zeros(65, block, kv_heads, 8)
    blocks = torch.arange(columns).remainder(64).add(1).expand(batch, -1)
    pos = torch.arange(columns * block).expand(batch, -1)
    q, q_pos = (
        torch.randn(batch, length, heads, 8),
        torch.arange(columns * block - length, columns * block).expand(batch, -1),
    )
    with patch.object(streamed, "WORKSPACE", 1 << 20), Largest() as seen:
        streamed.attend_blocks(q, arena, arena, blocks, q_pos, pos, 0)
    assert seen.largest <= max(1 << 20, q.nbytes, pos.nbytes)


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 128), st.sampled_from([1, 2, 16]), st.integers(0, 7))
def test_tiles_fit_the_workspace_unless_they_are_the_least(
    batch: int, length: int, heads: int, kv_heads: int, log_block: int
) -> None:
    block, head_dim = 1 << log_block, 64
    b, t, columns = streamed.tile_sizes((batch, length, heads, head_dim), kv_heads, block)
    assert 1 <= b <= batch
    assert 1 <= t <= min(length, streamed.QUERIES)
    bytes_of_tile = 4 * b * columns * block * (4 * kv_heads * head_dim + 4 * heads * t)
    assert bytes_of_tile <= streamed.WORKSPACE or (b, t, columns) == (1, 1, 1)
    assert math.isfinite(bytes_of_tile)
