"""Calls of compiled forms: why they cannot run, where their code is kept, which threads do the work."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from muse_fn.kernels import cpu_calls

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is found once is looked for again, here and afterwards."""
    cpu_calls.why_not.cache_clear()
    yield
    cpu_calls.why_not.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_without_numba_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calls, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    assert cpu_calls.why_not() == 'Numba is not installed: pip install "muse-fn[cpu]"'


@pytest.mark.usefixtures("asked_anew")
def test_processors_that_store_the_high_byte_first_have_plain_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    monkeypatch.setattr(cpu_calls.sys, "byteorder", "big")
    assert "low byte first" in cpu_calls.why_not()


def test_where_there_are_no_posix_threads_forms_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = pytest.importorskip("muse_fn.kernels.cpu_linear", reason="Numba is not installed")
    x, w = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(500, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(cpu_calls.ctypes, "CDLL", lambda name: object())  # pyright: ignore[reportUnknownLambdaType]
    alone = cpu_calls.Helpers()
    monkeypatch.undo()
    monkeypatch.setattr(cpu_calls, "_helpers", lambda: alone)
    torch.set_num_threads(2)
    try:
        assert cpu_calls.helpers(2) == 0
        assert (linear.linears(x, (w,))[0] == 64).all()
    finally:
        torch.set_num_threads(1)


def test_no_more_threads_than_work_or_than_pytorch_takes() -> None:
    assert [cpu_calls.threads(work) for work in (0, 1, 100)] == [1, 1, 1]
    torch.set_num_threads(2)
    try:
        assert [cpu_calls.threads(work) for work in (0, 1, 2, 100)] == [1, 1, 2, 2]
    finally:
        torch.set_num_threads(1)


PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import torch
from muse_fn.kernels import cpu_linear
found = cpu_linear.linears(torch.ones(2, 64, dtype=torch.bfloat16), (torch.ones(5, 64, dtype=torch.bfloat16),))
assert (found[0] == 64).all()
"""


@pytest.mark.parametrize("is_writable", [True, False])
def test_code_is_kept_on_disk_and_where_it_cannot_be_nothing_is_said(is_writable: bool, tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    package = tmp_path / "package" / "muse_fn"
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("")
    kept = tmp_path / "kept"
    kept.write_text("") if not is_writable else kept.mkdir()  # no folder can be made inside of a file
    given = {"PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(kept), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert bool([*tmp_path.glob("kept/compiled-*/**/*.nbc")]) == is_writable


def test_code_is_made_anew_when_any_of_the_files_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba itself looks at the file of the function, not at those that it calls."""
    folder = cpu_calls._folder  # pyright: ignore[reportPrivateUsage]
    for name in ("cpu_calls.py", "cpu_vectors.py"):
        (tmp_path / name).write_text("a = 1")
    monkeypatch.setattr(cpu_calls, "__file__", str(tmp_path / "cpu_calls.py"))
    before = folder("")
    assert folder("") == before
    assert Path(before).parent == tmp_path / "__pycache__"
    assert Path(folder("/elsewhere")).parent == Path("/elsewhere")
    (tmp_path / "cpu_vectors.py").write_text("a = 2")
    assert folder("") != before
