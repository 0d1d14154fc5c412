"""Long sequences of 32-bit integers as values: changing a few of a million entries copies kilobytes, not megabytes.

The entries lie in chunks of bytes. All chunks but the last are full; the last is kept apart, so that appending to it
does not copy the list of the others. Two sequences with the same entries are equal.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH = 4  # bytes of an entry
CHUNK = 1024 * WIDTH


class Ints(NamedTuple):
    """A sequence of integers, each in machine byte order."""

    full: tuple[bytes, ...] = ()  # CHUNK bytes each
    tail: bytes = b""  # fewer than CHUNK


EMPTY = Ints()


def pack(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Integers as bytes. Raises ValueError for what is not one row of whole numbers of 32 bits with sign."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"one row of whole numbers is needed, not {values.dtype} of shape {values.shape}")
        limits = np.iinfo(np.int32)
        if len(values) and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise ValueError(f"whole numbers of 32 bits are needed, not {values.min()} to {values.max()}")
        return values.astype(np.int32).tobytes()
    try:
        return array("i", values).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"one row of whole numbers of 32 bits is needed: {error}") from None


def unpack(data: bytes) -> list[int]:
    """The integers that `pack` made into these bytes."""
    return memoryview(data).cast("i").tolist()


def size(ints: Ints) -> int:
    """How many entries there are."""
    return (len(ints.full) * CHUNK + len(ints.tail)) // WIDTH


def append(ints: Ints, data: bytes) -> Ints:
    """The sequence with packed entries added at its end."""
    tail = ints.tail + data
    if len(tail) < CHUNK:
        return Ints(ints.full, tail)
    even = len(tail) // CHUNK * CHUNK
    return Ints(ints.full + tuple(tail[at : at + CHUNK] for at in range(0, even, CHUNK)), tail[even:])


def part(ints: Ints, start: int, stop: int) -> bytes:
    """The packed entries start..stop-1, all of which must exist."""
    low, high = start * WIDTH, stop * WIDTH
    first, last = low // CHUNK, high // CHUNK
    offset = first * CHUNK
    if first == last:
        chunk = ints.full[first] if first < len(ints.full) else ints.tail
        return chunk[low - offset : high - offset]
    chunks = ints.full[first : last + 1]
    # The last chunk of the range is the tail, unless the range ends inside of a full one or exactly at its end.
    joined = b"".join((*chunks, ints.tail) if last == len(ints.full) else chunks)
    return joined[low - offset : high - offset]


def shorten(ints: Ints, length: int) -> Ints:
    """The first `length` entries."""
    whole = length * WIDTH // CHUNK
    return Ints(ints.full[:whole], part(ints, whole * CHUNK // WIDTH, length))


def write(ints: Ints, at: int, data: bytes) -> Ints:
    """The sequence with packed entries in place of those from entry `at` on; it must be long enough."""
    first, last = at * WIDTH // CHUNK, -(-(at * WIDTH + len(data)) // CHUNK)
    start, stop = first * CHUNK // WIDTH, min(last * CHUNK // WIDTH, size(ints))
    middle = part(ints, start, at) + data + part(ints, at + len(data) // WIDTH, stop)
    changed = append(Ints(ints.full[:first]), middle)
    return Ints(changed.full + ints.full[last:], ints.tail if last <= len(ints.full) else changed.tail)


def to_numpy(ints: Ints) -> NDArray[np.int64]:
    """int64 [size]: a fresh array of the entries."""
    return np.frombuffer(b"".join((*ints.full, ints.tail)), np.int32).astype(np.int64)
