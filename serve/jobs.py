"""What the engine is asked and what it answers: plain records without tensors and without HTTP."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muse_fn.batch import Salts
from muse_fn.sample import Sampling

Finish: TypeAlias = Literal["stop", "length", "error", "abort"]
# Why a job ends with error where what its request asks for contradicts itself: the client's mistake, not the engine's.
NO_TOKEN = (
    "the request leaves no token that may come next: its rules for tools or answers, allowed_token_ids and min_tokens "
    "contradict each other"
)


class Constraint(Protocol):
    """What may come next in one sequence: a cursor that its tokens move. One thread at a time uses it."""

    def mask(self) -> NDArray[np.int32] | None:
        """Bits of the allowed ids, 32 of them to an int32, id 0 the lowest bit of the first; None allows all."""
        ...

    def push(self, token: int) -> None:
        """The next token. Raises ValueError for one that the mask does not allow."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""
        ...


@dataclass(frozen=True)
class Penalties:
    """What makes tokens less likely that have been seen. Off: 0, 0 and 1.

    presence and frequency are taken from the logits of generated tokens, once and per occurrence; repetition divides
    positive and multiplies negative logits of tokens in prompt or answer. Raises ValueError naming the field.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (("presence", -2, 2), ("frequency", -2, 2), ("repetition", 0.01, 100)):
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(f"{name}_penalty is {value!r}: must be a number from {low} to {high}")


@dataclass(frozen=True)
class Job:
    """One sequence to be continued. Several choices of one request are several jobs."""

    request: str  # whom it belongs to, for `Engine.abort`
    ids: tuple[int, ...]
    max_new: int  # at least 1
    sampling: Sampling = field(default_factory=Sampling)
    penalties: Penalties = field(default_factory=Penalties)
    bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these ids
    allowed: tuple[int, ...] | None = None  # no other ids are drawn
    stop_tokens: tuple[int, ...] = ()  # the answer ends with the first of these, which is part of its tokens
    min_new: int = 0  # no stop token is drawn before so many
    logprobs: int | None = None  # of each new token, beside so many of the likeliest; None: not at all
    prompt_logprobs: int | None = None  # of each prompt token likewise
    constraint: Constraint | None = None
    priority: int = 0  # lower goes first
    salts: Salts = ()  # the cache is shared only among equal ones


class Logprob(NamedTuple):
    """Natural log-probabilities at one place, before any filter, bias, penalty or constraint."""

    chosen: float
    rank: int  # how many ids are likelier, plus one
    top: tuple[tuple[int, float], ...]  # the likeliest ids, likeliest first


class Reading(NamedTuple):
    """So much of the prompt has been read; `cached` of it was known already."""

    done: int
    total: int
    cached: int


class Scored(NamedTuple):
    """Log-probabilities of prompt tokens from `start` on, in order; the first token of a prompt has none."""

    start: int
    found: tuple[Logprob | None, ...]


class New(NamedTuple):
    """One generated token."""

    token: int
    logprob: Logprob | None = None


class Done(NamedTuple):
    """The last event of every job. `why` is a sentence for people where finish is error or abort."""

    finish: Finish
    why: str = ""


JobEvent: TypeAlias = Reading | Scored | New | Done


class Stream(Protocol):
    """The events of one job: any number of Reading and Scored, then New, then one Done."""

    def __aiter__(self) -> AsyncIterator[JobEvent]: ...

    def cancel(self, finish: Finish = "abort") -> None:
        """The rest is not wanted: its place and blocks are given back at once. May be called at any time, twice too.

        `stop` is for an answer that is complete for whoever reads it, so that it is not counted as given up.
        """
        ...


class Load(NamedTuple):
    """How busy an engine is."""

    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks: int


class Refused(Exception):
    """The engine takes no more at present. `status` is the HTTP status, `retry_after` in seconds."""

    def __init__(self, message: str, status: int = 429, retry_after: int = 1) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Engine(Protocol):
    """Who runs jobs. All methods are called on the event loop and return at once."""

    def submit(self, jobs: tuple[Job, ...]) -> tuple[Stream, ...]:
        """All of them are queued or none. Raises ValueError for a job that can never run, Refused when it is full."""
        ...

    def abort(self, request: str) -> int:
        """Ends all jobs of a request with finish `abort`; returns how many there were."""
        ...

    def load(self) -> Load: ...

    @property
    def health(self) -> str:
        """Empty while it works, else what is wrong."""
        ...
