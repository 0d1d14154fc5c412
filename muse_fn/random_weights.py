"""Parameters made on the device that computes with them, in place of those of a checkpoint: to measure speed.

    random_params   a rank's share of a random model
    bytes_made      how much memory that takes

Values have the size that `initializer_range` says, packed ones included, so that no sum overflows; what the model then
says is noise.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from muse_fn.kernels.packed import E2M1, MXFP4, MXFP4_BLOCK, Weight
from muse_fn.params.config import Config
from muse_fn.params.read import Progress
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.slicing import Part, Shape, shape_of_part, size_of_part
from muse_fn.params.tree import Params, from_named, tensors
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.rules import holds
from muse_fn.sharding.split import local_path, part_of, stage_config

IsPacked = Callable[[Leaf], bool]
CODES_RMS = math.sqrt(sum(value * value for value in E2M1) / len(E2M1))  # of codes that are all equally likely
DEVIATIONS = (1e-30, 1e30)  # within them neither bfloat16 nor a block's scale overflows


def random_params(
    config: Config,
    mesh: Mesh = ONE,
    device: str | torch.device = "cpu",
    *,
    is_packed: IsPacked,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> Params:
    """This rank's parameters: what `is_packed` in MXFP4, router and residual gates float32, all others `dtype`.

    Matrices and residual gates are N(0, initializer_range), packed ones uniform codes under scales that give the same
    deviation; norms and the selection bias are constants as in params/init.py. A value depends on `seed`, the
    parameter and the part of it: what several ranks hold is the same on all of them, on devices of one kind. The mesh
    must fit the config. Raises ValueError for an initializer_range that nothing can be drawn with, and for inputs that
    blocks of 32 do not divide.
    """
    check_deviation(config)
    total, done, values = bytes_made(config, mesh, is_packed=is_packed, dtype=dtype), 0, dict[str, Weight]()
    for leaf, part in _parts(config, mesh):
        generator = torch.Generator(device).manual_seed(_seed(seed, leaf, part))
        shape = shape_of_part(part)
        if is_packed(leaf):
            weight = _packed(leaf, shape, config.initializer_range, generator)
        else:
            weight = _plain(leaf, shape, _dtype(leaf, dtype), config.initializer_range, generator)
        values[local_path(leaf.path, leaf.layer, config, mesh)] = weight
        done += sum(tensor.nbytes for tensor in tensors(weight))
        if progress:
            progress(done, total, leaf.path)
    return from_named(sparse_layers(stage_config(config, mesh)), values)


def check_deviation(config: Config) -> None:
    """Raises ValueError unless numbers of the size of initializer_range can be stored."""
    low, high = DEVIATIONS
    if not low <= config.initializer_range <= high:
        raise ValueError(f"initializer_range is {config.initializer_range}: random weights need {low} to {high}")


def bytes_made(config: Config, mesh: Mesh = ONE, *, is_packed: IsPacked, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that `random_params` of the same arguments takes on this rank."""

    def bytes_of(leaf: Leaf, size: int) -> int:
        return size // 2 + size // MXFP4_BLOCK if is_packed(leaf) else size * _dtype(leaf, dtype).itemsize

    return sum(bytes_of(leaf, size_of_part(part)) for leaf, part in _parts(config, mesh))


def _parts(config: Config, mesh: Mesh) -> Iterator[tuple[Leaf, Part]]:
    """The parameters that this rank holds, and the part of each."""
    return ((leaf, part_of(leaf, config, mesh)) for leaf in leaves(config) if holds(leaf, config, mesh))


def _dtype(leaf: Leaf, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if leaf.row.dtype == "float32" else dtype


def _seed(seed: int, leaf: Leaf, part: Part) -> int:
    key = f"{seed}/{leaf.path}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


def _plain(leaf: Leaf, shape: Shape, dtype: torch.dtype, deviation: float, generator: torch.Generator) -> Tensor:
    device = generator.device
    if leaf.row.init != "normal":
        return torch.full(shape, float(leaf.row.init == "ones"), dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(deviation)


def _packed(leaf: Leaf, shape: Shape, deviation: float, generator: torch.Generator) -> MXFP4:
    """Codes of equal likelihood; each block's scale is one of two powers of two, mixed so that the mean square is
    right: with a share q of the larger, (1 - q) s² + q (2s)² = (deviation / CODES_RMS)²."""
    *outer, inner = shape
    if inner % MXFP4_BLOCK:
        raise ValueError(f"{leaf.path} has {inner} inputs on a rank: to pack them needs a multiple of {MXFP4_BLOCK}")
    device, wanted = generator.device, deviation / CODES_RMS
    exponent = math.floor(math.log2(wanted))
    share = (wanted**2 / 4.0**exponent - 1) / 3
    codes = torch.randint(256, (*outer, inner // 2), dtype=torch.uint8, device=device, generator=generator)
    is_larger = torch.rand((*outer, inner // MXFP4_BLOCK), device=device, generator=generator) < share
    return MXFP4(codes, is_larger.to(torch.uint8).add_(127 + exponent))
