"""`muse-fn chat`: a conversation in the terminal."""

import sys

from rich.markup import escape

from muse_fn.generation import Settings, stream
from muse_fn.load import Model
from muse_fn.sample import Sampling
from muse_fn.serve.answering import Request, chat_request, needed_tokenizer
from muse_fn.serve.channels import Delta, Event, Message, begin, collect, feed, finish
from muse_fn.serve.options import (
    CAP,
    Device,
    Dtype,
    DtypeOption,
    Effort,
    MaxNew,
    MinP,
    ModelDir,
    Quantize,
    QuantizeOption,
    Seed,
    System,
    Temperature,
    Tools,
    TopK,
    TopP,
    err,
    open_model,
    out,
    read_tools,
)
from muse_fn.tokenizer import Control, Json, Text, whole_characters

MAX_CALLS = 8  # rounds of tool calls in one turn
HELP = "/help  this list     /new  start again     /effort NAME  reasoning effort     /quit  leave (or end of input)"


def chat(
    system: System = None,
    effort: Effort = None,
    tools: Tools = None,
    model: ModelDir = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    quantize: QuantizeOption = Quantize.auto,
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
) -> None:
    """Talks line by line: reads questions from standard input, streams answers to standard output."""
    settings = Settings(max_new_tokens, Sampling(temperature, top_k, top_p, min_p, seed), cap=CAP)
    declared = read_tools(tools)
    opened = open_model(model, device, dtype, quantize, quiet=False)
    start: list[Json] = [{"role": "system", "content": system}] if system else []
    history = list(start)
    err.print(f"[dim]{escape(HELP)}[/dim]")
    while (line := _ask("> ")) is not None:
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if word == "/new":
            history = list(start)
        elif word == "/effort":
            effort = rest.strip() or None
        elif word.startswith("/"):
            err.print(HELP, markup=False)
        elif line.strip():
            history = _turn(opened, history, line, declared, effort, settings)


def _ask(prompt: str) -> str | None:
    """The next line of input, None at its end."""
    if sys.stdin.isatty():
        err.print(prompt, style="bold", end="", markup=False)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _turn(
    model: Model, history: list[Json], line: str, tools: Json, effort: str | None, settings: Settings
) -> list[Json]:
    """The history with this question and its answer; an error is shown and leaves the history as it was."""
    asked: list[Json] = [*history, {"role": "user", "content": line}]
    for _ in range(MAX_CALLS):
        try:
            request = chat_request(model, asked, tools, effort)
            message = _streamed(model, request, settings)
        except ValueError as error:
            err.print(f"error: {error}", style="red", markup=False)
            return history
        calls: list[Json] = [
            {"id": f"call-{len(asked)}-{i}", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(message.tool_calls)
        ]
        said: dict[str, Json] = {"role": "assistant", "content": message.content}
        said |= ({"reasoning": message.reasoning} if message.reasoning else {}) | (
            {"tool_calls": calls} if calls else {}
        )
        asked = [*asked, said]
        for i, call in enumerate(message.tool_calls):
            result = _ask(f"result of {call.name}> ")
            if result is None:
                return asked
            asked.append({"role": "tool", "tool_call_id": f"call-{len(asked) - 1 - i}-{i}", "content": result})
        if not calls:
            break
    return asked


def _streamed(model: Model, request: Request, settings: Settings) -> Message:
    """Prints an answer as it comes; returns it."""
    tokenizer = needed_tokenizer(model)
    state, events, run, cut = begin(request.tools), list[Event](), b"", False
    for token in stream(model, [request.ids], settings):
        if token.finish == "error":
            raise ValueError("the model's logits are not finite: are its weights?")
        if (name := tokenizer.names.get(token.token)) is None:
            text, run = whole_characters(run + tokenizer.token_bytes(token.token))
            state, more = feed(state, Text(text))
        else:
            state, more = feed(state, Control(name))
            run = b""
        _print_all(more, events)
        if token.finish == "length":
            cut = True
    state, more = finish(state)
    _print_all(more, events)
    out.print()
    if cut:
        out.print("(cut: --max-new-tokens)", style="yellow", markup=False)
    return collect(events, state.damaged)


def _print_all(more: list[Event], events: list[Event]) -> None:
    """Prints events and adds them to those so far."""
    for event in more:
        _print(event, events[-1] if events else None)
        events.append(event)


def _print(event: Event, before: Event | None) -> None:
    """One event; a new channel or a call begins on a new line."""
    kinds = [e.kind if isinstance(e, Delta) else "call" for e in (event, before) if e]
    if kinds[1:] and (kinds[0] != kinds[1] or kinds[0] == "call"):
        out.print()
    if isinstance(event, Delta):
        out.print(event.text, end="", style="dim" if event.kind == "reasoning" else None, markup=False)
    else:
        out.print(f"→ {event.name} {event.arguments}", end="", style="cyan", markup=False)
