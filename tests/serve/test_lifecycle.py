"""The end of a server, from the first signal to the exit code, and what fails while answers are on their way."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx
import pytest

from muse_fn.serve import engine as engine_module
from muse_fn.serve.engine import ModelEngine
from muse_fn.serve.jobs import Done, Job, Refused
from muse_fn.serve.steps import Drawn, Found, Orders
from tests.serve.commanded import HELLO, PATIENCE, Command, commanded
from tests.serve.living import LONG, chat, client, living
from tests.serve.running import all_of, collected, engine_of, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STREAMS = 50
SMALL = ("--port", "0", "--rows", "32")


def job(ids: tuple[int, ...], max_new: int) -> Job:
    return Job("test", ids, max_new)


class Told(NamedTuple):
    """What a stream said of its end."""

    finish: str | None
    errors: int
    is_done: bool


def told(lines: list[str]) -> Told:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(text) for text in data if text != "[DONE]"]
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c.get("choices")]
    finish = next((end for end in ends if end is not None), None)
    return Told(finish, sum("error" in chunk for chunk in chunks), data[-1:] == ["[DONE]"])


async def streamed(session: httpx.AsyncClient, begun: Callable[[], None] = lambda: None, **body: Any) -> Told:
    """One streamed chat; `begun` is called at its first chunk."""
    lines: list[str] = []
    asked = {"messages": HELLO, "stream": True, "ignore_eos": True, "temperature": 0, **body}
    async with session.stream("POST", CHAT, json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not lines:
                begun()
            lines.append(line)
    return told(lines)


@asynccontextmanager
async def streams(url: str, **body: Any) -> AsyncGenerator[tuple[httpx.AsyncClient, list[asyncio.Task[Told]]]]:
    """Fifty streams, of which as many as run together have begun."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as session:
        count, enough = 0, asyncio.Event()

        def begun() -> None:
            nonlocal count
            count += 1
            if count >= 20:
                enough.set()

        tasks = [asyncio.create_task(streamed(session, begun, **body)) for _ in range(STREAMS)]
        await asyncio.wait_for(enough.wait(), PATIENCE)
        yield session, tasks


async def is_draining(session: httpx.AsyncClient, command: Command) -> None:
    """Waits for it; then nothing new is taken, and those who ask how it is are answered."""
    async with asyncio.timeout(PATIENCE):
        while (await session.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
    assert (await session.get("/ready")).json()["status"] == "draining"
    assert (await session.get("/health")).status_code == 200
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        answer = await session.post(path, json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "shutting down" in answer.json()["error"]["message"]
    assert command.process.poll() is None


def ended_well(command: Command) -> None:
    assert command.ends() == 0, command.text
    assert "ERROR" not in command.text
    assert '  File "' not in command.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_what_runs_or_waits_is_finished_and_nothing_new_begun(number: signal.Signals) -> None:
    async def main(url: str, command: Command) -> list[Told]:
        async with streams(url, max_tokens=150) as (session, tasks):
            command.process.send_signal(number)
            await is_draining(session, command)
            return await asyncio.gather(*tasks)

    with commanded(*SMALL, "--drain", "600") as command:
        url = command.address()
        assert set(run(lambda: main(url, command))) == {Told("length", 0, True)}
        ended_well(command)


@pytest.mark.parametrize("signals", [1, 2])
def test_at_the_end_of_the_wait_every_stream_hears_of_it(signals: int) -> None:
    """The wait is over when it is, or at once when somebody signals again."""

    async def main(url: str, command: Command) -> list[Told]:
        async with streams(url, max_tokens=1900) as (session, tasks):
            command.process.send_signal(signal.SIGTERM)
            if signals > 1:
                await is_draining(session, command)
                assert not any(task.done() for task in tasks)
                command.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    with commanded(*SMALL, "--drain", "600" if signals > 1 else "0.5") as command:
        url = command.address()
        found = run(lambda: main(url, command))
        assert all((end.finish == "abort") != (end.errors == 1) for end in found), found
        ended_well(command)


def test_a_signal_while_nobody_asks_ends_it_at_once() -> None:
    with commanded(*SMALL, "--drain", "600") as command:
        command.address()
        command.process.send_signal(signal.SIGTERM)
        ended_well(command)


FAILING = """
from muse_fn.serve import engine
from muse_fn.serve.__main__ import main
run, calls = engine.run, 0
def failing(*args):
    global calls
    calls += 1
    if calls > 30:
        raise RuntimeError("the card is gone")
    return run(*args)
engine.run = failing
main()
"""


def test_an_engine_that_has_failed_for_good_ends_the_process() -> None:
    """So that whoever started it starts it anew."""

    async def main(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as session:
            first = asyncio.create_task(streamed(session, max_tokens=1000))
            while not first.done() and (await session.get("/load")).json()["running"] == 0:
                await asyncio.sleep(0.01)  # it is the one that runs when the card goes
            return await asyncio.gather(first, *(chat(session) for _ in range(3)), return_exceptions=True)

    with commanded(*SMALL, "--rows", "1", "--drain", "600", program=("-c", FAILING)) as command:
        url = command.address()
        first, *others = run(lambda: main(url))
        assert first == Told(None, 1, False)
        assert all(isinstance(other, httpx.TransportError) or other[0] in (500, 503) for other in others), others
        assert command.ends() == 1
        assert "the card is gone" in command.text


def test_a_failed_step_is_one_error_for_each_stream_in_it_and_nothing_to_the_others() -> None:
    plain, calls = engine_module.run, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise RuntimeError("out of memory")
        return plain(*args)

    async def main() -> None:
        async with living(rows=2) as server, client(server) as session:
            expected = await chat(session)
            with patch.object(engine_module, "run", failing):
                first, second = (asyncio.create_task(streamed(session, **LONG)) for _ in range(2))
                while server.load().running < 2:
                    await asyncio.sleep(0.001)
                assert await chat(session) == expected
            assert await first == await second == Told(None, 1, False)
            assert (await session.get("/health")).status_code == 200
            await server.is_empty()

    run(main)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
def test_logits_that_are_not_finite_are_the_error_of_one_stream(path: str) -> None:
    """The tokens of one row stop making sense in the middle of its answer."""
    plain, victims = engine_module.run, set[int]()

    def failing(runner: Any, kv: Any, orders: Orders, *rest: Any) -> Any:
        found, kv = plain(runner, kv, orders, *rest)
        shares = [share for share in (*orders.reads, *orders.decodes) if share.draws]
        bad = [share.name in victims and share.start > 60 for share in shares]
        drawn = tuple(Drawn(-1, None) if is_bad else one for one, is_bad in zip(found.drawn, bad, strict=True))
        return Found(drawn, found.scores), kv

    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HELLO, **LONG},
        TEXT: {"prompt": "Hello", **LONG},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 5000, "temperature": 0},
        "/v1/messages": {"messages": HELLO, "max_tokens": 5000, "model": "muse-nano", "temperature": 0},
    }

    async def main() -> None:
        async with living() as server, client(server) as session:
            expected = await chat(session, max_tokens=120, ignore_eos=True)
            enter = ModelEngine._enter  # pyright: ignore[reportPrivateUsage]

            def noting(engine: ModelEngine, one: Any, twin: int | None) -> Any:
                stream = enter(engine, one, twin)
                victims.update([engine._names] if one.request == "victim" else [])  # pyright: ignore[reportPrivateUsage]
                return stream

            with patch.object(engine_module, "run", failing), patch.object(ModelEngine, "_enter", noting):
                headers = {"x-request-id": "victim"}
                sends = session.post(path, json={**asked[path], "stream": True}, headers=headers)
                bad = asyncio.ensure_future(sends)
                good = await asyncio.gather(*(chat(session, max_tokens=120, ignore_eos=True) for _ in range(4)))
                answer = await bad
            assert good == [expected] * 4
            assert answer.status_code == 200
            assert answer.text.count("not finite") == 1
            assert "[DONE]" not in answer.text
            assert '"finish_reason":"' not in answer.text
            assert "message_stop" not in answer.text
            assert "response.completed" not in answer.text
            await server.is_empty()

    run(main)


def test_jobs_that_have_ended_hear_of_it_even_if_the_next_plan_fails() -> None:
    plain = engine_module.plan

    async def main() -> None:
        async with engine_of() as engine:

            def failing(*args: Any) -> Any:
                has_ended = len(engine._lives) == 1  # pyright: ignore[reportPrivateUsage]
                if has_ended and engine._untold is not None:  # pyright: ignore[reportPrivateUsage]
                    raise RuntimeError("a plan that cannot be")
                return plain(*args)

            with patch.object(engine_module, "plan", failing):
                short, long = await all_of(engine, [job((1, 2, 3), 2), job((4, 5, 6), 50)])
            assert (len(short.tokens), short.done) == (2, Done("length"))
            assert long.done.finish == "error"
            with pytest.raises(Refused, match="a plan that cannot be"):
                engine.submit((job((1,), 1),))
            await asyncio.wait_for(engine.ended(), PATIENCE)

    run(main)


def test_prompts_whose_clients_left_the_queue_take_no_room_in_it() -> None:
    async def main() -> None:
        async with engine_of(rows=1, queue_tokens=100) as engine:
            running = engine.submit((job((1, 2), 90),))[0]
            for _ in range(20):
                (left,) = engine.submit((job(tuple(range(60)), 4),))
                with pytest.raises(Refused, match=r"6[02] prompt tokens are waiting: the limit is 100"):
                    engine.submit((job(tuple(range(60)), 4), job(tuple(range(60)), 4)))
                await asyncio.sleep(0)
                left.cancel()
            running.cancel()
            with suppress(Refused):
                await collected(engine.submit((job((1, 2), 4),))[0])
            assert engine._waiting_tokens == 0  # pyright: ignore[reportPrivateUsage]

    run(main)
