"""Generated text to reasoning, commentary, answer and tool calls: a pure state machine over pieces.

    [<|start|>assistant] to=RECIPIENT<|message|>BODY<|eom|> or <|eot|>

`feed` and `finish` are all there is: parsing a finished text is feeding it whole, so a stream and its whole give the
same message whatever the pieces. A body is held back only where its end could still become a header (` to=NAME`, which
the model sometimes writes without closing the message before it). Source: the published chat format of Muse Spark Open.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from muse_fn.serve.atem import INVOKE, MARKERS, Call, Tools, find_calls, tools_by_name
from muse_fn.tokenizer import Json, Piece, Text

START, MESSAGE = "<|start|>", "<|message|>"
Kind = Literal["reasoning", "commentary", "answer"]

# A header without <|start|> at the end of a text, and every beginning of one. Bounded, so that holding back is too.
_HEADER = re.compile(r"\s{0,32}to=([^\s<]{0,128})\Z")
_MAYBE_HEADER = re.compile(r"\s{0,32}(?:t|to|to=[^\s<]{0,128})?\Z")
_REACH = 32 + 3 + 128
# The first header of a turn may carry more words; nothing before it is body.
_FIRST = re.compile(r"\s*to=([^\s<]{0,128})[^\n<]{0,128}\Z")
_MAYBE_FIRST = re.compile(r"\s*(?:t|to|to=[^\s<]{0,128}[^\n<]{0,128})?\Z")
_BLOCK = re.compile(r"</?atem:function_calls>")
_ROLE = re.compile(r"\s*([^\s<]*)(?:\s+to=([^\s<]*))?")


class Delta(NamedTuple):
    """A piece of text in one of the three channels."""

    kind: Kind
    text: str


Event: TypeAlias = Delta | Call


class Message(NamedTuple):
    """What a finished turn said."""

    reasoning: str
    commentary: str
    answer: str
    content: str  # commentary and answer bodies in order, joined by nothing: the OpenAI field
    tool_calls: tuple[Call, ...]
    damaged: tuple[str, ...]  # calls that are none: cut off, or with parts of parameters outside a parameter


@dataclass(frozen=True)
class State:
    """Between two pieces. `held` is text that no event has carried yet."""

    tools: Tools
    mode: Literal["outside", "header", "body"] = "outside"  # outside: between messages, or in text without framing
    kind: Kind | Literal["tool"] = "answer"
    held: str = ""
    is_new: bool = True  # nothing of this body or stretch has been said yet
    any_header: bool = False
    has_reasoned: bool = False
    damaged: tuple[str, ...] = ()


Step: TypeAlias = tuple[State, list[Event]]


def begin(tools: Json = None) -> State:
    """Before the first piece; `tools` as in the request."""
    return State(tools_by_name(tools))


def feed(state: State, piece: Piece) -> Step:
    """One more piece. Never raises, whatever the model wrote."""
    if isinstance(piece, Text):
        return _text(replace(state, held=state.held + piece.text))
    if piece.name == MESSAGE:
        return _message(state)
    state, events = _close(state)
    return (replace(state, mode="header") if piece.name == START else state), events


def finish(state: State) -> Step:
    """The end of the text: what was held back is said or, if it is part of a call, damaged."""
    return _close(state)


def parse(pieces: Iterable[Piece], tools: Json = None) -> Message:
    """A finished turn."""
    state, events = begin(tools), list[Event]()
    for piece in pieces:
        state, more = feed(state, piece)
        events += more
    state, more = finish(state)
    return collect([*events, *more], state.damaged)


def collect(events: Iterable[Event], damaged: tuple[str, ...] = ()) -> Message:
    """The message that a stream of events amounts to."""
    listed = list(events)
    deltas = [event for event in listed if isinstance(event, Delta)]
    said = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "commentary", "answer")}
    content = "".join(d.text for d in deltas if d.kind != "reasoning")
    return Message(**said, content=content, tool_calls=tuple(e for e in listed if isinstance(e, Call)), damaged=damaged)


def _text(state: State) -> Step:
    """Says as much of the held text as can no longer become framing."""
    if state.mode == "header":
        return state, []
    if state.mode == "body" and state.kind == "tool":
        return _calls(state)
    if state.mode == "outside" and state.is_new and _MAYBE_FIRST.match(state.held):
        return state, []
    maybe = _MAYBE_HEADER.search(state.held, max(0, len(state.held) - _REACH))
    keep = maybe.start() if maybe else len(state.held)
    if state.mode == "outside" and not state.any_header:
        keep = min(keep, _atem_begins(state.held))
    return _say(state, keep)


def _say(state: State, size: int) -> Step:
    """Says the first `size` characters of the held text in the body's channel."""
    text, held = state.held[:size], state.held[size:]
    if not text:
        return state, []
    assert state.kind != "tool"
    joint = "\n" if state.kind == "reasoning" and state.is_new and state.has_reasoned else ""
    reasoned = state.has_reasoned or state.kind == "reasoning"
    return replace(state, held=held, is_new=False, has_reasoned=reasoned), [Delta(state.kind, joint + text)]


def _calls(state: State) -> Step:
    """Tells the calls that are finished."""
    found = find_calls(state.held, state.tools)
    is_new = state.is_new and not (found.calls or found.damaged)
    damaged = (*state.damaged, *found.damaged)
    return replace(state, held=state.held[found.rest :], is_new=is_new, damaged=damaged), list(found.calls)


def _message(state: State) -> Step:
    """<|message|>: what stands before it is its header, wherever that began."""
    if state.mode == "header":
        role, recipient = _role(state.held)
        return _open(state, recipient if role in ("assistant", "") else "developer"), []
    first = _FIRST.match(state.held) if state.mode == "outside" and state.is_new else None
    header = first or _HEADER.search(state.held, max(0, len(state.held) - _REACH))
    body = state.held[: header.start()] if header else state.held
    state, events = _close(replace(state, held=body))
    return _open(state, header.group(1) if header else None), events


def _role(header: str) -> tuple[str, str | None]:
    match = _ROLE.match(header)
    assert match, f"{header=}"
    return match.group(1), match.group(2)


def _open(state: State, recipient: str | None) -> State:
    """A body for this recipient. No recipient is reasoning; `developer` is nobody a user should hear."""
    kinds: dict[str | None, Kind] = {"user": "answer", "commentary": "commentary"}
    private = recipient in (None, "", "self", "developer")
    kind: Kind | Literal["tool"] = "reasoning" if private else kinds.get(recipient, "tool")
    return replace(state, mode="body", kind=kind, held="", any_header=True, is_new=True)


def _close(state: State) -> Step:
    """Ends the body, header or stretch between messages that the state is in."""
    kinds = {"header": _close_header, "body": _close_body, "outside": _close_stretch}
    state, events = kinds[state.mode](state)
    return replace(state, mode="outside", kind="answer", held="", is_new=True), events


def _close_header(state: State) -> Step:
    """A header that never came to its <|message|> is a marker; other words are text."""
    state = replace(state, any_header=True, kind="answer")
    return (state, []) if _is_header(state.held) else _say(state, len(state.held))


def _close_body(state: State) -> Step:
    """Says the rest. Of a body of calls, an unfinished call is damaged and other text counts if there is no call."""
    if state.kind != "tool":
        return _say(state, len(state.held))
    state, events = _calls(state)
    if INVOKE in state.held or (state.is_new and any(_is_cut_marker(state.held[: len(m)]) for m in MARKERS)):
        return replace(state, damaged=(*state.damaged, state.held)), events
    state, more = _say(replace(state, kind="answer"), len(state.held) if state.is_new else 0)
    return state, [*events, *more]


def _close_stretch(state: State) -> Step:
    """Text outside of messages is content, blanks excepted; without any header so far, calls in it count."""
    begins = len(state.held) if state.any_header else _atem_begins(state.held)
    markup = state.held[begins:]
    if state.is_new and not state.held[:begins].strip():
        begins = 0
    state, events = _say(state, begins)
    found = find_calls(markup, state.tools)
    rest = markup[found.rest :]
    cut = rest.find(INVOKE) if INVOKE in rest else 0 if not found.calls and len(rest) > 1 else len(rest)
    tail = _BLOCK.sub("", rest[:cut])
    last = tail.rfind("<")
    tail = tail[:last] if last >= 0 and found.calls and "</atem:function_calls>".startswith(tail[last:]) else tail
    state = replace(state, held=tail, damaged=(*state.damaged, *found.damaged, *([rest[cut:]] if rest[cut:] else [])))
    state, more = _say(state, len(tail) if tail.strip() else 0)
    return state, [*events, *found.calls, *more]


def _atem_begins(text: str) -> int:
    """Where ATEM markup begins in a text, or could begin with what comes next; its length if nowhere."""
    places = [at for marker in MARKERS if (at := text.find(marker)) >= 0]
    last = text.rfind("<", max(0, len(text) - max(map(len, MARKERS))))
    if last >= 0 and _is_cut_marker(text[last:]):
        places.append(last)
    return min(places, default=len(text))


def _is_cut_marker(text: str) -> bool:
    """Whether a text is the beginning of a marker."""
    return bool(text) and any(marker.startswith(text) for marker in MARKERS)


def _is_header(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[^\s<]{0,32}(\s+to=[^\s<]*)?\s*", text))
