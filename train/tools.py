"""Declared tools and the turns that need them: the right name, the arguments copied, the reply told."""

import json
from dataclasses import dataclass, replace
from random import Random
from typing import cast

from train import words
from train.arguments import Param, schema, typed, value
from train.skills import SKILLS, TEXT_RESULTS, Skill
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
EXPLICIT_ONE = (
    "Call {name} for {v}.",
    "Use {name} for {v}.",
    "{name} {v}",
    "Run {name} on {v}.",
    "Call {name} with {v}.",
)
SHAPES = (
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
KINDS = ("word", "city", "person", "code", "code", "code", "number", "phrase", "count", "device", "decimal", "flag")
KEYS = "key name value id item input kind user path level size color data mode arg".split()
ABOUTS = ("Get the {} of something.", "Get the {}.", "The {}", "Reads the {}.", "Returns the {} of an item.")
BARE_LOOKUPS = ("Get the {}.", "What is the {}?", "Show me the {}.", "I need the {}.", "Tell me the {}.")
REPLY_KEYS = "status eta unit name city price total id state count title date temperature conditions ok wind".split()
LINKS = ("{k} = {v}", "{k}={v}", "{k} {v}", "{k}: {v}", "{k} set to {v}", 'the {k} "{v}"', '{k} = "{v}"', "{v} as {k}")
LOOKUPS = (
    *("What is the {noun} of {0}?", "Get the {noun} of {0}.", "Tell me the {noun} of {0}.", "Find the {noun} for {0}."),
    *(
        "What's the {noun} of {0}?",
        "I need the {noun} of {0}.",
        "Show the {noun} of {0}.",
        "{noun} of {0}?",
        "Where is my {noun} {0}?",
        "What is the status of {noun} {0}?",
        "Check {noun} {0}.",
        "Show me {noun} {0}, please.",
        "Set the {noun} to {0}.",
        "{noun} {0}",
        "Look up {noun} {0}.",
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
    """A member of a family of tools, with its own keys and wording; optional parameters come and go."""
    skill = replace(skill, params=tuple(p for p in skill.params if not p.optional or rng.random() < 0.4))
    name = rng.choice(skill.names) if rng.random() < 0.92 else words.invented(rng)
    keys = [rng.choice(param.keys) if rng.random() < 0.9 else words.invented(rng) for param in skill.params]
    if len(set(keys)) < len(keys):
        keys = [param.keys[0] for param in skill.params]
    about = rng.choice(skill.abouts)
    return Tool(schema(rng, name, about, list(zip(keys, skill.params, strict=True))), name, tuple(keys), skill)


def invented_skill(rng: Random) -> Skill:
    """A family nobody has seen: "get_blorvent", up to three parameters of any kind, asked for by its noun."""
    noun = words.invented(rng) if rng.random() < 0.5 else rng.choice(words.NOUNS)
    keys = rng.sample(KEYS, 3) if rng.random() < 0.7 else [words.invented(rng) for _ in range(3)]
    params = tuple(Param((key,), rng.choice(KINDS), f"The {key}") for key in keys[: rng.choice((0, 1, 1, 1, 2, 2, 3))])
    abouts = tuple(about.format(noun) for about in ABOUTS)
    asks = tuple(ask.replace("{noun}", noun) for ask in LOOKUPS) if len(params) == 1 else ()
    if not params:
        asks = tuple(ask.format(noun) for ask in BARE_LOOKUPS)
    return Skill((rng.choice(SHAPES).format(noun),), abouts, params, asks, TEXT_RESULTS)


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
    given = [
        (key, param, value(rng, param.kind))
        for key, param in zip(tool.keys, tool.skill.params, strict=True)
        if not param.optional or rng.random() < 0.5
    ]
    shown = [text for _, _, text in given]
    user = _explicit(rng, tool, given) if not tool.skill.asks or rng.random() < 0.25 else _asked(rng, tool, given)
    arguments = {key: typed(param.kind, text) for key, param, text in given}
    result, told = _result(rng, tool.skill, shown)
    listed = " and ".join(f"{key} {text}" for key, _, text in given)
    full = f"I need the tool {tool.name}." + (f" I give it {listed}." if listed else "")
    return Turn("call", user, f"I use {tool.name}.", full, call=Call(tool.name, arguments, result, told))


def _explicit(rng: Random, tool: Tool, given: list[tuple[str, Param, str]]) -> str:
    """A request that names the tool and what to give it."""
    if not given:
        return rng.choice(EXPLICIT_BARE).format(name=tool.name)
    if len(given) == 1 and rng.random() < 0.3:
        return rng.choice(EXPLICIT_ONE).format(name=tool.name, v=given[0][2])
    link = rng.choice(LINKS)
    pairs = [link.format(k=key, v=text) for key, _, text in given]
    args = " and ".join(pairs) if len(pairs) < 3 or rng.random() < 0.3 else ", ".join(pairs)
    return rng.choice(EXPLICIT).format(name=tool.name, args=args)


def _asked(rng: Random, tool: Tool, given: list[tuple[str, Param, str]]) -> str:
    """A request in other words: these in any case, the arguments as they are."""
    ask = rng.choice(tool.skill.asks)
    end = ask[-1] if ask[-1] in ".?" else ""
    for place, (_, param, _) in enumerate(given):
        if param.optional:
            ask = ask.removesuffix(end) + param.optional.format(v=f"{{{place}}}") + end
    marked = casing(rng, ask)
    if rng.random() < 0.1:
        marked = rng.choice(("Please: ", "Hi! ", "Hello, ", "Hey, ", "Now: ", "Okay. ")) + marked
    for place, (_, _, text) in enumerate(given):
        marked = marked.replace(f"{{{place}}}", text)
    return marked


def _result(rng: Random, skill: Skill, shown: list[str]) -> tuple[str, str]:
    """The reply of a tool and the sentence that tells it."""
    fill = {"n": rng.randint(0, 120), "w": words.some_word(rng), "v": words.some_word(rng), "s": rng.choice(words.SKY)}
    fill |= {"h": rng.randint(0, 23), "m": f"{rng.randint(0, 59):02}"}
    failed = rng.random() < 0.05
    forms = FAILURES if failed else (*skill.results, *TEXT_RESULTS) if rng.random() < 0.25 else skill.results
    result = rng.choice(forms).format(*shown, **fill)
    if not failed and rng.random() < 0.15:
        result = _object(rng)
    answer = "The tool failed: {r}." if failed else skill.answer
    return result, answer.format(*shown, r=told(result))


def _object(rng: Random) -> str:
    """A reply of one to four keys, spaced or not."""
    keys = [words.invented(rng) if rng.random() < 0.4 else rng.choice(REPLY_KEYS) for _ in range(rng.randint(1, 4))]
    makers = (
        lambda: rng.randint(-20, 2000),
        lambda: words.phrase(rng, 3),
        lambda: rng.choice(words.SKY),
        lambda: rng.randint(0, 999) / 10,
        lambda: rng.choice((True, False)),
        lambda: words.code(rng),
    )
    found = {key: rng.choice(makers)() for key in keys}
    return json.dumps(found, ensure_ascii=False, separators=rng.choice(((", ", ": "), (",", ":"))))


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
