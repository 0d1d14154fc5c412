"""What every handler of the server is given: one frozen record, made when the server starts."""

from dataclasses import dataclass, field
from typing import Literal

from muse_fn.params.config import Config
from muse_fn.serve.grammar import Grammars
from muse_fn.serve.jobs import Engine
from muse_fn.serve.metrics import Metrics
from muse_fn.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. More is refused with the limit in the message."""

    body: int = 32 << 20  # bytes
    depth: int = 64  # nesting of JSON
    prompts: int = 128  # of one completions request
    choices: int = 64  # n; n times prompts may be as many as this or `prompts`, whichever is more
    stops: int = 16
    stop_length: int = 1024  # characters of one stop string
    bias: int = 1024  # entries of logit_bias and allowed_token_ids
    logprobs: int = 20
    tools: int = 256
    name: int = 256  # characters of a tool's name
    keep_alive: float = 15.0  # seconds without an event after which a stream sends a comment
    stall: float = 60.0  # seconds that a client may leave a stream unread before it is ended


@dataclass
class Stage:
    """Where the server is in its life. Only when ready does it take new work; what it has taken it finishes."""

    name: Literal["starting", "ready", "draining"] = "ready"


@dataclass(frozen=True)
class Service:
    """The running server: what it serves and with what."""

    name: str  # of the model, as clients call it
    config: Config
    tokenizer: Tokenizer | None
    engine: Engine
    grammars: Grammars | None  # None without a tokenizer
    limits: Limits = field(default_factory=Limits)
    keys: tuple[str, ...] = ()  # API keys; none: no key is asked for
    created: int = 0  # seconds since 1970 at which the server started
    strict: bool = False  # unknown fields are refused instead of answered with a warning
    metrics: Metrics = field(default_factory=Metrics)
    stage: Stage = field(default_factory=Stage)
