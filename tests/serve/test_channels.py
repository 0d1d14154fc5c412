"""Channels and calls: the format's worked examples, its table of malformed turns, and every way to cut a stream."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muse_fn
from muse_fn.serve.atem import Call, parse_invoke, tools_by_name
from muse_fn.serve.channels import Delta, Event, Message, begin, collect, feed, finish, parse, spelled_pieces
from muse_fn.serve.chat import render_chat
from muse_fn.tokenizer import Control, Json, Piece, Text, Tokenizer, load_tokenizer
from tests.toy_tokenizer import build

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


def spelled(text: str, size: int) -> list[Piece]:
    """The same turn from an engine that gives text only, markers spelled out and cut anywhere."""
    held, found = "", list[Piece]()
    for at in range(0, len(text), size):
        held, more = spelled_pieces(held, text[at : at + size])
        found += more
    return [*found, Text(held)]


def ask(text: str) -> Message:
    """The message of a turn, the same for every way to cut it: at one place, everywhere, at random."""
    whole = parse(pieces(text), TOOLS)
    for seed in range(12):
        cut = parse(pieces(text, random.Random(seed), 1 if seed == 0 else 6), TOOLS)
        assert cut == whole, f"cut by seed {seed}"
    for at in range(1, len(text)):
        assert parse(halves(text, at), TOOLS) == whole, f"cut at {at}"
    for size in (1, 2, 7, len(text) or 1):
        assert parse(spelled(text, size), TOOLS) == whole, f"spelled out, {size} characters a piece"
    return whole


def halves(text: str, at: int) -> list[Piece]:
    """The turn with one more cut, which a marker does not suffer."""
    found: list[Piece] = []
    for part in pieces(text):
        size = len(part.text if isinstance(part, Text) else part.name)
        if isinstance(part, Text) and 0 < at < size:
            found += [Text(part.text[:at]), Text(part.text[at:])]
        else:
            found.append(part)
        at -= size
    return found


def to(recipient: str) -> str:
    return f"<|start|>assistant to={recipient}<|message|>"


def call(name: str, **values: object) -> str:
    inner = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in values.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>\n</atem:function_calls>'


def said(message: Message) -> dict[str, Any]:
    """The parts of a message that are not empty, calls with decoded arguments."""
    parts: dict[str, Any] = {k: v for k, v in message._asdict().items() if v and k not in ("content", "unfinished")}
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
    "reasoning not closed, no space": (
        f" to=self<|message|>thinking.to=noargs<|message|>{call('noargs')}",
        {"reasoning": "thinking.", "tool_calls": [("noargs", {})]},
    ),
    "answer not closed, another header": (
        " to=user<|message|>one to=self<|message|>two",
        {"answer": "one", "reasoning": "two"},
    ),
    "two messages marks": (" to=user<|message|>a<|message|>b<|eot|>", {"answer": "a", "reasoning": "b"}),
    "header of several words": (
        " to=a b<|message|>c<|eom|><|start|>assistant to=a b<|message|>d",
        {"reasoning": "c\nd"},
    ),
    "recipient is too long for one": (
        " to=user<|message|>to=" + "x" * 400 + "<|message|>y",
        {"answer": "to=" + "x" * 400, "reasoning": "y"},
    ),
    "a header that never opens": ("<|start|>assistant to=user<|eot|>", {}),
    "an answer instead of a header": ("<|start|>The answer is 5<|eot|>", {"answer": "The answer is 5"}),
    "no header between messages": (
        " to=self<|message|>r<|eom|>The answer<|eot|>",
        {"reasoning": "r", "answer": "The answer"},
    ),
    "control text in prose": (" to=user<|message|>a <|image b < c<|eot|>", {"answer": "a <|image b < c"}),
    "one call interrupts another": (
        to("add") + f'{INVOKE}get_weather">\n<atem:parameter name="city">P{call("noargs")}',
        {"damaged": (f'{INVOKE}get_weather">\n<atem:parameter name="city">P\n{INVOKE}noargs">\n</atem:invoke>',)},
    ),
    "one call begins before another": (
        to("add") + f'{INVOKE}get_weather">\n{call("noargs")}',
        {"tool_calls": [("noargs", {})], "damaged": (f'{INVOKE}get_weather">',)},
    ),
    "text where parameters are due": (
        to("read") + f'{INVOKE}read">/tmp/x</atem:invoke><|eot|>',
        {"damaged": (f'{INVOKE}read">/tmp/x</atem:invoke>',)},
    ),
    "a parameter that is not closed": (
        to("add") + f'{INVOKE}add"><atem:parameter name="a">1</atem:parameter><atem:parameter name="b">2</atem:invoke>',
        {
            "damaged": (
                f'{INVOKE}add"><atem:parameter name="a">1</atem:parameter><atem:parameter name="b">2</atem:invoke>',
            )
        },
    ),
    "a call without a name": (to("x") + "<atem:invoke></atem:invoke>", {"damaged": ("<atem:invoke></atem:invoke>",)}),
    "words beside a call": (
        to("ping") + "I call " + call("ping"),
        {"tool_calls": [("ping", {})], "damaged": ("I call",)},
    ),
    "block end cut off": (to("ping") + call("ping")[:-5], {"tool_calls": [("ping", {})]}),
    "no framing, words after the call": (
        f"a\n{call('ping')}\n\nb {call('noargs')}c",
        {"answer": "a\nb c", "tool_calls": [("ping", {}), ("noargs", {})]},
    ),
    "no framing, call cut off": (f"a {INVOKE}ping", {"answer": "a ", "damaged": (f"{INVOKE}ping",)}),
    "quoted opening tag in a value": (
        to("write_file") + call("write_file", path="p", content=f'Write {INVOKE}x"> to call.'),
        {"tool_calls": [("write_file", {"path": "p", "content": f'Write {INVOKE}x"> to call.'})]},
    ),
    "more attributes": (
        to("add")
        + '<atem:invoke  id="1" name="add" ><atem:parameter string="no" name="a">1</atem:parameter></atem:invoke>',
        {"tool_calls": [("add", {"a": 1})]},
    ),
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
        turn = (to("ping") if framed else "") + text[:end]
        message = parse(pieces(turn), TOOLS)
        assert message == parse(pieces(turn, random.Random(end), 3), TOOLS)
        assert not {"<", "atem"} & set(re.findall("<|atem", message.content)), text[:end]
        assert bool(message.tool_calls) == (text[:end].count("</atem:invoke>") == 1)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("before", ["words ", " to=user<|message|>words <|eom|>", to("ping") + call("ping")])
def test_a_tag_cut_anywhere_is_not_shown(tag: str, before: str) -> None:
    for end in range(2, len(tag)):
        for after in ("", "<|eom|>" + to("user") + "words "):
            turn = pieces(before + tag[:end] + after, random.Random(end))
            assert parse(turn, TOOLS).content == "words " * ("words " in before) + "words " * bool(after)


def test_other_control_tokens_are_dropped() -> None:
    turn = [*pieces(" to=user<|message|>a t"), Control("<|image|>"), Text("o=x"), *pieces("<|message|>b")]
    assert said(parse(turn, TOOLS)) == {"answer": "a to=x", "reasoning": "b"}


def test_ordinary_words_stream_without_delay() -> None:
    for head in ([], pieces(" to=user<|message|>"), pieces(to("self"))):
        state, said = begin(TOOLS), ""
        for piece in head:
            state, _ = feed(state, piece)
        for word in ("the", " <atem: prefix", " is", " <b>bold</b>,", " a < b", " and", " x", "."):
            state, events = feed(state, Text(word))
            said += "".join(event.text for event in events if isinstance(event, Delta))
            assert said.endswith(word.rstrip())


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


UNITS = [
    '<atem:invoke name="',
    '<atem:invoke name="x">',
    TAGS[2],
    TAGS[3],
    TAGS[4],
    TAGS[5],
    "<",
    "to=",
    " t",
    " ",
    "x",
]


@pytest.mark.parametrize("unit", UNITS)
def test_hostile_text_costs_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for head in ("", to("x") + TAGS[1], to("user")):
        for tail in ("", TAGS[4]):
            begun = time.perf_counter()
            parse(pieces(head + text + tail), TOOLS)
            assert time.perf_counter() - begun < 5, "quadratic: a linear pass takes 0.1 s"


@pytest.mark.parametrize("head", ["", to("x") + TAGS[1] + TAGS[2], to("user")])
@pytest.mark.parametrize("unit", ["line of code\n", " ", "<", "to=", "</atem:invoke>"])
def test_a_piece_costs_time_in_proportion_to_itself(head: str, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    state = begin(TOOLS)
    for piece in pieces(head):
        state, _ = feed(state, piece)
    begun = time.perf_counter()
    for at in range(0, len(text), 4):
        state, _ = feed(state, Text(text[at : at + 4]))
    assert time.perf_counter() - begun < 15, "quadratic: a linear pass takes 0.5 s"


def decode_value(raw: str, schema: Json) -> Any:
    """A parameter's value as it ends in the arguments of a call, which are always JSON that can be sent."""
    text = f'{INVOKE}f"><atem:parameter name="k">{raw}</atem:parameter>'
    found, beside = parse_invoke(text, tools_by_name([tool("f", k=schema)]))
    assert found
    assert not beside
    found.arguments.encode("utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(found.arguments, parse_constant=refuse)["k"]


DEEP = "[" * 33 + "]" * 33
OBJECT: Json = {"type": "object"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", STRING, "42"),
        ("42", NUMBER, 42),
        ("42", None, 42),
        ("42", {"type": ["string", "null"]}, "42"),
        ("null", {"anyOf": [{"type": "integer"}, STRING]}, "null"),
        ("null", {"oneOf": [{"allOf": [{"type": "null"}, STRING]}]}, "null"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, "2"]}, 1),
        ("007", NUMBER, "007"),
        ("NaN", NUMBER, "NaN"),
        ("[NaN]", NUMBER, "[NaN]"),
        ("-Infinity", NUMBER, "-Infinity"),
        ("[1e999]", NUMBER, "[1e999]"),
        ("9" * 5000, NUMBER, "9" * 5000),
        ('{"a": [true]}', OBJECT, {"a": [True]}),
        ('{"a": 1, "a": 2}', OBJECT, {"a": 2}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        (DEEP, {"type": "array"}, DEEP),
        (DEEP[1:-1], {"type": "array"}, json.loads(DEEP[1:-1])),
        ('"\\ud83d"', OBJECT, '"\\ud83d"'),
        ('"\\uD83D\\uDE00"', OBJECT, "\U0001f600"),
        (" x ", STRING, " x "),
        (" 1 ", NUMBER, 1),
        ("", NUMBER, ""),
    ],
)
def test_values(text: str, schema: Json, value: Json) -> None:
    assert decode_value(text, schema) == value


def test_references_of_a_schema_are_followed_once() -> None:
    loop: Json = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, {"$ref": "elsewhere"}]}
    text: Json = {"$ref": "#/$defs/a~1b"}
    definitions: dict[str, Json] = {"loop": loop, "a/b": STRING}
    parameters: Json = {"properties": {"x": loop, "y": text}, "$defs": definitions}
    found = tools_by_name([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert found["f"].names == {"x", "y"}
    assert found["f"].strings == {"y"}


@pytest.mark.parametrize(
    "tools", [5, [5], [{}], [{"function": 5}], [{"function": {"name": "f", "parameters": {"properties": 5}}}]]
)
def test_malformed_tools_are_passed_over(tools: Json) -> None:
    assert not any(known.names for known in tools_by_name(tools).values())


def test_arguments_are_json_and_the_last_duplicate_wins() -> None:
    values = "".join(f'<atem:parameter name="k">{value}</atem:parameter>' for value in (1, '"é"'))
    assert parse_invoke(f'{INVOKE}f">{values}', {}) == (Call("f", '{"k": "é"}'), "")


def test_namespaces_name_their_functions() -> None:
    tools: list[Json] = [{"type": "namespace", "name": "db", "tools": [tool("get", key=STRING)]}]
    assert tools_by_name(tools)["db.get"].strings == {"key"}
    message = parse(pieces(to("db.get") + call("db.get", key=7)), tools)
    assert message.tool_calls == (Call("db.get", '{"key": "7"}'),)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        (" to", "header"),
        (" to=self", "header"),
        (" to=self<|message|>", "reasoning"),
        (" to=self<|message|>a<|eom|>", ""),
        (" to=self<|message|>a<|eom|><|start|>", "header"),
        (to("commentary") + "a", "commentary"),
        (to("user") + "a", "answer"),
        (to("user") + "a<|eot|>", ""),
        (to("ping"), "call"),
        (to("ping") + call("ping"), ""),
        (to("ping") + call("ping")[:-30], "call"),
        (to("ping") + call("ping")[:-3], ""),
        (to("ping") + call("ping") + "<atem:inv", "call"),
        ("words", "answer"),
        ("words <atem:inv", "answer"),
        (f"words {INVOKE}ping", "call"),
    ],
)
def test_what_is_left_unfinished(text: str, part: str) -> None:
    assert parse(pieces(text), TOOLS).unfinished == part


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = (Path(muse_fn.__file__).parent / "nano" / "chat_template.jinja").read_text()
    return load_tokenizer(build(tmp_path_factory.mktemp("nano"), template=template))


PROSE = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: "atem:" not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | PROSE, lambda inner: st.lists(inner) | st.dictionaries(PROSE, inner)
)


@given(
    PROSE,
    PROSE,
    st.dictionaries(st.sampled_from(["a", "b c", "é"]), VALUES.filter(lambda value: not isinstance(value, str))),
    PROSE,
)
def test_a_replayed_turn_reads_as_the_turn(
    nano: Tokenizer, thought: str, words: str, values: dict[str, Json], text: str
) -> None:
    called: Json = {"function": {"name": "write_file", "arguments": {**values, "content": text}}}
    said: Json = {"role": "assistant", "content": words, "reasoning": thought, "tool_calls": [called, called]}
    prompt = render_chat(nano, [{"role": "user", "content": "x"}], add_generation_prompt=False)
    replayed = render_chat(nano, [{"role": "user", "content": "x"}, said], add_generation_prompt=False)
    message = parse(nano.decode_pieces(nano.encode_pieces(replayed[len(prompt) :])), TOOLS)
    assert (message.reasoning, message.commentary, message.answer) == (thought, words, "")
    assert [json.loads(found.arguments) for found in message.tool_calls] == [{**values, "content": text}] * 2
    assert not message.damaged
    assert not message.unfinished
