"""A parameter and a mesh -> the part of it that this rank holds; whole trees cut, and cut trees joined again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import cast

import torch
from torch import Tensor

from muse_fn.kernels.packed import Weight, logical_shape
from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, dims_of, leaves, sizes, sparse_layers
from muse_fn.params.slicing import Part, Range, boxes, divided, shape_of_part, take, whole
from muse_fn.params.tree import MoE, Params, from_named, named, sample_tensor, tensors
from muse_fn.sharding.mesh import STAGE, Mesh, MeshError
from muse_fn.sharding.rules import REPEATED, axes_of, check_mesh, holds, stage_layers


def part_of(leaf: Leaf, config: Config, mesh: Mesh) -> Part:
    """The ranges of each dimension that this rank holds; see params/slicing.py. The mesh must fit the config."""
    size = sizes(config)
    return tuple(_ranges(leaf.row.path, words, size, mesh) for words in dims_of(leaf.row))


def _ranges(path: str, words: tuple[str, ...], size: dict[str, int], mesh: Mesh) -> tuple[Range, ...]:
    """Of one dimension, whose words are fused: splitting a word that is not the first gives one range for each
    combination of those before it ("gate_up inner": some rows of gate, the same rows of up)."""
    split = [(n, axes) for n, word in enumerate(words) if mesh.size(axes := axes_of(path, word, mesh)) > 1]
    assert len(split) <= 1, f"{path}: two words of {words} are split"
    if not split:
        return ((0, prod(size[word] for word in words)),)
    ((place, axes),) = split
    word, inner = words[place], prod(size[w] for w in words[place + 1 :])
    start, stop = _own(size[word], mesh.size(axes), mesh.index(axes), word in REPEATED)
    step = size[word] * inner
    outer = prod(size[w] for w in words[:place])
    return tuple((o * step + start * inner, o * step + stop * inner) for o in range(outer))


def _own(size: int, ranks: int, index: int, may_repeat: bool) -> Range:
    """Equal consecutive shares; with more ranks than elements, neighbours share one."""
    if size % ranks == 0:
        each = size // ranks
        return index * each, (index + 1) * each
    assert may_repeat, f"{size=} {ranks=}"
    assert ranks % size == 0, f"{size=} {ranks=}"
    one = index * size // ranks
    return one, one + 1


@lru_cache(maxsize=256)
def stage_config(config: Config, mesh: Mesh) -> Config:
    """The config of this rank's pipeline stage: its layers only, counted from 0; sizes stay those of the model."""
    if mesh.pp == 1:
        return config
    own = stage_layers(config.layers, mesh)
    lists = {
        n: getattr(config, n)[own.start : own.stop] for n in ("layer_types", "layer_rope_theta", "mlp_layer_types")
    }
    return replace(config, layers=len(own), **lists)


def local_path(path: str, layer: int | None, config: Config, mesh: Mesh) -> str:
    """A parameter's path in this rank's tree, whose layers count from 0."""
    if layer is None:
        return path
    _, _, rest = path.removeprefix("layers.").partition(".")
    return f"layers.{layer - stage_layers(config.layers, mesh).start}.{rest}"


@lru_cache(maxsize=256)
def local_kv_heads(config: Config, mesh: Mesh) -> int:
    """How many KV heads this rank caches."""
    start, stop = _own(config.kv_heads, mesh.size(STAGE), mesh.index(STAGE), may_repeat=True)
    return stop - start


def shard(params: Params, config: Config, mesh: Mesh) -> Params:
    """This rank's tree of a whole tree in memory, packed nodes included. Raises MeshError if the mesh does not fit."""
    whole_tree = named(params)
    blocks = {path: block for path, w in whole_tree.items() if (block := block_of(w)) > 1}
    check_mesh(config, mesh, blocks)
    cut = {
        local_path(leaf.path, leaf.layer, config, mesh): take(whole_tree[leaf.path], part_of(leaf, config, mesh))
        for leaf in leaves(config)
        if holds(leaf, config, mesh)
    }
    return from_named(sparse_layers(stage_config(config, mesh)), cut)


def check_shard(params: Params, config: Config, mesh: Mesh) -> None:
    """Raises MeshError if a tree cannot be this rank's; looks at one layer's widths, not at every tensor."""
    found: dict[str, object] = {
        "number of layers": len(params.layers),
        "layers.0.attn.q": sample_tensor(params).shape[0],
    }
    wanted: dict[str, object] = {
        "number of layers": stage_config(config, mesh).layers,
        "layers.0.attn.q": _rows(config, mesh),
    }
    moe = next((layer.mlp for layer in params.layers if isinstance(layer.mlp, MoE)), None)
    if moe is not None:
        found["experts"], wanted["experts"] = logical_shape(moe.experts.down)[::2], _experts(config, mesh)
    for name, value in found.items():
        if value != wanted[name]:
            raise MeshError(
                f"params are not this rank's share of mesh {mesh}, rank {mesh.rank}: {name} is {value}, must be "
                f"{wanted[name]}: load(…, mesh=mesh) or shard(params, config, mesh) make them"
            )


def _rows(config: Config, mesh: Mesh) -> int:
    return config.heads // mesh.size(STAGE) * config.head_dim


def _experts(config: Config, mesh: Mesh) -> tuple[int, int]:
    return config.experts // mesh.ep, config.expert_size // mesh.tp


def block_of(weight: Weight) -> int:
    """How many elements of the last dimension share a scale; 1 for a plain tensor."""
    return 1 if isinstance(weight, Tensor) else 2 * weight.codes.shape[-1] // weight.scales.shape[-1]


def unshard(shards: Sequence[Params], config: Config, mesh: Mesh) -> Params:
    """The inverse of `shard`: the trees of all ranks, in order -> the whole tree. Raises MeshError if they are not."""
    if len(shards) != mesh.ranks:
        raise MeshError(f"{len(shards)} trees were given: mesh {mesh} has {mesh.ranks} ranks")
    trees = [named(tree) for tree in shards]
    found: dict[str, Weight] = {}
    for leaf in leaves(config):
        for rank, tree in enumerate(trees):
            view = mesh.at(rank)
            if not holds(leaf, config, view):
                continue
            weight = tree[local_path(leaf.path, leaf.layer, config, view)]
            if leaf.path not in found:
                found[leaf.path] = _empty(weight, leaf)
            _put(found[leaf.path], weight, part_of(leaf, config, view), leaf)
    return from_named(sparse_layers(config), found)


def _parts(weight: Weight, part: Part, leaf: Leaf) -> list[Part]:
    """What a part of the parameter is in each tensor of its node."""
    if isinstance(weight, Tensor):
        return [part]
    scales = divided(part, block_of(weight))
    factors = [(*part[:-2], ((0, leaf.matrices),))] if len(weight) == 3 else []
    return [divided(part, 2), scales, *factors]


def _empty(weight: Weight, leaf: Leaf) -> Weight:
    shapes = [shape_of_part(p) for p in _parts(weight, whole(leaf.shape), leaf)]
    made = [torch.zeros(s, dtype=t.dtype, device=t.device) for s, t in zip(shapes, tensors(weight), strict=True)]
    return made[0] if isinstance(weight, Tensor) else cast("Weight", type(weight)(*made))


def _put(into: Weight, weight: Weight, part: Part, leaf: Leaf) -> None:
    for to, tensor, own in zip(tensors(into), tensors(weight), _parts(weight, part, leaf), strict=True):
        for box in boxes(own):
            source, target = (tuple(slice(*ends) for ends in side) for side in box)
            to[source] = tensor[target]
