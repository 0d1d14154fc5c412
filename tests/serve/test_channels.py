"""Channels and calls: the format's worked examples, its table of malformed turns, and every way to cut a stream."""

import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.atem import Call, admits_string, decode_value, find_calls, tools_by_name
from muse_fn.serve.channels import Event, Message, begin, collect, feed, finish, parse
from muse_fn.tokenizer import Control, Json, Piece, Text

MARKS = re.compile(r"(<\|(?:start|message|eom|eot|end_of_text)\|>)")
STRING: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}


def tool(name: str, **properties: Json) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS: list[Json] = [
    tool("lookup", city=STRING),
    tool("add", a=NUMBER, b=NUMBER),
    tool("ping"),
    tool("noargs"),
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("write_file", path=STRING, content=STRING),
    tool("read", filePath=STRING),
]


def pieces(text: str, cuts: random.Random | None = None, size: int = 6) -> list[Piece]:
    """A spelled turn as an engine gives it: control tokens whole, text in runs of 1 to `size` characters."""
    found: list[Piece] = []
    for part in MARKS.split(text):
        if MARKS.fullmatch(part):
            found.append(Control(part))
            continue
        while part:
            n = cuts.randint(1, size) if cuts else len(part)
            found.append(Text(part[:n]))
            part = part[n:]
    return found


def ask(text: str) -> Message:
    """The message of a turn, the same for every way to cut it."""
    whole = parse(pieces(text), TOOLS)
    for seed in range(12):
        cut = parse(pieces(text, random.Random(seed), 1 if seed == 0 else 6), TOOLS)
        assert cut == whole, f"cut by seed {seed}"
    return whole


def to(recipient: str) -> str:
    return f"<|start|>assistant to={recipient}<|message|>"


def call(name: str, **values: object) -> str:
    inner = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in values.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>\n</atem:function_calls>'


def said(message: Message) -> dict[str, Any]:
    """The parts of a message that are not empty, calls with decoded arguments."""
    parts: dict[str, Any] = {k: v for k, v in message._asdict().items() if v and k != "content"}
    if message.tool_calls:
        parts["tool_calls"] = [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
    return parts


INVOKE = '<atem:invoke name="'
TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "B answer": (
        " to=self<|message|>97 works<|eom|>" + to("user") + "97<|eot|>",
        {"reasoning": "97 works", "answer": "97"},
    ),
    "C commentary and two calls": (
        " to=self<|message|>need both<|eom|>"
        + (to("commentary") + "Checking.<|eom|>")
        + (to("lookup") + call("lookup", city="007") + "<|eom|>")
        + (to("add") + call("add", a=1, b=2.5) + "<|eot|>"),
        {
            "reasoning": "need both",
            "commentary": "Checking.",
            "tool_calls": [("lookup", {"city": "007"}), ("add", {"a": 1, "b": 2.5})],
        },
    ),
    "D reasoning not closed, doubled name": (
        " to=self<|message|>just ping it to=ping<|message|>" + call("ping.ping") + "<|eom|>",
        {"reasoning": "just ping it", "tool_calls": [("ping", {})]},
    ),
    "E call cut off": (
        to("add") + '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1',
        {"damaged": ('<atem:invoke name="add">\n<atem:parameter name="a">1',)},
    ),
    "F quoted markup": (
        ' to=user<|message|>Write <atem:invoke name="x"></atem:invoke> to call x.<|eot|>',
        {"answer": 'Write <atem:invoke name="x"></atem:invoke> to call x.'},
    ),
    "quoted in reasoning": (
        f" to=self<|message|>{call('ping')}<|eom|>" + to("user") + "no<|eot|>",
        {"reasoning": call("ping"), "answer": "no"},
    ),
    "reasoning cut by length": (" to=self<|message|>let me", {"reasoning": "let me"}),
    "several reasoning blocks": (
        " to=self<|message|>one<|eom|>" + to("self") + "two<|eom|>" + to("user") + "x<|eot|>",
        {"reasoning": "one\ntwo", "answer": "x"},
    ),
    "channel closes inside an invoke": (
        (to("get_weather") + f'{INVOKE}get_weather">\n<atem:parameter name="c<|eom|>')
        + (to("write_file") + call("write_file", path="a", content="b") + "<|eot|>"),
        {
            "tool_calls": [("write_file", {"path": "a", "content": "b"})],
            "damaged": (f'{INVOKE}get_weather">\n<atem:parameter name="c',),
        },
    ),
    "call, then answer without an end": (
        to("noargs") + call("noargs") + to("user") + "visible",
        {"answer": "visible", "tool_calls": [("noargs", {})]},
    ),
    "two invokes in a block": (
        to("add")
        + f'<atem:function_calls>\n{INVOKE}ping">\n</atem:invoke>\n{INVOKE}noargs">\n</atem:invoke>\n'
        + "</atem:function_calls><|eot|>",
        {"tool_calls": [("ping", {}), ("noargs", {})]},
    ),
    "block end missing": (to("ping") + f'{INVOKE}ping"></atem:invoke><|eot|>', {"tool_calls": [("ping", {})]}),
    "unknown tool": (to("fly") + call("fly", x=1) + "<|eot|>", {"tool_calls": [("fly", {"x": 1})]}),
    "start inside a body": (" to=user<|message|>one" + to("user") + "two<|eot|>", {"answer": "onetwo"}),
    "no framing": ("plain text only", {"answer": "plain text only"}),
    "no framing, a call": (f"now {call('ping')}", {"answer": "now ", "tool_calls": [("ping", {})]}),
    "prose with a tag's beginning": ("the <atem: prefix", {"answer": "the <atem: prefix"}),
    "prose in the answer": (" to=user<|message|>go to to=x or <atem:in", {"answer": "go to to=x or <atem:in"}),
    "glued name, known": (
        to("read") + f'{INVOKE}read.filePath">/tmp/x</atem:parameter>\n</atem:invoke><|eot|>',
        {"tool_calls": [("read", {"filePath": "/tmp/x"})]},
    ),
    "glued name, unknown head": (
        to("read") + f'{INVOKE}nope.filePath">/tmp/x</atem:parameter></atem:invoke><|eot|>',
        {"damaged": (f'{INVOKE}nope.filePath">/tmp/x</atem:parameter></atem:invoke>',)},
    ),
    "never bound by suffix": (to("x") + call("other.ping") + "<|eot|>", {"tool_calls": [("other.ping", {})]}),
    "odd headers": (
        " to=self extra<|message|>r<|eom|><|start|>assistant to=functions.web-browsing<|message|>" + call("ping"),
        {"reasoning": "r", "tool_calls": [("ping", {})]},
    ),
    "no recipient": ("<|message|>a<|eom|><|start|>assistant to=<|message|>b", {"reasoning": "a\nb"}),
    "foreign role": ("<|start|>system<|message|>hey<|eot|>", {"reasoning": "hey"}),
    "garbage outside": ("junk <|start|>assistant to=user<|message|>x<|eot|>\n", {"answer": "junk x"}),
    "header only": (" to=user<|message|>x<|eom|><|start|>assistant to=self", {"answer": "x"}),
    "text to a tool that is no call": (to("ping") + "hello there<|eot|>", {"answer": "hello there"}),
    "value with newlines and markup": (
        to("write_file") + call("write_file", path="a b ", content="<x>\n  y to=z\n") + "<|eot|>",
        {"tool_calls": [("write_file", {"path": "a b ", "content": "<x>\n  y to=z\n"})]},
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name: str) -> None:
    text, expected = TURNS[name]
    message = ask(text)
    assert said(message) == expected
    assert message.content == message.commentary + message.answer


TAGS = [
    "<atem:function_calls>",
    '<atem:invoke name="ping">',
    '<atem:parameter name="x">',
    "</atem:parameter>",
    "</atem:invoke>",
    "</atem:function_calls>",
]


@pytest.mark.parametrize("framed", [True, False])
def test_no_part_of_a_tag_is_ever_content(framed: bool) -> None:
    text = "\n".join(TAGS)
    for end in range(2, len(text)):
        message = ask((to("ping") if framed else "") + text[:end])
        assert not {"<", "atem"} & set(re.findall("<|atem", message.content)), text[:end]
        assert bool(message.tool_calls) == (text[:end].count("</atem:invoke>") == 1)


WORDS = [
    *(" ", "\n", "t", "o", "to=", " to=user", "to=self", "to=ping", "to=x", "<", ">", '"', "a", "1"),
    *("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "assistant", "tool x", "developer"),
    *(TAGS[0], TAGS[1], TAGS[2], TAGS[3], TAGS[4], TAGS[5], " " * 40, "x" * 200),
]


@pytest.mark.parametrize("block", range(10))
def test_random_turns_are_the_same_at_every_cut(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        draw = random.Random(seed)
        text = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 20)))
        whole = parse(pieces(text), TOOLS)
        for size in (1, 3, 40):
            assert parse(pieces(text, random.Random(seed), size), TOOLS) == whole, text


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_nothing_said_is_ever_lost_or_taken_back(text: str) -> None:
    state, events = begin(TOOLS), list[Event]()
    for piece in pieces(text, random.Random(1)):
        state, more = feed(state, piece)
        events += more
    state, more = finish(state)
    message = collect([*events, *more], state.damaged)
    plain = MARKS.sub("", text)
    everything = "".join([message.reasoning, message.content, *message.damaged])
    for char in "a1":  # letters of no marker, so each one must have ended somewhere
        if "atem" not in text and "to=" not in text and "<|start|>" not in text:
            assert everything.count(char) == plain.count(char)


@pytest.mark.parametrize("unit", ['<atem:invoke name="', '<atem:invoke name="x">', TAGS[1] + TAGS[2], "<", "to=", " t"])
def test_hostile_text_costs_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for head in ("", to("x"), to("user")):
        begun = time.perf_counter()
        parse(pieces(head + text), TOOLS)
        assert time.perf_counter() - begun < 5, "quadratic: a linear pass takes 0.01 s"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", STRING, "42"),
        ("42", NUMBER, 42),
        ("42", None, 42),
        ("42", {"type": ["string", "null"]}, "42"),
        ("null", {"anyOf": [{"type": "integer"}, STRING]}, "null"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("007", NUMBER, "007"),
        ("NaN", NUMBER, "NaN"),
        ("-Infinity", NUMBER, "-Infinity"),
        ("[1e999]", NUMBER, "[1e999]"),
        ('{"a": [true]}', {"type": "object"}, {"a": [True]}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        (" x ", STRING, " x "),
    ],
)
def test_values(text: str, schema: Any, value: Json) -> None:
    assert decode_value(text, schema) == value


def test_arguments_are_json_and_the_last_duplicate_wins() -> None:
    values = [f'<atem:parameter name="k">{value}</atem:parameter>' for value in (1, '"é"')]
    text = f'{INVOKE}f">{"".join(values)}</atem:invoke>'
    assert find_calls(text, {}).calls == [Call("f", '{"k": "é"}')]


def test_namespaces_name_their_functions() -> None:
    tools: list[Json] = [{"type": "namespace", "name": "db", "tools": [tool("get", key=STRING)]}]
    assert tools_by_name(tools)["db.get"]["properties"] == {"key": STRING}
    message = parse(pieces(to("db.get") + call("db.get", key=7)), tools)
    assert message.tool_calls == (Call("db.get", '{"key": "7"}'),)


def test_a_schema_that_nests_forever_is_not_followed() -> None:
    loop: dict[str, Any] = {}
    loop["anyOf"] = [loop]
    assert not admits_string(loop)
