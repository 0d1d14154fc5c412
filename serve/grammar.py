"""Constraints on what is generated: tool choice and structured output, over the whole framing of a turn."""

from collections.abc import Mapping
from dataclasses import dataclass

from muse_fn.serve.jobs import Constraint
from muse_fn.serve.turns import Final, ToolChoice
from muse_fn.tokenizer import Json, Tokenizer


@dataclass(frozen=True)
class Framing:
    """What a turn must look like, from the generation prompt `<|start|>assistant` on."""

    tools: Json = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    final: Final | None = None


class Blueprint:
    """A compiled grammar."""

    def begin(self) -> Constraint:
        """A fresh cursor at the start of the generated text."""
        raise NotImplementedError


class Grammars:
    """Compiles grammars for one tokenizer and one model vocabulary; made once per server, closed at its end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, seconds: float = 5.0, size: int = 1 << 20) -> None:
        self.tokenizer, self.vocab_size, self.seconds, self.size = tokenizer, vocab_size, seconds, size
        self.known: Mapping[str, Blueprint] = {}

    async def build(self, framing: Framing) -> Blueprint | None:
        """None where there is nothing to enforce. ValueError naming the field for what cannot be honoured."""
        return self.compile(framing)

    async def build_plain(self, final: Final) -> Blueprint:
        """For text without framing: all of it matches the rule, then an end token comes."""
        raise NotImplementedError

    def compile(self, framing: Framing) -> Blueprint | None:
        """`build` without an event loop."""
        if (
            framing.final is None
            and framing.tool_choice == "auto"
            and (framing.parallel_tool_calls or not framing.tools)
        ):
            return None
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the worker process."""
