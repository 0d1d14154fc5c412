"""Which forms a place gets: one table for each, the plain ones where sizes that depend on data cannot exist."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from muse_fn.kernels import reference
from muse_fn.kernels.select import EAGER, INVARIANT, REFERENCE, STATIC, Ops, select, under_vmap

CPU = torch.device("cpu")
OPERATIONS = [field.name for field in fields(Ops) if field.name != "why"]


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


def test_the_reference_is_the_reference() -> None:
    assert [getattr(REFERENCE, name) for name in OPERATIONS] == [getattr(reference, name) for name in OPERATIONS]


@pytest.mark.parametrize("table", [REFERENCE, EAGER, STATIC, INVARIANT])
def test_every_form_has_the_contract_of_the_reference_and_a_reason(table: Ops) -> None:
    assert len(table.why.split()) >= 3
    for name in OPERATIONS:
        assert inspect.signature(getattr(table, name)) == inspect.signature(getattr(reference, name)), name


def test_devices_of_captured_graphs_get_forms_without_sizes_that_depend_on_data() -> None:
    assert select(torch.device("cuda")) is STATIC
    assert select(CPU) is EAGER


def test_tables_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EAGER.why = "faster"  # pyright: ignore[reportAttributeAccessIssue]
