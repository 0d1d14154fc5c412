"""Clients that go away, at any moment and in any way, clients that hardly read, and requests that are very long: what
they had is given back, and nobody else notices."""

import asyncio
import os
import random
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.serve.living import HELLO, LONG, Living, chat, client, living, opened, request, resets, resident
from tests.serve.running import run

if sys.platform != "linux":
    pytest.skip("memory is looked up in /proc", allow_module_level=True)

COUNT = int(os.environ.get("MUSE_FN_TEST_DISCONNECTS", "2000"))
TOGETHER = 24  # more than the engine's rows, so that some are in the queue
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def any_request(chance: random.Random, number: int) -> bytes:
    """A long answer in one of the ways there are."""
    body: dict[str, Any] = {**LONG, "stream": chance.random() < 0.5}
    kind = chance.random()
    if kind < 0.05:  # a grammar that nobody has built yet
        schema = {"type": "object", "properties": {f"p{number}": {"enum": list(range(40))}}, "required": [f"p{number}"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return request(CHAT, {**body, "messages": HELLO, "response_format": form})
    if kind < 0.3:  # a prompt that takes several steps
        return request(TEXT, {**body, "prompt": [chance.randrange(900) for _ in range(chance.randrange(1, 1500))]})
    if kind < 0.4:
        return request(CHAT, {**body, "messages": HELLO, "n": 3})
    if kind < 0.5:
        return request("/v1/responses", {"input": "Hello", "max_output_tokens": 5000, "stream": body["stream"]})
    return request(CHAT, {**body, "messages": HELLO})


async def gone(server: Living, chance: random.Random, number: int) -> None:
    """A client that sends a request, or a part of one, and goes."""
    loop, connection = asyncio.get_running_loop(), await opened(server)
    raw = any_request(chance, number)
    if chance.random() < 0.05:
        raw = raw[: chance.randrange(len(raw))]
    await loop.sock_sendall(connection, raw)
    if chance.random() < 0.3 and b'"stream": true' in raw:
        with suppress(TimeoutError):
            await asyncio.wait_for(loop.sock_recv(connection, 200), 0.1)
    else:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01, 0.05]))
    how = chance.random()
    if how < 0.2:  # half closed: there is no more to ask, and nobody says whether the answer is still wanted
        connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.005)
    (resets if how > 0.6 else socket.socket.close)(connection)


async def all_gone(server: Living, chance: random.Random, count: int) -> None:
    """So many of them, some at a time, and an empty server after them."""
    gate = asyncio.Semaphore(TOGETHER)

    async def one(number: int) -> None:
        async with gate:
            await gone(server, chance, number)

    await asyncio.gather(*map(one, [chance.randrange(10**9) for _ in range(count)]))
    await server.is_empty()


def test_clients_that_go_at_any_moment_leave_nothing_behind() -> None:
    """Trial 42, and 1,000 clients more."""

    async def main() -> None:
        chance = random.Random(7)
        async with living() as server, client(server) as session:
            alone = [await chat(session, seed=n, temperature=1.0) for n in range(20)]
            assert {status for status, _ in alone} == {200}
            await all_gone(server, chance, COUNT // 2)
            first = resident()
            await all_gone(server, chance, COUNT - COUNT // 2)
            second = resident()
            assert second < 1.05 * first
            aborts = server.counted("aborts_total")
            assert 0 < aborts == server.counted("requests_finished_total", reason="abort")
            assert server.counted("requests_finished_total", reason="error") == 0
            assert await asyncio.gather(*(chat(session, seed=n, temperature=1.0) for n in range(20))) == alone
            await server.is_empty()
            assert server.counted("aborts_total") == aborts
            print(f"{COUNT} gone, {aborts:.0f} jobs aborted, memory {first >> 20} and then {second >> 20} MiB")

    run(main)


def test_only_what_nobody_waits_for_counts_as_aborted() -> None:
    """Trial 42: the flood of aborts for requests that are over."""

    async def main() -> None:
        async with living() as server, client(server) as session:
            loop = asyncio.get_running_loop()
            for body in ({"stream": True}, {"n": 2}, {}):
                before, count = server.counted("aborts_total"), 0
                for _ in range(5):
                    connection = await opened(server)
                    await loop.sock_sendall(connection, request(CHAT, {**LONG, "messages": HELLO, **body}))
                    while not server.load().running:
                        await asyncio.sleep(0.001)
                    connection.close()
                    await server.is_empty()
                    count += int(body.get("n", 1))
                assert server.counted("aborts_total") - before == count
            before = server.counted("aborts_total")
            (_, text), *_ = [await chat(session, max_tokens=60)]
            assert text
            for stop in (text[-20:-10], text.partition("|")[2][:4] or "x"):
                for path, field in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Hello"})):
                    for streams in (False, True):
                        body = {**field, "max_tokens": 60, "stop": [stop, "e"], "stream": streams, "ignore_eos": True}
                        assert (await session.post(path, json=body)).status_code == 200
            await server.is_empty()
            assert server.counted("aborts_total") == before
            assert server.counted("requests_finished_total", reason="stop") > 0

    run(main)


@pytest.mark.parametrize("half", [False, True])
def test_a_plain_request_that_is_left_gives_back_what_it_had(half: bool) -> None:
    """Trial 42."""

    async def main() -> None:
        async with living() as server, client(server) as session:
            loop, expected = asyncio.get_running_loop(), await chat(session)
            held = server.load()
            for body in ({}, {"n": 4}):
                connection = await opened(server)
                await loop.sock_sendall(connection, request(CHAT, {**LONG, "messages": HELLO, **body}))
                while server.load().running < body.get("n", 1):
                    await asyncio.sleep(0.005)
                if half:
                    connection.shutdown(socket.SHUT_WR)
                else:
                    connection.close()
                await server.is_empty()
                connection.close()
            generated = server.counted("generation_tokens_total")
            assert generated < 5 * 5000
            for _ in range(10):
                assert set(await asyncio.gather(*(chat(session, max_tokens=24) for _ in range(30)))) == {expected}
            assert server.load()[:3] == held[:3]

    run(main)


async def ticks(gaps: list[float]) -> None:
    """Seconds that the loop's thread works until somebody runs who wants to now and then. Time of its own: what other
    threads and processes take from it does not count."""
    while True:
        began = time.thread_time()
        await asyncio.sleep(0.01)
        gaps.append(time.thread_time() - began)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/v1/messages", "/v1/responses"])
def test_a_prompt_of_three_megabytes_holds_nobody_up(path: str) -> None:
    """Trial 44."""
    words = "a question that never ends, and another one: 12345 " * (3_000_000 // 51)
    message = [{"role": "user", "content": words}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": message},
        TEXT: {"prompt": words},
        "/tokenize": {"prompt": words},
        "/v1/messages": {"messages": message, "max_tokens": 5, "model": "muse-nano"},
        "/v1/responses": {"input": words},
    }

    async def main() -> None:
        raw = request(path, bodies[path])
        async with living() as server, client(server) as session:
            streams = [asyncio.create_task(chat(session, **{**LONG, "max_tokens": 4000})) for _ in range(8)]
            while server.load().running < 8:
                await asyncio.sleep(0.01)
            gaps: list[float] = []
            ticking = asyncio.create_task(ticks(gaps))
            connection = await opened(server)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, raw)
            answer = asyncio.ensure_future(loop.sock_recv(connection, 200))
            while not answer.done():
                assert (await session.get("/health")).status_code == 200
                await asyncio.sleep(0.01)
            connection.close()
            ticking.cancel()
            print(f"{path}: gap {max(gaps):.3f} s of work, {answer.result()[:12]!r}")
            assert answer.result()[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 200")
            assert max(gaps) < 2
            assert server.load().running == 8
            for stream in streams:
                stream.cancel()

    run(main)


def test_readers_who_hardly_read_are_left_and_harm_nobody() -> None:
    """Trial 44: who leaves a stream unread for `limits.stall` seconds is left; what waits for them is bounded."""
    readers = 50

    async def slowly(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await loop.sock_recv(connection, 1):
            await asyncio.sleep(1)

    async def main() -> None:
        async with living({"stall": 0.5}, sends=4096, rows=64, num_blocks=20000) as server, client(server) as session:
            expected, before = await chat(session), resident()
            body = {**LONG, "messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
            connections = [await opened(server, receives=2048) for _ in range(readers)]
            for connection in connections:
                await asyncio.get_running_loop().sock_sendall(connection, request(CHAT, body))
            reading = [asyncio.create_task(slowly(connection)) for connection in connections]
            while server.load().running < readers:
                await asyncio.sleep(0.01)
            most = before
            while server.load().running:
                assert await chat(session) == expected
                most = max(most, resident())
            await server.is_empty()
            assert server.counted("aborts_total") == readers
            print(f"slow readers: {(most - before) >> 20} MiB more for {readers}")
            assert most - before < readers * (16 << 20)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            for connection in connections:
                connection.close()
            assert await chat(session) == expected

    run(main)


def test_a_stream_that_is_read_slowly_but_steadily_is_not_left() -> None:
    async def main() -> None:
        async with living({"stall": 0.5}) as server, client(server) as session:
            body = {**LONG, "messages": HELLO, "stream": True, "max_tokens": 200}
            async with session.stream("POST", CHAT, json=body) as answer:
                lines: list[str] = []
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) % 100 == 0:
                        await asyncio.sleep(0.6)
            assert [line for line in lines if line][-1] == "data: [DONE]"

    run(main)
