"""Compiled attention of many new positions equals the reference in float64 within what bfloat16 weights explain."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import cpu, cpu_ops, cpu_reasons, reference
from muse_fn.kernels.select import select
from tests.models import SEEDS

cpu_prefill: Any = pytest.importorskip("muse_fn.kernels.cpu_prefill", reason="Numba is not installed")
if why := cpu_reasons.no_tiles():
    pytest.skip(why, allow_module_level=True)
BF16 = torch.bfloat16


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(found: Tensor, *args: Any) -> None:
    """Weights and results are rounded to bfloat16 once, by 2^-8 of their size at most; all else is float32."""
    q, k, v, *rest = args
    exact, whole = (reference.attend_blocks(q.double(), k.double(), x, *rest) for x in (v.double(), v.double().abs()))
    _, _, _, blocks, q_pos, k_pos, window = args
    seen = reference.visible(q_pos, k_pos, window).any(-1)
    size = v[blocks.flatten()].double().abs().nan_to_num().max()
    assert ((found.double() - exact).abs() <= 2.0**-8 * (whole + exact.abs()) + 2.0**-14 * size)[seen].all()
    assert not found[~seen].any(), "zeros for a query that sees no key"


def step(seed: int, new: int, past: int, kv_heads: int, group: int, width: int, block: int = 16) -> tuple[Any, ...]:
    """A chunk behind a cached prefix, as a cache has it: without its window."""
    total, columns = past + new, -(-(past + new) // block)
    k, v = draw(seed, 2, 2 * columns, block, kv_heads, width).to(BF16)
    q = (2 * draw(seed + 1, 1, new, kv_heads * group, width)).to(BF16)
    blocks = torch.randperm(2 * columns, generator=torch.Generator().manual_seed(seed))[None, :columns]
    k_pos = torch.arange(columns * block)[None]
    return q, k, v, blocks, torch.arange(past, total)[None], torch.where(k_pos < total, k_pos, -1)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8))


@given(SEEDS, st.integers(1, 3), st.integers(1, 40), SIZES, st.integers(1, 9), st.integers(1, 40), st.integers(0, 50))
def test_attention_is_that_of_the_reference(
    seed: int, batch: int, length: int, heads: tuple[int, int, int], columns: int, block: int, window: int
) -> None:
    """Unordered positions, empty places, queries in padding, blocks shared and of any size."""
    kv_heads, group, width = heads[0], heads[1], 32 * heads[2]
    k, v = draw(seed, 2, 7, block, kv_heads, width).to(BF16)
    q = (2 * draw(seed + 1, batch, length, kv_heads * group, width)).to(BF16)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 7, (batch, columns), generator=generator)
    k_pos = torch.randint(-1, 60, (batch, columns * block), generator=generator)
    q_pos = torch.randint(-1, 60, (batch, length), generator=generator)
    args = q, k, v, blocks, q_pos, k_pos, window
    check(cpu_prefill.attend_blocks(*args), *args)


@given(SEEDS, st.integers(1, 200), st.integers(0, 300), SIZES, st.sampled_from([0, 1, 50, 64, 200]))
def test_chunks_behind_a_prefix(seed: int, new: int, past: int, heads: tuple[int, int, int], window: int) -> None:
    args: tuple[Any, ...] = *step(seed, new, past, heads[0], heads[1], 32 * heads[2]), window
    check(cpu_prefill.attend_blocks(*args), *args)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("kv_heads", "group", "width", "past"), [(4, 4, 64, 0), (2, 8, 128, 200), (1, 1, 96, 0)])
def test_it_is_no_farther_from_float64_than_pytorch_is(
    kv_heads: int, group: int, width: int, past: int, window: int
) -> None:
    """By the root of the mean square, and 2 % for what chance decides."""
    args: tuple[Any, ...] = *step(0, 300, past, kv_heads, group, width), window
    q, k, v, *rest = args
    exact = reference.attend_blocks(q.double(), k.double(), v.double(), *rest)
    found = [f(*args).double() - exact for f in (cpu_prefill.attend_blocks, cpu.attend_blocks)]
    ours, theirs = (x.pow(2).mean().sqrt().item() for x in found)
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4, 1e30])
def test_scores_of_any_size(size: float) -> None:
    """With large ones a single key has all the weight, wherever it stands and whatever was the highest before."""
    q, *rest = step(0, 70, 90, 2, 3, 64)
    args = (size * q.float()).to(BF16), *rest, 0
    check(cpu_prefill.attend_blocks(*args), *args)


@pytest.mark.parametrize("window", [0, 20])
def test_bits_of_a_row_depend_on_its_keys_only(window: int) -> None:
    """Not on threads, on the rows beside it, on the sequences beside its own, on keys behind it or on their blocks."""
    q, k, v, blocks, q_pos, k_pos = step(0, 150, 40, 2, 3, 64)
    whole = cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, window)
    torch.set_num_threads(2)
    try:
        assert torch.equal(cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, window), whole)
    finally:
        torch.set_num_threads(1)
    for first, last in ((0, 1), (7, 40), (100, 150)):
        part, pos, columns = q[:, first:last], q_pos[:, first:last], -(-(40 + last) // 16)
        args = part, k, v, blocks[:, :columns], pos, k_pos[:, : 16 * columns], window
        assert torch.equal(cpu_prefill.attend_blocks(*args), whole[:, first:last])
    twice = (x.repeat(2, *[1] * (x.dim() - 1)) for x in (blocks, q_pos, k_pos))
    both = cpu_prefill.attend_blocks(torch.cat([q.flip(1), q]), k, v, *twice, window)
    assert torch.equal(both[1:], whole)
    keys, values = (x[blocks[0]].flatten(0, 1)[None] for x in (k, v))
    one = torch.zeros(1, 1, dtype=torch.int64)
    assert torch.equal(cpu_prefill.attend_blocks(q, keys, values, one, q_pos, k_pos, window), whole)
    turned = q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(cpu_prefill.attend_blocks(turned, k, v, blocks, q_pos, k_pos, window), whole)


def test_what_is_no_number_harms_its_own_rows() -> None:
    """Of a place without a position nothing is read; a key that is no number harms the queries that see it, a query
    itself, a value no other KV head and no query in an earlier or later tile."""
    q, k, v, blocks, q_pos, k_pos = step(0, 200, 0, 2, 2, 64, block=8)
    k_pos[0, 3] = -1
    clean = cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, 0)
    unused = [n for n in range(len(k)) if n not in blocks[0].tolist()]
    for arena in (k, v):
        arena[unused] = arena[blocks[0, 0], 3] = float("nan")
    assert torch.equal(cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, 0), clean)
    q[0, 5, 1] = float("nan")
    k[blocks[0, 100 // 8], 100 % 8, 1] = float("nan")
    found = cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, 0)
    harmed = torch.zeros(200, 4, dtype=torch.bool)
    harmed[5, 1] = harmed[100:, 2:] = True
    assert torch.equal(found.isnan().any(-1)[0], harmed)
    assert torch.equal(found[0][~harmed], clean[0][~harmed])
    v[blocks[0, 150 // 8], 150 % 8, 0] = float("inf")
    found = cpu_prefill.attend_blocks(q, k, v, blocks, q_pos, k_pos, 0)
    assert not found[0, 150:, :2].isfinite().any()
    harmed[128:, :2] = True
    assert torch.equal(found[0][~harmed], clean[0][~harmed])


def test_it_takes_many_positions_with_and_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, file = list[str](), cpu_ops.file_of  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(cpu_ops, "file_of", lambda name: (taken.append(name), file(name))[1])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    q, k, v, blocks, q_pos, k_pos = step(0, 48, 0, 2, 2, 64)
    with torch.no_grad():
        ops = select(torch.device("cpu"))
        keys, values = (x[blocks[0]].flatten(0, 1)[None] for x in (k, v))
        found = [ops.attend_blocks(q, k, v, blocks, q_pos, k_pos, 9, is_start) for is_start in (False, True)]
        found += [ops.attend(q, keys, values, q_pos, k_pos, 9, True)]
        assert taken == ["cpu_prefill"] * 3
        assert all(torch.equal(x, found[0]) for x in found)
        odd = q[..., :40], k[..., :40], v[..., :40]
        expected = cpu.attend_blocks(*odd, blocks, q_pos, k_pos, 9)
        assert torch.equal(ops.attend_blocks(*odd, blocks, q_pos, k_pos, 9, False), expected)
    assert taken == ["cpu_prefill"] * 3
