"""Bodies of the Anthropic messages API to turns: pure, and ValueError with the path of the field for all that is wrong.

What has no meaning here is refused, or named in a warning where an answer without it is still the answer asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from muse_fn.sample import Sampling
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

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
BUDGETS = ((4096, "low"), (16384, "medium"), (32768, "high"))  # below so many tokens; above, xhigh
LEAST_BUDGET = 1024
HINTS = ("cache_control", "citations")  # of blocks: the cache needs none, and nothing is cited
OF_TOOLS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")


class Read(NamedTuple):
    """A body as a turn; `shows_thinking` is whether the answer may have thinking blocks."""

    turn: Turn
    shows_thinking: bool
    warnings: tuple[str, ...]
    unknown: tuple[str, ...]  # paths of fields that no version of this API has


@dataclass(frozen=True)
class Settings:
    """The fields of a body beside its conversation, once their types have been checked."""

    max_tokens: int | None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: tuple[str, ...] = ()
    seed: int = 0


class _Notes(NamedTuple):
    """Found on the way; both lists grow."""

    warnings: list[str]
    unknown: list[str]


def read(body: Object, settings: Settings, limits: Limits) -> Read:
    """A turn of `messages`, `system`, `tools`, `tool_choice`, `thinking` and `output_config` of a body.

    Reasoning cannot be turned off and obeys no budget: `thinking` and `output_config.effort` choose the strength that
    the prompt names. An effort given by name wins; else a budget below 4096, 16384 and 32768 tokens is low, medium and
    high, and more is xhigh; thinking that is disabled is low, and left out of the answer.
    """
    notes = _Notes([], [])
    effort, shows = _thinking(body, settings.max_tokens, notes)
    tools = _tools(body.get("tools"), limits, notes)
    choice, parallel = _tool_choice(body.get("tool_choice"), tools)
    turn = Turn(
        messages=chat_messages(_past(body, notes)),
        tools=cast("Json", tools or None),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        final=_final(body),
        effort=effort,
        asked=_asked(settings, limits),
    )
    return Read(turn, shows, tuple(dict.fromkeys(notes.warnings)), tuple(notes.unknown))


def _asked(settings: Settings, limits: Limits) -> Asked:
    sampling = Sampling(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_k=settings.top_k or 0,
        top_p=1.0 if settings.top_p is None else settings.top_p,
        seed=settings.seed,
    )
    if settings.max_tokens is not None and settings.max_tokens < 1:
        refuse("max_tokens", f"must be at least 1, found {settings.max_tokens}")
    if len(settings.stop_sequences) > limits.stops:
        refuse("stop_sequences", f"at most {limits.stops} are allowed, found {len(settings.stop_sequences)}")
    for index, stop in enumerate(settings.stop_sequences):
        if not 0 < len(stop) <= limits.stop_length:
            refuse(f"stop_sequences[{index}]", f"must have 1 to {limits.stop_length} characters, found {len(stop)}")
    return Asked(max_new=settings.max_tokens, sampling=sampling, stop=settings.stop_sequences)


def _thinking(body: Object, max_tokens: int | None, notes: _Notes) -> tuple[str | None, bool]:
    """The effort, and whether reasoning is shown."""
    config = object_at(body.get("output_config") or {}, "output_config")
    notes.unknown.extend(unknown_fields(config, ("effort", "format"), "output_config"))
    named = one_of(config, "effort", "output_config", EFFORTS) if config.get("effort") is not None else None
    thinking = object_at(body.get("thinking") or {"type": "adaptive"}, "thinking")
    notes.unknown.extend(unknown_fields(thinking, ("type", "budget_tokens", "display"), "thinking"))
    kind = one_of(thinking, "type", "thinking", ("enabled", "disabled", "adaptive"))
    shows = one_of(thinking, "display", "thinking", ("summarized", "omitted"), "summarized") == "summarized"
    effort = EFFORTS[named] if named else None
    if kind == "disabled":
        notes.warnings.append("thinking: this model always reasons; it is told to reason little, and it is not shown")
        return effort or "low", False
    budget = thinking.get("budget_tokens")
    if kind == "adaptive" and budget is None:
        return effort, shows
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_BUDGET:
        refuse("thinking.budget_tokens", f"must be a whole number of at least {LEAST_BUDGET}, found {found(budget)}")
    if max_tokens is not None and budget >= max_tokens:
        refuse("thinking.budget_tokens", f"must be below max_tokens, which is {max_tokens}, found {budget}")
    effort = effort or next((word for below, word in BUDGETS if budget < below), "xhigh")
    notes.warnings.append(f"thinking.budget_tokens: not a limit here; the model is told to reason with effort {effort}")
    return effort, shows


def _final(body: Object) -> Final | None:
    path = "output_config.format"
    value = object_at(body.get("output_config") or {}, "output_config").get("format")
    if value is None:
        return None
    entry = object_at(value, path)
    one_of(entry, "type", path, ("json_schema",))
    return Final("json_schema", object_at(entry.get("schema"), f"{path}.schema"))


def _tools(value: Json, limits: Limits, notes: _Notes) -> list[Object]:
    listed = list_at([] if value is None else value, "tools")
    if len(listed) > limits.tools:
        refuse("tools", f"at most {limits.tools} are allowed, found {len(listed)}")
    return [_tool(entry, f"tools[{index}]", limits, notes) for index, entry in enumerate(listed)]


def _tool(value: Json, path: str, limits: Limits, notes: _Notes) -> Object:
    entry = object_at(value, path)
    if entry.get("type") not in (None, "custom"):
        refuse(f"{path}.type", f"only tools of the caller's own ('custom') exist here, found {found(entry['type'])}")
    notes.unknown.extend(unknown_fields(entry, OF_TOOLS, path))
    function: Object = {"name": name_at(entry, "name", path, limits.name)}
    description = optional_text(entry, "description", path)
    function |= {} if description is None else {"description": description}
    function["parameters"] = object_at(entry.get("input_schema"), f"{path}.input_schema")
    strict = flag_at(entry, "strict", path, False)
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def _tool_choice(value: Json, tools: list[Object]) -> tuple[ToolChoice, bool]:
    entry = object_at({"type": "auto"} if value is None else value, "tool_choice")
    kind = one_of(entry, "type", "tool_choice", ("auto", "any", "tool", "none"))
    parallel = not flag_at(entry, "disable_parallel_tool_use", "tool_choice", False)
    names = [cast("Object", tool["function"])["name"] for tool in tools]
    if kind in ("any", "tool") and not tools:
        refuse("tool_choice", f"{kind!r} needs tools, but the request has none")
    if kind == "tool":
        name = text_at(entry, "name", "tool_choice")
        if name not in names:
            refuse("tool_choice.name", f"must be the name of one of tools, found {found(name)}")
        return Named(name), parallel
    return "required" if kind == "any" else "none" if kind == "none" else "auto", parallel


def _past(body: Object, notes: _Notes) -> Iterator[Past]:
    if body.get("system") is not None and (system := _texts(body["system"], "system", notes, "\n\n")):
        yield Told("system", system)
    messages = list_at(body.get("messages"), "messages")
    if not messages:
        refuse("messages", "must have at least one message")
    role = ""
    for index, value in enumerate(messages):
        path = f"messages[{index}]"
        entry = object_at(value, path)
        notes.unknown.extend(unknown_fields(entry, ("role", "content"), path))
        role = one_of(entry, "role", path, ("user", "assistant", "system"))
        content = entry.get("content")
        if role == "system":
            yield Told("system", _texts(content, f"{path}.content", notes, "\n\n"))
        elif isinstance(content, str):
            yield Wrote(content) if role == "assistant" else Told("user", content)
        else:
            blocks = list_at(content, f"{path}.content")
            yield from (_assistant if role == "assistant" else _user)(blocks, f"{path}.content", notes)
    if role == "assistant":
        refuse(
            f"messages[{len(messages) - 1}].role", "the last message must be the user's: no answer can be begun here"
        )


def _user(blocks: list[Json], path: str, notes: _Notes) -> Iterator[Past]:
    """Results of tools, and the words around them; words of neighbouring blocks are lines of one message."""
    words = list[str]()
    for index, value in enumerate(blocks):
        here = f"{path}[{index}]"
        entry = object_at(value, here)
        kind = one_of(entry, "type", here, ("text", "tool_result"))
        known = ("type", "text", *HINTS) if kind == "text" else ("type", "tool_use_id", "content", "is_error", *HINTS)
        notes.unknown.extend(unknown_fields(entry, known, here))
        if kind == "text":
            words.append(text_at(entry, "text", here))
            continue
        if words:
            yield Told("user", "\n".join(words))
            words = []
        content = entry.get("content")
        text = "" if content is None else _texts(content, f"{here}.content", notes, "\n")
        # The chat format has no place for the flag.
        failed = "Error: " if flag_at(entry, "is_error", here, False) else ""
        yield Result(name_at(entry, "tool_use_id", here), failed + text, f"{here}.tool_use_id")
    if words or not blocks:
        yield Told("user", "\n".join(words))


def _assistant(blocks: list[Json], path: str, notes: _Notes) -> Iterator[Past]:
    """Blocks of text that follow one another are one text: nothing tells commentary from answer any more."""
    words = list[str]()
    for index, value in enumerate(blocks):
        here = f"{path}[{index}]"
        entry = object_at(value, here)
        kind = one_of(entry, "type", here, ("text", "tool_use", "thinking", "redacted_thinking"))
        known = {
            "text": ("text",),
            "tool_use": ("id", "name", "input", "caller"),
            "thinking": ("thinking", "signature"),
        }
        notes.unknown.extend(unknown_fields(entry, ("type", *known.get(kind, ("data",)), *HINTS), here))
        if kind == "text":
            words.append(text_at(entry, "text", here))
            continue
        if words:
            yield Wrote("".join(words))
            words = []
        if kind == "thinking":
            yield Thought(text_at(entry, "thinking", here))
        elif kind == "tool_use":
            arguments = object_at(entry.get("input"), f"{here}.input")
            yield Used(name_at(entry, "id", here), name_at(entry, "name", here), arguments)
        else:
            notes.warnings.append("messages: redacted_thinking of another model cannot be read and is left out")
    if words or not blocks:
        yield Wrote("".join(words))


def _texts(value: Json, path: str, notes: _Notes, joint: str) -> str:
    """A string, or the joined texts of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(path, f"must be a string or a list of text blocks, found {found(value)}")
    texts = list[str]()
    for index, block in enumerate(value):
        here = f"{path}[{index}]"
        entry = object_at(block, here)
        one_of(entry, "type", here, ("text",))
        notes.unknown.extend(unknown_fields(entry, ("type", "text", *HINTS), here))
        texts.append(text_at(entry, "text", here))
    return joint.join(texts)
