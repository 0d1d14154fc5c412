"""How compiled forms are called on a CPU: addresses in, the work spread over helping threads.

A form is a function of one address, that of its int64 and float64 arguments. It is compiled when it is first called,
and kept on disk beside these files or, where that cannot be written, in the user's cache. Its work is claimed piece
after piece by the caller and by helpers (kernels/cpu_pool.py), as many in all as PyTorch would take.
"""

import atexit
import ctypes
import os
import struct
import sys
import time
import warnings
from _thread import start_new_thread
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

Form = Callable[[int], None]
PATIENCE = 5.0  # seconds that helpers have to end with the process
MOST_HELPERS = 256
# In the order in which kernels/cpu_pool.py finds them.
POSIX = ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast", "sched_yield")


@lru_cache
def why_not() -> str:
    """Why compiled forms cannot run here; "" if they can."""
    if find_spec("numba") is None:
        return 'Numba is not installed: pip install "muse-fn[cpu]"'
    if sys.byteorder != "little":
        return "they are for processors that store the low byte first"
    try:
        for name in ("cpu_scalars", "cpu_vectors", "cpu_pool"):
            import_module(f"muse_fn.kernels.{name}")
    except Exception as error:  # a Numba of another time may fail in any way: the plain forms stand ready
        return f"Numba cannot be used ({type(error).__name__}: {error})"
    return ""


@lru_cache(maxsize=64)
def compiled(form: Form) -> tuple[Callable[[Any], None], int]:
    """A form to be called from Python, and its address."""
    numba: Any = import_module("numba")
    # Sums in any order; all else keeps to the rules, so that what is no number stays none.
    options = {"fastmath": {"reassoc", "contract"}, "error_model": "numpy", "nopython": True}
    with _one.compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Numba: none is the caller's to mend
        kept, numba.config.CACHE_DIR = numba.config.CACHE_DIR, _folder(numba.config.CACHE_DIR)
        try:
            made = numba.cfunc(numba.void(numba.int64), cache=True, **options)(form)
        except Exception:  # no place to keep it, one that cannot be written, or what lies there is damaged
            made = numba.cfunc(numba.void(numba.int64), **options)(form)
        finally:
            numba.config.CACHE_DIR = kept
    _made.append(made)  # the code lives as long as its object
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address), made.address


class _One:
    """One thread compiles at a time: what Numba is told is told to all."""

    def __init__(self) -> None:
        self.compiling, self.is_forked = Lock(), False


_one = _One()
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


class Work(NamedTuple):
    """A form with its int64 and float64 arguments: what `call` takes."""

    form: Form
    whole: list[int]
    real: tuple[float, ...] = ()


def threads(work: int) -> int:
    """How many threads are to share so many pieces of work: as many as PyTorch would take."""
    return max(1, min(work, torch.get_num_threads()))


def helpers(threads: int) -> int:
    """The address of the state of this process's helpers, of whom there are then enough for so many threads; 0 for one
    thread, and where the system has no POSIX threads."""
    return _helpers().wanted(threads - 1) if threads > 1 else 0


class Helpers:
    """Threads that help (kernels/cpu_pool.py): their state, and as many as were ever wanted at once."""

    def __init__(self) -> None:
        self._pool: Any = import_module("muse_fn.kernels.cpu_pool")
        self.state = (ctypes.c_int64 * self._pool.WORDS)()
        self._address, self._process = ctypes.addressof(self.state), os.getpid()
        self._count, self._most, self._starting = 0, MOST_HELPERS, Lock()
        try:
            system = ctypes.CDLL(None)
            functions = [getattr(system, name) for name in POSIX]
            for name, place in (("pthread_mutex_init", self._pool.MUTEX), ("pthread_cond_init", self._pool.CONDITION)):
                getattr(system, name)(ctypes.c_void_p(self._address + 8 * place), None)
        except (OSError, AttributeError, TypeError):
            self._address = 0
            return
        for place, function in enumerate([*functions, _retire()], self._pool.LOCK):
            self.state[place] = ctypes.cast(function, ctypes.c_void_p).value or 0
        atexit.register(self.end)  # before the code that they run is gone

    def wanted(self, count: int) -> int:
        """The address of the state, once there are so many."""
        if self._count < min(count, self._most) and self._address:
            with self._starting:
                while self._count < min(count, self._most):
                    self.state[self._pool.ALIVE] += 1
                    try:
                        start_new_thread(compiled(self._pool.help_on)[0], (self._address,))
                    except RuntimeError:  # the system gives no more: those that there are do
                        self.state[self._pool.ALIVE] -= 1
                        self._most = self._count
                        break
                    self._count += 1
        return self._address

    def end(self) -> None:
        """Ends all and waits for them a while, unless they are those of a process that this one was forked from."""
        if os.getpid() != self._process:
            return
        mutex, condition = (ctypes.c_void_p(self._address + 8 * x) for x in (self._pool.MUTEX, self._pool.CONDITION))
        lock, unlock, _, wake, _ = (getattr(ctypes.CDLL(None), name) for name in POSIX)
        self.state[self._pool.ENDING] = 1
        lock(mutex)
        wake(condition)
        unlock(mutex)
        until = time.monotonic() + PATIENCE
        while self.state[self._pool.ALIVE] > 0 and time.monotonic() < until:
            time.sleep(0.001)


def _retire() -> Any:
    """OpenMP's function that ends the caller's team of threads until its next operation; None if there is none.

    After each of PyTorch's operations its team looks out for the next one for milliseconds, on the processors that
    helpers need: a step on two took 13 ms so, and 9 without. A forked process does not have the threads that its copy
    of the team names, and would wait for them.
    """
    if _one.is_forked:
        return None
    try:
        return ctypes.CDLL(torch._C.__file__).omp_pause_resource_all  # pyright: ignore[reportPrivateUsage]
    except (OSError, AttributeError):
        return None


_helpers = lru_cache(Helpers)


def _forked() -> None:
    """In the child: neither threads nor what they held come along."""
    _helpers.cache_clear()
    _one.compiling, _one.is_forked = Lock(), True


if hasattr(os, "register_at_fork"):  # threads do not come along
    os.register_at_fork(after_in_child=_forked)


def address(x: Tensor | None) -> int:
    """Where a tensor's elements lie; 0 for none."""
    return 0 if x is None else x.data_ptr()
