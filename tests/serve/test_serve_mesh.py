"""The server on a mesh of two ranks: the answers of one, an end of all with each, quiet times that break nothing."""

import os
import signal
import sys
import threading
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch

from tests.processes import children, have_gone
from tests.serve.commanded import PATIENCE, Command, chat, commanded, status_of

if sys.platform != "linux":
    pytest.skip("processes are looked up in /proc", allow_module_level=True)

MESH = ("--mesh", "tp=2")
Words = tuple[str, ...]
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "max_tokens": 24},
    {"stop": ["="]},
    {"messages": [{"role": "user", "content": "word " * 300 + "hello"}], "max_tokens": 16, "logprobs": True},
]


@pytest.fixture(params=["cpu", "cuda"])
def small(request: pytest.FixtureRequest) -> Words:
    """Options of a small server on a device; on cards also through NCCL, captured steps included."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two CUDA cards are not here")
    on_it = ("--device", "cuda") if request.param == "cuda" else ("--deterministic",)
    return "--port", "0", "--cache-gib", "0.05", *on_it


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What two servers must agree on, whatever they call the request."""
    (choice,) = answer["choices"]
    usage = answer["usage"]
    tokens = [one["token"] for one in (choice["logprobs"] or {}).get("content", ())]
    return choice["message"], choice["finish_reason"], tokens, usage["prompt_tokens"], usage["completion_tokens"]


def quiet(pulse: float) -> tuple[str, ...]:
    """The command with another time after which the first rank gives a sign of life; a rank inherits it by torchrun."""
    program = (
        f"from muse_fn.serve import engine; engine.PULSE = {pulse}; from muse_fn.serve.__main__ import main; main()"
    )
    return "-c", program


CHECKED = """
import gc
from muse_fn.captured_decode import DecodeSteps
from muse_fn.serve import serving
from muse_fn.serve.__main__ import main
leave = serving.leave
def checked():
    gc.collect()
    held = [one for one in gc.get_objects() if isinstance(one, DecodeSteps)]
    print(len(held), "captured steps are held", file=__import__("sys").stderr, flush=True)
    leave()
serving.leave = checked
main()
"""


def ranks_apart(stack: ExitStack, *words: str, program: Words) -> list[Command]:
    """Two ranks as torchrun would start them."""
    from muse_fn.serve.launch import free_port, rank_environment

    port, ranks = free_port(), list[Command]()
    for rank in range(2):
        environment = rank_environment(rank, 2, port)
        ranks.append(stack.enter_context(commanded(*words, *MESH, environment=environment, program=program)))
    return ranks


def end(ranks: list[Command]) -> list[int]:
    """As a terminal or a container does; the first decides."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
    return [rank.ends() for rank in ranks]


def test_no_captured_step_outlives_the_server(small: Words) -> None:
    """NCCL would not end while a graph has its collectives."""
    with ExitStack() as stack:
        plain = [word for word in small if word != "--deterministic"]
        ranks = ranks_apart(stack, *plain, "--capture", "--rows", "2", program=("-c", CHECKED))
        said(chat(ranks[0].address()))
        assert end(ranks) == [0, 0]
        for rank in ranks:
            assert "\n0 captured steps are held\n" in rank.text


def test_two_ranks_answer_as_one_and_end_together(small: Words) -> None:
    with commanded(*small) as one, commanded(*small, *MESH) as two:
        urls = one.address(), two.address()
        ranks = children(two.process.pid)
        assert len(ranks) == 2
        for body in ASKED:
            first, second = (said(chat(url, **body)) for url in urls)
            assert first == second
        two.process.send_signal(signal.SIGTERM)
        assert two.ends() == 0, two.text
        assert have_gone(ranks, patience=0)
        assert '  File "' not in two.text
        assert "error" not in two.text


def test_a_second_signal_reaches_the_ranks(small: Words) -> None:
    with commanded(*small, *MESH, "--drain", "600") as command:
        url = command.address()
        ranks = children(command.process.pid)
        body = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            while "draining" not in command.text:
                next(lines)
            assert status_of(f"{url}/ready") == 503
            command.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert command.ends() == 0, command.text
        assert rest[-2:] != ["data: [DONE]", ""] or '"finish_reason":"length"' not in "".join(rest)
        assert have_gone(ranks, patience=0)


@pytest.mark.parametrize(("rank", "is_busy"), [(1, True), (0, False), (1, False)])
def test_a_killed_rank_ends_everything_and_is_named(small: Words, rank: int, is_busy: bool) -> None:
    with commanded(*small, *MESH) as command:
        url = command.address()
        ranks = children(command.process.pid)
        with ExitStack() as stack:
            if is_busy:
                body = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
                answer = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE))
                next(answer.iter_lines())
            os.kill(ranks[rank], signal.SIGKILL)
            assert command.ends() == 1
        assert have_gone(ranks, patience=0)
        errors = [line for line in command.said if line.startswith("error: ")]
        memory = "(the system does that when memory runs out)"
        assert errors == [f"error: rank {rank} of 2 was killed by SIGKILL {memory}\n"]
        assert '  File "' not in command.text


def test_a_port_in_use_is_one_error_of_the_first_rank(small: Words) -> None:
    with commanded(*small) as one:
        port = one.address().rpartition(":")[2]
        with commanded(*small, "--port", port, *MESH) as two:
            assert two.ends() == 1
            errors = [line for line in two.said if "error" in line]
            assert len(errors) == 1, two.text
            assert errors[0].startswith(f"error: rank 0 of 2: --host 127.0.0.1 --port {port}: cannot be listened on")


def test_quiet_times_longer_than_the_pulse_break_nothing(small: Words) -> None:
    """Ranks as torchrun would start them, so that the first has a pulse of its own."""
    with ExitStack() as stack:
        ranks = ranks_apart(stack, *small, program=quiet(0.01))
        url = ranks[0].address()
        first = said(chat(url))
        for _ in range(3):
            threading.Event().wait(0.3)  # some thirty signs of life
            assert said(chat(url)) == first
        assert end(ranks) == [0, 0]
