"""Random parameters of a config's shape, for tests, benchmarks and training from nothing."""

import hashlib

import torch
from torch import Tensor

from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.tree import Params, from_named


def init_params(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """A random tree: linears, router, experts and residual gates N(0, initializer_range), centred norms and the
    selection bias 0, the final norm 1.

    `dtype` applies to all but the float32 rows (router, residual gates). Each tensor has its own generator, seeded by
    `seed` and its path's place in the table, so that adding a layer does not change the others.
    """
    values = {leaf.path: _draw(leaf, config, seed, dtype) for leaf in leaves(config)}
    return from_named(sparse_layers(config), values)


def _draw(leaf: Leaf, config: Config, seed: int, dtype: torch.dtype) -> Tensor:
    dtype = torch.float32 if leaf.row.dtype == "float32" else dtype
    if leaf.row.init != "normal":
        return torch.full(leaf.shape, float(leaf.row.init == "ones"), dtype=dtype)
    key = f"{seed}/{leaf.path}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(_digest(key), "big"))
    return (torch.randn(leaf.shape, generator=generator) * config.initializer_range).to(dtype)


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=7).digest()
