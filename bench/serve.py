"""The server under load, on the embedded checkpoint with its experts packed, as `muse-fn serve` has them by default.

    python bench/serve.py [--requests 64] [--clients 64] [--out FILE]

One run, three questions. How many tokens a second do many streaming clients get over HTTP, and how many does
transformers make of the same greedy chats one after the other, on the same weights unpacked to float32, in the fastest
of its forms and thread counts? How late is the event loop of the server, and what speed do running answers keep, while
a prompt of many windows is read beside them? Prints Markdown; nothing here asserts a time, but answers that differ are
told.
"""

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

import muse_fn
from muse_fn.batch import Runner
from muse_fn.generation import BLOCK
from muse_fn.kernels.packed import dequantise
from muse_fn.load import Model
from muse_fn.params.schema import sparse_layers
from muse_fn.params.tree import from_named, named
from muse_fn.serve.chat import render_chat
from muse_fn.serve.engine import EngineSettings
from muse_fn.serve.launch import free_port
from muse_fn.serve.leading import Listening, listen, serving
from muse_fn.serve.load_generator import WORDS, Summary, Target, events, run_level, summary
from muse_fn.serve.options import EMBEDDED
from muse_fn.serve.serving import blocks_that_fit, leave_a_core

TICK = 0.005  # seconds between looks at the event loop
PATIENCE = 600.0  # seconds that any one part may take
FORMS = ("grouped_mm", "batched_mm", "eager")  # of transformers' experts
TARGETS = {"ratio": 10.0, "gap": 0.1, "kept": 0.74}

Ids = list[int]


class Theirs(NamedTuple):
    """What transformers showed."""

    form: str
    threads: int
    answers: list[Ids]
    seconds: float


class Beside(NamedTuple):
    """What a long prompt does to those who are answered. Gaps are seconds that a tick of the event loop came late."""

    length: int  # tokens of the prompt
    seconds: float  # until its first token
    alone: float  # tokens a second of all streams, before and after
    beside: float
    gaps_alone: list[float]
    gaps_beside: list[float]


def chats(count: int, seed: str = "chats") -> list[list[dict[str, Any]]]:
    """Conversations that the model knows how to answer."""
    draw = Random(seed)
    return [
        [{"role": "user", "content": f"What is {draw.randrange(10, 1000)} + {draw.randrange(10, 1000)}?"}]
        for _ in range(count)
    ]


def prompt_of(model: Model, messages: list[dict[str, Any]]) -> Ids:
    """The ids that the server makes of a chat."""
    assert model.tokenizer is not None
    loose: Any = messages
    return model.tokenizer.encode_pieces(render_chat(model.tokenizer, loose))


# transformers ------------------------------------------------------------------------------------------------------


PROBE = 4  # chats by which the fastest form is found


def theirs(model: Model, prompts: Sequence[Ids], new: int, threads: int) -> Theirs:
    """The prompts one after the other through transformers' generate."""
    assert model.tokenizer is not None
    stops = list(model.tokenizer.stop_ids)
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        values = {path: dequantise(weight, torch.float32) for path, weight in named(model.params).items()}
        muse_fn.save(folder, from_named(sparse_layers(model.config), values), model.config, format="float32")
        found: list[tuple[float, int, str, Any]] = []
        for form in FORMS:
            peer = their_model(folder, form)
            for count in sorted({1, threads}):
                torch.set_num_threads(count)
                their_answer(peer, prompts[0], 2, stops)
                started = time.perf_counter()
                made = sum(len(their_answer(peer, ids, new, stops)) for ids in prompts[:PROBE])
                found.append(((time.perf_counter() - started) / made, count, form, peer))
        _, count, form, peer = min(found, key=lambda entry: entry[0])
        torch.set_num_threads(count)
        started, answers = time.perf_counter(), list[Ids]()
        for number, ids in enumerate(prompts):
            progress(f"transformers, {form}, {count} threads: {number} of {len(prompts)}")
            answers.append(their_answer(peer, ids, new, stops))
        seconds = time.perf_counter() - started
    torch.set_num_threads(before)
    return Theirs(form, count, answers, seconds)


def their_model(folder: str, form: str) -> Any:
    """The saved model as transformers loads it. Its towers for images and sounds are random, and never run."""
    from transformers import MuseSparkForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loose: Any = MuseSparkForConditionalGeneration
    return loose.from_pretrained(folder, dtype=torch.float32, experts_implementation=form).eval()


def their_answer(peer: Any, prompt: Ids, new: int, stops: Ids) -> Ids:
    """Greedy tokens, up to a stop token if there is one."""
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "eos_token_id": stops, "do_sample": False}
    return peer.generate(ids, max_new_tokens=new, **given)[0, len(prompt) :].tolist()


# Many clients ------------------------------------------------------------------------------------------------------


@contextmanager
def server_process(threads: int | None) -> Generator[str]:
    """`muse-fn serve` in a process of its own; its address. Without a number of threads it takes its own default."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "muse_fn.serve", "serve", "--port", str(port), "--log-level", "warning"]
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, stderr=said, stdout=said, env=environment, cwd=folder)
        try:
            yield _once_ready(process, f"http://127.0.0.1:{port}")
        except RuntimeError:
            said.seek(0)
            print(said.read().decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _once_ready(process: subprocess.Popen[bytes], url: str) -> str:
    until = time.monotonic() + PATIENCE
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < until and process.poll() is None:
            try:
                if client.get(f"{url}/ready").status_code == 200:
                    return url
            except httpx.TransportError:
                time.sleep(0.1)
    raise RuntimeError("the server did not start")


async def crowd(url: str, asked: list[list[dict[str, Any]]], clients: int, new: int) -> tuple[Summary, list[Ids]]:
    """The chats streamed to so many clients at a time, and afterwards, not timed, asked again for their token ids."""
    fields = {"max_tokens": new, "temperature": 0}
    target = Target(url, "muse-nano", fields=fields, timeout=PATIENCE)
    await run_level(target, chats(2 * clients, "warm-up"), clients, limit=PATIENCE)
    level = await run_level(target, asked, clients, limit=PATIENCE)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as client:

        async def ids_of(messages: list[dict[str, Any]]) -> Ids:
            body = {"messages": messages, "return_token_ids": True, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.raise_for_status().json()["choices"][0]["token_ids"]

        return summary(level), list(await asyncio.gather(*map(ids_of, asked)))


# A long prompt beside answers --------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What is counted while the server runs in this process."""

    tokens: int = 0
    gaps: list[float] = field(default_factory=list[float])

    async def tick(self) -> None:
        """Notes how late the event loop is, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK
            await asyncio.sleep(TICK)
            self.gaps.append(max(0.0, loop.time() - due))

    async def follow(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Counts the tokens of a stream."""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for event in events(response):
                self.tokens += sum(len(choice["token_ids"]) for choice in event["choices"])

    async def during(self, work: Any) -> tuple[float, float, list[float]]:
        """Seconds, tokens a second, and gaps while this is awaited."""
        tokens, gaps, started = self.tokens, len(self.gaps), time.perf_counter()
        await work
        seconds = time.perf_counter() - started
        return seconds, (self.tokens - tokens) / seconds, self.gaps[gaps:]


async def beside(model: Model, streams: int, windows: int, seconds: float) -> Beside:
    """Streams alone, with a long prompt, and alone again. Clients and server share one event loop, so the clients' own
    work counts against the server."""
    assert model.tokenizer is not None
    long = windows * model.config.window
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    text = " ".join(Random("long").choices(WORDS, k=long))
    prompt = model.tokenizer.encode(text)[:long]
    watch = Watch()
    async with served(model) as (url, limit), httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as client:
        tasks = [asyncio.create_task(watch.tick())]
        for number in range(streams):
            asked = {**body, "prompt": f"Stream {number}:", "max_tokens": limit - 32}
            tasks.append(asyncio.create_task(watch.follow(client, asked)))
        try:
            async with asyncio.timeout(PATIENCE):
                while watch.tokens < 16 * streams:
                    await asyncio.sleep(TICK)
                _, before, gaps = await watch.during(asyncio.sleep(seconds))
                asked = {**body, "prompt": prompt, "max_tokens": 1}
                spent, during, gaps_beside = await watch.during(client.post("/v1/completions", json=asked))
                _, after, more = await watch.during(asyncio.sleep(seconds))
        finally:
            for task in tasks:
                task.cancel()
            failures = [x for x in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(x, Exception)]
    if failures:
        raise failures[0]
    return Beside(len(prompt), spent, (before + after) / 2, during, gaps + more, gaps_beside)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The kind of event loop that the command takes."""
    return None if find_spec("uvloop") is None else import_module("uvloop").new_event_loop


@asynccontextmanager
async def served(model: Model) -> AsyncGenerator[tuple[str, int]]:
    """The server on this event loop; its address and the longest sequence."""
    runner = Runner(model.params, model.config)
    settings = EngineSettings(num_blocks=blocks_that_fit(runner, 64, None, BLOCK, None))
    listening = Listening(port=0)
    with closing(listen(listening.host, 0)) as listener:
        async with serving(model, runner, settings, listening) as (server, _, engine):
            task = asyncio.create_task(server.serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine.limit
            finally:
                server.should_exit = server.force_exit = True
                await task


# The report --------------------------------------------------------------------------------------------------------


def of_crowd(peer: Theirs, ours: Summary, answers: list[Ids], clients: int) -> list[str]:
    """Lines about many clients."""
    made = sum(map(len, peer.answers))
    their_rate, rate = made / peer.seconds, ours.output_tokens_per_second
    same = sum(a == b for a, b in zip(peer.answers, answers, strict=True))
    first, between = ours.first_token, ours.between_tokens
    times = [
        f"{name} {' / '.join(f'{value * 1e3:,.0f}' for value in found)} ms"
        for name, found in (("first token", first), ("between tokens", between))
        if found
    ]
    return [
        f"Greedy answers equal to transformers': {same} of {len(answers)}. Failed requests: {ours.failed or 'none'}.",
        "",
        "| | requests | tokens | tokens/s | ratio |",
        "|---|---|---|---|---|",
        f"| transformers, one after the other ({peer.form}, {peer.threads} threads) | {len(peer.answers)} | {made:,} "
        f"| {their_rate:,.1f} | 1 |",
        f"| server, {clients} clients at once | {ours.ok} | {ours.output_tokens:,} | {rate:,.1f} "
        f"| {rate / their_rate:.1f} (target {TARGETS['ratio']:.0f}) |",
        "",
        f"Of the server, p50 / p90 / p99: {'; '.join(times)}. Prompt tokens {ours.prompt_tokens:,}, of these cached "
        f"{ours.cached_tokens:,}.",
    ]


def of_beside(found: Beside, streams: int) -> list[str]:
    """Lines about a long prompt."""

    def line(name: str, rate: float, gaps: list[float]) -> str:
        p50, p99, most = (np.percentile(gaps, part) * 1e3 for part in (50, 99, 100))
        return f"| {name} | {rate:,.1f} | {p50:.1f} | {p99:.1f} | {most:.1f} | {len(gaps):,} |"

    return [
        f"| {streams} streams | tokens/s | gap p50, ms | gap p99, ms | gap max, ms | ticks |",
        "|---|---|---|---|---|---|",
        line("alone, before and after", found.alone, found.gaps_alone),
        line(f"beside a prompt of {found.length:,} tokens", found.beside, found.gaps_beside),
        "",
        f"Kept speed {found.beside / found.alone:.2f} (target {TARGETS['kept']}); gap p99 target "
        f"{TARGETS['gap'] * 1e3:.0f} ms. The long prompt's first token came after {found.seconds:.1f} s, that is "
        f"{found.length / found.seconds:,.0f} tokens/s.",
    ]


def progress(text: str) -> None:
    """One line on stderr that is written over."""
    print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def load() -> str:
    """How busy the machine is, others included."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def machine() -> str:
    """What this ran on, in words."""
    import transformers  # pyright: ignore

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    return f"{kind}, {versions}, steps on {torch.get_num_threads()} threads, float32, experts MXFP4."


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="chats, asked of both")
    parser.add_argument("--clients", type=int, default=64, help="at the same time")
    parser.add_argument("--new", type=int, default=64, help="most new tokens of a chat")
    parser.add_argument("--streams", type=int, default=8, help="answers beside which a long prompt is read")
    parser.add_argument("--windows", type=int, default=100, help="length of that prompt, in windows")
    parser.add_argument("--seconds", type=float, default=5.0, help="that the streams are watched alone, twice")
    parser.add_argument("--threads", type=int, help="of the server; by default as many as muse-fn serve takes")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    return parser.parse_args()


def main() -> None:
    args = options()
    model = muse_fn.load(EMBEDDED)
    asked = chats(args.requests)
    loads = [load()]
    peer = theirs(model, [prompt_of(model, messages) for messages in asked], args.new, torch.get_num_threads())
    loads.append(load())
    progress("the server under load")
    with server_process(args.threads) as url:
        ours, answers = asyncio.run(crowd(url, asked, args.clients, args.new))
    loads.append(load())
    progress("a long prompt beside answers")
    if args.threads is None:
        leave_a_core()
    else:
        torch.set_num_threads(args.threads)
    room = max(model.config.max_positions, args.windows * model.config.window + 1792)
    config = replace(model.config, max_positions=room)
    with asyncio.Runner(loop_factory=loop_factory()) as loop:
        found = loop.run(beside(model._replace(config=config), args.streams, args.windows, args.seconds))
    loads.append(load())
    progress("")
    print("\r", end="", file=sys.stderr)
    head = [
        f"# Serving, {date.today().isoformat()}",
        "",
        f"{machine()} Load of the machine before and after each ",
    ]
    head[-1] += f"part, others included: {', '.join(loads)}."
    lines = [*head, "", *of_crowd(peer, ours, answers, args.clients), "", *of_beside(found, args.streams)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
