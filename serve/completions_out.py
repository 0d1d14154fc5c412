"""How /v1/completions and /generate show their choices. A whole answer is the joined chunks of its stream."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from muse_fn.serve.jobs import Logprob
from muse_fn.serve.plain import Token, token_bytes
from muse_fn.serve.plain_run import Begun, Closed, Event, Grown, Run
from muse_fn.serve.schemas import usage
from muse_fn.tokenizer import Tokenizer, whole_characters

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


@dataclass(frozen=True)
class Look:
    """What one request wants to see. `raw` is the form of /generate."""

    id: str
    model: str
    fingerprint: str
    created: int
    tokenizer: Tokenizer | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool = False
    ids: bool = False
    raw: bool = False
    warnings: tuple[str, ...] = ()

    def head(self) -> dict[str, Any]:
        """The fields that every chunk and the whole begin with."""
        kind = "token_ids" if self.raw else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def count(self, run: Run) -> "Counted":
        """Before the first event."""
        return Counted(sum(len(prompt.ids) for prompt in run.prompts), run.asked.n)


@dataclass(frozen=True)
class Counted:
    """Tokens so far, of all choices; those of a prompt count once."""

    prompt: int
    n: int
    cached: int = 0
    completion: int = 0

    def after(self, choice: dict[str, Any]) -> "Counted":
        """With one more chunk."""
        cached = choice["_cached"] if choice["index"] % self.n == 0 else 0
        return replace(self, cached=self.cached + cached, completion=self.completion + choice["_tokens"])

    def usage(self) -> dict[str, Any]:
        """As the API shows it."""
        return usage(self.prompt, self.cached, self.completion)


async def chunks(run: Run, look: Look) -> AsyncGenerator[dict[str, Any]]:
    """The choices of a stream's chunks. Keys that begin with `_` are counts for usage and not shown."""
    waiting: dict[int, tuple[int, int]] = {}  # counts that no chunk has told yet
    async with aclosing(run.events()) as events:
        async for event in events:
            cached, count = waiting.pop(event.choice, (0, 0))
            cached += event.cached if isinstance(event, Begun) else 0
            count += len(event.tokens) if isinstance(event, Grown) else 0
            if shown := _shown(run, look, event):
                yield {**shown, "_cached": cached, "_tokens": count}
            else:
                waiting[event.choice] = cached, count


async def raw_chunks(run: Run, look: Look) -> AsyncGenerator[dict[str, Any]]:
    """Likewise for /generate."""
    async with aclosing(run.events()) as events:
        async for event in events:
            cached = event.cached if isinstance(event, Begun) else 0
            count = len(event.tokens) if isinstance(event, Grown) else 0
            yield {**_raw(look, event), "_cached": cached, "_tokens": count}


async def whole(run: Run, look: Look, found: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    """The answer that is not streamed."""
    parts: dict[int, list[dict[str, Any]]] = {choice: [] for choice in range(len(run.streams))}
    counts = look.count(run)
    async with aclosing(found):
        async for choice in found:
            counts = counts.after(choice)
            parts[choice["index"]].append(choice)
    choices = [joined(listed) for listed in parts.values()]
    warned = {"warnings": list(look.warnings)} if look.warnings else {}
    return {**look.head(), "choices": choices, "usage": counts.usage(), **warned}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Chunks of one choice as one: texts and lists are put together, of the rest what is not null counts."""
    names = dict.fromkeys(name for part in parts for name in part if not name.startswith("_"))
    return {name: _joined([part[name] for part in parts if part.get(name) is not None]) for name in names}


def _joined(values: list[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], str):
        return "".join(values)
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if isinstance(values[0], dict):
        return {name: _joined([value[name] for value in values if value[name] is not None]) for name in values[0]}
    return values[-1]


def _shown(run: Run, look: Look, event: Event) -> dict[str, Any] | None:
    """An event as the choice of a chunk; None if there is nothing to see."""
    shown: dict[str, Any] = {"index": event.choice, "text": "", "logprobs": None, "finish_reason": None}
    prompt = run.prompt_of(event.choice)
    if isinstance(event, Begun):
        if look.echo:
            shown["text"] = prompt.text
        if look.echo and look.logprobs is not None:
            tokens = prompt_tokens(look.tokenizer, prompt.ids, event.scores)
            shown["logprobs"] = legacy(look.tokenizer, tokens, look.logprobs, 0)
        if look.prompt_logprobs is not None:
            shown["prompt_logprobs"] = scored(look.tokenizer, prompt.ids, event.scores, look.prompt_logprobs)
        if look.ids:
            shown |= {"prompt_token_ids": list(prompt.ids), "token_ids": []}
        return shown if len(shown) > 4 or look.echo else None
    if isinstance(event, Grown):
        shown["text"] = event.text
        if look.logprobs is not None:
            base = len(prompt.text) if look.echo else 0
            shown["logprobs"] = legacy(look.tokenizer, event.tokens, look.logprobs, base)
        if look.ids:
            shown["token_ids"] = [token.id for token in event.tokens]
        return shown if event.text or look.ids or look.logprobs is not None else None
    return {**shown, "text": event.text, **_end(event)}


def _raw(look: Look, event: Event) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": event.choice, "token_ids": [], "logprobs": None, "finish_reason": None}
    if isinstance(event, Begun) and look.prompt_logprobs is not None:
        shown["prompt_logprobs"] = [found and _numbers(found, look.prompt_logprobs) for found in event.scores]
    if isinstance(event, Grown):
        shown["token_ids"] = [token.id for token in event.tokens]
        if look.logprobs is not None:
            shown["logprobs"] = [t.logprob and _numbers(t.logprob, look.logprobs) for t in event.tokens]
    return {**shown, **_end(event)} if isinstance(event, Closed) else shown


def _end(event: Closed) -> dict[str, Any]:
    return {"finish_reason": event.finish, "stop_reason": event.stop_reason}


def legacy(tokenizer: Tokenizer | None, tokens: Iterable[Token], count: int, base: int) -> dict[str, Any]:
    """The parallel lists of the completions API; `base` characters come before the text."""
    listed = list(tokens)
    return {
        "tokens": [token_text(token.raw) for token in listed],
        "token_logprobs": [None if t.logprob is None else finite(t.logprob.chosen) for t in listed],
        "top_logprobs": [_top(tokenizer, token, count) for token in listed],
        "text_offset": [base + token.offset for token in listed],
    }


def prompt_tokens(tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Logprob | None]) -> list[Token]:
    """Prompt tokens as if they had been generated. A begin token that no text spells takes no characters."""
    found: list[Token] = []
    raw, offset = b"", 0
    bos = tokenizer.controls.get(tokenizer.bos_token or "") if tokenizer else None
    for place, token in enumerate(ids):
        logprob = scores[place] if place < len(scores) else None
        found.append(Token(token, token_bytes(tokenizer, token), offset, logprob))
        if place > 0 or token != bos:
            text, raw = whole_characters(raw + token_bytes(tokenizer, token))
            offset += len(text)
    return found


def scored(
    tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Logprob | None], count: int
) -> list[dict[str, Any] | None]:
    """prompt_logprobs: for each token an object from ids, the token's own first, to what is known of them."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token_bytes(tokenizer, token))}

    found: list[dict[str, Any] | None] = []
    for token, score in zip(ids, scores, strict=False):
        if score is None:
            found.append(None)
            continue
        likeliest = {str(id): entry(id, value, place) for place, (id, value) in enumerate(score.top[:count], 1)}
        found.append({str(token): entry(token, score.chosen, score.rank), **likeliest})
    return found


def token_text(raw: bytes) -> str:
    """A token as a string: its text, or `bytes:` and its bytes in hexadecimal where they are part of a character."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, FLOOR)


def _top(tokenizer: Tokenizer | None, token: Token, count: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    found = {token_text(token_bytes(tokenizer, id)): finite(value) for id, value in token.logprob.top[:count]}
    return {**found, token_text(token.raw): finite(token.logprob.chosen)}


def _numbers(logprob: Logprob, count: int) -> dict[str, Any]:
    top = [[id, finite(value)] for id, value in logprob.top[:count]]
    return {"logprob": finite(logprob.chosen), "rank": logprob.rank, "top": top}
