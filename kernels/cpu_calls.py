"""How compiled forms are called on a CPU: addresses in, the work spread over PyTorch's own OpenMP threads.

A form is a function of one address, that of its int64 and float64 arguments. It is compiled when it is first called,
and kept on disk beside these files or, where that cannot be written, in the user's cache. Threads come from the library
that PyTorch itself starts them with: a second pool beside it would wait for work on the same processors. They claim
pieces of work one after another, so that it is done however many there are.
"""

import ctypes
import struct
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

Form = Callable[[int], None]


@lru_cache
def why_not() -> str:
    """Why compiled forms cannot run here; "" if they can."""
    if find_spec("numba") is None:
        return 'Numba is not installed: pip install "muse-fn[cpu]"'
    if sys.byteorder != "little":
        return "they are for processors that store the low byte first"
    try:
        import_module("muse_fn.kernels.cpu_vectors")
    except Exception as error:  # a Numba of another time may fail in any way: the plain forms stand ready
        return f"Numba cannot be used ({type(error).__name__}: {error})"
    return ""


@lru_cache
def starter() -> int:
    """The address of GOMP_parallel in the OpenMP library of this process; 0 if none has it, and forms run alone."""
    for name in (*_libraries(), "libgomp.so.1"):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """OpenMP libraries that are loaded, or that lie beside PyTorch."""
    beside = [str(file) for file in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))]
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return beside
    loaded = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return [name for name in loaded if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))] or beside


@lru_cache(maxsize=64)
def compiled(form: Form) -> tuple[Callable[[Any], None], int]:
    """A form to be called from Python, and its address."""
    numba: Any = import_module("numba")
    # Sums in any order; all else keeps to the rules, so that what is no number stays none.
    options = {"fastmath": {"reassoc", "contract"}, "error_model": "numpy", "nopython": True}
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Numba: none is the caller's to mend
        kept, numba.config.CACHE_DIR = numba.config.CACHE_DIR, _folder(numba.config.CACHE_DIR)
        try:
            made = numba.cfunc(numba.void(numba.int64), cache=True, **options)(form)
        except (RuntimeError, OSError):  # no place to keep it, or one that cannot be written
            made = numba.cfunc(numba.void(numba.int64), **options)(form)
        finally:
            numba.config.CACHE_DIR = kept
    _made.append(made)  # the code lives as long as its object
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address), made.address


_compiling = Lock()
_made: list[Any] = []


def _folder(given: str) -> str:
    """A folder for code made from these files as they are: Numba would look at a form's own file only."""
    files = sorted(Path(__file__).parent.glob("cpu_*.py"))
    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return str(Path(given or Path(__file__).parent / "__pycache__") / f"compiled-{digest}")


def call(form: Form, whole: list[int], real: tuple[float, ...] = ()) -> None:
    """Runs a form on int64 and then float64 arguments, on the calling thread."""
    words = struct.pack(f"{len(whole)}q{len(real)}d", *whole, *real)
    compiled(form)[0](ctypes.create_string_buffer(words, len(words)))


def threads(work: int) -> int:
    """How many threads are to share so many pieces of work: as many as PyTorch would take."""
    return max(1, min(work, torch.get_num_threads())) if starter() else 1


def address(x: Tensor | None) -> int:
    """Where a tensor's elements lie; 0 for none."""
    return 0 if x is None else x.data_ptr()
