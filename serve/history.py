"""What has been said so far, event by event, to messages of the chat completions API.

The responses and messages APIs cut an assistant's turn into items or blocks; the chat template wants messages that
hold reasoning, one text and its calls. This is the one place where they are put together.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from muse_fn.serve.fields import Object, refuse
from muse_fn.tokenizer import Json


class Told(NamedTuple):
    """Words of anybody but the assistant."""

    role: Literal["system", "developer", "user"]
    text: str


class Thought(NamedTuple):
    """Reasoning of the assistant."""

    text: str


class Wrote(NamedTuple):
    """Words of the assistant; `recipient` is None where nothing tells an answer from a commentary."""

    text: str
    recipient: Literal["user", "commentary"] | None = None


class Used(NamedTuple):
    """A tool call of the assistant."""

    id: str
    name: str
    arguments: Object


class Result(NamedTuple):
    """What a called tool answered. `path` is where the request says so, for errors."""

    id: str
    text: str
    path: str


Past: TypeAlias = Told | Thought | Wrote | Used | Result


class _Turn(NamedTuple):
    """An assistant's message that is being put together; the lists are its own and grow."""

    thoughts: list[str]
    texts: list[Wrote]  # at most one
    calls: list[Json]


def chat_messages(events: Iterable[Past]) -> list[Json]:
    """Messages in order. ValueError for a result without an earlier call of its id.

    Reasoning goes before the words and calls that follow it, block by block on lines of its own; words before calls
    are a commentary unless they are known to be for the user: then the calls are a message of their own.
    """
    done, turn, called = list[Json](), _Turn([], [], []), set[str]()
    for event in events:
        if _closes(turn, event):
            done += _message(turn)
            turn = _Turn([], [], [])
        match event:
            case Told(role, text):
                done.append({"role": role, "content": text})
            case Result(id, text, path):
                if id not in called:
                    refuse(path, f"answers {ascii(id)[:80]}, but no earlier tool call has this id")
                done.append({"role": "tool", "tool_call_id": id, "content": text})
            case Used(id, name, arguments):
                called.add(id)
                turn.calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case Thought(text):
                turn.thoughts.append(text)
            case Wrote():
                turn.texts.append(event)
    return done + _message(turn)


def _message(turn: _Turn) -> list[Json]:
    """The message of a turn, none if nothing was said."""
    if turn == ([], [], []):
        return []
    message: Object = {"role": "assistant", "content": None}
    if turn.thoughts:
        message["reasoning"] = "\n".join(turn.thoughts)
    for text, recipient in turn.texts:
        message |= {"content": text} | ({"recipient": recipient} if recipient else {})
    message |= {"tool_calls": turn.calls} if turn.calls else {}
    return [message]


def _closes(turn: _Turn, event: Past) -> bool:
    """Whether an event cannot be part of the assistant's message before it."""
    if isinstance(event, Told | Result):
        return True
    if isinstance(event, Used):
        return any(text.recipient == "user" for text in turn.texts)
    return bool(turn.texts or turn.calls)
