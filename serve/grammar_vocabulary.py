"""The tokens as masks see them: sets of ids as bits, and the grammar library's own view of a tokenizer."""

import base64
import re
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from muse_fn.tokenizer import Tokenizer

# Fuel makes building and stepping end: a pattern like (?:a{1000}){1000} is given up within 0.3 s instead of 4 s.
LIMITS: dict[str, int] = {
    "initial_lexer_fuel": 150_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}
NEAR = 256  # characters of forced text that are made into tokens properly


class Vocabulary:
    """Bytes, control ids and masks of one tokenizer under a model of `vocab_size` ids; nothing in it changes.

    The library is told of no control token but `end`, which it takes for the end of the text: no literal, class or
    token range of a grammar can be matched by a control token, whatever it spells. Masks are int32 [width],
    width = ceil(vocab_size / 32), with the lowest bit of the first for id 0.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """ValueError for a tokenizer without an end token among the ids of the model."""
        self.tokenizer, self.width = tokenizer, -(-vocab_size // 32)
        self.stops = tuple(token for token in tokenizer.stop_ids if token < vocab_size)
        if not self.stops:
            raise ValueError(f"{tokenizer.source}: no end token has an id below {vocab_size}, so no grammar could end")
        self.end, self.size = self.stops[-1], vocab_size
        known = (*tokenizer.bytes_of, *[None] * vocab_size)[:vocab_size]
        self.texts = [b"" if text is None or token in tokenizer.names else text for token, text in enumerate(known)]
        self.ordinary = self.bits(token for token, text in enumerate(self.texts) if text)
        self.engine = LLTokenizer(TokenizerWrapper(_Tokens(self)), n_vocab=vocab_size, eos_token=self.end)
        # The few that JSON and tags are made of: no other need be looked at again.
        marks = re.compile(rb"[0-9\[{>]")
        self._marked = {token: text for token, text in enumerate(self.texts) if marks.search(text)}
        self._tags = {token: text for token, text in self._marked.items() if b">" in text}

    def bits(self, ids: Iterable[int]) -> NDArray[np.int32]:
        """The mask of these ids, read-only."""
        flags = np.zeros(self.width * 32, np.uint8)
        flags[list(ids)] = 1
        mask = np.packbits(flags, bitorder="little").view(np.int32)
        mask.setflags(write=False)
        return mask

    def matching(self, pattern: str) -> NDArray[np.int32]:
        """The mask of ordinary tokens in whose bytes the pattern, which asks for a digit or a bracket, is found."""
        found = re.compile(pattern.encode(), re.DOTALL)
        return self.bits(token for token, text in self._marked.items() if found.search(text))

    def starting(self, text: bytes) -> tuple[int, ...]:
        """Ordinary tokens that begin with this text, which has a `>` in it."""
        return tuple(token for token, known in self._tags.items() if known.startswith(text))

    def containing(self, text: bytes) -> tuple[int, ...]:
        """Ordinary tokens in which this text, which has a `>` in it, is found."""
        return tuple(token for token, known in self._tags.items() if text in known)

    def matcher(self, grammar: str) -> LLMatcher:
        """A compiled grammar at its start. ValueError with the library's reason."""
        matcher = LLMatcher(self.engine, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return matcher

    def described(self) -> dict[str, object]:
        """What another process needs to build the same engine, as JSON."""
        tokens = [base64.b64encode(text).decode() for text in self.texts]
        return {"tokens": tokens, "end": self.end, "size": self.size, "limits": LIMITS}


def limits() -> LLParserLimits:
    """LIMITS in the library's form; its messages leave the parser's state out."""
    return LLParserLimits(
        initial_lexer_fuel=LIMITS["initial_lexer_fuel"],
        step_lexer_fuel=LIMITS["step_lexer_fuel"],
        step_max_items=LIMITS["step_max_items"],
        max_lexer_states=LIMITS["max_lexer_states"],
        verbose_errors=False,
    )


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a mask has the bit of this id."""
    return 0 <= token < mask.size * 32 and bool(mask[token >> 5] >> (token & 31) & 1)


def reason(matcher: LLMatcher) -> str:
    """Why the library gave up, on one line."""
    lines = matcher.get_error().replace("<non-verbose/>", "").split("\n")
    return " ".join(" ".join(lines).split())[:300]


class _Tokens:
    """The shape in which the library takes a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id, self.bos_token_id = vocabulary.end, None
        self.tokens = list(vocabulary.texts)
        self.tokens[vocabulary.end] = b"<|end|>"
        self.special_token_ids = [vocabulary.end]
        self.ordinary = vocabulary.tokenizer.ordinary
        self.of_byte = {text[0]: token for token, text in enumerate(vocabulary.texts) if len(text) == 1}

    def __call__(self, text: str) -> list[int]:
        """Asked at every step for all text that a grammar leaves no choice about; only its beginning counts.

        The library probes with bytes, for which the tokenizer's TypeError says that it takes text.
        """
        near = self.ordinary.encode(text[:NEAR], add_special_tokens=False).ids
        return near + [self.of_byte[byte] for byte in text[NEAR:].encode()]
