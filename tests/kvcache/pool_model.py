"""A pool of blocks beside a plain model of it: the arena as a dictionary of what was written where.

The model knows every token, copies everything and looks at everything, and shares no code with the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from muse_fn.kvcache import blocks
from muse_fn.kvcache.blocks import NoRoom, Pool
from muse_fn.kvcache.integrity import check_integrity

Salted = tuple[tuple[Any, ...], ...]
Content = tuple[int, tuple[int, ...], frozenset[tuple[Any, ...]]]  # group, all tokens so far, salts so far
T = TypeVar("T")


@dataclass
class Life:
    """A sequence in flight as the model knows it."""

    tokens: list[int]
    salts: frozenset[tuple[Any, ...]]  # (kind, value, position)
    mute: bool = False  # nothing more of it enters the index


class Beside:
    """Does every event on the pool and on the model and compares."""

    def __init__(self, num_blocks: int, block_size: int, windows: list[int]) -> None:
        self.pool = blocks.new_pool(num_blocks, block_size, windows)
        self.width, self.windows = block_size, windows
        self.lives: dict[int, Life] = {}
        self.cells: dict[tuple[int, int], tuple[Content, int]] = {}  # block, offset -> content, who wrote it
        self.index: dict[Content, int] = {}
        self.writer: dict[int, int] = {}  # of indexed blocks
        self.left: dict[int, int] = {}  # block -> the event in which its last holder left
        self.untrusted: set[int] = set()
        self.events: list[Callable[[Pool], Any]] = []
        self.asked = self.found = self.evicted = 0

    def event(self, change: Callable[[Pool], T]) -> T:
        """The result of an event. The pool that it was given is as it was, and the same event gives the same again."""
        before, shown = self.pool, picture(self.pool)
        result = change(before)
        assert picture(before) == shown
        assert change(before) == result
        self.events.append(change)
        return result

    def truth(self, name: int, group: int, position: int) -> Content:
        life = self.lives[name]
        salts = frozenset(salt for salt in life.salts if salt[2] <= position)
        return group, tuple(life.tokens[: position + 1]), salts

    def seen(self, group: int, query: int) -> range:
        """The positions that the query at this one sees."""
        window = self.windows[group]
        return range(max(0, query - window + 1) if window else 0, query + 1)

    def admit(self, name: int, tokens: list[int], salts: Salted, reuse: bool) -> None:
        self.pool, cached = self.event(lambda pool: blocks.admit(pool, name, tokens, salts, reuse=reuse))
        self.lives[name] = Life(list(tokens), frozenset((*salt, 0)[:3] for salt in salts))
        fits = [d for d in range((len(tokens) - 1) // self.width + 1) if self.usable(name, d)] if reuse else [0]
        assert cached == max(fits) * self.width
        assert cached < len(tokens)
        for group, table in enumerate(self.tables(name)):
            low = self.seen(group, cached)[0] // self.width
            hits = [self.index[self.truth(name, group, (c + 1) * self.width - 1)] for c in range(low, max(fits))]
            assert table == [0] * low + hits
            assert not self.untrusted & {self.cells[block, offset][1] for block in hits for offset in range(self.width)}
        self.asked, self.found = self.asked + len(tokens), self.found + cached

    def usable(self, name: int, depth: int) -> bool:
        needs = [
            (group, c)
            for group in range(len(self.windows))
            for c in range(self.seen(group, depth * self.width)[0] // self.width, depth)
        ]
        return all(self.truth(name, group, (c + 1) * self.width - 1) in self.index for group, c in needs)

    def extend(self, name: int, positions: int) -> bool:
        more = max(0, -(-positions // self.width) - len(self.tables(name)[0])) * len(self.windows)
        missing = more - (self.pool.num_blocks - 1 - len(self.used()))
        old, free = self.tables(name), self.free()
        result = self.event(lambda pool: blocks.extend(pool, name, positions))
        if missing > 0:
            assert result == NoRoom(missing)
            return False
        assert isinstance(result, Pool)
        self.pool = result
        new = {block for row, before in zip(self.tables(name), old, strict=True) for block in row[len(before) :]}
        assert len(new) == more
        self.take(new, free)
        return True

    def take(self, new: set[int], free: set[int]) -> None:
        """Blocks were given: free ones as long as there were any, then those that were left the longest ago."""
        taken = {block: self.left[block] for block in new if block in self.index.values()}
        assert new - {*taken} <= free
        assert not taken or free <= new
        self.index = {content: block for content, block in self.index.items() if block not in taken}
        rest = {*self.index.values()} - self.used()
        assert not taken or max(taken.values()) <= min((self.left[block] for block in rest), default=len(self.events))
        self.evicted += len(taken)

    def push(self, name: int, tokens: list[int]) -> None:
        self.pool = self.event(lambda pool: blocks.push(pool, name, tokens))
        self.lives[name].tokens.extend(tokens)

    def step(self, name: int, count: int, keep: int) -> None:
        """The model writes `count` positions and every query looks at all it should see; then they are filled."""
        start = self.pool.rows[name].filled
        stop = min(start + count, len(self.lives[name].tokens))
        if not self.extend(name, stop):
            return
        for group, table in enumerate(self.tables(name)):
            for position in range(start, stop):
                place = table[position // self.width], position % self.width
                assert place[0] != 0
                self.cells[place] = self.truth(name, group, position), name
        for query in range(start, stop):
            self.look(name, query, query + 1)
        held, tables = self.used(), self.tables(name)
        self.pool = self.event(lambda pool: blocks.fill(pool, name, stop, keep))
        for group, (old, new) in enumerate(zip(tables, self.tables(name), strict=True)):
            low = max(old.count(0), self.seen(group, max(0, stop - keep))[0] // self.width)
            assert new == [0] * low + old[low:]
        if not self.lives[name].mute:
            self.enter(name, tables, range(start // self.width, stop // self.width))
        self.leave(held)

    def restore(self, name: int) -> None:
        """The sequence leaves with what it sees, and is back at once where it was if there is room, without the rest of
        its tokens."""
        life, filled = self.lives[name], self.pool.rows[name].filled
        if life.mute or not filled:
            return
        self.finish(name)
        lows = [self.seen(group, filled)[0] // self.width for group in range(len(self.windows))]
        needed = sum(-(-filled // self.width) - low for low in lows)
        missing = needed - (self.pool.num_blocks - 1 - len(self.used()))
        tokens, free = life.tokens[:filled], self.free()
        result = self.event(lambda pool: blocks.restore(pool, name, tokens, tuple(life.salts)))
        if missing > 0:
            assert result == NoRoom(missing)
            return
        assert isinstance(result, Pool)
        self.pool, self.lives[name], self.asked = result, Life([*tokens], life.salts), self.asked + filled
        tables = self.tables(name)
        assert [table.count(0) for table in tables] == lows
        self.take({block for table in tables for block in table if block}, free)
        for group, table in enumerate(tables):
            for position in range(lows[group] * self.width, filled):
                self.cells[table[position // self.width], position % self.width] = (
                    self.truth(name, group, position),
                    name,
                )
        self.enter(name, tables, range(filled // self.width))

    def look(self, name: int, query: int, written: int) -> None:
        """What the query at a position sees of the positions below `written` is what the sequence says."""
        for group, table in enumerate(self.tables(name)):
            for position in self.seen(group, query)[: written - query - 1 or None]:
                content, _ = self.cells[table[position // self.width], position % self.width]
                assert content == self.truth(name, group, position)

    def enter(self, name: int, tables: list[list[int]], numbers: range) -> None:
        """Blocks that became full are known from now on, unless the same content is."""
        for number in numbers:
            for group, table in enumerate(tables):
                content = self.truth(name, group, (number + 1) * self.width - 1)
                if table[number] and content not in self.index:
                    self.index[content] = table[number]
                    self.writer[table[number]] = name

    def leave(self, before: set[int]) -> None:
        self.left.update({block: len(self.events) for block in before - self.used()})

    def finish(self, name: int, trusted: bool = True) -> None:
        before = self.used()
        if trusted:
            self.pool = self.event(lambda pool: blocks.finish(pool, name))
        else:
            self.pool = self.event(lambda pool: blocks.discard(pool, name))
            self.untrusted.add(name)
            self.index = {content: block for content, block in self.index.items() if self.writer[block] != name}
        del self.lives[name]
        self.leave(before)

    def clear(self) -> None:
        self.pool = self.event(blocks.clear)
        self.index = {}
        for life in self.lives.values():
            life.mute = True

    def resize(self, num_blocks: int) -> None:
        tail = set(range(num_blocks, self.pool.num_blocks))
        missing = len(tail - self.free())
        result = self.event(lambda pool: blocks.resize(pool, num_blocks))
        assert (result == NoRoom(missing)) == (missing > 0)
        if isinstance(result, Pool):
            self.pool = result

    def tables(self, name: int) -> list[list[int]]:
        return blocks.table(self.pool, name).tolist()

    def used(self) -> set[int]:
        return {block for name in self.lives for table in self.tables(name) for block in table if block}

    def free(self) -> set[int]:
        return set(range(1, self.pool.num_blocks)) - self.used() - {*self.index.values()}

    def check(self) -> None:
        """Everything that should hold between events."""
        check_integrity(self.pool)
        used, known = self.used(), {*self.index.values()}
        assert {*self.pool.rows} == {*self.lives}
        assert {*self.pool.blocks} == used | known
        assert blocks.stats(self.pool) == blocks.Stats(
            len(self.free()), len(known - used), len(used), blocks.Counts(self.asked, self.found, self.evicted)
        )
        for content, block in self.index.items():
            assert self.cells[block, self.width - 1][0] == content
            assert self.cells[block, self.width - 1][1] not in self.untrusted
        for name in self.lives:
            self.look(name, self.pool.rows[name].filled, self.pool.rows[name].filled)


def picture(pool: Pool) -> Any:
    """Everything that a pool shows, copied."""
    tables = {name: blocks.table(pool, name).tolist() for name in pool.rows}
    known = (dict(pool.blocks.items()), pool.left, dict(pool.prefixes.nodes.items()))
    return tables, known, pool.free, pool.num_blocks, blocks.stats(pool), dict(pool.rows.items())
