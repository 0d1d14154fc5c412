"""The words that tests of turns and calls are written in: tools, pieces, headers, calls; cutting a turn every way."""

import json
import random
import re
from typing import Any

from muse_fn.serve.channels import Message, parse, spelled_pieces
from muse_fn.tokenizer import Control, Json, Piece, Text

MARKS = re.compile(r"(<\|(?:start|message|eom|eot|end_of_text)\|>)")
STRING: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}


def tool(name: str, **properties: Json) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS: list[Json] = [
    tool("lookup", city=STRING),
    tool("add", a=NUMBER, b=NUMBER),
    tool("ping"),
    tool("noargs"),
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("write_file", path=STRING, content=STRING),
    tool("read", filePath=STRING),
]


def pieces(text: str, cuts: random.Random | None = None, size: int = 6) -> list[Piece]:
    """A spelled turn as an engine gives it: control tokens whole, text in runs of 1 to `size` characters."""
    found: list[Piece] = []
    for part in MARKS.split(text):
        if MARKS.fullmatch(part):
            found.append(Control(part))
            continue
        while part:
            n = cuts.randint(1, size) if cuts else len(part)
            found.append(Text(part[:n]))
            part = part[n:]
    return found


def spelled(text: str, size: int) -> list[Piece]:
    """The same turn from an engine that gives text only, markers spelled out and cut anywhere."""
    held, found = "", list[Piece]()
    for at in range(0, len(text), size):
        held, more = spelled_pieces(held, text[at : at + size])
        found += more
    return [*found, Text(held)]


def ask(text: str) -> Message:
    """The message of a turn, the same for every way to cut it: at one place, everywhere, at random."""
    whole = parse(pieces(text), TOOLS)
    for seed in range(12):
        cut = parse(pieces(text, random.Random(seed), 1 if seed == 0 else 6), TOOLS)
        assert cut == whole, f"cut by seed {seed}"
    for at in range(1, len(text)):
        assert parse(halves(text, at), TOOLS) == whole, f"cut at {at}"
    for size in (1, 2, 7, len(text) or 1):
        assert parse(spelled(text, size), TOOLS) == whole, f"spelled out, {size} characters a piece"
    return whole


def halves(text: str, at: int) -> list[Piece]:
    """The turn with one more cut, which a marker does not suffer."""
    found: list[Piece] = []
    for part in pieces(text):
        size = len(part.text if isinstance(part, Text) else part.name)
        if isinstance(part, Text) and 0 < at < size:
            found += [Text(part.text[:at]), Text(part.text[at:])]
        else:
            found.append(part)
        at -= size
    return found


def to(recipient: str) -> str:
    return f"<|start|>assistant to={recipient}<|message|>"


def call(name: str, **values: object) -> str:
    inner = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in values.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>\n</atem:function_calls>'


def said(message: Message) -> dict[str, Any]:
    """The parts of a message that are not empty, calls with decoded arguments."""
    parts: dict[str, Any] = {k: v for k, v in message._asdict().items() if v and k not in ("content", "unfinished")}
    if message.tool_calls:
        parts["tool_calls"] = [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
    return parts


INVOKE = '<atem:invoke name="'
