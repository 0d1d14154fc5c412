"""Which experts tokens go to, counted: the load of every expert in every layer. Padding counts nowhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from muse_fn.decoder import Chunk, check_tokens, hidden_states
from muse_fn.kernels.select import select
from muse_fn.params.config import Config
from muse_fn.params.tree import Params, sample_tensor
from muse_fn.sharding.collectives import psum
from muse_fn.sharding.mesh import ONE, Mesh
from muse_fn.sharding.rules import stage_layers
from muse_fn.sharding.split import check_shard


def expert_load(
    params: Params, tokens: Tensor, config: Config, lengths: Tensor | None = None, mesh: Mesh | None = None
) -> Tensor:
    """int64 [layers, E]: how many of these tokens each expert gets; zeros for layers without experts.

    tokens int64 [B, T]; of row b the first lengths[b] count (default: all), the rest is padding. On a mesh every rank
    calls with its own parameters and gets the counts of the whole model. Raises ValueError as `forward` does.
    """
    mesh = mesh or ONE
    check_tokens(tokens, config)
    check_shard(params, config, mesh)
    batch, length = tokens.shape
    lengths = torch.full((batch,), length) if lengths is None else lengths
    if lengths.shape != (batch,) or not ((lengths >= 0) & (lengths <= length)).all():
        raise ValueError(f"lengths is {lengths.tolist()}: must be {batch} numbers from 0 to {length}")
    pos_BT = torch.arange(length, device=tokens.device).expand(tokens.shape)
    chunks = [Chunk(tokens, pos_BT, is_start=True)]
    routes = hidden_states(params, chunks, (), config, select(sample_tensor(params).device), mesh).routes
    return count_routes(routes, lengths.to(tokens.device), config, mesh)


def count_routes(routes: Sequence[Tensor | tuple[()]], count_B: Tensor, config: Config, mesh: Mesh = ONE) -> Tensor:
    """int64 [layers, E] of a step's routes, for each layer of this rank's stage int64 [B, T, R] or () where it has no
    experts; only the first count_B[b] columns of row b are tokens."""
    load = torch.zeros(config.layers, config.experts, dtype=torch.int64, device=count_B.device)
    for layer, idx_BTR in zip(stage_layers(config.layers, mesh), routes, strict=True):
        if isinstance(idx_BTR, Tensor):
            real_BT = torch.arange(idx_BTR.shape[1], device=count_B.device) < count_B[:, None]
            load[layer].scatter_add_(0, idx_BTR.flatten(), real_BT[..., None].expand(idx_BTR.shape).flatten().long())
    return psum(load, mesh, ("pp",))
