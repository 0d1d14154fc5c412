"""Captured functions: every rule of a graph broken once, with an error that names it; what is allowed, bit for bit."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.capture import capture
from muse_fn.kernels.one_op import one_op
from muse_fn.kernels.packed import MXFP4, quantise_mxfp4
from muse_fn.recorder import CaptureError
from tests.models import SEEDS

OUTSIDE = torch.ones(3)


class State(NamedTuple):
    """Something donated, of several tensors."""

    total: Tensor
    calls: Tensor


class Inputs(NamedTuple):
    x: Any


class Packed(NamedTuple):
    packed: MXFP4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attended(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


HOST = "reads a value on the host"
SIZES = "size of its result depends on values"
MADE = "aten.lift_fresh.default makes a tensor of host data"
RANDOM = "draws from a random generator"
FORBIDDEN: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x * x.sum().item(), rf"aten.item.default {HOST}"),
    "float": (lambda x: x * float(x.sum()), rf"aten.item.default {HOST}"),
    "bool": (lambda x: x if x.any() else -x, rf"aten.is_nonzero.default {HOST}"),
    "if in": (lambda x: x if 3 in x else -x, rf"aten.item.default {HOST}"),
    "equal": (lambda x: x if torch.equal(x, x) else -x, rf"aten.equal.default {HOST}"),
    "allclose": (lambda x: x if torch.allclose(x, x) else -x, rf"aten.allclose.default {HOST}"),
    "range": (lambda x: torch.zeros(int(x.argmax())), HOST),
    "tolist": (lambda x: x * sum(x.tolist()), r"tolist\(\) reads a tensor on the host"),
    "numpy": (lambda x: x * x.numpy().sum(), r"numpy\(\) reads"),
    "array": (lambda x: x * np.asarray(x).sum(), "conversion to a numpy array reads"),
    "cpu": (lambda x: x.cpu() + 1, r"cpu\(\) reads"),
    "print": (lambda x: f"{x}", "printing reads"),
    "nonzero": (lambda x: x.nonzero(), rf"aten.nonzero.default cannot be captured: the {SIZES}"),
    "argwhere": (lambda x: torch.argwhere(x), SIZES),
    "where of one": (lambda x: torch.where(x > 0)[0], rf"aten.where.default cannot.*{SIZES}"),
    "masked_select": (lambda x: x.masked_select(x > 0), rf"aten.masked_select.default cannot.*{SIZES}"),
    "unique": (torch.unique, rf"_unique2.default cannot.*{SIZES}"),
    "bincount": (lambda x: x.long().abs().bincount(), rf"aten.bincount.default cannot.*{SIZES}"),
    "repeat": (lambda x: torch.repeat_interleave(x, x.long().abs()), rf"repeat_interleave.self_Tensor cannot.*{SIZES}"),
    "mask read": (lambda x: x[x > 0], rf"aten.index.Tensor selects by a mask: the {SIZES}"),
    "mask write": (lambda x: x.clone().index_put_((x > 0,), x.sum()), "aten.index_put_.default selects by a mask"),
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), MADE),
    "as_tensor": (lambda x: x + torch.as_tensor(1), MADE),
    "new_tensor": (lambda x: x + x.new_tensor(1), MADE),
    "from_numpy": (lambda x: x + torch.from_numpy(np.ones(3)), MADE),
    "list index": (lambda x: x[[0, 1]], MADE),
    "rand": (lambda x: x + torch.rand(3), rf"aten.rand.default {RANDOM}"),
    "generator": (lambda x: x + torch.randn(3, generator=torch.Generator()), RANDOM),
    "in place": (lambda x: torch.empty_like(x).normal_(), RANDOM),
    "dropout": (lambda x: F.dropout(x, 0.5), RANDOM),
    "multinomial": (lambda x: x.exp().multinomial(1), RANDOM),
    "set": (lambda x: torch.empty_like(x).set_(x.untyped_storage()), "moves a tensor to another storage"),
    "resize": (lambda x: x.clone().resize_(9), "moves a tensor to another storage"),
    "write": (lambda x: x.add_(1), "aten.add_.Tensor writes into x: only donated arguments"),
    "write into a view": (lambda x: x[1:].zero_(), "writes into x"),
    "out": (lambda x: torch.add(x, x, out=x), "aten.add.out writes into x"),
    "write outside": (lambda x: OUTSIDE.add_(x), "writes into a tensor from outside of the function"),
    "no tensor": (lambda x: (x + 1, 5), "result holds int: must be a tree of tensors"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_no_graph_can_hold_is_an_error_that_names_it(name: str) -> None:
    fn, told = FORBIDDEN[name]
    with pytest.raises(CaptureError, match=told):
        capture(fn, (numbers(3).abs() + 1,))


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "index by numbers": lambda x: x[x.argsort()],
    "masks that are filled": lambda x: x.masked_fill(x > 0, 0.0) + torch.where(x > 0, x, -1),
    "factories": lambda x: x + torch.arange(3) + torch.zeros(3) + x.new_full((3,), 2.0),
    "writes into what was made inside": lambda x: x.clone().add_(1).mul_(2),
    "views": lambda x: x.view(3, 1).expand(3, 2).flatten(),
    "attention": lambda x: attended(x.view(1, 1, 3, 1).bfloat16()),
    "a tensor from outside": lambda x: x + OUTSIDE,
    "looking at sizes": lambda x: x * len(x) * x.shape[0],
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("strict", [True, False])
def test_what_a_graph_can_hold_is_the_function_bit_for_bit(name: str, strict: bool) -> None:
    fn = ALLOWED[name]
    held = capture(fn, (numbers(3),), strict=strict)
    for seed in range(3):
        assert torch.equal(held(numbers(3, seed=seed)), fn(numbers(3, seed=seed)))


def test_a_python_number_that_varies_is_named() -> None:
    factor = [2.0]

    def scaled(x: Tensor) -> Tensor:
        return (x + 1) * factor[0]

    held = capture(scaled, (numbers(3),))
    held(numbers(3))
    factor[0] = 3.0
    with pytest.raises(
        CaptureError, match=r"operation 1, aten.mul.Tensor, has the Python value 3.0, when captured .*2.0"
    ):
        held(numbers(3))
    factor[0] = 2
    with pytest.raises(CaptureError, match=r"Python value 2, when captured it was 2.0"):
        held(numbers(3))
    factor[0] = 2.0
    held(numbers(3))


LATER: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: x.sin().exp(), r"operation 1 is aten.exp.default\(float32\[3\]\), when captured it was aten.cos"),
    (lambda x: x.sin(), r"ended after 1 operations, the captured one had 2: aten.cos.default"),
    (lambda x: x.sin().cos().exp(), "aten.exp.default.* comes after the last operation"),
    (lambda x: x.sin().double().cos(), "operation 1 is aten.to.dtype"),
    (lambda x: x[None].sin().cos(), "operation 0 is"),
]


@pytest.mark.parametrize(("later", "told"), LATER)
def test_other_operations_are_named(later: Callable[[Tensor], Tensor], told: str) -> None:
    ways: list[Callable[[Tensor], Tensor]] = [lambda x: x.sin().cos()]
    held = capture(lambda x: ways[0](x), (numbers(3),))  # pyright: ignore[reportUnknownLambdaType]
    held(numbers(3))
    ways[0] = later
    with pytest.raises(CaptureError, match=told):
        held(numbers(3))


def test_other_shapes_inside_are_named() -> None:
    table = [torch.ones(3, 1)]
    held = capture(lambda x: x * table[0], (numbers(3),))  # pyright: ignore[reportUnknownLambdaType]
    table[0] = torch.ones(2, 1)
    with pytest.raises(
        CaptureError, match=r"aten.mul.Tensor, takes float32\[2, 1\], when captured it was float32\[3, 1\]"
    ):
        held(numbers(3))


def test_a_tensor_from_outside_must_stay_the_same() -> None:
    table = [torch.ones(3)]
    held = capture(lambda x: x + table[0], (numbers(3),))  # pyright: ignore[reportUnknownLambdaType]
    table[0].fill_(5)  # its content may change: a graph reads it where it lies
    assert torch.equal(held(numbers(3)), numbers(3) + 5)
    table[0] = torch.ones(3)
    with pytest.raises(CaptureError, match=r"operation 0, aten.add.Tensor, reads another tensor than when captured"):
        held(numbers(3))


def test_what_is_made_once_and_kept_is_made_before_the_capture() -> None:
    @lru_cache
    def table() -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0])

    held = capture(lambda x: x * table(), (numbers(3),))  # pyright: ignore[reportUnknownLambdaType]
    assert torch.equal(held(numbers(3)), numbers(3) * table())


def test_what_counts_as_one_operation_may_look_at_values() -> None:
    def doubled(x: Tensor) -> Tensor:
        return torch.stack([row * 2 if row.sum() > 0 else row * 2.0 for row in x])

    whole = one_op(doubled)
    held = capture(lambda x: whole(x).add_(1), (numbers(4, 3),))  # pyright: ignore[reportUnknownLambdaType]
    for seed in range(4):
        x = numbers(4, 3, seed=seed)
        assert torch.equal(held(x), doubled(x) + 1)
    with pytest.raises(CaptureError, match="is_nonzero"):
        capture(doubled, (numbers(4, 3),))


def accumulate(state: State, inputs: Inputs, weights: Inputs) -> tuple[Tensor, State]:
    state.total.add_(inputs.x * weights.x)
    state.calls.add_(1)
    return state.total * 2, state


def start() -> tuple[State, Inputs, Inputs]:
    return State(torch.zeros(3), torch.zeros(1, dtype=torch.int64)), Inputs(numbers(3)), Inputs(numbers(3, seed=1))


@given(st.lists(SEEDS, min_size=1, max_size=5), st.booleans())
def test_donated_arguments_are_written_where_they_lie(seeds: list[int], strict: bool) -> None:
    state, inputs, weights = start()
    held = capture(accumulate, (state, inputs, weights), donate=(0,), fixed=(2,), strict=strict)
    for x in state:
        x.zero_()
    mine, _, _ = start()
    for n, seed in enumerate(seeds):
        x = Inputs(numbers(3, seed=seed))
        found, state_2 = held(state, x, weights)
        expected, mine = accumulate(mine, x, weights)
        assert torch.equal(found, expected)
        assert state_2.total is state.total
        assert torch.equal(state.total, mine.total)
        assert state.calls.item() == n + 1
        state = state_2


CHANGES: list[tuple[Callable[[State, Inputs, Inputs], tuple[Any, ...]], str]] = [
    (lambda s, i, w: (State(s.total.clone(), s.calls), i, w), "state.total is not the tensor it was when captured"),
    (lambda s, i, w: (s, i, Inputs(w.x.clone())), "weights.x is not the tensor it was"),
    (lambda s, i, w: (s, Inputs(numbers(4)), w), r"inputs.x is float32 \[4\] on cpu: captured with float32 \[3\]"),
    (lambda s, i, w: (s, Inputs(i.x.double()), w), r"inputs.x is float64 \[3\] on cpu"),
    (lambda s, i, w: (s, Inputs(i.x.to("meta")), w), r"inputs.x is float32 \[3\] on meta"),
    (lambda s, i, w: (s, Inputs(quantise_mxfp4(numbers(1, 32))), w), "inputs is another tree"),
    (lambda s, i, w: (s, i), r"2 arguments: captured with 3, state, inputs, weights"),
    (lambda s, i, w: (s, Inputs(3), w), "inputs.x is int: must be a tensor"),
    (lambda s, i, w: (State(s.total[:2], s.calls), Inputs(numbers(4)), w), r"(?s)state.total is.*inputs.x is"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_other_arguments_are_refused(change: Callable[..., tuple[Any, ...]], told: str) -> None:
    args = start()
    held = capture(accumulate, args, donate=(0,), fixed=(2,))
    before = args[0].total.clone()
    with pytest.raises(CaptureError, match=told):
        held(*change(*args))
    assert torch.equal(args[0].total, before), "nothing has run"
    held(*args)


def test_writing_into_what_is_not_donated_is_refused_by_name() -> None:
    args = start()
    with pytest.raises(CaptureError, match=r"aten.add_.Tensor writes into state.total: only donated"):
        capture(accumulate, args, donate=(1,))
    packed = Packed(quantise_mxfp4(numbers(2, 32)))
    before = packed.packed.scales.clone()
    with pytest.raises(CaptureError, match=r"writes into weights.packed.scales"):
        capture(lambda weights: weights.packed.scales.add_(1), (packed,), fixed=(0,))  # pyright: ignore[reportUnknownLambdaType]
    assert torch.equal(packed.packed.scales, before), "not even once"


def test_outputs_are_overwritten_by_the_next_call() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 1, x.long(), x > 0

    held = capture(both, (numbers(3),))
    first = held(numbers(3))
    kept = [x.clone() for x in first]
    held.check_valid(first)
    second = held(numbers(3, seed=1))
    assert first[0].isnan().all()
    assert (first[1] == -1).all()
    assert first[2].all()
    with pytest.raises(CaptureError, match="0 is an output of call 1, which call 2 has overwritten: clone"):
        held.check_valid(first)
    held.check_valid((second, kept))
    with pytest.raises(CaptureError, match="x is an output of call 1"):
        held(first[0])

    loose = capture(both, (numbers(3),), strict=False)
    first = loose(numbers(3))
    assert torch.equal(first[0], kept[0])
    assert loose(numbers(3, seed=1))[0] is first[0], "the same buffer"
    assert torch.equal(first[0], numbers(3, seed=1) + 1)


@pytest.mark.parametrize("strict", [True, False])
def test_outputs_may_be_fed_to_the_next_call(strict: bool) -> None:
    held = capture(lambda x: x * 2 + 1, (numbers(3),), strict=strict)  # pyright: ignore[reportUnknownLambdaType]
    found, expected = numbers(3), numbers(3)
    for _ in range(4):
        found, expected = held(found), expected * 2 + 1
        assert torch.equal(found, expected)


def test_the_arguments_of_the_caller_stay_as_they_are() -> None:
    x = numbers(3)
    held = capture(lambda x: x.clone().add_(1), (x,))  # pyright: ignore[reportUnknownLambdaType]
    y = held(x)
    held(numbers(3, seed=1))
    assert torch.equal(x, numbers(3))
    assert y is not x
    unchanged = capture(lambda x: x, (x,))  # pyright: ignore[reportUnknownLambdaType]
    assert unchanged(x).data_ptr() != x.data_ptr(), "an argument that comes back is a buffer like every output"


def test_views_of_donated_arguments_do_not_come_back() -> None:
    with pytest.raises(CaptureError, match=r"the result holds a view of x, which is donated"):
        capture(lambda x: x[1:], (numbers(3),), donate=(0,))  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.parametrize("captured_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("called_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("strict", [True, False])
def test_modes_of_gradients_do_not_matter(captured_in: Any, called_in: Any, strict: bool) -> None:
    def matrix(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).softmax(-1)

    w = numbers(3, 3).requires_grad_()
    with captured_in():
        held = capture(matrix, (numbers(3), w), fixed=(1,), strict=strict)
    with called_in():
        held(numbers(3), w)
        found = held(numbers(3, seed=1), w)
    assert torch.equal(found, matrix(numbers(3, seed=1), w))
    assert not found.requires_grad
    assert not found.is_inference()


@pytest.mark.parametrize(
    ("args", "named", "told"),
    [
        ((OUTSIDE, 3), {}, "must be trees of tensors: argument 1 is int"),
        ((OUTSIDE, OUTSIDE.to("meta")), {}, r"arguments lie on \['cpu', 'meta'\]: must be on one"),
        (((), ()), {}, "arguments lie on no device"),
        ((OUTSIDE, OUTSIDE), {"donate": (2,), "fixed": (-1,)}, r"donate names argument 2: there are 2\nfixed names"),
        ((OUTSIDE, OUTSIDE), {"donate": (0,), "fixed": (0,)}, "argument 0 is both donated and fixed"),
        ((OUTSIDE, OUTSIDE), {"backend": "hpu"}, "later version: nothing here has run on a Gaudi"),
        ((OUTSIDE, OUTSIDE), {"backend": "tpu"}, "no backend 'tpu': use 'cuda' or 'cpu'"),
        ((OUTSIDE, OUTSIDE), {"backend": "cuda"}, "backend 'cuda' cannot take arguments on cpu"),
        ((OUTSIDE.to("meta"), ()), {}, "no backend 'meta'"),
    ],
)
def test_what_cannot_be_asked_for(args: tuple[Any, ...], named: dict[str, Any], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture(lambda *args: args[0], args, **named)  # pyright: ignore[reportUnknownLambdaType]


def test_arguments_of_all_kinds_are_copied_as_they_are() -> None:
    """Of several dtypes together, empty, without dimensions, not whole, and conjugated lazily."""
    draw = torch.Generator().manual_seed(0)
    make: list[Callable[[], Tensor]] = [
        lambda: torch.randn(2, 3, generator=draw),
        lambda: torch.randn(3, 2, generator=draw).t(),
        lambda: torch.randn(2, 1, generator=draw).bfloat16().expand(2, 3),
        lambda: torch.randint(0, 9, (), generator=draw),
        lambda: torch.randn(4, generator=draw) > 0,
        lambda: torch.randn(0, 5, generator=draw),
        lambda: torch.randn(2, dtype=torch.complex64, generator=draw).conj(),
    ]
    args = [m() for m in make]
    captured = capture(lambda *xs: tuple(x.clone() for x in xs), args, strict=False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownVariableType]
    for _ in range(2):
        args = [m() for m in make]
        for found, expected in zip(captured(*args), args, strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_buffers_may_come_back_in_another_order() -> None:
    x, y = torch.arange(4.0).view(2, 2), torch.ones(2, 2)
    captured = capture(lambda x, y: (x + 0, y + 0), (x, y))  # pyright: ignore[reportUnknownLambdaType]
    captured(x, 2 * y)
    own = captured._arguments.static  # pyright: ignore[reportPrivateUsage]
    found = captured(own[1], own[0].t())
    assert torch.equal(found[0], 2 * y)
    assert torch.equal(found[1], x.t())
