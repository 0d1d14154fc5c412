"""What requests enforce, over the real server: a trained model and one of random weights, which has no idea of either.

Each server is the command itself, asked by many clients at once; answers are checked by other means than ours.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import jsonschema_rs
import pytest

from muse_fn.load import load, save
from muse_fn.params.init import init_params
from muse_fn.serve.options import EMBEDDED
from tests.serve.asking import Streamed, choices, folded

T = TypeVar("T")
Ask = Callable[..., dict[str, Any]]
PATIENCE = 240.0  # seconds: a guard against hanging
CLIENTS = 16
ROOM = 224  # tokens of one answer, of which 96 may be reasoning
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
KINDS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"enum": ["Rome", "Oslo", "New York"]}, "days": {"type": "integer", "maximum": 99}},
    "set_lamp": {"on": {"type": "boolean"}, "color": {"enum": ["red", "deep blue"]}},
    "noargs": {},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False},
        },
    }
    for name, inner in KINDS.items()
]
NAME = {"type": "string", "maxLength": 8}
SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "maxLength": 12},
    {"enum": ["a", 1, None, {"k": [2]}]},
    {"const": {"x": [1, "two", None]}},
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, NAME], "items": False, "minItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
    {"type": "object", "properties": {"a": NAME, "b": NAME}, "required": ["b"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"in": {"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": False}},
        "required": ["in"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 10, "maximum": 20}]},
    {"$defs": {"kind": {"enum": ["é", "🦊", '"']}}, "type": "array", "items": {"$ref": "#/$defs/kind"}, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
]
REGEXES = [
    r"[0-9]{3}-[0-9]{4}", r"yes|no|maybe", r"[a-c]{2,5}", r"(ab){1,4}c?", r"[A-Z][a-z]{0,6}",
    r"-?[0-9]{1,3}(\.[0-9]{2})?", r"#[0-9a-f]{6}", r"(red|green) (cat|dog)", r"[^a-z]{1,3}",
    r"\d{4}-\d\d", r"(a|b(c|d)?){1,3}", r"x{0,5}y",
    r"[é-ü]{2}", r"<[a-z]{1,4}/>", r"\"[0-9]*[05]\"|none", r"(\(\)){1,3}", r"a.b", r"[01]{8}",
]  # fmt: skip
CHOICES = [
    ["yes", "no"], ["a"], ["a", "ab", "abc"], ["1", "2", "3"], ["New York", "New Jersey", "Newark"], [" "],
    ["\n", "\t"],
    ["é", "e"], ["🦊", "🐻"], ["<|eot|>", "none"], ["to=user", "to=self"], ['{"a": 1}', "[]"], ["(", ")"],
    ["a|b", "a", "b"],
    ["<atem:invoke", "x"], ["x" * 40, "x" * 41], ["true", "false", "null"], ["\\d", "\\"],
]  # fmt: skip


@contextmanager
def server(*options: str) -> Generator[str]:
    """The address of `muse-fn serve` in a process of its own."""
    command = [sys.executable, "-m", "muse_fn.serve", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = list[str]()
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    drain = ThreadPoolExecutor(1)
                    drain.submit(process.stderr.read)
                    yield found[0]
                    break
            else:
                pytest.fail("".join(said))
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with the embedded model's tokenizer and template."""
    config = load(EMBEDDED).config
    small = replace(
        config, hidden_size=64, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, latent_size=32,
        expert_size=32, experts=4, layer_types=config.layer_types[-2:], layer_rope_theta=config.layer_rope_theta[-2:],
        mlp_layer_types=config.mlp_layer_types[-2:],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("random") / "random"
    save(folder, init_params(small, seed=3), small, format="float32")
    for file in EMBEDDED.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module", params=["trained", "random"])
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    """Asks the server of one model for a chat completion."""
    options = () if request.param == "trained" else ("--model", str(request.getfixturevalue("random_model")))
    with server(*options) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:

        def asking(*, status: int = 200, **fields: Any) -> dict[str, Any]:
            body = {"messages": MESSAGES, "max_tokens": ROOM, **fields}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == status, response.text
            if not fields.get("stream"):
                return response.json()
            blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
            return {"streamed": Streamed(200, [json.loads(b) for b in blocks[:-1]], blocks[-1] == "[DONE]", 0)}

        yield asking


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    """The results of so many clients."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(work, range(count)))


def without_ids(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices without the ids of their calls, which are new each time."""
    for choice in found:
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = ""
    return found


@pytest.mark.parametrize("named", [None, "get_weather", "noargs"])
def test_12_ten_of_ten_calls_come_and_are_valid_streamed_too(ask: Ask, named: str | None) -> None:
    function = {"type": "function", "function": {"name": named}}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": function if named else "required"}

    def one(seed: int) -> dict[str, Any]:
        whole = ask(seed=seed, **fields)
        streamed = ask(seed=seed, stream=True, **fields)["streamed"]
        assert without_ids(folded(streamed)) == without_ids(choices(whole))
        return whole["choices"][0]

    for choice in at_once(one, 10):
        calls = choice["message"].get("tool_calls", [])
        assert calls, choice
        assert choice["finish_reason"] == "tool_calls"
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert name == named or (named is None and name in KINDS)
            schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
            jsonschema_rs.validate(schema, arguments)


def test_12_five_of_five_without_a_call(ask: Ask) -> None:
    for answer in at_once(lambda seed: ask(seed=seed, tools=TOOLS, tool_choice="none"), 5):
        (choice,) = answer["choices"]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] in ("stop", "length")


def test_14_eighteen_schemas(ask: Ask) -> None:
    def one(index: int) -> str:
        rule = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[index], "strict": True}}
        return content(ask(seed=index, response_format=rule))

    for schema, text in zip(SCHEMAS, at_once(one, 18), strict=True):
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))


def test_14_eighteen_regexes(ask: Ask) -> None:
    found = at_once(lambda i: content(ask(seed=i, structured_outputs={"regex": REGEXES[i]})), 18)
    for pattern, text in zip(REGEXES, found, strict=True):
        assert re.fullmatch(pattern, text), (pattern, text)


def test_14_eighteen_choices(ask: Ask) -> None:
    found = at_once(lambda i: content(ask(seed=i, structured_outputs={"choice": CHOICES[i]})), 18)
    for texts, text in zip(CHOICES, found, strict=True):
        assert text in texts


def test_17_rules_that_contradict_each_other_are_the_clients_mistake(ask: Ask) -> None:
    """Not an error of the server, and nothing to those beside it."""
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, structured_outputs={"choice": ["yes"]})
        told = ask(status=400, structured_outputs={"regex": "b"}, allowed_token_ids=[5])["error"]
        assert "contradict" in told["message"]
        assert told["type"] == "invalid_request_error"
        assert content(beside.result()) == "yes"


def content(answer: dict[str, Any]) -> str:
    """The text of an answer that ended by itself."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]
