"""Options that several commands share, and how a command opens its model."""

import errno
import json
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from muse_fn.load import Model, load, load_random
from muse_fn.params.read import Progress as Reported
from muse_fn.sharding.mesh import Mesh
from muse_fn.tokenizer import Json as TokenizerJson

BANNER = "muse-fn · Built with Muse Spark Open"
EMBEDDED = Path(str(files("muse_fn"))) / "nano"


class _Answers(Console):
    """Standard output. That its reader has gone is an error like any other: rich alone would end the process there."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "nobody reads standard output")


out = _Answers(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


class Dtype(StrEnum):
    """Dtype of the plain parameters; `stored` keeps each tensor as the checkpoint has it."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    stored = "stored"


class Quantize(StrEnum):
    """What becomes of experts while loading; see muse_fn.load."""

    auto = "auto"
    mxfp4 = "mxfp4"
    none = "none"


class KvDtype(StrEnum):
    """How keys and values are stored."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    fp8 = "fp8"


KV_DTYPES = {KvDtype.float32: torch.float32, KvDtype.bfloat16: torch.bfloat16, KvDtype.fp8: torch.float8_e4m3fn}
DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.stored: None}

ModelDir = Annotated[Path | None, typer.Option("--model", help="Checkpoint folder. Default: the embedded nano model.")]
Device = Annotated[str, typer.Option("--device", help="Torch device, such as cpu or cuda.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Dtype of plain parameters.")]
QuantizeOption = Annotated[
    Quantize,
    typer.Option(
        "--quantize",
        help="mxfp4 packs the inner layers' experts while loading, none unpacks them; auto unpacks them on a CPU where "
        "there is room, which is faster there.",
    ),
]
KvOption = Annotated[
    KvDtype | None, typer.Option("--kv", help="Dtype of the KV cache. Default: that of the parameters.")
]
RandomOption = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Make the parameters here instead of reading them, to measure speed: answers are noise. Of --model only "
        "config.json and the tokenizer are read; inner layers' experts are in MXFP4 unless --quantize none.",
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Ranks by axis, such as ep=2,tp=4; pp=2 and squeeze=split may be added. Starts them here, each a process, "
        "unless torchrun did.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output and nothing else.")]


def open_model(
    path: Path | None, device: str, dtype: Dtype, quantize: Quantize, quiet: bool, is_random: bool = False
) -> Model:
    """Loads a checkpoint with a progress bar on standard error; the embedded one when `path` is None."""
    if not quiet:
        show_banner()
    check_device(device)
    return load_with_bar(path, device, dtype, quantize, quiet, is_random=is_random)


def show_banner() -> None:
    """Says on standard error what answers."""
    err.print(f"[dim]{BANNER}[/dim]")


def load_with_bar(
    path: Path | None,
    device: str,
    dtype: Dtype,
    quantize: Quantize,
    quiet: bool,
    mesh: Mesh | None = None,
    *,
    is_random: bool = False,
) -> Model:
    """`open_model` on a device that has been checked; on a mesh this rank's share."""
    with loading_bars(quiet) as bar:
        task = bar.add_task("loading", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"loading {what[-40:]}")

        return load_or_make(path, device, dtype, quantize, mesh, progress, is_random)


def load_or_make(
    path: Path | None,
    device: str,
    dtype: Dtype,
    quantize: Quantize,
    mesh: Mesh | None,
    progress: Reported,
    is_random: bool,
) -> Model:
    """A checkpoint, the embedded one when `path` is None; or random parameters of its sizes."""
    folder = path or EMBEDDED
    if is_random:
        packed = quantize != Quantize.none
        return load_random(folder, device, mesh, dtype=DTYPES[dtype], packed=packed, progress=progress)
    return load(folder, device, DTYPES[dtype], mesh, quantize=quantize.value, progress=progress)


def loading_bars(quiet: bool) -> Progress:
    """Bars on standard error that count bytes and vanish in the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=quiet)


def check_device(device: str) -> None:
    """Raises ValueError naming --device when this machine has no such device."""
    try:
        torch.empty(1, device=device)
        known = torch.device(device).type in ("cpu", "cuda", "hpu")
    except (RuntimeError, AssertionError, ModuleNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {device}: not available here ({reason})") from error
    if not known:
        raise ValueError(f"--device {device}: must be cpu, cuda or hpu")


MaxNew = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", min=1, help="Most tokens of one answer. Default: 256, or what the model can hold."
    ),
]
CAP = 256
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many likeliest tokens; 0 or -1 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability; 1 keeps all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens at least this likely relative to the likeliest.")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
Effort = Annotated[str | None, typer.Option("--effort", help="Reasoning effort, as the template knows it.")]
Tools = Annotated[Path | None, typer.Option("--tools", help="JSON file with a list of tools, OpenAI's shape.")]


def read_tools(path: Path | None) -> TokenizerJson:
    """The parsed tools file; checked later, against the same rules as a request's tools."""
    if path is None:
        return None
    return parse_json(path.read_bytes(), f"--tools {path}")


def parse_json(text: str | bytes, where: str) -> TokenizerJson:
    """The value of a JSON text. Raises ValueError naming `where`, for text nested too deep as well."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
