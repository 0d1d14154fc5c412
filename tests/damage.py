"""Ways to damage a checkpoint folder, each a function of the folder."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.tiny_checkpoint import EXPERTS, FILE, INDEX, edit_header, edit_json, edit_tensors, write_raw

Damage = Callable[[Path], object]
NORM = "model.language_model.norm.weight"
HEAD = "lm_head.weight"
EMBED = "model.language_model.embed_tokens.weight"
GATE, UP, DOWN = (f"{EXPERTS}2.{name}_proj.weight" for name in ("gate", "up", "down"))
FIRST = "model-00001-of-"


def drop(*names: str) -> Damage:
    return lambda folder: edit_tensors(folder, lambda t: [t.pop(name) for name in names])


def rename(old: str, new: str) -> Damage:
    return lambda folder: edit_tensors(folder, lambda t: t.update({new: t.pop(old)}))


def put(name: str, make: Callable[[Tensor], Tensor], source: str | None = None) -> Damage:
    """Sets a tensor to a function of another one, by default of itself."""
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: make(t[source or name])}))


def header(edit: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_header(folder, edit)


def raw(change: Callable[[bytes], bytes], file: str = FILE) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def config(edit: Callable[[dict[str, Any]], object], file: str = "config.json") -> Damage:
    return lambda folder: edit_json(folder, edit, file)


def text(**values: Any) -> Damage:
    return config(lambda whole: whole["text_config"].update(values))


def weight_map(edit: Callable[[dict[str, Any]], object]) -> Damage:
    return config(lambda index: edit(index["weight_map"]), INDEX)


def all_of(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def shard_of(folder: Path, name: str) -> str:
    """The file that the index gives for a tensor."""
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def in_shard(name: str, damage: Callable[[Path, str], object]) -> Damage:
    return lambda folder: damage(folder, shard_of(folder, name))


def move_offsets(name: str, by: int) -> Damage:
    """Moves one tensor in the header, keeping its size."""

    def edit(entries: dict[str, Any]) -> None:
        entries[name]["data_offsets"] = [offset + by for offset in entries[name]["data_offsets"]]

    return header(edit)


def insert_gap(folder: Path) -> None:
    """Eight bytes of nothing before the last tensor; the data grows with them."""
    content = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    last = max((n for n in entries if n != "__metadata__"), key=lambda n: entries[n]["data_offsets"])
    entries[last]["data_offsets"] = [offset + 8 for offset in entries[last]["data_offsets"]]
    write_raw(folder / FILE, json.dumps(entries).encode(), content[8 + length :] + bytes(8))


def twice_in_header(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    more = b'{"%s":%s,%s' % (NORM.encode(), entry, content[9 : 8 + length])
    write_raw(folder / FILE, more, content[8 + length :])


def replace_by_folder(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()


def replace_by_pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def link_outside(folder: Path, file: str) -> None:
    (folder / file).rename(folder.parent / "elsewhere.safetensors")
    (folder / file).symlink_to("../elsewhere.safetensors")


def link_to_itself(folder: Path, file: str) -> None:
    (folder / file).unlink()
    (folder / file).symlink_to(file)


def both_spellings(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for expert, matrix in enumerate(tensors[f"{EXPERTS}down_proj"].clone()):
            tensors[f"{EXPERTS}{expert}.down_proj.weight"] = matrix

    edit_tensors(folder, edit)


def copy_into_other_shard(folder: Path, file: str) -> None:
    other = next(name for name in (f.name for f in sorted(folder.glob("*.safetensors"))) if name != file)
    tensor = load_file(folder / file)[NORM].clone()
    edit_tensors(folder, lambda t: t.update({NORM: tensor}), other)


def only_foreign_weights(folder: Path) -> None:
    (folder / FILE).rename(folder / "weights.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
