"""Messages in, an answer out: renders, generates, and parses the channels of what came."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from muse_fn.generation import Finish, Settings, Token, stream
from muse_fn.load import Model
from muse_fn.serve.channels import Message, parse
from muse_fn.serve.chat import render_chat
from muse_fn.sharding.mesh import Mesh
from muse_fn.stops import cut
from muse_fn.tokenizer import Json, Text, Tokenizer


class Request(NamedTuple):
    """One prompt as ids, and the tools that its answer may call."""

    ids: list[int]
    tools: Json = None
    is_chat: bool = True  # False: the prompt was no conversation, and its continuation has no channels


class Answer(NamedTuple):
    """What one prompt got."""

    tokens: list[int]
    finish: Finish
    text: str  # as generated, without the end token and cut at a stop string
    message: Message | None  # None for a prompt that was no conversation


def chat_request(
    model: Model, messages: Json, tools: Json = None, effort: str | None = None, *, where: str = "messages"
) -> Request:
    """The prompt of a conversation. Raises ValueError naming `where` and the field at fault."""
    try:
        pieces = render_chat(needed_tokenizer(model), messages, tools=tools, reasoning_effort=effort)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Request(needed_tokenizer(model).encode_pieces(pieces), tools)


def needed_tokenizer(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises ValueError if its folder had none."""
    if model.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer.json: only token ids can be given")
    return model.tokenizer


def answer_all(
    model: Model, requests: Sequence[Request], settings: Settings, mesh: Mesh | None = None
) -> Iterator[Token | tuple[int, Answer]]:
    """Every token as it comes, and each answer as soon as it is complete; on a mesh the same on every rank."""
    tokens: list[list[int]] = [[] for _ in requests]
    for event in stream(model, [r.ids for r in requests], settings, mesh):
        tokens[event.row] += [event.token] if event.token >= 0 else []
        yield event
        if event.finish:
            yield event.row, finish_answer(model, requests[event.row], tokens[event.row], event.finish, settings)


def finish_answer(model: Model, request: Request, tokens: list[int], finish: Finish, settings: Settings) -> Answer:
    """The answer that these tokens are."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return Answer(tokens, finish, "", None)
    ended = finish == "stop" and tokens[-1] in (settings.stop_tokens or tokenizer.stop_ids)
    body = tokens[:-1] if ended else tokens
    if not request.is_chat:
        return Answer(tokens, finish, cut(tokenizer.decode(body), settings.stop), None)
    pieces = tokenizer.decode_pieces(tokens)
    if settings.stop and pieces and isinstance(pieces[-1], Text):
        pieces[-1] = Text(cut(pieces[-1].text, settings.stop))
    return Answer(tokens, finish, tokenizer.decode(body), parse(pieces, request.tools))


def as_json(answer: Answer) -> dict[str, Any]:
    """An answer as a JSON line has it."""
    found: dict[str, Any] = {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
    if answer.message is None:
        return found
    m = answer.message
    calls = [{"name": call.name, "arguments": call.arguments} for call in m.tool_calls]
    return {"content": m.content, "reasoning": m.reasoning, "tool_calls": calls, **found}
