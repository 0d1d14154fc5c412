"""Words from rank 0 to the others where all are processes of one machine: bytes through a socket, without a meeting.

A collective of bytes has both sides wait for each other, and twice, since their number has to be told first. Every step
of a server begins with such words, while the device waits. Here rank 0 goes on at once; what it waits for is that the
words before have been heard, so that a rank that hangs is missed.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

Tell = Callable[[bytes | None], bytes]  # a slow way to do the same: what rank 0 gives, on every rank
Agree = Callable[[bool], bool]  # whether all ranks say so

SIZE = 8  # bytes that say how many follow
HEARD = b"\x06"


class Words:
    """This rank's ends of the connections: rank 0 has one to each of the others, which have one to it."""

    def __init__(self, ends: list[socket.socket], is_first: bool, patience: timedelta) -> None:
        self._ends, self._is_first, self._patience = ends, is_first, patience.total_seconds()
        self._told = False  # words that nobody has been asked about yet

    def tell(self, data: bytes | None) -> bytes:
        """What rank 0 gives, on every rank; the others give None.

        Raises EOFError or OSError if one of them is gone, or is not heard of for too long.
        """
        if not self._is_first:
            (end,) = self._ends
            deadline = time.monotonic() + self._patience
            words = _received(end, int.from_bytes(_received(end, SIZE, deadline)), deadline)
            with suppress(OSError):  # one byte always fits; where rank 0 has gone since, these words hold all the same
                end.sendall(HEARD)
            return words
        words, self._told, asks = data or b"", True, self._told
        for end in self._ends:
            if asks:
                _received(end, len(HEARD), time.monotonic() + self._patience)
            end.settimeout(self._patience)
            end.sendall(len(words).to_bytes(SIZE) + words)
        return words

    def close(self) -> None:
        """No words after this."""
        for end in self._ends:
            end.close()


def _received(end: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        end.settimeout(max(1e-3, deadline - time.monotonic()))
        more = end.recv(min(size - len(found), 1 << 20))
        if not more:
            raise EOFError
        found += more
    return bytes(found)


def connected(rank: int, ranks: int, tell: Tell, agree: Agree, patience: timedelta) -> Words | None:
    """Connects all ranks, each of which calls it; None on every rank if one of them cannot reach rank 0 so.

    The socket lies in a folder that is its owner's alone, and is gone once all are connected.
    """
    if rank:
        end = _reached(tell(None))
        if agree(end is not None) and end is not None:
            return Words([end], False, patience)
        if end is not None:
            end.close()
        return None
    with ExitStack() as stack:
        door, where = _door(stack, ranks)
        tell(where)
        if not agree(door is not None) or door is None:
            return None
        # They are all in the queue by now.
        return Words([door.accept()[0] for _ in range(ranks - 1)], True, patience)


def _door(stack: ExitStack, ranks: int) -> tuple[socket.socket | None, bytes]:
    """A socket that listens, and where; none if there is no such kind, no folder for it, or its path is too long."""
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="muse-fn-"))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        path = Path(folder) / "words"
        door.bind(os.fsencode(path))
        door.listen(ranks)
        door.settimeout(60.0)
    except (OSError, AttributeError):  # AttributeError: AF_UNIX is not everywhere
        return None, b""
    return door, os.fsencode(path)


def _reached(where: bytes) -> socket.socket | None:
    if not where:
        return None
    try:
        end = socket.socket(socket.AF_UNIX)
    except (OSError, AttributeError):
        return None
    try:
        end.settimeout(60.0)
        end.connect(where)
    except OSError:
        end.close()
        return None
    return end
