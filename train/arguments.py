"""Parameters of tools: how values are drawn, written by the user, typed in JSON and declared in a schema."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from train import words
from train.turns import Json

UNITS = ("celsius", "fahrenheit")
TYPES = {
    "number": ("integer", "number"),
    "count": ("integer", "number"),
    "decimal": ("number",),
    "flag": ("boolean",),
}  # JSON types of the kinds that are not strings


@dataclass(frozen=True)
class Param:
    """A parameter under any of several keys; `kind` says how its values are drawn."""

    keys: tuple[str, ...]
    kind: str
    about: str
    optional: str = ""  # how a request mentions it, if it does: " in {v}"


def value(rng: Random, kind: str) -> str:
    """One argument as the user writes it, which for numbers and flags is JSON."""
    match kind:
        case "number":
            return str(rng.randint(0, rng.choice((9, 20, 99, 999, 9999))))
        case "count":
            return str(rng.randint(1, rng.choice((10, 60, 120))))
        case "city":
            return words.city(rng)
        case "person":
            return words.person(rng)
        case "language":
            return rng.choice(words.LANGUAGES)
        case "device":
            return rng.choice(words.DEVICES) if rng.random() < 0.7 else words.invented(rng)
        case "word":
            return words.some_word(rng)
        case "code":
            return words.scramble(rng, 2, 5).upper() if rng.random() < 0.4 else words.code(rng)
        case "topic":
            return words.topic(rng) if rng.random() < 0.6 else words.phrase(rng, 4)
        case "decimal":
            return f"{rng.randint(0, 99)}.{rng.randint(1, 99)}"
        case "flag":
            return rng.choice(("true", "false"))
        case "unit":
            return rng.choice(UNITS)
        case "clock":
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        case _:
            return words.phrase(rng, rng.choice((1, 2, 4)))


def typed(kind: str, text: str) -> Any:
    """The argument as JSON."""
    return json.loads(text) if kind in TYPES else text


def schema(rng: Random, name: str, about: str, keys: list[tuple[str, Param]]) -> Json:
    """An OpenAI tool definition; optional parts come and go."""
    described = rng.random() < 0.5
    properties: Json = {}
    for key, param in keys:
        properties[key] = {"type": rng.choice(TYPES.get(param.kind, ("string",)))}
        if param.kind == "unit":
            properties[key]["enum"] = list(UNITS)
        if described:
            properties[key]["description"] = param.about
    parameters: Json = {"type": "object", "properties": properties}
    if keys and rng.random() < 0.85:
        parameters["required"] = [key for key, param in keys if not param.optional]
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    if not keys and rng.random() < 0.2:
        parameters = {}
    function: Json = {"name": name, "description": about if rng.random() < 0.93 else "", "parameters": parameters}
    return {"type": "function", "function": function}
