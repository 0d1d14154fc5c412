"""Tokens to events: equal to parsing the whole, however the text is cut into tokens; every token once."""

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muse_fn.serve.channels import parse
from muse_fn.serve.jobs import Done, Logprob
from muse_fn.serve.reply import ReplyEvent, ReplyState, begin, call_id, finish, push, token_bytes
from muse_fn.serve.stop_strings import Scan, release, scan
from muse_fn.serve.turns import Called, Counts, Said
from tests.serve.cutting import (
    by_bytes,
    calls_of,
    control,
    cut,
    embedded,
    end_of,
    events_of,
    pieces_of,
    raw_ids,
    runs,
    text_of,
)
from tests.turns import TOOLS, call, to

FRAGMENTS = (
    " to=self<|message|>", "<|eom|>", "<|eot|>", "<|start|>", "<|message|>", to("self"), to("user"), to("commentary"),
    to("add"), to("noargs"), " to=noargs<|message|>", call("add", a=1, b=2.5), call("noargs"), '<atem:invoke name="x">',
    "</atem:invoke>", "<atem:", "family 👨‍👩‍👧", "ď", "한글", "stop", "st", "op", "9.8",
    " t", " to", " to=", "plain words ", "\n",
    "<|begin_of_text|>", "<", "é",
)  # fmt: skip
STOPS = ("stop", "st", "9.8", "opst", "words t", "👧", "\nstop", "pl", "ain")
spelled = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)
stop_lists = st.lists(st.sampled_from(STOPS), max_size=3, unique=True).map(tuple)
seeds = st.integers(0, 1 << 30)
any_ids = st.lists(st.integers(-1, len(embedded()) + 3), max_size=40)


def started(**options: Any) -> ReplyState:
    return begin(embedded(), request="r", tools=TOOLS, **options)


@given(spelled, seeds)
def test_a_stream_says_what_the_whole_says(text: str, seed: int) -> None:
    """The oracle parses the finished token sequence at once, by other functions."""
    ids = cut(text, random.Random(seed))
    whole = parse(embedded().decode_pieces(ids), TOOLS)
    events = events_of(started(), ids)
    assert text_of(events, "reasoning") == whole.reasoning
    assert text_of(events, "commentary") == whole.commentary
    assert text_of(events, "answer") == whole.answer
    assert text_of(events) == whole.content
    assert calls_of(events) == [(c.name, c.arguments) for c in whole.tool_calls]
    assert end_of(events).damaged == whole.damaged


@given(spelled, stop_lists, st.booleans(), seeds)
def test_the_cut_into_tokens_does_not_matter(text: str, stops: tuple[str, ...], keeps: bool, seed: int) -> None:
    state = started(stops=stops, keeps_stop=keeps)
    one, other = events_of(state, cut(text)), events_of(state, cut(text, random.Random(seed), 8))
    assert runs(one) == runs(other)
    assert (end_of(one).finish, end_of(one).stop_reason) == (end_of(other).finish, end_of(other).stop_reason)


@given(any_ids | st.builds(cut, spelled), stop_lists)
def test_every_token_is_given_once_and_in_order(ids: list[int], stops: tuple[str, ...]) -> None:
    """Also ids that no token has, and bytes that are no text; whatever comes, there is one end and no exception."""
    events, state, used = list[ReplyEvent](), started(stops=stops), 0
    for place, token in enumerate(ids):
        state, more, stopped = push(state, token, Logprob(-float(place), place, ()))
        events, used = events + more, used + 1
        if stopped:
            break
    events += finish(state, Done("length"))
    pieces = pieces_of(events)
    assert [(p.token, p.raw, p.logprob and p.logprob.rank) for p in pieces] == [
        (token, token_bytes(embedded(), token), place) for place, token in enumerate(ids[:used])
    ]
    counts = end_of(events).counts
    assert counts.completion == used
    assert 0 <= counts.reasoning <= used
    assert all(e.text for e in events if isinstance(e, Said))


@given(spelled)
def test_reasoning_tokens_are_those_whose_text_was_reasoning(text: str) -> None:
    """With one ASCII character a token, there are as many as characters, the joints between blocks aside."""
    text = text.encode("ascii", errors="ignore").decode().replace("\n", "~")
    events = events_of(started(), cut(text))
    said = text_of(events, "reasoning")
    assert end_of(events).counts.reasoning == len(said) - said.count("\n")


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (" to=self<|message|>abc<|eom|>" + to("user") + "d<|eot|>", 3),
        (" to=self<|message|>abc to=noargs<|message|>" + call("noargs"), 3),
        (" to=self<|message|>abc to=noargs", 3 + 10),
        (" to=self<|message|>abc to=noargs ok<|eom|>", 3 + 10 + 3),
        (" to=self<|message|>a<|eom|>" + to("self") + "b<|eot|>", 2),
        ("no framing at all", 0),
    ],
)
def test_framing_is_not_counted_as_reasoning(text: str, reasoning: int) -> None:
    assert end_of(events_of(started(), cut(text))).counts == Counts(0, 0, len(cut(text)), reasoning)


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Character by character: the first place where a stop string is complete."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@example("aabcc", ("cc", "bc", "abc"), 1)
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple), seeds)
def test_a_stop_string_ends_the_text_where_a_reader_of_characters_would(
    text: str, stops: tuple[str, ...], seed: int
) -> None:
    draw, place, said, found = random.Random(seed), 0, "", None
    state = Scan(stops)
    while place < len(text) and found is None:
        size = draw.randint(1, 4)
        state, more, found = scan(state, text[place : place + size])
        said, place = said + more, place + size
        assert text.startswith(said)
        held = state.held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    said += release(state)[1] if found is None else ""
    expected = first_end(text, stops)
    assert (said, found) == ((text, None) if expected is None else (text[: expected[0]], expected[2]))
    if expected is not None:
        assert scan(Scan(stops, keeps=True), text)[1] == text[: expected[1]]


@given(st.text("abc", max_size=10), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple))
def test_nothing_is_held_that_cannot_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    if first_end(text, stops) is not None:
        return
    state, said, _ = scan(Scan(stops), text)
    assert said + state.held == text
    longest = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    assert len(state.held) == longest


def test_stop_strings_do_nothing_in_reasoning() -> None:
    text = " to=self<|message|>is it 9.8?<|eom|>" + to("user") + "it is 9.8 then<|eot|>"
    events = events_of(started(stops=("9.8",)), cut(text))
    assert text_of(events, "reasoning") == "is it 9.8?"
    assert text_of(events) == "it is "
    assert (end_of(events).finish, end_of(events).stop_reason) == ("stop", "9.8")
    kept = events_of(started(stops=("9.8",), keeps_stop=True), cut(text))
    assert text_of(kept) == "it is 9.8"


def test_a_stop_string_found_only_at_the_end_of_the_budget_still_ends_the_answer() -> None:
    """The channels hold ` t` back, which may begin a header; here it ends a stop string."""
    events = events_of(started(stops=("is t",)), cut(to("user")[18:] + "this t"), "length")
    assert text_of(events) == "th"
    assert (end_of(events).finish, end_of(events).stop_reason) == ("stop", "is t")


def test_a_stop_string_is_not_put_together_of_two_bodies() -> None:
    text = to("commentary")[18:] + "st<|eom|>" + to("user") + "op<|eot|>"
    events = events_of(started(stops=("stop",)), cut(text))
    assert runs(events) == [("commentary", "st"), ("answer", "op")]
    assert end_of(events).finish == "stop"
    assert end_of(events).stop_reason is None


def test_the_finish_table() -> None:
    answer, called = " to=user<|message|>hi stop", " to=noargs<|message|>" + call("noargs")
    cases = {
        (answer, (), "stop"): "stop",
        (answer, (), "length"): "length",
        (answer, (), "error"): "error",
        (answer, (), "abort"): "abort",
        (answer, ("stop",), "length"): "stop",
        (called, (), "stop"): "tool_calls",
        (called, (), "length"): "length",
        (called, (), "error"): "error",
        (called, (), "abort"): "abort",
        (called + "<|eom|>" + to("user") + "a stop", ("stop",), "stop"): "stop",
        (called[:-20], (), "length"): "length",
        (called[:-40], (), "stop"): "stop",
    }
    for (text, stops, ended), expected in cases.items():
        events = events_of(started(stops=stops), cut(text), ended)  # pyright: ignore[reportArgumentType]
        assert end_of(events).finish == expected, (text, stops, ended)


def test_stop_tokens_say_nothing_and_are_named() -> None:
    text, full = " to=user<|message|>hi", by_bytes()[b"."]
    ids = [*cut(text), full]
    events = events_of(started(stop_tokens=(full,)), ids)
    assert (text_of(events), end_of(events).stop_reason) == ("hi", full)
    assert text_of(events_of(started(stop_tokens=(full,), keeps_stop=True), ids)) == "hi."
    ended = events_of(started(stop_tokens=(full,), ends=(control("<|eot|>"),)), [*cut(text), control("<|eot|>")])
    assert (end_of(ended).finish, end_of(ended).stop_reason) == ("stop", None)


def test_calls_are_numbered_and_named_for_their_place() -> None:
    text = " to=add<|message|>" + call("add", a=1) + call("add", a=1) + "<|eom|>" + to("noargs") + call("noargs")
    events = [e for e in events_of(started(), cut(text)) if isinstance(e, Called)]
    assert [(e.number, e.id) for e in events] == [(i, call_id("r", 0, i)) for i in range(3)]
    assert len({call_id(r, c, i) for r in "ab" for c in range(3) for i in range(3)}) == 18
    assert call_id("r", 0, 0).startswith("call_")


def test_without_tools_there_are_no_calls() -> None:
    events = events_of(started(allows_calls=False), cut(" to=noargs<|message|>" + call("noargs") + "<|eot|>"))
    assert runs(events) == []
    assert (end_of(events).finish, end_of(events).damaged) == ("stop", ("noargs {}",))


@pytest.mark.parametrize("raw", [b"\xf0\x9f\x91", b"a\xc4", b"\xed\x95"])
def test_only_a_character_cut_off_at_the_end_becomes_a_replacement(raw: bytes) -> None:
    events = events_of(started(), [*cut(" to=user<|message|>x"), *raw_ids(raw)], "length")
    assert text_of(events) == ("x" + raw.decode(errors="replace"))
    assert text_of(events).count("�") == 1
    assert text_of(events[:-2]).count("�") == 0
