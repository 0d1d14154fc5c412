"""What attention takes beside its operands and result stays within the stated bytes, as the allocator counts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from muse_fn.kernels import cpu, static, streamed

BLOCK, HEAD_DIM = 128, 8
Form = Callable[..., Tensor]


def highest(call: Callable[[], Tensor]) -> int:
    """Bytes that were allocated at once during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found: Any = seen.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_the_highest_is_found() -> None:
    def call() -> Tensor:
        kept = torch.ones(1 << 20)
        kept = kept * 2 + torch.ones(1 << 20)
        return kept[:1].clone()

    assert 4 << 22 <= highest(call) <= (4 << 22) + 4096


@pytest.mark.parametrize("form", [static.attend_blocks, cpu.attend_blocks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "past", "new", "window"), [
    (1, 1, 2048, 4096, 2048),
    (2, 1, 2048, 4096, 2048),
    (1, 1, 0, 4096, 0),
    (4, 2, 0, 2000, 0),
    (2, 1, 30_000, 512, 0),
    (8, 2, 100_000, 1, 0),
])  # fmt: skip
def test_attention_over_blocks(
    form: Form, dtype: torch.dtype, heads: int, kv_heads: int, past: int, new: int, window: int
) -> None:
    """A chunk with a window, the first chunk of a full layer, a later one, a single token."""
    columns = -(-(past + new) // BLOCK)
    arena = torch.zeros(1 + columns, BLOCK, kv_heads, HEAD_DIM, dtype=dtype)
    blocks, pos = torch.arange(1, 1 + columns)[None], torch.arange(columns * BLOCK)[None]
    pos = torch.where(pos < past + new, pos, -1)
    q, q_pos = torch.zeros(1, new, heads, HEAD_DIM, dtype=dtype), torch.arange(past, past + new)[None]
    found = highest(lambda: form(q, arena, arena, blocks, q_pos, pos, window, past == 0))
    # Beside the bound: K and V as gathered on a CPU, and a few tensors like the queries.
    assert found <= streamed.WORKSPACE + cpu.GATHERED * (form is cpu.attend_blocks) + 8 * q.numel() * 4


@pytest.mark.parametrize("form", [static.attend, cpu.attend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "window"), [(1, 0), (4, 0), (2, 500)])
def test_attention_without_a_cache(form: Form, dtype: torch.dtype, heads: int, window: int) -> None:
    length = 3000
    q, k = torch.zeros(1, length, heads, HEAD_DIM, dtype=dtype), torch.zeros(1, length, 1, HEAD_DIM, dtype=dtype)
    pos = torch.arange(length)[None]
    found = highest(lambda: form(q, k, k, pos, pos, window, True))
    assert found <= streamed.WORKSPACE + 8 * q.numel() * 4
