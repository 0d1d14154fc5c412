"""When a generation ends: at an end token, or where a stop string begins in its text."""

from dataclasses import dataclass

from muse_fn.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopWatch:
    """What may stop one sequence, and the last bytes of its text that could still begin a stop string.

    Strings are searched in bytes, so that a character split over tokens is found; control tokens are no text.
    """

    tokens: tuple[int, ...]
    strings: tuple[str, ...]
    tokenizer: Tokenizer | None
    tail: bytes = b""

    def __post_init__(self) -> None:
        if any(not s for s in self.strings):
            raise ValueError("stop has an empty string: it would match everywhere")
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: this checkpoint has none")

    def push(self, token: int) -> "tuple[bool, StopWatch]":
        """Whether this token ends the sequence, and the watch after it."""
        if token in self.tokens:
            return True, self
        if not self.strings or self.tokenizer is None:
            return False, self
        text = self.tail + self.tokenizer.token_bytes(token)
        needles = [s.encode() for s in self.strings]
        longest = max(map(len, needles))
        found = any(n in text for n in needles)
        tail = text[-(longest - 1) :] if longest > 1 else b""
        return found, StopWatch(self.tokens, self.strings, self.tokenizer, tail)


def cut(text: str, strings: tuple[str, ...]) -> str:
    """The text before the earliest stop string in it, whole if there is none."""
    places = [text.find(s) for s in strings]
    return text[: min((p for p in places if p >= 0), default=len(text))]
