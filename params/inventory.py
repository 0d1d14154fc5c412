"""What a model is made of: parameters by component, in all and active per token, and bytes per storage format."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, leaves
from muse_fn.params.towers import parameters, tower_shapes

# Component -> the last words of the accessor paths that belong to it.
LAYER_PARTS = {
    "attention q, gate, o": ("attn.q", "attn.gate", "attn.o"),
    "attention k, v": ("attn.k", "attn.v"),
    "squeeze and expand": ("mlp.squeeze", "mlp.expand"),
    "router weight": ("mlp.router.weight",),
    "router bias": ("mlp.router.bias",),
    "experts": ("mlp.experts.gate_up", "mlp.experts.down"),
    "dense MLP": ("mlp.gate", "mlp.up", "mlp.down"),
    "norms": ("attn_norm", "mlp_norm", "mlp_post_norm", "mlp.squeeze_norm", "mlp.experts.norm"),
    "residual gates": ("attn_residual_gate", "mlp_residual_gate"),
}
MXFP4_BITS = 4 + 8 / 32
NVFP4_BITS = 4 + 8 / 16


class Line(NamedTuple):
    """One line of the inventory; `active` is what one token's forward pass multiplies with."""

    name: str
    parameters: int
    active: int


class Inventory(NamedTuple):
    """Lines of one (the last) layer and of the whole model, and bytes on disk per format."""

    layer: list[Line]
    model: list[Line]
    bytes: dict[str, int]


def inventory(config: Config, whole: dict[str, Any] | None = None) -> Inventory:
    """Counts a config from the schema alone; `whole`, the parsed config.json, adds the towers it declares."""
    every = list(leaves(config))
    last = [leaf for leaf in every if leaf.layer == config.layers - 1]
    layer = [_line(name, _named(last, ends), config) for name, ends in LAYER_PARTS.items()]
    layer = [line for line in layer if line.parameters]
    towers = tower_shapes(whole or {}, config.hidden_size)
    return Inventory(
        [*layer, _line("layer total", last, config)], _model_lines(config, every, towers), _bytes(config, every, towers)
    )


def _model_lines(config: Config, every: list[Leaf], towers: dict[str, tuple[int, ...]]) -> list[Line]:
    in_layers = [leaf for leaf in every if leaf.layer is not None]
    groups = {
        "experts": _named(every, LAYER_PARTS["experts"]),
        "attention": _named(every, LAYER_PARTS["attention q, gate, o"] + LAYER_PARTS["attention k, v"]),
        "squeeze and expand": _named(every, LAYER_PARTS["squeeze and expand"]),
        "routers": _named(every, LAYER_PARTS["router weight"] + LAYER_PARTS["router bias"]),
        "layers and final norm": [*in_layers, *_named(every, ("norm",))],
        "embedding and head": [leaf for leaf in every if leaf.path in ("embed", "head")],
        "text decoder": every,
    }
    lines = [_line(name, group, config) for name, group in groups.items()]
    total = sum(leaf.size for leaf in every) + parameters(towers)
    kinds = {name: "audio output norm" if "post_proj_norm" in name else name.split(".")[1] for name in towers}
    for kind in dict.fromkeys(kinds.values()):
        count = parameters({name: shape for name, shape in towers.items() if kinds[name] == kind})
        lines.append(Line(kind.replace("_", " "), count, 0))
    if "audio output norm" in kinds.values():
        # Published counts of the whole checkpoint leave this one tensor out: shown, so that both can be found.
        lines.insert(-1, Line("all but the audio output norm", total - lines[-1].parameters, 0))
    return [*lines, Line("checkpoint total", total, 0)]


def _line(name: str, group: Iterable[Leaf], config: Config) -> Line:
    group = list(group)
    return Line(name, sum(leaf.size for leaf in group), sum(_active(leaf, config) for leaf in group))


def _active(leaf: Leaf, config: Config) -> int:
    if leaf.path == "embed":
        return config.hidden_size  # one row
    return leaf.size * config.top_k // config.experts if leaf.row.each else leaf.size


def _named(group: Iterable[Leaf], ends: tuple[str, ...]) -> list[Leaf]:
    return [leaf for leaf in group if leaf.path.partition(".")[2].partition(".")[2] in ends or leaf.path in ends]


def _bytes(config: Config, every: list[Leaf], towers: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of tensor data when written in each format: only the inner layers' experts are ever packed."""
    inner = [leaf for leaf in every if leaf.row.each and leaf.layer not in (0, config.layers - 1)]
    packed = sum(leaf.size for leaf in inner)
    single = sum(leaf.size for leaf in every if leaf.row.dtype == "float32")
    plain = sum(leaf.size for leaf in every) + parameters(towers) - packed - single
    scales = sum(config.experts * 4 * 2 * len(leaf.row.each) for leaf in inner)  # global and input scale, float32
    return {
        "bf16": 2 * (plain + packed) + 4 * single,
        "quark-mxfp4": int(2 * plain + packed * MXFP4_BITS / 8) + 4 * single,
        "nvfp4": int(2 * plain + packed * NVFP4_BITS / 8) + 4 * single + scales,
    }
