"""What one rank of a mesh holds: bytes of parameters by component, and bytes of cache per token.

Counted from the schema and the rules of the mesh; no tensor is made. All ranks of a pipeline stage hold parts of equal
sizes, so a stage is described by its first rank.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.quantise import BLOCKS, check_widths, is_packable
from muse_fn.params.schema import Leaf, leaves
from muse_fn.params.slicing import divided, shape_of_part, size_of_part
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.rules import check_mesh, holds
from muse_fn.sharding.split import local_kv_heads, part_of

FORMATS: dict[str, str | None] = {"quark-mxfp4": "mxfp4", "nvfp4": "nvfp4", "bf16": None}  # how experts are packed
KV_DTYPES = {"bf16": 2, "fp8": 1, "float32": 4}  # bytes of one element
MODEL_BYTES, FLOAT32_BYTES = 2, 4

# Component -> the last words of the paths of its parameters; what is in no line is a norm or a gate.
PARTS = {
    "attention": ("q", "k", "v", "gate", "o"),
    "squeeze and expand": ("squeeze", "expand"),
    "router": ("weight",),
    "experts": ("gate_up", "down"),
    "dense MLP": ("gate", "up", "down"),
}
COMPONENTS = (*PARTS, "norms and gates", "embedding", "head")


class Held(NamedTuple):
    """The part of one parameter that a rank holds."""

    leaf: Leaf
    component: str
    shape: tuple[int, ...]
    size: int  # elements
    bytes: int


class KV(NamedTuple):
    """Bytes of cache on one rank."""

    windowed: int  # per token: the group that keeps everything
    window: int  # per sequence, once it is as long as the window: the sliding groups
    unwindowed: int  # per token, when every layer keeps all tokens


def component_of(path: str) -> str:
    """Which line of the plan a parameter belongs to, by its path in the schema."""
    if path in ("embed", "head"):
        return {"embed": "embedding", "head": "head"}[path]
    *_, group, last = ("", *path.split("."))
    places = {"attn": ("attention",), "router": ("router",), "experts": ("experts",)}
    allowed = places.get(group, ("squeeze and expand", "dense MLP") if group == "mlp" else ())
    return next((name for name in allowed if last in PARTS[name]), "norms and gates")


def check(config: Config, mesh: Mesh, format: str) -> None:
    """Raises MeshError if the mesh does not fit this model in this format, ValueError if the format does not."""
    node = FORMATS[format]
    if node:
        check_widths(config, node)
    check_mesh(config, mesh, blocks_of(config, format))


def blocks_of(config: Config, format: str) -> dict[str, int]:
    """Parameters that this format packs, by path: how many inputs share a scale and cannot be parted."""
    node = FORMATS[format]
    return {leaf.path: BLOCKS[node] for leaf in leaves(config) if node and is_packable(leaf, config)}


@lru_cache(maxsize=256)
def held(config: Config, mesh: Mesh, format: str) -> tuple[Held, ...]:
    """All that this rank holds, in the order of the schema. The mesh must fit."""
    return tuple(_held(config, mesh, FORMATS[format]))


def _held(config: Config, mesh: Mesh, node: str | None) -> Iterator[Held]:
    known: dict[tuple[str, bool], tuple[tuple[int, ...], int, int]] = {}  # layers repeat
    for leaf in leaves(config):
        if not holds(leaf, config, mesh):
            continue
        packed = node if is_packable(leaf, config) else None
        kind = (leaf.row.path, bool(packed))
        if kind not in known:
            part = part_of(leaf, config, mesh)
            size = size_of_part(part)
            if packed:
                scales = size_of_part(divided(part, BLOCKS[packed]))
                factors = shape_of_part(part)[0] * leaf.matrices if packed == "nvfp4" else 0
                count = size // 2 + scales + FLOAT32_BYTES * factors
            else:
                count = size * (FLOAT32_BYTES if leaf.row.dtype == "float32" else MODEL_BYTES)
            known[kind] = shape_of_part(part), size, count
        yield Held(leaf, component_of(leaf.row.path), *known[kind])


def weights(config: Config, mesh: Mesh, format: str) -> dict[str, int]:
    """Bytes of parameters on this rank by component; components the model lacks are left out."""
    found = Counter[str]()
    for item in held(config, mesh, format):
        found[item.component] += item.bytes
    return {name: found[name] for name in COMPONENTS if name in found}


def stages(mesh: Mesh) -> list[Mesh]:
    """The mesh seen from the first rank of each pipeline stage."""
    return [mesh.at(stage * mesh.size(STAGE)) for stage in range(mesh.pp)]


def kv_bytes(config: Config, mesh: Mesh, dtype: str) -> KV:
    """Bytes of cache on this rank, keys and values, per token and for the windows of one sequence."""
    each = 2 * local_kv_heads(config, mesh) * config.head_dim * KV_DTYPES[dtype]
    layout = layout_of(config, mesh)
    sliding = sum(window > 0 for window in layout.windows)
    # A block takes its place in every slot, also in those that the group has no layer for.
    windowed = layout.slots * each if 0 in layout.windows else 0
    return KV(windowed, sliding * layout.slots * config.window * each, len(layout.places) * each)


class Fit(NamedTuple):
    """How many tokens the caches of all sequences together can hold; None where only windows are kept."""

    windowed: int | None
    unwindowed: int


def tokens_that_fit(config: Config, mesh: Mesh, format: str, dtype: str, room: float, sequences: float) -> Fit:
    """Tokens whose cache fits into `room` bytes per card beside the parameters, on the fullest stage.

    Windowed, `sequences` sequences keep a full window in every sliding layer, counted before the tokens.
    """
    windowed: list[int] = []
    unwindowed: list[int] = []
    for stage in stages(mesh):
        kv = kv_bytes(config, stage, dtype)
        left = room - sum(weights(config, stage, format).values())
        unwindowed.append(max(0, int(left // kv.unwindowed)))
        left -= sequences * kv.window
        if kv.windowed:
            windowed.append(max(0, int(left // kv.windowed)))
        elif left < 0:
            windowed.append(0)
    return Fit(min(windowed, default=None), min(unwindowed))
