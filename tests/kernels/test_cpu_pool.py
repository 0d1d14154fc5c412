"""Helpers: every piece of work is done once, by whoever; nobody is waited for who has not joined; they end and fork."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from muse_fn.kernels import cpu_calls

numba: Any = pytest.importorskip("numba", reason="Numba is not installed")
cpu_pool: Any = pytest.importorskip("muse_fn.kernels.cpu_pool", reason="Numba is not installed")
from muse_fn.kernels.cpu_scalars import argument, i64  # noqa: E402
from muse_fn.kernels.cpu_vectors import claim  # noqa: E402

in_parallel = cpu_pool.in_parallel


def _counted(a: Any) -> None:
    """Claims pieces and adds one to each; some take long. Arguments: claims, pieces, their counts, spins, how many work
    now, how many have at once."""
    now = cpu_pool.add(a + 32, 1) + 1
    most = cpu_pool.read(a + 40)
    while now > most and not cpu_pool.replaced(a + 40, most, now):
        most = cpu_pool.read(a + 40)
    counts = i64(argument(a, 2), argument(a, 1))
    while True:
        piece = claim(a)
        if piece >= argument(a, 1):
            break
        for _ in range(argument(a, 3) * (piece % 7)):
            cpu_pool.pause()
        counts[piece] += 1
    cpu_pool.add(a + 32, -1)


def _start(a: Any) -> None:
    in_parallel(argument(a, 0), argument(a, 1), a + 24, argument(a, 2))


def counted(threads: int, pieces: int, spins: int = 0) -> tuple[list[int], int]:
    """How often each piece was done, and how many worked at once."""
    counts = torch.zeros(pieces, dtype=torch.int64)
    form = cpu_calls.compiled(_counted)[1]
    given = [cpu_calls.helpers(threads), form, threads, 0, pieces, counts.data_ptr(), spins, 0, 0]
    words = torch.tensor(given)
    cpu_calls.compiled(_start)[0](words.data_ptr())
    assert words[7] == 0, "all have left"
    return counts.tolist(), int(words[8])


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("pieces", [0, 1, 2, 100])
def test_every_piece_is_done_once(threads: int, pieces: int) -> None:
    for _ in range(20):
        counts, workers = counted(threads, pieces, 3)
        assert counts == [1] * pieces
        assert 1 <= workers <= threads


def test_helpers_do_help() -> None:
    """Not at every call: only if the system lets them run, and who is asleep comes late."""
    assert any(counted(2, 50, 2000)[1] == 2 for _ in range(100))


def test_helpers_that_sleep_are_woken() -> None:
    for _ in range(3):
        time.sleep(0.05)
        assert any(counted(2, 50, 2000)[1] == 2 for _ in range(100))


def test_callers_at_once_each_get_their_own_work_done() -> None:
    def many(seed: int) -> bool:
        return all(counted(3, 1 + (seed + n) % 40, 5)[0] == [1] * (1 + (seed + n) % 40) for n in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(many, range(12)))


@pytest.fixture
def helpers_at_work() -> Iterator[None]:
    counted(2, 100)
    yield
    assert counted(2, 100)[0] == [1] * 100


@pytest.fixture
def team_of_openmp() -> Iterator[None]:
    """PyTorch's threads have just worked, and look out for more."""
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).tanh()
    yield
    torch.set_num_threads(usual)


TASKS = Path("/proc/self/task")


def threads_become(count: int) -> bool:
    """Whether this process has so many threads; who has been waited for may still be listed for a moment."""
    until = time.monotonic() + 10
    while (found := len([*TASKS.iterdir()])) != count and time.monotonic() < until:
        time.sleep(0.001)
    return found == count


@pytest.mark.skipif(not TASKS.is_dir(), reason="how many threads there are is read from Linux")
@pytest.mark.usefixtures("team_of_openmp")
def test_a_team_of_openmp_ends_before_helpers_are_wanted() -> None:
    """And is there again when PyTorch wants it."""
    x = torch.linspace(-1, 1, 1 << 20)
    counted(2, 50)
    time.sleep(0.1)
    alone = len([*TASKS.iterdir()])
    for _ in range(3):
        found = x.tanh()
        assert threads_become(alone + 1)
        assert counted(2, 50)[0] == [1] * 50
        assert threads_become(alone)
        assert torch.equal(found, x.tanh())
        counted(2, 50)


@pytest.mark.usefixtures("helpers_at_work", "team_of_openmp")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    """And does not wait for the threads of a team that has stayed behind."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply_async(_both).get(timeout=60)
    assert found[0] == [1] * 50
    assert found[1] != cpu_calls.helpers(2)


def _both() -> tuple[list[int], int]:
    return counted(2, 50, 100)[0], cpu_calls.helpers(2)


def test_a_process_with_helpers_ends_whatever_they_do() -> None:
    """Asleep, looking out, or in a process that was forked from theirs."""
    program = """
import os, sys, time, torch
from muse_fn.kernels import cpu_linear
torch.set_num_threads(3)
x, w = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(5000, 64, dtype=torch.bfloat16)
for _ in range(5):
    assert (cpu_linear.linears(x, (w,))[0] == 64).all()
if sys.argv[1] == "asleep":
    time.sleep(0.1)
if sys.argv[1] == "forked" and os.fork() == 0:
    sys.exit()
"""
    for state in ("asleep", "looking", "forked"):
        done = subprocess.run([sys.executable, "-c", program, state], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), state


def test_helpers_end_when_told_to() -> None:
    own = cpu_calls.Helpers()
    address = own.wanted(2)
    assert address
    assert own.state[cpu_pool.ALIVE] == 2
    own.end()
    assert own.state[cpu_pool.ALIVE] == 0
    assert os.getpid() == own._process  # pyright: ignore[reportPrivateUsage]
