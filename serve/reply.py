"""The tokens of one choice to its events: pure, token by token, nothing lost, nothing said twice or taken back.

A token becomes pieces (control tokens apart from text, a character split over tokens held until it is whole), the
channels say what each piece is, stop strings end the content, and calls get their ids. A whole answer is made by the
same two functions as a stream, so both are the same whatever the tokens.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias

from muse_fn.serve import channels
from muse_fn.serve.atem import Call
from muse_fn.serve.channels import Kind
from muse_fn.serve.jobs import Done, Logprob
from muse_fn.serve.stop_strings import Scan, release, scan
from muse_fn.serve.turns import Called, Counts, Ended, Piece, Said
from muse_fn.tokenizer import Control, Json, Text, Tokenizer, whole_characters
from muse_fn.tokenizer import Piece as TextPiece

ReplyEvent: TypeAlias = Said | Called | Ended
_Chain: TypeAlias = "tuple[_Chain, Piece] | None"


class Rules(NamedTuple):
    """What stays the same for one choice; see `begin`."""

    tokenizer: Tokenizer
    request: str
    choice: int
    silent: frozenset[int]  # ids that end the answer and whose text is no part of it
    stop_tokens: frozenset[int]
    allows_calls: bool


class ReplyState(NamedTuple):
    """Between two tokens."""

    rules: Rules
    channel: channels.State
    scan: Scan
    kind: Kind = "answer"  # of what `scan` holds
    raw: bytes = b""  # the beginning of a character
    pending: _Chain = None  # tokens since the last event, newest first
    last: int = -1
    stopped: str | None = None  # the stop string that ended the content
    calls: int = 0
    stray: tuple[str, ...] = ()  # calls where none are allowed
    completion: int = 0
    reasoning: int = 0
    unsure: tuple[int, ...] = ()  # characters of each reasoning token that may still turn out to be a header


def begin(
    tokenizer: Tokenizer,
    *,
    request: str = "",
    choice: int = 0,
    tools: Json = None,
    stops: tuple[str, ...] = (),
    keeps_stop: bool = False,
    stop_tokens: tuple[int, ...] = (),
    ends: tuple[int, ...] = (),
    allows_calls: bool = True,
) -> ReplyState:
    """Behind the generation prompt.

    `stop_tokens` are the request's own, `ends` the model's that are heeded: their text is not said, unless
    `keeps_stop` keeps that of the former. Without `allows_calls` a call is counted among the damaged.
    """
    silent = frozenset(ends) | (frozenset() if keeps_stop else frozenset(stop_tokens))
    rules = Rules(tokenizer, request, choice, silent, frozenset(stop_tokens), allows_calls)
    return ReplyState(rules, channels.begin(tools), Scan(stops, keeps_stop))


def push(state: ReplyState, token: int, logprob: Logprob | None = None) -> tuple[ReplyState, list[ReplyEvent], bool]:
    """One more token, and whether a stop string has ended the answer. Never raises, whatever the token is.

    What comes after a stop string is counted and kept as pieces, and says nothing.
    """
    raw = token_bytes(state.rules.tokenizer, token)
    pending: _Chain = (state.pending, Piece(token, raw, logprob))
    state = state._replace(pending=pending, completion=state.completion + 1, last=token)
    if state.stopped is not None:
        return state, [], True
    events = list[ReplyEvent]()
    for piece, is_token in _pieces(state, token, raw):
        state, more = _feed(state, piece, is_token)
        events += more
    raw = _left(state, token, raw)
    state, events = _attach(state if raw == state.raw else state._replace(raw=raw), events)
    return state, events, state.stopped is not None


def finish(state: ReplyState, done: Done, prompt: int = 0, cached: int = 0) -> list[ReplyEvent]:
    """The end: what was held is said, then one `Ended`. `prompt` and `cached` are counts of prompt tokens."""
    events = list[ReplyEvent]()
    if state.raw and state.stopped is None:
        state, events = _feed(state, Text(state.raw.decode("utf-8", errors="replace")), False)
    channel, rest = channels.finish(state.channel)
    state = state._replace(channel=channel, reasoning=state.reasoning + len(state.unsure))
    state, more = _say(state, rest)
    state, held = _release(state)
    counts = Counts(prompt, cached, state.completion, state.reasoning)
    reason = _finish_reason(state, done)
    damaged = (*state.channel.damaged, *state.stray)
    ended = Ended(state.rules.choice, reason, done.why, _stop_reason(state, done), counts, (), damaged)
    return _attach(state, [*events, *more, *held, ended])[1]


def call_id(request: str, choice: int, index: int) -> str:
    """The id of a call: the same for the same place of the same request, so that a replay answers alike."""
    return "call_" + sha256(f"{request}\0{choice}\0{index}".encode()).hexdigest()[:24]


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of an id; none for an id without a token, which a model may draw all the same."""
    known = 0 <= token < len(tokenizer.bytes_of)
    return (tokenizer.bytes_of[token] if known else None) or b""


def _pieces(state: ReplyState, token: int, raw: bytes) -> list[tuple[TextPiece, bool]]:
    """What a token adds to the text, each with whether it stands for the token itself."""
    rules, cut = state.rules, state.raw.decode("utf-8", errors="replace")
    if token in rules.tokenizer.names:
        before = [(Text(cut), False)] if cut else []
        return [*before, (Control(rules.tokenizer.names[token]), True)]
    if token in rules.silent:
        return []
    return [(Text(whole_characters(state.raw + raw)[0]), True)]


def _left(state: ReplyState, token: int, raw: bytes) -> bytes:
    """The bytes of a character that is still coming, behind this token."""
    if token in state.rules.tokenizer.names:
        return b""
    return state.raw if token in state.rules.silent else whole_characters(state.raw + raw)[1]


def _feed(state: ReplyState, piece: TextPiece, is_token: bool) -> tuple[ReplyState, list[ReplyEvent]]:
    before = state.channel
    after, events = channels.feed(before, piece)
    state = _counted(state._replace(channel=after), before, piece, is_token, events)
    return _say(state, events)


def _counted(
    state: ReplyState, before: channels.State, piece: TextPiece, is_token: bool, events: list[channels.Event]
) -> ReplyState:
    """Counts reasoning tokens. One that lies wholly in a text which may be a header waits until that is known."""
    if isinstance(piece, Control):
        is_header = bool(before.held) and not events
        return state._replace(reasoning=state.reasoning + (0 if is_header else len(state.unsure)), unsure=())
    if state.channel.channel != "reasoning" or not is_token:
        return state
    unsure, held = [*state.unsure, len(piece.text)], len(state.channel.held)
    settled = 0
    while settled < len(unsure) and sum(unsure[settled:]) > held:
        settled += 1
    return state._replace(reasoning=state.reasoning + settled, unsure=tuple(unsure[settled:]))


def _say(state: ReplyState, found: Iterable[channels.Event]) -> tuple[ReplyState, list[ReplyEvent]]:
    """Events of the channels to events of the choice. A stop string lies in text of one kind with no call inside."""
    events = list[ReplyEvent]()
    for event in found:
        if state.stopped is not None:
            break
        if isinstance(event, Call) or event.kind != state.kind:
            state, more = _release(state)
            events += more
        if isinstance(event, Call):
            state, more = _call(state, event)
        else:
            state, more = _text(state, event.kind, event.text)
        events += more
    return state, events


def _text(state: ReplyState, kind: Kind, text: str) -> tuple[ReplyState, list[ReplyEvent]]:
    if kind != state.kind:
        state = state._replace(kind=kind)
    if kind != "reasoning" and state.scan.stops:
        after, text, stopped = scan(state.scan, text)
        state = state._replace(scan=after, stopped=stopped)
    return state, [Said(state.rules.choice, kind, text, ())] if text else []


def _release(state: ReplyState) -> tuple[ReplyState, list[ReplyEvent]]:
    if not state.scan.held:
        return state, []
    after, held = release(state.scan)
    return state._replace(scan=after), [Said(state.rules.choice, state.kind, held, ())]


def _call(state: ReplyState, call: Call) -> tuple[ReplyState, list[ReplyEvent]]:
    rules, index = state.rules, state.calls
    if not rules.allows_calls:
        return state._replace(stray=(*state.stray, f"{call.name} {call.arguments}")), []
    name = call_id(rules.request, rules.choice, index)
    called = Called(rules.choice, index, name, call.name, call.arguments, ())
    return state._replace(calls=index + 1), [called]


def _attach(state: ReplyState, events: list[ReplyEvent]) -> tuple[ReplyState, list[ReplyEvent]]:
    """Gives the tokens that wait to the first event, if there is one."""
    if not events:
        return state, events
    pieces, chain = list[Piece](), state.pending
    while chain is not None:
        chain, piece = chain
        pieces.append(piece)
    return state._replace(pending=None), [events[0]._replace(pieces=tuple(reversed(pieces))), *events[1:]]


def _finish_reason(state: ReplyState, done: Done) -> Literal["stop", "length", "tool_calls", "error", "abort"]:
    """The table of finish reasons, for every API of the server; the first row that fits counts.

    | what ended it                             | without a call | with calls   |
    |-------------------------------------------|----------------|--------------|
    | the engine failed                         | `error`        | `error`      |
    | it was aborted                            | `abort`        | `abort`      |
    | a stop string in the content              | `stop`         | `stop`       |
    | the budget, also inside an unfinished call | `length`      | `length`     |
    | itself (end token, stop token, grammar)   | `stop`         | `tool_calls` |
    """
    if done.finish in ("error", "abort"):
        return done.finish
    if state.stopped is not None:
        return "stop"
    return "tool_calls" if done.finish == "stop" and state.calls else done.finish


def _stop_reason(state: ReplyState, done: Done) -> str | int | None:
    if state.stopped is not None:
        return state.stopped
    return state.last if done.finish == "stop" and state.last in state.rules.stop_tokens else None
