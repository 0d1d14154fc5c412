"""Processes by their numbers: whose they are, and whether they are gone."""

import time
from pathlib import Path

PATIENCE = 10.0  # seconds that a mesh may take to end; none of its processes may be left then


def children(pid: int) -> list[int]:
    """The processes that this one started and that are not reaped yet."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def have_gone(pids: list[int], patience: float = PATIENCE) -> bool:
    """Whether all of them end in time; one that has ended and is yet to be reaped has gone."""
    until = time.monotonic() + patience
    while any(map(_runs, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
