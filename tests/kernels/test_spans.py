"""One new token by spans: any blocks, spans and slices give what the reference gives, and nothing else is read."""

from functools import partial
from types import ModuleType
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from muse_fn.kernels import reference, spans, static, streamed
from tests.models import SEEDS, close

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def plain(
    q_PGKD: Tensor, k_SKD: Tensor, v_SKD: Tensor, start_P: Tensor, used_P: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """What the fused kernel must do, span by span; of one without keys it says nothing."""
    out = torch.full_like(q_PGKD, torch.nan)
    log_sum = torch.full((q_PGKD.shape[2], *q_PGKD.shape[:2]), torch.nan)
    for p, (start, used) in enumerate(zip(start_P.tolist(), used_P.tolist(), strict=True)):
        assert used <= longest
        if used:
            k, v = (x[start : start + used].float() for x in (k_SKD, v_SKD))
            scores = torch.einsum("gkd,skd->kgs", q_PGKD[p].float(), k) * k.shape[-1] ** -0.5
            log_sum[:, p] = scores.logsumexp(-1)
            out[p] = torch.einsum("kgs,skd->gkd", scores.softmax(-1), v).to(out.dtype)
    return out, log_sum


def context(seed: int, lengths: list[int], columns: int, block: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Arenas of NaN but for the first positions of each sequence, its blocks in any order; then empty columns."""
    draw = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    order = 1 + torch.randperm(batch * columns, generator=draw).view(batch, columns)
    k, v = (torch.full((batch * columns + 1, block, 2, 8), torch.nan) for _ in "kv")
    pos = torch.arange(columns * block).expand(batch, -1)
    pos = torch.where(pos < torch.tensor(lengths)[:, None], pos, -1)
    for arena in (k, v):
        rows = (order[..., None] * block + torch.arange(block)).flatten(1)[pos >= 0]
        arena.flatten(0, 1)[rows] = torch.randn(len(rows), 2, 8, generator=draw)
    blocks = torch.where(pos.unflatten(1, (columns, block))[..., 0] >= 0, order, 0)
    return k.to(dtype), v.to(dtype), blocks, pos


@given(SEEDS, st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([1, 2, 5, 8]), st.integers(0, 3),
       DTYPES, st.sampled_from([1, 4, 99]), st.sampled_from([1, 7, 16]), st.integers(1, 5),
       st.sampled_from([1, 300, 1 << 20]))  # fmt: skip
def test_any_spans_equal_the_reference(
    seed: int, lengths: list[int], block: int, empty: int, dtype: torch.dtype, shortest: int, span: int, most: int,
    workspace: int,
) -> None:  # fmt: skip
    k, v, blocks, pos = context(seed, lengths, empty - (-max(lengths) // block), block, dtype)
    q = torch.randn(len(lengths), 1, 6, 8, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    q_pos = torch.tensor(lengths)[:, None] - 1
    with patch.multiple(spans, SHORTEST=shortest, SPAN=span, MOST_SPANS=most, WORKSPACE=workspace):
        found = spans.attend_blocks(q, k, v, blocks, q_pos, pos, plain)
    assert found.dtype == dtype
    close(found, reference.attend_blocks(q, k, v, blocks, q_pos, pos, 0), TOLERANCE[dtype])


@given(SEEDS, st.integers(1, 30), st.integers(0, 40))
def test_keys_behind_the_query_are_not_seen(seed: int, length: int, at: int) -> None:
    k, v, blocks, pos = context(seed, [length], 8, 4, torch.float32)
    q, q_pos = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(seed)), torch.tensor([[at]])
    found = spans.attend_blocks(q, k, v, blocks, q_pos, pos, plain)
    close(found, reference.attend_blocks(q, k, v, blocks, q_pos, pos, 0), 1e-5)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    k, v, blocks, _ = context(0, [9, 1], 3, 4, torch.float32)
    out = spans.attend_blocks(
        torch.randn(2, 1, 4, 8), k, v, blocks, torch.tensor([[8], [0]]), -torch.ones(2, 12), plain
    )
    assert (out == 0).all()


@given(SEEDS, st.integers(1, 40))
def test_a_cache_of_8_bits_is_gathered(seed: int, length: int) -> None:
    k, v, blocks, pos = context(seed, [length], 5, 8, torch.float8_e4m3fn)
    q, q_pos = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(seed)), torch.tensor([[length - 1]])
    with patch.object(spans, "SHORTEST", 1):
        found = spans.attend_blocks(q, k, v, blocks, q_pos, pos, plain)
    close(found, reference.attend_blocks(q, k, v, blocks, q_pos, pos, 0), 1e-5)


def test_the_fused_kernel_is_called_as_pytorch_declares_it() -> None:
    """On tensors without values: sizes and names of arguments."""
    q, k = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 8, 2, 64), (640, 2, 64)))
    start, used = (torch.empty(3, dtype=torch.int32, device="meta") for _ in "su")
    out, log_sum = spans.fused(q, k, k, start, used, 128)
    assert out.shape == q.shape
    assert log_sum.shape == (2, 3, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel runs on a CUDA device alone")
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block", [1, 16, 128, 256])
@pytest.mark.parametrize("lengths", [[1], [700], [513, 1, 256, 1200]])
def test_the_fused_kernel_sees_what_the_reference_sees(cache: torch.dtype, block: int, lengths: list[int]) -> None:
    """Spans that are full, begun and empty, and NaN in all other rows of the arenas."""
    k, v, blocks, pos = (x.cuda() for x in context(0, lengths, 3 - (-max(lengths) // block), block, cache))
    dtype = torch.bfloat16 if cache == torch.float8_e4m3fn else cache
    q = torch.randn(len(lengths), 1, 6, 8, device="cuda").to(dtype)
    places = blocks, torch.tensor(lengths, device="cuda")[:, None] - 1, pos
    exact = reference.attend_blocks(q.float(), k, v, *places, 0)
    close(spans.attend_blocks(q, k, v, *places).float(), exact, TOLERANCE[torch.bfloat16])


def shaped(dtype: torch.dtype = torch.bfloat16, queries: int = 1, head_dim: int = 64, device: str = "cuda") -> Tensor:
    with FakeTensorMode():
        return torch.empty(1, queries, 4, head_dim, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("q", "cache", "window", "expected"),
    [
        (shaped(), torch.bfloat16, 0, True),
        (shaped(torch.float16), torch.float16, 0, True),
        (shaped(), torch.float8_e4m3fn, 0, True),
        (shaped(), torch.float32, 0, False),
        (shaped(), torch.bfloat16, 5, False),
        (shaped(torch.float32), torch.float32, 0, False),
        (shaped(queries=2), torch.bfloat16, 0, False),
        (shaped(head_dim=12), torch.bfloat16, 0, False),
        (shaped(head_dim=264), torch.bfloat16, 0, False),
        (shaped(device="cpu"), torch.bfloat16, 0, False),
    ],
)
def test_fits(q: Tensor, cache: torch.dtype, window: int, expected: bool) -> None:
    assert spans.fits(q, torch.empty(2, 16, 2, 8, dtype=cache), window) is expected


@pytest.mark.parametrize(
    ("fits", "short", "form"), [(True, 0, spans), (True, 1 << 20, reference), (False, 0, reference)]
)
def test_a_new_token_of_a_long_context_goes_by_spans(
    fits: bool, short: int, form: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced here, where there is no CUDA device."""
    k, v, blocks, pos = context(0, [9, 5], 3, 4, torch.float32)
    q, q_pos = torch.randn(2, 1, 4, 8), torch.tensor([[8], [4]])
    expected = reference.attend_blocks(q, k, v, blocks, q_pos, pos, 0)
    monkeypatch.setattr(static, "SHORT", short)
    monkeypatch.setattr(spans, "fits", Mock(return_value=fits))
    monkeypatch.setattr(spans, "attend_blocks", partial(spans.attend_blocks, spans=plain))
    for module in {reference, streamed, spans} - {form}:
        monkeypatch.setattr(module, "attend_blocks", None)
    close(static.attend_blocks(q, k, v, blocks, q_pos, pos, 0), expected, 1e-5)
