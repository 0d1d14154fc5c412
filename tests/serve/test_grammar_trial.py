"""Trials in another process: reasons come back, what takes too long is stopped for good, nothing is left behind."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muse_fn.serve.grammar_rules import whole
from muse_fn.serve.grammar_trial import WORKER, Fault, Trials
from muse_fn.serve.grammar_vocabulary import LIMITS, Vocabulary
from tests.serve.grammar_walk import VOCAB, tokenizer

VOCABULARY = Vocabulary(tokenizer(), VOCAB)
GOOD = whole(lark_grammar='start: "a"')
BAD = whole(lark_grammar="start: x")
# Given fuel without end, this one has more states than fit anywhere.
ENDLESS = whole(lark_grammar="start: /(?:a{2000}){2000}/")
FUEL = {"initial_lexer_fuel": 10**9, "step_lexer_fuel": 10**9}


@pytest.fixture(autouse=True)
def fuel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are stopped from outside here: their own limits are lifted."""
    for name, amount in FUEL.items():
        monkeypatch.setitem(LIMITS, name, amount)


@pytest.fixture
def trials() -> Iterator[Trials]:
    made = Trials(VOCABULARY, 20)
    yield made
    made.close()


def test_good_ones_pass_and_the_first_bad_one_is_named(trials: Trials) -> None:
    trials.run([GOOD] * 3)
    with pytest.raises(Fault, match="x") as found:
        trials.run([GOOD, BAD, BAD])
    assert found.value.index == 1
    trials.run([GOOD])


def test_what_never_ends_is_killed_and_the_next_is_served() -> None:
    trials = Trials(VOCABULARY, 2)
    try:
        trials.run([GOOD])
        first = trials.process_id
        with pytest.raises(Fault, match=r"does not compile within 2\.02 s"):
            trials.run([ENDLESS])
        assert first is not None
        assert not Path(f"/proc/{first}").exists()
        trials.run([GOOD])
        assert trials.process_id != first
    finally:
        trials.close()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit under which the worker starts, and a rule that needs more: an answer, not a dead server."""
    monkeypatch.setattr("muse_fn.serve.grammar_trial.MEMORY", 300 << 20)
    trials = Trials(VOCABULARY, 60)
    try:
        trials.run([GOOD])
        with pytest.raises(Fault, match=r"does not compile within|too (large|many|big)|limit"):
            trials.run([whole(lark_grammar="start: " + "|".join(f'"{number}"' for number in range(1_000_000)))])
    finally:
        trials.close()


def test_closing_stops_what_runs_and_refuses_the_rest() -> None:
    trials = Trials(VOCABULARY, 600)
    trials.run([GOOD])
    process, faults = trials.process_id, list[Fault]()

    def endless() -> None:
        try:
            trials.run([ENDLESS])
        except Fault as fault:
            faults.append(fault)

    thread = threading.Thread(target=endless)
    thread.start()
    while thread.is_alive() and not trials.is_busy:
        time.sleep(0.001)
    trials.close()
    thread.join(60)
    assert len(faults) == 1
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(Fault, match="shutting down"):
        trials.run([GOOD])
    trials.close()


def test_a_worker_ends_with_its_input() -> None:
    done = subprocess.run([sys.executable, "-P", str(WORKER)], input=b"", capture_output=True, timeout=60, check=False)
    assert done.returncode != 0
    assert b"JSON" in done.stderr


def test_a_worker_nobody_kills_ends_itself() -> None:
    """The processor time of one trial is bounded by the worker's own limit too: its parent may have been killed."""
    about = VOCABULARY.described() | {"seconds": 0, "memory": 2 << 30, "many": 128}
    lines = f"{json.dumps(about)}\n{json.dumps([ENDLESS])}\n"
    worker = [sys.executable, "-P", str(WORKER)]
    done = subprocess.run(worker, input=lines.encode(), capture_output=True, timeout=100, check=False)
    assert done.returncode < 0
