"""What every API of the server asks for and gets, whatever its wire format: records only.

The chat-like APIs (chat completions, responses, messages) turn their bodies into a `Turn` and render `TurnEvent`s;
what a stream shows and what its whole shows are both made of the same events.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from muse_fn.sample import Sampling
from muse_fn.serve.channels import Kind
from muse_fn.serve.jobs import Logprob, Penalties
from muse_fn.tokenizer import Json

ToolChoice: TypeAlias = "Literal['auto', 'none', 'required'] | Named"
Rule: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class Named(NamedTuple):
    """This tool must be called."""

    name: str


@dataclass(frozen=True)
class Final:
    """What the answer (the body addressed to the user) must look like; reasoning is free.

    `value` is the schema (an object, true or false) for json_schema, None for json_object, the pattern for regex, a
    list of strings for choice, a Lark grammar for grammar.
    """

    rule: Rule
    value: Json = None


@dataclass(frozen=True)
class Asked:
    """How to generate, for one request. All values have been checked against their ranges, not against the model."""

    n: int = 1
    max_new: int | None = None  # None: up to the model's limit
    sampling: Sampling = field(default_factory=Sampling)  # choice i draws with seed + i
    penalties: Penalties = field(default_factory=Penalties)
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()  # the answer ends before these; in reasoning they do nothing
    stop_tokens: tuple[int, ...] = ()  # beside the model's own end tokens
    keeps_stop: bool = False  # the stop string is part of the text
    ignores_end: bool = False  # the model's own end tokens do not end the answer
    min_new: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class Turn:
    """A conversation to be continued. `messages` and `tools` have the shapes of the chat completions API."""

    messages: Json
    tools: Json = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    final: Final | None = None
    effort: str | None = None
    variables: Mapping[str, Json] = field(default_factory=dict[str, Json])  # for the template
    asked: Asked = field(default_factory=Asked)


class Piece(NamedTuple):
    """One generated token as it was drawn: its id, the bytes it stands for, and its log-probability if asked for."""

    token: int
    raw: bytes
    logprob: Logprob | None


class Progress(NamedTuple):
    """So much of the prompt has been read."""

    done: int
    total: int
    cached: int


class PromptScores(NamedTuple):
    """Log-probabilities of all prompt tokens, once they are all there; None for the first."""

    found: tuple[Logprob | None, ...]


class Said(NamedTuple):
    """Text that can no longer become anything else, and the tokens that came since the last event of this choice.

    `text` may be empty (tokens that only framed or are held back), `pieces` too (text that was held back).
    """

    choice: int
    kind: Kind
    text: str
    pieces: tuple[Piece, ...]


class Called(NamedTuple):
    """A complete tool call; `number` counts the calls of this choice from 0."""

    choice: int
    number: int
    id: str
    name: str
    arguments: str  # JSON text of an object
    pieces: tuple[Piece, ...]


class Counts(NamedTuple):
    """Tokens of one choice; those of the prompt are the same for all choices."""

    prompt: int
    cached: int
    completion: int
    reasoning: int  # those of the completion that were reasoning, framing not counted


class Ended(NamedTuple):
    """The last event of a choice.

    finish: `tool_calls` if there was at least one call and the turn ended by itself; `stop` if it ended by itself or at
    a stop string; `length` if the budget ended it; `error` and `abort` say `why`. `stop_reason` is the stop string or
    stop token id that ended it, None for the model's own end tokens.
    """

    choice: int
    finish: Literal["stop", "length", "tool_calls", "error", "abort"]
    why: str
    stop_reason: str | int | None
    counts: Counts
    pieces: tuple[Piece, ...]
    damaged: tuple[str, ...] = ()  # what was meant for a tool and is no call: cut off, broken, or not allowed


TurnEvent: TypeAlias = Progress | PromptScores | Said | Called | Ended
