"""Declared tools and the turns that need them: the right name, the arguments copied, the reply told."""

import json
from dataclasses import dataclass
from random import Random
from typing import cast

from train import words
from train.skills import SKILLS, TEXT_RESULTS, Param, Skill, schema, typed, value
from train.turns import Call, Json, Memory, Turn
from train.words import casing

EXPLICIT = (
    *(
        "Call {name} with {args}.",
        "Use {name} with {args}.",
        "Use the {name} tool with {args}.",
        "Please call {name} with {args}.",
    ),
    *("Run {name} with {args}.", "Call the tool {name} with {args}.", "{name}: {args}", "Use {name}: {args}"),
)
EXPLICIT_BARE = (
    "Call {name}.",
    "Use {name}.",
    "Use the {name} tool.",
    "Please call {name}.",
    "Run {name}.",
    "Call the {name} tool.",
)
LINKS = ("{k} = {v}", "{k}={v}", "{k} {v}", "{k}: {v}", "{k} set to {v}", 'the {k} "{v}"', '{k} = "{v}"', "{v} as {k}")
LOOKUPS = (
    *("What is the {noun} of {0}?", "Get the {noun} of {0}.", "Tell me the {noun} of {0}.", "Find the {noun} for {0}."),
    *(
        "What's the {noun} of {0}?",
        "I need the {noun} of {0}.",
        "Show the {noun} of {0}.",
        "{noun} of {0}?",
        "Give me the {noun} of {0}.",
    ),
)
FAILURES = (
    "error: not found",
    "error: timeout",
    "failed",
    '{{"error": "not found"}}',
    '{{"error": "{w} missing"}}',
    "error: {w}",
)


@dataclass(frozen=True)
class Tool:
    """One declared tool of a conversation."""

    definition: Json
    name: str
    keys: tuple[str, ...]
    skill: Skill


def declare(rng: Random, skill: Skill) -> Tool:
    """A member of a family of tools, with its own keys and wording."""
    name = rng.choice(skill.names) if rng.random() < 0.92 else words.invented(rng)
    keys = [rng.choice(param.keys) if rng.random() < 0.9 else words.invented(rng) for param in skill.params]
    if len(set(keys)) < len(keys):
        keys = [param.keys[0] for param in skill.params]
    about = rng.choice(skill.abouts)
    return Tool(schema(rng, name, about, list(zip(keys, skill.params, strict=True))), name, tuple(keys), skill)


def invented_skill(rng: Random) -> Skill:
    """A family nobody has seen: "get_blorvent", one to three parameters of any kind, asked for by its noun."""
    noun = words.invented(rng) if rng.random() < 0.5 else rng.choice(words.NOUNS)
    shapes = (
        "get_{}",
        "{}",
        "fetch_{}",
        "{}_lookup",
        "find_{}",
        "read_{}",
        "{}_of",
        "load_{}",
        "get{}",
        "{}_tool",
        "do_{}",
    )
    kinds = ("word", "city", "person", "code", "number", "phrase", "count", "device")
    some = (
        "key",
        "name",
        "value",
        "id",
        "item",
        "input",
        "kind",
        "user",
        "path",
        "level",
        "size",
        "color",
        "data",
        "mode",
        "arg",
    )
    keys = rng.sample(some, 3) if rng.random() < 0.7 else [words.invented(rng) for _ in range(3)]
    params = tuple(Param((key,), rng.choice(kinds), f"The {key}") for key in keys[: rng.choice((0, 1, 1, 1, 2, 2, 3))])
    abouts = (
        f"Get the {noun} of something.",
        f"Get the {noun}.",
        f"The {noun}",
        f"Reads the {noun}.",
        f"Returns the {noun} of an item.",
    )
    asks = tuple(ask.replace("{noun}", noun) for ask in LOOKUPS) if len(params) == 1 else ()
    if not params:
        asks = (
            f"Get the {noun}.",
            f"What is the {noun}?",
            f"Show me the {noun}.",
            f"I need the {noun}.",
            f"Tell me the {noun}.",
        )
    return Skill((rng.choice(shapes).format(noun),), abouts, params, asks, TEXT_RESULTS)


def declared(rng: Random) -> list[Tool]:
    """One to three tools with different names."""
    tools: dict[str, Tool] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        skill = invented_skill(rng) if rng.random() < 0.35 else rng.choice(SKILLS)
        if all(skill.abouts != tool.skill.abouts and skill.names != tool.skill.names for tool in tools.values()):
            tool = declare(rng, skill)
            tools.setdefault(tool.name, tool)
    chosen = list(tools.values())
    # A clock with a city and one without cannot be told apart from the question alone.
    return chosen if sum("time" in " ".join(t.skill.asks) for t in chosen) < 2 else chosen[:1]


def used(rng: Random, memory: Memory, tools: list[Tool]) -> Turn:
    """A request for one of the declared tools, its call, and the answer from its reply."""
    memory.total = None
    tool = rng.choice(tools)
    shown = [value(rng, param.kind) for param in tool.skill.params]
    explicit = not tool.skill.asks or rng.random() < (0.35 if tool.skill.names[0].count("_") else 0.2)
    if explicit and tool.keys:
        link = rng.choice(LINKS)
        pairs = [link.format(k=k, v=v) for k, v in zip(tool.keys, shown, strict=True)]
        args = " and ".join(pairs) if len(pairs) < 3 or rng.random() < 0.3 else ", ".join(pairs)
        user = rng.choice(EXPLICIT).format(name=tool.name, args=args)
    elif explicit:
        user = rng.choice(EXPLICIT_BARE).format(name=tool.name)
    else:
        ask = rng.choice(tool.skill.asks)
        user = _asked(rng, ask, shown)
    arguments = {key: typed(p.kind, v) for key, p, v in zip(tool.keys, tool.skill.params, shown, strict=True)}
    result, told = _result(rng, tool.skill, shown)
    given = " and ".join(f"{k} {v}" for k, v in zip(tool.keys, shown, strict=True))
    full = f"I need the tool {tool.name}." + (f" I give it {given}." if given else "")
    return Turn("call", user, f"I use {tool.name}.", full, call=Call(tool.name, arguments, result, told))


def _asked(rng: Random, ask: str, shown: list[str]) -> str:
    """The request, its own words in any case, the arguments as they are."""
    marked = casing(rng, ask)
    if rng.random() < 0.1:
        marked = rng.choice(("Please: ", "Hi! ", "Hello, ", "Hey, ", "Now: ", "Okay. ")) + marked
    for place, text in enumerate(shown):
        marked = marked.replace(f"{{{place}}}", text)
    return marked


def _result(rng: Random, skill: Skill, shown: list[str]) -> tuple[str, str]:
    """The reply of a tool and the sentence that tells it."""
    fill = {"n": rng.randint(0, 120), "w": words.some_word(rng), "v": words.some_word(rng), "s": rng.choice(words.SKY)}
    fill |= {"h": rng.randint(0, 23), "m": f"{rng.randint(0, 59):02}"}
    failed = rng.random() < 0.05
    forms = FAILURES if failed else (*skill.results, *TEXT_RESULTS) if rng.random() < 0.25 else skill.results
    result = rng.choice(forms).format(*shown, **fill)
    answer = "The tool failed: {r}." if failed else skill.answer
    return result, answer.format(*shown, r=told(result))


def told(result: str) -> str:
    """A reply in words: the value of a single key, "key value" pairs of several, text as it is."""
    try:
        found: object = json.loads(result)
    except ValueError:
        return result
    if not isinstance(found, dict):
        return result
    pairs = cast("Json", found)
    return ", ".join(f"{key} {_plain(item)}" if len(pairs) > 1 else _plain(item) for key, item in pairs.items())


def _plain(item: object) -> str:
    if isinstance(item, list):
        return ", ".join(_plain(one) for one in cast("list[object]", item))
    return item if isinstance(item, str) else json.dumps(item)
