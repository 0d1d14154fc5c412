"""Which forms a place gets: one table for each, the plain ones where sizes that depend on data cannot exist."""

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from muse_fn.kernels import pieces, reference
from muse_fn.kernels import select as tables
from muse_fn.kernels.select import (
    EAGER,
    INVARIANT,
    REFERENCE,
    STATIC,
    Ops,
    select,
    under_vmap,
    why_no_numba,
    why_no_triton,
)
from tests.models import close

CPU = torch.device("cpu")
OPTIONAL = ("attend_new", "prepare")  # that some tables have
OPERATIONS = [field.name for field in fields(Ops) if field.name not in ("why", *OPTIONAL)]


def seen_inside(transform: str) -> Ops:
    """The table that a function gets while it runs under a transform."""
    found: list[Ops] = []

    def look(x: Tensor) -> Tensor:
        found.append(select(x.device))
        return x * 2.0

    x = torch.ones(3)
    match transform:
        case "vmap":
            vmap(look)(x)
        case "grad":
            grad(look)(x[0])
        case "vmap of grad":
            vmap(grad(look))(x)
        case "grad of vmap":
            grad(lambda x: vmap(look)(x).sum())(x)  # pyright: ignore[reportUnknownLambdaType]
        case _:
            look(x)
    return found[0]


@pytest.mark.parametrize("transform", ["none", "grad"])
def test_sizes_may_depend_on_data(transform: str) -> None:
    assert seen_inside(transform) is EAGER


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "grad of vmap"])
def test_under_vmap_they_may_not(transform: str) -> None:
    assert seen_inside(transform) is REFERENCE
    assert not under_vmap()
    assert select(CPU) is EAGER, "and outside again all is as before"


def meaning(name: str) -> Callable[..., object]:
    """The plain form of an operation, in the one of the two files that has it."""
    homes = [
        home for home in (reference, pieces) if name in vars(home) and vars(home)[name].__module__ == home.__name__
    ]
    assert len(homes) == 1, f"{name} is defined in {homes}"
    return vars(homes[0])[name]


def parameters(form: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter, but for keywords that a `partial` has settled."""
    settled = form.keywords if isinstance(form, partial) else {}
    found = inspect.signature(form).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name not in settled]


def test_the_reference_is_the_reference() -> None:
    assert [getattr(REFERENCE, name) for name in OPERATIONS] == [meaning(name) for name in OPERATIONS]


COMPILED = None if why_no_numba() else tables._compiled()  # pyright: ignore[reportPrivateUsage]
TABLES = [REFERENCE, EAGER, STATIC, INVARIANT, *([COMPILED] if COMPILED else [])]

# How an operation may be made of another form of a smaller one: keywords of the plain form that the table never passes.
INNER = ("linear", "sigmoid")


@pytest.mark.parametrize("table", TABLES)
def test_every_form_has_the_contract_of_the_reference_and_a_reason(table: Ops) -> None:
    assert len(table.why.split()) >= 3
    for name in OPERATIONS:
        found, expected = (
            [p for p in parameters(form) if p[0] not in INNER] for form in (getattr(table, name), meaning(name))
        )
        assert found == expected, name


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@torch.no_grad()
def test_experts_of_a_rank_are_those_from_its_first_on(table: Ops, dtype: torch.dtype, tokens: int) -> None:
    """Ids are those of all ranks' experts: the rows of all ranks are each where it is, zeros elsewhere."""
    u, gate_up, down = (draw(n, *shape, dtype=dtype) for n, shape in enumerate(((tokens, 6), (6, 8, 6), (6, 6, 4))))
    idx = torch.randint(6, (tokens, 3), generator=torch.Generator().manual_seed(tokens))
    whole = table.expert_rows(u, idx, gate_up, down)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        rank = slice(first, first + count)
        rows = table.expert_rows(u, idx, gate_up[rank], down[rank], first=first)
        here = ((idx >= first) & (idx < first + count)).unsqueeze(-1)
        close(rows, torch.where(here, whole, 0.0), 1e-6 if dtype == torch.float32 else 2**-6)
        assert not rows[~here.squeeze(-1)].any()


@pytest.mark.parametrize("table", [REFERENCE, EAGER, STATIC, INVARIANT])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_products_come_in_the_dtype_asked_for(table: Ops, tokens: int) -> None:
    """The plain forms round first, as they do when none is asked for."""
    bf16 = torch.bfloat16
    u, w = draw(0, 2, tokens, 6, dtype=bf16), [draw(1, 4, 6, dtype=bf16), draw(2, 5, 6)]
    gate_up, down = draw(3, 2, 8, 6, dtype=bf16), draw(4, 2, 6, 4, dtype=bf16)
    idx = torch.randint(2, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
    for dtype in (torch.float32, bf16):
        made = (
            (table.linear(u, w[0], dtype), table.linear(u, w[0])),
            *zip(table.linears(u, w, dtype), table.linears(u, w), strict=True),
            (table.expert_rows(u[0], idx, gate_up, down, dtype=dtype), table.expert_rows(u[0], idx, gate_up, down)),
        )
        for found, expected in made:
            assert found.dtype == dtype
            assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("table", [REFERENCE, EAGER, STATIC, INVARIANT])
def test_what_a_table_settles_are_inner_operations_in_its_own_form(table: Ops) -> None:
    for name in OPERATIONS:
        form = getattr(table, name)
        if isinstance(form, partial):
            assert form.func is meaning(name), name
            assert not form.args, name
            assert set(form.keywords) <= set(INNER), name
            if "linear" in form.keywords:
                assert form.keywords["linear"] is table.linear, name


CUDA = torch.device("cuda")


def no_spec(name: str) -> None:
    """Nothing is installed."""


def all_fits(where: torch.device) -> str:
    """Nothing speaks against Triton's forms."""
    return ""


def test_triton_is_not_for_a_cpu() -> None:
    assert why_no_triton(CPU) == "they are for CUDA devices, not for cpu"
    assert "not for meta" in why_no_triton(torch.device("meta"))
    with torch.no_grad():
        assert select(CPU) is (COMPILED or EAGER)


def test_where_numba_is_installed_forms_on_a_cpu_are_compiled_unless_gradients_are_wanted() -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    assert select(CPU) is EAGER
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert select(CPU) is COMPILED
            with torch.inference_mode(False), torch.enable_grad():
                assert select(CPU) is EAGER
            with torch.autograd.forward_ad.dual_level():
                assert select(CPU) is EAGER


def test_where_numba_is_not_installed_forms_on_a_cpu_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", no_spec)
    assert why_no_numba() == 'Numba is not installed: pip install "muse-fn[cpu]"'
    with torch.no_grad():
        assert select(CPU) is EAGER


def test_where_triton_is_not_installed_forms_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", no_spec)
    assert why_no_triton(CUDA) == "Triton is not installed"
    with torch.no_grad():
        assert select(CUDA) is STATIC


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_where_there_is_no_cuda_device_forms_are_plain(is_interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("muse_fn.kernels.gpu", reason="Triton is not installed")
    monkeypatch.setattr(gpu, "INTERPRETED", SimpleNamespace(value=is_interpreted))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.why_not.cache_clear()
    try:
        why = "TRITON_INTERPRET is set" if is_interpreted else "there is no CUDA device behind cuda"
        assert why in why_no_triton(CUDA)
        with torch.no_grad():
            assert select(CUDA) is STATIC
    finally:
        gpu.why_not.cache_clear()


@pytest.mark.parametrize(("found", "why"), [((8, 0), ""), ((9, 0), ""), ((7, 5), "compute capability 7.5: needs 8.0")])
def test_old_cuda_devices_get_plain_forms(found: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("muse_fn.kernels.gpu", reason="Triton is not installed")
    monkeypatch.setattr(gpu, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: found)  # pyright: ignore[reportUnknownLambdaType]
    gpu.why_not.cache_clear()
    try:
        assert why_no_triton(CUDA) == why
        with torch.no_grad():
            assert (select(CUDA) is STATIC) == bool(why)
        assert select(CUDA) is STATIC, "under gradients"
    finally:
        gpu.why_not.cache_clear()


def test_forms_that_run_on_a_device_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "why_no_triton", all_fits)
    assert select(CUDA) is STATIC
    with torch.inference_mode():
        assert select(CUDA) is not STATIC
    with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad():
        assert select(CUDA) is STATIC


def test_tables_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EAGER.why = "faster"  # pyright: ignore[reportAttributeAccessIssue]
