"""Many new tokens: any tiles, splits, windows and orders of positions give what the reference gives."""

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu, gpu_attention, gpu_prefill, reference
from tests.kernels.test_gpu_attention import FLOAT8, HEADS, TOLERANCE, TYPES, Case, case, check
from tests.models import SEEDS, close

NO_DEVICE = gpu.why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(bool(NO_DEVICE), reason=f"no place to run device kernels: {NO_DEVICE}")


def rows_of(drawn: Case) -> tuple[Tensor, Tensor]:
    """The keys and values of a case in one array, what has no position as it lies there."""
    k, v = drawn.k_arena[drawn.blocks_BC], drawn.v_arena[drawn.blocks_BC]
    return k.flatten(1, 2), v.flatten(1, 2)


@settings(max_examples=6)
@given(
    SEEDS, st.lists(st.integers(1, 60), min_size=1, max_size=2), st.integers(1, 16), st.sampled_from([1, 5, 16, 32]),
    HEADS, TYPES, st.sampled_from([0, 1, 7, 33]), st.integers(0, 3), st.booleans(), st.sampled_from([1, 4, 20]),
)  # fmt: skip
def test_any_tiles_equal_the_reference(
    seed: int, lengths: list[int], new: int, block: int, heads: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype], window: int, empty: int, shuffled: bool, processors: int,
) -> None:  # fmt: skip
    """Tiles without a mask, with one and left out; blocks longer and shorter than a tile, and none."""
    drawn = case(seed, lengths, new, block, heads, *types, empty, shuffled)
    assert not gpu_prefill.why_not(*drawn[:3])
    with (
        patch.multiple(gpu_prefill, ROWS=32, EXACT_ROWS=32, KEYS=16, EXACT_KEYS=8, FEWEST_TILES=1),
        patch.object(gpu_attention, "processors", Mock(return_value=processors)),
    ):
        check(gpu_prefill.attend_blocks(*drawn, window), drawn, window)
        check(gpu_prefill.attend(drawn.q_BTND, *rows_of(drawn), drawn.q_pos_BT, drawn.k_pos_BS, window), drawn, window)


@pytest.mark.parametrize(("cache", "block"), [(torch.bfloat16, 128), (torch.bfloat16, 16), (FLOAT8, 64)])
@pytest.mark.parametrize("window", [0, 100])
def test_the_released_shapes(cache: torch.dtype, block: int, window: int) -> None:
    drawn = case(0, [400], 40, block, (8, 2, 64), torch.bfloat16, cache, 1)
    check(gpu_prefill.attend_blocks(*drawn, window), drawn, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_start_without_a_cache(dtype: torch.dtype) -> None:
    """Keys and values as the layer has them: values a slice of a wider product, padding at positions of its own."""
    q, k, v = (torch.randn(2, 70, *shape).to(dtype) for shape in ((4, 16), (2, 16), (64,)))
    v = v[..., 16:48].unflatten(-1, (2, 16))
    pos = torch.arange(70).expand(2, -1)
    for window in (0, 9):
        found = gpu_prefill.attend(q, k, v, pos, pos, window, True)
        assert found.dtype == dtype
        close(found.float(), reference.attend(q.float(), k.float(), v.float(), pos, pos, window), TOLERANCE[dtype])


@given(SEEDS, st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from([0, 20]))
@settings(max_examples=6)
def test_holes_between_tiles(seed: int, real: list[bool], window: int) -> None:
    """Whole tiles without positions before, between and behind those that all see; NaN in them."""
    drawn = case(seed, [8 * len(real)], 8, 8, (2, 2, 16), torch.float32, torch.float32)
    pos = torch.where(torch.tensor(real).repeat_interleave(8), drawn.k_pos_BS, -1)
    for arena in drawn[1:3]:
        arena[drawn.blocks_BC[0, ~torch.tensor(real)]] = torch.nan
    drawn = drawn._replace(k_pos_BS=pos)
    with patch.multiple(gpu_prefill, EXACT_KEYS=8, FEWEST_TILES=1):
        check(gpu_prefill.attend_blocks(*drawn, window), drawn, window)


def test_no_key_that_nobody_sees_is_read() -> None:
    """Their values are NaN, which a weight of zero would not hide."""
    drawn = case(0, [96], 8, 8, (2, 2, 16), torch.float32, torch.float32)
    for arena in drawn[1:3]:
        arena[drawn.blocks_BC[0, :7]] = torch.nan
    found = gpu_prefill.attend_blocks(*drawn, 20)
    assert not found.isnan().any()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    drawn = case(0, [40, 40], 9, 8, (2, 2, 16), torch.float32, torch.float32)
    k_pos = torch.stack([drawn.k_pos_BS[0] + 35, torch.full_like(drawn.k_pos_BS[0], -1)])
    drawn = drawn._replace(k_pos_BS=k_pos)
    for processors in (1, 20):
        with (
            patch.object(gpu_attention, "processors", Mock(return_value=processors)),
            patch.object(gpu_prefill, "FEWEST_TILES", 1),
        ):
            found = gpu_prefill.attend_blocks(*drawn, 0)
        assert (found[0, :4] == 0).all()
        assert (found[1] == 0).all()
        assert (found[0, 4:] != 0).any(-1).all()
        check(found, drawn, 0)


def test_what_is_not_a_number_stays_so() -> None:
    for arena in (1, 2):
        drawn = case(0, [40], 9, 8, (2, 1, 16), torch.float32, torch.float32)
        drawn[arena][drawn.blocks_BC[0, 4], 3] = torch.nan  # position 35; the queries are at 31 to 39
        found = gpu_prefill.attend_blocks(*drawn, 0)
        assert found[0, 4:].isnan().all()


def test_nothing_at_all() -> None:
    drawn = case(0, [9], 1, 4, (2, 2, 16), torch.float32, torch.float32)
    none = drawn._replace(blocks_BC=drawn.blocks_BC[:, :0], k_pos_BS=drawn.k_pos_BS[:, :0])
    assert (gpu_prefill.attend_blocks(*none, 0) == 0).all()
    empty = drawn._replace(q_BTND=drawn.q_BTND[:, :0], q_pos_BT=drawn.q_pos_BT[:, :0])
    assert gpu_prefill.attend_blocks(*empty, 0).shape == (1, 0, 4, 16)


def test_why_not() -> None:
    q, k = torch.empty(1, 9, 4, 16), torch.empty(2, 8, 2, 16)
    assert not gpu_prefill.why_not(q, k, k)
    assert not gpu_prefill.why_not(q.bfloat16(), k.to(FLOAT8), k.to(FLOAT8))
    assert "at most 32" in gpu_prefill.why_not(torch.empty(1, 9, 66, 16), k, k)
    assert "heads" in gpu_prefill.why_not(torch.empty(1, 9, 3, 16), k, k)
    assert "float64" in gpu_prefill.why_not(q.double(), k, k)
    assert "256" in gpu_prefill.why_not(torch.empty(1, 9, 4, 300), torch.empty(2, 8, 2, 300), torch.empty(2, 8, 2, 300))
