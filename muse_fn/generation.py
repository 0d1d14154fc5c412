"""The host's loop: prompts in, tokens out, one batch of sequences stepped together over a cache of their own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muse_fn.batch import (
    Batch,
    Runner,
    Suspended,
    blocks_needed,
    leave,
    open_batch,
    read,
    resume,
    step,
    suspend,
    view_of,
)
from muse_fn.decoder import prepared
from muse_fn.kernels.select import Ops
from muse_fn.kvcache.blocks import NoRoom, admit, extend, fill
from muse_fn.load import Model
from muse_fn.sample import Draw, Sampling, draws, log_probability, sample
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.step import prefill
from muse_fn.stops import StopWatch

SCORE_CHUNK = 256  # positions whose vocabulary logits exist at once
BLOCK = 16

Finish = Literal["stop", "length", "error"]  # error: the logits were not finite


@dataclass(frozen=True)
class Settings:
    """How to generate. `max_new_tokens` None fills up to the model's limit, but makes at most `cap` tokens if given;
    `stop` strings end a text before them.

    `stop_tokens` None takes the tokenizer's (or the config's) end tokens; they are part of the tokens, not of the text.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    cap: int | None = None
    chunk: int = 512  # prompt tokens read in one step
    block_size: int = 16  # positions of a block of the cache
    num_blocks: int | None = None  # size of the cache; None: room for all prompts at once
    reuse: bool = True  # equal beginnings of prompts are read once
    swap: bool = False  # a sequence that makes room keeps its part of the cache on the host, else it is read again
    kv_dtype: torch.dtype | None = None  # how keys and values are stored; None: in the parameters' dtype
    ops: Ops | None = None  # None: the fastest operations for the device


class Token(NamedTuple):
    """One event of a generation: prompt `row` got `token` (-1 on an error); `finish` says why if it was the last."""

    row: int
    token: int
    finish: Finish | None


class Output(NamedTuple):
    """A finished generation: the new tokens, an end token included, and why it ended."""

    tokens: tuple[int, ...]
    finish: Finish


class _Row(NamedTuple):
    """A sequence: all its tokens, how many it may still make, and what would stop it."""

    row: int
    tokens: tuple[int, ...]
    left: int
    stops: StopWatch


class _Rules(NamedTuple):
    """How the rows of a batch draw."""

    draw: Draw
    allowed_V: Tensor | None
    is_filtered: bool
    mesh: Mesh


def generate(
    model: Model, prompts: Sequence[Sequence[int]], settings: Settings | None = None, mesh: Mesh | None = None
) -> list[Output]:
    """Continues every prompt (token ids). Each answer is the same alone and in any batch.

    On a mesh every rank calls with its own share of the model and the same prompts, and gets the same answers. Raises
    ValueError for an empty prompt, an id outside the vocabulary, or a prompt that leaves no room.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    finish: list[Finish] = ["length" for _ in prompts]
    for event in stream(model, prompts, settings, mesh):
        tokens[event.row] += [event.token] if event.token >= 0 else []
        finish[event.row] = event.finish or "length"
    return [Output(tuple(t), f) for t, f in zip(tokens, finish, strict=True)]


@torch.inference_mode()
def stream(
    model: Model, prompts: Sequence[Sequence[int]], settings: Settings | None = None, mesh: Mesh | None = None
) -> Iterator[Token]:
    """`generate`, one event per token as it comes; events of different prompts interleave."""
    settings = settings or Settings()
    check_settings(settings)
    budgets = check_prompts(model, prompts, settings)
    watch = StopWatch(_stop_tokens(model, settings), settings.stop, model.tokenizer)
    if not prompts:
        return
    every = prepared(model.params, model.config, mesh or ONE, ops=settings.ops)
    runner = Runner(model.params, model.config, mesh or ONE, settings.chunk, settings.ops, every)
    room = _num_blocks(model, prompts, budgets, settings)
    rules = _Rules(
        draws([settings.sampling] * len(prompts), model.config.vocab_size, runner.device),
        allowed_ids(model, runner.device),
        settings.sampling.is_filtered,
        runner.mesh,
    )
    rows = tuple(_Row(n, tuple(p), budgets[n], watch) for n, p in enumerate(prompts))
    state = _State(open_batch(runner, room, settings.block_size, dtype=settings.kv_dtype), rows, (), {}, False)
    while state.waiting or state.running:
        events, state, has_joined = _join(runner, state, rules, settings)
        yield from events
        if not has_joined:
            events, state = _advance(runner, state, rules, settings)
            yield from events


class _State(NamedTuple):
    """Who waits and who runs."""

    batch: Batch
    waiting: tuple[_Row, ...]
    running: tuple[_Row, ...]  # oldest first
    kept: dict[int, Suspended]  # parts of the cache that waiting rows left with
    is_full: bool  # somebody found no room or had to make it: nobody joins before somebody has finished


def _join(runner: Runner, state: _State, rules: _Rules, settings: Settings) -> tuple[list[Token], _State, bool]:
    """The first of those who wait runs, if there is room for it."""
    if not state.waiting or (state.is_full and state.running):
        return [], state, False
    row, *waiting = state.waiting
    if row.row in state.kept:
        is_back, batch = resume(state.batch, row.row, row.tokens, state.kept[row.row])
        events, going = [], [row]
    else:
        logits, batch = read(runner, state.batch, row.row, row.tokens, reuse=settings.reuse)
        is_back = not isinstance(logits, NoRoom)
        events, going, batch = (
            _choose((row,), logits, batch, rules) if not isinstance(logits, NoRoom) else ([], [], batch)
        )
    if not is_back:
        assert state.running, "there is room for one"
        return [], state._replace(batch=batch, is_full=True), False
    kept = {name: own for name, own in state.kept.items() if name != row.row}
    return events, _State(batch, tuple(waiting), (*state.running, *going), kept, False), True


def _advance(runner: Runner, state: _State, rules: _Rules, settings: Settings) -> tuple[list[Token], _State]:
    """One token for each that runs, or the youngest makes room, to come back later."""
    if not state.running:
        return [], state
    logits, batch = step(runner, state.batch, [r.row for r in state.running], [r.tokens[-1] for r in state.running])
    if not isinstance(logits, NoRoom):
        events, going, batch = _choose(state.running, logits, batch, rules)
        is_full = state.is_full and all(event.finish is None for event in events)
        return events, state._replace(batch=batch, running=tuple(going), is_full=is_full)
    *running, youngest = state.running
    kept = state.kept
    if settings.swap:
        own, batch = suspend(batch, youngest.row)
        kept = {**kept, youngest.row: own}
    else:
        batch = leave(batch, youngest.row)
    return [], _State(batch, (youngest, *state.waiting), tuple(running), kept, True)


def _num_blocks(model: Model, prompts: Sequence[Sequence[int]], budgets: list[int], settings: Settings) -> int:
    """Room for all sequences at once, or what is asked for, if that holds the longest of them."""
    lengths = [len(p) + n for p, n in zip(prompts, budgets, strict=True)]
    each = [blocks_needed(model.config, n, settings.chunk, settings.block_size) for n in lengths]
    if settings.num_blocks is None:
        return 1 + sum(each)
    if settings.num_blocks < 1 + max(each):
        raise ValueError(
            f"num_blocks is {settings.num_blocks}: the longest prompt needs {1 + max(each)}, block 0 included"
        )
    return settings.num_blocks


def _choose(
    rows: Sequence[_Row], logits_BV: Tensor, batch: Batch, rules: _Rules
) -> tuple[list[Token], list[_Row], Batch]:
    """The next token of every row as an event, the rows that go on, and the batch without the others."""
    mine = Draw(*(part[[r.row for r in rows]] for part in rules.draw))
    pos = torch.tensor([len(r.tokens) for r in rows], device=logits_BV.device)
    chosen = sample(logits_BV, mine, pos, allowed_V=rules.allowed_V, filtered=rules.is_filtered, mesh=rules.mesh)
    events: list[Token] = []
    going: list[_Row] = []
    for r, token in zip(rows, chosen.tolist(), strict=True):
        if token < 0:  # a row that is not finite is an error, never an answer; its neighbours go on
            events.append(Token(r.row, token, "error"))
            batch = leave(batch, r.row, trusted=False)
            continue
        stopped, stops = r.stops.push(token)
        finish: Finish | None = "stop" if stopped else "length" if r.left == 1 else None
        events.append(Token(r.row, token, finish))
        if finish is None:
            going.append(_Row(r.row, (*r.tokens, token), r.left - 1, stops))
        else:
            batch = leave(batch, r.row)
    return events, going, batch


def allowed_ids(model: Model, device: torch.device) -> Tensor | None:
    """bool [V]: ids that have a token; None when the model has no tokenizer to say so."""
    if model.tokenizer is None:
        return None
    known = [
        i < len(model.tokenizer) and model.tokenizer.bytes_of[i] is not None for i in range(model.config.vocab_size)
    ]
    return torch.tensor(known, device=device)


def _stop_tokens(model: Model, settings: Settings) -> tuple[int, ...]:
    if settings.stop_tokens is not None:
        return settings.stop_tokens
    return model.tokenizer.stop_ids if model.tokenizer else model.config.eos_token_id


def check_settings(settings: Settings) -> None:
    """Raises ValueError with every number of the settings that is out of range."""
    problems = [
        f"{name} is {value}: must be a whole number, at least 1"
        for name in ("max_new_tokens", "cap", "chunk", "block_size", "num_blocks")
        if (value := getattr(settings, name)) is not None and (not isinstance(value, int) or value < 1)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], settings: Settings) -> list[int]:
    """How many tokens each prompt may get. Raises ValueError with every prompt that cannot be answered."""
    budgets: list[int] = []
    problems: list[str] = []
    for row, prompt in enumerate(prompts):
        try:
            budgets.append(_budget(model, row, prompt, settings))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return budgets


def _budget(model: Model, row: int, prompt: Sequence[int], settings: Settings) -> int:
    """How many tokens this prompt may get; refuses prompts that cannot get any."""
    check_ids(model, prompt, f"prompt {row}")
    room = model.config.max_positions - len(prompt)
    free = room if settings.cap is None else min(room, settings.cap)
    wanted = free if settings.max_new_tokens is None else settings.max_new_tokens
    if wanted < 1 and settings.max_new_tokens is not None:
        raise ValueError(f"max_new_tokens is {wanted}: must be at least 1")
    if wanted > room or room < 1:
        asked = f"{wanted} new ones" if settings.max_new_tokens is not None else "any new one"
        limit = model.config.max_positions
        raise ValueError(f"prompt {row} has {len(prompt)} tokens: no room for {asked}, the limit is {limit} in all")
    return wanted


def check_ids(model: Model, ids: Sequence[int], what: str) -> None:
    """Raises ValueError if `ids` is empty or has an id outside the vocabulary."""
    if not ids:
        raise ValueError(f"{what} is empty: at least one token is needed")
    for place, token in enumerate(ids):
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"{what} has id {token} at {place}: ids go from 0 to {model.config.vocab_size - 1}")


def check_scored(model: Model, ids: Sequence[int]) -> None:
    """Raises ValueError if these ids cannot be scored."""
    check_ids(model, ids, "ids")
    if len(ids) > model.config.max_positions:
        raise ValueError(f"ids has {len(ids)} tokens: the limit is {model.config.max_positions}")


@torch.inference_mode()
def score(model: Model, ids: Sequence[int], mesh: Mesh | None = None, *, ops: Ops | None = None) -> list[float | None]:
    """Log-probability (natural) of every token given those before it; None for the first, which has none before it.

    Vocabulary logits exist for at most SCORE_CHUNK positions at a time. Raises ValueError as `generate` does.
    """
    check_scored(model, ids)
    runner = Runner(model.params, model.config, mesh or ONE, SCORE_CHUNK, ops)
    batch = open_batch(runner, 1 + blocks_needed(model.config, len(ids), SCORE_CHUNK, BLOCK), BLOCK)
    pool, _ = admit(batch.pool, 0, ids)
    kv = batch.kv
    found: list[float | None] = [None]
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        chunk = ids[start : start + SCORE_CHUNK]
        targets = torch.tensor(ids[start + 1 : start + 1 + SCORE_CHUNK], device=runner.device)
        wider = extend(pool, 0, start + len(chunk))
        assert not isinstance(wider, NoRoom), "room for all was made"
        view = view_of(wider, [0], [start], len(chunk), runner.device)
        tokens = torch.tensor([chunk], device=runner.device)
        logits, kv = prefill(
            model.params, tokens, kv, view, model.config, mesh, all_logits=True, gathered=False, ops=ops
        )
        pool = fill(wider, 0, start + len(chunk))
        found += log_probability(logits[0, : len(targets)], targets, runner.mesh).tolist()
    if any(value is not None and not math.isfinite(value) for value in found):
        place = next(i for i, value in enumerate(found) if value is not None and not math.isfinite(value))
        raise ValueError(f"the model gives token {place} a log-probability that is not finite: are its weights?")
    return found
