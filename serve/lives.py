"""What the engine knows of one job while it has it."""

from dataclasses import dataclass

import numpy as np

from muse_fn.serve.drawer import Drawer
from muse_fn.serve.jobs import Done, Job, Logprob, Scored
from muse_fn.serve.steps import Drawn, Scoring
from muse_fn.serve.streams import JobStream


@dataclass
class Live:
    """One job in the engine."""

    job: Job
    stream: JobStream
    drawer: Drawer
    arrived: float
    last: float | None = None  # when its last token was told
    scored: int = 0  # prompt tokens whose log-probabilities have been told
    cached: int | None = None
    finish: Done | None = None


def scoring_of(job: Job, start: int, count: int) -> Scoring | None:
    """The prompt tokens that a chunk gives the log-probabilities of."""
    if job.prompt_logprobs is None or start >= len(job.ids):
        return None
    return Scoring(np.array(job.ids[start + 1 : start + 1 + count], np.int64), job.prompt_logprobs)


def newly_scored(live: Live, start: int, scores: tuple[Logprob, ...]) -> Scored | None:
    """What these scores of a piece from token `start` on say that has not been told yet, which then counts as told.

    A prompt is read again after it has made room, in pieces that may begin and end elsewhere.
    """
    first = (None,) if start == 0 else ()
    begin = start + 1 - len(first)
    found = (*first, *scores)[max(0, live.scored - begin) :]
    if not found:
        return None
    begin = max(begin, live.scored)
    live.scored = begin + len(found)
    return Scored(begin, found)


def end_of(live: Live, one: Drawn) -> Done | None:
    """Why a job is over with this token; None if it goes on."""
    job, drawer = live.job, live.drawer
    if one.token < 0:
        return Done("error", "the model's logits were not finite")
    if drawer.broken:
        return Done("error", drawer.broken)
    if one.token in job.stop_tokens or drawer.is_done:
        return Done("stop")
    return Done("length") if drawer.made >= job.max_new else None
