"""`muse-fn plan`: memory, cache, floors and a predicted speed for a mesh of devices, from a config alone."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from muse_fn.devices import DEVICES, assumptions
from muse_fn.footprint import FORMATS, KV_DTYPES
from muse_fn.params.config import Config
from muse_fn.plan import CONTEXT, Setup, compare
from muse_fn.plan import plan as answer
from muse_fn.port import applies, beside
from muse_fn.serve.drawing import check_drawing, draw
from muse_fn.serve.options import BANNER, EMBEDDED, Json, ModelDir, err, out
from muse_fn.serve.planned import report, show
from muse_fn.sharding.mesh import parse_mesh


def plan(
    model: ModelDir = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A config.json, or `released`: the 816B model's own values.")
    ] = None,
    mesh: Annotated[
        str, typer.Option("--mesh", help="Ranks by axis, such as ep=2,tp=4; pp=2 and squeeze=split may be added.")
    ] = "ep=1,tp=1",
    device: Annotated[str, typer.Option("--device", help=f"What to plan for: {', '.join(DEVICES)}.")] = "cpu",
    format: Annotated[
        str, typer.Option("--format", help=f"Of the inner layers' experts: {', '.join(FORMATS)}. The rest is bf16.")
    ] = "quark-mxfp4",
    kv: Annotated[str, typer.Option("--kv", help=f"Dtype of the cache: {', '.join(KV_DTYPES)}.")] = "bf16",
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens a decode step attends to, and those cached before a chunk. [2048]"),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes of decode steps.")] = "1,4,16,64",
    chunk: Annotated[int | None, typer.Option("--chunk", help="Tokens of a prefill step; 0 for none. [4096]")] = None,
    assume: Annotated[
        list[str] | None, typer.Option("--assume", help="name=value of an assumption; may be given several times.")
    ] = None,
    all_layouts: Annotated[bool, typer.Option("--compare", help="All layouts of as many ranks side by side.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it to this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """Memory per card, tokens of cache that fit, floors and a predicted speed; no weights are read."""
    if plot is not None:
        check_drawing(plot)
    parsed = config_of(model, config)
    context = min(CONTEXT, max(1, parsed.max_positions // 2)) if context is None else context
    setup = Setup(parsed, parse_mesh(mesh), format, kv, context)
    assumed = assumptions(device, setup.mesh.ranks, changes(assume or []))
    found = answer(setup, device, assumed, sizes(batch), chunk)
    layouts = compare(setup, assumed, chunk=chunk) if all_layouts else []
    port = beside(setup, assumed) if applies(setup.config, device, format) else None
    if plot is not None:
        draw(found, layouts, plot)
    if as_json:
        print(json.dumps(report(found, layouts, port)))
        return
    err.print(f"[dim]{BANNER}[/dim]")
    show(found, layouts, port, out)
    if plot is not None:
        err.print(f"drawn: {plot}", markup=False)


def config_of(model: Path | None, config: str | None) -> Config:
    """The config that the two options name; the embedded model's if neither does. Raises ConfigError."""
    if model is not None and config is not None:
        raise ValueError("plan takes --model or --config, not both")
    if config == "released":
        return Config()
    folder = model or EMBEDDED
    return Config.from_json(config or (folder.parent if folder.suffix == ".safetensors" else folder))


def changes(given: list[str]) -> dict[str, float]:
    """ "name=value" texts -> values by name. Raises ValueError listing every text that is none, or repeats a name."""
    found: dict[str, float] = {}
    problems: list[str] = []
    names = Counter(text.partition("=")[0].strip() for text in given)
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            problems.append(f"--assume {text!r}: must be name=value, the value a number")
    problems += [f"--assume {name}=…: given {count} times" for name, count in names.items() if count > 1]
    if problems:
        raise ValueError("; ".join(problems))
    return found


def sizes(text: str) -> list[int]:
    """ "1,4,16" -> numbers, ascending and each once. Raises ValueError for anything else."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isascii() and piece.isdecimal() and len(piece) < 10 for piece in pieces):
        raise ValueError(f"--batch {text!r}: must be whole numbers with commas between, such as 1,4,16")
    return sorted({int(piece) for piece in pieces})
