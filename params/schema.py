"""The one table of parameters: accessor path, checkpoint name, dimensions, dtype and initial value of every tensor.

Loading, verification, initialisation, saving, sharding, the planner and `inspect` are maps over it; adding a tensor to
the model means adding one row. Source of names and shapes: the published checkpoints of Muse Spark Open.

Dimensions are written as in einops: words separated by spaces, slowest first; words in parentheses are fused into one
checkpoint dimension. A word is what a sharding rule may split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from muse_fn.params.config import Config

DtypeRule = Literal["model", "float32"]
InitRule = Literal["normal", "zeros", "ones"]
Where = Literal["always", "untied", "sparse", "dense"]


@dataclass(frozen=True)
class Row:
    """One line of the table. `*` in a path and `{i}` in a name stand for the layer number."""

    path: str
    name: str
    dims: str
    dtype: DtypeRule = "model"
    init: InitRule = "normal"
    where: Where = "always"
    each: tuple[str, ...] = ()  # per-expert spelling: for each expert, these matrices stacked by rows


@dataclass(frozen=True)
class Leaf:
    """A row of the table at one layer of one config."""

    row: Row
    layer: int | None
    path: str
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return prod(self.shape)

    @property
    def matrices(self) -> int:
        """How many matrices are joined by rows: 2 for an expert's gate and up."""
        return max(1, len(self.row.each))


_P = "model.language_model.layers.{i}."
_X = _P + "mlp.experts."

ROWS = (
    Row("embed", "model.language_model.embed_tokens.weight", "vocab hidden"),
    Row("layers.*.attn_norm", _P + "input_layernorm.weight", "hidden", init="zeros"),
    Row("layers.*.attn.q", _P + "self_attn.q_proj.weight", "(heads head_dim) hidden"),
    Row("layers.*.attn.k", _P + "self_attn.k_proj.weight", "(kv_heads head_dim) hidden"),
    Row("layers.*.attn.v", _P + "self_attn.v_proj.weight", "(kv_heads head_dim) hidden"),
    Row("layers.*.attn.gate", _P + "self_attn.gate_proj.weight", "(heads head_dim) hidden"),
    Row("layers.*.attn.o", _P + "self_attn.o_proj.weight", "hidden (heads head_dim)"),
    Row("layers.*.attn_residual_gate", _P + "post_attention_residual_gate.gate", "hidden", "float32"),
    Row("layers.*.mlp_norm", _P + "pre_feedforward_layernorm.weight", "hidden", init="zeros"),
    Row("layers.*.mlp.router.weight", _P + "mlp.gate.weight", "experts hidden", "float32", where="sparse"),
    Row(
        "layers.*.mlp.router.bias",
        _P + "mlp.gate.e_score_correction_bias",
        "experts",
        "float32",
        init="zeros",
        where="sparse",
    ),
    Row("layers.*.mlp.squeeze", _P + "mlp.pre_expert_proj.weight", "squeezed hidden", where="sparse"),
    Row("layers.*.mlp.squeeze_norm", _P + "mlp.pre_expert_norm.weight", "latent", init="zeros", where="sparse"),
    Row(
        "layers.*.mlp.experts.gate_up",
        _X + "gate_up_proj",
        "experts (gate_up inner) latent",
        where="sparse",
        each=(_X + "{e}.gate_proj", _X + "{e}.up_proj"),
    ),
    Row(
        "layers.*.mlp.experts.down",
        _X + "down_proj",
        "experts latent inner",
        where="sparse",
        each=(_X + "{e}.down_proj",),
    ),
    Row("layers.*.mlp.experts.norm", _X + "post_expert_norm.weight", "latent", init="zeros", where="sparse"),
    Row("layers.*.mlp.expand", _P + "mlp.post_expert_proj.weight", "expanded latent", where="sparse"),
    Row("layers.*.mlp.gate", _P + "mlp.gate_proj.weight", "dense_inner hidden", where="dense"),
    Row("layers.*.mlp.up", _P + "mlp.up_proj.weight", "dense_inner hidden", where="dense"),
    Row("layers.*.mlp.down", _P + "mlp.down_proj.weight", "hidden dense_inner", where="dense"),
    Row("layers.*.mlp_post_norm", _P + "post_feedforward_layernorm.weight", "hidden", init="zeros"),
    Row("layers.*.mlp_residual_gate", _P + "post_feedforward_residual_gate.gate", "hidden", "float32"),
    Row("norm", "model.language_model.norm.weight", "hidden", init="ones"),
    Row("head", "lm_head.weight", "vocab hidden", where="untied"),
)


def sizes(config: Config) -> dict[str, int]:
    """The size of every word used in the table."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "experts": config.experts,
        "latent": config.latent_size,
        "squeezed": config.latent_size,  # a word of its own, so that a layout may split it
        "expanded": config.hidden_size,  # likewise
        "inner": config.expert_size,
        "gate_up": 2,
        "dense_inner": config.intermediate_size,
    }


def dims_of(row: Row) -> tuple[tuple[str, ...], ...]:
    """The words of each checkpoint dimension: "(heads head_dim) hidden" -> (("heads", "head_dim"), ("hidden",))."""
    groups: list[tuple[str, ...]] = []
    for piece in row.dims.replace("(", "|(").replace(")", ")|").split("|"):
        words = piece.strip("() ").split()
        groups += [tuple(words)] if piece.startswith("(") else [(word,) for word in words]
    return tuple(groups)


def shape_of(row: Row, config: Config) -> tuple[int, ...]:
    """The shape of a row's tensor under this config."""
    size = sizes(config)
    return tuple(prod(size[word] for word in words) for words in dims_of(row))


def leaves(config: Config) -> Iterator[Leaf]:
    """Every parameter of a model, outer ones at their place in the table and layers in order."""
    for row in ROWS:
        if not row.path.startswith("layers."):
            if row.where == "always" or not config.tie_word_embeddings:
                yield Leaf(row, None, row.path, row.name, shape_of(row, config))
            continue
        for i in range(config.layers):
            if row.where == "always" or row.where == config.mlp_layer_types[i]:
                path, name = row.path.replace("*", str(i)), row.name.replace("{i}", str(i))
                yield Leaf(row, i, path, name, shape_of(row, config))


def sparse_layers(config: Config) -> tuple[bool, ...]:
    """Which layers are mixtures of experts, the argument of tree.build."""
    return tuple(config.is_sparse(i) for i in range(config.layers))
