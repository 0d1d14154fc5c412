"""What a JSON grammar cannot say about the JSON text being written, as tokens taken out of its masks.

JSON in a tool call may not spell the tags that end it, since the notation has no escapes. Numbers and nesting end
somewhere, even under a schema that allows anything, and no number is too large for a float.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muse_fn.serve.atem import INVOKE_END, MAX_DEPTH, PARAMETER_END
from muse_fn.serve.grammar_vocabulary import Vocabulary

DIGITS = 24  # of one number; a schema that asks for more gets more
EXPONENT = 2  # digits; with DIGITS before them every number is finite
DEPTH = MAX_DEPTH - 8  # no token opens more than eight levels
TAGS = (PARAMETER_END.encode(), INVOKE_END.encode())

_OPENED = re.compile(rb'<atem:parameter name="([^"]+)">\Z')
Place: TypeAlias = Literal["markup", "text", "json"]


class Vetoes:
    """Masks of the tokens that go on with a number, open a level or complete a tag; made once per vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.digit = vocabulary.matching(r"\A[0-9]")
        self.exponent = (
            vocabulary.matching(rf"\A[+-]?[0-9]{{{EXPONENT + 1}}}"),
            *(vocabulary.matching(rf"\A[0-9]{{{EXPONENT + 1 - done}}}") for done in range(1, EXPONENT + 1)),
        )
        self.huge = vocabulary.matching(rf"(?:\A|[0-9.])[eE][+-]?[0-9]{{{EXPONENT + 1}}}")
        self.opening = vocabulary.matching(r'\A[^"]*[\[{]')
        self.opening_behind_string = vocabulary.matching(r'\A[^"]*"[^"]*[\[{]')
        self.whole = tuple((token, tag) for tag in TAGS for token in vocabulary.containing(tag))
        begun = {tag[:done] for tag in TAGS for done in range(1, len(tag))}
        self.ending = {head: vocabulary.bits(_completing(vocabulary, head)) for head in begun}


def _completing(vocabulary: Vocabulary, head: bytes) -> list[int]:
    """Tokens that complete a tag of which this is the beginning."""
    rests = [tag[len(head) :] for tag in TAGS if tag.startswith(head)]
    return [token for rest in rests for token in vocabulary.starting(rest)]


@dataclass(slots=True)
class Guard:
    """Reads what is written, byte by byte. `texts`: parameters of a call whose values are raw; None for a lone JSON."""

    vetoes: Vetoes
    texts: frozenset[bytes] | None = None
    place: Place = "json"
    markup: bytes = b""  # the end of the markup, or of a raw value
    tail: bytes = b""  # the end of a string, so far as a tag may have begun in it
    quoted: bool = False
    escaped: bool = False
    depth: int = 0
    digits: int = 0  # of the number being written
    exponent: int = -1  # digits of its exponent; -1 outside one

    def __post_init__(self) -> None:
        if self.texts is not None:
            self.place = "markup"

    def push(self, text: bytes) -> None:
        """What was written next."""
        for byte in text:
            if self.place != "json":
                self._mark(byte)
            elif self.quoted:
                self._quote(byte)
            elif byte == 0x3C and self.texts is not None:  # only a closing tag has a < outside strings
                self.place, self.markup, self.digits, self.exponent = "markup", b"<", 0, -1
            else:
                self._count(byte)

    def cut(self, mask: NDArray[np.int32]) -> NDArray[np.int32]:
        """The mask without what may not come. It keeps what the schema leaves no choice about, except closing tags."""
        if self.place != "json":
            return mask
        if self.texts is not None:
            mask = self._without_tags(mask)
        kept = mask.copy()
        for veto in self._soft():
            kept &= ~veto
        return kept if kept.any() else mask

    def _soft(self) -> list[NDArray[np.int32]]:
        vetoes, deep = self.vetoes, self.depth >= DEPTH
        if self.quoted:
            return [vetoes.opening_behind_string] if deep else []
        found = [vetoes.huge]
        if deep:
            found.append(vetoes.opening)
        if self.exponent >= 0:
            found.append(vetoes.exponent[min(self.exponent, EXPONENT)])
        elif self.digits >= DIGITS:
            found.append(vetoes.digit)
        return found

    def _without_tags(self, mask: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.quoted and self.tail in self.vetoes.ending:
            mask = mask & ~self.vetoes.ending[self.tail]
        spelled = [token for token, tag in self.vetoes.whole if self._is_quoted_at(token, tag)]
        return mask & ~self.vetoes.vocabulary.bits(spelled) if spelled else mask

    def _is_quoted_at(self, token: int, tag: bytes) -> bool:
        quoted, escaped = self.quoted, self.escaped
        for byte in self.vetoes.vocabulary.texts[token].partition(tag)[0]:
            if escaped:
                escaped = False
            elif byte == 0x22:
                quoted = not quoted
            else:
                escaped = quoted and byte == 0x5C
        return quoted

    def _mark(self, byte: int) -> None:
        assert self.texts is not None
        self.markup = (self.markup + bytes((byte,)))[-1024:]
        if byte != 0x3E:
            return
        if self.place == "text":
            if self.markup.endswith(TAGS[0]):
                self.place, self.markup = "markup", b""
        elif found := _OPENED.search(self.markup):
            self.place, self.markup = "text" if found[1] in self.texts else "json", b""
            self.depth, self.quoted, self.escaped, self.digits, self.exponent = 0, False, False, 0, -1

    def _quote(self, byte: int) -> None:
        if self.escaped:
            self.escaped, self.tail = False, b""
        elif byte == 0x5C:
            self.escaped, self.tail = True, b""
        elif byte == 0x22:
            self.quoted, self.tail = False, b""
        else:
            tail = self.tail + bytes((byte,))
            self.tail = tail if tail in self.vetoes.ending else b"<" if byte == 0x3C else b""

    def _count(self, byte: int) -> None:
        if byte == 0x22:
            self.quoted = True
        elif byte in b"[{":
            self.depth += 1
        elif byte in b"]}":
            self.depth -= 1
        if byte in b"eE" and self.digits:
            self.exponent = 0
        elif 0x30 <= byte <= 0x39:
            self.digits += 1
            self.exponent += self.exponent >= 0
        elif byte not in b".+-" or not self.digits:
            self.digits, self.exponent = 0, -1
