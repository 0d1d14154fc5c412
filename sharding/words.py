"""Words from rank 0 to the others where all are processes of one machine: bytes through a socket, without a meeting.

A collective of bytes has both sides wait for each other, and twice, since their number has to be told first. Every step
of a server begins with such words, while the device waits.
"""

import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

Tell = Callable[[bytes | None], bytes]  # a slow way to do the same: what rank 0 gives, on every rank
Agree = Callable[[bool], bool]  # whether all ranks say so


class Words:
    """This rank's ends of the connections: rank 0 has one to each of the others, which have one to it."""

    def __init__(self, ends: list[Connection], patience: timedelta) -> None:
        self._ends, self._patience = ends, patience

    def tell(self, data: bytes | None) -> bytes:
        """What rank 0 gives, on every rank; the others give None. Rank 0 does not wait for them.

        Raises EOFError or OSError if one of them is gone, TimeoutError if nothing comes for too long.
        """
        if data is not None:
            for end in self._ends:
                end.send_bytes(data)
            return data
        (end,) = self._ends
        if not end.poll(self._patience.total_seconds()):
            raise TimeoutError(f"nothing for {self._patience}")
        return end.recv_bytes()

    def close(self) -> None:
        """No words after this."""
        for end in self._ends:
            end.close()


def connected(rank: int, ranks: int, tell: Tell, agree: Agree, patience: timedelta) -> Words | None:
    """Connects all ranks, each of which calls it; None on every rank if they are not all on one machine.

    The socket lies in a folder that is its owner's alone, and gone once all are connected. Raises OSError if one does
    not come.
    """
    if rank:
        where = tell(None).decode()
        if not agree(bool(where) and Path(where).exists()):
            return None
        near = socket.socket(socket.AF_UNIX)
        near.connect(where)
        return Words([Connection(near.detach())], patience)
    with tempfile.TemporaryDirectory(prefix="muse-fn-") as folder, ExitStack() as stack:
        door = _door(stack, Path(folder) / "words")
        tell(str(Path(folder) / "words").encode() if door else b"")
        if not agree(door is not None) or door is None:
            return None
        door.settimeout(patience.total_seconds())
        ends = [door.accept()[0] for _ in range(ranks - 1)]
        for end in ends:
            end.setblocking(True)
        return Words([Connection(end.detach()) for end in ends], patience)


def _door(stack: ExitStack, path: Path) -> socket.socket | None:
    """A socket that listens there; None where there are none of this kind, or the path is too long for one."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    door = stack.enter_context(socket.socket(socket.AF_UNIX))
    try:
        door.bind(str(path))
    except OSError:
        return None
    door.listen(128)
    return door
