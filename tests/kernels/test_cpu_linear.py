"""Compiled products of few rows equal exact ones within what float32 sums and one rounding explain."""

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import pieces
from muse_fn.kernels.packed import MXFP4, Weight, dequantise, quantise_mxfp4
from tests.models import SEEDS, snapshot, unchanged

cpu_linear: Any = pytest.importorskip("muse_fn.kernels.cpu_linear", reason="Numba is not installed")
BF16 = torch.bfloat16
FORMS = ("bf16", "mxfp4", "f32")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(form: str, w: Tensor) -> Weight:
    return w.to(BF16) if form == "bf16" else quantise_mxfp4(w) if form == "mxfp4" else w


def as_read(x: Tensor, w: Weight) -> Tensor:
    """x as a product takes it: rounded to the weight's dtype once, to bfloat16 for a packed one."""
    return x.to(w.dtype if isinstance(w, Tensor) else BF16)


def check(found: Tensor, x: Tensor, w: Weight) -> None:
    """A sum of n float32 products is off by n roundings of the sum of their sizes at most; bfloat16 adds one of its."""
    factors = as_read(x, w).double(), dequantise(w, torch.float32).double()
    exact, sizes = pieces.linear(*factors), pieces.linear(factors[0].abs(), factors[1].abs())
    slack = 2.0**-8 * exact.abs() + 2.0**-133 if found.dtype == BF16 else 0.0
    assert ((found.double() - exact).abs() <= slack + x.shape[-1] * 2.0**-24 * sizes).all()


@given(SEEDS, st.integers(1, 19), st.integers(1, 5), st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_products_are_exact_ones(seed: int, rows: int, groups: int, widths: list[int]) -> None:
    x = draw(seed, rows, 32 * groups)
    ws = [stored(FORMS[(seed + n) % 3], draw(seed + n, width, 32 * groups)) for n, width in enumerate(widths)]
    x = x if any(isinstance(w, Tensor) and w.dtype == torch.float32 for w in ws) else x.to(BF16)
    for dtype in (torch.float32, BF16):
        for w, found in zip(ws, cpu_linear.linears(x, ws, dtype), strict=True):
            assert found.dtype == dtype
            check(found, x, w)


def test_results_have_the_weights_dtype_and_the_shape_of_x() -> None:
    x = draw(0, 2, 3, 64)
    a, b = cpu_linear.linears(x, (draw(1, 5, 64), draw(2, 6, 64).to(BF16)))
    assert (a.dtype, b.dtype) == (torch.float32, BF16)
    assert (a.shape, b.shape) == ((2, 3, 5), (2, 3, 6))
    (c,) = cpu_linear.linears(x.to(BF16), (quantise_mxfp4(draw(1, 5, 64)),))
    assert c.dtype == BF16


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_its_neighbours(form: str) -> None:
    """Sums may be cut differently in pieces of other sizes, not moved to other rows."""
    x, w = draw(0, 13, 96), stored(form, draw(1, 37, 96))
    x = x if form == "f32" else x.to(BF16)
    (whole,) = cpu_linear.linears(x, (w,), torch.float32)
    for n in range(13):
        changed = x.clone()
        changed[n] = float("nan")
        (found,) = cpu_linear.linears(changed, (w,), torch.float32)
        assert found[n].isnan().all()
        others = torch.arange(13) != n
        assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_not_finite_come_through(form: str) -> None:
    w = torch.zeros(6, 64)
    w[1:, 3], w[2:, 40] = 1.0, -1.0
    x = torch.zeros(5, 64)
    x[0, 3], x[1, 3], x[2, 40], x[3, 3], x[4, 0] = float("inf"), float("nan"), -float("inf"), -0.0, 5.0
    x = x if form == "f32" else x.to(BF16)
    w = stored(form, w)
    (found,) = cpu_linear.linears(x, (w,), torch.float32)
    exact = pieces.linear(as_read(x, w).float(), dequantise(w, torch.float32))
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0, 1, 2, 126, 127, 128, 200, 253, 254, 255])
def test_every_code_and_scale_is_what_it_stands_for(scale: int) -> None:
    """All 256 bytes, at both places of each: one 1 in x picks one value."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    w = MXFP4(codes, torch.full((256, 1), scale, dtype=torch.uint8))
    values = dequantise(w, torch.float32)
    is_finite = values.isfinite().all(-1)
    large = dequantise(w, torch.float64).float()
    for place in (0, 1, 14, 31):
        x = torch.zeros(1, 32, dtype=BF16)
        x[0, place] = 1.0
        (found,) = cpu_linear.linears(x, (w,), torch.float32)
        torch.testing.assert_close(found[0][is_finite], values[is_finite, place], rtol=0, atol=0)
        # Infinity and no number times 0 are no number. A form that scales sums meets neither where a weight only is too
        # large for float32: then it has the value itself.
        rest = found[0][~is_finite]
        assert (rest.isnan() | (rest == large[~is_finite, place])).all()
        assert scale < 255 or not rest.isfinite().any()


def test_processors_without_wide_registers_have_another_way() -> None:
    """The same tests in a process whose code is for a processor of 2013."""
    older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2,+popcnt,+bmi,+bmi2,+f16c"}
    if platform.machine() != "x86_64":
        pytest.skip("there is one way only on this kind of processor")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not without_wide", __file__]
    done = subprocess.run(words, env={**os.environ, **older}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_inputs_in_any_order_of_memory() -> None:
    x, w = draw(0, 64, 6).to(BF16), draw(1, 9, 64).to(BF16)
    turned = x.t()
    before = snapshot([x, w])
    (found,) = cpu_linear.linears(turned, (w,))
    (expected,) = cpu_linear.linears(turned.contiguous(), (w,))
    assert torch.equal(found, expected)
    unchanged([x, w], before)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 500])
def test_two_threads_make_the_same_bits_as_one(rows: int, width: int) -> None:
    x, ws = draw(0, rows, 96).to(BF16), [draw(1, width, 96).to(BF16), quantise_mxfp4(draw(2, width, 96))]
    one = cpu_linear.linears(x, ws)
    torch.set_num_threads(2)
    try:
        two = cpu_linear.linears(x, ws)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)
