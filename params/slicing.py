"""Parts of a parameter: ranges per dimension, what they mean for packed tensors, and how they meet stored pieces.

Part   for each dimension of a parameter's shape the ranges kept, in order:
       gate_up [E, 2F, M], experts 0..127, a quarter of gate and of up:
           (((0, 128),), ((0, F/4), (F, F + F/4)), ((0, M),))
Box    one range per dimension, with its place in the part
Share  what one rank holds of a whole model
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight
from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, sparse_layers

Range = tuple[int, int]
Part = tuple[tuple[Range, ...], ...]
Shape = tuple[int, ...]
Slices = tuple[slice, ...]


def whole(shape: Shape) -> Part:
    """The part that is all of it."""
    return tuple(((0, size),) for size in shape)


def shape_of_part(part: Part) -> Shape:
    """The shape of a tensor that holds this part."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in part)


def size_of_part(part: Part) -> int:
    """How many elements the part has."""
    return prod(shape_of_part(part))


def divided(part: Part, by: int) -> Part:
    """The part of a tensor that has one element for `by` elements of the last dimension: codes, or block scales."""
    assert all(n % by == 0 for ends in part[-1] for n in ends), f"{part=} {by=}"
    return (*part[:-1], tuple((start // by, stop // by) for start, stop in part[-1]))


def factors(part: Part, matrices: int) -> Part:
    """The part of a tensor [..., matrices] that has one element for each expert and matrix, however rows are cut."""
    return (*part[:-2], ((0, matrices),))


@dataclass(frozen=True)
class Share:
    """What one rank holds: of each parameter a part or nothing (None), and the tree that the parts make."""

    part: Callable[[Leaf], Part | None]
    path: Callable[[Leaf], str]  # in the rank's tree
    sparse: tuple[bool, ...]  # which of the rank's layers are mixtures of experts


def everything(config: Config) -> Share:
    """The share of a rank that is alone."""
    return Share(lambda leaf: whole(leaf.shape), lambda leaf: leaf.path, sparse_layers(config))


class Box(NamedTuple):
    """A rectangle of a parameter, and where it lies in a part of it."""

    source: tuple[Range, ...]
    target: tuple[Range, ...]


def boxes(part: Part) -> Iterator[Box]:
    """The rectangles that make up a part."""
    placed: list[list[tuple[Range, Range]]] = []
    for ranges in part:
        ends = list(accumulate(stop - start for start, stop in ranges))
        placed.append([(r, (end - (r[1] - r[0]), end)) for r, end in zip(ranges, ends, strict=True)])
    for chosen in product(*placed):
        yield Box(tuple(source for source, _ in chosen), tuple(target for _, target in chosen))


class Overlap(NamedTuple):
    """What a stored piece gives to a part: which slices of the piece, and where in the part they go."""

    read: Slices
    target: Slices


def overlaps(part: Part, piece: tuple[Range, ...]) -> Iterator[Overlap]:
    """The common rectangles of a part and a piece that fills the rectangle `piece` of the parameter."""
    for box in boxes(part):
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box.source, piece, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        read = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(both, piece, strict=True))
        moved = zip(both, box.source, box.target, strict=True)
        yield Overlap(read, tuple(slice(a - source[0] + to[0], b - source[0] + to[0]) for (a, b), source, to in moved))


def take(weight: Weight, part: Part) -> Weight:
    """The part of a parameter in memory, packed ones included; a copy unless it is all of it."""
    match weight:
        case MXFP4(codes, scales):
            block = 2 * codes.shape[-1] // scales.shape[-1]
            return MXFP4(_take(codes, divided(part, 2)), _take(scales, divided(part, block)))
        case NVFP4(codes, scales, global_scale):
            block = 2 * codes.shape[-1] // scales.shape[-1]
            per_matrix = factors(part, global_scale.shape[-1])
            return NVFP4(
                _take(codes, divided(part, 2)), _take(scales, divided(part, block)), _take(global_scale, per_matrix)
            )
        case Tensor():
            return _take(weight, part)


def _take(tensor: Tensor, part: Part) -> Tensor:
    if part == whole(tuple(tensor.shape)):
        return tensor
    out = tensor.new_empty(shape_of_part(part))
    for box in boxes(part):
        source, target = (tuple(slice(*ends) for ends in side) for side in box)
        out[target] = tensor[source]
    return out
