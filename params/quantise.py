"""Parameters whose experts are packed, from parameters whose experts are not."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from muse_fn.kernels.packed import (
    MXFP4,
    MXFP4_BLOCK,
    NVFP4,
    NVFP4_BLOCK,
    Weight,
    dequantise,
    quantise_mxfp4,
    quantise_nvfp4,
)
from muse_fn.params.config import Config
from muse_fn.params.formats import Node
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.tree import Params, from_named, map_tensors, named, tensors

Packed = TypeVar("Packed", Tensor, MXFP4, NVFP4)
BLOCKS = {"mxfp4": MXFP4_BLOCK, "nvfp4": NVFP4_BLOCK}


def is_packable(leaf: Leaf, config: Config) -> bool:
    """Whether the published 4-bit checkpoints pack this parameter: experts, but not of the first and the last layer."""
    return bool(leaf.row.each) and leaf.layer not in (0, config.layers - 1)


def quantise_experts(params: Params, config: Config) -> Params:
    """The same tree with the experts of all layers but the first and the last in MXFP4, by Quark's block rule.

    What is packed already stays as it is. Raises ValueError if a width is no multiple of 32.
    """
    values = named(params)
    done = {leaf.path: quantise_leaf(leaf, values[leaf.path], config) for leaf in leaves(config)}
    return from_named(sparse_layers(config), done)


def quantise_leaf(leaf: Leaf, weight: Weight, config: Config) -> Weight:
    """MXFP4 for a packable parameter that is plain; any other as it is."""
    if not isinstance(weight, Tensor) or not is_packable(leaf, config):
        return weight
    return to_node(leaf, weight, "mxfp4", torch.float32)


def check_widths(config: Config, node: str) -> None:
    """Raises ValueError naming the parameters that this node's blocks do not divide."""
    bad = {
        f"{leaf.row.path} has {leaf.shape[-1]} inputs"
        for leaf in leaves(config)
        if is_packable(leaf, config) and leaf.shape[-1] % BLOCKS[node]
    }
    if bad:
        raise ValueError(f"{node} needs a multiple of {BLOCKS[node]} inputs: {', '.join(sorted(bad))}")


def to_node(leaf: Leaf, weight: Weight, node: Node, dtype: torch.dtype) -> Weight:
    """A parameter as this kind of node: itself if it is one, else unpacked and packed again, expert by expert.

    `dtype` is that of a plain tensor. Raises ValueError naming the parameter if it cannot be packed.
    """
    try:
        return _converted(weight, node, leaf.matrices, dtype)
    except ValueError as error:
        raise ValueError(f"{leaf.name}: {error}") from error


def _converted(weight: Weight, node: Node, matrices: int, dtype: torch.dtype) -> Weight:
    match node, weight:
        case ("mxfp4", MXFP4()) | ("nvfp4", NVFP4()):
            return weight
        case "plain", Tensor():
            return weight.to(dtype)
        case "plain", _:
            return _stack(weight, lambda one: dequantise(one, dtype))
        case "mxfp4", _:
            return _stack(weight, lambda one: quantise_mxfp4(dequantise(one, torch.float32)))
        case "nvfp4", _:
            return _stack(weight, lambda one: quantise_nvfp4(dequantise(one, torch.float32), matrices))


def _stack(weight: Weight, fn: Callable[[Weight], Packed]) -> Packed:
    """`fn` of each expert, stacked: what it needs in between is one expert large."""
    experts = tensors(weight)[0].shape[0]
    first = fn(map_tensors(lambda t: t[0], weight))
    out = map_tensors(lambda t: t.new_empty((experts, *t.shape)), first)
    for e in range(experts):
        one = first if e == 0 else fn(map_tensors(lambda t, e=e: t[e], weight))
        for place, value in zip(tensors(out), tensors(one), strict=True):
            place[e].copy_(value)
    return out
