"""The CPU forms equal the reference: any sizes, any routing, any weights, any positions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.muse_spark import modeling_muse_spark as published

from muse_fn.kernels import cpu, reference
from muse_fn.kernels.packed import Weight, quantise_mxfp4, quantise_nvfp4
from tests.models import SEEDS, close, snapshot, unchanged

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# float32 forms differ in the order of sums only. In bfloat16 products and softmax weights are rounded at other places:
# one rounding is 2^-9, a handful of them in a row stay within 2^-6.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    SEEDS,
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 12),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    st.integers(0, 6),
    st.sampled_from([1, 40, 500, 64 << 20]),
    DTYPES,
)
def test_attend(
    seed: int,
    batch: int,
    queries: int,
    keys: int,
    heads: tuple[int, int, int],
    window: int,
    tile: int,
    dtype: torch.dtype,
) -> None:
    """Tiles smaller than the queries, empty places, unordered keys; every query sees at least key 0 of the row."""
    kv_heads, group, dim = heads
    q, k, v = draw(seed, batch, queries, kv_heads * group, dim), *draw(seed + 1, 2, batch, keys, kv_heads, dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    generator = torch.Generator().manual_seed(seed)
    k_pos = torch.randint(-1, 9, (batch, keys), generator=generator)
    q_pos = torch.randint(0, 9, (batch, queries), generator=generator)
    k_pos[:, 0] = q_pos[:, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WORKSPACE", tile)
        found = cpu.attend(q, k, v, q_pos, k_pos, window)
    expected = reference.attend(q, k, v, q_pos, k_pos, window)
    assert found.dtype == dtype
    assert found.isfinite().all(), "finite also for a query that sees no key"
    seen = reference.visible(q_pos, k_pos, window).any(-1)
    close(found[seen], expected[seen], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 4), (2, 3), (3, 1)])
def test_attend_of_one_query(heads: tuple[int, int], dtype: torch.dtype) -> None:
    kv_heads, group = heads
    q, k, v = (x.to(dtype) for x in (draw(0, 2, 1, kv_heads * group, 8), *draw(1, 2, 2, 11, kv_heads, 8)))
    where = torch.tensor([[7], [10]]), torch.arange(11).expand(2, 11)
    for window in (0, 1, 4):
        close(cpu.attend(q, k, v, *where, window), reference.attend(q, k, v, *where, window), TOLERANCE[dtype])


ODD_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "as the queries": lambda k: k,
    "one empty": lambda k: k.where(k != 2, -1),
    "two swapped": lambda k: k[:, [0, 2, 1, *range(3, k.shape[1])]],
    "one place later": lambda k: k + 1,
    "the last one first": lambda k: k.roll(1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", ODD_KEYS)
@pytest.mark.parametrize("further", ["none", "empty", "later", "seen"])
@pytest.mark.parametrize("window", [0, 1, 4, 5, 6])
def test_attend_from_the_start(window: int, further: str, keys: str, dtype: torch.dtype) -> None:
    """A prompt's first chunk, which needs no mask, and all that only resembles one; in one of two sequences."""
    k_pos = torch.arange(5).expand(2, 5).clone()
    k_pos[1:] = ODD_KEYS[keys](k_pos[1:])
    more = {"none": [], "empty": [-1, -1], "later": [5, 6], "seen": [-1, 3]}[further]
    k_pos = torch.cat([k_pos, torch.tensor(more, dtype=torch.int64).expand(2, len(more))], 1)
    q, k, v = draw(0, 2, 5, 6, 8), *draw(1, 2, 2, k_pos.shape[1], 2, 8)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q_pos = torch.arange(5).expand(2, 5)
    seen = reference.visible(q_pos, k_pos, window).any(-1)
    found, expected = (form.attend(q, k, v, q_pos, k_pos, window) for form in (cpu, reference))
    close(found[seen], expected[seen], TOLERANCE[dtype])


@example(0, 2, 14, (1, 1, 2), 0, True)  # two keys, or a vector of them: the two forms' bits differ on some processors
@given(
    SEEDS,
    st.integers(2, 40),
    st.integers(0, 40),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    st.sampled_from([0, 0, 3, 100]),
    st.booleans(),
)
def test_attend_that_is_told_of_a_start_and_one_that_is_not(
    seed: int, length: int, further: int, heads: tuple[int, int, int], window: int, padded: bool
) -> None:
    """Each of them is within bfloat16's roundings of the exact sum, be there empty places behind the prompt or keys
    that are not seen yet: every weight is rounded once, and the result once more."""
    kv_heads, group, dim = heads
    q, k, v = draw(seed, 2, length, kv_heads * group, dim), *draw(seed + 1, 2, 2, length + further, kv_heads, dim)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    pos, k_pos = (torch.arange(n).expand(2, n) for n in (length, length + further))
    k_pos = k_pos.where(k_pos < length, -1) if padded else k_pos
    exact, sizes = (
        reference.attend(q.double(), k.double(), x, pos, k_pos, window) for x in (v.double(), v.double().abs())
    )
    # Products, exponentials and sums are float32 ones, the library's exponentials of 15 bits or more: a 16th of this.
    limit = 2**-8 * (1 + 1 / 16) * (sizes + exact.abs())
    for told in (True, False):
        error = (cpu.attend(q, k, v, pos, k_pos, window, told).double() - exact).abs()
        assert (error <= limit).all(), f"{told=}: {(error / limit).max().item():.3g} of the limit"


@given(SEEDS, st.integers(2, 20), st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)), st.integers(0, 6))
def test_attend_in_float32_equals_transformers_eager_bit_for_bit(
    seed: int, length: int, heads: tuple[int, int, int], window: int
) -> None:
    """The residual gates can amplify one last bit a thousand times, so the logits' tolerance hangs on this."""
    kv_heads, group, dim = heads
    q, k, v = draw(seed, 2, length, kv_heads * group, dim), *draw(seed + 1, 2, 2, length, kv_heads, dim)
    pos = torch.arange(length).expand(2, length)
    mask = torch.where(reference.visible(pos, pos, window), 0.0, torch.finfo(torch.float32).min).unsqueeze(1)

    class Module(torch.nn.Module):
        num_key_value_groups = group

    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    expected, _ = published.eager_attention_forward(Module(), q_, k_, v_, mask, dim**-0.5)
    assert torch.equal(cpu.attend(q, k, v, pos, pos, window), expected)


@pytest.mark.parametrize(("place", "first"), [((reference, "attend"), 0), ((cpu, "grouped"), 10)])
def test_attend_keeps_a_bounded_workspace(place: tuple[Any, str], first: int) -> None:
    """A tile's scores never exceed the bound by more than one row of queries, without a cache and with one."""
    sizes: list[int] = []
    attend = getattr(*place)

    def watched(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int) -> Tensor:
        sizes.append(reference.SCORE_BYTES * q.shape[1] * q.shape[2] * k_pos.numel())
        return attend(q, k, v, q_pos, k_pos, window)

    q, k, v = draw(0, 2, 60 - first, 4, 4), *draw(1, 2, 2, 60, 2, 4)
    pos = torch.arange(60).expand(2, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WORKSPACE", 100_000)
        patch.setattr(*place, watched)
        cpu.attend(q, k, v, pos[:, first:], pos, 0)
    assert len(sizes) > 1
    assert max(sizes) <= 100_000


def weights(form: str, seed: int, experts: int, inner: int, latent: int) -> tuple[Weight, Weight]:
    gate_up, down = draw(seed, experts, 2 * inner, latent) / 8, draw(seed + 1, experts, latent, inner) / 8
    match form:
        case "mxfp4":
            return quantise_mxfp4(gate_up), quantise_mxfp4(down)
        case "nvfp4":
            return quantise_nvfp4(gate_up, 2), quantise_nvfp4(down)
        case _:
            dtype = torch.float32 if form == "float32" else torch.bfloat16
            return gate_up.to(dtype), down.to(dtype)


ROUTINGS = st.sampled_from(["random", "one takes all", "some empty", "even"])


@pytest.fixture(params=[False, True], ids=["plain units", "matrix units"], autouse=True, scope="module")
def units(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every form is right on every processor; which is faster is another question."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "has_matrix_units", lambda: request.param)
        yield


def routing(kind: str, seed: int, count: int, routes: int, experts: int) -> Tensor:
    match kind:
        case "one takes all":
            return torch.full((count, routes), experts - 1)
        case "some empty":
            return torch.randint(0, experts, (count, routes), generator=torch.Generator().manual_seed(seed)) // 2 * 2
        case "even":
            return torch.arange(count * routes).view(count, routes) % experts
        case _:
            return torch.randint(0, experts, (count, routes), generator=torch.Generator().manual_seed(seed))


@given(
    SEEDS, st.sampled_from([1, 2, 5, 40, 130]), st.integers(1, 4), st.integers(1, 7), ROUTINGS, DTYPES,
    st.sampled_from(["plain", "mxfp4", "nvfp4"]),
)  # fmt: skip
def test_expert_rows(
    seed: int, count: int, routes: int, experts: int, kind: str, dtype: torch.dtype, form: str
) -> None:
    """One row and many, all experts touched and few: the forms that a count chooses between mean the same."""
    form = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype] if form == "plain" else form
    gate_up, down = weights(form, seed, experts, 32, 64)
    u, idx = draw(seed + 2, count, 64).to(dtype), routing(kind, seed, count, routes, experts)
    found, expected = cpu.expert_rows(u, idx, gate_up, down), reference.expert_rows(u, idx, gate_up, down)
    assert found.dtype == dtype
    close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_expert_rows_have_the_dtype_of_their_input(form: str, dtype: torch.dtype, count: int) -> None:
    gate_up, down = weights(form, 0, 4, 32, 32)
    u, idx = draw(1, count, 32).to(dtype), routing("even", 0, count, 2, 4)
    found = cpu.expert_rows(u, idx, gate_up, down)
    assert found.dtype == dtype
    close(found, reference.expert_rows(u, idx, gate_up, down), TOLERANCE[dtype])


@given(SEEDS, st.sampled_from([(1,), (1, 1), (2, 3), (64,), (65,), (2, 2, 40)]), DTYPES, DTYPES)
def test_linear(seed: int, shape: tuple[int, ...], given_: torch.dtype, weight: torch.dtype) -> None:
    x, w = draw(seed, *shape, 24).to(given_), draw(seed + 1, 17, 24).to(weight)
    found, expected = cpu.linear(x, w), reference.linear(x, w)
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    close(found, expected, 1e-6 if weight == torch.float32 else 2**-7)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@given(seed=SEEDS, rows=st.sampled_from([1, 3, 70]), dtype=DTYPES)
def test_linear_of_packed_weights(form: str, seed: int, rows: int, dtype: torch.dtype) -> None:
    x, w = draw(seed, rows, 64).to(dtype), draw(seed + 1, 17, 64)
    packed = quantise_mxfp4(w) if form == "mxfp4" else quantise_nvfp4(w)
    close(cpu.linear(x, packed), reference.linear(x, packed), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_not_modified(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in (draw(0, 2, 4, 4, 4), *draw(1, 2, 2, 4, 2, 4)))
    pos, u = torch.arange(4).expand(2, 4), draw(2, 4, 32).to(dtype)
    for form in ("bfloat16", "float32", "mxfp4", "nvfp4"):
        w = weights(form, 0, 4, 32, 32)
        idx = routing("even", 0, 4, 2, 4)
        inputs = (q, k, v, pos, u, w, idx)
        before = snapshot(inputs)
        cpu.attend(q, k, v, pos, pos, 3)
        cpu.expert_rows(u, idx, *w)
        if isinstance(w[0], Tensor):
            cpu.linear(u, w[0][0])
        unchanged(inputs, before)
