"""Who holds which block of the cache, as a value: every event is a function of the pool that returns the next pool.

A pool hands out the blocks 1..num_blocks-1; block 0 belongs to nobody. A sequence has one table per window group, and
entry c of it is the block with the positions c*block_size and following in that group's layers, 0 where it was given up
or never needed. All groups draw on the same free blocks. There is no clock and no chance in here, so every rank of a
mesh keeps its own copy by the same events. The life of a sequence:

    admit -> (extend -> the model writes -> fill -> push)* -> finish, or discard if what it wrote is not to be trusted

Every block but 0 is free, cached (in the prefix index, held by no sequence) or used (in the tables of one sequence or
several). It is shared only after it was filled. When free blocks run out, cached ones are taken, the least recently
used first; of one sequence those of its end first, since its beginning serves more others. To preempt a sequence,
finish it and admit its tokens again later: what is left of its blocks is found by their content.

An event that fails raises or says so, and the pool that it was given is still there, unchanged.
"""

from __future__ import annotations  # the maps of rpds take type arguments only on paper

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rpds import HashTrieMap

from muse_fn.kvcache.ints import EMPTY, Ints, append, pack, part, shorten, size, to_numpy, unpack, write
from muse_fn.kvcache.prefix import NO_SALT, ROOT, Index, Salts, by_block, enter, find, first_seen, forget, leave, stand

Name: TypeAlias = Hashable
Tokens: TypeAlias = Sequence[int] | NDArray[Any]
TICKS = 2**31 - 1  # ticks go round, in 1..TICKS; what is old enough to meet them again was tidied away long before
SLACK = 1024  # stale entries of `Pool.left` beyond as many as there are cached blocks, until it is tidied
MUTE = -1  # in place of a node: what this sequence fills does not enter the index


class Block(NamedTuple):
    """A block that is not free."""

    holders: int  # sequences whose table has it
    group: int
    writer: Name  # the sequence that it was given to
    node: int = ROOT  # of the index; ROOT: not in it
    since: int = 0  # the tick at which the last holder left, from when on it is cached; 0 while held


class Row(NamedTuple):
    """A sequence in flight."""

    tokens: Ints
    salts: Salts
    tables: tuple[Ints, ...]  # of each group, all of the same length
    lows: tuple[int, ...]  # of each group: entries below are given up
    filled: int  # positions that the model has written
    node: int  # where its filled blocks end in the index, or MUTE


class Counts(NamedTuple):
    """Totals since the pool was made."""

    asked: int = 0  # tokens of admitted sequences
    hit: int = 0  # those of them found in the index
    evicted: int = 0  # cached blocks that were taken for new content


class Pool(NamedTuple):
    """The whole state. Equal events in equal order make equal pools."""

    num_blocks: int
    block_size: int
    windows: tuple[int, ...]  # of each group, in tokens; 0: it keeps everything
    free: Ints  # a stack
    blocks: HashTrieMap[int, Block]  # those that are not free
    cached: int  # how many of these no sequence holds
    left: Ints  # block, tick, block, tick ... as last holders left; stale where the block says otherwise
    past: int  # entries of it that are done with
    tick: int
    rows: HashTrieMap[Name, Row]
    prefixes: Index
    counts: Counts


class NoRoom(NamedTuple):
    """An event that could not happen, and how many more blocks would have to be free for it."""

    missing: int


class Stats(NamedTuple):
    """A pool in numbers. Block 0 is in none of them."""

    free: int
    cached: int
    used: int
    counts: Counts


def new_pool(num_blocks: int, block_size: int, windows: Sequence[int]) -> Pool:
    """All blocks free. Raises ValueError with every argument that is out of range."""
    wrong = [
        f"{name} is {value}, not at least {least}"
        for name, value, least in (
            ("num_blocks", num_blocks, 2),
            ("block_size", block_size, 1),
            ("groups", len(windows), 1),
        )
        if value < least
    ] + [
        f"the window of group {group} is {window}, not at least 0" for group, window in enumerate(windows) if window < 0
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    free = append(EMPTY, pack(np.arange(num_blocks - 1, 0, -1)))
    nothing: HashTrieMap[Any, Any] = HashTrieMap({})
    return Pool(num_blocks, block_size, tuple(windows), free, nothing, 0, EMPTY, 0, 1, nothing, Index(), Counts())


def admit(
    pool: Pool,
    name: Name,
    tokens: Tokens,
    salts: Iterable[tuple[str, str | bytes] | tuple[str, str | bytes, int]] = (),
    *,
    reuse: bool = True,
) -> tuple[Pool, int]:
    """A sequence begins with these tokens; returns how many of them the cache already holds.

    That many are filled: whole blocks, never all tokens, since the last one is to be computed. Salts are what the keys
    and values depend on besides tokens, (kind, value) or (kind, value, position from which on); sequences share blocks
    only up to where both tokens and salts are equal. Without `reuse` nothing is looked up. Gives no new blocks.
    Raises ValueError for no tokens, tokens that are not of 32 bits, a malformed salt, or a name in use.
    """
    if name in pool.rows:
        raise ValueError(f"sequence {name!r} is in the pool already")
    if len(tokens) == 0:
        raise ValueError(f"sequence {name!r} has no tokens; at least 1 is needed")
    content, at = append(EMPTY, pack(tokens)), by_block(salts, pool.block_size)
    limit = (len(tokens) - 1) // pool.block_size if reuse else 0
    hit = find(pool.prefixes, content, at, limit, pool.windows, pool.block_size)
    lows = tuple(hit.depth - len(blocks) for blocks in hit.blocks)
    tables = tuple(append(EMPTY, pack([0] * low + [*blocks])) for low, blocks in zip(lows, hit.blocks, strict=True))
    found = hit.depth * pool.block_size
    asked, known, evicted = pool.counts
    pool = _hold(pool, [*chain.from_iterable(hit.blocks)])
    return pool._replace(
        rows=pool.rows.insert(name, Row(content, at, tables, lows, found, hit.node)),
        prefixes=stand(pool.prefixes, hit.node),
        counts=Counts(asked + len(tokens), known + found, evicted),
    ), found


def push(pool: Pool, name: Name, tokens: Tokens) -> Pool:
    """More tokens at the end of a sequence, such as those it generated; their positions are not filled yet."""
    row = _row(pool, name)
    return _put(pool, name, row._replace(tokens=append(row.tokens, pack(tokens))))


def extend(pool: Pool, name: Name, positions: int) -> Pool | NoRoom:
    """The sequence gets blocks in every group until its tables hold this many positions."""
    row = _row(pool, name)
    more = -(-positions // pool.block_size) - size(row.tables[0])
    return _give(pool, name, row, [more] * len(pool.windows)) if more > 0 else pool


def restore(
    pool: Pool,
    name: Name,
    tokens: Tokens,
    salts: Iterable[tuple[str, str | bytes] | tuple[str, str | bytes, int]] = (),
) -> Pool | NoRoom:
    """A sequence is back all of whose tokens were filled before, with blocks of its own for what it still sees of them.

    The caller writes their content before anything else happens. A sliding group gets none for what has left its
    window, so a sequence that fitted while it was read fits again. Raises ValueError as `admit` does.
    """
    pool, _ = admit(pool, name, tokens, salts, reuse=False)
    lows = tuple([first_seen(window, len(tokens), pool.block_size) for window in pool.windows])
    row = pool.rows[name]._replace(tables=tuple(append(EMPTY, pack([0] * low)) for low in lows), lows=lows)
    wider = _give(pool, name, row, [-(-len(tokens) // pool.block_size) - low for low in lows])
    return wider if isinstance(wider, NoRoom) else fill(wider, name, len(tokens))


def fill(pool: Pool, name: Name, positions: int, keep: int = 0) -> Pool:
    """The model has written the positions below this one, by the sequence's tokens.

    Blocks that became full enter the index, unless it has the same content already: then the older block stays there
    and the newer one is private. A sliding group gives up the blocks seen neither from position `positions` nor from
    the `keep` positions before it (for callers that may step back).
    Raises ValueError for positions without token or block, or fewer than were filled before.
    """
    row = _row(pool, name)
    held = min(size(row.tokens), size(row.tables[0]) * pool.block_size)
    if not row.filled <= positions <= held:
        raise ValueError(f"sequence {name!r} can fill {row.filled} to {held} positions, not {positions}")
    first, full = row.filled // pool.block_size, positions // pool.block_size
    if full > first and row.node != MUTE:
        pool, node = _index(pool, row, first, full)
        row = row._replace(node=node)
    query, firsts = max(0, positions - keep), zip(row.lows, pool.windows, strict=True)
    lows = tuple([max(low, first_seen(window, query, pool.block_size)) for low, window in firsts])
    tables, gone = row.tables, list[int]()
    if lows != row.lows:
        spans = [*zip(row.tables, row.lows, lows, strict=True)]
        gone = _last_first([unpack(part(table, low, high)) for table, low, high in spans])
        tables = tuple(write(table, low, pack([0] * (high - low))) for table, low, high in spans)
    return _put(_drop(pool, gone), name, Row(row.tokens, row.salts, tables, lows, positions, row.node))


def finish(pool: Pool, name: Name) -> Pool:
    """The sequence ends. Its blocks that are in the index stay as cache; those that nobody else has become free."""
    row = _row(pool, name)
    held = [unpack(part(table, low, size(table))) for table, low in zip(row.tables, row.lows, strict=True)]
    pool = _drop(pool._replace(rows=pool.rows.remove(name)), _last_first(held))
    return pool if row.node == MUTE else pool._replace(prefixes=leave(pool.prefixes, row.node))


def discard(pool: Pool, name: Name) -> Pool:
    """The sequence ends, and nothing that was written under its name is found again.

    That holds for its earlier lives too, if it was preempted. Sequences that share its blocks keep them. Looks at every
    block of the pool.
    """
    wrote = sorted(block for block, record in pool.blocks.items() if record.writer == name and record.node)
    return finish(_unlist(pool, wrote), name)


def clear(pool: Pool) -> Pool:
    """Nothing that was written so far is found again, nor what sequences in flight go on to write."""
    pool = _unlist(pool, sorted(block for block, record in pool.blocks.items() if record.node))
    rows = HashTrieMap({name: row._replace(node=MUTE) for name, row in pool.rows.items()})
    return pool._replace(rows=rows, prefixes=pool.prefixes._replace(nodes=HashTrieMap({}), children=HashTrieMap({})))


def resize(pool: Pool, num_blocks: int) -> Pool | NoRoom:
    """The pool with this many blocks, block 0 included. Those that fall away must be free: see `clear`."""
    if num_blocks < 2:
        raise ValueError(f"num_blocks is {num_blocks}, not at least 2")
    free = to_numpy(pool.free)
    kept = free[free < num_blocks]
    missing = pool.num_blocks - num_blocks - (len(free) - len(kept))
    if num_blocks < pool.num_blocks and missing:
        return NoRoom(missing)
    new = np.arange(num_blocks - 1, pool.num_blocks - 1, -1)
    return pool._replace(num_blocks=num_blocks, free=append(EMPTY, pack(np.concatenate((new, kept)))))


def table(pool: Pool, name: Name) -> NDArray[np.int64]:
    """int64 [G, N]: the tables of a sequence, a fresh array."""
    return np.stack([to_numpy(each) for each in _row(pool, name).tables])


def stats(pool: Pool) -> Stats:
    """How many blocks are in which state, and the totals."""
    free = size(pool.free)
    return Stats(free, pool.cached, pool.num_blocks - 1 - free - pool.cached, pool.counts)


def _row(pool: Pool, name: Name) -> Row:
    row = pool.rows.get(name)
    if row is None:
        raise ValueError(f"sequence {name!r} is not in the pool")
    return row


def _put(pool: Pool, name: Name, row: Row) -> Pool:
    return pool._replace(rows=pool.rows.insert(name, row))


def _give(pool: Pool, name: Name, row: Row, wanted: list[int]) -> Pool | NoRoom:
    """The row in the pool, with so many new blocks at the end of each group's table."""
    missing = sum(wanted) - size(pool.free) - pool.cached
    if missing > 0:
        return NoRoom(missing)
    pool, given = _take(pool, sum(wanted))
    shares = [given[end - count : end] for count, end in zip(wanted, accumulate(wanted), strict=True)]
    new = {block: Block(1, group, name) for group, share in enumerate(shares) for block in share}
    tables = tuple(append(table, pack(share)) for table, share in zip(row.tables, shares, strict=True))
    return _put(pool, name, row._replace(tables=tables))._replace(blocks=pool.blocks.update(new))


def _last_first(held: list[list[int]]) -> list[int]:
    """Blocks of all groups, from the ends of their lists to the beginnings."""
    longest = max(map(len, held))
    return [blocks[~back] for back in range(longest) for blocks in held if back < len(blocks)]


def _index(pool: Pool, row: Row, first: int, full: int) -> tuple[Pool, int]:
    """The pool with the row's blocks first..full-1 in the index, and the node at which they end."""
    prefixes, node, changed = pool.prefixes, row.node, dict[int, Block]()
    held = [unpack(part(table, first, full)) for table in row.tables]
    for number, blocks in enumerate(zip(*held, strict=True), first):
        content = part(row.tokens, number * pool.block_size, (number + 1) * pool.block_size)
        prefixes, node, taken = enter(prefixes, node, content, row.salts.get(number, NO_SALT), blocks)
        for group in taken:
            old = pool.blocks[blocks[group]]
            changed[blocks[group]] = Block(old.holders, group, old.writer, node)
    return pool._replace(prefixes=prefixes, blocks=pool.blocks.update(changed)), node


def _hold(pool: Pool, blocks: list[int]) -> Pool:
    """One holder more for each block."""
    changed, cached = dict[int, Block](), pool.cached
    for block in blocks:
        holders, group, writer, node, _ = pool.blocks[block]
        changed[block] = Block(holders + 1, group, writer, node)
        cached -= not holders
    return pool._replace(blocks=pool.blocks.update(changed), cached=cached)


def _drop(pool: Pool, blocks: list[int]) -> Pool:
    """One holder less for each block; without holders it is cached from now on, or free."""
    if not blocks:
        return pool
    changed, tick, left, gone = dict[int, Block](), pool.tick, list[int](), list[int]()
    for block in blocks:
        holders, group, writer, node, _ = pool.blocks[block]
        if holders > 1:
            changed[block] = Block(holders - 1, group, writer, node)
        elif node:
            changed[block] = Block(0, group, writer, node, tick)
            left += (block, tick)
            tick = tick % TICKS + 1
        else:
            gone.append(block)
    return _tidy(
        pool._replace(
            free=append(pool.free, pack(gone)),
            blocks=_without(pool.blocks.update(changed), gone),
            cached=pool.cached + len(left) // 2,
            left=append(pool.left, pack(left)),
            tick=tick,
        )
    )


def _tidy(pool: Pool) -> Pool:
    """The pool without stale entries of `left`, if they are the most of it: so none has to be passed over often."""
    entries = size(pool.left) // 2
    if entries - pool.past <= 2 * pool.cached + SLACK and pool.past <= entries // 2 + SLACK:
        return pool
    flat = unpack(part(pool.left, 2 * pool.past, 2 * entries))
    kept = [pair for pair in zip(flat[::2], flat[1::2], strict=True) if _is_cached(pool.blocks, *pair)]
    return pool._replace(left=append(EMPTY, pack([*chain.from_iterable(kept)])), past=0)


def _is_cached(blocks: HashTrieMap[int, Block], block: int, tick: int) -> bool:
    """Whether the block is cached since that tick."""
    record = blocks.get(block)
    return record is not None and record.since == tick


def _without(blocks: HashTrieMap[int, Block], gone: list[int]) -> HashTrieMap[int, Block]:
    for block in gone:
        blocks = blocks.remove(block)
    return blocks


def _take(pool: Pool, wanted: int) -> tuple[Pool, list[int]]:
    """As many blocks, no longer anybody's: free ones, then the longest cached. There must be enough."""
    rest = max(0, size(pool.free) - wanted)
    given, evicted = unpack(part(pool.free, rest, size(pool.free)))[::-1], list[int]()
    past, prefixes = pool.past, pool.prefixes
    while len(given) + len(evicted) < wanted:
        block, tick = unpack(part(pool.left, 2 * past, 2 * past + 2))
        if _is_cached(pool.blocks, block, tick):
            prefixes = forget(prefixes, pool.blocks[block].node, pool.blocks[block].group)
            evicted.append(block)
        past += 1
    asked, hit, before = pool.counts
    return pool._replace(
        free=shorten(pool.free, rest),
        blocks=_without(pool.blocks, evicted),
        cached=pool.cached - len(evicted),
        past=past,
        prefixes=prefixes,
        counts=Counts(asked, hit, before + len(evicted)),
    ), given + evicted


def _unlist(pool: Pool, blocks: list[int]) -> Pool:
    """Blocks leave the index; those that no sequence holds become free."""
    changed, prefixes, gone = dict[int, Block](), pool.prefixes, list[int]()
    for block in blocks:
        holders, group, writer, node, _ = pool.blocks[block]
        prefixes = forget(prefixes, node, group)
        if holders:
            changed[block] = Block(holders, group, writer)
        else:
            gone.append(block)
    return pool._replace(
        free=append(pool.free, pack(gone)),
        blocks=_without(pool.blocks.update(changed), gone),
        cached=pool.cached - len(gone),
        prefixes=prefixes,
    )
