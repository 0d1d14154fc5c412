"""The pace of long prompts, on a clock that is made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.pace import FIRST, SLICE, Pace
from muse_fn.serve.scheduler import Share, Work

CHUNK = 512


def work(decodes: int, read: int, is_last: bool = False) -> Work:
    def share(tokens: int, draws: bool) -> Share:
        return Share(0, 0, np.zeros(tokens, np.int32), np.zeros((1, 1), np.int64), draws)

    return Work((share(read, is_last),) if read else (), tuple(share(1, True) for _ in range(decodes)))


@given(st.floats(0.05, 0.9), st.floats(0.001, 0.05), st.floats(1e-5, 0.01), st.floats(0, 0.02))
def test_answers_keep_what_the_share_leaves_them(share: float, decode: float, token: float, fixed: float) -> None:
    """Whatever a step and a token cost, long prompts take their share of the time and no more, and they do go on."""
    pace, spent, alone, largest = Pace(share), 0.0, 0.0, 0.0
    for _ in range(400):
        pace = pace.after(work(8, 0), decode, CHUNK)
    for _ in range(3000):
        tokens = pace.tokens(CHUNK)
        slice_ = fixed + token * tokens if tokens else 0.0
        spent, alone, largest = spent + slice_, alone + decode, max(largest, slice_)
        pace = pace.after(work(8, tokens), decode + slice_, CHUNK)
    assert spent <= share / (1 - share) * alone * 1.001 + largest, "all but the last slice is paid for"
    often = min(SLICE, fixed + token * CHUNK)
    most = often / (often + 2 * decode)  # a slice every other step
    assert spent / (spent + alone) >= 0.5 * min(share, most)


def test_nothing_is_known_at_first_and_a_slice_is_short_later() -> None:
    pace = Pace(0.2)
    assert pace.tokens(CHUNK) == FIRST
    assert Pace(0.2, token=SLICE / 10).tokens(CHUNK) == 10
    assert Pace(0.2, token=SLICE * 10).tokens(CHUNK) == 1, "it goes on however slow"
    assert Pace(0.2, token=1e-9).tokens(CHUNK) == CHUNK


def test_what_is_owed_adds_up_and_is_paid_by_steps_of_answers() -> None:
    pace = Pace(0.2, decode=0.01, token=0.001)
    pace = pace.after(work(8, 40), 0.05, CHUNK)
    assert pace.owed == pytest.approx(0.16)
    assert pace.tokens(CHUNK) == 0
    pace = pace.after(work(8, 40), 0.05, CHUNK)
    assert pace.owed == pytest.approx(0.32)
    for _ in range(32):
        pace = pace.after(work(8, 0), 0.01, CHUNK)
    assert pace.owed == pytest.approx(0, abs=1e-9)
    assert pace.tokens(CHUNK) > 0 or pace.owed > 0


def test_short_prompts_owe_nothing() -> None:
    pace = Pace(0.2, decode=0.01).after(work(8, 300, is_last=True), 0.2, CHUNK)
    assert pace.owed == 0
