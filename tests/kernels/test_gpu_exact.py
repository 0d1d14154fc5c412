"""The float32 product on tensor cores, in Triton's interpreter: its parts, ragged sizes, what is not finite."""

import pytest
import torch

from muse_fn.kernels import gpu_exact, gpu_linear
from muse_fn.kernels.gpu_exact import linear, why_not


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "out", "width"), [(128, 128, 64), (130, 200, 96), (192, 7, 32)])
def test_the_product(rows: int, out: int, width: int) -> None:
    x, w = draw(0, 2, rows // 2, width), draw(1, out, width)
    found, expected = linear(x, w), x.double() @ w.double().T
    assert found.shape == (2, rows // 2, out)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 4 * (x @ w.T - expected).abs().max() + 2.0**-22


def test_of_both_second_parts_no_product_is_added() -> None:
    """(1 + d)(1 + d) - (1 + 2d) is d d, which two second parts make; all other products of parts cancel exactly."""
    d = 2.0**-12
    x, w = torch.zeros(128, 64), torch.zeros(16, 64)
    x[:, 0], x[:, 1], w[:, 0], w[:, 1] = 1 + d, -1, 1 + d, 1 + 2 * d
    assert (x.double() @ w.double().T == d * d).all()
    assert (linear(x, w) == 0).all()


def test_a_broken_row_breaks_no_other() -> None:
    x, w = draw(4, 128, 64), draw(5, 16, 64)
    expected = linear(x, w)
    x[3, 5] = torch.nan
    found = linear(x, w)
    assert found[3].isnan().all()
    others = [n for n in range(128) if n != 3]
    assert torch.equal(found[others], expected[others])


def test_many_rows_of_a_float32_matrix_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def watched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        taken.append(len(x))
        return linear(x, w)

    monkeypatch.setattr(gpu_exact, "linear", watched)
    w = draw(6, 16, 64)
    for rows in (100, 128):
        gpu_linear.linears(draw(7, rows, 64), (w, w.bfloat16()))
    assert taken == [128]


@pytest.mark.parametrize(("x", "w", "why"), [
    (torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(8, 64), "float32 alone"),
    (torch.zeros(128, 64), torch.zeros(8, 64).bfloat16(), "float32 alone"),
    (torch.zeros(128, 40), torch.zeros(8, 40), "by 32 columns"),
    (torch.zeros(127, 64), torch.zeros(8, 64), "127 rows: 128 at least"),
    (torch.zeros(128, 64), torch.zeros(8, 64), ""),
])  # fmt: skip
def test_what_does_not_fit(x: torch.Tensor, w: torch.Tensor, why: str) -> None:
    found = why_not(x, w)
    assert why in found
    assert bool(found) == bool(why)
