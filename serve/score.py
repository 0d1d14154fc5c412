"""`muse-fn score`: how likely a model finds a text or a list of token ids."""

import json
import math
from typing import Annotated, cast

import typer
from rich.table import Table

from muse_fn.generation import check_scored
from muse_fn.generation import score as score_ids
from muse_fn.load import Model
from muse_fn.serve.launch import launch_command
from muse_fn.serve.member import is_speaker, needs_launch, open_on_mesh, speaking
from muse_fn.serve.options import (
    Device,
    Dtype,
    DtypeOption,
    Json,
    MeshOption,
    ModelDir,
    Quantize,
    QuantizeOption,
    out,
    parse_json,
)
from muse_fn.sharding.collectives import leave

IdsOption = Annotated[str | None, typer.Option("--ids", help="Token ids as a JSON list, instead of a text.")]


def score(
    text: Annotated[str | None, typer.Argument(help="Ordinary text; control tokens in it stay text.")] = None,
    ids: IdsOption = None,
    model: ModelDir = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    quantize: QuantizeOption = Quantize.auto,
    mesh: MeshOption = None,
    as_json: Json = False,
) -> None:
    """Log-probability of every token of a text or of a list of token ids."""
    if (text is None) == (ids is None):
        raise ValueError("score takes a text or --ids, exactly one of them")
    given = None if ids is None else parse_ids(ids)
    opened, place = open_on_mesh(mesh, model, device, dtype, quantize, quiet=as_json)
    tokens = encode(opened, text or "") if given is None else given
    if needs_launch(place):
        check_scored(opened, tokens)
        launch_command(place, quiet=as_json)
        return
    found = score_ids(opened, tokens, place)
    leave()
    if not is_speaker(place):
        return
    with speaking():
        if as_json:
            print(json.dumps({"logprobs": found} | ({"ids": tokens} if given is None else {})))
        else:
            _show(opened, tokens, found)


def parse_ids(text: str) -> list[int]:
    """A JSON list of token ids. Raises ValueError for anything else."""
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    found: object = parse_json(text, f"--ids is {shown!r}")
    listed = cast("list[object]", found) if isinstance(found, list) else []
    if not isinstance(found, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ValueError(f"--ids is {shown!r}: must be a JSON list of whole numbers")
    return cast("list[int]", found)


def encode(model: Model, text: str) -> list[int]:
    """Ids of ordinary text. Raises ValueError when the checkpoint has no tokenizer."""
    if model.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer.json: give token ids with --ids")
    return model.tokenizer.encode(text)


def _show(model: Model, tokens: list[int], found: list[float | None]) -> None:
    table = Table("position", "id", "token", "log-probability")
    for place, (token, value) in enumerate(zip(tokens, found, strict=True)):
        spelled = ascii(model.tokenizer.decode([token])) if model.tokenizer else ""
        table.add_row(str(place), str(token), spelled, "" if value is None else f"{value:.4f}")
    out.print(table)
    known = [value for value in found if value is not None]
    if known:
        mean = sum(known) / len(known)
        out.print(f"sum {sum(known):.4f}, mean {mean:.4f}, perplexity {math.exp(-mean):.4f}")
