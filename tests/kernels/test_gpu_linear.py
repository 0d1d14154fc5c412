"""Triton's products of few rows against the reference, in its interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_linear, reference
from muse_fn.kernels.gpu_linear import linear, linears, why_not
from muse_fn.kernels.packed import quantise_mxfp4
from tests.models import SEEDS, close

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SIZES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DTYPES)), min_size=1, max_size=5)


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1, 2, 4, 5, 17]), st.sampled_from([1, 32, 64, 70]), SIZES, st.sampled_from(DTYPES))
def test_linears(seed: int, rows: int, width: int, sizes: list[tuple[int, torch.dtype]], dtype: torch.dtype) -> None:
    """Ragged sizes, mixed dtypes, more rows and matrices than one launch takes."""
    x = draw(seed, rows, width).to(dtype)
    ws = [(draw(seed + n, size, width) / width**0.5).to(kind) for n, (size, kind) in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_linear, "STEP", 32)
        patch.setattr(gpu_linear, "DOT_STEPS", (16, 16))
        found = linears(x, ws)
    for y, w in zip(found, ws, strict=True):
        expected = reference.linear(x, w)
        assert (y.dtype, y.shape) == (w.dtype, expected.shape)
        close(y.float(), expected.float(), TOLERANCE[w.dtype])


def test_inputs_are_rounded_to_the_dtype_of_the_matrix_and_shapes_kept() -> None:
    w = torch.eye(8, dtype=torch.bfloat16)
    x = torch.full((2, 1, 8), 1 + 2**-12)
    assert torch.equal(linear(x, w), torch.ones(2, 1, 8, dtype=torch.bfloat16))


def test_what_does_not_fit_is_named() -> None:
    x, w = torch.zeros(1, 64), torch.zeros(8, 64)
    assert why_not(x, (w,)) == ""
    assert "17 rows" in why_not(torch.zeros(17, 64), (w,))
    assert "0 rows" in why_not(torch.zeros(0, 64), (w,))
    assert "5 matrices" in why_not(x, (w,) * 5)
    assert "packed" in why_not(x, (quantise_mxfp4(w),))
    assert "not contiguous" in why_not(x, (torch.zeros(64, 8).t(),))
    assert "float64" in why_not(x.double(), (w,))
