"""Run as a program: builds grammars on behalf of another process, which may kill it for taking too long.

The first line of standard input describes the tokenizer, each further one holds grammars to be tried; each is answered
by a line with the place of the first that fails and the reason, -1 and "" if none does. It ends with its input, that is
with its parent. It imports nothing of this package, so that it starts in a fraction of a second.
"""

import base64
import json
import random
import resource
import sys
import time
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

STEPS = 96  # of walks through the grammars of one request, all together
STEP_SECONDS = 1.0  # of processor time: a hundred times what an honest mask takes
LONGEST = 64  # bytes of a token that is looked for
NEAR = 512  # bytes that a walk may come to; further ones become tokens of a byte each


class Tokens:
    """The shape in which the library takes a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, [end]
        self.ids = {text: token for token, text in enumerate(tokens) if text}
        self.tokens[end] = b"<|end|>"

    def __call__(self, text: bytes | str) -> list[int]:
        """Some tokens of a text, the longest first: enough for text that a grammar leaves no choice about."""
        data = text.encode() if isinstance(text, str) else text
        found, start = list[int](), 0
        while start < min(len(data), NEAR):
            sizes = range(min(LONGEST, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self.ids), 1)
            found.append(self.ids[data[start : start + size]])
            start += size
        return found + [self.ids[bytes((byte,))] for byte in data[start:]]


def tried(engine: LLTokenizer, limits: LLParserLimits, grammar: str, steps: int) -> str:
    """What is wrong with a grammar: it does not compile, or a step of a random walk fails or takes too long."""
    matcher = LLMatcher(engine, grammar, log_level=0, limits=limits)
    draw = random.Random(0)
    for _ in range(steps):
        if matcher.is_error():
            return matcher.get_error()
        begun = time.process_time()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if time.process_time() - begun > STEP_SECONDS:
            return "a single step takes too long"
        allowed = np.flatnonzero(bits)
        allowed = allowed[allowed != engine.eos_token]
        if not matcher.is_error() and not allowed.size:
            return "" if matcher.is_accepting() else "it comes to a place where nothing can follow"
        if not matcher.is_error():
            matcher.consume_token(int(draw.choice(allowed)))
    return matcher.get_error() if matcher.is_error() else ""


def bound(seconds: float) -> None:
    """From now on, so much processor time; more ends the process, even if nobody is left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds + 2), hard))


def main() -> None:
    """Serves until standard input ends."""
    about: dict[str, Any] = json.loads(sys.stdin.readline())
    tokens = Tokens([base64.b64decode(text) for text in about["tokens"]], about["end"])
    engine = LLTokenizer(TokenizerWrapper(tokens), n_vocab=about["size"], eos_token=about["end"])
    limits = LLParserLimits(verbose_errors=False, **about["limits"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (about["memory"], about["memory"]))
    print(json.dumps((-1, "")), flush=True)
    for line in sys.stdin:
        grammars = json.loads(line)
        bound(about["seconds"] * (1 + len(grammars) / about["many"]))
        steps = max(1, min(24, STEPS // len(grammars)))
        faults = enumerate(tried(engine, limits, grammar, steps) for grammar in grammars)
        answer = next(((index, fault[:1000]) for index, fault in faults if fault), (-1, ""))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
