"""The scheduler without a model: every step reads what it must find in the blocks of its tables, whatever happens."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.kvcache.blocks import new_pool, stats
from muse_fn.kvcache.integrity import check_integrity
from muse_fn.serve.scheduler import Budget, Plan, Row, Share, State, Work, add, end, launch, plan, settle

BLOCK = 4
WINDOWS = (0, 6)


def drawn_after(tokens: Sequence[int]) -> int:
    """The token that this model draws after these: it depends on each of them."""
    return hash(tuple(tokens)) % 5


def solo(prompt: Sequence[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(drawn_after([*prompt, *made]))
    return made


class World:
    """What the blocks hold, and what each sequence has made: a model that remembers instead of computing."""

    def __init__(self, num_blocks: int) -> None:
        self.state = State(new_pool(num_blocks, BLOCK, WINDOWS))
        self.arena: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.made: dict[int, list[int]] = {}
        self.done: dict[int, list[int]] = {}
        self.reads: list[tuple[int, int]] = []  # tokens and cached, of each read

    def arrive(self, name: int, prompt: list[int], count: int, priority: int = 0, twin: int | None = None) -> None:
        self.prompts[name], self.limits[name], self.made[name] = prompt, count, []
        row = Row(name, np.array(prompt, np.int32), len(prompt) + count - 1, priority, twin=twin)
        self.state = add(self.state, row)

    def cancel(self, name: int) -> None:
        if name in self.prompts and name not in self.done:
            self.state = end(self.state, name)
            self.done[name] = self.made[name]

    def run(self, work: Work) -> dict[int, int]:
        """Checks and fills; returns what was drawn."""
        drawn: dict[int, int] = {}
        for share in (*work.reads, *work.decodes):
            if share.name in self.done:
                continue  # cancelled while it runs: its blocks are already somebody else's, who writes later
            text = [*self.prompts[share.name], *self.made[share.name]]
            assert list(share.tokens) == text[share.start : share.start + len(share.tokens)]
            self._read_and_write(share, text)
            if share.draws:
                assert share.start + len(share.tokens) == len(text)
                drawn[share.name] = drawn_after(text)
        return drawn

    def step_ahead(self, work: Work) -> None:
        """What a step that is launched before this one's tokens are known writes where it has blocks, for whoever will
        have ended too: nothing that anybody reads later."""
        for share in work.decodes:
            column, place = divmod(share.start + 1, BLOCK)
            for group, table in enumerate(share.table_GN):
                if column < len(table) and table[column] > 0:
                    self.arena[group, table[column], place] = (share.start + 1, -1)

    def _read_and_write(self, share: Share, text: list[int]) -> None:
        stop = share.start + len(share.tokens)
        for group, window in enumerate(WINDOWS):
            table = share.table_GN[group]
            for position in range(share.start, stop):
                assert table[position // BLOCK] > 0
                self.arena[group, table[position // BLOCK], position % BLOCK] = (
                    position,
                    hash(tuple(text[: position + 1])),
                )
            oldest = max(0, share.start - window + 1) if window else 0
            for position in range(oldest, stop):
                found = self.arena[group, table[position // BLOCK], position % BLOCK]
                assert found == (position, hash(tuple(text[: position + 1]))), (share.name, group, position)

    def take(self, work: Work, drawn: dict[int, int]) -> None:
        self.state = settle(self.state, work, drawn)
        for name, token in drawn.items():
            if name in self.done:
                continue
            self.made[name].append(token)
            if len(self.made[name]) == self.limits[name]:
                self.done[name] = self.made[name]
                self.state = end(self.state, name)


@settings(max_examples=40)
@given(
    st.integers(0, 10**9), st.integers(15, 40), st.integers(1, 6), st.integers(1, 12), st.sampled_from([0, 1, 5]),
    st.integers(0, 1),
)  # fmt: skip
def test_any_history_gives_everybody_what_they_would_get_alone(
    seed: int, num_blocks: int, rows: int, tokens: int, long: int, spare: int
) -> None:
    chance, world = random.Random(seed), World(num_blocks)
    budget = Budget(rows, tokens, tokens, long, spare)
    stems = [[chance.randrange(3) for _ in range(14)] for _ in range(2)]
    names = iter(range(1, 40))

    def happen() -> None:
        if chance.random() < 0.5 and (name := next(names, None)) is not None:
            prompt = [*chance.choice(stems)[: chance.randrange(14)], *(chance.randrange(3) for _ in range(3))]
            twin = None
            if world.prompts and chance.random() < 0.3:
                twin = chance.choice([*world.prompts])
                prompt = world.prompts[twin]
            world.arrive(name, prompt, chance.randrange(1, 9), chance.randrange(2), twin)
        if world.prompts and chance.random() < 0.1:
            world.cancel(chance.choice([*world.prompts]))

    ahead = Plan()
    for _ in range(3000):
        happen()
        world.state, now = plan(world.state, budget, None if ahead.is_empty else ahead)
        world.state, work = launch(world.state, now)
        check_integrity(world.state.pool)
        ahead = Plan()
        if not (work.reads or work.decodes):
            assert not now.is_empty or world.state.is_idle, "somebody waits for nothing"
            if world.state.is_idle and world.prompts and len(world.prompts) == 39:
                break
            continue
        assert len(world.state.running) + len(world.state.reading) <= rows
        assert sum(len(share.tokens) for share in work.reads) <= tokens
        happen()
        if chance.random() < 0.8:
            world.state, ahead = plan(world.state, budget)
        drawn = world.run(work)
        if spare and not work.reads:
            world.step_ahead(work)
        world.take(work, drawn)
    else:
        pytest.fail(f"not over: {world.state.waiting=} {world.state.running=}")
    assert stats(world.state.pool).used == 0
    for name, made in world.done.items():
        assert made == solo(world.prompts[name], len(made)), name
    assert len(world.done) == 39


@pytest.mark.parametrize(("blocks", "columns"), [(9, 2), (16, 3)])
def test_a_sequence_has_a_block_for_one_more_position_if_there_is_one(blocks: int, columns: int) -> None:
    """Two sequences of 8 positions need 8 blocks in two groups; for a spare position nobody is sent away."""
    world, budget = World(1 + blocks), Budget(rows=2, tokens=20, spare=1)
    for name in (1, 2):
        world.arrive(name, [name] * 6, 6)
    wide = list[int]()
    for _ in range(3):  # read, then positions 6 and 7
        world.state, work = launch(*plan(world.state, budget))
        world.take(work, world.run(work))
        wide = [share.table_GN.shape[1] for share in work.decodes]
    assert world.state.preemptions == 0
    assert wide == [columns] * 2
    check_integrity(world.state.pool)


def finished(world: World, budget: Budget, most: int = 500) -> list[Work]:
    """Everything that is done until nobody is left."""
    works: list[Work] = []
    while not world.state.is_idle:
        assert len(works) < most
        world.state, now = plan(world.state, budget)
        world.state, work = launch(world.state, now)
        world.take(work, world.run(work))
        works.append(work)
    return works


def test_long_prompts_wait_for_their_share_and_short_ones_do_not() -> None:
    world = World(100)
    world.arrive(1, [1], 40)
    budget = Budget(rows=4, tokens=8, short=8, long=0)
    world.state, now = plan(world.state, budget)
    world.state, work = launch(world.state, now)
    world.take(work, world.run(work))
    world.arrive(2, [0] * 30, 1)
    world.arrive(3, [2] * 8, 1)
    seen: list[dict[int, int]] = []
    for long in (0, 0, 3, 0):
        world.state, now = plan(world.state, budget._replace(long=long))
        world.state, work = launch(world.state, now)
        seen.append({share.name: len(share.tokens) for share in work.reads})
        assert [share.name for share in work.decodes] == [1]
        world.take(work, world.run(work))
    assert seen == [{3: 8}, {}, {2: 3}, {}]
    works = finished(world, budget)
    alone = [work for work in works if not work.decodes]
    assert [len(work.reads[0].tokens) for work in alone][:1] == [8], "without anybody else it is read at full speed"


def test_equal_prompts_are_read_once() -> None:
    world = World(100)
    prompt = [1, 2] * 10
    world.arrive(1, prompt, 3)
    for name in (2, 3, 4):
        world.arrive(name, prompt, 3, twin=1)
    works = finished(world, Budget(rows=8, tokens=7))
    read = {name: sum(len(s.tokens) for w in works for s in w.reads if s.name == name) for name in (1, 2, 3, 4)}
    assert read == {1: 20, 2: 4, 3: 4, 4: 4}


def test_a_higher_priority_goes_first_and_makes_room() -> None:
    world = World(100)
    budget = Budget(rows=1, tokens=8)
    world.arrive(1, [1, 2, 3], 6, priority=1)
    for _ in range(3):
        world.state, now = plan(world.state, budget)
        world.state, work = launch(world.state, now)
        world.take(work, world.run(work))
    world.arrive(2, [2, 2], 2, priority=1)
    world.arrive(3, [3, 2], 2, priority=0)
    works = finished(world, budget)
    order = list(dict.fromkeys(share.name for work in works for share in (*work.reads, *work.decodes)))
    assert order == [3, 1, 2]
    assert world.state.preemptions == 1
    assert {name: len(made) for name, made in world.done.items()} == {1: 6, 2: 2, 3: 2}


def test_what_an_untrusted_sequence_wrote_is_not_found_again() -> None:
    world = World(100)
    world.arrive(1, [1, 2] * 6, 3)
    budget = Budget(tokens=20)
    world.state, now = plan(world.state, budget)
    world.state, work = launch(world.state, now)
    world.take(work, world.run(work))
    world.state = end(world.state, 1, trusted=False)
    world.done[1] = []
    world.arrive(2, [1, 2] * 6, 1)
    works = finished(world, budget)
    assert sum(len(share.tokens) for share in works[0].reads) == 12
