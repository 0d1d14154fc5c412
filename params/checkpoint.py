"""A checkpoint folder, verified from its headers alone: which files count, and which tensors make which parameter.

    CheckpointError(ValueError)   everything wrong with a checkpoint, in one message that names files and tensors

Nothing here allocates a tensor; `read` does, after this has succeeded.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, cast

from muse_fn.params.config import Config, read_json
from muse_fn.params.matching import LeafPlan, match
from muse_fn.params.quantization import problems_of_quantization
from muse_fn.params.safetensors_header import Stored, read_header, read_object, shown
from muse_fn.params.slicing import Part, Share

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_LINES = 50


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message lists every problem: file, tensor, value found, values allowed."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: reading it can only fail on the values in its tensors."""

    folder: Path
    config: Config
    stored: Mapping[str, Stored] = field(repr=False)  # every tensor of the files that count, by name
    plans: tuple[LeafPlan, ...] = field(repr=False)  # one per parameter, in the order of the schema
    head_copy: LeafPlan | None  # a tied head that is stored nevertheless
    skipped: tuple[str, ...] = field(repr=False)  # names of tensors that the text decoder has no use for

    @property
    def bytes(self) -> int:
        """Stored bytes of all parameters."""
        return sum(plan.bytes for plan in self.plans)


def parts_of(checkpoint: Checkpoint, share: Share) -> Iterator[tuple[LeafPlan, Part]]:
    """The parameters that a rank holds, and the part of each, a stored copy of a tied head last."""
    copies = [checkpoint.head_copy] if checkpoint.head_copy else []
    for plan in (*checkpoint.plans, *copies):
        part = share.part(plan.leaf)
        if part is not None:
            yield plan, part


def planned_bytes(checkpoint: Checkpoint, share: Share) -> int:
    """Stored bytes that loading this rank's share reads."""
    return sum(plan.bytes_of(part) for plan, part in parts_of(checkpoint, share))


def refuse(where: Path, problems: Iterable[str]) -> NoReturn:
    """Raises the one error for these problems."""
    lines = list(dict.fromkeys(problems))
    cut = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    raise CheckpointError("\n  ".join([f"{where}: this checkpoint cannot be used:", *lines[:MOST_LINES], *cut]))


def open_checkpoint(path: str | Path, config: Config | None = None) -> Checkpoint:
    """Verifies a folder in the published layout, or one .safetensors file with `config.json` beside it.

    `config` replaces the one in the folder. Raises CheckpointError with all problems, ConfigError for `config.json`.
    """
    path = Path(path)
    folder = path.parent if path.suffix == ".safetensors" and path.is_file() else path
    if not folder.is_dir():
        refuse(path, ["no such folder" if not path.exists() else "neither a folder nor a .safetensors file"])
    whole = read_json(folder) if config is None or (folder / "config.json").exists() else {}
    config = config or Config.from_json(folder / "config.json")
    stored, problems = _read_single(folder, path.name) if folder != path else _read_folder(folder)
    if problems:
        refuse(path, problems)
    found, skipped = match(config, stored)
    problems = found.problems + problems_of_quantization(folder, whole, {plan.format for plan in found.plans})
    if problems:
        refuse(path, problems)
    return Checkpoint(folder, config, stored, tuple(found.plans), found.head_copy, skipped)


def _read_folder(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a folder: those of its index if it has one, else those of model.safetensors."""
    if (folder / INDEX).exists():
        return _read_indexed(folder)
    if (folder / SINGLE).exists():
        return _read_single(folder, SINGLE)
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(shown(name) for name in names[:20]) + (", …" if len(names) > 20 else "")
    return {}, [f"neither {INDEX} nor {SINGLE} is there; found: {listed or 'nothing'}"]


def _read_single(folder: Path, name: str) -> tuple[dict[str, Stored], list[str]]:
    problem = _problem_of_place(folder, name)
    return ({}, [problem]) if problem else read_header(folder / name)


def _read_indexed(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    problem = _problem_of_place(folder, INDEX)
    if problem:
        return {}, [problem]
    try:
        wanted = weight_map(folder)
    except OSError as error:
        return {}, [f"{INDEX}: cannot be read ({error.strerror})"]
    except ValueError as error:
        return {}, [f"{INDEX}: {error}"]
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    readable: set[str] = set()
    for file in dict.fromkeys(wanted.values()):
        problem = _problem_of_place(folder, file)
        tensors, wrong = ({}, [f"{INDEX}: {problem}"]) if problem else read_header(folder / file)
        problems += wrong
        if not wrong:
            readable.add(file)
            problems += _problems_of_shard(file, tensors, stored, wanted)
            stored.update(tensors)
    lost = [n for n, file in wanted.items() if file in readable and n not in stored]
    problems += [f"{wanted[name]}: {shown(name)}: listed in {INDEX}, but not in the file" for name in lost]
    return stored, problems


def weight_map(folder: Path) -> dict[str, str]:
    """A folder's index, tensor name -> file name. ValueError continues the words "model.safetensors.index.json: …"."""
    found: Any = read_object(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError("must hold an object `weight_map`: tensor name -> file name")
    wrong = [shown(n) for n, file in cast("dict[str, Any]", found).items() if not isinstance(file, str) or not file]
    if wrong:
        raise ValueError(f"weight_map must give a file name for each of: {', '.join(wrong)}")
    return cast("dict[str, str]", found)


def _problem_of_place(folder: Path, name: str) -> str:
    """Why a file cannot be part of this folder; empty if it can. A shard may be a link only if it stays inside.

    One layout is excepted: the download cache links snapshots/<revision>/<file> to blobs/<hash> beside `snapshots`.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        return f"{shown(name)}: a file must lie inside the folder"
    try:
        home, target = folder.resolve(), (folder / name).resolve()
        target.stat()
    except FileNotFoundError:
        return f"{shown(name)}: no such file"
    except (OSError, RuntimeError, UnicodeError) as error:  # a name too long, links in a circle, half a surrogate pair
        return f"{shown(name)}: cannot be found ({error})"
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not target.is_relative_to(home) and not target.is_relative_to(cache):
        return f"{shown(name)}: links to {target}, outside the folder"
    return ""


def _problems_of_shard(
    file: str, tensors: Mapping[str, Stored], earlier: Mapping[str, Stored], wanted: Mapping[str, str]
) -> list[str]:
    """What a shard holds that the index does not say it holds."""
    problems: list[str] = []
    for name, tensor in tensors.items():
        if name in earlier:
            problems.append(f"{tensor}: also in {earlier[name].file.name}")
        elif name not in wanted:
            problems.append(f"{tensor}: not listed in {INDEX}")
        elif wanted[name] != file:
            problems.append(f"{tensor}: listed in {INDEX} for {shown(wanted[name])}")
    return problems
