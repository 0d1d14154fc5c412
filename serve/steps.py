"""One step of the server on the model: prompts read in chunks, one more token for each sequence that runs, all drawn
together.

An `Orders` is all that a rank needs, in plain arrays, so that every rank of a mesh does the same by a copy of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muse_fn.adjust import Bias, Seen, biased, likely, penalised
from muse_fn.batch import Runner
from muse_fn.decoder import logits as to_logits
from muse_fn.kernels.select import select
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.sample import Sampling, draws, sample
from muse_fn.serve.jobs import Logprob
from muse_fn.serve.replays import Replays, batch_of
from muse_fn.serve.scheduler import Share
from muse_fn.step import decode, prefill
from muse_fn.step import run as run_layers

SLICE = 64  # positions of a prompt whose vocabulary logits exist at once
ALONE = 4  # pieces of prompts that captured steps read one by one; more are read together, their weights once
PADDING = 1.5  # a step of several prompts may have so many times their tokens


class Rule(NamedTuple):
    """How one sequence draws."""

    sampling: Sampling
    seen: Seen | None = None
    bias: Bias | None = None
    allowed: NDArray[np.bool_] | None = None  # [V]; None: all ids that have a token
    logprobs: int | None = None


class Scoring(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted: those after the chunk's first, and one more if there is one."""

    targets: NDArray[np.int64]  # at most [T] of a chunk of T tokens
    top: int  # how many of the likeliest ids to name beside each


class Orders(NamedTuple):
    """A step. `rules` has one entry for each share that draws, reads first; `scorings` one for each read."""

    reads: tuple[Share, ...]
    decodes: tuple[Share, ...]
    rules: tuple[Rule, ...]
    scorings: tuple[Scoring | None, ...]


class Drawn(NamedTuple):
    """What a sequence drew; token -1 if its logits were not finite."""

    token: int
    logprob: Logprob | None


class Found(NamedTuple):
    """What a step gave: draws in the order of the rules, and log-probabilities of prompt tokens by read."""

    drawn: tuple[Drawn, ...]
    scores: tuple[tuple[Logprob, ...], ...]


@torch.inference_mode()
def run(
    runner: Runner, kv: KVCache, orders: Orders, allowed_V: Tensor | None, captured: Replays | None = None
) -> tuple[Found, KVCache]:
    """Does the step. Consumes `kv`. Ids that are False in `allowed_V` (bool [V]) are never drawn. On a mesh every rank
    calls with the same orders, and gets the same result. A `captured` step is taken where it can do what is asked for;
    what it gives is the same."""
    apart: tuple[Drawn, ...] = ()
    if captured is not None and fits(captured, orders):
        drawn = sum(share.draws for share in orders.reads)
        # What is read now may be drawn for in the next step, and takes time that nobody else's step should hide.
        goes_on = not orders.reads
        tokens, kv = captured(kv, orders.decodes, [rule.sampling for rule in orders.rules[drawn:]], goes_on)
        apart = tuple(Drawn(token, None) for token in tokens)
        orders = orders._replace(decodes=(), rules=orders.rules[:drawn])
    found, kv = _run(runner, kv, orders, allowed_V, captured)
    return found._replace(drawn=(*found.drawn, *apart)), kv


def replays(captured: Replays | None, orders: Orders) -> int:
    """How many captured steps these orders take."""
    return 0 if captured is None else fits(captured, orders) + len(alone(captured, orders))


def alone(captured: Replays, orders: Orders) -> list[int]:
    """Which reads are done by captured steps: those that are pieces of their own, if they are few."""
    both = zip(orders.reads, orders.scorings, strict=True)
    found = [n for n, (share, scoring) in enumerate(both) if scoring is None and captured.can_read(share)]
    return found if len(found) <= ALONE else []


def fits(captured: Replays, orders: Orders) -> bool:
    """Whether these decodes ask for nothing that the captured steps leave out, and are not too many or too long."""
    size = len(orders.decodes), max((share.table_GN.shape[1] for share in orders.decodes), default=0)
    largest = max(captured.steps.captured)
    rules = orders.rules[len(orders.rules) - len(orders.decodes) :]
    plain = all(extra is None for rule in rules for extra in rule[1:])
    return 0 < size[0] <= largest.batch and size[1] <= largest.columns and plain


def _run(
    runner: Runner, kv: KVCache, orders: Orders, allowed_V: Tensor | None, captured: Replays | None
) -> tuple[Found, KVCache]:
    rows: dict[int, Tensor] = {}
    scores: dict[int, tuple[Logprob, ...]] = {}
    if captured is not None:
        for n in alone(captured, orders):
            rows[n], kv = captured.read(kv, orders.reads[n])
    plain = [n for n, scoring in enumerate(orders.scorings) if scoring is None and n not in rows]
    for group in packed([len(orders.reads[n].tokens) for n in plain]):
        found, kv = _read(runner, kv, [orders.reads[plain[n]] for n in group])
        rows |= {plain[n]: row for n, row in zip(group, found, strict=True)}
    for n, scoring in enumerate(orders.scorings):
        if scoring is not None:
            rows[n], scores[n], kv = _score(runner, kv, orders.reads[n], scoring, allowed_V)
    if orders.decodes:
        tokens, view = batch_of(orders.decodes, runner.device)
        ran, kv = _decode(runner, kv, tokens, view)
        rows |= {len(orders.reads) + n: row for n, row in enumerate(ran[:, 0])}
    shares = (*orders.reads, *orders.decodes)
    drawing = [n for n, share in enumerate(shares) if share.draws]
    listed = tuple(scores.get(n, ()) for n in range(len(orders.reads)))
    if not drawing:
        if orders.reads and runner.device.type == "cuda":  # a step's time tells who plans what a prompt costs
            torch.cuda.current_stream(runner.device).synchronize()
        return Found((), listed), kv
    ends = [shares[n].start + len(shares[n].tokens) for n in drawing]
    return Found(_draw(runner, torch.stack([rows[n] for n in drawing]), orders.rules, ends, allowed_V), listed), kv


def packed(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of these sequences, each group to be padded to its longest, so that padding stays a small part."""
    groups: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        group = groups[-1] if groups else []
        if group and lengths[group[0]] * (len(group) + 1) <= PADDING * sum(lengths[m] for m in (*group, n)):
            group.append(n)
        else:
            groups.append([n])
    return groups


def _read(runner: Runner, kv: KVCache, shares: Sequence[Share]) -> tuple[Tensor, KVCache]:
    """Logits [B, V] after the last token of each."""
    tokens, view = batch_of(shares, runner.device)
    # The scheduler gives every row its blocks, which takes the same checks apart, row by row.
    return prefill(
        runner.params, tokens, kv, view, runner.config, runner.mesh, gathered=False, checked=True, ops=runner.ops
    )


def _decode(runner: Runner, kv: KVCache, tokens: Tensor, view: View) -> tuple[Tensor, KVCache]:
    """Logits [B, 1, V]."""
    return decode(
        runner.params, tokens, kv, view, runner.config, runner.mesh, gathered=False, checked=True, ops=runner.ops
    )


def _score(
    runner: Runner, kv: KVCache, share: Share, scoring: Scoring, allowed_V: Tensor | None
) -> tuple[Tensor, tuple[Logprob, ...], KVCache]:
    """Logits [V] after the last token, and log-probabilities of the targets; vocabulary logits exist for few positions
    at a time."""
    tokens, view = batch_of([share], runner.device)
    config, mesh, ops = runner.config, runner.mesh, runner.ops or select(runner.device)
    ran = run_layers(runner.params, tokens, kv, view, config, mesh, is_start=share.start == 0, ops=ops)
    found: list[Logprob] = []
    z = torch.empty(0)
    for start in range(0, tokens.shape[1], SLICE):
        z = to_logits(runner.params, ran.h_BTH[0, start : start + SLICE], config, ops, mesh, gathered=False)
        targets = torch.from_numpy(scoring.targets[start : start + SLICE]).to(runner.device)
        if len(targets):
            found += logprobs(z[: len(targets)], targets, [scoring.top] * len(targets), runner, allowed_V)
    return z[-1], tuple(found), ran.kv


def logprobs(
    logits_BV: Tensor, chosen_B: Tensor, tops: Sequence[int], runner: Runner, allowed_V: Tensor | None
) -> list[Logprob]:
    """The log-probability of each chosen id (int64 [B]), beside as many of the likeliest as `tops` says for its row.

    `logits_BV`: float32, on a mesh each rank's share; `allowed_V`: bool, ids that may be listed. See `adjust.likely`.
    """
    found = likely(logits_BV, chosen_B, max(*tops, 1), runner.mesh, allowed_V=allowed_V)
    columns = zip(*(x.tolist() for x in found), tops, strict=True)
    return [
        Logprob(chosen, rank, tuple(zip(ids[:top], values[:top], strict=True)))
        for chosen, rank, ids, values, top in columns
    ]


def _draw(
    runner: Runner, logits_RV: Tensor, rules: Sequence[Rule], ends: Sequence[int], allowed_V: Tensor | None
) -> tuple[Drawn, ...]:
    mesh, config = runner.mesh, runner.config
    z = biased(penalised(logits_RV, [rule.seen for rule in rules], mesh), [rule.bias for rule in rules], mesh)
    tokens = sample(
        z,
        draws([rule.sampling for rule in rules], config.vocab_size, runner.device),
        torch.tensor(ends, device=runner.device),
        allowed_V=_allowed(rules, allowed_V, runner),
        filtered=any(rule.sampling.is_filtered for rule in rules),
        greedy=all(rule.sampling.temperature == 0 for rule in rules),
        mesh=mesh,
    )
    drawn = [Drawn(token, None) for token in tokens.tolist()]
    asked = [n for n, rule in enumerate(rules) if rule.logprobs is not None and drawn[n].token >= 0]
    if asked:
        tops = [rules[n].logprobs or 0 for n in asked]
        for n, logprob in zip(asked, logprobs(logits_RV[asked], tokens[asked], tops, runner, allowed_V), strict=True):
            drawn[n] = drawn[n]._replace(logprob=logprob)
    return tuple(drawn)


def _allowed(rules: Sequence[Rule], allowed_V: Tensor | None, runner: Runner) -> Tensor | None:
    """bool [V] or [R, V]."""
    masks = [rule.allowed for rule in rules]
    if all(mask is None for mask in masks):
        return allowed_V
    full = np.ones(runner.config.vocab_size, np.bool_)
    found = torch.from_numpy(np.stack([full if mask is None else mask for mask in masks])).to(runner.device)
    return found if allowed_V is None else found & allowed_V
