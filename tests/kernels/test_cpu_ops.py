"""The table of compiled forms on a CPU: what they take, what is left to the plain ones, who may look on."""

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from muse_fn.kernels import cpu, cpu_calls, cpu_ops, cpu_reasons, reference
from muse_fn.kernels.norms import Gain, Mix
from muse_fn.kernels.one_op import watching
from muse_fn.kernels.packed import quantise_mxfp4, quantise_nvfp4
from muse_fn.kernels.select import EAGER, REFERENCE, Ops, select

pytest.importorskip("numba", reason="Numba is not installed")
BF16, FLOAT = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def compiled() -> Iterator[Ops]:
    with torch.no_grad():
        yield select(CPU)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of compiled forms as they are asked for."""
    found, file = list[str](), cpu_ops.file_of

    def watched(name: str) -> Any:
        found.append(name)
        return file(name)

    monkeypatch.setattr(cpu_ops, "file_of", watched)
    return found


def calls(ops: Ops, dtype: torch.dtype) -> dict[str, Any]:
    """Each operation once on small tensors of a model in this dtype: names and results."""
    x, norm, vectors = draw(0, 3, 64, dtype=dtype), Gain(draw(1, 64, dtype=FLOAT)), draw(2, 2, 64, dtype=FLOAT)
    h, q, k = draw(3, 3, 64, dtype=FLOAT), draw(4, 3, 1, 128, dtype=dtype), draw(5, 3, 1, 64, dtype=dtype)
    (k_arena, v_arena), pos = draw(6, 2, 4, 8, 2, 32, dtype=dtype), torch.tensor([[5], [0], [7]])
    idx, logits, rows = torch.tensor([[0, 1], [2, 3], [1, 9]]), draw(7, 3, 4, dtype=FLOAT), torch.tensor([9, 17, 25])
    k_pos, blocks = torch.arange(8).expand(3, 8), torch.tensor([[1], [2], [3]])
    weights = [draw(n, *s, dtype=dtype) / 8 for n, s in ((8, (5, 64)), (9, (4, 64, 64)), (10, (4, 64, 32)))]
    return {
        "linear": ops.linear(x, weights[0]),
        "linears": ops.linears(h, (weights[0], draw(11, 4, 64, dtype=FLOAT))),
        "attend": ops.attend(q.view(3, 1, 4, 32), k_arena[:3], v_arena[:3], pos, k_pos, 0, False),
        "attend_blocks": ops.attend_blocks(q.view(3, 1, 4, 32), k_arena, v_arena, blocks, pos, k_pos, 0, False),
        "expert_rows": ops.expert_rows(x, idx, *weights[1:]),
        "silu": ops.silu(x),
        "normed": ops.normed(h, norm, 1e-5, dtype),
        "join": ops.join(h, x[None], norm, Mix(*vectors), norm, 1e-5, 1e-6, dtype)[:2],
        "heads": ops.heads(q, k, None, 32, 1.5, 1e-5),
        "place": ops.place(q, k, k, None, 1.5, 1e-5, k_arena.clone(), v_arena.clone(), rows),
        "gated": ops.gated(q.view(3, 1, 4, 32), q, 1e-5, dtype),
        "choose": ops.choose(logits, torch.zeros(4), 2, 0.7, 2.0, x[None], norm, 1e-5, dtype),
        "blend": ops.blend(draw(12, 3, 2, 64, dtype=dtype), torch.ones(3, 2), norm, 1e-5, dtype),
    }


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [y for member in x for y in flat(member)]


def test_in_bfloat16_all_but_two_operations_are_compiled(compiled: Ops, taken: list[str]) -> None:
    found, expected = calls(compiled, BF16), calls(REFERENCE, BF16)
    assert compiled.attend_new is None
    assert compiled.prepare is not None
    assert found.keys() == {field.name for field in fields(Ops)} - {"why", "attend_new", "prepare"}
    for name, result in found.items():
        for a, b in zip(flat(result), flat(expected[name]), strict=True):
            assert a.dtype == b.dtype, name
            torch.testing.assert_close(a, b, rtol=2.0**-5, atol=2.0**-5)
    products, rows, heads = ["cpu_linear"] * 2, ["cpu_rows"] * 4, ["cpu_heads"] * 3
    assert sorted(taken) == sorted([*products, "cpu_attention", "cpu_experts", *rows, *heads])


def test_in_float32_none_is_and_bits_are_as_before(compiled: Ops, taken: list[str]) -> None:
    expected = calls(EAGER, FLOAT)
    for name, result in calls(compiled, FLOAT).items():
        for a, b in zip(flat(result), flat(expected[name]), strict=True):
            assert torch.equal(a, b), name
    assert not taken


def test_rows_beyond_few_and_other_formats_are_left_to_plain_forms(
    compiled: Ops, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without pairs of bfloat16."""
    monkeypatch.setattr(cpu_ops, "no_tiles", lambda: "none")
    x, w = draw(0, cpu_ops.most().rows + 1, 64), draw(1, 5, 64)
    assert torch.equal(compiled.linear(x, w), cpu.linear(x, w))
    packed = quantise_nvfp4(draw(1, 5, 64, dtype=FLOAT))
    assert torch.equal(compiled.linear(x[:2], packed), cpu.linear(x[:2], packed))
    u, many = draw(7, cpu_ops.most().tokens + 1, 64), (draw(8, 2, 64, 64), draw(9, 2, 64, 32))
    idx = torch.arange(len(u))[:, None] % 2
    assert torch.equal(compiled.expert_rows(u, idx, *many), cpu.expert_rows(u, idx, *many))
    odd = draw(2, 3, 40), draw(3, 5, 40)
    assert torch.equal(compiled.linear(*odd), cpu.linear(*odd))
    view = draw(4, 64, 5).t()
    assert torch.equal(compiled.linear(x[:2], view), cpu.linear(x[:2], view))
    idx, experts = torch.tensor([[0], [1]]), [draw(5, 2, 24, 64), draw(6, 2, 64, 12)]
    assert torch.equal(compiled.expert_rows(x[:2], idx, *experts), cpu.expert_rows(x[:2], idx, *experts))
    assert not taken


@pytest.mark.parametrize("has_units", [False, True])
def test_matrix_units_take_over_early(
    has_units: bool, compiled: Ops, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_matrix_units", lambda: has_units)
    monkeypatch.setattr(cpu_ops, "no_tiles", lambda: "none")
    experts, x = (draw(1, 2, 64, 64), draw(2, 2, 64, 32)), draw(0, 40, 64)
    compiled.linear(x, experts[0][0])
    compiled.expert_rows(x, torch.zeros(40, 1, dtype=torch.int64), *experts)
    compiled.expert_rows(x, torch.zeros(40, 1, dtype=torch.int64), *(quantise_mxfp4(w.float()) for w in experts))
    assert taken == (["cpu_experts"] if has_units else ["cpu_linear", "cpu_experts", "cpu_experts"])


@pytest.mark.skipif(bool(cpu_reasons.no_tiles()), reason=cpu_reasons.no_tiles() or "it is")
def test_many_routes_to_an_expert_have_a_form_of_their_own(compiled: Ops, taken: list[str]) -> None:
    experts = draw(8, 4, 64, 64), draw(9, 4, 64, 32)
    for tokens in (cpu_ops.CROWD - 1, cpu_ops.CROWD, 1000):
        u, idx = draw(7, tokens, 64), torch.arange(4).expand(tokens, 4)
        found, expected = (f(u, idx, *experts) for f in (compiled.expert_rows, reference.expert_rows))
        torch.testing.assert_close(found, expected, rtol=2.0**-4, atol=8.0)
    assert taken == ["cpu_experts", "cpu_routes", "cpu_routes"]


def test_packed_experts_are_taken_as_they_are(compiled: Ops, taken: list[str]) -> None:
    u, idx = draw(0, 2, 64), torch.tensor([[0, 1], [1, 1]])
    experts = [quantise_mxfp4(draw(n, *s, dtype=FLOAT) / 8) for n, s in ((1, (2, 64, 64)), (2, (2, 64, 32)))]
    found, expected = (f(u, idx, *experts) for f in (compiled.expert_rows, reference.expert_rows))
    torch.testing.assert_close(found, expected, rtol=2.0**-5, atol=2.0**-5)
    assert taken == ["cpu_experts"]


def test_why_a_form_was_left_out_is_said_once(compiled: Ops, caplog: pytest.LogCaptureFixture) -> None:
    cpu_ops.say.cache_clear()
    with caplog.at_level(logging.INFO, "muse_fn.kernels"):
        for _ in range(3):
            compiled.linear(draw(0, 3, 40), draw(1, 5, 40))
    assert [r.message for r in caplog.records] == [
        "linears: the plain form is used: 40 inputs of torch.bfloat16: it takes multiples of 32 in bfloat16 or float32"
    ]


def test_without_numba_all_is_plain(monkeypatch: pytest.MonkeyPatch, compiled: Ops, taken: list[str]) -> None:
    """Also where it is installed and cannot be used."""
    cpu_calls.why_not.cache_clear()
    monkeypatch.setattr(cpu_calls, "import_module", lambda name: 1 / 0)  # pyright: ignore[reportUnknownLambdaType]
    try:
        assert "ZeroDivisionError" in cpu_calls.why_not()
        expected = calls(EAGER, BF16)
        for name, result in calls(compiled, BF16).items():
            for a, b in zip(flat(result), flat(expected[name]), strict=True):
                assert torch.equal(a, b), name
    finally:
        cpu_calls.why_not.cache_clear()
    assert not taken


def test_transforms_have_plain_forms() -> None:
    seen: list[Ops] = []

    def look(x: Tensor) -> Tensor:
        seen.append(select(CPU))
        return x * 2.0

    with torch.no_grad():
        vmap(look)(torch.ones(3))
        with torch.autograd.forward_ad.dual_level():
            look(torch.ones(3))
        look(torch.ones(3))
    with torch.inference_mode():
        look(torch.ones(3))
    assert seen[:2] == [REFERENCE, EAGER]
    assert seen[2] is seen[3]
    assert seen[2] is not EAGER


class Counting(TorchDispatchMode):
    """Sees every operation of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Looking:
    """Who is told of whole operations."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.left = 0

    def enter(self, name: str, args: tuple[Any, ...]) -> None:
        self.names.append(name)

    def leave(self, result: Any) -> None:
        self.left += 1


def test_modes_that_see_operations_see_plain_ones(compiled: Ops, taken: list[str]) -> None:
    with Counting() as mode:
        calls(compiled, BF16)
    assert not taken
    assert any("mm" in name for name in mode.seen)


def test_who_watches_sees_each_form_as_one_and_arenas_written_by_pytorch(compiled: Ops, taken: list[str]) -> None:
    plainly = calls(compiled, BF16)
    who = Looking()
    with Counting() as mode, watching(who):
        watched = calls(compiled, BF16)
    assert len(taken) == 2 * len(taken[: len(taken) // 2]) == 22
    assert who.left == len(who.names) == 11
    assert sum("index_copy" in name for name in mode.seen) == 2
    for name, result in watched.items():
        for a, b in zip(flat(result), flat(plainly[name]), strict=True):
            assert torch.equal(a, b), name


def work(seed: int) -> list[Tensor]:
    with torch.inference_mode():
        return [x for result in calls(select(CPU), BF16).values() for x in flat(result)]


def test_several_threads_at_once() -> None:
    expected = work(0)
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(work, range(40)):
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b)
    finally:
        torch.set_num_threads(1)


def test_after_a_fork() -> None:
    """With one thread, as PyTorch wants it of a process that was forked after threads were started."""
    expected = work(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply(_sums)
    assert found == [x.double().sum().item() for x in expected]


def _sums() -> list[float]:
    return [x.double().sum().item() for x in work(0)]
