"""Tool choice and structured output over HTTP, with a model that knows nothing: it writes at random what it may."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from muse_fn.serve.grammar import Grammars
from muse_fn.serve.grammar_trial import Slow, Trials
from muse_fn.serve.jobs import Job
from muse_fn.serve.service import Service
from tests.serve.asking import HELLO, ask, both, post, refused
from tests.serve.grammar_walk import VOCAB, tokenizer, walk
from tests.serve.script import ScriptedEngine, make_service
from tests.turns import TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
NAMES = {"lookup", "add", "ping", "noargs", "get_weather", "write_file", "read"}
SEEDS = range(4)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.stop()


def model(job: Job) -> list[int]:
    """The tokens of a random walk under the job's constraint, drawn with the job's seed."""
    assert job.constraint is not None
    return walk(job.constraint, job.sampling.seed, tools=TOOLS)


def serving(grammars: Grammars) -> Service:
    return make_service(ScriptedEngine(model), grammars=grammars)


def asked(grammars: Grammars, **fields: Any) -> dict[str, Any]:
    (choice,) = both(serving(grammars), **fields)["choices"]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = choice["message"].get("tool_calls", ())
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]


@pytest.mark.parametrize("seed", SEEDS)
def test_12_required_always_calls(grammars: Grammars, seed: int) -> None:
    choice = asked(grammars, seed=seed, tools=TOOLS, tool_choice="required")
    assert {name for name, _ in calls_of(choice)} <= NAMES
    assert calls_of(choice)
    assert choice["finish_reason"] == "tool_calls"
    assert "damaged_tool_calls" not in choice


@pytest.mark.parametrize("seed", SEEDS)
def test_12_a_named_tool_is_the_one_that_is_called(grammars: Grammars, seed: int) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = asked(grammars, seed=seed, tools=TOOLS, tool_choice=named)
    assert {name for name, _ in calls_of(choice)} == {"get_weather"}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("seed", SEEDS)
def test_12_none_never_calls(grammars: Grammars, seed: int) -> None:
    choice = asked(grammars, seed=seed, tools=TOOLS, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("seed", SEEDS)
def test_12_one_call_at_most(grammars: Grammars, seed: int) -> None:
    choice = asked(grammars, seed=seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(choice)) == 1


@pytest.mark.parametrize("effort", ["low", "high"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("seed", SEEDS)
def test_14_the_answer_keeps_to_the_schema(grammars: Grammars, seed: int, tools: Any, effort: str) -> None:
    choice = asked(grammars, seed=seed, tools=tools, reasoning_effort=effort, response_format=FORMAT)
    if choice["message"]["content"] or not tools:
        found = json.loads(choice["message"]["content"])
        assert list(found) == ["n"]
        assert type(found["n"]) is int
    else:
        assert calls_of(choice)


@pytest.mark.parametrize("seed", SEEDS)
def test_14_other_rules(grammars: Grammars, seed: int) -> None:
    def content(**fields: Any) -> str:
        return asked(grammars, seed=seed, **fields)["message"]["content"]

    assert isinstance(json.loads(content(response_format={"type": "json_object"})), dict)
    assert re.fullmatch("[ab]{2,4}c", content(structured_outputs={"regex": "[ab]{2,4}c"}))
    assert content(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert list(json.loads(content(structured_outputs={"json": SCHEMA}))) == ["n"]


def test_14_a_cut_answer_says_so(grammars: Grammars) -> None:
    choice = asked(grammars, seed=1, response_format=FORMAT, max_tokens=12)
    assert choice["finish_reason"] == "length"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": ""}, "structured_outputs.json"),
    ({"json": {"type": "strnig"}}, "structured_outputs.json"),
    ({"json_object": False}, "structured_outputs.json_object"),
    ({"regex": "("}, "structured_outputs.regex"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"grammar": ""}, "structured_outputs.grammar"),
    ({"json": {}, "regex": "a"}, "structured_outputs"),
    ({}, "structured_outputs"),
]


@pytest.mark.parametrize(("rule", "param"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_17_rules_that_cannot_be_kept_are_named(grammars: Grammars, rule: dict[str, Any], param: str) -> None:
    service = serving(grammars)
    error = refused(service, structured_outputs=rule)
    assert (error["status"], error["param"]) == (400, param), error
    if "json" in rule and isinstance(rule["json"], dict) and rule["json"]:
        schema = {"name": "x", "schema": rule["json"]}
        error = refused(service, response_format={"type": "json_schema", "json_schema": schema})
        assert error["param"].startswith("response_format.json_schema")
    assert post(service, {"messages": HELLO, "structured_outputs": {"choice": ["a"]}}).status_code == 200


def test_grammars_are_counted_and_so_are_those_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that have nothing to enforce build none."""

    def run(self: Trials, grammars: list[str]) -> None:
        raise Slow("does not compile within the limits")

    monkeypatch.setattr(Trials, "run", run)
    made = Grammars(tokenizer(), VOCAB)
    try:
        service = serving(made)
        assert refused(service, structured_outputs={"regex": "a"})["param"] == "structured_outputs.regex"
        free = make_service(ScriptedEngine([]), grammars=made, metrics=service.metrics)
        ask(free, tools=TOOLS)
    finally:
        made.stop()
    told, _ = service.metrics.text(None)
    for line in (b"muse_fn_grammar_timeouts_total 2.0", b"muse_fn_grammar_build_seconds_count 2.0"):
        assert line in told  # for the whole and the streamed
