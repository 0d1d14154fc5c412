"""Which sequences get how many tokens in the next step: pure functions of a state that holds all of them.

    add -> waiting --plan--> reading --plan--> running --end--> gone
              ^                  |                |
              +---- makes room --+----------------+      (to be read again, with what it has made)

`plan` looks ahead: it may be called while the step before is still running, since what it decides does not depend on
the tokens of that step. `launch` turns a plan into work as soon as they are known, without the sequences that have
ended meanwhile, and `settle` takes in what the work has done. A state that is not the newest is still a state: nothing
is changed in place. There is no clock in here: how much of long prompts may be read now is said by `Budget.long`.
"""

from __future__ import annotations  # the maps of rpds take type arguments only on paper

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rpds import HashTrieMap

from muse_fn.batch import Salts
from muse_fn.kvcache.blocks import (
    NoRoom,
    Pool,
    admit,
    discard,
    extend,
    fill,
    finish,
    push,
    table,
)
from muse_fn.kvcache.ints import to_numpy

Tokens = NDArray[np.int32]  # [T]


class Row(NamedTuple):
    """A sequence. It waits, is being read, or runs; which of these is told by where the state has it."""

    name: int  # in the order of arrival
    tokens: Tokens  # what has to be read before the first new token: the prompt, later also what was made of the answer
    longest: int  # positions that its last step may fill
    priority: int = 0  # lower goes first
    salts: Salts = ()
    reuse: bool = True
    twin: int | None = None  # an older sequence with the same tokens, whose reading this one waits for
    is_long: bool = False  # it takes several steps to read, which others should not notice
    planned: int = 0  # positions that steps have filled or are going to
    next_token: int | None = None  # drawn, and not yet given to a step

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first; the last of all makes room first."""
        return self.priority, self.name


class State(NamedTuple):
    """All sequences, and who has which block."""

    pool: Pool
    waiting: tuple[Row, ...] = ()  # in their order
    reading: HashTrieMap[int, Row] = HashTrieMap()
    running: HashTrieMap[int, Row] = HashTrieMap()
    is_full: bool = False  # somebody made room or found none: nobody of that priority joins before somebody has ended
    preemptions: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody."""
        return not (self.waiting or self.reading or self.running)


class Budget(NamedTuple):
    """What one step may do."""

    rows: int = 64  # sequences in flight at once
    tokens: int = 512  # prompt tokens of one step
    short: int = 512  # a prompt with more left than this is a long one
    long: int = 512  # tokens of long prompts in one step, while others run
    spare: int = 0  # positions beyond its next one that a sequence gets blocks for, where there are any


class Read(NamedTuple):
    """Positions start..stop of a sequence are read; if these are the last of its tokens, one is drawn."""

    name: int
    start: int
    stop: int
    is_last: bool
    cached: int  # tokens that were found in the cache when it joined


class Plan(NamedTuple):
    """The next step: prompts to be read and sequences that get one more token."""

    reads: tuple[Read, ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.reads or self.decodes)


class Share(NamedTuple):
    """One sequence's part of a step: its tokens from position `start` on, and its tables [G, N] that hold them."""

    name: int
    start: int
    tokens: Tokens
    table_GN: NDArray[np.int64]
    draws: bool  # a new token is drawn behind its last one


class Work(NamedTuple):
    """A plan with all that the model needs."""

    reads: tuple[Share, ...]
    decodes: tuple[Share, ...]


def add(state: State, row: Row) -> State:
    """A sequence arrives."""
    return state._replace(waiting=_queued(state.waiting, row))


def plan(state: State, budget: Budget, ahead: Plan | None = None) -> tuple[State, Plan]:
    """What the next step does. With `ahead`, a plan that this state's past made: only newcomers are added to it."""
    made = _standing(state, ahead or Plan())
    budget = budget._replace(tokens=budget.tokens - sum(read.stop - read.start for read in made.reads))
    if made.is_empty:
        state, decodes = _decodes(state, budget.spare)
        state, reads, budget = _continue(state, budget, bool(decodes))
        made = Plan(reads, decodes)
    after, new = _join(state, budget, bool(made.decodes))
    made = _standing(after, made._replace(reads=(*made.reads, *new)))
    if made.is_empty and after.preemptions > state.preemptions:  # newcomers sent away all that would have had a step
        return plan(after, budget)
    return after, made


def _standing(state: State, made: Plan) -> Plan:
    """The plan without those who have ended or made room since, so that they can join again as somebody new."""
    held = {row.name for row in (*state.reading.values(), *state.running.values())}
    reads = tuple(read for read in made.reads if read.name in held)
    return Plan(reads, tuple(name for name in made.decodes if name in state.running))


def launch(state: State, ahead: Plan) -> tuple[State, Work]:
    """The work of a plan: those that have ended since are left out."""
    pool, running, decodes = state.pool, state.running, list[Share]()
    for name in ahead.decodes:
        row = running.get(name)
        if row is None or row.next_token is None:
            continue
        pool = push(pool, name, [row.next_token])
        tokens = np.array([row.next_token], np.int32)
        decodes.append(Share(name, row.planned - 1, tokens, table(pool, name), True))
        running = running.insert(name, row._replace(next_token=None))
    reads: list[Share] = []
    for read in ahead.reads:
        row = state.reading.get(read.name) or running.get(read.name)
        if row is not None:
            tokens = row.tokens[read.start : read.stop]
            reads.append(Share(read.name, read.start, tokens, table(pool, read.name), read.is_last))
    return state._replace(pool=pool, running=running), Work(tuple(reads), tuple(decodes))


def settle(state: State, work: Work, drawn: dict[int, int]) -> State:
    """The work is done, and these sequences drew these tokens (name -> id). Those that are gone are passed over."""
    pool, running = state.pool, state.running
    for share in (*work.reads, *work.decodes):
        if share.name in running or share.name in state.reading:
            pool = fill(pool, share.name, share.start + len(share.tokens))
        row = running.get(share.name)
        if row is not None and share.name in drawn:
            running = running.insert(share.name, row._replace(next_token=drawn[share.name]))
    waiting = state.waiting
    if any(row.name in drawn and row.next_token is None for row in waiting):  # made room while its token was drawn
        waiting = tuple(_with_token(row, drawn) for row in waiting)
    return state._replace(pool=pool, running=running, waiting=waiting)


def end(state: State, name: int, *, trusted: bool = True) -> State:
    """A sequence is over, wherever it is. Not `trusted`: what it wrote is never found again."""
    waiting = tuple(row for row in state.waiting if row.name != name)
    if name not in state.reading and name not in state.running:
        return state._replace(waiting=waiting)
    pool = (finish if trusted else discard)(state.pool, name)
    return state._replace(
        pool=pool,
        waiting=waiting,
        reading=state.reading.discard(name),
        running=state.running.discard(name),
        is_full=False,
    )


def _queued(waiting: tuple[Row, ...], row: Row) -> tuple[Row, ...]:
    place = sum(other.order < row.order for other in waiting)
    return (*waiting[:place], row, *waiting[place:])


def _with_token(row: Row, drawn: dict[int, int]) -> Row:
    token = drawn.get(row.name)
    return row if token is None else row._replace(tokens=np.append(row.tokens, np.int32(token)), next_token=token)


def _decodes(state: State, spare: int) -> tuple[State, tuple[int, ...]]:
    """One more position for everybody who runs and is not at its end, first come first served; then blocks for `spare`
    more, for which nobody makes room."""
    wanted = sorted((row for row in state.running.values() if row.planned < row.longest), key=lambda row: row.order)
    for row in wanted:
        state = _room(state, row, row.planned + 1) if row.name in state.running else state
        if row.name in state.running:
            state = state._replace(running=state.running.insert(row.name, row._replace(planned=row.planned + 1)))
    names = tuple(row.name for row in wanted if row.name in state.running)
    for row in [state.running[name] for name in names] if spare else ():
        wider = extend(state.pool, row.name, min(row.planned + spare, row.longest))
        state = state if isinstance(wider, NoRoom) else state._replace(pool=wider)
    return state, names


def _room(state: State, row: Row, positions: int) -> State:
    """Blocks for so many positions of a row; whoever comes last makes room, and if that is the row itself it goes."""
    while isinstance(pool := extend(state.pool, row.name, positions), NoRoom):
        held = [*state.reading.values(), *state.running.values()]
        last = max(held, key=lambda other: other.order)
        state = _make_room(state, last)
        if last.name == row.name:
            return state
    return state._replace(pool=pool)


def _make_room(state: State, row: Row) -> State:
    """A sequence waits again, with everything it has made to be read again; its filled blocks stay findable."""
    held = to_numpy(state.pool.rows[row.name].tokens).astype(np.int32)
    more = [] if row.next_token is None else [row.next_token]
    tokens = np.concatenate([held, np.array(more, np.int32)]) if row.name in state.running else row.tokens
    waiting = _queued(state.waiting, row._replace(tokens=tokens, planned=0, twin=None))
    found = end(state, row.name)
    return found._replace(waiting=waiting, is_full=True, preemptions=state.preemptions + 1)


def _continue(state: State, budget: Budget, others_run: bool) -> tuple[State, tuple[Read, ...], Budget]:
    """The next chunk of everybody who is being read, as far as the budget goes."""
    reads: list[Read] = []
    for row in sorted(state.reading.values(), key=lambda row: row.order):
        if row.name in state.reading and row.planned < len(row.tokens):
            state, read, budget = _chunk(state, row, budget, others_run, 0)
            reads += [read] if read else []
    return state, tuple(reads), budget


def _chunk(state: State, row: Row, budget: Budget, others_run: bool, cached: int) -> tuple[State, Read | None, Budget]:
    """As many tokens of a row as may be read now; the row runs after its last ones."""
    waits, count = _size(row, row.planned, budget, others_run)
    if count < 1:
        return state, None, budget
    stop = row.planned + count
    state = _room(state, row, stop)
    if row.name not in state.reading:
        return state, None, budget
    read = Read(row.name, row.planned, stop, stop == len(row.tokens), cached)
    row = row._replace(planned=stop)
    reading, running = state.reading.insert(row.name, row), state.running
    if read.is_last:
        reading, running = reading.remove(row.name), running.insert(row.name, row._replace(next_token=None))
    spent = budget._replace(tokens=budget.tokens - count, long=budget.long - count if waits else budget.long)
    return state._replace(reading=reading, running=running), read, spent


def _size(row: Row, read: int, budget: Budget, others_run: bool) -> tuple[bool, int]:
    """Whether a prompt of which so much is read has to wait for others, and how many of its tokens may be read now."""
    left, waits = len(row.tokens) - read, others_run and row.is_long
    return waits, min(left, budget.tokens, budget.long if waits else left)


def _join(state: State, budget: Budget, others_run: bool) -> tuple[State, list[Read]]:
    """Those who wait begin to be read, as long as there are places, blocks and budget."""
    reads: list[Read] = []
    for row in state.waiting:
        held = [*state.reading.values(), *state.running.values()]
        if budget.tokens < 1:
            break
        if _is_unread(state, row.twin):
            continue
        last = max(held, key=lambda other: other.order, default=None)
        outranks = last is not None and row.priority < last.priority
        if state.is_full and held and not outranks:
            break
        if len(held) >= budget.rows:
            if not outranks or last is None:
                break
            state = _make_room(state, last)
        joined, read, budget = _begin(state, row, budget, others_run)
        if joined is None:
            return state._replace(is_full=True), reads
        state, reads = joined, [*reads, *([read] if read else [])]
    return state, reads


def _is_unread(state: State, name: int | None) -> bool:
    """Whether some of a sequence's tokens are not in the cache yet, but going to be."""
    row = None if name is None else state.reading.get(name) or state.running.get(name)
    if row is not None:
        return state.pool.rows[row.name].filled < len(row.tokens)
    return any(row.name == name for row in state.waiting)


def _begin(state: State, row: Row, budget: Budget, others_run: bool) -> tuple[State | None, Read | None, Budget]:
    """The first chunk of a row that waits; None instead of the state if there is no room for it now."""
    pool, past = admit(state.pool, row.name, row.tokens, row.salts, reuse=row.reuse)
    row = row._replace(planned=past, next_token=None, twin=None, is_long=len(row.tokens) - past > budget.short)
    stop = past + _size(row, past, budget, others_run)[1]
    held = [*state.reading.values(), *state.running.values()]
    victims = [other for other in held if other.priority > row.priority]
    if isinstance(extend(pool, row.name, max(stop, past + 1)), NoRoom) and not victims:
        return None, None, budget
    waiting = tuple(other for other in state.waiting if other.name != row.name)
    state = state._replace(pool=pool, waiting=waiting, reading=state.reading.insert(row.name, row))
    return _chunk(state, row, budget, others_run, past)
