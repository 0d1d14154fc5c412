"""Generated text to reasoning, commentary, answer and tool calls: a pure state machine over pieces.

The model writes `<|start|>assistant to=RECIPIENT<|message|>BODY<|eom|>`, the last message of a turn ending `<|eot|>`,
and often less carefully. `feed` and `finish` are all there is: parsing a finished text is feeding it whole, so a
stream and its whole give the same message whatever the pieces. Nothing raises and nothing is lost: text ends in a
channel, in a call, or among the damaged; only headers and markers are dropped. A piece costs time in proportion to
itself, however much came before. Source: the published chat format of Muse Spark Open.

    header --<|message|>--> body of a channel --<|eom|> <|eot|> <|start|>--> header
    header --other text---> loose: framing is lost, the text is an answer in which calls are looked for
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from muse_fn.serve.atem import (
    BLOCK_TAGS,
    INVOKE_END,
    PARAMETER_END,
    Call,
    Tools,
    parse_invoke,
    tools_by_name,
    without_blocks,
)
from muse_fn.tokenizer import Control, Json, Piece, Text

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = (START, "<|eom|>", "<|eot|>", "<|end_of_text|>")
ROLES = ("assistant", "user", "system", "developer", "tool")
RECIPIENT_LIMIT, HEADER_LIMIT = 256, 300  # characters; what is longer is text, so little is ever withheld

Kind: TypeAlias = Literal["reasoning", "commentary", "answer"]
Channel: TypeAlias = Literal["header", "loose", "call"] | Kind
CHANNELS: dict[str, Kind] = {
    "": "reasoning",
    "self": "reasoning",
    "developer": "reasoning",  # nobody a user should hear
    "commentary": "commentary",
    "user": "answer",
}

_SPELLED = re.compile(r"<\|(?:start|message|eom|eot|end_of_text)\|>")
_TAG = re.compile(r"</?atem:function_calls>|</atem:(?:invoke|parameter)>|<atem:(?:invoke|parameter)(?=[\s>])")
_TAGS = (*BLOCK_TAGS, INVOKE_END, PARAMETER_END, "<atem:invoke ", "<atem:parameter ")
_SPACE = re.compile(r"\s*")
_Chain: TypeAlias = "tuple[_Chain, str] | None"


class Delta(NamedTuple):
    """A piece of text in one of the three channels."""

    kind: Kind
    text: str


Event: TypeAlias = Delta | Call


class Message(NamedTuple):
    """What a finished turn said.

    `content` is commentary and answer bodies in order, joined by nothing: the OpenAI field. `damaged` is what was
    addressed to a tool but is no call: cut off, broken, or written beside one. `unfinished` names what was still open
    at the end (header, reasoning, commentary, answer, call); it is empty for a turn that ended as it should.
    """

    reasoning: str
    commentary: str
    answer: str
    content: str
    tool_calls: tuple[Call, ...]
    damaged: tuple[str, ...]
    unfinished: str = ""


class State(NamedTuple):
    """Between two pieces. `channel` tells where text goes now; the rest is the machine's own."""

    tools: Tools
    channel: Channel = "header"
    started: bool = False  # the header follows <|start|>, so its text is one whatever it says
    held: str = ""  # text that may still turn out to be a header
    scan: str = ""  # loose text that may still turn out to be a tag
    capturing: bool = False  # inside a call
    closed: bool = False  # loose: right behind a tag, where white space only separates; else: a call has ended here
    parts: tuple[str, ...] = ()  # the call so far, in chunks that grow
    tail: str = ""  # the end of `parts`, in which a closing tag may have begun
    fresh: bool = True  # nothing of this body has been said
    reasoned: bool = False  # some reasoning has been said
    losses: _Chain = None  # the damaged, newest first
    unfinished: str = ""

    @property
    def damaged(self) -> tuple[str, ...]:
        """See `Message`."""
        found, chain = list[str](), self.losses
        while chain is not None:
            chain, text = chain
            found.append(text)
        return tuple(reversed(found))


Step: TypeAlias = tuple[State, list[Event]]


def begin(tools: Json = None) -> State:
    """Behind the generation prompt `<|start|>assistant`; `tools` as in the request."""
    return State(tools_by_name(tools))


def feed(state: State, piece: Piece) -> Step:
    """One more piece. Never raises, whatever the model wrote."""
    if isinstance(piece, Text):
        return _text(state, piece.text)
    if piece.name == MESSAGE:
        return _open(state)
    if piece.name in ENDS:
        state, events = _end(state)
        return _next(state, "header", started=piece.name == START), events
    return (state, []) if state.channel == "header" else _say(state._replace(held=""), state.held)


def finish(state: State) -> Step:
    """The end of the text: what was held back is said or, if it is part of a call, damaged."""
    part = {"loose": "call" if state.capturing else "answer"}.get(state.channel, state.channel)
    if state.channel == "header" and not state.started and not state.held.strip():
        part = ""
    after, events = _end(state)
    if state.channel == "call" and state.closed and after.losses is state.losses:
        part = ""
    return after._replace(unfinished=part), events


def parse(pieces: Iterable[Piece], tools: Json = None) -> Message:
    """A finished turn."""
    state, events = begin(tools), list[Event]()
    for piece in pieces:
        state, more = feed(state, piece)
        events += more
    state, more = finish(state)
    return collect([*events, *more], state.damaged, state.unfinished)


def collect(events: Iterable[Event], damaged: tuple[str, ...] = (), unfinished: str = "") -> Message:
    """The message that a stream of events amounts to."""
    listed = list(events)
    deltas = [event for event in listed if isinstance(event, Delta)]
    said = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "commentary", "answer")}
    content = "".join(d.text for d in deltas if d.kind != "reasoning")
    calls = tuple(event for event in listed if isinstance(event, Call))
    return Message(**said, content=content, tool_calls=calls, damaged=damaged, unfinished=unfinished)


def spelled_pieces(held: str, text: str) -> tuple[str, list[Piece]]:
    """Pieces of text in which markers are spelled out, for an engine that gives no token ids.

    Returns what may be the beginning of a marker, to be given as `held` the next time, and the pieces. At the end, a
    rest that is not empty is a `Text`. Text that merely quotes a marker cannot be told apart here.
    """
    text, position, pieces = held + text, 0, list[Piece]()
    for match in _SPELLED.finditer(text):
        pieces += [Text(text[position : match.start()]), Control(match.group())]
        position = match.end()
    rest = _prefix_start(text, position, (MESSAGE, *ENDS))
    pieces.append(Text(text[position:rest]))
    return text[rest:], [piece for piece in pieces if piece != Text("")]


def _prefix_start(text: str, position: int, words: tuple[str, ...]) -> int:
    """Where the end of text begins one of the words (each has its only `<` in front) without completing it."""
    at = text.rfind("<", max(position, len(text) - max(map(len, words)) + 1))
    return at if at >= 0 and any(word.startswith(text[at:]) for word in words) else len(text)


def _header_start(text: str) -> int:
    """Where the end of text may be a header: one white space, if any, and `t`, `to` or `to=NAME`."""
    if not text or text[-1].isspace():
        return max(0, len(text) - 1)
    word = text[-(RECIPIENT_LIMIT + 4) :].rsplit(None, 1)[-1]
    word = word[word.rfind("<") + 1 :]
    at = word.find("to=")
    if at < 0:
        at = len(word) - (2 if word.endswith("to") else word.endswith("t"))
    begins = len(text) - len(word) + at
    return begins - 1 if 0 == at < len(word) and begins and text[begins - 1].isspace() else begins


def _next(state: State, channel: Channel, started: bool = False) -> State:
    """A header or body begins; of what came before only the damaged and whether there was reasoning count."""
    return State(
        state.tools, channel, started, capturing=channel == "call", reasoned=state.reasoned, losses=state.losses
    )


def _text(state: State, text: str) -> Step:
    text = state.held + text
    if state.channel == "header":
        if len(text) <= HEADER_LIMIT and (state.started or "to=".startswith(text.lstrip()[:3])):
            return state._replace(held=text), []
        state = _next(state, "loose")
    cut = _header_start(text)
    return _say(state._replace(held=text[cut:]), text[:cut])


def _open(state: State) -> Step:
    """`<|message|>` opens the body of whatever the header before it names; a header needs no `<|start|>`."""
    role, recipient = _header(state.held)
    if state.channel == "header":
        known = role in ("", "assistant")
        return _next(state, CHANNELS.get(recipient or "", "call") if known else "reasoning"), []
    state, events = _end(state if recipient is None else state._replace(held=""))
    return _next(state, CHANNELS.get(recipient or "", "call")), events


def _header(text: str) -> tuple[str, str | None]:
    """Role and recipient of a header; a recipient with white space or `<` in it is none."""
    role, found, recipient = text.partition("to=")
    if not found or "<" in recipient or any(map(str.isspace, recipient)):
        return text.strip(), None
    return role.strip(), recipient


def _end(state: State) -> Step:
    """The end of a header or body: nothing that is withheld can become framing any more."""
    if state.channel == "header":
        if _is_header(state.held):
            return state, []
        state, events = _say(_next(state, "loose"), state.held)
    else:
        state, events = _say(state._replace(held=""), state.held)
    if state.capturing:
        state, more = _end_call(state)
    elif state.closed or len(state.scan) > 1:  # a tag cut off, not a lone `<`
        state, more = _lose(state, state.scan), []
    else:
        state, more = _delta(state, "answer", state.scan)
    return state, [*events, *more]


def _end_call(state: State) -> Step:
    """What is left of a body of calls. Plain words where no call was made are said: nobody else would hear them."""
    text = "".join(state.parts)
    cut = _prefix_start(text, 0, _TAGS)
    prose, tag = without_blocks(text[:cut]), text[cut:]
    if state.channel == "call" and not (state.closed or "<atem:" in prose or "</atem:" in prose):
        return _delta(_lose(state, tag), "answer", prose)
    ends_block = state.closed and not prose and BLOCK_TAGS[1].startswith(tag)
    return state if ends_block else _lose(state, prose + tag), []


def _lose(state: State, text: str) -> State:
    """Keeps what was meant for a tool and is no call."""
    text = without_blocks(text).strip()
    return state._replace(losses=(state.losses, text)) if text else state


def _is_header(text: str) -> bool:
    """Whether text that no `<|message|>` followed still looks like a header, perhaps cut off, not like an answer."""
    words = text.split()
    if words and any(role == words[0] or (role.startswith(words[0]) and len(words) == 1) for role in ROLES):
        role, *words = words
        if role == "tool":
            return len(words) < 2
    return not words or (len(words) == 1 and "to=".startswith(words[0][:3]))


def _say(state: State, text: str) -> Step:
    """Text that is no header goes where its channel goes."""
    if state.channel in ("call", "loose"):
        return _calls(state, text)
    assert state.channel != "header", f"{text=}"
    return _delta(state, state.channel, text)


def _delta(state: State, kind: Kind, text: str) -> Step:
    """Says text; blocks of reasoning are lines apart."""
    if not text:
        return state, []
    joint = "\n" if kind == "reasoning" and state.fresh and state.reasoned else ""
    return state._replace(fresh=False, reasoned=state.reasoned or kind == "reasoning"), [Delta(kind, joint + text)]


def _calls(state: State, text: str) -> Step:
    text, position, events = state.scan + text, 0, list[Event]()
    state = state._replace(scan="")
    while position < len(text):
        state, more, position = (_capture if state.capturing else _prose)(state, text, position)
        events += more
    return state, events


def _prose(state: State, text: str, position: int) -> tuple[State, list[Event], int]:
    """Loose text up to the next tag. Tags around a call are dropped, with the white space behind them."""
    space = _SPACE.match(text, position) if state.closed else None
    position = space.end() if space else position
    if position == len(text):
        return state, [], position
    tag = _TAG.search(text, position)
    stop = tag.start() if tag else _prefix_start(text, position, _TAGS)
    state, events = _delta(state._replace(closed=state.closed and stop == position), "answer", text[position:stop])
    if tag is None:
        return state._replace(scan=text[stop:]), events, len(text)
    if tag.group() in ("<atem:invoke", "<atem:parameter"):
        return state._replace(capturing=True, closed=False), events, stop
    return state._replace(closed=True), events, tag.end()


def _capture(state: State, text: str, position: int) -> tuple[State, list[Event], int]:
    """Text of a call up to `</atem:invoke>`, which may have begun in an earlier piece."""
    keep = len(INVOKE_END) - 1
    seam = (state.tail + text[position : position + keep]).find(INVOKE_END)
    end = position + seam - len(state.tail) if seam >= 0 else text.find(INVOKE_END, position)
    if seam < 0 and end < 0:
        tail = (state.tail + text[max(position, len(text) - keep) :])[-keep:]
        return state._replace(parts=_pushed(state.parts, text[position:]), tail=tail), [], len(text)
    end += len(INVOKE_END)
    captured = "".join([*state.parts, text[position:end]])
    call, beside = parse_invoke(captured[: -len(INVOKE_END)], state.tools)
    state = _lose(state, beside if call else captured)
    after = state._replace(parts=(), tail="", capturing=state.channel == "call", closed=True)
    return after, [call] if call else [], end


def _pushed(parts: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Appends, joining chunks of like size: the chunks stay few and each character is copied a few times only."""
    while parts and len(parts[-1]) <= len(text):
        parts, text = parts[:-1], parts[-1] + text
    return (*parts, text)
