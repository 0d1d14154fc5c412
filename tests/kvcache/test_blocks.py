"""The allocator: random events beside a model that knows everything, then known accidents of caches one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muse_fn.kvcache import blocks, prefix
from muse_fn.kvcache.blocks import (
    NoRoom,
    Pool,
    admit,
    clear,
    discard,
    extend,
    fill,
    finish,
    new_pool,
    push,
    resize,
    table,
)
from muse_fn.kvcache.integrity import check_integrity
from tests.kvcache.pool_model import Beside, Salted, picture


def text_of(parts: tuple[int, list[int]]) -> list[int]:
    return [0] * parts[0] + parts[1]


def same(key: prefix.Key) -> int:
    return 1


SALTS: list[Salted] = [
    (),
    (("cache_salt", "X"),),
    (("adapter", "X"),),
    (("media", b"one", 3), ("adapter", "X")),
    (("media", b"two", 3), ("adapter", "X")),
]
# Few tokens and long runs of the same, so that beginnings often meet.
TEXTS = st.tuples(st.integers(0, 14), st.lists(st.integers(0, 1), max_size=5)).map(text_of).filter(bool)
PICK = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    """Random lives of several sequences in a small pool."""

    beside: Beside
    names = 0

    @initialize(
        num_blocks=st.integers(2, 25),
        width=st.integers(1, 5),
        windows=st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 7, 8, 11]), min_size=1, max_size=3).filter(
            lambda windows: {*windows} != {1}  # nothing is ever seen again: no block is needed for a hit
        ),
    )
    def begin(self, num_blocks: int, width: int, windows: list[int]) -> None:
        self.first = num_blocks, width, windows
        self.beside = Beside(num_blocks, width, windows)

    def pick(self, pick: int) -> int:
        return sorted(self.beside.lives)[pick % len(self.beside.lives)]

    def some(self) -> bool:
        return bool(self.beside.lives)

    @precondition(lambda self: len(self.beside.lives) < 5)
    @rule(tokens=TEXTS, salts=st.sampled_from([(), (), *SALTS]), reuse=st.sampled_from([True, True, True, False]))
    def admit(self, tokens: list[int], salts: Salted, reuse: bool) -> None:
        self.names += 1
        self.beside.admit(self.names, tokens, salts, reuse)

    @precondition(some)
    @rule(pick=PICK, positions=st.integers(0, 30))
    def extend(self, pick: int, positions: int) -> None:
        self.beside.extend(self.pick(pick), positions)

    @precondition(some)
    @rule(pick=PICK, count=st.integers(0, 20), keep=st.sampled_from([0, 0, 0, 1, 4]))
    def step(self, pick: int, count: int, keep: int) -> None:
        self.beside.step(self.pick(pick), count, keep)

    @precondition(some)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), max_size=3))
    def generate(self, pick: int, tokens: list[int]) -> None:
        name = self.pick(pick)
        self.beside.push(name, tokens)
        self.beside.step(name, 30, 0)

    @precondition(some)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        self.beside.finish(self.pick(pick))

    @precondition(some)
    @rule(pick=PICK)
    def preempt(self, pick: int) -> None:
        name = self.pick(pick)
        life = self.beside.lives[name]
        self.beside.finish(name)
        self.beside.admit(name, life.tokens, tuple(life.salts), True)

    @precondition(some)
    @rule(pick=PICK)
    def restore(self, pick: int) -> None:
        self.beside.restore(self.pick(pick))

    @precondition(some)
    @rule(pick=PICK)
    def discard(self, pick: int) -> None:
        self.beside.finish(self.pick(pick), trusted=False)

    @precondition(lambda self: len(self.beside.events) % 7 == 6)
    @rule()
    def clear(self) -> None:
        self.beside.clear()

    @rule(num_blocks=st.integers(2, 30))
    def resize(self, num_blocks: int) -> None:
        self.beside.resize(num_blocks)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "beside"):
            self.beside.check()

    def teardown(self) -> None:
        """The same events from the start make an equal pool."""
        if hasattr(self, "beside"):
            again = new_pool(*self.first)
            for event in self.beside.events:
                result = event(again)
                result = result[0] if isinstance(result, tuple) and not isinstance(result, (Pool, NoRoom)) else result
                again = result if isinstance(result, Pool) else again
            assert again == self.beside.pool
            assert picture(again) == picture(self.beside.pool)


class Colliding(Machine):
    """The same with all digests equal, ticks that soon go round, and tidying all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix, "digest", same)
        self.patch.setattr(blocks, "TICKS", 97)
        self.patch.setattr(blocks, "SLACK", 3)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestRandomEvents = Machine.TestCase
TestRandomEvents.settings = settings(max_examples=60, stateful_step_count=50)
TestAllDigestsEqual = Colliding.TestCase
TestAllDigestsEqual.settings = settings(max_examples=25, stateful_step_count=50)


def written(pool: Pool, name: Any, tokens: list[int], salts: Salted = (), chunk: int = 1000) -> tuple[Pool, int]:
    """A sequence admitted and its tokens filled chunk by chunk."""
    pool, cached = admit(pool, name, tokens, salts)
    for stop in [*range(cached + chunk, len(tokens), chunk), len(tokens)]:
        grown = extend(pool, name, stop)
        assert isinstance(grown, Pool)
        pool = fill(grown, name, stop)
        check_integrity(pool)
    return pool, cached


def served(pool: Pool, tokens: list[int], salts: Salted = ()) -> tuple[Pool, int]:
    pool, cached = written(pool, "served", tokens, salts)
    return finish(pool, "served"), cached


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8)])
def test_a_prompt_sent_twice_leaves_something_to_compute(length: int, cached: int) -> None:
    pool = new_pool(20, 4, [0])
    tokens = [*range(length)]
    pool, first = served(pool, tokens)
    pool, second = served(pool, tokens)
    assert (first, second) == (0, cached)
    assert blocks.stats(pool) == blocks.Stats(19 - length // 4, length // 4, 0, blocks.Counts(2 * length, cached, 0))


def test_equal_prompts_at_once_share_nothing_unfilled() -> None:
    pool, tokens = new_pool(20, 4, [0, 3]), [*range(8)]
    for name in range(4):
        pool, cached = admit(pool, name, tokens)
        assert cached == 0
    for stop in (3, 6, 8):
        for name in range(4):
            grown = extend(pool, name, stop)
            assert isinstance(grown, Pool)
            pool = fill(grown, name, stop)
            check_integrity(pool)
    held = [block for name in range(4) for block in table(pool, name)[0]]
    assert len({*held}) == 8
    for name in range(4):
        pool = finish(pool, name)
    assert blocks.stats(pool)[:3] == (19 - 4, 4, 0), "the oldest stay, the others were private"
    assert admit(pool, "late", tokens)[1] == 4


def test_a_filled_block_is_shared_while_its_writer_lives() -> None:
    pool, _ = written(new_pool(20, 4, [0]), "a", [*range(10)])
    pool, cached = admit(pool, "b", [*range(10)])
    assert cached == 8
    assert table(pool, "b")[0].tolist() == table(pool, "a")[0].tolist()[:2]


@pytest.mark.parametrize("constant", [False, True])
def test_kinds_salts_and_media_do_not_meet(constant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if constant:
        monkeypatch.setattr(prefix, "digest", same)
    pool, tokens = new_pool(60, 2, [0]), [1] * 9
    media = (("media", "cat", 4),), (("media", "dog", 4),)
    found: list[int] = []
    for salts in ((), (("cache_salt", "X"),), (("adapter", "X"),), *media, (("adapter", "X"), ("cache_salt", "X"))):
        pool, cold = served(pool, tokens, salts)
        pool, warm = served(pool, tokens, salts)
        assert warm == 8
        found.append(cold)
    assert found == [0, 0, 0, 4, 4, 0], "before a medium the text is the same"


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 128])
def test_exactly_at_the_window(width: int, window: int) -> None:
    for length in range(max(1, window - 3), window + 2 * width + 2):
        pool, _ = written(new_pool(400, width, [window]), "a", [*range(length)])
        row = table(pool, "a")[0].tolist()
        seen = {position // width for position in range(length + 1) if position > length - window}
        assert {c for c, block in enumerate(row) if block} == seen & {*range(len(row))}


def test_a_long_context_needs_little_for_sliding_groups() -> None:
    pool, _ = written(new_pool(130, 16, [0, 64, 64, 64]), "a", [*range(1600)], chunk=64)
    assert blocks.stats(pool).used == 100 + 3 * 4


def test_a_hit_needs_only_the_window() -> None:
    """The beginning of a sliding group is taken for others; its end still serves."""
    pool, text = new_pool(21, 2, [0, 4]), [*range(12)]
    pool, _ = served(pool, text)
    assert blocks.stats(pool)[:3] == (20 - 12, 12, 0)
    pool, _ = admit(pool, "b", [7] * 20)
    grown = extend(pool, "b", 10)
    assert isinstance(grown, Pool)
    assert blocks.stats(grown).counts.evicted == 2, "the sliding blocks that left the window first"
    longer, cached = admit(grown, "c", [*text, 5])
    assert cached == 12
    assert table(longer, "c")[1].tolist()[:4] == [0, 0, 0, 0]
    assert all(table(longer, "c")[1].tolist()[4:])


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    pool = new_pool(9, 2, [0])
    pool, _ = served(pool, [1] * 8)
    pool, _ = served(pool, [2] * 8)
    pool, cached = served(pool, [1] * 9)  # the older one is used again; its last block needs one more, from the other
    assert cached == 8
    assert blocks.stats(pool)[:2] == (1, 7)
    pool, _ = admit(pool, "new", [3] * 9)
    grown = extend(pool, "new", 8)
    assert isinstance(grown, Pool)
    assert admit(grown, "x", [2] * 9)[1] == 0
    assert admit(grown, "x", [1] * 9)[1] == 8
    grown = extend(grown, "new", 10)
    assert isinstance(grown, Pool)
    assert admit(grown, "x", [1] * 9)[1] == 6


def test_no_room_says_how_much_and_changes_nothing() -> None:
    pool, _ = written(new_pool(8, 2, [0, 3]), "a", [*range(4)])
    shown = picture(pool)
    assert blocks.stats(pool)[:3] == (3, 1, 3), "a block left the window and is cached"
    assert extend(pool, "a", 12) == NoRoom(2 * 4 - 3 - 1)
    assert picture(pool) == shown
    assert isinstance(extend(pool, "a", 6), Pool)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    pool, _ = written(new_pool(20, 4, [0, 6]), "a", [*range(10)])
    pool = push(pool, "a", [50, 51, 52])
    grown = extend(pool, "a", 13)
    assert isinstance(grown, Pool)
    pool = finish(fill(grown, "a", 13), "a")
    pool, cached = admit(pool, "a", [*range(10), 50, 51, 52])
    assert cached == 12


def test_what_was_discarded_is_never_found_again() -> None:
    tokens = [*range(16)]
    start, _ = served(new_pool(40, 4, [0, 6]), tokens[:8])
    pool, cached = written(start, "bad", tokens)
    assert cached == 8
    pool, cached = written(pool, "neighbour", [*tokens, 99])
    assert cached == 16
    before = table(pool, "neighbour").tolist()
    pool = discard(pool, "bad")
    check_integrity(pool)
    assert table(pool, "neighbour").tolist() == before
    assert admit(pool, "late", tokens)[1] == 8, "what others wrote stays"
    pool = finish(pool, "neighbour")
    check_integrity(pool)
    assert admit(pool, "late", tokens)[1] == 8
    pool, _ = served(pool, tokens)
    pool, cached = admit(pool, "late", [*tokens, 99])
    assert cached == 16, "written anew by another it is found"
    assert pool.blocks[int(table(pool, "late")[0, 3])].writer == "served"


def test_what_was_discarded_in_an_earlier_life_is_gone_too() -> None:
    pool, _ = written(new_pool(40, 4, [0]), "bad", [*range(9)])
    pool = finish(pool, "bad")
    pool, cached = written(pool, "bad", [*range(13)])
    assert cached == 8
    pool = discard(pool, "bad")
    assert blocks.stats(pool)[:3] == (39, 0, 0)
    assert not pool.prefixes.nodes


def test_clear_forgets_what_is_and_what_is_in_flight() -> None:
    pool, _ = served(new_pool(40, 4, [0]), [*range(9)])
    pool, _ = written(pool, "a", [*range(20)])
    pool = clear(pool)
    check_integrity(pool)
    pool = push(pool, "a", [1] * 9)
    grown = extend(pool, "a", 29)
    assert isinstance(grown, Pool)
    pool = fill(grown, "a", 29)
    check_integrity(pool)
    assert admit(pool, "b", [*range(20), *[1] * 9])[1] == 0
    assert blocks.stats(finish(pool, "a"))[:3] == (39, 0, 0)


def test_all_blocks_come_back() -> None:
    pool, _ = written(new_pool(30, 4, [0, 5, 5]), "a", [*range(22)], chunk=3)
    pool = clear(finish(pool, "a"))
    assert blocks.stats(pool)[:3] == (29, 0, 0)
    assert not pool.rows


def test_resize() -> None:
    pool, _ = written(new_pool(4, 2, [0]), "a", [*range(6)])
    assert isinstance(extend(pool, "a", 7), NoRoom)
    grown = resize(pool, 6)
    assert isinstance(grown, Pool)
    assert isinstance(extend(grown, "a", 10), Pool)
    assert resize(grown, 4) == pool
    assert resize(grown, 2) == NoRoom(2)
    with pytest.raises(ValueError, match="num_blocks is 1"):
        resize(pool, 1)


def test_what_changes_of_a_long_sequence_is_little() -> None:
    """A step shares the tokens and tables of the one before but for one chunk."""
    pool, _ = admit(new_pool(9000, 128, [0]), "a", np.arange(1_000_000))
    grown = extend(pool, "a", 1_000_000)
    assert isinstance(grown, Pool)
    pool = fill(grown, "a", 1_000_000)
    old = pool.rows["a"]
    grown = extend(push(pool, "a", [1]), "a", 1_000_001)
    assert isinstance(grown, Pool)
    new = fill(grown, "a", 1_000_001).rows["a"]
    assert new.tokens.full is old.tokens.full
    assert new.tables[0].full is old.tables[0].full


def test_arrays_are_tokens_too() -> None:
    pool, _ = served(new_pool(9, 2, [0]), [1, 2, 3, 4])
    assert admit(pool, "a", np.array([1, 2, 3, 4]))[1] == 2


def test_refusals() -> None:
    pool, _ = written(new_pool(9, 2, [0]), "a", [1, 2, 3])
    with pytest.raises(ValueError, match="sequence 'a' is in the pool already"):
        admit(pool, "a", [1])
    with pytest.raises(ValueError, match="sequence 'b' has no tokens"):
        admit(pool, "b", [])
    with pytest.raises(ValueError, match="a salt is"):
        admit(pool, "b", [1], [("x",)])  # pyright: ignore[reportArgumentType]
    for event in (lambda: push(pool, "b", [1]), lambda: extend(pool, "b", 1), lambda: fill(pool, "b", 0)):
        with pytest.raises(ValueError, match="sequence 'b' is not in the pool"):
            event()
    for event in (lambda: finish(pool, "b"), lambda: discard(pool, "b"), lambda: table(pool, "b")):
        with pytest.raises(ValueError, match="sequence 'b' is not in the pool"):
            event()
    for positions in (2, 4):
        with pytest.raises(ValueError, match=f"can fill 3 to 3 positions, not {positions}"):
            fill(pool, "a", positions)
    with pytest.raises(ValueError, match=r"num_blocks is 1.*block_size is 0.*window of group 1 is -1"):
        new_pool(1, 0, [0, -1])
    with pytest.raises(ValueError, match="groups is 0"):
        new_pool(2, 1, [])
