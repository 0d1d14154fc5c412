"""A turn against a scripted engine: what is submitted, refused before, and told, for one choice and for several."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.sample import Sampling
from muse_fn.serve.conversation import Running, budget, function_names, prompt_ids, start
from muse_fn.serve.jobs import Done, Job, Refused, Scored
from muse_fn.serve.service import Service
from muse_fn.serve.turns import Asked, Called, Ended, Named, Progress, PromptScores, Said, Turn, TurnEvent
from muse_fn.tokenizer import Json
from tests.serve.cutting import embedded
from tests.serve.script import Script, ScriptedEngine, make_service, nano, quick, tokens_of
from tests.turns import TOOLS, call, to, tool

T = TypeVar("T")
MESSAGES: Json = [{"role": "user", "content": "Hello"}]
ANSWER = [
    *tokens_of(" to=self", "<|message|>", "hm", "<|eom|>", "<|start|>"),
    *tokens_of("assistant to=user", "<|message|>", "Hi there", "<|eot|>"),
]


def limited(work: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


def turn(**fields: Any) -> Turn:
    return replace(Turn(MESSAGES), **fields)


async def told(running: Running) -> list[TurnEvent]:
    return [event async for event in running]


def run(script: Script, wanted: Turn, **engine: Any) -> tuple[ScriptedEngine, list[TurnEvent]]:
    scripted = ScriptedEngine(script, **engine)

    async def whole() -> list[TurnEvent]:
        return await told(await start(make_service(scripted), wanted, "req"))

    return scripted, limited(whole())


def refused(wanted: Turn, service: Service | None = None) -> str:
    engine = ScriptedEngine(ANSWER)
    with pytest.raises(ValueError, match=r".") as caught:
        limited(start(service or make_service(engine), wanted, "req"))
    assert engine.jobs == []
    return str(caught.value)


def of(events: list[TurnEvent], choice: int) -> list[TurnEvent]:
    return [e for e in events if isinstance(e, Said | Called | Ended) and e.choice == choice]


def test_a_plain_turn() -> None:
    engine, events = run(ANSWER, turn())
    total = len(engine.jobs[0].ids)
    assert events[0] == Progress(total, total, 0)
    said = [e for e in events if isinstance(e, Said)]
    assert "".join(e.text for e in said if e.kind == "reasoning") == "hm"
    assert "".join(e.text for e in said if e.kind == "answer") == "Hi there"
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert (ended.finish, ended.stop_reason, ended.counts.completion) == ("stop", None, len(ANSWER))
    assert engine.cancels == 0


def test_what_is_submitted() -> None:
    asked = Asked(
        n=3,
        max_new=7,
        sampling=Sampling(temperature=0.5, seed=40),
        bias=((5, 1.0),),
        allowed=(1, 2),
        stop_tokens=(9,),
        min_new=2,
        logprobs=3,
        prompt_logprobs=1,
        priority=4,
        salt="s",
    )
    engine, _ = run(ANSWER, turn(asked=asked))
    ids = limited(prompt_ids(embedded(), turn()))
    assert [job.sampling.seed for job in engine.jobs] == [40, 41, 42]
    assert [job.prompt_logprobs for job in engine.jobs] == [1, None, None]
    for job in engine.jobs:
        assert (job.request, job.ids, job.max_new, job.bias, job.allowed) == ("req", ids, 7, ((5, 1.0),), (1, 2))
        assert (job.min_new, job.logprobs, job.priority, job.salts) == (2, 3, 4, (("salt", "s"),))
        assert job.stop_tokens == (*embedded().stop_ids, 9)


def test_end_tokens_can_be_ignored() -> None:
    twice = [*ANSWER, *tokens_of("<|start|>", "assistant to=user", "<|message|>", "again")]
    engine, events = run(twice, turn(asked=Asked(ignores_end=True, max_new=len(twice))))
    assert engine.jobs[0].stop_tokens == ()
    assert "".join(e.text for e in events if isinstance(e, Said) and e.kind == "answer") == "Hi thereagain"
    assert isinstance(events[-1], Ended)
    assert events[-1].finish == "length"


@given(st.integers(1, 5), st.integers(0, 30), st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_choices_are_told_apart_and_each_as_if_alone(n: int, stop_at: int, budgets: list[int]) -> None:
    """Choice i gets another script; merged events of a choice equal those of the choice run alone."""
    scripts = [[*ANSWER[: 2 + budgets[i]], *tokens_of("word " * i)] for i in range(5)]
    asked = Asked(n=n, stop=("wo",) if stop_at % 2 else ())

    def by_seed(job: Job) -> list[int]:
        return scripts[job.sampling.seed]

    _, events = run(by_seed, turn(asked=asked))
    for choice in range(n):
        _, alone = run(scripts[choice], turn(asked=replace(asked, n=1)))
        expected = [e._replace(choice=choice) for e in of(alone, 0) if isinstance(e, Said | Ended)]
        assert of(events, choice) == expected
    assert sum(isinstance(e, Progress) for e in events) == 1


def test_a_stop_string_gives_the_place_back_at_once() -> None:
    async def two() -> None:
        gate = asyncio.Event()

        def script(job: Job) -> list[Any]:
            return [*ANSWER[:-1], asyncio.Event()] if job.sampling.seed == 0 else [*ANSWER[:3], gate, *ANSWER[3:]]

        engine = ScriptedEngine(script)
        running = await start(make_service(engine), turn(asked=Asked(n=2, stop=("there",))), "req")
        ends = list[Ended]()
        async for event in running:
            if isinstance(event, Ended):
                ends.append(event)
                assert (engine.cancels, engine.running) == (len(ends), 2 - len(ends))
                gate.set()
        assert [(e.choice, e.finish, e.stop_reason) for e in ends] == [(i, "stop", "there") for i in range(2)]

    limited(two())


@pytest.mark.parametrize("place", [0, 3])
def test_what_the_engine_throws_ends_that_choice_only(place: int) -> None:
    def one_breaks(job: Job) -> list[Any]:
        return [*ANSWER[:place], RuntimeError("boom")] if job.sampling.seed == 1 else ANSWER

    _, events = run(one_breaks, turn(asked=Asked(n=3)))
    ends = {e.choice: e for e in events if isinstance(e, Ended)}
    assert {i: e.finish for i, e in ends.items()} == {0: "stop", 1: "error", 2: "stop"}
    assert "boom" not in ends[1].why
    assert ends[1].why


def test_errors_and_aborts_of_the_engine_are_told() -> None:
    for finish in ("error", "abort"):
        _, events = run([*ANSWER[:3], Done(finish, "because")], turn())
        ended = events[-1]
        assert isinstance(ended, Ended)
        assert (ended.finish, ended.why, ended.counts.completion) == (finish, "because", 3)


def test_prompt_scores_come_once_and_whole() -> None:
    _, events = run(ANSWER, turn(asked=Asked(n=2, prompt_logprobs=2)))
    scores = [e for e in events if isinstance(e, PromptScores)]
    assert len(scores) == 1
    assert len(scores[0].found) == len(limited(prompt_ids(embedded(), turn())))
    assert scores[0].found[0] is None

    def in_parts(job: Job) -> list[Any]:
        found = [None] * len(job.ids)
        return [Scored(0, tuple(found[:4])), Scored(4, tuple(found[4:])), *ANSWER]

    _, events = run(in_parts, turn())
    assert [len(e.found) for e in events if isinstance(e, PromptScores)] == [len(scores[0].found)]


def test_whoever_stops_listening_gives_everything_back() -> None:
    engine = ScriptedEngine([*ANSWER[:4], asyncio.Event()])

    async def leave() -> None:
        running = await start(make_service(engine), turn(asked=Asked(n=3)), "req")
        before = asyncio.all_tasks()
        events = aiter(running)
        await anext(events)
        await events.aclose()
        assert engine.running == 0
        assert asyncio.all_tasks() == before

    limited(leave())
    assert engine.cancels == 3


def test_cancelling_before_and_after_listening() -> None:
    async def twice() -> None:
        engine = ScriptedEngine(ANSWER)
        running = await start(make_service(engine), turn(asked=Asked(n=2)), "req")
        running.cancel()
        running.cancel()
        assert engine.running == 0
        assert {e.finish for e in await told(running) if isinstance(e, Ended)} == {"abort"}

    limited(twice())


@given(st.integers(1, 300), st.integers(1, 300) | st.none(), st.integers(1, 300))
def test_the_budget_and_the_prompt_fit_the_window(prompt: int, asked: int | None, limit: int) -> None:
    if prompt + (asked or 1) <= limit:
        assert budget(prompt, asked, limit) == (asked or limit - prompt)
        return
    with pytest.raises(ValueError, match=rf"\b{prompt}\b.*\b{limit}\b") as caught:
        budget(prompt, asked, limit)
    assert prompt >= limit or f"max_tokens is {asked}:" in str(caught.value)


def test_the_window_of_the_model_is_kept() -> None:
    config = replace(nano()[0], max_positions=len(limited(prompt_ids(embedded(), turn()))) + 3)
    engine = ScriptedEngine(ANSWER)
    service = make_service(engine, config=config)
    events = limited(_told(service, turn()))
    assert engine.jobs[0].max_new == 3
    assert isinstance(events[-1], Ended)
    assert events[-1].finish == "length"
    assert "max_tokens" in refused(turn(asked=Asked(max_new=4)), service)


async def _told(service: Service, wanted: Turn) -> list[TurnEvent]:
    return await told(await start(service, wanted, "req"))


def test_tools_and_tool_choice_are_checked() -> None:
    tools: Json = TOOLS
    assert "tools" in refused(turn(tool_choice="required"))
    assert "'nope'" in refused(turn(tools=tools, tool_choice=Named("nope")))
    assert "'lookup'" in refused(turn(tools=[*TOOLS, tool("lookup")]))
    assert "limit of 2" in refused(turn(tools=tools), make_service(ScriptedEngine(), limits=quick(tools=2)))
    inner: Json = [{"type": "namespace", "name": "x", "tools": [tool("a"), tool("b")]}, tool("c")]
    assert "3 functions" in refused(turn(tools=inner), make_service(ScriptedEngine(), limits=quick(tools=2)))
    assert run(ANSWER, turn(tools=inner))[0].jobs
    assert "limit of 5" in refused(turn(tools=[tool("abcdef")]), make_service(ScriptedEngine(), limits=quick(name=5)))
    for name in ("user", "self", "commentary", "developer", "a b", 'a"b', "a<b", "a>b", "a\nb"):
        assert refused(turn(tools=[tool(name)])).startswith("tools:")


def test_names_of_functions_include_those_of_namespaces() -> None:
    inner: Json = {"type": "namespace", "name": "files", "tools": [tool("open"), {"name": "close"}]}
    assert function_names([tool("ping"), inner]) == ("ping", "files.open", "files.close")
    assert function_names(None) == ()


def test_tool_choice_none_keeps_tools_out_of_the_prompt_and_calls_out_of_the_answer() -> None:
    calling = tokens_of(" to=ping", "<|message|>", call("ping"), "<|eot|>")
    bare = limited(prompt_ids(embedded(), turn()))
    assert limited(prompt_ids(embedded(), turn(tools=TOOLS, tool_choice="none"))) == bare
    assert limited(prompt_ids(embedded(), turn(tools=TOOLS))) != bare
    engine, events = run(calling, turn(tools=TOOLS, tool_choice="none"))
    assert engine.jobs[0].ids == bare
    assert not any(isinstance(e, Called) for e in events)
    _, events = run(calling, turn(tools=TOOLS))
    assert [(e.name, e.number) for e in events if isinstance(e, Called)] == [("ping", 0)]


@pytest.mark.parametrize("effort", ["none", "minimal", "max", "\n"])
def test_an_effort_that_the_template_does_not_know_is_refused_with_those_it_knows(effort: str) -> None:
    said = refused(turn(effort=effort))
    assert said.startswith("reasoning_effort must be one of 'low', 'medium', 'high', 'xhigh'")


def test_efforts_that_the_template_knows_change_the_prompt() -> None:
    prompts = {limited(prompt_ids(embedded(), turn(effort=e))) for e in ("low", "medium", "high", "xhigh")}
    assert len(prompts) == 4


def test_a_full_engine_refuses_as_it_says() -> None:
    engine = ScriptedEngine(ANSWER, refuses=Refused("full", retry_after=3))
    with pytest.raises(Refused, match="full"):
        limited(start(make_service(engine), turn(), "req"))


def test_without_a_tokenizer_there_is_no_chat() -> None:
    assert refused(turn(), make_service(ScriptedEngine(), tokenizer=None)).startswith("messages:")


def test_malformed_messages_name_their_field() -> None:
    assert refused(turn(messages=[{"role": "wizard", "content": "x"}])).startswith("messages[0].role:")
    assert refused(turn(messages=[{"role": "user", "content": "\ud83d"}])).startswith("messages[0].content:")
    assert refused(turn(variables={"messages": 1})).startswith("template variable messages")


def test_a_flood_of_messages_is_refused_before_any_is_read() -> None:
    """Trial 48."""
    assert refused(turn(messages=[5] * 16385)) == "messages: 16385 messages are more than the limit of 16384"
    assert refused(turn(messages=[5] * 16384)).startswith("messages[0]: ")


def test_the_first_header_need_not_be_there() -> None:
    _, events = run(tokens_of(to("user")[18:].split("<")[0], "<|message|>", "ok", "<|eot|>"), turn())
    assert [e.text for e in events if isinstance(e, Said)] == ["ok"]
