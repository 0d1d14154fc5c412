"""Small checkpoints on disk for tests, and ways to damage them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.tree import Params, map_tensors, named, tensors
from muse_fn.params.write import write_checkpoint

# Layers 1 and 2 are the inner ones, whose experts the 4-bit layouts pack.
TINY = Config(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    latent_size=64,
    expert_size=32,
    experts=4,
    top_k=2,
    window=4,
    max_positions=64,
    bos_token_id=1,
    eos_token_id=(2,),
)
LAYER = "model.language_model.layers.1."
EXPERTS = f"{LAYER}mlp.experts."
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, Tensor]


def params_of(config: Config, seed: int = 0) -> Params:
    """Random parameters without a constant anywhere, so that a swapped pair of norms would show."""
    draw = torch.Generator().manual_seed(seed)
    return map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw), init_params(config, seed))


def write(folder: Path, format: str, config: Config = TINY, shard_bytes: int = 10**9) -> Path:
    """A checkpoint of random parameters."""
    write_checkpoint(folder, params_of(config), config, format, shard_bytes)
    return folder


def edit_tensors(folder: Path, edit: Callable[[Tensors], object], file: str = FILE) -> None:
    """Rewrites one file after `edit` has changed its dictionary of tensors, by the library of the format."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    edit(tensors)
    new = folder / f"{file}.new"  # older releases of the library would write into a file that a test has mapped
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, {"format": "pt"})
    new.replace(folder / file)


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object], file: str = FILE) -> None:
    """Rewrites the header of one file, its data untouched."""
    raw = (folder / file).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    write_raw(folder / file, json.dumps(header).encode(), raw[8 + length :])


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    """A file with exactly this header and data."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_json(folder: Path, edit: Callable[[dict[str, Any]], object], file: str = "config.json") -> None:
    """Rewrites a JSON file after `edit` has changed it."""
    content = json.loads((folder / file).read_text())
    edit(content)
    (folder / file).write_text(json.dumps(content))


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in order, which compare equal for NaN too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(a: object, b: object) -> bool:
    """Whether two trees, or dictionaries of trees, have the same structure, dtypes, shapes and bytes."""

    def same(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw_bytes(x), raw_bytes(y))

    ours, theirs = named(a), named(b)
    pairs = [(ours[path], theirs.get(path)) for path in ours]
    if list(ours) != list(theirs) or any(type(x) is not type(y) for x, y in pairs):
        return False
    return all(same(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
