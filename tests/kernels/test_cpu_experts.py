"""Compiled experts equal the reference in float64 within what float32 sums and two roundings explain."""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import cpu_reasons, reference
from muse_fn.kernels.packed import MXFP4, Weight, dequantise, quantise_mxfp4
from tests.models import SEEDS

pytest.importorskip("numba", reason="Numba is not installed")
BF16 = torch.bfloat16
# The last two are those of many tokens, where the processor has them.
FORMS = ("bf16", "mxfp4") if cpu_reasons.no_tiles() else ("bf16", "mxfp4", "columns", "packed columns")


def file(form: str) -> Any:
    return import_module(f"muse_fn.kernels.{'cpu_routes' if form.endswith('columns') else 'cpu_experts'}")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(form: str, w: Tensor) -> Weight:
    return quantise_mxfp4(w) if form in ("mxfp4", "packed columns") else w.to(BF16)


def experts(seed: int, form: str, count: int, latent: int, inner: int) -> tuple[Weight, Weight]:
    return stored(form, draw(seed, count, 2 * inner, latent)), stored(form, draw(seed + 1, count, latent, inner))


def check(found: Tensor, u: Tensor, idx: Tensor, gate_up: Weight, down: Weight, first: int = 0) -> None:
    """What goes into the second product is rounded to bfloat16, by 2^-8 of itself at most; so may the result be."""
    w = [dequantise(x, torch.float32).double() for x in (gate_up, down)]
    exact = reference.expert_rows(u.double(), idx, *w, first=first)
    here = (idx >= first) & (idx < first + len(w[1]))
    assert not found[~here].any(), "rows of others' experts are exact zeros"
    for t, r in here.nonzero().tolist():
        gate, up = (w[0][idx[t, r] - first] @ u[t].double()).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        reach = (gate.abs() + 1) * (up.abs() + 1)  # float32's part, by sizes
        sizes = w[1][idx[t, r] - first].abs() @ (2.0**-8 * hidden.abs() + 2.0**-18 * reach)
        slack = sizes + (2.0**-8 * exact[t, r].abs() if found.dtype == BF16 else 0.0)
        assert ((found[t, r].double() - exact[t, r]).abs() <= slack).all()


@given(SEEDS, st.integers(1, 18), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from(FORMS))
def test_rows_are_those_of_the_reference(
    seed: int, tokens: int, routes: int, latent: int, inner: int, form: str
) -> None:
    """Any routing: experts without tokens, one with all, the same one twice, and those of other ranks."""
    gate_up, down = experts(seed, form, 4, 32 * latent, 32 * inner)
    u = draw(seed + 2, tokens, 32 * latent).to(BF16)
    first = seed % 5
    idx = torch.randint(0, 9, (tokens, routes), generator=torch.Generator().manual_seed(seed))
    for dtype in (BF16, torch.float32):
        found = file(form).expert_rows(u, idx, gate_up, down, first=first, dtype=dtype)
        assert (found.dtype, found.shape) == (dtype, (tokens, routes, 32 * latent))
        check(found, u, idx, gate_up, down, first)


ROUTINGS = {
    "one takes all": torch.full((16, 4), 2),
    "nobody is here": torch.full((3, 4), 9),
    "below the first": torch.full((3, 4), -1),
    "each its own": torch.arange(4)[None],
    "two here, two not": torch.tensor([[0, 3, 4, 7], [-1, 3, 3, 8]]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_odd_routings(routing: str, form: str) -> None:
    idx = ROUTINGS[routing]
    gate_up, down = experts(0, form, 4, 64, 32)
    u = draw(2, len(idx), 64).to(BF16)
    check(file(form).expert_rows(u, idx, gate_up, down), u, idx, gate_up, down)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_with_its_token_or_its_expert(form: str) -> None:
    gate_up, down = experts(0, form, 3, 32, 32)
    u, idx = draw(2, 5, 32).to(BF16), torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [0, 0]])
    whole = file(form).expert_rows(u, idx, gate_up, down)
    broken = u.clone()
    broken[1, 7] = float("nan")
    found = file(form).expert_rows(broken, idx, gate_up, down)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3, 4]], whole[[0, 2, 3, 4]])
    if isinstance(down, MXFP4):
        down.scales[1] = 255
    elif isinstance(down, Tensor):
        down[1] = float("inf")
    found = file(form).expert_rows(u, idx, gate_up, down)
    assert not found[idx == 1].isfinite().any()
    assert torch.equal(found[idx != 1], whole[idx != 1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-30, 1e15])
def test_tokens_of_any_size(size: float, form: str) -> None:
    """Where gate and up stay in range; beyond it both forms have infinities, at other places."""
    gate_up, down = (w.to(BF16) for w in (draw(0, 2, 64, 32), draw(1, 2, 32, 32)))
    u, idx = (draw(2, 2, 32) * size).to(BF16), torch.tensor([[0], [1]])
    check(file(form).expert_rows(u, idx, gate_up, down, dtype=torch.float32), u, idx, gate_up, down)


@pytest.mark.parametrize("form", FORMS)
def test_two_threads_make_the_same_bits_as_one_and_order_in_memory_does_not_matter(form: str) -> None:
    gate_up, down = experts(0, form, 5, 64, 96)
    u, idx = draw(2, 64, 7).to(BF16).t(), torch.randint(0, 5, (3, 7), generator=torch.Generator().manual_seed(1)).t()
    one = file(form).expert_rows(u, idx, gate_up, down)
    torch.set_num_threads(2)
    try:
        two = file(form).expert_rows(u.contiguous(), idx.contiguous(), gate_up, down)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bytes_of_tile", [1, 1 << 18])
def test_a_row_has_the_same_bits_whatever_the_tokens_beside_it(
    bytes_of_tile: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of them for an expert, in tiles and panels of any number of vectors."""
    monkeypatch.setattr(file(form), "TILE_BYTES", bytes_of_tile, raising=False)
    gate_up, down = experts(0, form, 2, 96, 32)
    u = draw(2, 180, 96).to(BF16)
    idx = torch.ones(180, 1, dtype=torch.int64)
    whole = file(form).expert_rows(u, idx, gate_up, down)
    check(whole, u, idx, gate_up, down)
    for count in (*range(1, 180, 7), 16, 32, 33, 48, 49, 64, 65, 80, 96, 112, 144):
        assert torch.equal(file(form).expert_rows(u[-count:], idx[-count:], gate_up, down), whole[-count:])
