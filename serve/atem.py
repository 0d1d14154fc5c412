"""One tool call as the model writes it, `<atem:invoke name="F"> <atem:parameter name="K">VALUE</atem:parameter> …`.

There is no escaping in this notation: a value runs to the next closing tag. What is not a whole call is not a call.
Every function here is linear in its text: tags are found by patterns that never look back.
"""

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import NamedTuple, NoReturn, TypeAlias, cast

from muse_fn.tokenizer import Json

INVOKE_END = "</atem:invoke>"
PARAMETER_END = "</atem:parameter>"
BLOCK_TAGS = ("<atem:function_calls>", "</atem:function_calls>")
MAX_DEPTH = 32  # of a decoded value; half of what a template accepts back, so that every call can be replayed

_OPENING = re.compile(r"<atem:(invoke|parameter)(?:\s([^<>]*+))?>")
_NAME = re.compile(r'(?:\A|\s)name="([^"]+)"')


class Call(NamedTuple):
    """A complete call: the function's name and the JSON text of its arguments object. An id is the server's to give."""

    name: str
    arguments: str


class Parameters(NamedTuple):
    """What decoding needs of one tool's schema: the names of its parameters, and of those that may be strings."""

    names: frozenset[str]
    strings: frozenset[str]


Tools: TypeAlias = Mapping[str, Parameters]


def tools_by_name(tools: Json) -> Tools:
    """Name to `Parameters` for OpenAI-shaped tools; a namespace's functions are named `namespace.function`.

    Anything malformed is passed over: it is refused where messages and tools are checked.
    """
    return {name: _parameters(schema) for name, schema in _functions(tools, "")}


def parse_invoke(text: str, tools: Tools) -> tuple[Call | None, str]:
    """The call that ends with this text (its `</atem:invoke>` taken off), and what of the text is no part of it.

    An opening tag inside an unfinished call begins a new one. None when the text is damaged: no name, a parameter
    that is not closed, or text where parameters are due. One damage is repaired: `<atem:invoke name="F.K">VALUE
    </atem:parameter>` is F with K, if F is a tool and K one of its parameters.
    """
    name, values, stray, start, position = "", dict[str, str](), list[str](), 0, 0
    while tag := _OPENING.search(text, position):
        stray.append(text[position : tag.start()])
        found = _NAME.search(tag[2] or "")
        position = tag.end()
        if tag[1] == "invoke":
            name, values, stray, start = found[1] if found else "", {}, [], tag.start()
            continue
        end = text.find(PARAMETER_END, position)
        if not found or end < 0:
            return None, text
        values[found[1]] = text[position:end]
        position = end + len(PARAMETER_END)
    rest = "".join([*stray, text[position:]])
    if not name:
        return None, text
    if "atem:parameter" in rest or "<atem:invoke" in rest or (rest.strip() and not values):
        call = _repaired(name, rest, tools) if not values else None
        return call, without_blocks(text[:start]) if call else text
    return _call(name, values, tools), without_blocks(text[:start])


def without_blocks(text: str) -> str:
    """Text beside calls without the tags that only surround them; empty if nothing else is there."""
    for tag in BLOCK_TAGS:
        text = text.replace(tag, "")
    return text if text.strip() else ""


def _repaired(name: str, rest: str, tools: Tools) -> Call | None:
    head, _, key = name.rpartition(".")
    value, closed, after = rest.partition(PARAMETER_END)
    if head not in tools or key not in tools[head].names or not closed or after.strip() or "<atem:" in value:
        return None
    return _call(head, {key: value}, tools)


def _call(name: str, values: Mapping[str, str], tools: Tools) -> Call:
    name = _registered(name, tools)
    strings = tools[name].strings if name in tools else frozenset[str]()
    decoded = {key: value if key in strings else _decoded(value) for key, value in values.items()}
    return Call(name, json.dumps(decoded, ensure_ascii=False))


def _registered(name: str, tools: Tools) -> str:
    """`f.f` is f where only f is a tool (bare names rendered as namespaces); any other name is left as it is."""
    half = len(name) // 2
    doubled = name[half : half + 1] == "." and name[:half] == name[half + 1 :]
    return name[:half] if name not in tools and doubled and name[:half] in tools else name


def _decoded(raw: str) -> Json:
    """The JSON value, or the raw text where it is none that can be passed on."""
    try:
        value = cast("Json", json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite))
    except (ValueError, RecursionError):
        return raw
    if "\\ud" in raw.lower():  # an escape of half a surrogate pair has no UTF-8 form
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError):
            return raw
    return value if _is_shallow(value) else raw


def _is_shallow(value: Json) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _children(item) if isinstance(inner, list | dict)]
        if not level:
            return True
    return False


def _children(value: Json) -> list[Json]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is out of range")
    return value


def _functions(tools: Json, prefix: str) -> Iterator[tuple[str, Json]]:
    for tool in tools if isinstance(tools, list) else []:
        entry = tool if isinstance(tool, dict) else {}
        if entry.get("type") == "namespace" and not prefix:
            yield from _functions(entry.get("tools"), f"{entry.get('name')}.")
            continue
        function = entry.get("function", entry)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield prefix + name, function.get("parameters")


def _parameters(schema: Json) -> Parameters:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return Parameters(frozenset(), frozenset())
    strings = frozenset(key for key, inner in properties.items() if _takes_strings(inner, schema))
    return Parameters(frozenset(properties), strings)


def _takes_strings(schema: Json, root: Json) -> bool:
    """Whether a string is among the values a schema allows, also through anyOf, oneOf, allOf and local references."""
    waiting, followed = [schema], set[str]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        kinds, listed, reference = node.get("type"), node.get("enum"), node.get("$ref")
        if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            return True
        if kinds is None and isinstance(listed, list) and listed and all(isinstance(item, str) for item in listed):
            return True
        for word in ("anyOf", "oneOf", "allOf"):
            waiting += _children(node.get(word))
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(reference, root))
    return False


def _referred(reference: str, root: Json) -> Json:
    node = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
