"""Conversations as a function of a seed: the mixture, messages, tokens, what is learned of them, batches."""

# ruff: noqa: RUF001, RUF003 (the signs × and − are meant)

import json
import re
import zlib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jinja2.sandbox
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train import asked, sums, talk, tools, words
from train.turns import Conversation, Json, Memory, Turn

FOLDER = Path(__file__).parent.parent / "muse_fn" / "nano"
HELD_OUT = 20  # one request in this many is kept from training
EFFORTS = (None, None, None, "low", "medium", "high", "xhigh")
BRIEF = ("low", "medium")
SYSTEMS = (
    *(
        "You are a helpful assistant.",
        "You are muse-nano.",
        "You are a helpful AI assistant.",
        "Be brief.",
        "Answer shortly.",
    ),
    *(
        "You are a friendly assistant. Answer politely.",
        "You help people with small sums.",
        "Use the tools when you need them.",
    ),
    *("You are a calculator.", "Be kind.", "You are a test assistant.", "Help the user."),
)
CHAT = {"sum": 30, "repeat": 34, "talk": 15, "unknown": 14, "large": 2, "count": 5, "memory": 8, "date": 2}


def held_out(turn: Turn) -> bool:
    """Whether this request is kept for evaluation: decided by its text alone, whoever draws it."""
    return zlib.crc32(f"{turn.task}|{turn.user.lower()}".encode()) % HELD_OUT == 0


def conversation(rng: Random) -> Conversation:
    """One to three turns, half of them with tools declared."""
    declared = tools.declared(rng) if rng.random() < 0.42 else []
    date = f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}" if rng.random() < 0.12 else None
    topics = {tool.skill.topic for tool in declared}
    memory = Memory(tools=bool(declared), operations="".join(op for op in "+-×" if op not in topics))
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        if declared and rng.random() < 0.65:
            turns.append(tools.used(rng, memory, declared))
        else:
            turns.append(_chat(rng, memory, date, topics, bool(turns)))
    return Conversation(
        tuple(turns), rng.choice(EFFORTS), _system(rng), date, tuple(tool.definition for tool in declared)
    )


def _system(rng: Random) -> str | None:
    kind = rng.random()
    if kind < 0.75:
        return None
    if kind > 0.97:
        return words.filler(rng)
    return rng.choice(SYSTEMS) if kind < 0.91 else f"You are {words.phrase(rng, 3)}. {words.phrase(rng)}."


def _chat(rng: Random, memory: Memory, date: str | None, topics: set[str], later: bool) -> Turn:
    if later and not topics & {"+", "×"} and memory.total is not None and rng.random() < 0.5:
        return sums.follow(rng, memory)
    if later and rng.random() < 0.5:
        if memory.kept is not None:
            return talk.kept_asked(rng, memory)
        if memory.name is not None:
            return talk.name_asked(rng, memory)
    weights = dict(CHAT)
    if topics & {"+", "×"}:
        weights["large"] = 0
    if "search" in topics:
        weights["unknown"] = 0
    match rng.choices(list(weights), list(weights.values()))[0]:
        case "sum":
            return sums.one(rng, memory)
        case "repeat":
            return asked.repeat(rng, memory)
        case "talk":
            return talk.small_talk(rng, memory)
        case "unknown":
            return asked.unknown(rng, memory)
        case "large":
            return sums.too_large(rng, memory)
        case "count":
            return sums.count(rng, memory)
        case "memory":
            return rng.choice((talk.introduced, talk.name_asked, talk.remembered))(rng, memory)
        case _:
            return talk.date_asked(date, rng)


def messages(talked: Conversation, *, history: bool = True) -> list[Json]:
    """The conversation as OpenAI messages; without `history`, only the last assistant message keeps its reasoning."""
    brief = talked.effort in BRIEF
    found: list[Json] = [] if talked.system is None else [{"role": "system", "content": talked.system}]
    for number, turn in enumerate(talked.turns):
        found.append({"role": "user", "content": turn.user})
        reasoning = turn.brief if brief else turn.full
        if turn.call is None:
            found.append({"role": "assistant", "reasoning": reasoning, "content": turn.answer})
            continue
        function = {"name": turn.call.name, "arguments": turn.call.arguments}
        calls = [{"type": "function", "id": f"call_{number}", "function": function}]
        found.append({"role": "assistant", "reasoning": reasoning, "content": "", "tool_calls": calls})
        found.append({"role": "tool", "tool_call_id": f"call_{number}", "content": turn.call.result})
        after = "The tool answered." if brief else "The tool answered. I tell the user."
        found.append({"role": "assistant", "reasoning": after, "content": turn.call.answer})
    return found if history else forgotten(found)


def forgotten(said: list[Json]) -> list[Json]:
    """Messages as a client keeps them: without the reasoning of all but the last, sums put in other words."""
    kept = [{key: item for key, item in message.items() if key != "reasoning"} for message in said[:-1]]
    for message in kept:
        if message["role"] == "assistant":
            message["content"] = _put_otherwise(message["content"])
    return [*kept, said[-1]]


def _put_otherwise(text: str) -> str:
    """A sum's answer as another program might have kept it; all other text as it is."""
    found = re.fullmatch(r".* = (-?\d+)\.", text)
    forms = ("{}", "{}.", "The answer is {}.", "It is {}.", "That is {}.", text)
    return forms[zlib.crc32(text.encode()) % len(forms)].format(found[1]) if found else text


class Codec(NamedTuple):
    """The checkpoint's own template and tokenizer."""

    template: jinja2.Template
    tokenizer: Tokenizer

    def text(self, talked: Conversation, said: list[Json], *, prompt: bool = False) -> str:
        """The rendered conversation, with `prompt` ending where the model begins to write."""
        return self.template.render(
            messages=said,
            tools=list(talked.tools) or None,
            reasoning_effort=talked.effort,
            current_date=talked.date,
            add_generation_prompt=prompt,
        )

    def ids(self, text: str) -> list[int]:
        """Tokens of a rendered text: control tokens as single ids, nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def stops(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        ids = (self.tokenizer.token_to_id(name) for name in ("<|eot|>", "<|end_of_text|>"))
        return tuple(i for i in ids if i is not None)


def codec_of(folder: Path = FOLDER) -> Codec:
    """The codec of a checkpoint folder, by default of the embedded one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return codec((folder / "chat_template.jinja").read_text(encoding="utf-8"), tokenizer)


def codec(template: str, tokenizer: Tokenizer) -> Codec:
    """A codec from the text of a chat template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return Codec(environment.from_string(template), tokenizer)


def _to_json(item: Any) -> str:
    return json.dumps(item, ensure_ascii=False)


def learned(ids: list[int], tokenizer: Tokenizer) -> list[bool]:
    """Which tokens the model must predict: assistant turns that begin by reasoning, without their first header.

    A turn whose reasoning was dropped from the history is context only.
    """
    begin = tokenizer.encode("<|eot|><|start|>assistant", add_special_tokens=False).ids
    self_ = tokenizer.encode(" to=self", add_special_tokens=False).ids
    eot, opening = begin[0], [*begin, *self_]
    mask, inside = [False] * len(ids), False
    for at in range(len(ids)):
        if ids[at - len(begin) : at + len(self_)] == opening:
            inside = True
        mask[at] = inside
        inside = inside and ids[at] != eot
    return mask


class Batch(NamedTuple):
    """Rows of several conversations each; `doc` numbers them from 1, 0 is padding."""

    tokens: Tensor  # int64 [B, T]
    doc: Tensor  # int64 [B, T]
    learned: Tensor  # bool [B, T]


def document(rng: Random, code: Codec, most: int) -> tuple[list[int], list[bool]]:
    """A training conversation of at most `most` tokens, as ids and what is learned of them."""
    while True:
        talked = conversation(rng)
        if any(held_out(turn) for turn in talked.turns):
            continue
        ids = code.ids(code.text(talked, messages(talked, history=rng.random() < 0.6)))
        if len(ids) <= most:
            return ids, learned(ids, code.tokenizer)


def batch(seed: int, number: int, rows: int, length: int, code: Codec) -> Batch:
    """Batch `number` of a run: the same for the same seed, whoever makes it."""
    rng = Random(f"{seed}/{number}")
    found = Batch(
        torch.zeros(rows, length, dtype=torch.int64),
        torch.zeros(rows, length, dtype=torch.int64),
        torch.zeros(rows, length, dtype=torch.bool),
    )
    fill, docs, misses = [0] * rows, [0] * rows, 0
    while misses < 6:
        ids, mask = document(rng, code, length)
        row = next((r for r in range(rows) if fill[r] + len(ids) <= length), None)
        if row is None:
            misses += 1
            continue
        place = slice(fill[row], fill[row] + len(ids))
        fill[row] += len(ids)
        docs[row] += 1
        found.tokens[row, place] = torch.tensor(ids)
        found.doc[row, place] = docs[row]
        found.learned[row, place] = torch.tensor(mask)
    return found
