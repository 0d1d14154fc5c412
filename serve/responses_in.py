"""Bodies of the OpenAI responses API to turns: pure, and ValueError with the path of the field for all that is wrong.

What has no meaning here is refused, or named in a warning where an answer without it is still the answer asked for.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

from muse_fn.serve.bodies import load_json
from muse_fn.serve.fields import (
    Object,
    flag_at,
    found,
    list_at,
    name_at,
    object_at,
    one_of,
    optional_text,
    refuse,
    text_at,
    unknown_fields,
)
from muse_fn.serve.history import Past, Result, Thought, Told, Used, Wrote, chat_messages
from muse_fn.serve.service import Limits
from muse_fn.serve.turns import Asked, Final, Named, ToolChoice, Turn
from muse_fn.tokenizer import Json

STATELESS = "this server keeps no responses; send the whole conversation as input, and store false or absent"
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "there are no stored prompts here",
    "moderation": "there is no moderation here",
    "context_management": "nothing is compacted here",
}
WITHOUT_EFFECT = {
    "max_tool_calls": "limits built-in tools only, and there are none",
    "prompt_cache_retention": "cached prompts are kept while there is room",
    "prompt_cache_options": "cached prompts are kept while there is room",
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OF_TOOLS = ("type", "name", "description", "parameters", "strict", "defer_loading")
OF_ITEMS = {
    "message": ("type", "id", "role", "content", "status", "phase"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
    "function_call": ("type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"),
    "function_call_output": ("type", "id", "call_id", "output", "status", "name", "namespace", "caller"),
}
OF_PARTS = ("type", "text", "annotations", "logprobs")


class Read(NamedTuple):
    """A body as a turn; `namespaces` are the names of tools that hold others."""

    turn: Turn
    namespaces: frozenset[str]
    warnings: tuple[str, ...]
    unknown: tuple[str, ...]  # paths of fields that no version of this API has


class _Notes(NamedTuple):
    """Found on the way; both lists grow."""

    warnings: list[str]
    unknown: list[str]


def read(body: Object, asked: Asked, limits: Limits) -> Read:
    """A turn of the fields of a body that say what to answer; `asked`, how to generate, has been read already.

    `store` defaults to false, unlike elsewhere: the response says so. `reasoning.effort` goes to the chat template,
    which refuses names that it does not know.
    """
    notes = _Notes([], [])
    _refuse_others(body, notes)
    tools, namespaces = _tools(body.get("tools"), limits, notes)
    choice, tools = _tool_choice(body.get("tool_choice"), tools)
    turn = Turn(
        messages=chat_messages(_past(body, notes)),
        tools=cast("Json", tools or None),
        tool_choice=choice,
        parallel_tool_calls=flag_at(body, "parallel_tool_calls", "", True),
        final=_final(body, notes),
        effort=_effort(body, notes),
        asked=asked,
    )
    return Read(turn, namespaces, tuple(dict.fromkeys(notes.warnings)), tuple(notes.unknown))


def logprobs_asked(body: Object) -> int | None:
    """How many of the likeliest tokens to name beside each of the answer's; None for no log-probabilities.

    Asked for by `include`, by `top_logprobs` above 0, or both.
    """
    top = body.get("top_logprobs") or 0
    wanted = LOGPROBS in list_at(body.get("include") or [], "include")
    return cast("int", top) if top or wanted else None


def _refuse_others(body: Object, notes: _Notes) -> None:
    for name, why in REFUSED.items():
        if body.get(name) is not None:
            refuse(name, f"is not supported: {why}")
    for name, why in WITHOUT_EFFECT.items():
        if body.get(name) is not None:
            notes.warnings.append(f"{name}: has no effect: {why}")
    if flag_at(body, "store", "", False):
        refuse("store", f"must be false or absent, found true: {STATELESS}")
    if flag_at(body, "background", "", False):
        refuse("background", "must be false or absent, found true: responses are made while the client waits")
    if body.get("truncation") not in (None, "disabled"):
        refuse(
            "truncation", f"must be 'disabled': nothing is cut off a conversation, found {found(body['truncation'])}"
        )
    if body.get("service_tier") not in (None, "auto", "default"):
        notes.warnings.append("service_tier: has no effect: there is one tier, 'default'")
    options = object_at(body.get("stream_options") or {}, "stream_options")
    notes.unknown.extend(unknown_fields(options, ("include_obfuscation",), "stream_options"))
    if flag_at(options, "include_obfuscation", "stream_options", False):
        notes.warnings.append("stream_options.include_obfuscation: has no effect: nothing is padded")
    for index, wanted in enumerate(list_at(body.get("include") or [], "include")):
        if wanted == ENCRYPTED:
            notes.warnings.append(f"include: {ENCRYPTED} is not made; the content of reasoning items is plain text")
        elif wanted != LOGPROBS:
            refuse(f"include[{index}]", f"must be {LOGPROBS!r} or {ENCRYPTED!r}, found {found(wanted)}")


def _effort(body: Object, notes: _Notes) -> str | None:
    entry = object_at(body.get("reasoning") or {}, "reasoning")
    known = ("effort", "summary", "generate_summary")
    notes.unknown.extend(unknown_fields(entry, known, "reasoning"))
    for name in known[1:]:
        if entry.get(name) is not None:
            one_of(entry, name, "reasoning", ("auto", "concise", "detailed"))
            notes.warnings.append(f"reasoning.{name}: no summaries are made; reasoning items hold the reasoning itself")
    return one_of(entry, "effort", "reasoning", EFFORTS) if entry.get("effort") is not None else None


def _final(body: Object, notes: _Notes) -> Final | None:
    text = object_at(body.get("text") or {}, "text")
    notes.unknown.extend(unknown_fields(text, ("format", "verbosity"), "text"))
    if one_of(text, "verbosity", "text", ("low", "medium", "high"), "medium") != "medium":
        notes.warnings.append("text.verbosity: has no effect: the chat template knows no verbosity")
    path = "text.format"
    entry = object_at({"type": "text"} if text.get("format") is None else text["format"], path)
    kind = one_of(entry, "type", path, ("text", "json_object", "json_schema"))
    notes.unknown.extend(unknown_fields(entry, ("type", "name", "schema", "strict", "description"), path))
    if kind == "json_schema":
        name_at(entry, "name", path)
        flag_at(entry, "strict", path, False)
        return Final("json_schema", object_at(entry.get("schema"), f"{path}.schema"))
    return Final("json_object") if kind == "json_object" else None


def _tools(value: Json, limits: Limits, notes: _Notes) -> tuple[list[Object], frozenset[str]]:
    listed = list_at([] if value is None else value, "tools")
    tools, spaces, count = list[Object](), set[str](), 0
    for index, entry in enumerate(listed):
        path = f"tools[{index}]"
        tool = object_at(entry, path)
        if tool.get("type") != "namespace":
            tools.append({"type": "function", "function": _function(tool, path, limits, notes)})
            count += 1
            continue
        notes.unknown.extend(unknown_fields(tool, ("type", "name", "description", "tools"), path))
        inner = list_at(tool.get("tools"), f"{path}.tools")
        if not inner:
            refuse(f"{path}.tools", "must have at least one tool")
        functions: Json = [
            _function(object_at(one, f"{path}.tools[{place}]"), f"{path}.tools[{place}]", limits, notes)
            for place, one in enumerate(inner)
        ]
        space = name_at(tool, "name", path, limits.name)
        spaces.add(space)
        description = optional_text(tool, "description", path) or ""
        tools.append({"type": "namespace", "name": space, "description": description, "tools": functions})
        count += len(inner)
    if count > limits.tools:
        refuse("tools", f"at most {limits.tools} are allowed, found {count}")
    return tools, frozenset(spaces)


def _function(entry: Object, path: str, limits: Limits, notes: _Notes) -> Object:
    if entry.get("type") != "function":
        refuse(f"{path}.type", f"must be 'function' or, outside of one, 'namespace', found {found(entry.get('type'))}")
    notes.unknown.extend(unknown_fields(entry, OF_TOOLS, path))
    function: Object = {"name": name_at(entry, "name", path, limits.name)}
    if (description := optional_text(entry, "description", path)) is not None:
        function["description"] = description
    if entry.get("parameters") is not None:
        function["parameters"] = object_at(entry["parameters"], f"{path}.parameters")
    for name in ("strict", "defer_loading"):
        if entry.get(name) is not None:
            function[name] = flag_at(entry, name, path, False)
    return function


def _tool_choice(value: Json, tools: list[Object]) -> tuple[ToolChoice, list[Object]]:
    """The choice, and the tools that it leaves: of a set of allowed ones, the others are not shown to the model."""
    path = "tool_choice"
    if value is None or isinstance(value, str):
        choice = one_of({path: value}, path, "", ("auto", "none", "required"), "auto")
        if choice == "required" and not tools:
            refuse(path, "'required' needs tools, but the request has none")
        return ("none" if choice == "none" else "required" if choice == "required" else "auto"), tools
    entry = object_at(value, path)
    if one_of(entry, "type", path, ("function", "allowed_tools")) == "function":
        return Named(_declared(entry, path, tools)), tools
    mode = one_of(entry, "mode", path, ("auto", "required"))
    listed = list_at(entry.get("tools"), f"{path}.tools")
    if not listed:
        refuse(f"{path}.tools", "must have at least one tool")
    names = set[str]()
    for index, one in enumerate(listed):
        here = f"{path}.tools[{index}]"
        allowed = object_at(one, here)
        one_of(allowed, "type", here, ("function",))
        names.add(_declared(allowed, here, tools))
    kept = [tool for tool in tools if tool["type"] == "function" and cast("Object", tool["function"])["name"] in names]
    for tool in tools:
        if tool["type"] == "namespace":
            inner = [one for one in _inner(tool) if f"{tool['name']}.{one['name']}" in names]
            kept += [{**tool, "tools": cast("Json", inner)}] if inner else []
    return ("required" if mode == "required" else "auto"), kept


def _declared(entry: Object, path: str, tools: list[Object]) -> str:
    """The name of a tool as the model writes it."""
    name = name_at(entry, "name", path)
    if (space := optional_text(entry, "namespace", path)) is not None:
        name = f"{space}.{name}"
    plain = [cast("Object", tool["function"])["name"] for tool in tools if tool["type"] == "function"]
    nested = [f"{tool['name']}.{one['name']}" for tool in tools if tool["type"] == "namespace" for one in _inner(tool)]
    if name not in plain and name not in nested:
        refuse(f"{path}.name", f"must be the name of one of tools, found {found(name)}")
    return name


def _inner(tool: Object) -> list[Object]:
    return cast("list[Object]", tool["tools"])


def _past(body: Object, notes: _Notes) -> Iterator[Past]:
    if (instructions := optional_text(body, "instructions", "")) is not None:
        yield Told("system", instructions)
    given = body.get("input")
    if isinstance(given, str):
        yield Told("user", given)
        return
    items = list_at(given, "input")
    if not items:
        refuse("input", "must have at least one item")
    for index, value in enumerate(items):
        path = f"input[{index}]"
        entry = object_at(value, path)
        kind = "message" if entry.get("type") is None and "role" in entry else entry.get("type")
        if kind == "item_reference":
            refuse(f"{path}.type", f"'item_reference' cannot be followed: {STATELESS}")
        kind = one_of({"type": kind}, "type", path, OF_ITEMS)
        notes.unknown.extend(unknown_fields(entry, OF_ITEMS[kind], path))
        readers = {"message": _message, "reasoning": _thought, "function_call": _call, "function_call_output": _result}
        yield from readers[kind](entry, path, notes)


def _message(entry: Object, path: str, notes: _Notes) -> Iterator[Past]:
    role = one_of(entry, "role", path, ("user", "assistant", "system", "developer"))
    text = _texts(entry.get("content"), f"{path}.content", ("input_text", "output_text", "text"), notes)
    if role == "assistant":
        phases = ("commentary", "final_answer")
        phase = one_of(entry, "phase", path, phases) if entry.get("phase") is not None else None
        yield Wrote(text, "commentary" if phase == "commentary" else "user" if phase else None)
    else:
        yield Told("user" if role == "user" else "system" if role == "system" else "developer", text)


def _thought(entry: Object, path: str, notes: _Notes) -> Iterator[Past]:
    """The reasoning itself, else its summary."""
    if entry.get("content"):
        text = _texts(entry["content"], f"{path}.content", ("reasoning_text", "text"), notes)
    else:
        text = _texts(entry.get("summary") or [], f"{path}.summary", ("summary_text",), notes, "\n")
        if not text and entry.get("encrypted_content") is not None:
            notes.warnings.append("input: encrypted reasoning cannot be read and is left out")
    if text:
        yield Thought(text)


def _call(entry: Object, path: str, notes: _Notes) -> Iterator[Past]:
    name = name_at(entry, "name", path)
    if (space := optional_text(entry, "namespace", path)) is not None:
        name = f"{space}.{name}"
    text = text_at(entry, "arguments", path)
    try:
        value = load_json((text or "{}").encode(), Limits())
    except ValueError:
        refuse(f"{path}.arguments", f"must be the JSON text of an object, found {found(text)}")
    yield Used(name_at(entry, "call_id", path), name, object_at(value, f"{path}.arguments"))


def _result(entry: Object, path: str, notes: _Notes) -> Iterator[Past]:
    text = _texts(entry.get("output"), f"{path}.output", ("input_text", "output_text", "text"), notes)
    yield Result(name_at(entry, "call_id", path), text, f"{path}.call_id")


def _texts(value: Json, path: str, kinds: tuple[str, ...], notes: _Notes, joint: str = "") -> str:
    """A string, or the joined texts of a list of parts of these kinds."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(path, f"must be a string or a list of parts, found {found(value)}")
    texts = list[str]()
    for index, part in enumerate(value):
        here = f"{path}[{index}]"
        entry = object_at(part, here)
        if one_of(entry, "type", here, kinds):
            notes.unknown.extend(unknown_fields(entry, OF_PARTS, here))
        texts.append(text_at(entry, "text", here))
    return joint.join(texts)
