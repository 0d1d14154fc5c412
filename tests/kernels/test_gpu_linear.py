"""Triton's products of few rows against the reference, in its interpreter."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu_direct, gpu_linear, gpu_linear_form, reference
from muse_fn.kernels.gpu_linear import linear, linears, why_not
from muse_fn.kernels.gpu_linear_form import FEW, MOST_ROWS, few_rows, form_of, more_rows
from muse_fn.kernels.packed import quantise_mxfp4
from tests.models import SEEDS, close

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]
TOLERANCE = {F32: 1e-6, BF16: 2**-7}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several steps and programs in small matrices."""
    ways = {"AMONG": (2, 64), "BY_ITSELF": (2, 32), "BESIDE_SUMS": (1, 64)}
    for name, value in {"STEP": 32, "FLOAT_STEP": 32, "DOT_OUTS": (6, 16), **ways}.items():
        monkeypatch.setattr(gpu_linear_form, name, value)
    more_rows.cache_clear()
    yield
    more_rows.cache_clear()


SIZES = st.lists(st.tuples(st.integers(1, 20), st.sampled_from(DTYPES)), min_size=1, max_size=5)
WIDTHS = [1, 32, 70, 128, 256, 300]


@pytest.mark.usefixtures("small_steps")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    SEEDS, st.integers(1, 17), st.sampled_from(WIDTHS), SIZES, st.sampled_from(DTYPES), st.sampled_from([None, *DTYPES])
)
def test_linears(
    seed: int,
    rows: int,
    width: int,
    sizes: list[tuple[int, torch.dtype]],
    x_dtype: torch.dtype,
    dtype: torch.dtype | None,
) -> None:
    """Ragged sizes, mixed dtypes, more rows and matrices than one launch takes, results of any dtype."""
    x = draw(seed, rows, width).to(x_dtype)
    ws = [(draw(seed + n, size, width) / width**0.5).to(kind) for n, (size, kind) in enumerate(sizes)]
    found = linears(x, ws, dtype)
    for y, w in zip(found, ws, strict=True):
        expected = reference.linear(x, w)
        assert (y.dtype, y.shape) == (dtype or w.dtype, expected.shape)
        close(y.float(), expected.float(), TOLERANCE[BF16 if BF16 in (y.dtype, w.dtype) else F32])


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", DTYPES)
def test_float32_results_are_sums_that_nothing_has_rounded(rows: int, kind: torch.dtype) -> None:
    x, w = draw(0, rows, 96).to(BF16), draw(1, 20, 96).to(kind)
    exact = x.double() @ w.double().mT
    close(linear(x, w, F32), exact, 1e-6)
    assert torch.equal(linear(x, w, BF16), linear(x, w, F32).to(BF16))


@pytest.mark.parametrize("rows", [2, 4, 5, 16])
def test_a_float32_matrix_is_as_exact_as_the_librarys_product(rows: int) -> None:
    """Of the width that a router has, and with large terms that cancel."""
    x, w = draw(0, rows, 8192), draw(1, 12, 8192) / 90
    x[:, 0], x[:, -1], w[:, 0], w[:, -1] = 1e4, 1e4, 1.0, -1.0
    exact = x.double() @ w.double().mT
    error, librarys = ((y.double() - exact).abs().max() for y in (linear(x, w), x @ w.mT))
    assert error <= 4 * librarys


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("kind", DTYPES)
def test_nothing_outside_a_matrix_and_the_inputs_is_read(rows: int, kind: torch.dtype) -> None:
    """NaN lies around both."""
    outer_x, outer_w = torch.full((rows + 40, 70), torch.nan), torch.full((60, 70), torch.nan, dtype=kind)
    outer_x[20 : 20 + rows], outer_w[20:27] = draw(0, rows, 70), draw(1, 7, 70).to(kind)
    x, w = outer_x[20 : 20 + rows], outer_w[20:27]
    close(linear(x, w).float(), reference.linear(x, w).float(), TOLERANCE[kind])


@pytest.mark.parametrize("rows", [1, 2, 12])
def test_large_matrices_are_the_librarys_beside_others(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_linear, "LIBRARY_OUTPUTS", 9 * rows)
    x, ws = draw(0, rows, 64), [draw(n, n, 64).to(kind) for n, kind in ((9, BF16), (8, BF16), (9, F32))]
    expected, asked = [reference.linear(x, w) for w in ws], list[int]()

    def seen(x: Tensor, w: Tensor) -> Tensor:
        asked.append(len(w))
        return torch.nn.functional.linear(x.to(w.dtype), w)

    monkeypatch.setattr(reference, "linear", seen)
    for y, e, w in zip(linears(x, ws), expected, ws, strict=True):
        assert y.dtype == w.dtype
        close(y.float(), e.float(), TOLERANCE[w.dtype])
    assert asked == ([] if rows == 1 else [9])
    assert linears(x, ws[:1])[0].shape == (rows, 9), "none is left for the kernel"
    assert {y.dtype for y in linears(x, ws, F32)} == {F32}


def test_inputs_are_rounded_to_the_dtype_of_the_matrix_and_shapes_kept() -> None:
    w = torch.eye(8, dtype=BF16)
    for rows in (1, 2):
        x = torch.full((rows, 1, 8), 1 + 2**-12)
        assert torch.equal(linear(x, w), torch.ones(rows, 1, 8, dtype=BF16))
        assert torch.equal(linear(x, w, F32), torch.ones(rows, 1, 8))


@given(
    st.lists(st.tuples(st.integers(1, 30000), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([1, 70, 1024, 8192]),
    st.integers(2, MOST_ROWS),
    st.sampled_from([2, 4]),
    st.sampled_from([4, 132]),
)
def test_forms_fit_a_multiprocessor(
    ws: list[tuple[int, bool]], width: int, count: int, x_size: int, processors: int
) -> None:
    """What is held at once fits beside as many programs as there may be, and all rows of inputs have a place."""
    form = more_rows(tuple(ws), width, count, x_size, processors)
    held = gpu_linear_form.HELD[sum(form.programs(w, count) for w in ws) > processors]
    assert 1 <= form.out <= form.BLOCK
    assert form.ROWS >= count
    dots = form.WARPS * form.DOT_STEP * (form.BLOCK * 2 + form.ROWS * x_size)
    assert 1 <= form.STAGES - 1 <= held // dots
    if count > FEW and any(is_float for _, is_float in ws):
        assert 1 <= form.FLOAT_STAGES - 1 <= held // (form.STEP * 4 * (form.OUT + form.TOKENS))
    else:
        assert (form.FLOAT_STAGES, form.TOKENS) == (0, FEW)


def test_matrices_are_divided_by_what_is_read() -> None:
    """More rows for each program where that leaves enough of them, fewer where there would be too few."""
    few, many = (more_rows(((rows, False),), 8192, 16, 2, 132).out for rows in (512, 25256))
    assert few < many
    assert more_rows(((2304, False),), 8192, 2, 2, 132).programs((2304, False), 2) >= 132 / gpu_linear_form.ALONE - 2
    for count in (1, FEW):
        made = [few_rows(width, count) for width in (8, 256, 1024, 4096, 8192, 16384)]
        assert len({form.OUT * form.STEP / form.WARPS for form in made}) == 1


DIRECT_WIDTHS = [256, 512, 768, 2048, 4096]  # one group of chunks or several, of 1 to 8 chunks


@settings(max_examples=15)
@given(
    SEEDS,
    st.integers(2, gpu_direct.MOST),
    st.sampled_from(DIRECT_WIDTHS),
    st.lists(st.integers(1, 11), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([None, F32]),
)
def test_small_matrices_from_registers(
    seed: int, rows: int, width: int, sizes: list[int], has_floats: bool, dtype: torch.dtype | None
) -> None:
    """Against float64: inputs are numbered alike in both factors, ragged rows are nobody's, float32 matrices beside."""
    ws = [(draw(seed + n, size, width) / width**0.5).to(BF16) for n, size in enumerate(sizes)]
    ws += [draw(seed + 9, 5, width) / width**0.5] if has_floats else []
    x = draw(seed, rows, width)
    half = x.to(BF16)
    shapes = tuple((len(w), w.dtype == F32) for w in ws)
    assert form_of(shapes, width, rows, 2, 4, True).CHUNKS > 0
    for y, w in zip(linears(x if has_floats else half, ws, dtype, rounded=half), ws, strict=True):
        exact = (x if w.dtype == F32 else half).double() @ w.double().mT
        assert y.shape == exact.shape
        close(y.double(), exact, 1e-6 if y.dtype == F32 else 2**-8)


@pytest.mark.parametrize("rows", [2, 4])
def test_small_matrices_read_nothing_outside_and_no_row_spoils_another(rows: int) -> None:
    outer_x, outer_w = torch.full((rows + 16, 512), torch.nan), torch.full((40, 512), torch.nan)
    outer_x[8 : 8 + rows], outer_w[8:19] = draw(0, rows, 512), draw(1, 11, 512)
    x, w = outer_x.to(BF16)[8 : 8 + rows], outer_w.to(BF16)[8:19]
    expected = reference.linear(x, w).float()
    close(linear(x, w).float(), expected, TOLERANCE[BF16])
    x[1, 3], w[5, 7] = torch.inf, torch.nan
    found = linear(x, w).float()
    assert not found[1].isfinite().any()
    assert found[:, 5].isnan().all()
    kept = [n for n in range(11) if n != 5]
    close(found[0, kept], expected[0, kept], TOLERANCE[BF16])


def test_when_small_matrices_come_from_registers() -> None:
    """Two to four rows, few enough programs, whole chunks for each warp, and addresses that 16 bytes can be read at."""
    assert [gpu_direct.chunks([1024], 4096, count, 132) for count in (1, 2, 4, 5)] == [0, 8, 8, 0]
    assert [gpu_direct.chunks([512], width, 4, 132) for width in (256, 768, 1000, 8192, 32768)] == [1, 1, 0, 8, 0]
    assert [gpu_direct.chunks(rows, 8192, 4, 132) for rows in ([], [1056], [1057], [528, 528], [529, 527])] == [
        0,
        8,
        0,
        8,
        0,
    ]
    whole = ((512, False), (256, True))
    assert form_of(whole, 8192, 4, 2, 132, True).CHUNKS == 8
    assert form_of(whole, 8192, 4, 2, 132, False).CHUNKS == 0
    assert form_of(whole, 8192, 4, 2, 132, True).programs((512, False), 4) == 64
    half = draw(0, 2, 256)
    ws = [draw(1, 8, 256).to(BF16)]
    exact = half.to(BF16).double() @ ws[0].double().mT
    for rounded in (half.half(), half.to(BF16), half):  # what is not rounded to bfloat16 is no help
        close(linears(half, ws, F32, rounded=rounded)[0].double(), exact, 2**-8)
    x, w = draw(0, 2, 256).to(BF16), draw(1, 8 * 256 + 3).to(BF16)[3:].view(8, 256)
    assert w.data_ptr() % 16 != 0
    close(linear(x, w).float(), reference.linear(x, w).float(), TOLERANCE[BF16])


def test_what_does_not_fit_is_named() -> None:
    x, w = torch.zeros(1, 64), torch.zeros(8, 64)
    assert why_not(x, (w,)) == ""
    assert "17 rows" in why_not(torch.zeros(17, 64), (w,))
    assert "0 rows" in why_not(torch.zeros(0, 64), (w,))
    assert "5 matrices" in why_not(x, (w,) * 5)
    assert "packed" in why_not(x, (quantise_mxfp4(w),))
    assert "not contiguous" in why_not(x, (torch.zeros(64, 8).t(),))
    assert "float64" in why_not(x.double(), (w,))
    for case in ((torch.zeros(0, 64), w), (torch.zeros(17, 64), w), (x, quantise_mxfp4(w))):
        assert linear(*case, BF16).dtype == BF16, "the library's is asked for the same"


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("rows", [1, 3, 12, 20])
def test_bfloat16_matrices_take_the_inputs_that_are_rounded_already(rows: int) -> None:
    x, router, squeeze = draw(0, rows, 96), draw(1, 20, 96), draw(2, 12, 96).to(BF16)
    expected = linears(x, (squeeze, router))
    for found, y in zip(linears(x, (squeeze, router), rounded=x.to(BF16)), expected, strict=True):
        assert torch.equal(found, y)
    other = linears(x, (squeeze, router), rounded=torch.zeros(rows, 96, dtype=BF16))
    assert not other[0].any(), "the rounded ones are taken"
    assert torch.equal(other[1], expected[1]), "and not for a float32 matrix"
