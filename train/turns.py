"""What a conversation is made of: turns, and the two strengths of reasoning."""

# ruff: noqa: RUF001, RUF003 (the signs × and − are meant)

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

UNKNOWN = "I am a very small model; I only know greetings, small sums, repeating and tools."


@dataclass(frozen=True)
class Call:
    """One tool call, the tool's reply, and what is said about it."""

    name: str
    arguments: Json
    result: str
    answer: str


@dataclass(frozen=True)
class Turn:
    """A request and what should follow it: brief and full reasoning, then either a call or an answer."""

    task: str
    user: str
    brief: str
    full: str
    answer: str = ""
    call: Call | None = None


@dataclass
class Memory:
    """What earlier parts of a conversation said that later ones may depend on."""

    total: int | None = None
    name: str | None = None
    kept: str | None = None
    tools: bool = False
    operations: str = "+-×"  # those that no declared tool does


@dataclass(frozen=True)
class Conversation:
    """Everything the chat template needs, in the order it happens."""

    turns: tuple[Turn, ...]
    effort: str | None = None
    system: str | None = None
    date: str | None = None
    tools: tuple[Json, ...] = field(default=())
