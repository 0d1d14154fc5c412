"""A folder in, a model out, and back."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from muse_fn.params.checkpoint import open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.quantise import check_widths, quantise_leaf
from muse_fn.params.read import Progress, read_params
from muse_fn.params.tree import Params
from muse_fn.params.write import write_checkpoint
from muse_fn.sharding.mesh import Mesh, one_rank
from muse_fn.tokenizer import Tokenizer, load_tokenizer


class Model(NamedTuple):
    """All that answering needs."""

    config: Config
    params: Params
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
    `quantize="mxfp4"` packs the experts of the inner layers while reading. All is verified before anything is
    allocated; raises CheckpointError, ConfigError or ValueError with every problem.
    """
    one_rank(mesh)
    if quantize not in (None, "mxfp4"):
        raise ValueError(f"quantize is {quantize!r}: must be None or 'mxfp4'")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if quantize:
        check_widths(config, quantize)
    tokenizer = load_tokenizer(checkpoint.folder) if (checkpoint.folder / "tokenizer.json").exists() else None
    finish = partial(quantise_leaf, config=config) if quantize else None
    return Model(config, read_params(checkpoint, dtype, device, progress, finish), tokenizer)


def save(
    path: str | Path, params: Params, config: Config, format: str = "bf16", progress: Progress | None = None
) -> None:
    """Writes a folder in the published layout "float32", "bf16", "quark-mxfp4" or "nvfp4"; see write_checkpoint.

    transformers opens the first two. Files of other kinds, such as a tokenizer, are left to the caller.
    """
    write_checkpoint(path, params, config, format, progress=progress)
