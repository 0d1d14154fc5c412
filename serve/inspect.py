"""`muse-fn inspect`: what a config or a checkpoint is made of, from headers alone."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from muse_fn.params.checkpoint import INDEX, SINGLE, Checkpoint, open_checkpoint
from muse_fn.params.config import Config, read_json
from muse_fn.params.inventory import Line, inventory
from muse_fn.params.schema import leaves
from muse_fn.serve.options import BANNER, EMBEDDED, Json, ModelDir, err, out

RELEASED: dict[str, Any] = {"text_config": {}, "vision_config": {}, "audio_config": {}}


def inspect(
    model: ModelDir = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A config.json, or `released`: the 816B model's own values.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Parameters by component, active per token, and bytes per format; headers only, no weights are read."""
    if model is not None and config is not None:
        raise ValueError("inspect takes --model or --config, not both")
    folder = model or EMBEDDED if config is None else None
    checkpoint = checkpoint_of(folder) if folder else None
    source = checkpoint.folder if checkpoint else folder or config or ""
    whole = RELEASED if source == "released" else read_json(source)
    parsed = Config.from_json(whole)
    if as_json:
        print(json.dumps(report(parsed, whole, checkpoint)))
        return
    err.print(f"[dim]{BANNER}[/dim]")
    show(parsed, whole, checkpoint, out)


def checkpoint_of(folder: Path) -> Checkpoint | None:
    """The verified headers of a folder's weights; None when it holds only a config. Raises CheckpointError."""
    has_weights = folder.suffix == ".safetensors" or any((folder / name).exists() for name in (INDEX, SINGLE))
    return open_checkpoint(folder) if has_weights else None


def report(config: Config, whole: dict[str, Any], checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The inventory of a config, and of a checkpoint if there is one, as JSON values."""
    found = inventory(config, whole)
    plans = {plan.leaf.path: plan for plan in checkpoint.plans} if checkpoint else {}
    rows = [
        {"path": x.path, "name": x.name, "shape": list(x.shape)}
        | ({"format": plans[x.path].format.name, "bytes": plans[x.path].bytes} if x.path in plans else {})
        for x in leaves(config)
    ]
    return {
        "built_with": "Muse Spark Open",
        "layers": config.layers,
        "layer": [line._asdict() for line in found.layer],
        "model": [line._asdict() for line in found.model],
        "bytes": found.bytes,
        "stored": [line._asdict() for line in stored_lines(checkpoint)] if checkpoint else None,
        "parameters": rows,
    }


class StoredLine(NamedTuple):
    """How much of a checkpoint is stored in one way."""

    format: str
    dtypes: str
    tensors: int
    bytes: int


def stored_lines(checkpoint: Checkpoint) -> list[StoredLine]:
    """What the files hold, by format and dtype of the stored tensors."""
    tensors: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for plan in checkpoint.plans:
        dtypes = " + ".join(dict.fromkeys(piece.stored.dtype for piece in plan.pieces))
        tensors[plan.format.name, dtypes] += len(plan.pieces)
        sizes[plan.format.name, dtypes] += plan.bytes
    return [StoredLine(*kind, tensors[kind], sizes[kind]) for kind in tensors]


def show(config: Config, whole: dict[str, Any], checkpoint: Checkpoint | None, console: Console) -> None:
    """Prints the inventory as tables."""
    found = inventory(config, whole)
    sliding = sum(config.is_sliding(i) for i in range(config.layers))
    console.print(
        f"{config.layers} layers ({sliding} sliding with window {config.window}, {config.layers - sliding} global), "
        f"hidden {config.hidden_size}, heads {config.heads}/{config.kv_heads} of {config.head_dim}, "
        f"{config.experts} experts top {config.top_k} at width {config.latent_size}, vocabulary {config.vocab_size}"
    )
    console.print(_table("one layer (the last)", found.layer))
    console.print(_table("model", found.model))
    sizes = [(name, f"{size:,}", f"{size / 1e9:,.3f}") for name, size in found.bytes.items()]
    console.print(_grid("tensor data if written as", ("format", "bytes", "GB"), sizes))
    if checkpoint:
        lines = [(x.format, x.dtypes, f"{x.tensors:,}", f"{x.bytes:,}") for x in stored_lines(checkpoint)]
        console.print(_grid("as stored", ("format", "dtypes", "tensors", "bytes"), lines))
        console.print(f"{len(checkpoint.skipped)} tensors that the text decoder has no use for")


def _table(title: str, lines: list[Line]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("component")
    for name in ("parameters", "active per token"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        style = "bold" if "total" in line.name or "layers and" in line.name else None
        table.add_row(line.name, f"{line.parameters:,}", f"{line.active:,}" if line.active else "", style=style)
    return table


def _grid(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place and name != "dtypes" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
