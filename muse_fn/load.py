"""A folder in, a model out, and back."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from muse_fn.footprint import check as check_fits
from muse_fn.params.checkpoint import Checkpoint, open_checkpoint, refuse
from muse_fn.params.config import Config
from muse_fn.params.quantise import BLOCKS, check_widths, is_packable, quantise_leaf
from muse_fn.params.read import Progress, read_params
from muse_fn.params.schema import Leaf, sparse_layers
from muse_fn.params.slicing import Part, Share
from muse_fn.params.tree import Params
from muse_fn.params.write import write_checkpoint
from muse_fn.random_weights import bytes_made, check_deviation, random_params
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.rules import check_mesh, holds
from muse_fn.sharding.split import local_path, part_of, stage_config
from muse_fn.tokenizer import Tokenizer, load_tokenizer
from muse_fn.unpacking import available_memory, is_better_unpacked, unpacked

QUANTIZE = (None, "mxfp4", "none", "auto")


class Model(NamedTuple):
    """All that answering needs."""

    config: Config  # of the whole model, whatever part of it a rank holds
    params: Params  # this rank's
    tokenizer: Tokenizer | None  # None if the folder has none


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    mesh: Mesh | None = None,
    *,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """A checkpoint folder in any published layout: stacked or per-expert, plain, Quark MXFP4 or NVFP4, unconverted.

    `dtype` is for plain tensors except router and residual gates, which are float32; None keeps each as stored.
    Experts stay as they are stored unless `quantize` says "mxfp4", which packs those of the inner layers while reading,
    "none", which unpacks them, or "auto": unpacked on a CPU where there is room, the rule of muse_fn/unpacking.py. All
    is verified before anything is allocated; raises CheckpointError, ConfigError, MeshError or ValueError with every
    problem.

    A rank of a mesh reads its own slices only, `progress` counting their bytes; the mesh need not be linked, so
    `Mesh(ep=2, tp=4).at(3)` loads one of eight shares alone.
    """
    mesh = mesh or ONE
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize is {quantize!r}: must be one of {', '.join(map(repr, QUANTIZE))}")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if quantize == "mxfp4":
        check_widths(config, quantize)
    check_mesh(config, mesh, blocks_of(checkpoint, quantize))
    tokenizer = tokenizer_of(checkpoint.folder)
    share = share_of(config, mesh)
    finish = None
    if quantize == "mxfp4":
        finish = partial(quantise_leaf, config=config)
    elif quantize == "none" or (quantize == "auto" and is_better_unpacked(checkpoint, share, device, dtype)):
        finish = partial(unpacked, dtype=dtype)
    return Model(config, read_params(checkpoint, dtype, device, progress, finish, share), tokenizer)


def load_random(
    path: str | Path,
    device: str | torch.device = "cpu",
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    packed: bool = True,
    progress: Progress | None = None,
    seed: int = 0,
) -> Model:
    """A model of a folder's config and tokenizer whose parameters are made on the device: to measure speed, its answers
    are noise. Of a checkpoint that may be there nothing is read.

    Experts of the inner layers are in MXFP4, as the published checkpoints have them, unless `packed` is False; router
    and residual gates are float32, all else is `dtype` (None: bfloat16, as published). Raises what `open_random` does,
    and ValueError if this rank's share is larger than the free memory.
    """
    mesh = mesh or ONE
    head = open_random(path, mesh, packed=packed)
    config, dtype = head.config, dtype or torch.bfloat16

    def is_packed(leaf: Leaf) -> bool:
        return packed and is_packable(leaf, config)

    needed, free = bytes_made(config, mesh, is_packed=is_packed, dtype=dtype), free_memory(torch.device(device))
    if free is not None and needed > free:
        raise ValueError(
            f"{path}: the parameters of a rank take {needed / 2**30:.2f} GiB: {device} has {free / 2**30:.2f} GiB free"
        )
    made = random_params(config, mesh, device, is_packed=is_packed, seed=seed, dtype=dtype, progress=progress)
    return head._replace(params=made)


def open_random(path: str | Path, mesh: Mesh | None = None, *, packed: bool = True) -> Model:
    """What `load_random` gives, without parameters. Raises CheckpointError for what is no folder, ConfigError for its
    `config.json`, MeshError or ValueError for sizes that do not fit the mesh, cannot be packed or not be drawn."""
    folder = Path(path)
    if not folder.is_dir():
        refuse(folder, ["not a folder" if folder.exists() else "no such folder"])
    config = Config.from_json(folder / "config.json")
    check_deviation(config)
    check_fits(config, mesh or ONE, format_of(packed))
    return Model(config, Params((), (), (), ()), tokenizer_of(folder))


def format_of(packed: bool) -> str:
    """The published format that random parameters are like; see footprint.FORMATS."""
    return "quark-mxfp4" if packed else "bf16"


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device has to give; None where it cannot say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() if device.type == "cpu" else None


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has none."""
    return load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def share_of(config: Config, mesh: Mesh) -> Share:
    """What this rank reads of a checkpoint; the mesh must fit the config."""

    def part(leaf: Leaf) -> Part | None:
        return part_of(leaf, config, mesh) if holds(leaf, config, mesh) else None

    def path(leaf: Leaf) -> str:
        return local_path(leaf.path, leaf.layer, config, mesh)

    return Share(part, path, sparse_layers(stage_config(config, mesh)))


def blocks_of(checkpoint: Checkpoint, quantize: str | None = None) -> dict[str, int]:
    """For parameters that are packed once loaded, by path: how many inputs share a scale and must stay together."""
    packed = {plan.leaf.path: plan.format.block for plan in checkpoint.plans if plan.format.node != "plain"}
    packs = quantize == "mxfp4"
    made = [plan.leaf.path for plan in checkpoint.plans if packs and is_packable(plan.leaf, checkpoint.config)]
    return {**dict.fromkeys(made, BLOCKS["mxfp4"]), **packed}


def save(
    path: str | Path, params: Params, config: Config, format: str = "bf16", progress: Progress | None = None
) -> None:
    """Writes a folder in the published layout "float32", "bf16", "quark-mxfp4" or "nvfp4"; see write_checkpoint.

    transformers opens the first two. Files of other kinds, such as a tokenizer, are left to the caller.
    """
    write_checkpoint(path, params, config, format, progress=progress)
