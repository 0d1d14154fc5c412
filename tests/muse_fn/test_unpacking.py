"""Packed experts unpacked while they are read: the same model, the bytes counted beforehand, and the rule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_fn import unpacking
from muse_fn.decoder import forward
from muse_fn.kernels.packed import dequantise
from muse_fn.load import load, share_of
from muse_fn.params.checkpoint import open_checkpoint
from muse_fn.params.formats import FORMATS
from muse_fn.params.tree import Params, named, tensors
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.unpacking import available_memory, bytes_unpacked, is_better_unpacked
from tests.stored_as import label, write_as
from tests.tiny_checkpoint import TINY, equal, write

WIDE = replace(TINY, heads=8, experts=8, expert_size=64)


def held(params: Params) -> int:
    return sum(t.nbytes for t in tensors(params))


def memory(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "meminfo").write_text(text)
    monkeypatch.setattr(unpacking, "MEMORY", folder / "meminfo")


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS, ids=label)
def test_unpacked_it_is_the_same_model(tmp_path: Path, form: Any, dtype: torch.dtype | None) -> None:
    write_as(tmp_path, form, WIDE)
    stored = load(tmp_path, dtype=dtype).params
    plain = load(tmp_path, dtype=dtype, quantize="none").params
    wanted = {
        path: w if isinstance(w, Tensor) else dequantise(w, dtype or torch.bfloat16)
        for path, w in named(stored).items()
    }
    found = named(plain)
    assert found.keys() == wanted.keys()
    for path, w in wanted.items():
        assert torch.equal(found[path], w), path  # pyright: ignore[reportArgumentType]
    tokens = torch.arange(12)[None] % WIDE.vocab_size
    torch.testing.assert_close(forward(plain, tokens, WIDE), forward(stored, tokens, WIDE), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mesh", [ONE, Mesh(ep=2, tp=2).at(3), Mesh(pp=2).at(1)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_the_bytes_are_known_beforehand(tmp_path: Path, mesh: Mesh, dtype: torch.dtype | None) -> None:
    write(tmp_path, "quark-mxfp4", WIDE)
    share = share_of(WIDE, mesh)
    params = load(tmp_path, dtype=dtype, mesh=mesh, quantize="none").params
    assert bytes_unpacked(open_checkpoint(tmp_path), share, dtype) == held(params)


def absent() -> str:
    """Why there are no compiled forms."""
    return "Numba is not installed"


def test_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory available must hold it, on a CPU; elsewhere, or where nothing is packed, nothing changes."""
    monkeypatch.setattr(unpacking, "why_no_numba", absent)
    write(tmp_path / "packed", "quark-mxfp4", WIDE)
    write(tmp_path / "plain", "bf16", WIDE)
    share, dtype = share_of(WIDE, ONE), torch.bfloat16
    packed, plain = open_checkpoint(tmp_path / "packed"), open_checkpoint(tmp_path / "plain")
    need = -(-2 * bytes_unpacked(packed, share, dtype) // 1024)
    for room, better in ((need, True), (need - 1, False)):
        memory(monkeypatch, tmp_path, f"MemTotal: 1 kB\nMemAvailable:   {room} kB\n")
        assert available_memory() == room * 1024
        assert is_better_unpacked(packed, share, "cpu", dtype) is better
        assert not is_better_unpacked(plain, share, "cpu", dtype)
        assert not is_better_unpacked(packed, share, "cuda", dtype)
        found = load(tmp_path / "packed", dtype=dtype, quantize="auto").params
        assert equal(found, load(tmp_path / "packed", dtype=dtype, quantize="none" if better else None).params)
        assert equal(load(tmp_path / "plain", quantize="auto").params, load(tmp_path / "plain").params)


@pytest.mark.parametrize(
    ("form", "dtype", "has_forms", "has_units", "better"),
    [
        ("quark-mxfp4", torch.bfloat16, True, False, False),
        ("quark-mxfp4", None, True, False, False),
        ("quark-mxfp4", torch.float32, True, False, True),
        ("quark-mxfp4", torch.bfloat16, False, False, True),
        ("quark-mxfp4", torch.bfloat16, True, True, True),
        ("nvfp4", torch.bfloat16, True, False, True),
    ],
)
def test_what_compiled_forms_multiply_as_it_is_stays_packed(
    form: str,
    dtype: torch.dtype | None,
    has_forms: bool,
    has_units: bool,
    better: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpacking, "why_no_numba", lambda: "" if has_forms else absent())
    monkeypatch.setattr(unpacking, "has_matrix_units", lambda: has_units)
    memory(monkeypatch, tmp_path, f"MemAvailable: {2**40} kB\n")
    write(tmp_path / "packed", form, WIDE)
    assert is_better_unpacked(open_checkpoint(tmp_path / "packed"), share_of(WIDE, ONE), "cpu", dtype) is better


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemAvailable: much\n"])
def test_memory_that_is_not_known_unpacks_nothing(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "quark-mxfp4", WIDE)
    memory(monkeypatch, tmp_path, text)
    assert available_memory() is None
    assert not is_better_unpacked(open_checkpoint(tmp_path), share_of(WIDE, ONE), "cpu", None)
    monkeypatch.setattr(unpacking, "MEMORY", tmp_path / "absent")
    assert available_memory() is None


def test_a_word_it_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, "bf16", WIDE)
    with pytest.raises(ValueError, match="quantize is 'int8': must be one of None, 'mxfp4', 'none', 'auto'"):
        load(tmp_path, quantize="int8")
