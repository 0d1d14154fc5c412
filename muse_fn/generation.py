"""The host's loop: prompts in, tokens out, one batch of sequences stepped together over a cache of their own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.load import Model
from muse_fn.params.tree import sample_tensor
from muse_fn.sample import Draw, Sampling, draws, log_probability, sample
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.step import decode, prefill
from muse_fn.stops import StopWatch

CHUNK = 512  # prompt tokens read per step
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
    """A running sequence: its last token, how many it may still make, and what would stop it."""

    row: int
    token: int
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
    budgets = check_prompts(model, prompts, settings)
    watch = StopWatch(_stop_tokens(model, settings), settings.stop, model.tokenizer)
    if not prompts:
        return
    longest = max(len(p) + n for p, n in zip(prompts, budgets, strict=True))
    device = sample_tensor(model.params).device
    table = own_blocks(len(prompts), longest, BLOCK, device=str(device))
    dtype = sample_tensor(model.params).dtype
    kv = init_cache(model.config, 1 + table.numel(), BLOCK, dtype=dtype, device=str(device), mesh=mesh)
    rules = _Rules(
        draws([settings.sampling] * len(prompts), model.config.vocab_size, device),
        allowed_ids(model, device),
        settings.sampling.is_filtered,
        mesh or ONE,
    )

    running: list[_Row] = []
    for row, prompt in enumerate(prompts):
        logits, kv = _read_prompt(model, prompt, table[row : row + 1], kv, rules.mesh)
        event, state = _choose([_Row(row, -1, budgets[row], watch)], logits, [len(prompt)], rules)
        yield from event
        running += state
    lengths = [len(p) for p in prompts]
    while running:
        rows = [r.row for r in running]
        past = torch.tensor([lengths[r] for r in rows], device=device)
        view = View(table[rows], past, torch.ones_like(past))
        tokens = _column([r.token for r in running], device)
        logits, kv = decode(model.params, tokens, kv, view, model.config, mesh, gathered=False)
        for r in rows:
            lengths[r] += 1
        events, running = _choose(running, logits[:, 0], [lengths[r] for r in rows], rules)
        yield from events


def _read_prompt(model: Model, prompt: Sequence[int], table: Tensor, kv: KVCache, mesh: Mesh) -> tuple[Tensor, KVCache]:
    """Logits [1, V], or this rank's share of them, after the whole prompt."""
    logits = torch.empty(0)
    for start in range(0, len(prompt), CHUNK):
        tokens = torch.tensor([prompt[start : start + CHUNK]], device=table.device)
        past = torch.tensor([start], device=table.device)
        view = View(table, past, torch.full_like(past, tokens.shape[1]))
        logits, kv = prefill(model.params, tokens, kv, view, model.config, mesh, gathered=False)
    return logits, kv


def _choose(rows: list[_Row], logits_BV: Tensor, positions: list[int], rules: _Rules) -> tuple[list[Token], list[_Row]]:
    """The next token of every row as an event, and the rows that go on."""
    mine = Draw(*(part[[r.row for r in rows]] for part in rules.draw))
    pos = torch.tensor(positions, device=logits_BV.device)
    chosen = sample(logits_BV, mine, pos, allowed_V=rules.allowed_V, filtered=rules.is_filtered, mesh=rules.mesh)
    events: list[Token] = []
    going: list[_Row] = []
    for r, token in zip(rows, chosen.tolist(), strict=True):
        if token < 0:  # a row that is not finite is an error, never an answer; its neighbours go on
            events.append(Token(r.row, token, "error"))
            continue
        stopped, stops = r.stops.push(token)
        finish: Finish | None = "stop" if stopped else "length" if r.left == 1 else None
        events.append(Token(r.row, token, finish))
        going += [_Row(r.row, token, r.left - 1, stops)] if finish is None else []
    return events, going


def allowed_ids(model: Model, device: torch.device) -> Tensor | None:
    """bool [V]: ids that have a token; None when the model has no tokenizer to say so."""
    if model.tokenizer is None:
        return None
    known = [
        i < len(model.tokenizer) and model.tokenizer.bytes_of[i] is not None for i in range(model.config.vocab_size)
    ]
    return torch.tensor(known, device=device)


def _column(tokens: list[int], device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)[:, None]


def _stop_tokens(model: Model, settings: Settings) -> tuple[int, ...]:
    if settings.stop_tokens is not None:
        return settings.stop_tokens
    return model.tokenizer.stop_ids if model.tokenizer else model.config.eos_token_id


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
def score(model: Model, ids: Sequence[int], mesh: Mesh | None = None) -> list[float | None]:
    """Log-probability (natural) of every token given those before it; None for the first, which has none before it.

    Vocabulary logits exist for at most SCORE_CHUNK positions at a time. Raises ValueError as `generate` does.
    """
    check_scored(model, ids)
    device = sample_tensor(model.params).device
    table = own_blocks(1, len(ids), BLOCK, device=str(device))
    kv = init_cache(
        model.config, 1 + table.numel(), BLOCK, dtype=sample_tensor(model.params).dtype, device=str(device), mesh=mesh
    )
    found: list[float | None] = [None]
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        tokens = torch.tensor([ids[start : start + SCORE_CHUNK]], device=device)
        targets = torch.tensor(ids[start + 1 : start + 1 + SCORE_CHUNK], device=device)
        past = torch.tensor([start], device=device)
        view = View(table, past, torch.full_like(past, tokens.shape[1]))
        logits, kv = prefill(model.params, tokens, kv, view, model.config, mesh, all_logits=True, gathered=False)
        found += log_probability(logits[0, : len(targets)], targets, mesh or ONE).tolist()
    if any(value is not None and not math.isfinite(value) for value in found):
        place = next(i for i, value in enumerate(found) if value is not None and not math.isfinite(value))
        raise ValueError(f"the model gives token {place} a log-probability that is not finite: are its weights?")
    return found
