"""What stands around the layers, in plain PyTorch, and when a Triton form takes its place."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kernels import around
from muse_fn.kernels.around import advanced, capped, embedding, stream_norm, triton_form
from muse_fn.kernels.norms import plain_norm
from tests.models import SEEDS

CPU = torch.device("cpu")


@given(SEEDS, st.integers(1, 4))
def test_shares_of_a_table_add_up_to_its_rows(seed: int, ranks: int) -> None:
    table, ids = torch.randn(4 * ranks, 3).bfloat16(), torch.randint(0, 4 * ranks, (2, 5))
    found = [embedding(part, ids, 4 * n) for n, part in enumerate(table.split(4))]
    assert torch.equal(torch.stack(found).sum(0), table[ids])
    assert torch.equal(embedding(table, ids), table[ids])


@pytest.mark.parametrize("nobody", [-1, -(2**40), 7, 2**40])
def test_an_id_of_nobody_has_zeros(nobody: int) -> None:
    table = torch.full((7, 3), math.nan)
    assert torch.equal(embedding(table, torch.tensor([nobody])), torch.zeros(1, 3))


def test_rows_have_gradients() -> None:
    table = torch.randn(5, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(embedding(table, torch.tensor([1, 1, 4])).sum(), table)
    assert gradient[:, 0].tolist() == [0, 2, 0, 0, 1]


@given(st.floats(-1e4, 1e4), st.sampled_from([0.5, 20.0]), st.sampled_from([0.18, 1.0]))
def test_logits_are_scaled_then_capped(z: float, cap: float, multiplier: float) -> None:
    assert capped(torch.tensor(z), multiplier, 0.0).item() == pytest.approx(z * multiplier, rel=1e-6)
    expected = cap * math.tanh(z * multiplier / cap)
    assert capped(torch.tensor(z), multiplier, cap).item() == pytest.approx(expected, rel=1e-5)


def test_rows_go_on_that_had_a_token_to_read() -> None:
    past, going = advanced(torch.tensor([5, 6, 7]), torch.tensor([1, 0, 1]), torch.tensor([0, 9, -1]))
    assert past.tolist() == [6, 6, 8]
    assert going.tolist() == [True, False, False]


def test_the_stream_norm_is_the_plain_one_whatever_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 40).bfloat16()
    expected = plain_norm(x, 1e-5)
    assert torch.equal(stream_norm(x, 1e-5), expected)
    monkeypatch.setattr(around, "why_no_triton", lambda where: "")  # pyright: ignore[reportUnknownLambdaType]
    with torch.no_grad():
        torch.testing.assert_close(stream_norm(x, 1e-5), expected)
        assert torch.equal(stream_norm(x.double(), 1e-5), plain_norm(x.double(), 1e-5)), "no form for float64"


def test_forms_are_for_devices_without_gradients_and_outside_of_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_form(CPU) is None
    with torch.no_grad():
        assert triton_form(CPU) is None, "a CPU has none"
        monkeypatch.setattr(around, "why_no_triton", lambda where: "")  # pyright: ignore[reportUnknownLambdaType]
        assert triton_form(CPU).__name__ == "muse_fn.kernels.gpu_step"
        assert torch.equal(torch.func.vmap(_form_is_none)(torch.zeros(2)), torch.ones(2))
    assert triton_form(CPU) is None, "gradients are wanted"


def _form_is_none(x: torch.Tensor) -> torch.Tensor:
    return x + float(triton_form(CPU) is None)
