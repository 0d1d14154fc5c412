"""OpenAI-shaped messages and tools to the prompt that the checkpoint's own template writes."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import NoReturn, cast

from muse_fn.serve.template import render
from muse_fn.tokenizer import Json, Piece, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now")
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Json,
    *,
    tools: Json = None,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Json] | None = None,
    now: datetime | None = None,
) -> list[Piece]:
    """The prompt as pieces, for `tokenizer.encode_pieces`; every control token in it was written by the template.

    `messages` and `tools` have the shapes of the OpenAI chat API (see `check_messages`, `check_tools`);
    `reasoning_effort` and `variables` become template variables; `now` is what the template's strftime_now shows
    (the local time). ValueError, naming the path of the field, for anything malformed; also when the template refuses.
    """
    given: dict[str, Json] = dict(variables or {})
    taken = sorted(RESERVED & given.keys())
    if taken:
        _refuse(f"template variable {taken[0]}", "is set by the server and cannot be given")
    if reasoning_effort is not None:
        given["reasoning_effort"] = reasoning_effort
    given["tools"] = check_tools(tools)
    own: dict[str, object] = {"add_generation_prompt": add_generation_prompt}
    own |= {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    return render(tokenizer, check_messages(messages), given, own, now or datetime.now())


def check_messages(messages: Json) -> list[dict[str, Json]]:
    """The messages as a template expects them. Returns copies; unknown fields are kept.

    Lists of text parts become one string; `reasoning` and `reasoning_content` become each other, whichever was given;
    `function.arguments` becomes an object; a tool message without a name gets that of the call it answers, else the
    id. `content` may be null or absent for the assistant only. ValueError with the path of the first wrong field.
    """
    listed = _items(messages, "messages")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(listed)]
    called: dict[str, Json] = {}
    for message in checked:
        if message["role"] == "tool" and not message.get("name"):
            message["name"] = called.get(cast("str", message["tool_call_id"]), message["tool_call_id"])
        for call in cast("list[dict[str, Json]]", message.get("tool_calls", [])):
            if "id" in call:
                called[cast("str", call["id"])] = cast("dict[str, Json]", call["function"])["name"]
    return checked


def check_tools(tools: Json) -> Json:
    """Tools as given (functions, or namespaces of functions), None for none. ValueError with the path of the fault."""
    if tools is None or tools == []:
        return None
    for index, tool in enumerate(_items(tools, "tools")):
        path = f"tools[{index}]"
        entry = _object(tool, path)
        match entry.get("type"):
            case "function":
                _function_definition(entry.get("function"), f"{path}.function")
            case "namespace":
                _name(entry, path)
                for inner, member in enumerate(_items(entry.get("tools"), f"{path}.tools")):
                    nested = _object(member, f"{path}.tools[{inner}]")
                    _function_definition(nested.get("function", nested), f"{path}.tools[{inner}]")
            case other:
                _refuse(f"{path}.type", f"must be 'function' or 'namespace', found {_found(other)}")
    return tools


def _message(message: Json, path: str) -> dict[str, Json]:
    entry = dict(_object(message, path))
    role = entry.get("role")
    if role not in ROLES:
        _refuse(f"{path}.role", f"must be one of {', '.join(map(repr, ROLES))}, found {_found(role)}")
    entry["content"] = _content(entry.get("content"), f"{path}.content", null=role == "assistant")
    for field in ("name", "tool_call_id", "recipient"):
        _optional_text(entry, field, path)
    if role == "assistant":
        _check_recipient(entry.get("recipient"), f"{path}.recipient")
        entry |= _reasoning(entry, path)
        entry["tool_calls"] = _tool_calls(entry.get("tool_calls"), f"{path}.tool_calls")
    elif entry.get("tool_calls") is not None:
        _refuse(f"{path}.tool_calls", f"belongs to an assistant message, not to role {role!r}")
    if role == "tool" and not entry.get("tool_call_id") and not entry.get("name"):
        _refuse(path, "a tool message needs tool_call_id or name")
    # A template asks `is defined` of fields; one that was null is as good as absent, except content.
    return {key: value for key, value in entry.items() if value is not None or key == "content"}


def _content(value: Json, path: str, null: bool) -> str | None:
    if isinstance(value, str) or (value is None and null):
        return value
    if not isinstance(value, list):
        _refuse(path, f"must be a string or a list of text parts, found {_found(value)}")
    texts: list[str] = []
    for index, part in enumerate(_items(value, path)):
        entry = _object(part, f"{path}[{index}]")
        if entry.get("type") != "text":
            _refuse(f"{path}[{index}].type", f"must be 'text', found {_found(entry.get('type'))}")
        text = entry.get("text")
        if not isinstance(text, str):
            _refuse(f"{path}[{index}].text", f"must be a string, found {_found(text)}")
        texts.append(text)
    return "".join(texts)


def _reasoning(entry: dict[str, Json], path: str) -> dict[str, Json]:
    """Both names of the reasoning, so that a template finds the one it reads."""
    fields = ("reasoning", "reasoning_content")
    for field in fields:
        _optional_text(entry, field, path)
    given = [entry[field] for field in fields if entry.get(field)]
    if len(given) == 2 and given[0] != given[1]:
        _refuse(f"{path}.reasoning_content", "differs from reasoning; give one of them")
    return dict.fromkeys(fields, given[0] if given else None)


def _tool_calls(calls: Json, path: str) -> Json:
    if calls is None or calls == []:
        return None
    checked: list[Json] = []
    for index, call in enumerate(_items(calls, path)):
        here = f"{path}[{index}]"
        entry = dict(_object(call, here))
        _optional_text(entry, "id", here)
        if entry.get("type", "function") != "function":
            _refuse(f"{here}.type", f"must be 'function', found {_found(entry.get('type'))}")
        function = dict(_object(entry.get("function"), f"{here}.function"))
        _name(function, f"{here}.function")
        function["arguments"] = _arguments(function.get("arguments"), f"{here}.function.arguments")
        checked.append({**entry, "function": function})
    return checked


def _arguments(value: Json, path: str) -> Json:
    """An object, given as such or as its JSON text; empty text and null are no arguments."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = cast("Json", json.loads(value))
        except (ValueError, RecursionError) as error:
            _refuse(path, f"is not JSON: {error}")
    return _object(value, path)


def _function_definition(value: Json, path: str) -> None:
    entry = _object(value, path)
    _name(entry, path)
    _optional_text(entry, "description", path)
    if entry.get("parameters") is not None:
        _object(entry.get("parameters"), f"{path}.parameters")


def _check_recipient(value: Json, path: str) -> None:
    if isinstance(value, str) and (not value or "<" in value or any(map(str.isspace, value))):
        _refuse(path, f"must be a word without '<', found {value!r}")


def _name(entry: dict[str, Json], path: str) -> None:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        _refuse(f"{path}.name", f"must be a non-empty string, found {_found(name)}")


def _optional_text(entry: dict[str, Json], field: str, path: str) -> None:
    value = entry.get(field)
    if value is not None and not isinstance(value, str):
        _refuse(f"{path}.{field}", f"must be a string, found {_found(value)}")


def _items(value: Json, path: str) -> list[Json]:
    if not isinstance(value, list) or not value:
        _refuse(path, f"must be a non-empty list, found {_found(value)}")
    return value


def _object(value: Json, path: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        _refuse(path, f"must be an object, found {_found(value)}")
    return value


def _found(value: Json) -> str:
    """A value as an error shows it: short, and without characters that an error writer could trip over."""
    text = ascii(value) if isinstance(value, str | int | float) else "null" if value is None else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}…"


def _refuse(path: str, problem: str) -> NoReturn:
    raise ValueError(f"{path}: {problem}")
