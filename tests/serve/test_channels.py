"""Channels and calls: the format's worked examples, its table of malformed turns, and every way to cut a stream."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muse_fn
from muse_fn.serve.channels import Delta, Event, begin, collect, feed, finish, parse
from muse_fn.serve.chat import render_chat
from muse_fn.tokenizer import Control, Json, Text, Tokenizer, load_tokenizer
from tests.toy_tokenizer import build
from tests.turns import INVOKE, TOOLS, ask, call, pieces, said, to

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


# Pieces of turns in which every "a" and "1" belongs to a body: no header can swallow one.
BODIES = [" ", "\n", "t", "<", "a", "1", "1 a", "<|message|>", "<|eom|>", "<|eot|>", " to=user<|message|>", to("self")]


@given(st.lists(st.sampled_from(BODIES), max_size=16).map("".join))
def test_nothing_said_is_ever_lost_or_said_twice(text: str) -> None:
    state, events = begin(TOOLS), list[Event]()
    for piece in pieces(text, random.Random(1)):
        state, more = feed(state, piece)
        events += more
    state, more = finish(state)
    message = collect([*events, *more], state.damaged, state.unfinished)
    body = text.replace(to("self"), "")
    everything = "".join([message.reasoning, message.content, *message.damaged])
    for char in "a1":
        assert everything.count(char) == body.replace("<|message|>", "").count(char)


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
def test_a_megabyte_of_hostile_text_is_one_message_however_cut(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))  # a pass that is not linear would take hours
    for head in ("", to("x") + TAGS[1], to("user")):
        for tail in ("", TAGS[4]):
            whole = parse(pieces(head + text + tail), TOOLS)
            assert parse(pieces(head + text + tail, random.Random(1), 400_000), TOOLS) == whole


@pytest.mark.parametrize("head", ["", to("x") + TAGS[1] + TAGS[2], to("user")])
@pytest.mark.parametrize("unit", ["line of code\n", " ", "<", "to=", "</atem:invoke>"])
def test_a_long_stream_of_small_pieces_is_its_whole(head: str, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    events: list[Event] = []
    state = begin(TOOLS)
    for piece in pieces(head):
        state, _ = feed(state, piece)
    for at in range(0, len(text), 4):
        state, more = feed(state, Text(text[at : at + 4]))
        events += more
    state, more = finish(state)
    message = collect([*events, *more], state.damaged, state.unfinished)
    assert message == parse([*pieces(head), Text(text)], TOOLS)


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
