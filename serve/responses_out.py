"""Events of a turn to the event stream of the OpenAI responses API; its plain answer is what the last event carries.

Reasoning becomes reasoning items, commentary and answer messages with a phase, calls function_call items. A pure state
machine: the state holds the open item and the finished ones, as chains, so that an event costs its own size only.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

from muse_fn.serve.channels import Kind
from muse_fn.serve.fields import Object, merged
from muse_fn.serve.reply import token_bytes
from muse_fn.serve.turns import Called, Counts, Ended, Piece, Said, TurnEvent
from muse_fn.tokenizer import Json, Tokenizer

T = TypeVar("T")
Chain: TypeAlias = "tuple[Chain[T], T] | None"
ShowLogprob: TypeAlias = Callable[[Piece], Json]  # as output_text has it
PHASES = {"commentary": "commentary", "answer": "final_answer"}
LEAST = -9999.0


class Item(NamedTuple):
    """An item that text is still added to."""

    kind: Kind
    id: str
    texts: "Chain[str]" = None
    logprobs: "Chain[Json]" = None


class State(NamedTuple):
    """Between two events. `response` is the object as it was at the start; `key` makes ids of items."""

    response: Object
    key: str
    namespaces: frozenset[str] = frozenset()  # of tools, for calls named `namespace.function`
    show: ShowLogprob | None = None  # None: no log-probabilities
    number: int = 0
    items: int = 0
    open: Item | None = None
    done: "Chain[Json]" = None


Step: TypeAlias = tuple[State, list[Object]]


def start(state: State) -> Step:
    """What a stream begins with."""
    kinds = ("response.created", "response.in_progress")
    return _numbered(state, [{"type": kind, "response": state.response} for kind in kinds])


def push(state: State, event: TurnEvent) -> Step:
    """What one event of the turn adds to the stream."""
    match event:
        case Said(kind=kind, text=text):
            state, events = _say(state, kind, text, event.pieces) if text else (state, [])
        case Called():
            state, events = _call(state, event)
        case Ended():
            state, events = _end(state, event)
        case _:
            events = []
    return _numbered(state, events)


def usage(counts: Counts) -> Object:
    """Tokens in and out."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


def logprob(tokenizer: Tokenizer, piece: Piece) -> Json:
    """A token and its likeliest rivals as output_text has them; -9999 stands for what was impossible."""
    found = piece.logprob
    top = () if found is None else found.top
    rivals: Json = [_token(token_bytes(tokenizer, id), value) for id, value in top]
    return merged(_token(piece.raw, LEAST if found is None else found.chosen), top_logprobs=rivals)


def _token(raw: bytes, value: float) -> Object:
    text = raw.decode("utf-8", errors="replace")
    return {"token": text, "bytes": list[Json](raw), "logprob": max(value, LEAST)}


def listed(chain: "Chain[T]") -> list[T]:
    """The links of a chain, oldest first."""
    found = list[T]()
    while chain is not None:
        chain, value = chain
        found.append(value)
    return found[::-1]


def _numbered(state: State, events: list[Object]) -> Step:
    numbered = [merged(event, sequence_number=state.number + index) for index, event in enumerate(events)]
    return state._replace(number=state.number + len(events)), numbered


def _say(state: State, kind: Kind, text: str, pieces: tuple[Piece, ...]) -> Step:
    events = list[Object]()
    if state.open is None or state.open.kind != kind:
        state, events = _close(state, "completed")
        state, more = _open(state, kind)
        events += more
    item = state.open
    assert item is not None
    shown = [state.show(piece) for piece in pieces] if state.show and kind != "reasoning" else []
    logprobs = item.logprobs
    for value in shown:
        logprobs = (logprobs, value)
    delta = merged(_at(state, item), type=f"response.{_text_type(kind)}.delta", delta=text)
    delta = delta if kind == "reasoning" else merged(delta, logprobs=shown)
    return state._replace(open=item._replace(texts=(item.texts, text), logprobs=logprobs)), [*events, delta]


def _open(state: State, kind: Kind) -> Step:
    prefix = "rs" if kind == "reasoning" else "msg"
    item = Item(kind, f"{prefix}_{state.key}{state.items}")
    state = state._replace(open=item, items=state.items + 1)
    added = _event("output_item.added", output_index=state.items - 1, item=_item(item, "in_progress", []))
    part = merged(_at(state, item), type="response.content_part.added", part=_part(kind, "", []))
    return state, [added, part]


def _close(state: State, status: str) -> Step:
    """The end of the open item, if there is one."""
    item = state.open
    if item is None:
        return state, []
    text, logprobs = "".join(listed(item.texts)), listed(item.logprobs)
    part, place = _part(item.kind, text, logprobs), _at(state, item)
    said = merged(place, type=f"response.{_text_type(item.kind)}.done", text=text)
    said = said if item.kind == "reasoning" else merged(said, logprobs=logprobs)
    done = _item(item, status, [part])
    events = [said, merged(place, type="response.content_part.done", part=part)]
    events.append(_event("output_item.done", output_index=state.items - 1, item=done))
    return state._replace(open=None, done=(state.done, done)), events


def _call(state: State, call: Called) -> Step:
    state, events = _close(state, "completed")
    index, id = state.items, f"fc_{state.key}{state.items}"
    space, dot, name = call.name.partition(".")
    item: Object = {"type": "function_call", "id": id, "call_id": call.id, "name": call.name}
    if dot and space in state.namespaces:
        item = merged(item, name=name, namespace=space)
    done = merged(item, arguments=call.arguments, status="completed")
    begun = merged(item, arguments="", status="in_progress")
    arguments = "function_call_arguments"
    events += [
        _event("output_item.added", output_index=index, item=begun),
        _event(f"{arguments}.delta", item_id=id, output_index=index, delta=call.arguments),
        _event(f"{arguments}.done", item_id=id, output_index=index, arguments=call.arguments, name=item["name"]),
        _event("output_item.done", output_index=index, item=done),
    ]
    return state._replace(items=index + 1, done=(state.done, done)), events


def _end(state: State, ended: Ended) -> Step:
    ends = {"error": "failed", "abort": "cancelled", "length": "incomplete"}  # no stream event is called cancelled
    status = ends.get(ended.finish, "completed")
    state, events = _close(state, "completed" if status == "completed" else "incomplete")
    response = merged(state.response, status=status, output=listed(state.done), usage=usage(ended.counts))
    if status == "failed":
        response["error"] = {"code": "server_error", "message": ended.why or "the generation was ended"}
    elif status == "incomplete":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if ended.damaged:  # meant for a tool and no call: not text, but not to be lost either
        response["damaged_tool_calls"] = list[Json](ended.damaged)
    return state, [*events, _event("failed" if status == "cancelled" else status, response=response)]


def _event(kind: str, **fields: Json) -> Object:
    return {"type": f"response.{kind}", **fields}


def _text_type(kind: Kind) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _at(state: State, item: Item) -> Object:
    return {"item_id": item.id, "output_index": state.items - 1, "content_index": 0}


def _part(kind: Kind, text: str, logprobs: list[Json]) -> Object:
    part: Object = {"type": _text_type(kind), "text": text}
    return part if kind == "reasoning" else merged(part, annotations=[], logprobs=logprobs)


def _item(item: Item, status: str, content: list[Json]) -> Object:
    if item.kind == "reasoning":
        return {"type": "reasoning", "id": item.id, "summary": [], "content": content, "status": status}
    fields: Object = {"type": "message", "id": item.id, "role": "assistant", "phase": PHASES[item.kind]}
    return merged(fields, content=content, status=status)
