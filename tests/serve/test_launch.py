"""Ranks started and supervised: what they get, which failure is told, and that none of them is left."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muse_fn.serve import launch as launching
from muse_fn.serve import options
from muse_fn.serve.launch import Cause, first_cause, launch
from muse_fn.serve.member import RankError
from tests.processes import children, have_gone

PLACE = "import os, signal, sys, time, pathlib; rank = int(os.environ['RANK']); at = pathlib.Path(sys.argv[1])\n"
LINE = (
    PLACE + "from muse_fn.serve.member import line, tell\nfrom muse_fn.sharding.collectives import PeerError\nline()\n"
)
NOTE = (  # in one piece: others wait for the file and may read it, or end this rank, at once
    "note = at / f'{rank}.part'\n"
    "note.write_text(__import__('json').dumps(dict(os.environ, pid=str(os.getpid()))))\n"
    "note.rename(at / f'{rank}.json')\n"
)
TERM_IS_IGNORED = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
ALL_NOTED = "\nwhile len(list(at.glob('*.json'))) < int(os.environ['WORLD_SIZE']): time.sleep(0.01)\n"
SLEEP = "time.sleep(600)\n"


def start(program: str, folder: Path, ranks: int, quiet: bool = True) -> None:
    launch([sys.executable, "-c", program, str(folder)], ranks, quiet=quiet)


def notes(folder: Path) -> list[dict[str, str]]:
    """The environment and pid that each rank wrote down."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def test_each_rank_gets_its_place_and_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    start(PLACE + NOTE + "print('rank', rank); print('note', rank, file=sys.stderr)", tmp_path, 3)
    found = notes(tmp_path)
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in found] == [(str(r), str(r), "3") for r in range(3)]
    assert {e["MASTER_ADDR"] for e in found} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in found}) == 1
    assert {e["OMP_NUM_THREADS"] for e in found} == {str(max(1, len(os.sched_getaffinity(0)) // 3))}
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("rank 0\n", "note 0\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    start(PLACE + NOTE, tmp_path, 1)
    assert notes(tmp_path)[0]["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^rank 1 of 3 was killed by SIGKILL \(.*memory.*\)$"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"^rank 1 of 3 was killed by SIGSEGV$"),
        ("os.kill(os.getpid(), signal.SIGTERM)", r"^rank 1 of 3 was killed by SIGTERM$"),
        ("print('why', file=sys.stderr); os._exit(7)", r"^rank 1 of 3 ended with exit code 7\n  why$"),
        ("raise KeyError('x')", r"^rank 1 of 3 ended with exit code 1\n  Traceback(.|\n)*KeyError: 'x'$"),
    ],
)
def test_one_failed_rank_ends_all_and_is_named(tmp_path: Path, ending: str, told: str) -> None:
    program = (
        f"{PLACE}{TERM_IS_IGNORED if 'TERM' not in ending else ''}{NOTE}{ALL_NOTED}if rank == 1: {ending}\n{SLEEP}"
    )
    with pytest.raises(RankError, match=told):
        start(program, tmp_path, 3)
    assert have_gone([int(note["pid"]) for note in notes(tmp_path)])


def test_the_first_error_that_is_not_the_loss_of_a_peer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 loses a peer and ends before rank 2 has said why."""
    monkeypatch.setattr(launching, "GRACE", 600.0)
    lost = "if rank == 0: tell(PeerError('lost rank 2')); (at / 'lost').touch(); sys.exit(1)\n"
    wait = "while not (at / 'lost').exists(): time.sleep(0.01)\n"
    cause = f"if rank == 2:\n    {wait}    tell(OSError('cannot read model.safetensors')); sys.exit(1)\n"
    with pytest.raises(RankError, match=r"^rank 2 of 3: cannot read model.safetensors$"):
        start(LINE + NOTE + lost + cause + SLEEP, tmp_path, 3)
    assert have_gone([int(note["pid"]) for note in notes(tmp_path)])


def test_a_lost_peer_is_told_if_there_is_nothing_better(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2: lost the network$"):
        start(LINE + "if rank: tell(PeerError('lost the network')); sys.exit(1)\n" + SLEEP, tmp_path, 2)


def test_an_unforeseen_error_comes_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = LINE + "try: [][rank]\nexcept Exception as error: tell(error); sys.exit(1)"
    with pytest.raises(RankError, match=r"^rank \d of 2: IndexError: list index out of range$"):
        start(program, tmp_path, 2)
    assert capsys.readouterr().err.count("IndexError") == 1


def test_ranks_begin_together_and_the_loading_of_each_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(options, "err", Console(file=screen, force_terminal=True, width=120))
    load = "for n in range(3): line().progress(n, 2, f'layers.{n}.attn.q')\n"
    begin = "line().loaded()\nassert len(list(at.glob('*.json'))) == 3\n"
    start(LINE + load + NOTE + begin, tmp_path, 3, quiet=False)
    for rank in range(3):
        assert f"rank {rank} layers.2.attn.q" in screen.getvalue()
    assert len(notes(tmp_path)) == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["KILL", "INT", "TERM"]
)
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals, code: int) -> None:
    rank = LINE + TERM_IS_IGNORED + NOTE + SLEEP
    # Whoever runs the tests in the background may ignore Ctrl-C, and the launcher would inherit and respect that.
    heeded = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    launch = f"from muse_fn.serve.launch import launch\nlaunch([sys.executable, '-c', {rank!r}, sys.argv[1]], 2)"
    command = [sys.executable, "-c", heeded + launch, str(tmp_path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while launcher.poll() is None and len(list(tmp_path.glob("*.json"))) < 2:
            time.sleep(0.01)
        started = children(launcher.pid)
        assert len(started) == 2
        if number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal
            os.killpg(launcher.pid, number)
        else:
            launcher.send_signal(number)
        _, told = launcher.communicate(timeout=120)
        assert (launcher.returncode, told) == (code, b"")
        assert have_gone(started)
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
@pytest.mark.parametrize("how", ["it is stopped", "it still imports"])
def test_a_rank_that_cannot_notice_does_not_outlive_a_killed_launcher(tmp_path: Path, how: str) -> None:
    rank = PLACE + NOTE + SLEEP  # has no line
    program = (
        f"import sys\nfrom muse_fn.serve.launch import launch\nlaunch([sys.executable, '-c', {rank!r}, sys.argv[1]], 2)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    started: list[int] = []
    try:
        while launcher.poll() is None and len(list(tmp_path.glob("*.json"))) < 2:
            time.sleep(0.01)
        started = children(launcher.pid)
        assert len(started) == 2
        if how == "it is stopped":
            os.kill(started[1], signal.SIGSTOP)
        launcher.kill()
        assert have_gone(started)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


CAUSES = st.builds(Cause, st.booleans(), st.floats(0, 9), st.integers(0, 7), st.text())


@given(st.lists(CAUSES, min_size=1))
def test_the_first_cause_is_the_earliest_of_the_best_kind(causes: list[Cause]) -> None:
    first = first_cause(causes)
    assert first in causes
    assert first.is_peer == all(cause.is_peer for cause in causes)
    assert all(first.time <= cause.time for cause in causes if cause.is_peer == first.is_peer)
