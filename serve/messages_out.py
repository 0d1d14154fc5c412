"""Events of a turn to the event stream of the Anthropic messages API; its plain answer is that stream, folded.

Reasoning becomes thinking blocks, commentary and answer text blocks, calls tool_use blocks. A pure state machine: the
state says which block is open.
"""

import json
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, cast

from muse_fn.serve.channels import Kind
from muse_fn.serve.fields import Object
from muse_fn.serve.turns import Called, Counts, Ended, Progress, Said, TurnEvent
from muse_fn.tokenizer import Json

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# Clients want a signature on thinking that they send back, and drop what has an empty one. Nothing here is signed.
SIGNATURE = "unsigned"


class State(NamedTuple):
    """Between two events. `blocks` is how many blocks have begun, `open` the kind of the one that still runs."""

    max_tokens: int
    shows_thinking: bool = True
    blocks: int = 0
    open: Kind | None = None


Step: TypeAlias = tuple[State, list[Object]]


def start(id: str, model: str, prompt: int, warnings: tuple[str, ...] = ()) -> list[Object]:
    """What a stream begins with. `prompt` is the number of prompt tokens; how many were cached is not known yet."""
    message: Object = {"id": id, "type": "message", "role": "assistant", "model": model, "content": []}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage(Counts(prompt, 0, 0, 0))}
    if warnings:
        message["warnings"] = list[Json](warnings)
    return [{"type": "message_start", "message": message}, {"type": "ping"}]


def usage(counts: Counts) -> Object:
    """Tokens; what was cached is not part of `input_tokens`."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def push(state: State, event: TurnEvent) -> Step:
    """What one event of the turn adds to the stream. A turn that failed is the caller's to tell."""
    match event:
        case Progress():
            return state, [{"type": "ping"}]
        case Said(kind=kind, text=text):
            return _say(state, kind, text)
        case Called():
            return _call(state, event)
        case Ended():
            state, events = _close(state)
            return state, events + _end(state, event)
        case _:
            return state, []


def whole(events: Iterable[Object]) -> Object:
    """The message that a complete stream amounts to. The stream must not have failed."""
    message, texts = Object(), list[tuple[Object, list[str]]]()
    for event in events:
        match event["type"]:
            case "message_start":
                message = dict(cast("Object", event["message"]))
            case "content_block_start":
                texts.append((dict(cast("Object", event["content_block"])), []))
            case "content_block_delta":
                _apply(texts[-1], cast("Object", event["delta"]))
            case "message_delta":
                message |= cast("Object", event["delta"]) | {"usage": event["usage"]}
            case _:
                pass
    content: Json = [_block(*block) for block in texts]
    return {**message, "content": content}


def _apply(block: tuple[Object, list[str]], delta: Object) -> None:
    if delta["type"] == "signature_delta":
        block[0]["signature"] = delta["signature"]
    else:
        (text,) = (value for name, value in delta.items() if name != "type")
        block[1].append(cast("str", text))


def _block(start: Object, texts: list[str]) -> Object:
    text = "".join(texts)
    match start["type"]:
        case "tool_use":
            return start | {"input": cast("Json", json.loads(text))}
        case other:
            return start | {cast("str", other): text}


def _say(state: State, kind: Kind, text: str) -> Step:
    if not text or (kind == "reasoning" and not state.shows_thinking):
        return state, []
    events = list[Object]()
    if state.open != kind:
        state, events = _close(state)
        block: Object = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        events.append({"type": "content_block_start", "index": state.blocks, "content_block": block})
        state = state._replace(blocks=state.blocks + 1, open=kind)
    delta: Object = {"type": "text_delta", "text": text}
    if kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": text}
    return state, [*events, _delta(state, delta)]


def _call(state: State, call: Called) -> Step:
    state, events = _close(state)
    index = state.blocks
    block: Object = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    events.append({"type": "content_block_start", "index": index, "content_block": block})
    state = state._replace(blocks=index + 1)
    events.append(_delta(state, {"type": "input_json_delta", "partial_json": call.arguments}))
    return state, [*events, {"type": "content_block_stop", "index": index}]


def _delta(state: State, delta: Object) -> Object:
    return {"type": "content_block_delta", "index": state.blocks - 1, "delta": delta}


def _close(state: State) -> Step:
    """The end of the open block, if there is one."""
    if state.open is None:
        return state, []
    signed: Object = {"type": "signature_delta", "signature": SIGNATURE}
    events = [_delta(state, signed)] if state.open == "reasoning" else []
    return state._replace(open=None), [*events, {"type": "content_block_stop", "index": state.blocks - 1}]


def _end(state: State, ended: Ended) -> list[Object]:
    reason, sequence = stop_reason(ended, state.max_tokens)
    delta: Object = {"stop_reason": reason, "stop_sequence": sequence}
    if ended.damaged:  # meant for a tool and no call: not text, but not to be lost either
        delta["damaged_tool_calls"] = list[Json](ended.damaged)
    return [{"type": "message_delta", "delta": delta, "usage": usage(ended.counts)}, {"type": "message_stop"}]


def stop_reason(ended: Ended, max_tokens: int) -> tuple[StopReason, str | None]:
    """Why a turn ended that did not fail, and the stop sequence that ended it."""
    match ended.finish:
        case "tool_calls":
            return "tool_use", None
        case "length":  # the model's own limit ended what max_tokens would have let go on
            full = ended.counts.completion >= max_tokens
            return "max_tokens" if full else "model_context_window_exceeded", None
        case _:
            found = ended.stop_reason
            return ("stop_sequence", found) if isinstance(found, str) else ("end_turn", None)
