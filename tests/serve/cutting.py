"""Text to tokens of the embedded tokenizer, cut in every way that a model might, and the events that come of them."""

import random
from collections.abc import Iterable
from functools import cache

from muse_fn.serve.jobs import Done, Finish
from muse_fn.serve.options import EMBEDDED
from muse_fn.serve.reply import ReplyEvent, ReplyState, finish, push
from muse_fn.serve.turns import Called, Ended, Piece, Said
from muse_fn.tokenizer import Control, Tokenizer, load_tokenizer


@cache
def embedded() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


@cache
def by_bytes() -> dict[bytes, int]:
    """The ordinary tokens; every single byte is among them."""
    tokenizer = embedded()
    return {raw: i for i, raw in enumerate(tokenizer.bytes_of) if raw is not None and i not in tokenizer.names}


def control(name: str) -> int:
    return embedded().control_id(name)


def cut(text: str, cuts: random.Random | None = None, size: int = 5) -> list[int]:
    """Ids of a spelled turn: markers whole, other text in tokens of up to `size` bytes drawn at random.

    Without `cuts` one token a byte, so that every character beyond ASCII is split.
    """
    ids = list[int]()
    for piece in embedded().split_spelled(text):
        ids += [control(piece.name)] if isinstance(piece, Control) else raw_ids(piece.text.encode(), cuts, size)
    return ids


def raw_ids(raw: bytes, cuts: random.Random | None = None, size: int = 5) -> list[int]:
    """Ids of bytes, which need not be whole characters."""
    ids, known = list[int](), by_bytes()
    while raw:
        sizes = [n for n in range(1, size + 1) if raw[:n] in known and n <= len(raw)] if cuts else [1]
        n = cuts.choice(sizes) if cuts else 1
        ids.append(known[raw[:n]])
        raw = raw[n:]
    return ids


def events_of(state: ReplyState, ids: Iterable[int], ended: Finish = "stop") -> list[ReplyEvent]:
    """All events of an answer; like the server, nothing is pushed once a stop string has come."""
    events = list[ReplyEvent]()
    for token in ids:
        state, more, stopped = push(state, token)
        events += more
        if stopped:
            return [*events, *finish(state, Done("stop"))]
    return [*events, *finish(state, Done(ended))]


def text_of(events: Iterable[ReplyEvent], *kinds: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Said) and e.kind in (kinds or ("commentary", "answer")))


def calls_of(events: Iterable[ReplyEvent]) -> list[tuple[str, str]]:
    return [(e.name, e.arguments) for e in events if isinstance(e, Called)]


def pieces_of(events: Iterable[ReplyEvent]) -> list[Piece]:
    return [piece for event in events for piece in event.pieces]


def end_of(events: list[ReplyEvent]) -> Ended:
    """The last event, which is the only end."""
    ends = [event for event in events if isinstance(event, Ended)]
    assert len(ends) == 1
    assert events[-1] is ends[0]
    return ends[0]


def runs(events: Iterable[ReplyEvent]) -> list[tuple[str, str]]:
    """What was said, neighbours of one kind joined, with calls in their places."""
    found = list[tuple[str, str]]()
    for event in events:
        if isinstance(event, Called):
            found.append(("call", f"{event.number} {event.id} {event.name} {event.arguments}"))
        elif isinstance(event, Said) and found and found[-1][0] == event.kind:
            found[-1] = (event.kind, found[-1][1] + event.text)
        elif isinstance(event, Said) and event.text:
            found.append((event.kind, event.text))
    return found
