"""`muse-fn bench serve`: its counts against what a scripted engine did, its percentiles against their definition."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.serve.__main__ import main
from muse_fn.serve.app import make_app
from muse_fn.serve.bench_serve import draw, rows_of
from muse_fn.serve.jobs import Done, Job, Refused
from muse_fn.serve.load_generator import (
    UNFINISHED,
    WORDS,
    Level,
    Sample,
    Spread,
    Summary,
    Target,
    arrivals,
    ask,
    random_prompts,
    run_level,
    spread,
    summary,
)
from tests.serve.loopback import answers, serving
from tests.serve.script import ScriptedEngine, Step, make_service, nano
from tests.serve.web import on_loop, served, until

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
KNOWN = [token for token, raw in enumerate(nano()[1].bytes_of) if raw is not None]
PATIENCE = 120  # seconds until a test that hangs fails
PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@given(VALUES, st.randoms(use_true_random=False))
def test_a_percentile_parts_the_values(values: list[float], random: Any) -> None:
    found = spread(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= max(values)
    for name, part in PARTS.items():
        at, slack = getattr(found, name), 1e-9 * max(values)
        # Between neighbours k and k + 1, where k is the whole part of part * (n - 1).
        assert sum(value < at - slack for value in values) <= part * (len(values) - 1) + 1
        assert sum(value <= at + slack for value in values) >= part * (len(values) - 1)
    random.shuffle(values)
    assert spread(values) == found


@given(st.integers(1, 200))
def test_a_percentile_is_linear_between_neighbours(count: int) -> None:
    found = spread([float(value) for value in range(count)])
    assert found is not None
    assert found == pytest.approx([part * (count - 1) for part in PARTS.values()])


def test_nothing_has_no_percentiles() -> None:
    assert spread([]) is None


@given(st.lists(st.tuples(st.sampled_from(["", "timeout", "cut off"]), st.integers(0, 9), st.integers(0, 5))))
def test_a_summary_counts_what_succeeded(given: list[tuple[str, int, int]]) -> None:
    samples = tuple(Sample(failure, 1.0, 0.5, (0.1,) * gaps, 7, 3, output, True) for failure, output, gaps in given)
    found = summary(Level(4, 2.0, samples))
    ok = [entry for entry in given if not entry[0]]
    assert found.ok == len(ok)
    assert found.ok + sum(found.failed.values()) == len(given)
    assert all(found.failed.values())
    assert (found.prompt_tokens, found.cached_tokens) == (7 * len(ok), 3 * len(ok))
    assert found.output_tokens == sum(output for _, output, _ in ok)
    assert found.output_tokens_per_second == found.output_tokens / 2
    assert found.requests_per_second == len(ok) / 2
    assert (found.whole is None) == (not ok)
    assert (found.between_tokens is None) == (not any(gaps for _, _, gaps in ok))


def test_prompts_are_a_function_of_the_seed() -> None:
    given = random_prompts(5, 12, "seed")
    assert given == random_prompts(5, 12, "seed") != random_prompts(5, 12, "other")
    texts = [messages[0]["content"] for messages in given]
    assert len(set(texts)) == 5
    assert all(len(text.split()) == 12 and set(text.split()) <= set(WORDS) for text in texts)


def test_arrivals_are_a_poisson_process() -> None:
    found = arrivals(20_000, 50.0, "seed")
    assert found == sorted(found) == arrivals(20_000, 50.0, "seed")
    gaps = [later - time for time, later in zip([0.0, *found], found, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # Both are known to within 1 % and 3 % at this count; an exponential's deviation is its mean.
    assert mean == pytest.approx(1 / 50, rel=0.04)
    assert variance**0.5 == pytest.approx(1 / 50, rel=0.06)


def level_of(engine: ScriptedEngine, count: int, concurrency: int, *, api: str = "chat", **more: Any) -> Level:
    """A level of load over a real connection."""

    async def work() -> Level:
        async with served(make_app(make_service(engine))) as port:
            target = Target(
                f"http://127.0.0.1:{port}/v1", "nano", None, {"max_tokens": 500, "ignore_eos": True}, api=api
            )
            return await run_level(target, random_prompts(count, 5, "test"), concurrency, **more)

    return on_loop(work())


@pytest.mark.parametrize("times", [None, [0.0] * 9])
def test_tokens_are_counted_as_the_engine_made_them(times: list[float] | None) -> None:
    tokens = answers("Some words.")
    engine = ScriptedEngine(tokens, cached=2)
    noted: list[Sample] = []
    level = level_of(engine, 9, 4, times=times, note=noted.append)
    found = summary(level)
    assert (found.ok, found.failed, found.has_usage) == (9, {}, True)
    assert found.output_tokens == 9 * len(tokens)
    assert found.cached_tokens == 9 * 2
    assert found.prompt_tokens == sum(len(job.ids) for job in engine.jobs)
    assert sorted(noted) == sorted(level.samples)
    for sample in level.samples:
        assert 0 < len(sample.gaps) + 1 <= len(tokens)
        assert sample.first is not None
        assert 0 <= sample.first
        assert sample.first + sum(sample.gaps) <= sample.whole <= level.seconds
    assert {job.max_new for job in engine.jobs} == {500}
    assert len({job.ids for job in engine.jobs}) == 9


NOISE = st.lists(st.sampled_from(KNOWN), min_size=1, max_size=12)


@settings(deadline=None, max_examples=25)
@given(NOISE, st.sampled_from(["chat", "completions"]))
def test_noise_is_counted_and_every_token_of_a_completion_is_timed(tokens: list[int], api: str) -> None:
    """Parts of characters, control tokens, end tokens, headers, damaged calls."""
    engine = ScriptedEngine([*tokens, Done("length")])
    level = level_of(engine, 3, 2, api=api)
    found = summary(level)
    assert (found.ok, found.failed, found.has_usage) == (3, {}, True)
    assert found.output_tokens == 3 * len(tokens)
    if api == "completions":
        assert [len(sample.gaps) + (sample.first is not None) for sample in level.samples] == [len(tokens)] * 3


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_are_asked_at_once_than_was_said(concurrency: int) -> None:
    most = 0

    def script(job: Job) -> Iterable[Step]:
        nonlocal most
        most = max(most, engine.running + 1)
        return answers("Some words that take several steps.")

    engine = ScriptedEngine(script)
    assert summary(level_of(engine, 12, concurrency)).ok == 12
    assert most == concurrency


def test_failures_are_told_apart() -> None:
    def script(job: Job) -> Iterable[Step]:
        number = len(engine.jobs)
        tokens = answers("Several good words.")
        return [*tokens[:-2], Done("error", "broken")] if number % 3 == 0 else tokens

    engine = ScriptedEngine(script)
    found = summary(level_of(engine, 9, 1))
    assert (found.ok, found.failed) == (6, {"error in the stream": 3})
    engine = ScriptedEngine(refuses=Refused("full"))
    assert summary(level_of(engine, 4, 2)).failed == {"status 429": 4}


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ('data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n', "cut off"),
        ("", "cut off"),
        ("data: {\n\n", "not understood"),
        ("data: 7\n\n", "not understood"),
        ('data: {"choices": 7}\n\n', "not understood"),
        ('data: {"usage": "many"}\n\n', "not understood"),
        ('data: {"error": {"message": "no"}}\n\n', "error in the stream"),
        (': hello\r\n\r\ndata:{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\r\n\r\n', ""),
    ],
)
def test_what_a_server_may_say(text: str, failure: str) -> None:
    async def work() -> Sample:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await ask(client, Target("http://test", "any"), [])

    found = on_loop(work())
    assert found.failure == failure
    assert found.has_usage is False


@pytest.mark.parametrize(
    ("error", "failure"), [(httpx.ConnectError("no"), "connection"), (httpx.ReadTimeout("slow"), "timeout")]
)
def test_what_a_network_may_do(error: Exception, failure: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    async def work() -> Sample:
        async with httpx.AsyncClient(transport=httpx.MockTransport(fail), base_url="http://test") as client:
            return await ask(client, Target("http://test", "any"), [])

    assert on_loop(work()).failure == failure


def held_after(count: int) -> ScriptedEngine:
    """An engine that answers so many jobs and lets the others wait for ever."""

    def script(job: Job) -> Iterable[Step]:
        return answers("Good") if len(engine.jobs) < count else [asyncio.Event()]

    engine = ScriptedEngine(script)
    return engine


def test_a_level_ends_when_its_time_is_over() -> None:
    level = level_of(held_after(0), 3, 2, limit=0.2)
    assert (level.is_cut, level.is_interrupted) == (True, False)
    assert summary(level).failed == {UNFINISHED: 3}


def test_a_request_ends_when_its_time_is_over() -> None:
    async def work() -> Level:
        async with served(make_app(make_service(held_after(0)))) as port:
            target = Target(f"http://127.0.0.1:{port}", "nano", timeout=0.2)
            return await run_level(target, random_prompts(2, 5, "test"), 2)

    assert summary(on_loop(work())).failed == {"timeout": 2}


def test_an_interrupted_level_keeps_what_is_known() -> None:
    async def work() -> Level:
        engine, noted = held_after(2), list[Sample]()
        async with served(make_app(make_service(engine))) as port:
            target = Target(f"http://127.0.0.1:{port}", "nano")
            asked = random_prompts(5, 5, "test")
            task = asyncio.create_task(run_level(target, asked, 1, note=noted.append))
            await until(lambda: len(engine.jobs) == 3 and len(noted) == 2)
            task.cancel()
            return await task

    level = on_loop(work())
    assert level.is_interrupted
    found = summary(level)
    assert (found.ok, found.failed) == (2, {UNFINISHED: 3})


def command(patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `muse-fn bench serve` in this process."""
    patch.setattr(sys, "argv", ["muse-fn", "bench", "serve", *words])
    with pytest.raises(SystemExit) as end:
        main()
    found = capture.readouterr()
    return end.value.code if isinstance(end.value.code, int) else 0, found.out, found.err


def test_the_command_prints_json_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine, plot = ScriptedEngine(answers("Good")), tmp_path / "levels.svg"
    with serving(make_app(make_service(engine, keys=("secret",)))) as url:
        words = ["--url", url, "--api-key", "secret", "--concurrency", "1,2", "--requests", "3", "--json"]
        code, out, _ = command(monkeypatch, capsys, *words, "--plot", str(plot), "--rate", "1000")
    assert code == 0
    levels = json.loads(out)["levels"]
    assert [(one["concurrency"], one["ok"], one["failed"]) for one in levels] == [(1, 3, {}), (2, 3, {})]
    assert all(one["whole"].keys() == {"p50", "p90", "p99"} for one in levels)
    assert "output tokens/s" in plot.read_text()
    assert len({job.ids for job in engine.jobs}) == 6, "a level asks nothing that the one before has asked"


def test_the_command_reads_prompts_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, engine = tmp_path / "prompts.jsonl", ScriptedEngine(answers("Good"))
    lines: list[object] = ["one", {"prompt": "two"}, {"messages": [{"role": "user", "content": "three"}]}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    with serving(make_app(make_service(engine))) as url:
        words = ["--url", url, "--prompts", str(file), "--concurrency", "2", "--requests", "7"]
        code, out, _ = command(monkeypatch, capsys, *words, "--fields", '{"temperature": 0.5}')
    assert code == 0
    assert "output tokens/s" in out
    counts = sorted(
        sum(job.ids == other.ids for job in engine.jobs) for other in {j.ids: j for j in engine.jobs}.values()
    )
    assert counts == [2, 2, 3]
    assert {job.sampling.temperature for job in engine.jobs} == {0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency 1,x: must be whole numbers"),
        (["--concurrency", "0"], "--concurrency 0: must be"),
        (["--fields", "[]"], "--fields []: must be a JSON object"),
        (["--plot", "levels.txt"], "--plot levels.txt: must end in .png or .svg"),
        (["--url", "ftp://nowhere"], "--url ftp://nowhere: must begin with http://"),
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: cannot be reached"),
        (["--url", "http://127.0.0.1:1", "--model", "any"], "--url http://127.0.0.1:1: no request succeeded"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(monkeypatch, capsys, "--requests", "2", *words)
    assert code == 1
    assert message in err


def test_all_lines_at_fault_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"good"\n{\n7\n')
    code, _, err = command(monkeypatch, capsys, "--prompts", str(file))
    assert code == 1
    assert "line 2: not JSON" in err
    assert "line 3: must be a string" in err


def test_completions_take_texts_and_no_conversations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, engine = tmp_path / "prompts.jsonl", ScriptedEngine(answers("Good"))
    words = ["--prompts", str(file), "--api", "completions", "--concurrency", "1", "--requests", "2", "--json"]
    file.write_text('"one"\n{"messages": [{"role": "user", "content": "three"}]}\n')
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 1
    assert 'line 2: must be a string or {"prompt": string}' in err
    file.write_text('"one"\n{"prompt": "two"}\n')
    with serving(make_app(make_service(engine))) as url:
        code, out, _ = command(monkeypatch, capsys, *words, "--url", url)
    assert code == 0
    (level,) = json.loads(out)["levels"]
    assert (level["ok"], level["output_tokens"]) == (2, 2 * len(answers("Good")))
    assert {nano()[1].decode(job.ids)[-3:] for job in engine.jobs} == {"one", "two"}


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str) -> None:
        return None

    monkeypatch.setattr("muse_fn.serve.drawing.find_spec", find_spec)
    code, _, err = command(monkeypatch, capsys, "--plot", "levels.png")
    assert code == 1
    assert "pip install muse-fn[plot]" in err


def test_ctrl_c_prints_what_is_known() -> None:
    engine = held_after(2)
    with serving(make_app(make_service(engine))) as url:
        words = ["bench", "serve", "--url", url, "--concurrency", "1,2", "--requests", "5", "--json"]
        process = subprocess.Popen([sys.executable, "-m", "muse_fn.serve", *words], stdout=subprocess.PIPE)
        try:
            on_loop(until(lambda: len(engine.jobs) == 3 or process.poll() is not None, PATIENCE), PATIENCE)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    (level,) = json.loads(out)["levels"]
    assert (level["ok"], level["failed"]) == (2, {UNFINISHED: 3})


def test_levels_without_success_are_shown_too(tmp_path: Path) -> None:
    none = summary(Level(3, 1.0, (Sample("timeout"),)))
    some = Summary(5, 1.0, 1, {}, 1.0, 2.0, 3, 4, 5, True, Spread(1, 2, 3), None, Spread(1, 2, 3))
    rows = dict(rows_of([none, some]))
    assert rows["failed: timeout"] == ["1", "0"]
    assert rows["first token p90, ms"] == ["none", "2,000.0"]
    draw([none, some], tmp_path / "levels.png")
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")
