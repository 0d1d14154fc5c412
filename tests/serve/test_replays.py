"""Captured steps of a server against eager ones, and which of them go on with what is left on the device."""

import pytest
from torch import Tensor

from muse_fn.captured_decode import DecodeSteps, Feed
from muse_fn.kernels.select import REFERENCE
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.sample import Draw, Sampling
from muse_fn.serve.jobs import Penalties
from tests.serve.running import Got, all_of, engine_of, run
from tests.serve.test_engine import crowd, job


def test_captured_steps_give_what_eager_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they leave out is done eagerly beside them. Few of them are put together on the host: the others go on
    with what the one before left, through new blocks too."""
    begun: list[int] = []
    begin = DecodeSteps.begin

    def counted(steps: DecodeSteps, tokens_B1: Tensor, view: View, draw: Draw, kv: KVCache) -> Feed:
        begun.append(len(tokens_B1))
        return begin(steps, tokens_B1, view, draw, kv)

    monkeypatch.setattr(DecodeSteps, "begin", counted)
    jobs = [
        *crowd(6),
        job((7, 8), 90),
        job((9,), 60, sampling=Sampling(1.0, seed=1)),
        job(logprobs=1),
        job(allowed=(3, 4)),
        job(bias=((5, 2.0),)),
        job(penalties=Penalties(1.0)),
    ]

    async def main(captures: bool) -> tuple[list[Got], float]:
        async with engine_of(ops=REFERENCE, starts=False, rows=4, num_blocks=120) as engine:
            if captures:
                engine.capture()
            engine.start()
            found = await all_of(engine, jobs)
            return found, engine.metrics.registry.get_sample_value("muse_fn_replays_total") or 0

    (eager, none), (captured, some) = run(lambda: main(False)), run(lambda: main(True))
    assert [got.tokens for got in captured] == [got.tokens for got in eager]
    assert none == 0 < 2 * len(begun) < some
