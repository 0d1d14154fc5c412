"""`muse-fn doctor`: what it says is so, in both forms; devices that are not there are played."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muse_fn.kernels import cpu, cpu_calls, select
from muse_fn.kernels.select import EAGER, INVARIANT, REFERENCE, STATIC, Ops
from muse_fn.serve import doctor
from muse_fn.serve.__main__ import main
from muse_fn.serve.options import BANNER

Shown = Callable[..., tuple[str, str]]
# The last two have forms on CUDA devices alone, and in compiled forms for a CPU alone.
OPERATIONS = {field.name for field in fields(Ops)} - {"why", "attend_new", "prepare"}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs the command in this process -> what it prints, and what it says on standard error."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["muse-fn", "doctor", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        out, err = capsys.readouterr()
        return out, err

    return run


def unwrapped(table: str) -> str:
    """What a table says, however narrow it had to be: without its lines and line breaks."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", table).split())


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices, the second too old for Triton's forms."""
    cards = [
        SimpleNamespace(name="Large Card", total_memory=139 << 30, major=9, minor=0),
        SimpleNamespace(name="Old Card", total_memory=11 << 30, major=6, minor=1),
    ]

    def why_no_triton(where: torch.device) -> str:
        return "" if where.index == 0 else "compute capability 6.1: needs 8.0"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    for file in (doctor, select):
        monkeypatch.setattr(file, "why_no_triton", why_no_triton)


def test_json_says_what_is_here(shown: Shown) -> None:
    said, beside = shown("--json")
    found: dict[str, Any] = json.loads(said)
    assert beside == ""
    assert found["built_with"] == "Muse Spark Open"
    assert found["torch"]["version"] == torch.__version__
    here = found["devices"][0]
    with torch.no_grad():
        table = select.select(torch.device("cpu"))
    assert (here["device"], here["why"], here["threads"]) == ("cpu", table.why, torch.get_num_threads())
    assert here["matrix_units"] == cpu.has_matrix_units()
    assert here["operations"].keys() - {"prepare"} == OPERATIONS
    assert ("prepare" in here["operations"]) == (not cpu_calls.why_not())
    assert here["operations"] == doctor.origins(table)
    assert here["why_no_numba"] == (cpu_calls.why_not() or None)
    assert here["name"].strip()
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["absent"]["hpu"] == "nothing here has ever run on one"
    assert ("cuda" in found["absent"]) != torch.cuda.is_available()
    assert found["libraries"].keys() == {"triton", "numba", "uvloop", "llguidance", "matplotlib", "transformers"}
    assert found["embedded"]["is_present"]
    assert found["embedded"]["bytes"] > 1e6


def test_the_table_says_the_same(shown: Shown) -> None:
    text, beside = shown()
    found = doctor.report()
    assert BANNER in beside
    here = found["devices"][0]
    for words in (torch.__version__, here["name"], here["why"], here["captures"], here["bfloat16_products"]):
        assert words in unwrapped(text), words
    for words in ("nothing here has ever run on one", "present", f"{here['operations']['linear']}: linear, attend"):
        assert words in unwrapped(text), words
    for library, is_installed in found["libraries"].items():
        line = next(line for line in text.splitlines() if library in line.split())
        assert ("not installed" in line) != is_installed


@pytest.mark.parametrize(("has_units", "said"), [(True, "W xᵀ while rows are few"), (False, "x Wᵀ, whatever the rows")])
def test_what_follows_from_matrix_units(
    has_units: bool, said: str, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_matrix_units", lambda: has_units)
    assert said in unwrapped(shown()[0])
    assert json.loads(shown("--json")[0])["devices"][0]["matrix_units"] == has_units


def test_without_numba_forms_on_a_cpu_are_plain_and_it_says_why(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (select, cpu_calls):
        monkeypatch.setattr(file, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    cpu_calls.why_not.cache_clear()
    try:
        here: dict[str, Any] = json.loads(shown("--json")[0])["devices"][0]
        text = unwrapped(shown()[0])
    finally:
        cpu_calls.why_not.cache_clear()
    assert here["why"] == EAGER.why
    assert here["operations"]["attend"] == here["operations"]["linears"] == "kernels/cpu.py"
    assert "Numba is not installed" in here["why_no_numba"]
    assert "Numba is not installed" in text
    assert "compiled by Numba" not in text


@pytest.mark.usefixtures("two_cards")
def test_every_cuda_device_is_listed_with_its_forms(shown: Shown) -> None:
    pytest.importorskip("triton", reason="Triton, whose forms are named, is not installed")
    found: dict[str, Any] = json.loads(shown("--json")[0])
    large, old = found["devices"][1:]
    assert (large["device"], large["name"], large["memory"]) == ("cuda:0", "Large Card", 139 << 30)
    assert (large["compute_capability"], large["why_no_triton"]) == ("9.0", None)
    assert large["operations"]["expert_rows"] == "kernels/gpu_ops.py"
    assert (old["why"], old["why_no_triton"]) == (STATIC.why, "compute capability 6.1: needs 8.0")
    assert old["operations"]["expert_rows"] == "kernels/static.py"
    assert large["operations"].keys() - old["operations"].keys() == {"attend_new"}
    assert large["captures"] == old["captures"] == "cuda: a CUDA graph"
    assert found["absent"].keys() == {"hpu"}
    text, _ = shown()
    for words in ("Large Card, 139 GiB, compute capability 9.0", "compute capability 6.1: needs 8.0", STATIC.why):
        assert words in unwrapped(text), words


@pytest.mark.parametrize("table", [REFERENCE, EAGER, INVARIANT, STATIC])
def test_origins_are_files_of_this_repository(table: Ops) -> None:
    root = Path(__file__).parent.parent.parent
    found = doctor.origins(table)
    assert found.keys() == OPERATIONS
    assert all((root / file).is_file() for file in found.values())


def test_a_missing_model_and_missing_libraries_are_no_error(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "EMBEDDED", tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    found: dict[str, Any] = json.loads(shown("--json")[0])
    assert not any(found["libraries"].values())
    assert not found["embedded"]["is_present"]
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.example/spec/v1\n")
    damaged = json.loads(shown("--json")[0])["embedded"]
    assert not damaged["is_present"]
    assert damaged["problem"]
    text = unwrapped(shown()[0])
    assert "missing: " in text
    assert "not installed: forms for CUDA devices" in text
