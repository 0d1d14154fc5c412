"""What one sequence's draws depend on besides its logits: its past, its constraint, and what its request asked for."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from muse_fn.adjust import Bias, Seen, unpacked
from muse_fn.serve.jobs import NO_TOKEN, Job, Penalties
from muse_fn.serve.steps import Rule


@dataclass
class Drawer:
    """One sequence. It belongs to the thread that runs the steps: nobody else looks at it while a step runs."""

    job: Job
    vocab_size: int
    counts: Counter[int] = field(default_factory=Counter[int])
    made: int = 0
    broken: str = ""  # why nothing can be drawn any more
    prompt: frozenset[int] = frozenset()  # its ids, where they are penalised

    def __post_init__(self) -> None:
        if self.job.penalties.repetition != 1:
            self.prompt = frozenset(self.job.ids)

    def rule(self) -> Rule:
        """How the next token is drawn. Never raises: what goes wrong with a constraint is kept in `broken`."""
        job = self.job
        allowed = self._allowed()
        if allowed is not None and not allowed.any():
            self.broken = self.broken or NO_TOKEN
        return Rule(
            job.sampling,
            self._seen() if job.penalties != Penalties() else None,
            _bias(job) if job.bias else None,
            None if self.broken else allowed,
            job.logprobs,
        )

    def push(self, token: int) -> None:
        """The token that was drawn. Never raises, as `rule`."""
        self.made += 1
        self.counts[token] += 1
        constraint = self.job.constraint
        if constraint is not None and not (token in self.job.stop_tokens and constraint.is_done):
            try:
                constraint.push(token)
            except Exception as error:
                self.broken = f"its constraint failed: {error}"

    @property
    def is_done(self) -> bool:
        """Whether the constraint lets nothing follow."""
        return self.job.constraint is not None and not self.broken and self.job.constraint.is_done

    def _allowed(self) -> NDArray[np.bool_] | None:
        job = self.job
        early = self.made < job.min_new and job.stop_tokens
        if job.constraint is None and job.allowed is None and not early:
            return None
        found = np.ones(self.vocab_size, np.bool_)
        if job.allowed is not None:
            found[:] = False
            found[list(job.allowed)] = True
        if early:
            found[list(job.stop_tokens)] = False
        if job.constraint is not None:
            try:
                found &= unpacked([job.constraint.mask()], self.vocab_size)[0]
            except Exception as error:
                self.broken = f"its constraint failed: {error}"
        return found

    def _seen(self) -> Seen:
        job = self.job
        ids = list(self.prompt | self.counts.keys())
        counts = np.array([self.counts[token] for token in ids], np.int64)
        return Seen(np.array(ids, np.int64), counts, *_factors(job.penalties))


def _factors(penalties: Penalties) -> tuple[float, float, float]:
    return penalties.presence, penalties.frequency, penalties.repetition


def _bias(job: Job) -> Bias:
    ids, values = zip(*job.bias, strict=True)
    return Bias(np.array(ids, np.int64), np.array(values, np.float32))
