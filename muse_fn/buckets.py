"""Sizes that steps are captured for: a grid of numbers of rows and of table widths."""

from collections.abc import Iterable
from typing import NamedTuple


class Bucket(NamedTuple):
    """The size of a captured step; a smaller one is padded to it."""

    batch: int  # sequences
    columns: int  # blocks of each sequence's table

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.columns} columns"


class Piece(NamedTuple):
    """The size of a captured step that reads a piece of one prompt; a shorter one is padded to it."""

    tokens: int
    columns: int  # blocks of the sequence's table

    def __str__(self) -> str:
        return f"{self.tokens} tokens of a prompt, {self.columns} columns"


SHORTEST = 32  # tokens of a piece: fewer cost no less
SPARE = 1024  # tokens of padding that cost a device no more than a host needs to launch a step


def sizes(maximum: int, thinning: int = 1) -> tuple[int, ...]:
    """The maximum and powers of two below it, ascending: every `thinning`-th of them, from the largest down."""
    powers = [1 << n for n in range((maximum - 1).bit_length())]
    return (*reversed(powers[::-1][thinning - 1 :: thinning]), maximum)


def buckets(max_batch: int, max_columns: int, most: int = 64) -> tuple[Bucket, ...]:
    """Every size of batch with every width of table, largest first, so that each finds its memory in the one before.

    Powers of two and the maximum; if those are more than `most`, widths are thinned out until they are not or only the
    largest is left: a table too wide costs its attention only, a batch too large its experts too. Raises ValueError
    for a maximum below 1.
    """
    problems = [
        f"{name} is {value}: must be at least 1"
        for name, value in (("max_batch", max_batch), ("max_columns", max_columns), ("most", most))
        if value < 1
    ]
    if problems:
        raise ValueError("\n".join(problems))
    batches, thinning = sizes(max_batch), 1
    while len(batches) * len(widths := sizes(max_columns, thinning)) > most and len(widths) > 1:
        thinning += 1
    return tuple(Bucket(b, c) for b in reversed(batches) for c in reversed(widths))


def smallest(among: Iterable[Bucket], batch: int, columns: int) -> Bucket:
    """The bucket with the least work that holds this size. Raises ValueError if none does."""
    known = list(among)
    fitting = [b for b in known if b.batch >= batch and b.columns >= columns]
    if not fitting:
        largest = max(known, default=None)
        raise ValueError(f"{Bucket(batch, columns)} fits no captured step: the largest is {largest}")
    return min(fitting, key=lambda b: (b.batch * b.columns, b.batch))


def pieces(chunk: int, max_columns: int, block_size: int, most: int = 32) -> tuple[Piece, ...]:
    """Lengths of up to `chunk` tokens, powers of two and the chunk, with every width of table that holds them, largest
    first.

    Widths are thinned out until all are no more than `most` or only the largest is left. Raises ValueError for a
    maximum below 1.
    """
    problems = [
        f"{name} is {value}: must be at least 1"
        for name, value in (("chunk", chunk), ("max_columns", max_columns), ("block_size", block_size), ("most", most))
        if value < 1
    ]
    if problems:
        raise ValueError("\n".join(problems))
    lengths, thinning = [n for n in sizes(chunk) if n >= min(SHORTEST, chunk, max_columns * block_size)], 1
    while len(found := _holding(lengths, sizes(max_columns, thinning), block_size)) > most:
        if len(sizes(max_columns, thinning)) == 1:
            break
        thinning += 1
    return found


def _holding(lengths: list[int], widths: tuple[int, ...], block_size: int) -> tuple[Piece, ...]:
    holds = [Piece(n, c) for n in reversed(lengths) for c in reversed(widths) if n <= c * block_size]
    return tuple(holds)


def piece_for(among: Iterable[Piece], tokens: int, columns: int) -> Piece | None:
    """The piece with the least padding that holds so many tokens and blocks; None if none does without too much."""
    fitting = [p for p in among if p.tokens >= tokens and p.columns >= columns]
    best = min(fitting, default=None)
    return best if best is not None and best.tokens - tokens <= SPARE else None
