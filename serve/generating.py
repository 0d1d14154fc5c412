"""`muse-fn generate`: prompts or a JSON lines file in, answers or JSON lines out."""

import codecs
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from muse_fn.generation import Settings, Token, check_ids, check_prompts
from muse_fn.load import Model
from muse_fn.sample import Sampling
from muse_fn.serve.answering import Answer, Request, answer_all, as_json, chat_request, needed_tokenizer
from muse_fn.serve.launch import launch_command
from muse_fn.serve.member import is_speaker, needs_launch, open_on_mesh, speaking
from muse_fn.serve.options import (
    CAP,
    Device,
    Dtype,
    DtypeOption,
    Effort,
    Json,
    MaxNew,
    MeshOption,
    MinP,
    ModelDir,
    Quantize,
    QuantizeOption,
    Seed,
    Stop,
    System,
    Temperature,
    Tools,
    TopK,
    TopP,
    err,
    out,
    parse_json,
    read_tools,
)
from muse_fn.sharding.collectives import leave
from muse_fn.sharding.mesh import Mesh

FIELDS = {"prompt", "messages", "ids", "tools", "reasoning_effort"}


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Questions; each gets an answer of its own.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="JSON lines with `prompt`, `messages` or `ids`; and `tools`, `reasoning_effort`."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write JSON lines here.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    system: System = None,
    effort: Effort = None,
    tools: Tools = None,
    model: ModelDir = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    quantize: QuantizeOption = Quantize.auto,
    mesh: MeshOption = None,
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    stop: Stop = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="How many prompts are stepped together.")] = 16,
    as_lines: Json = False,
) -> None:
    """Answers each prompt. With --json or --file the answers are JSON lines, in the order of the prompts."""
    settings = Settings(
        max_new_tokens, Sampling(temperature, top_k, top_p, min_p, seed), stop=tuple(stop or ()), cap=CAP
    )
    lines = [{"prompt": p} for p in prompts or ()] + (read_lines(file) if file else [])
    if not lines:
        raise ValueError("nothing to answer: give a prompt or --file")
    declared = read_tools(tools)
    check_writable(output)
    as_lines = as_lines or file is not None
    quiet = as_lines and output is None
    opened, place = open_on_mesh(mesh, model, device, dtype, quantize, quiet)
    defaults = {"tools": declared, "reasoning_effort": effort}
    requests = [to_request(opened, {**defaults, **line}, system, raw, i) for i, line in enumerate(lines)]
    check_prompts(opened, [request.ids for request in requests], settings)
    if output and file and output.exists() and output.samefile(file):
        raise ValueError(f"--output {output}: is the file that --file reads")
    if needs_launch(place):
        check_rereadable(file, tools)
        launch_command(place, quiet)
        return
    answers = _in_order(opened, requests, settings, batch, place)
    if is_speaker(place):
        with speaking():
            _write(answers, lines, output, as_lines)
    else:  # another rank writes them; each must run to the end
        deque(answers, maxlen=0)
    leave()


def check_writable(output: Path | None) -> None:
    """Raises ValueError, before anything is loaded, for a file that cannot be written."""
    if output is None:
        return
    at = output if output.exists() else output.parent
    if output.is_dir() or not os.access(at, os.W_OK) or not (output.exists() or at.is_dir()):
        raise ValueError(f"--output {output}: cannot be written: must be a file in a folder that exists")


def check_rereadable(*files: Path | None) -> None:
    """Raises ValueError for a pipe: every rank of a mesh reads its own copy."""
    for file in files:
        if file is not None and not file.is_file():
            raise ValueError(f"{file}: with --mesh it must be a file, since every rank reads it")


def _write(
    answers: Iterable[tuple[int, Answer]], lines: list[dict[str, Any]], output: Path | None, as_lines: bool
) -> None:
    sink = output.open("w", encoding="utf-8") if output else None
    try:
        for i, answer in answers:
            line = json.dumps({"index": i, **as_json(answer)}, ensure_ascii=False)
            if sink:
                _append(line, sink)
            elif as_lines:
                print(line, flush=True)
            if not as_lines:
                _show(lines[i], answer)
    finally:
        if sink:
            with suppress(OSError):  # of lines that could not be written `_append` has told
                sink.close()


def _append(line: str, sink: TextIO) -> None:
    try:
        print(line, file=sink, flush=True)
    except OSError as error:
        raise ValueError(f"--output {sink.name}: {error.strerror}") from error


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file. Raises ValueError naming file and line."""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not text.strip():
            continue
        found: object = parse_json(text, f"{file}, line {number}")
        if not isinstance(found, dict):
            raise ValueError(f"{file}, line {number}: must be a JSON object")
        line = cast("dict[str, Any]", found)
        kinds = [key for key in ("prompt", "messages", "ids") if key in line]
        if len(kinds) != 1 or not line.keys() <= FIELDS:
            wanted = "one of prompt, messages and ids; tools and reasoning_effort may be added"
            raise ValueError(f"{file}, line {number}: has {', '.join(line) or 'no fields'}: needs {wanted}")
        lines.append(line)
    return lines


def to_request(model: Model, line: dict[str, Any], system: str | None, raw: bool, number: int) -> Request:
    """The prompt of one line. Raises ValueError naming the line's place and the field at fault."""
    where = f"prompt {number}"
    if "ids" in line:
        if not isinstance(line["ids"], list) or any(type(i) is not int for i in cast("list[Any]", line["ids"])):
            raise ValueError(f"{where}: ids must be a list of whole numbers")
        check_ids(model, line["ids"], where)
        return Request(line["ids"], is_chat=False)
    if "messages" not in line and not isinstance(line["prompt"], str):
        raise ValueError(f"{where}: prompt must be a string, found {line['prompt']!r}")
    if raw and "prompt" in line:
        return Request(needed_tokenizer(model).encode(line["prompt"]), is_chat=False)
    messages: Any = line["messages"] if "messages" in line else [{"role": "user", "content": line["prompt"]}]
    if system is not None and "prompt" in line:
        messages = [{"role": "system", "content": system}, *messages]
    return chat_request(model, messages, line["tools"], line["reasoning_effort"], where=where)


def _in_order(
    model: Model, requests: list[Request], settings: Settings, batch: int, mesh: Mesh
) -> Iterator[tuple[int, Answer]]:
    """Answers in the order of their prompts, with progress on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not (err.is_terminal and is_speaker(mesh))) as bar:
        task, made = bar.add_task("answering", total=len(requests)), 0
        for start in range(0, len(requests), batch):
            done: dict[int, Answer] = {}
            for event in answer_all(model, requests[start : start + batch], settings, mesh):
                if isinstance(event, Token):
                    made += 1
                    bar.update(task, description=f"answering, {made} tokens")
                else:
                    done[event[0]] = event[1]
                    bar.advance(task)
            yield from ((start + i, done[i]) for i in sorted(done))


def _show(line: dict[str, Any], answer: Answer) -> None:
    question = line.get("prompt", "")
    out.print(f"> {question}", style="bold", markup=False)
    if answer.message is None:
        out.print(answer.text, markup=False)
        return
    if answer.message.reasoning:
        out.print(f"({answer.message.reasoning})", style="dim", markup=False)
    for call in answer.message.tool_calls:
        out.print(f"→ {call.name} {call.arguments}", style="cyan", markup=False)
    if answer.message.content:
        out.print(answer.message.content, markup=False)
    if answer.finish == "length":
        out.print("(cut: --max-new-tokens)", style="yellow", markup=False)
