"""Starts the ranks of a mesh on this machine, a process each, and answers for them: when one fails all end, and the
first cause is what is said.

A rank's failure is a signal that killed it, an error it reported, or an exit code other than 0. Losing a peer is never
the first cause while there is another.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from rich.progress import Progress, TaskID

from muse_fn.serve.member import LINE, RankError
from muse_fn.serve.options import err, loading_bars
from muse_fn.sharding.mesh import Mesh

TICK = 0.1  # seconds between looks at processes that say nothing
GRACE = 1.0  # seconds that a lost peer waits for a better reason
PAUSE = 0.02  # seconds between looks at ranks that are to end
MERCY = 3.0  # seconds between SIGTERM and SIGKILL
LAST_LINES = 20
# What a rank is before it is the command: on Linux the system kills it when its parent dies, even while it imports or
# is stopped, when it could not notice by itself.
TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which survives exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cause(NamedTuple):
    """Why a rank failed."""

    is_peer: bool
    time: float  # of this machine's monotonic clock
    rank: int
    what: str  # follows "rank 3 of 8"
    trace: str = ""
    is_reported: bool = True
    is_told: bool = True  # False: whoever read the answers has gone, and that is nobody's fault


@dataclass
class _Rank:
    """A process, this end of its line, and what is known of it."""

    rank: int
    process: subprocess.Popen[bytes]
    line: Connection
    stderr: IO[bytes] | None  # None: this process's own
    lost: float | None = None  # when the line ended
    is_loaded: bool = False
    causes: list[Cause] = field(default_factory=list[Cause])

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None


def launch_command(mesh: Mesh, quiet: bool, mercy: float = MERCY) -> None:
    """Runs this very command once more in each rank of the mesh; see `launch`."""
    # Where this process does not import from its working directory, neither does a rank.
    safe = [] if {"", str(Path.cwd())} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "muse_fn.serve", *sys.argv[1:]]
    launch(command, mesh.ranks, quiet=quiet or not err.is_terminal, mercy=mercy)


def launch(command: Sequence[str], ranks: int, *, quiet: bool = True, mercy: float = MERCY) -> None:
    """Runs a command, whose first word is a path, as that many ranks, and returns when all have ended well.

    Rank 0 has this process's standard output and error; of the others a failing one's last lines are shown if it
    reports nothing. Draws the loading of each rank unless `quiet`. Raises RankError with the first cause. A signal
    that ends this process is SystemExit with 128 + its number, or with 0 if all ranks end well; that
    nobody reads the answers any more is SystemExit with 1, as for one rank. In every case no rank is left, and none
    outlives this process however it ends. Ranks that are told to end have `mercy` seconds.
    """
    crew: list[_Rank] = []
    cause: Cause | None = None
    words = ""
    with _signals() as asked:
        try:
            port = free_port()
            for rank in range(ranks):
                crew.append(_start(command, rank, ranks, port))
            with loading_bars(quiet) as bars:
                cause = _supervise(crew, asked, bars)
        finally:
            _stop(crew, mercy if cause is None else MERCY, asked)
            words = "" if cause is None or cause.is_reported else _last_words(crew[cause.rank])
            _close(crew)
    if asked:
        sys.exit(128 + asked[0] if any(member.process.returncode for member in crew) else 0)
    if cause is None:
        return
    if not cause.is_told:
        sys.exit(1)
    if cause.trace:
        err.print(cause.trace, markup=False, soft_wrap=True)
    raise RankError(f"rank {cause.rank} of {ranks}{cause.what}{words}")


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
    """Signals that ask this process to end are written down, in the order they came."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # only there can they be caught
        yield asked
        return
    before = {s: signal.getsignal(s) for s in STOPPING if signal.getsignal(s) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of a rank: its place, where rank 0 listens, and its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = "lo" if sys.platform == "linux" else "lo0"
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # of a failure the launcher tells what matters
    }
    fixed = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    return {**defaults, **os.environ, **fixed}


def _start(command: Sequence[str], rank: int, ranks: int, port: int) -> _Rank:
    ours, theirs = Pipe()
    tied = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid())] if sys.platform == "linux" else []
    stderr = tempfile.TemporaryFile() if rank else None
    # A Ctrl-C reaches every process of the terminal. The ranks inherit that it is held back: this one ends them.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [*tied, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env={**rank_environment(rank, ranks, port), LINE: str(theirs.fileno())},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
    return _Rank(rank, process, ours, stderr)


def _supervise(crew: list[_Rank], asked: list[int], bars: Progress) -> Cause | None:
    """Until all ranks have ended or one has failed; then the first cause, None if there is none."""
    tasks = [bars.add_task(f"rank {member.rank}", total=None) for member in crew]
    patience = float("inf")
    has_begun = False
    while not asked:
        ready = wait([member.line for member in crew if member.lost is None], TICK)
        for member in crew:
            if member.line in ready:
                _read(member, bars, tasks[member.rank])
            _look(member, bars, tasks[member.rank])
        causes = [cause for member in crew for cause in member.causes]
        have_ended = all(member.has_ended for member in crew)
        if causes:
            patience = min(patience, time.monotonic() + GRACE)
            first = first_cause(causes)
            if not first.is_peer or have_ended or time.monotonic() >= patience:
                return first
        elif have_ended:
            return None
        elif not has_begun and all(member.is_loaded for member in crew):
            has_begun = True
            bars.stop()
            _let_begin(crew)
    return None


def first_cause(causes: Sequence[Cause]) -> Cause:
    """The earliest that is not the loss of a peer; if all are, the earliest."""
    return min(causes, key=lambda cause: (cause.is_peer, cause.time))


def _read(member: _Rank, bars: Progress, task: TaskID) -> None:
    """Takes every report that has come up the line."""
    try:
        while member.line.poll():
            report = json.loads(member.line.recv_bytes())
            if "progress" in report:
                done, total, what = report["progress"]
                bars.update(task, completed=done, total=total, description=f"rank {member.rank} {what[-40:]}")
            elif "loaded" in report:
                member.is_loaded = True
            else:
                told = f": {report['error']}"
                where = report["is_peer"], report["time"], member.rank
                member.causes.append(Cause(*where, told, report["trace"], is_told=report["is_told"]))
    except (EOFError, OSError):
        member.lost = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the line ends just before its process does
            member.process.wait(TICK)


def _look(member: _Rank, bars: Progress, task: TaskID) -> None:
    """Notices the end of a rank, after all that it still had to report."""
    if member.process.poll() is None:
        return
    if member.lost is None:
        _read(member, bars, task)
    code = member.process.returncode
    if code != 0 and not member.causes:
        at = time.monotonic() if member.lost is None else member.lost
        member.causes.append(Cause(False, at, member.rank, _ending(code), is_reported=False))


def _ending(code: int) -> str:
    if code > 0:
        return f" ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f" was killed by {name}" + (" (the system does that when memory runs out)" if name == "SIGKILL" else "")


def _let_begin(crew: list[_Rank]) -> None:
    for member in crew:
        with contextlib.suppress(OSError):  # it has just died: the next look finds out
            member.line.send_bytes(b"begin")


def _stop(crew: list[_Rank], mercy: float, asked: list[int]) -> None:
    """Ends and reaps whoever still runs. Whoever asks once more is heard: a rank may then hurry."""
    deadline, heard = time.monotonic() + mercy, -1
    while running := [member for member in crew if member.process.poll() is None]:
        if time.monotonic() >= deadline:
            for member in running:
                member.process.kill()
                member.process.wait()
        elif len(asked) > heard:
            heard = len(asked)
            for member in running:
                member.process.terminate()
        else:
            time.sleep(PAUSE)


def _last_words(member: _Rank) -> str:
    """The end of what a rank wrote to standard error."""
    if member.stderr is None:
        return ""
    member.stderr.seek(0)
    lines = member.stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return "".join(f"\n  {text}" for text in lines)


def _close(crew: list[_Rank]) -> None:
    for member in crew:
        member.line.close()
        if member.stderr is not None:
            member.stderr.close()
