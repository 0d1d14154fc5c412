"""Tool calls as the model writes them: ATEM blocks to names and JSON arguments.

    <atem:function_calls>
    <atem:invoke name="NAME">
    <atem:parameter name="KEY">VALUE</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

There is no escaping in either direction. Everything here is one pass of `str.find`: hostile text costs linear time.
Source: the published chat format of Muse Spark Open.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from muse_fn.tokenizer import Json

INVOKE, INVOKE_END = "<atem:invoke", "</atem:invoke>"
PARAMETER, PARAMETER_END = "<atem:parameter", "</atem:parameter>"
MARKERS = ("<atem:function_calls>", INVOKE)
_NAME = re.compile(r'\sname="([^"]*)"')

Tools = Mapping[str, Mapping[str, Any]]  # function name -> its parameters, a JSON schema


class Call(NamedTuple):
    """A finished call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class Found(NamedTuple):
    """What a text of calls holds: finished calls, damaged ones as text, and where the rest begins: an unfinished
    invoke, or whatever follows the last one."""

    calls: list[Call]
    damaged: list[str]
    rest: int


class _Invoke(NamedTuple):
    """An invoke without its end tag: name, values by key, the text beside them, and where another one interrupts it."""

    name: str | None
    values: dict[str, str]
    beside: str
    stop: int


def tools_by_name(tools: Json) -> dict[str, Mapping[str, Any]]:
    """Functions of an OpenAI-shaped tools list by the name that a call uses; namespaces give `namespace.function`."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in cast("list[dict[str, Any]]", tools or []):
        if tool.get("type") == "namespace":
            inner = [(f"{tool['name']}.", member.get("function", member)) for member in tool["tools"]]
        else:
            inner = [("", tool.get("function", tool))]
        found |= {prefix + function["name"]: function.get("parameters") or {} for prefix, function in inner}
    return found


def find_calls(text: str, tools: Tools) -> Found:
    """All invokes of a text in order. The first end tag ends an invoke; one that another interrupts is damaged."""
    calls: list[Call] = []
    damaged: list[str] = []
    at, after = text.find(INVOKE), 0
    while at >= 0:
        end = text.find(INVOKE_END, at)
        if end < 0:
            return Found(calls, damaged, at)
        invoke = _read(text, at, end)
        after = invoke.stop if invoke.stop < end else end + len(INVOKE_END)
        call = _call(invoke, tools) if invoke.stop == end else None
        calls += [call] if call else []
        damaged += [] if call else [text[at:after]]
        at = text.find(INVOKE, after)
    return Found(calls, damaged, after)


def _read(text: str, at: int, end: int) -> _Invoke:
    """The invoke that begins at `at` and whose end tag is at `end`."""
    name, at = _open_tag(text, at + len(INVOKE), end)
    values: dict[str, str] = {}
    beside: list[str] = []
    while at < end:
        places = [p for mark in (PARAMETER, INVOKE) if (p := text.find(mark, at, end)) >= 0]
        stop = min(places, default=end)
        beside.append(text[at:stop])
        if not text.startswith(PARAMETER, stop):
            return _Invoke(name, values, "".join(beside), stop)
        key, begins = _open_tag(text, stop + len(PARAMETER), end)
        at = text.find(PARAMETER_END, begins, end)
        if key is None or at < 0:
            beside.append(text[stop:end])
            break
        values[key] = text[begins:at]
        at += len(PARAMETER_END)
    return _Invoke(name, values, "".join(beside), end)


def _open_tag(text: str, at: int, end: int) -> tuple[str | None, int]:
    """The name in an opening tag, None without one, and where the tag ends."""
    close = text.find(">", at, end)
    if close < 0:
        return None, end
    match = _NAME.search(text[at:close])
    return (match.group(1) if match else None), close + 1


def _call(invoke: _Invoke, tools: Tools) -> Call | None:
    """The call, None if damaged: no name, or pieces of parameters outside of any parameter."""
    if not invoke.name:
        return None
    if PARAMETER in invoke.beside or PARAMETER_END in invoke.beside:
        return _repaired(invoke.name, invoke.values, invoke.beside, tools)
    name = resolve(invoke.name, tools)
    schema = tools.get(name, {})
    return Call(name, _arguments({k: decode_value(v, _property(schema, k)) for k, v in invoke.values.items()}))


def _arguments(values: dict[str, Json]) -> str:
    return json.dumps(values, ensure_ascii=False)


def _repaired(name: str, values: dict[str, str], beside: str, tools: Tools) -> Call | None:
    """`<invoke name="read.path">VALUE</parameter>`, seen in the field: only when `read` is a tool and `path` a
    parameter of it; anything else is not guessed at."""
    head, _, tail = name.rpartition(".")
    value, closed, after = beside.partition(PARAMETER_END)
    known = cast("dict[str, Any]", tools.get(head, {}).get("properties") or {})
    if values or tail not in known or not closed or after.strip() or PARAMETER in value or name in tools:
        return None
    return Call(head, _arguments({tail: decode_value(value, known[tail])}))


def resolve(name: str, tools: Tools) -> str:
    """The tool meant: `x.x` is `x` when only `x` is a tool. Never a guess by the last part of a name."""
    head, _, tail = name.partition(".")
    return head if name not in tools and head == tail and head in tools else name


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties: Any = schema.get("properties")
    return cast("dict[str, Any]", properties).get(key) if isinstance(properties, dict) else None


def decode_value(text: str, schema: Any) -> Json:
    """A parameter's value: raw text where the schema admits a string, else JSON, else raw text again."""
    if admits_string(schema):
        return text
    try:
        value = cast("Json", json.loads(text, parse_constant=_refuse_constant))
        return value if _is_finite(value) else text
    except (ValueError, RecursionError):
        return text


def admits_string(schema: Any, depth: int = 0) -> bool:
    """Whether a schema names the type string, alone or among others."""
    if not isinstance(schema, dict) or depth > 8:
        return False
    known = cast("dict[str, Any]", schema)
    kind = known.get("type")
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return True
    inner = [branch for word in ("anyOf", "oneOf") for branch in cast("list[Any]", known.get(word) or [])]
    return any(admits_string(branch, depth + 1) for branch in inner)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_finite(value: Json) -> bool:
    """Whether a value can be written as JSON again (1e999 cannot)."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True
