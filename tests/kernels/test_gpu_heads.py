"""Heads, what is placed into the cache and what is gated equal the plain pieces, whatever the sizes and strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu, gpu_heads, gpu_merge, pieces
from muse_fn.kernels.norms import Rotary, rotary_angles
from tests.models import SEEDS, close

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
FLOAT8 = torch.float8_e4m3fn
NO_DEVICE = gpu.why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(bool(NO_DEVICE), reason=f"no place to run device kernels: {NO_DEVICE}")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
WIDTHS = st.sampled_from([2, 6, 16, 64, 80])
COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))  # B, T, group, K


def slices(seed: int, batch: int, length: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Columns of one wider product, which has more of them at either end."""
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randn(batch, length, 3 + sum(widths) + 2, generator=draw).to(dtype)
    return list(whole[..., 3:-2].split(widths, -1))


def angles(batch: int, length: int, width: int, is_full: bool) -> Rotary | None:
    pos = torch.arange(batch)[:, None] * 1000 + torch.arange(length)
    return None if is_full else rotary_angles(pos, width, 1e4)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@given(SEEDS, COUNTS, WIDTHS, DTYPES, st.booleans(), st.sampled_from([1.0, 0.37]))
@settings(max_examples=20)
def test_heads(
    seed: int, counts: tuple[int, int, int, int], width: int, dtype: torch.dtype, is_full: bool, scale: float
) -> None:
    batch, length, group, kv_heads = counts
    q, k = slices(seed, batch, length, (group * kv_heads * width, kv_heads * width), dtype)
    rotary = angles(batch, length, width, is_full)
    assert not gpu_heads.why_not(width, q, k)
    found, expected = (x.heads(q, k, rotary, width, scale, 1e-5) for x in (gpu_heads, pieces))
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == dtype
        assert f.is_contiguous()
        close(f.float(), e.float(), TOLERANCE[dtype])


@given(
    SEEDS, COUNTS, WIDTHS, DTYPES, st.sampled_from([None, torch.float32, torch.bfloat16, FLOAT8]), st.booleans(),
    st.sampled_from([1, 5, 16]),
)  # fmt: skip
@settings(max_examples=15)
def test_place(
    seed: int, counts: tuple[int, int, int, int], width: int, dtype: torch.dtype, cache: torch.dtype | None,
    is_full: bool, block: int,
) -> None:  # fmt: skip
    """Rows that are named hold what the plain form writes, all others what they held."""
    batch, length, group, kv_heads = counts
    cache = cache or dtype
    q, k, v = slices(seed, batch, length, (group * kv_heads * width, kv_heads * width, kv_heads * width), dtype)
    v = (v.float() * 100).to(dtype)  # some beyond what float8 holds
    rotary = angles(batch, length, width, is_full)
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-batch * length // block) + 2
    rows = torch.randperm(blocks * block, generator=draw)[: batch * length]
    before = [torch.randn(blocks, block, kv_heads, width, generator=draw).to(cache) for _ in "kv"]
    ours, plain = ([x.clone() for x in before] for _ in "op")
    found = gpu_heads.place(q, k, v, rotary, 0.5, 1e-5, ours[0], ours[1], rows)
    expected = pieces.place(q, k, v, rotary, 0.5, 1e-5, plain[0], plain[1], rows)
    close(found.float(), expected.float(), TOLERANCE[dtype])
    close(ours[0].float(), plain[0].float(), 2**-3 if cache == FLOAT8 else max(TOLERANCE[dtype], TOLERANCE[cache]))
    assert torch.equal(bits(ours[1]), bits(plain[1])), "values are only rounded"
    kept = torch.ones(blocks * block, dtype=torch.bool).index_fill(0, rows, False)
    for arena, old in zip(ours, before, strict=True):
        assert torch.equal(bits(arena.flatten(0, 1)[kept]), bits(old.flatten(0, 1)[kept]))


def test_every_number_is_rounded_to_float8_as_plainly() -> None:
    """All bfloat16 numbers: what is too large, too small, halfway and not a number."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(1, 64, 1024)
    ours, plain = (torch.zeros(4, 16, 1, 1024, dtype=FLOAT8) for _ in "op")
    every = every.where(~every.isnan(), torch.nan)
    k, unread = torch.ones(1, 64, 1024).bfloat16(), torch.empty(4, 16, 1, 1024).bfloat16()
    gpu_heads.place(k, k, every, None, 1.0, 1e-5, unread, ours, torch.arange(64))
    pieces.place(k, k, every, None, 1.0, 1e-5, unread, plain, torch.arange(64))
    assert torch.equal(ours.float().nan_to_num(999), plain.float().nan_to_num(999))


def test_padding_shares_a_row_of_block_0() -> None:
    q, k, v = slices(0, 2, 3, (32, 16, 16), torch.float32)
    rows = torch.tensor([4, 5, 1, 6, 1, 1])
    ours, plain = ([torch.zeros(2, 4, 1, 16) for _ in "kv"] for _ in "op")
    gpu_heads.place(q, k, v, None, 1.0, 1e-5, ours[0], ours[1], rows)
    pieces.place(q, k, v, None, 1.0, 1e-5, plain[0], plain[1], rows)
    for found, expected in zip(ours, plain, strict=True):
        assert found[0, 1].isfinite().all()
        found[0, 1] = expected[0, 1] = 0.0
        close(found, expected)


@pytest.mark.parametrize("cache", [torch.float32, FLOAT8])
def test_what_is_not_a_number_is_written_as_such(cache: torch.dtype) -> None:
    q, k, v = slices(0, 1, 2, (16, 16, 16), torch.float32)
    k[0, 0, 3] = v[0, 0, 5] = torch.nan
    arenas = [torch.zeros(1, 2, 1, 16).to(cache) for _ in "kv"]
    gpu_heads.place(q, k, v, None, 1.0, 1e-5, arenas[0], arenas[1], torch.tensor([0, 1]))
    assert arenas[0][0, 0].float().isnan().all(), "the norm of the head"
    assert arenas[1][0, 0, 0].float().isnan().nonzero().flatten().tolist() == [5]
    assert not any(arena[0, 1].float().isnan().any() for arena in arenas)


@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-20, 1e15])
def test_extremes_of_the_norm(factor: float) -> None:
    q, k = (x * factor for x in slices(0, 1, 3, (32, 16), torch.float32))
    rotary = angles(1, 3, 16, False)
    for f, e in zip(
        gpu_heads.heads(q, k, rotary, 16, 0.5, 1e-5), pieces.heads(q, k, rotary, 16, 0.5, 1e-5), strict=True
    ):
        close(f, e)


@given(SEEDS, COUNTS, WIDTHS, DTYPES, DTYPES, st.sampled_from([0.0, 1.0, 80.0]))
@settings(max_examples=20)
def test_gated(
    seed: int, counts: tuple[int, int, int, int], width: int, dtype: torch.dtype, to: torch.dtype, spread: float
) -> None:
    batch, length, group, kv_heads = counts
    o, gate = slices(seed, batch, length, (group * kv_heads * width,) * 2, dtype)
    o, gate = o.unflatten(-1, (-1, width)), gate * spread
    gate = torch.cat([gate, gate], -1)[..., : gate.shape[-1]]
    assert not gpu_heads.why_not(width, o, gate)
    found = gpu_merge.gated(o, gate, 1e-5, to)
    assert found.dtype == to
    close(found.float(), pieces.gated(o, gate, 1e-5, to).float(), max(TOLERANCE[dtype], TOLERANCE[to]))


def test_nothing_at_all() -> None:
    q, k, v = (torch.empty(0, 1, n) for n in (32, 16, 16))
    arena = torch.ones(2, 4, 1, 16)
    assert gpu_heads.place(q, k, v, None, 1.0, 1e-5, arena, arena, torch.empty(0, dtype=torch.int64)).shape == (
        0,
        1,
        2,
        16,
    )
    assert gpu_heads.heads(q, k, None, 16, 1.0, 1e-5)[1].shape == (0, 1, 1, 16)
    assert gpu_merge.gated(torch.empty(0, 1, 2, 16), q, 1e-5, torch.float32).shape == (0, 1, 32)
    assert (arena == 1).all()


def test_why_not() -> None:
    x = torch.empty(1, 2, 32)
    assert not gpu_heads.why_not(16, x, x.to(FLOAT8))
    assert "width 5" in gpu_heads.why_not(5, x)
    assert "width 2048" in gpu_heads.why_not(2048, x)
    assert "float64" in gpu_heads.why_not(16, x, x.double())
    assert "one after the other" in gpu_heads.why_not(16, x.mT.contiguous().mT)


def test_a_part_of_an_arena_is_refused() -> None:
    q, k, v = slices(0, 1, 2, (16, 16, 16), torch.float32)
    arena = torch.zeros(1, 2, 2, 16)[:, :, :1]
    with pytest.raises(ValueError, match="whole tensors"):
        gpu_heads.place(q, k, v, None, 1.0, 1e-5, arena, arena, torch.tensor([0, 1]))
