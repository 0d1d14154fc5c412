"""`muse-fn bench serve`: how fast an OpenAI-compatible server answers under load."""

import asyncio
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from muse_fn.serve.drawing import check_drawing
from muse_fn.serve.load_generator import (
    Level,
    Messages,
    Spread,
    Summary,
    Target,
    arrivals,
    check_url,
    first_model,
    random_prompts,
    run_level,
    summary,
)
from muse_fn.serve.options import Json, err, out, parse_json

bench = typer.Typer(help="Measures a running server.", no_args_is_help=True, add_completion=False)
SPREADS = {"first_token": "first token", "between_tokens": "between tokens", "whole": "whole answer"}


class Api(StrEnum):
    """What is asked for: conversations, or texts to be continued."""

    chat = "chat"
    completions = "completions"


@bench.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]  # typer makes a lone command the whole group otherwise
    """Measures a running server."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option("--url", help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="MUSE_FN_API_KEY", help="Sent as bearer.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Its name. Default: the first that is served.")] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at a time, a level of the load for each number.")
    ] = "1,4,16,64",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Of each level.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Random words of a prompt.")] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSON lines instead: a string, {"prompt": …} or {"messages": […]}.'),
    ] = None,
    api: Annotated[
        Api,
        typer.Option("--api", help="completions tells every token as it comes, also where it is no text to show."),
    ] = Api.chat,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 64,
    fields: Annotated[
        str, typer.Option("--fields", help="More fields of each request, as a JSON object.")
    ] = '{"temperature": 0}',
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-6, help="Poisson arrivals a second. Default: as places are free.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of words and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds that a request may take.")] = 300,
    limit: Annotated[float, typer.Option("--limit", min=0.001, help="Seconds that a level may take.")] = 600,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the levels to this .png or .svg file.")] = None,
) -> None:
    """Loads a server with streamed answers. Ctrl-C ends it and shows what is known by then."""
    if plot is not None:
        check_drawing(plot)
    check_url(url)
    levels = parse_levels(concurrency)
    asked = None if prompts is None else read_prompts(prompts, api)
    target = Target(url, model or "", api_key, {"max_tokens": max_tokens, **parse_fields(fields)}, timeout, api.value)

    async def work() -> list[Level]:
        named = target if model else target._replace(model=await first_model(target))
        return await sweep(named, levels, requests, asked, prompt_tokens, rate, seed, limit, quiet=as_json)

    found = asyncio.run(work())
    shown = [summary(level) for level in found]
    if as_json:
        print(json.dumps({"url": url, "rate": rate, "levels": [to_json(one) for one in shown]}))
    else:
        show(shown)
    if plot is not None and shown:
        draw(shown, plot)
    if any(level.is_interrupted for level in found):
        sys.exit(130)
    if not any(one.ok for one in shown):
        raise ValueError(f"--url {url}: no request succeeded")


async def sweep(
    target: Target,
    levels: Sequence[int],
    requests: int,
    prompts: Sequence[Messages] | None,
    words: int,
    rate: float | None,
    seed: int,
    limit: float,
    *,
    quiet: bool,
) -> list[Level]:
    """One level after the other, each with prompts of its own; ends early when the task is cancelled."""
    found: list[Level] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet) as bar:
        for concurrency in levels:
            task = bar.add_task(f"{concurrency} at a time", total=requests)
            own = f"{seed} {concurrency}"
            given = random_prompts(requests, words, own) if prompts is None else prompts
            asked = [given[number % len(given)] for number in range(requests)]
            times = None if rate is None else arrivals(requests, rate, own)
            found.append(
                await run_level(
                    target, asked, concurrency, times=times, limit=limit, note=lambda _, task=task: bar.advance(task)
                )
            )
            if found[-1].is_interrupted:
                break
    return found


def parse_levels(text: str) -> list[int]:
    """The numbers of --concurrency. Raises ValueError unless they are whole and positive."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 65_536 for word in words):
        raise ValueError(f"--concurrency {text}: must be whole numbers from 1 to 65536 with commas between them")
    return [int(word) for word in words]


def parse_fields(text: str) -> dict[str, Any]:
    """The object of --fields. Raises ValueError for anything else."""
    found: object = parse_json(text, "--fields")
    if not isinstance(found, dict):
        raise ValueError(f"--fields {text}: must be a JSON object")
    return cast("dict[str, Any]", found)


def read_prompts(file: Path, api: Api = Api.chat) -> list[Messages]:
    """The messages of each line, for completions one text. Raises ValueError that lists the lines at fault."""
    found, problems = list[Messages](), list[str]()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_messages(parse_json(line, f"line {number}"), api))
        except ValueError as error:
            problems.append(str(error) if str(error).startswith("line") else f"line {number}: {error}")
    if not (found or problems):
        problems.append("has no prompts")
    if problems:
        raise ValueError(f"--prompts {file}: {'; '.join(problems)}")
    return found


def _messages(value: object, api: Api) -> Messages:
    entry = cast("dict[str, Any]", value) if isinstance(value, dict) else {"prompt": value}
    if isinstance(text := entry.get("prompt"), str):
        return [{"role": "user", "content": text}]
    if api == Api.completions:
        raise ValueError('must be a string or {"prompt": string} for --api completions')
    if isinstance(listed := entry.get("messages"), list) and listed:
        return cast("Messages", listed)
    raise ValueError('must be a string, {"prompt": string} or {"messages": list}')


def to_json(one: Summary) -> dict[str, Any]:
    """A summary with its percentiles by name; times in seconds."""
    return {name: value._asdict() if isinstance(value, Spread) else value for name, value in one._asdict().items()}


def show(shown: Sequence[Summary]) -> None:
    """Prints a column for each level; times in milliseconds."""
    table = Table("requests at a time", *(str(one.concurrency) for one in shown))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in rows_of(shown):
        table.add_row(name, *cells)
    out.print(table)
    if not all(one.has_usage for one in shown):
        out.print("Some answers came without usage: their events with text are counted as tokens.")


def rows_of(shown: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Name and cells of each line of the table."""
    kinds = list(dict.fromkeys(kind for one in shown for kind in one.failed))
    rows = [("succeeded", [f"{one.ok:,}" for one in shown])]
    rows += [(f"failed: {kind}", [f"{one.failed.get(kind, 0):,}" for one in shown]) for kind in kinds]
    rows += [
        ("seconds", [f"{one.seconds:,.1f}" for one in shown]),
        ("requests/s", [f"{one.requests_per_second:,.2f}" for one in shown]),
        ("output tokens/s", [f"{one.output_tokens_per_second:,.1f}" for one in shown]),
        ("output tokens", [f"{one.output_tokens:,}" for one in shown]),
        ("prompt tokens", [f"{one.prompt_tokens:,}" for one in shown]),
        ("of these cached", [f"{one.cached_tokens:,}" for one in shown]),
    ]
    for field, name in SPREADS.items():
        for part in Spread._fields:
            spreads = [getattr(one, field) for one in shown]
            cells = ["none" if found is None else f"{getattr(found, part) * 1e3:,.1f}" for found in spreads]
            rows.append((f"{name} {part}, ms", cells))
    return rows


def draw(shown: Sequence[Summary], path: Path) -> None:
    """Writes the picture: tokens a second and the three times over the requests at a time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained", dpi=120)
    panels = figure.subplots(2, 2).flat
    levels = [one.concurrency for one in shown]
    first = next(panels)
    first.plot(levels, [one.output_tokens_per_second for one in shown], marker="o", color="#0072B2")
    first.set_title("output tokens/s", loc="left", fontsize=10)
    for (field, name), axes in zip(SPREADS.items(), panels, strict=True):
        for part, colour in zip(Spread._fields, ("#009E73", "#E69F00", "#D55E00"), strict=True):
            points = [(one.concurrency, getattr(one, field)) for one in shown if getattr(one, field)]
            heights = [getattr(found, part) * 1e3 for _, found in points]
            axes.plot([level for level, _ in points], heights, marker="o", color=colour, label=part)
        axes.set_title(f"{name}, ms", loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at a time", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
