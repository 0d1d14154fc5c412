"""The tokens of one choice without framing to its text: pure, and the same whatever is streamed.

Bytes of a character that is split over tokens are held until it is whole; text in which a stop string may have begun
is held until that is known. What was said is never taken back.
"""

from typing import NamedTuple

from muse_fn.serve.jobs import Done, Finish, Logprob
from muse_fn.serve.stop_strings import Scan, release, scan
from muse_fn.tokenizer import Tokenizer, whole_characters


class Rules(NamedTuple):
    """What stays the same for one choice. Without a tokenizer there is no text.

    silent: ids whose text is not said, because they end the answer; stop_tokens: the request's own end tokens.
    """

    tokenizer: Tokenizer | None
    silent: frozenset[int] = frozenset()
    stop_tokens: frozenset[int] = frozenset()
    skips_controls: bool = True


class Token(NamedTuple):
    """One generated token, the bytes it stands for, and at which character of the text it begins."""

    id: int
    raw: bytes
    offset: int
    logprob: Logprob | None = None


class Plain(NamedTuple):
    """Between two tokens."""

    rules: Rules
    scan: Scan
    raw: bytes = b""  # the beginning of a character
    offset: int = 0  # whole characters so far, said or held
    drawn: int = 0  # tokens
    last: int = -1
    stopped: str | None = None  # the stop string that ended the text


def begin(rules: Rules, stops: tuple[str, ...] = (), keeps_stop: bool = False) -> Plain:
    """Behind the prompt."""
    return Plain(rules, Scan(stops, keeps_stop))


def push(state: Plain, token: int, logprob: Logprob | None = None) -> tuple[Plain, str, Token]:
    """One more token and the text that it settles. `stopped` of the new state tells that a stop string was found."""
    tokenizer = state.rules.tokenizer
    raw = token_bytes(tokenizer, token)
    shown = Token(token, raw, state.offset, logprob)
    is_control = tokenizer is not None and token in tokenizer.names
    if is_control or token in state.rules.silent:
        cut = state.raw.decode("utf-8", errors="replace")
        is_said = is_control and token not in state.rules.silent and not state.rules.skips_controls
        text, rest = cut + (raw.decode() if is_said else ""), b""
    else:
        text, rest = whole_characters(state.raw + raw)
    after, said, stopped = scan(state.scan, text)
    offset = state.offset + len(text)
    return Plain(state.rules, after, rest, offset, state.drawn + 1, token, stopped), said, shown


def finish(state: Plain, done: Done) -> tuple[str, Finish, str | int | None]:
    """The rest of the text, why it ended, and the stop string or the request's stop token that ended it."""
    if state.stopped is not None:
        return "", "stop", state.stopped
    cut = state.raw.decode("utf-8", errors="replace")
    after, said, stopped = scan(state.scan, cut)
    text = said + release(after)[1]
    if stopped is not None:
        return text, "stop", stopped
    by_token = done.finish == "stop" and state.last in state.rules.stop_tokens
    return text, done.finish, state.last if by_token else None


def token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    """The bytes of an id; none for an id without a token, or without a tokenizer."""
    known = tokenizer is not None and 0 <= token < len(tokenizer.bytes_of)
    return (tokenizer.bytes_of[token] if known and tokenizer is not None else None) or b""
