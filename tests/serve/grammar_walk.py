"""Random walks under a constraint: what comes out of a model that knows nothing."""

import random
import re
from functools import cache

import numpy as np

from muse_fn.serve.atem import PARAMETER_END, tools_by_name
from muse_fn.serve.jobs import Constraint
from muse_fn.serve.options import EMBEDDED
from muse_fn.tokenizer import Json, Tokenizer, load_tokenizer

ENDS = ("<|eot|>", "<|end_of_text|>", "<|eom|>")
BUDGET, CLOSING = 400, 60  # tokens; after the second the walk takes the shortest way out
VOCAB = 1234  # more than the tokenizer has, and no multiple of 32


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


def allowed(constraint: Constraint) -> list[int]:
    """The ids of the mask; each must be a token."""
    mask = constraint.mask()
    assert mask is not None
    assert mask.dtype == np.int32
    assert mask.shape == (-(-VOCAB // 32),)
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert ids, "the mask leaves nothing"
    assert max(ids) < len(tokenizer())
    return ids


def walk(constraint: Constraint, seed: int, *, greedy: bool = False, tools: Json = None) -> list[int]:
    """The tokens of a random turn; with `greedy`, long tokens are likelier. Fails if it does not end within BUDGET."""
    known, draw, drawn = tokenizer(), random.Random(seed), list[int]()
    strings = {key for parameters in tools_by_name(tools).values() for key in parameters.strings}
    while not constraint.is_done:
        ids = allowed(constraint)
        if len(drawn) < CLOSING:
            sizes = [len(known.token_bytes(token)) for token in ids]
            token = draw.choices(ids, [size**3 if greedy else 1 for size in sizes])[0]
        else:
            token = _way_out(ids, known.decode(drawn), strings, draw)
        constraint.push(token)
        drawn.append(token)
        assert len(drawn) <= BUDGET, f"no end in sight: {known.decode(drawn)[-400:]!r}"
    return drawn


def text_of(drawn: list[int]) -> str:
    """What was written, without the end token."""
    assert drawn[-1] in tokenizer().stop_ids
    return b"".join(map(tokenizer().token_bytes, drawn[:-1])).decode()


def _way_out(ids: list[int], text: str, strings: set[str], draw: random.Random) -> int:
    """An end token, else the next part of what closes something."""
    known = tokenizer()
    for name in ENDS:
        if known.controls[name] in ids:
            return known.controls[name]
    tail = text[-3:]
    ids = [token for token in ids if not _delays(tail + known.decode([token]))] or ids
    for closer in _closers(text, strings):
        done = next(n for n in range(len(closer) - 1, -1, -1) if text.endswith(closer[:n]))
        rest = closer[done:].encode()
        if found := [token for token in ids if rest.startswith(known.token_bytes(token))]:
            return max(found, key=lambda token: len(known.token_bytes(token)))
    marks = [token for token in ids if not known.decode([token]).isalnum()]
    return draw.choice(marks or ids)


def _closers(text: str, strings: set[str]) -> tuple[str, ...]:
    """What ends the innermost thing that is open."""
    opened, _, value = text.rpartition('<atem:parameter name="')[2].partition('">')
    if "<atem:parameter" in text and opened in strings and PARAMETER_END not in value:
        return (PARAMETER_END,)
    body = re.split(r"<\|message\|>|<atem:[^>]*>", text)[-1]
    quotes = len(re.findall(r'(?<!\\)(?:\\\\)*"', body))
    return ('"',) if quotes % 2 else ("}", "]", '"', "</atem:")


def _delays(header: str) -> bool:
    """Whether a header goes to a message after which another must come."""
    return any(start in header for start in ("to=s", "to=c"))
