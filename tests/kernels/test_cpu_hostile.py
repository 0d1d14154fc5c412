"""Compiled forms on a CPU where the surroundings are unusual: they are those of the plain forms, or step aside."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_fn.kernels import cpu_calls, cpu_ops, pieces
from muse_fn.kernels.norms import Gain, Mix, Rotary
from muse_fn.kernels.packed import quantise_mxfp4
from muse_fn.kernels.select import REFERENCE

if why := cpu_calls.why_not():
    pytest.skip(why, allow_module_level=True)

BF16, EPS = torch.bfloat16, 1e-5


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def every_form() -> Iterator[Tensor]:
    """Results of all compiled forms that make buffers of their own."""
    x, w, router = draw(0, 3, 64, dtype=torch.float32), draw(1, 40, 64), draw(2, 8, 64, dtype=torch.float32)
    yield from cpu_ops.linears(x, (router, w))
    idx = torch.tensor([[0, 3], [1, 0], [3, 2]], device="cpu")
    yield cpu_ops.expert_rows(draw(3, 3, 64), idx, draw(4, 4, 64, 64), draw(5, 4, 64, 32))
    gain = Gain(draw(6, 64, dtype=torch.float32))
    yield cpu_ops.normed(x, gain, EPS, BF16)
    mix = Mix(gain.factor, gain.factor.flip(0))
    yield from cpu_ops.join(x[None], draw(7, 1, 1, 3, 64), None, mix, gain, EPS, EPS, BF16)[:2]
    yield cpu_ops.blend(draw(8, 3, 2, 64), draw(9, 3, 2, dtype=torch.float32), gain, EPS, BF16)
    logits, bias = draw(10, 3, 8, dtype=torch.float32), draw(11, 8, dtype=torch.float32)
    chosen = cpu_ops.choose(logits, bias, 2, 1.0, 2.5, draw(12, 1, 3, 64), gain, EPS, BF16)
    yield from (*chosen.routes, chosen.u_TM)
    yield from cpu_ops.heads(draw(13, 1, 3, 128), draw(14, 1, 3, 64), None, 32, 1.0, EPS)
    yield cpu_ops.gated(draw(15, 1, 3, 2, 32), draw(16, 1, 3, 64), EPS, BF16)


def set_dtype(to: Any) -> None:
    torch.set_default_dtype(to)


def set_device(to: Any) -> None:
    torch.set_default_device(to)


@pytest.mark.parametrize(
    ("change", "to", "back"),
    [
        (set_dtype, torch.float64, torch.float32),
        (set_dtype, BF16, torch.float32),
        (set_device, "meta", None),
    ],
    ids=["float64", "bfloat16", "meta"],
)
def test_defaults_of_torch_change_nothing(change: Any, to: Any, back: Any) -> None:
    with torch.no_grad():
        expected = list(every_form())
        change(to)
        try:
            found = list(every_form())
        finally:
            change(back)
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        assert torch.equal(f, e)


@pytest.mark.parametrize("apart", [(False, False), (True, False), (False, True), (True, True)])
def test_cosines_and_sines_may_lie_apart(apart: tuple[bool, bool]) -> None:
    def laid(x: Tensor, is_apart: bool) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if is_apart else x

    angles = draw(1, 2, 3, 1, 32, dtype=torch.float32)
    rotary = Rotary(*(laid(x, is_apart) for x, is_apart in zip((angles.cos(), angles.sin()), apart, strict=True)))
    args = draw(2, 2, 3, 128), draw(3, 2, 3, 64), rotary, 32, 1.5, EPS
    with torch.no_grad():
        for found, expected in zip(cpu_ops.heads(*args), pieces.heads(*args), strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_views_that_turn_signs_are_read_as_what_they_are() -> None:
    x, w = draw(1, 2, 64), draw(2, 8, 64)
    with torch.no_grad():
        (found,), (expected,) = (cpu_ops.linears(torch._neg_view(x), (w,)), pieces.linears(-x, (w,)))  # pyright: ignore
    torch.testing.assert_close(found, expected)


def test_sizes_that_do_not_belong_together_are_refused_as_by_the_plain_forms() -> None:
    with torch.no_grad():
        for w in (draw(1, 96, 128), quantise_mxfp4(draw(1, 96, 128, dtype=torch.float32))):
            with pytest.raises(RuntimeError):
                cpu_ops.linears(draw(2, 3, 64), (w,))
        for gate_up, down in ((draw(3, 4, 64, 32), draw(4, 4, 64, 32)), (draw(3, 4, 32, 64), draw(4, 4, 64, 32))):
            with pytest.raises(RuntimeError):
                cpu_ops.expert_rows(draw(5, 3, 64), torch.zeros(3, 2, dtype=torch.int64), gate_up, down)


def test_no_rows_give_no_rows() -> None:
    with torch.no_grad():
        (found,) = cpu_ops.linears(draw(1, 0, 64), (draw(2, 8, 64),))
    assert found.shape == (0, 8)


def test_without_more_threads_the_work_is_done_by_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cpu_calls, "start_new_thread", refused)
    helpers = cpu_calls.Helpers()
    monkeypatch.setattr(cpu_calls, "_helpers", lambda: helpers)
    before, x, w = torch.get_num_threads(), draw(1, 3, 64), draw(2, 4096, 64)
    torch.set_num_threads(3)
    try:
        with torch.no_grad():
            for _ in range(2):
                (found,) = cpu_ops.linears(x, (w,))
                torch.testing.assert_close(found, pieces.linears(x, (w,))[0], rtol=2**-7, atol=2**-7)
    finally:
        torch.set_num_threads(before)
    assert helpers.state[helpers._pool.ALIVE] == 0, "nobody is waited for who never lived"  # pyright: ignore


@pytest.mark.parametrize("damage", [b"", b"no pickle", pickle.dumps(3)])
def test_a_damaged_cache_is_as_good_as_none(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numba: Any = cpu_calls.import_module("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    form = cpu_calls.import_module("muse_fn.kernels.cpu_pool").help_on
    compile_anew: Any = cpu_calls.compiled.__wrapped__
    compile_anew(form)
    files = [file for file in tmp_path.rglob("*.nb?") if file.is_file()]
    assert files, "it was kept"
    for file in files:
        file.write_bytes(damage)
    call, address = compile_anew(form)
    assert callable(call)
    assert address


def test_a_child_does_not_wait_for_what_its_parent_was_compiling() -> None:
    one = cpu_calls._one  # pyright: ignore[reportPrivateUsage]
    held = one.compiling
    with held:
        cpu_calls._forked()  # pyright: ignore[reportPrivateUsage]
        assert one.compiling is not held
        assert one.compiling.acquire(timeout=1)
        one.compiling.release()
    one.is_forked = False


def test_packed_experts_agree_in_sizes_too() -> None:
    packed = [quantise_mxfp4(draw(n, *shape, dtype=torch.float32)) for n, shape in ((1, (4, 64, 64)), (2, (4, 64, 32)))]
    u, idx = draw(3, 3, 64), torch.tensor([[0, 3], [1, 0], [3, 2]])
    with torch.no_grad():
        found, expected = (form(u, idx, *packed) for form in (cpu_ops.expert_rows, REFERENCE.expert_rows))
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()
