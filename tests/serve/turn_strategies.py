"""Turn events and request bodies for properties: whole turns of one choice, and objects that are nearly right."""

import json

from hypothesis import strategies as st

from muse_fn.serve.channels import Kind
from muse_fn.serve.turns import Called, Counts, Ended, Piece, Progress, Said, TurnEvent
from muse_fn.tokenizer import Json

KINDS: tuple[Kind, ...] = ("reasoning", "commentary", "answer")
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["\u2028", "\x85", "é", "<b>"])
scalars = st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(allow_nan=False) | words
EMPTY = Counts(0, 0, 0, 0)


def values(*names: str) -> st.SearchStrategy[Json]:
    """Any JSON value, whose objects like these names and whose strings like these words."""
    leaves = scalars | st.sampled_from(names)
    keys = st.sampled_from(names) | words
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))


def spoiled(good: st.SearchStrategy[dict[str, Json]], *names: str) -> st.SearchStrategy[dict[str, Json]]:
    """A good object in which one value, wherever it lies, has become another."""

    def spoil(draw: st.DrawFn, value: Json) -> Json:
        if isinstance(value, dict) and value and draw(st.booleans()):
            key = draw(st.sampled_from(sorted(value)))
            return {**value, key: spoil(draw, value[key])}
        if isinstance(value, list) and value and draw(st.booleans()):
            place = draw(st.integers(0, len(value) - 1))
            return [*value[:place], spoil(draw, value[place]), *value[place + 1 :]]
        return draw(values(*names))

    @st.composite
    def one(draw: st.DrawFn) -> dict[str, Json]:
        body = draw(good)
        if not body or draw(st.integers(0, 3)) == 0:
            return body
        key = draw(st.sampled_from(sorted(body)))
        return {**body, key: spoil(draw, body[key])}

    return one()


def said(kind: Kind, text: str) -> Said:
    """Text with one token."""
    return Said(0, kind, text, (Piece(7, text.encode(), None),))


@st.composite
def turns(draw: st.DrawFn) -> list[TurnEvent]:
    """Progress, then texts and calls in any order, then the end of a turn that did not fail."""
    events: list[TurnEvent] = [Progress(3, 3, 1)] * draw(st.integers(0, 2))
    calls = 0
    for _ in range(draw(st.integers(0, 8))):
        if draw(st.integers(0, 3)):
            events.append(said(draw(st.sampled_from(KINDS)), draw(words)))
            continue
        arguments = json.dumps(draw(st.dictionaries(words, scalars, max_size=2)), ensure_ascii=False)
        name = draw(st.sampled_from(["add", "space.find", "other.find"]))
        events.append(Called(0, calls, f"call_{calls}", name, arguments, ()))
        calls += 1
    finish = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    reason = draw(st.sampled_from([None, "STOP", 5])) if finish == "stop" else None
    counts = Counts(10, draw(st.integers(0, 10)), draw(st.integers(0, 9)), 0)
    return [*events, Ended(0, "length" if finish == "length" else "stop" if finish == "stop" else "tool_calls", "",
                           reason, counts, ())]  # fmt: skip
