"""The bfloat16 forms of the CPU: weights on the left, grouped queries of one position, routes by expert."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from muse_fn.kernels import cpu, reference
from muse_fn.kernels.packed import Weight, quantise_mxfp4, quantise_nvfp4

BF16 = torch.bfloat16
# Both forms round each product of bfloat16 inputs to bfloat16 once and sum in other orders: an ulp is 2^-8.
TOLERANCE = 2**-6

PACK: dict[str, Callable[[Tensor], Weight]] = {
    "plain": lambda w: w,
    "mxfp4": quantise_mxfp4,
    "nvfp4": quantise_nvfp4,
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("lead", [(1,), (1, 1), (2,), (3, 5), (cpu.FEW_ROWS,), (cpu.FEW_ROWS + 1,)])
@pytest.mark.parametrize("input_dtype", [BF16, torch.float32])
def test_linear_is_the_reference(lead: tuple[int, ...], input_dtype: torch.dtype) -> None:
    x, w = draw(*lead, 96, dtype=input_dtype), draw(33, 96, seed=1) / 96**0.5
    ours, want = cpu.linear(x, w), reference.linear(x, w)
    assert ours.shape == want.shape
    assert ours.dtype == want.dtype
    assert ours.is_contiguous()  # the attention that follows must not meet transposed heads
    torch.testing.assert_close(ours, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 7])
def test_float32_is_the_reference_to_the_bit(rows: int) -> None:
    x, w = draw(rows, 96, dtype=torch.float32), draw(33, 96, seed=1, dtype=torch.float32)
    assert torch.equal(cpu.linear(x, w), reference.linear(x, w))


@pytest.mark.parametrize("rows", [1, 7])
def test_linear_has_the_reference_gradient(rows: int) -> None:
    x, w, seen = draw(rows, 96), draw(33, 96, seed=1) / 96**0.5, draw(rows, 33, seed=2)

    def gradients(form: Callable[[Tensor, Weight], Tensor]) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            return (form(x, w) * seen).float().sum()

        return torch.func.grad(loss, argnums=(0, 1))(x, w)

    ours, want = gradients(cpu.linear), gradients(reference.linear)
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("tokens", [1, 2, 8, 40])
@pytest.mark.parametrize("form", PACK)
@pytest.mark.parametrize("skewed", [False, True])
def test_experts_are_the_reference(tokens: int, form: str, skewed: bool) -> None:
    experts, routes, latent, inner = 6, 3, 64, 32
    pack = PACK[form]
    gate_up = pack(draw(experts, 2 * inner, latent, seed=3) / latent**0.5)
    down = pack(draw(experts, latent, inner, seed=4) / inner**0.5)
    u = draw(tokens, latent)
    idx = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(5)).argsort(-1)[:, :routes]
    if skewed:
        idx = idx * 0 + torch.arange(routes)
    ours, want = (f(u, idx, gate_up, down) for f in (cpu.expert_rows, reference.expert_rows))
    torch.testing.assert_close(ours, want, rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("new", [1, 2])
def test_attention_of_few_queries_is_the_reference(new: int, window: int) -> None:
    batch, heads, kv_heads, width, keys = 3, 6, 2, 8, 11
    q, k, v = (
        draw(batch, new, heads, width),
        draw(batch, keys, kv_heads, width, seed=1),
        draw(batch, keys, kv_heads, width),
    )
    place = torch.arange(keys).expand(batch, keys)
    past = torch.tensor([2, 5, 9])[:, None]
    k_pos = torch.where(place < past + new, place, -1)
    q_pos = past + torch.arange(new)
    ours, want = (f(q, k, v, q_pos, k_pos, window) for f in (cpu.attend, reference.attend))
    torch.testing.assert_close(ours, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_takes_queries_in_any_memory_order() -> None:
    """A product with the weight on the left yields transposed rows; the fused form must not depend on it."""
    q, k, v = draw(4, 1, 6, 8), draw(4, 9, 2, 8, seed=1), draw(4, 9, 2, 8, seed=2)
    turned = q.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    q_pos, k_pos = torch.full((4, 1), 8), torch.arange(9).expand(4, 9)
    torch.testing.assert_close(cpu.attend(turned, k, v, q_pos, k_pos, 0), cpu.attend(q, k, v, q_pos, k_pos, 0))


@pytest.mark.parametrize("rest", [(), (-1, -1), (5, 7), (2, 9), (-1, 4)])
@pytest.mark.parametrize("window", [0, 3, 5, 6])
@pytest.mark.parametrize("shift", [0, 1])
def test_attention_from_the_start_is_the_reference(rest: tuple[int, ...], window: int, shift: int) -> None:
    """The triangle is taken for the mask only if it is the mask: not with a later key in sight, a past or a window."""
    new = 5
    q, k, v = draw(2, new, 6, 8), draw(2, new + len(rest), 2, 8, seed=1), draw(2, new + len(rest), 2, 8, seed=2)
    q_pos = torch.arange(new).expand(2, new) + shift
    k_pos = torch.cat([torch.arange(new), torch.tensor(rest, dtype=torch.int64)]).expand(2, -1)
    ours, want = (f(q, k, v, q_pos, k_pos, window) for f in (cpu.attend, reference.attend))
    torch.testing.assert_close(ours, want, rtol=TOLERANCE, atol=TOLERANCE)
