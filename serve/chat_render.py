"""Events of a turn to the two formats of a chat completion: chunks of a stream, and the whole; both pure.

The whole is put together from the same events that the chunks show one by one.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from muse_fn.serve import schemas
from muse_fn.serve.jobs import Logprob
from muse_fn.serve.reply import token_bytes
from muse_fn.serve.turns import Called, Counts, Ended, Piece, Progress, PromptScores, Said, TurnEvent
from muse_fn.tokenizer import Tokenizer

Object = dict[str, Any]
LEAST = -9999.0  # stands for a probability of zero, for which JSON has no number


class Frame(NamedTuple):
    """What all chunks of an answer share, and how they are told."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    choices: int
    prompt_ids: tuple[int, ...]
    shows_logprobs: bool = False
    shows_ids: bool = False
    shows_usage: bool = False
    running_usage: bool = False
    warnings: tuple[str, ...] = ()


class Told(NamedTuple):
    """Between two events of a stream: tokens generated so far, and the counts of the choices that have ended."""

    tokens: int = 0
    cached: int = 0
    ended: tuple[Counts, ...] = ()


def opening(frame: Frame, scores: PromptScores | None = None) -> list[Object]:
    """The first chunks: the role of each choice. The very first carries what there is to say about the prompt."""
    role = {"role": "assistant", "content": ""}
    chunks = [_chunk(frame, [_choice(frame, index, role)], Told()) for index in range(frame.choices)]
    chunks[0] |= _of_prompt(frame, scores)
    return chunks


def push(frame: Frame, told: Told, event: TurnEvent) -> tuple[Told, list[Object]]:
    """What one event adds to the stream. A choice that failed is the caller's to tell."""
    if isinstance(event, Progress):
        return told._replace(cached=event.cached), []
    if isinstance(event, PromptScores):
        return told, []
    told = told._replace(tokens=told.tokens + len(event.pieces))
    if isinstance(event, Ended):
        told = told._replace(ended=(*told.ended, event.counts))
        end = {"finish_reason": event.finish, "stop_reason": event.stop_reason, **_damaged(event)}
        return told, [_chunk(frame, [_choice(frame, event.choice, {}, event.pieces) | end], told)]
    delta = _called(event) if isinstance(event, Called) else _said(event)
    return told, [_chunk(frame, [_choice(frame, event.choice, delta, event.pieces)], told)]


def progress(frame: Frame, event: Progress) -> Object:
    """How much of the prompt has been read."""
    done = {"processed": event.done, "total": event.total, "cached": event.cached}
    return {**_chunk(frame, [], Told()), "prompt_progress": done}


def closing(frame: Frame, told: Told) -> list[Object]:
    """The usage chunk, if it was asked for."""
    return [{**_head(frame, "chat.completion.chunk"), "choices": [], "usage": _usage(frame, told.ended)}] * (
        frame.shows_usage
    )


def whole(frame: Frame, events: Iterable[TurnEvent]) -> Object:
    """The completion that complete events amount to. No choice may have failed."""
    listed = list(events)
    scores = next((event for event in listed if isinstance(event, PromptScores)), None)
    counts = [event.counts for event in listed if isinstance(event, Ended)]
    return {
        **_head(frame, "chat.completion"),
        "choices": [_answer(frame, index, _of_choice(listed, index)) for index in range(frame.choices)],
        "usage": _usage(frame, counts),
        **_of_prompt(frame, scores),
    }


def _of_choice(events: Iterable[TurnEvent], index: int) -> list[Said | Called | Ended]:
    return [e for e in events if isinstance(e, Said | Called | Ended) and e.choice == index]


def _answer(frame: Frame, index: int, events: list[Said | Called | Ended]) -> Object:
    """One choice of the whole. Its content is null beside calls if nothing was said, else a string."""
    said = [event for event in events if isinstance(event, Said)]
    content = "".join(event.text for event in said if event.kind != "reasoning")
    reasoning = "".join(event.text for event in said if event.kind == "reasoning") or None
    calls = [_call(event) for event in events if isinstance(event, Called)]
    message: Object = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    message |= {"tool_calls": calls} if calls else {}
    pieces = tuple(piece for event in events for piece in event.pieces)
    choice: Object = {"index": index, "message": message, "logprobs": _logprobs(frame, pieces)}
    choice |= {"token_ids": [piece.token for piece in pieces]} if frame.shows_ids else {}
    for end in (event for event in events if isinstance(event, Ended)):
        choice |= {"finish_reason": end.finish, "stop_reason": end.stop_reason, **_damaged(end)}
    return choice


def _head(frame: Frame, kind: str) -> Object:
    head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model}
    return {**head, "system_fingerprint": frame.fingerprint}


def _chunk(frame: Frame, choices: list[Object], told: Told) -> Object:
    """`usage` is null until the last chunk, unless running counts were asked for; absent without usage."""
    chunk = {**_head(frame, "chat.completion.chunk"), "choices": choices}
    if frame.running_usage:
        return {**chunk, "usage": schemas.usage(len(frame.prompt_ids), told.cached, told.tokens)}
    return {**chunk, "usage": None} if frame.shows_usage else chunk


def _choice(frame: Frame, index: int, delta: Object, pieces: tuple[Piece, ...] = ()) -> Object:
    choice: Object = {"index": index, "delta": delta, "logprobs": _logprobs(frame, pieces), "finish_reason": None}
    return {**choice, "token_ids": [piece.token for piece in pieces]} if frame.shows_ids else choice


def _said(event: Said) -> Object:
    if event.kind == "reasoning":
        return {"reasoning": event.text, "reasoning_content": event.text}
    return {"content": event.text}


def _called(event: Called) -> Object:
    return {"tool_calls": [{"index": event.number, **_call(event)}]}


def _call(event: Called) -> Object:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}


def _damaged(event: Ended) -> Object:
    """What was meant for a tool and is no call: not content, but not to be lost either."""
    return {"damaged_tool_calls": list(event.damaged)} if event.damaged else {}


def _of_prompt(frame: Frame, scores: PromptScores | None) -> Object:
    found: Object = {"prompt_token_ids": list(frame.prompt_ids)} if frame.shows_ids else {}
    if scores is not None:
        pairs = zip(frame.prompt_ids, scores.found, strict=True)
        found["prompt_logprobs"] = [_prompt_logprob(frame, token, logprob) for token, logprob in pairs]
    return {**found, "warnings": list(frame.warnings)} if frame.warnings else found


def _usage(frame: Frame, counts: Iterable[Counts]) -> Object:
    """Of all choices together. The prompt was read once; what the later choices found was the first one's work."""
    listed = list(counts)
    cached, completion = min((c.cached for c in listed), default=0), sum(c.completion for c in listed)
    return schemas.usage(len(frame.prompt_ids), cached, completion, sum(c.reasoning for c in listed))


def _logprobs(frame: Frame, pieces: tuple[Piece, ...]) -> Object | None:
    """Of every generated token, framing and reasoning included, so that they can be told apart by their bytes."""
    if not frame.shows_logprobs or not pieces:
        return None
    content = [
        {**_token(frame, p.token, p.logprob.chosen), "top_logprobs": [_token(frame, *top) for top in p.logprob.top]}
        for p in pieces
        if p.logprob is not None
    ]
    return {"content": content, "refusal": None}


def _token(frame: Frame, token: int, logprob: float) -> Object:
    raw = token_bytes(frame.tokenizer, token)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": _number(logprob), "bytes": list(raw)}


def _number(logprob: float) -> float:
    """As JSON has it: finite, and never above the zero that rounding may pass."""
    return min(max(logprob, LEAST), 0.0)


def _prompt_logprob(frame: Frame, token: int, found: Logprob | None) -> Object | None:
    """Of the prompt's token, which comes first, and of the likeliest ones, by id."""
    if found is None:
        return None
    ranked = {token: (found.rank, found.chosen)}
    ranked |= {top: (place + 1, value) for place, (top, value) in enumerate(found.top) if top != token}
    return {
        str(key): {
            "logprob": _number(value),
            "rank": rank,
            "decoded_token": token_bytes(frame.tokenizer, key).decode("utf-8", errors="replace"),
        }
        for key, (rank, value) in ranked.items()
    }
