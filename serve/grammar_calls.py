"""One tool's calls as a grammar: the notation of `muse_fn.serve.atem`, with values that its schema allows.

Values of parameters that may be strings are raw text up to the closing tag, others are JSON: the parser decides by the
same function. There are no escapes, so no value spells a tag that would end it.
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from muse_fn.serve.atem import BLOCK_TAGS, INVOKE_END, PARAMETER_END, tools_by_name
from muse_fn.serve.channels import CHANNELS
from muse_fn.serve.grammar_rules import literal, with_space
from muse_fn.serve.grammar_schema import checked, dumped, literals, part
from muse_fn.serve.grammar_texts import language
from muse_fn.tokenizer import Json

_NAME = re.compile(r'[^\s<>"]{1,256}')
_KEY = re.compile(r'[^<>"]{1,256}')
_TOP = frozenset("type properties required additionalProperties $defs definitions".split())


class Tool(NamedTuple):
    """A function that may be called."""

    where: str  # its place in the request
    name: str
    parameters: Json


class CallGrammar(NamedTuple):
    """A grammar in the library's JSON form, and the parameters whose values are raw text."""

    grammar: str
    texts: frozenset[bytes]


def declared(tools: Json) -> tuple[Tool, ...]:
    """The functions of OpenAI-shaped tools, those of a namespace as `namespace.function`.

    ValueError listing the names that a header or a tag cannot spell or that are taken.
    """
    found = tuple(_declared(tools, "", "tools"))
    faults: list[str] = []
    seen: set[str] = set()
    for where, name, _ in found:
        if not _NAME.fullmatch(name):
            faults.append(
                f"{where}.name: {name[:64]!r} must be 1 to 256 characters without white space, <, > and quotes"
            )
        elif name in CHANNELS:
            faults.append(f"{where}.name: {name!r} is a recipient of the format itself")
        elif name in seen:
            faults.append(f"{where}.name: {name!r} names two tools")
        seen.add(name)
    if faults:
        raise ValueError("; ".join(faults[:10]))
    return found


def _declared(tools: Json, prefix: str, path: str) -> Iterator[Tool]:
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        entry, where = (tool if isinstance(tool, dict) else {}), f"{path}[{index}]"
        if entry.get("type") == "namespace" and not prefix:
            yield from _declared(entry.get("tools"), f"{entry.get('name')}.", f"{where}.tools")
            continue
        function = entry.get("function", entry)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield Tool(f"{where}.function" if "function" in entry else where, prefix + name, function.get("parameters"))


def call_grammar(tool: Tool) -> CallGrammar:
    """The grammar of one call of a tool, from `<atem:function_calls>` to its end. ValueError naming what cannot be."""
    where = f"{tool.where}.parameters"
    root = checked({} if tool.parameters is None else tool.parameters, where)
    properties, required = _properties(root, where)
    entry: Json = {"name": tool.name, "parameters": root}
    strings = tools_by_name([entry])[tool.name].strings
    rules, grammars, parts = list[str](), list[Json](), list[str]()
    for index, (key, schema) in enumerate(properties.items()):
        here = f"{where}.properties.{key}"
        opening = literal(f'<atem:parameter name="{key}">')
        closing = literal(f"{PARAMETER_END}\n")
        raw = language(schema, root, here) if key in strings else ""
        if raw is None or schema is False:
            if key in required:
                raise ValueError(f"{here}: is required, but nothing is allowed for it")
            continue
        if not _KEY.fullmatch(key):
            raise ValueError(f"{here}: the name of a parameter must be 1 to 256 characters without <, > and quotes")
        parts.append(f"p{index}" if key in required else f"p{index}?")
        if raw:
            rules += [f"p{index}: P{index}", f"P{index}: {opening} ({raw}) {closing}"]
        else:
            _refuse_tags(schema, here)
            rules.append(f"p{index}: {opening} @j{index} {closing}")
            inner = with_space(part(root, ("properties", key), schema), here)
            grammars.append({"name": f"j{index}", "json_schema": inner})
    head = literal(f'{BLOCK_TAGS[0]}\n<atem:invoke name="{tool.name}">\n')
    start = " ".join(["start:", head, *parts, literal(f"{INVOKE_END}\n{BLOCK_TAGS[1]}")])
    listed: list[Json] = [{"lark_grammar": "\n".join([start, *rules])}, *grammars]
    return CallGrammar(json.dumps({"grammars": listed}, ensure_ascii=False), frozenset(s.encode() for s in strings))


def loosened(tool: Tool) -> Tool:
    """The same tool with nothing left of its schema but names of parameters, which are raw text and which required."""
    schema = tool.parameters if isinstance(tool.parameters, dict) else {}
    properties, required = schema.get("properties"), schema.get("required")
    entry: Json = {"name": tool.name, "parameters": schema}
    strings = tools_by_name([entry])[tool.name].strings
    text: Json = {"type": "string"}
    keys = [key for key in properties if _KEY.fullmatch(key)] if isinstance(properties, dict) else []
    listed: list[Json] = [key for key in required if key in keys] if isinstance(required, list) else []
    kinds: dict[str, Json] = {key: text if key in strings else {} for key in keys}
    return tool._replace(parameters={"properties": kinds, "required": listed})


def _properties(root: Json, where: str) -> tuple[dict[str, Json], frozenset[str]]:
    """Parameters in order, also those that are only required, and the required ones."""
    if not isinstance(root, dict):
        raise ValueError(f"{where}: must be an object, found {root!r}")
    if strange := sorted(root.keys() - _TOP):
        raise ValueError(f"{where}: the keyword {strange[0]!r} is not supported at the top of a tool's parameters")
    if root.get("type", "object") not in ("object", ["object"]):
        raise ValueError(f"{where}.type: must be 'object', found {root['type']!r}")
    listed, properties = root.get("required", []), root.get("properties", {})
    if not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
        raise ValueError(f"{where}.required: must be a list of strings")
    assert isinstance(properties, dict)
    required = frozenset(key for key in listed if isinstance(key, str))
    dumped([*properties, *sorted(required)], where)
    others = {key: root.get("additionalProperties", True) for key in listed if isinstance(key, str)}
    return {**properties, **{key: other for key, other in others.items() if key not in properties}}, required


def _refuse_tags(schema: Json, where: str) -> None:
    for text in literals(schema):
        if PARAMETER_END in text or INVOKE_END in text:
            raise ValueError(f"{where}: {text[:64]!r} spells a closing tag, and a tool call has no way to write that")
