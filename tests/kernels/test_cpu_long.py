"""Long contexts on a CPU: fused tiles where all is seen, plain ones at the edges, together the reference."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kernels import cpu, cpu_long, reference
from tests.kernels.test_streamed import context
from tests.models import SEEDS, close


@given(SEEDS, st.integers(1, 3), st.integers(1, 9), st.integers(1, 30), st.integers(2, 5), st.integers(0, 40),
       st.sampled_from([(4, 2), (3, 1), (2, 2)]), st.integers(1, 40), st.integers(6, 20))  # fmt: skip
def test_any_tiles_equal_the_reference(
    seed: int,
    batch: int,
    length: int,
    columns: int,
    block: int,
    window: int,
    heads: tuple[int, int],
    keys: int,
    bits: int,
) -> None:
    k, v, blocks, pos = context(seed, batch, columns, block, heads[1])
    q = torch.randn(batch, length, heads[0], 8, generator=torch.Generator().manual_seed(seed + 1))
    q_pos = torch.arange(columns * block - 1 - length, columns * block - 1).clamp_min(0).expand(batch, -1)
    expected = reference.attend_blocks(q, k, v, blocks, q_pos, pos, window)
    with patch.object(cpu_long, "KEYS", keys), patch.object(cpu_long, "BLOCK_BYTES", 1 << bits):
        found = cpu_long.attend_blocks(q, k, v, blocks, q_pos, pos, window)
    assert found.isfinite().all()
    close(found, expected, 1e-5)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    k, v, blocks, _ = context(0, 1, 3, 4, 1)
    q, nowhere = torch.randn(1, 2, 2, 8), torch.full((1, 12), -1)
    assert not cpu_long.attend_blocks(q, k, v, blocks, torch.tensor([[5, 6]]), nowhere, 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_context_too_long_to_be_gathered_comes_here(dtype: torch.dtype) -> None:
    k, v, blocks, pos = context(0, 1, 20, 4, 2)
    q, q_pos = torch.randn(1, 3, 4, 8, dtype=dtype), torch.tensor([[70, 71, 72]])
    near = cpu.attend_blocks(q, k, v, blocks, q_pos, pos, 0)
    with (
        patch.object(cpu, "GATHERED", 64),
        patch.object(cpu_long, "attend_blocks", wraps=cpu_long.attend_blocks) as seen,
    ):
        far = cpu.attend_blocks(q, k, v, blocks, q_pos, pos, 0)
    assert seen.call_count == 1
    assert far.dtype == dtype
    close(far, near, 1e-5 if dtype == torch.float32 else 0.02)
