"""The parameter tree: NamedTuples of tensors and packed nodes, and the only place that walks them.

A leaf is a tensor; a packed matrix (MXFP4, NVFP4) is a small node of tensors; an absent parameter is `()`, which has no
leaves in optree and torch.func alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import optree
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight

Tree = TypeVar("Tree")


class Attention(NamedTuple):
    """Projections of one attention block; rows are heads, columns the normalised input."""

    q: Tensor  # [N*D, H]
    k: Tensor  # [K*D, H]
    v: Tensor  # [K*D, H]
    gate: Tensor  # [N*D, H], the sigmoid gate on each head's output
    o: Tensor  # [H, N*D]


class Router(NamedTuple):
    """Always float32."""

    weight: Tensor  # [E, H]
    bias: Tensor  # [E], decides which experts are chosen, never how they are weighted


class Experts(NamedTuple):
    """All experts of a layer, stacked."""

    gate_up: Weight  # [E, 2F, M], gate rows first
    down: Weight  # [E, M, F]
    norm: Tensor  # [M], shared by all experts


class MoE(NamedTuple):
    """A latent mixture of experts: squeeze H -> M, experts at width M, expand M -> H."""

    router: Router
    squeeze: Tensor  # [M, H]
    squeeze_norm: Tensor  # [M]
    experts: Experts
    expand: Tensor  # [H, M]


class Dense(NamedTuple):
    """A gated MLP, for layers that are not sparse."""

    gate: Tensor  # [I, H]
    up: Tensor  # [I, H]
    down: Tensor  # [H, I]


class Layer(NamedTuple):
    """One decoder layer. Residual gates are float32."""

    attn_norm: Tensor  # [H]
    attn: Attention
    attn_residual_gate: Tensor  # [H]
    mlp_norm: Tensor  # [H]
    mlp: MoE | Dense
    mlp_post_norm: Tensor  # [H]
    mlp_residual_gate: Tensor  # [H]


class Params(NamedTuple):
    """The whole text decoder."""

    embed: Tensor | tuple[()]  # [V, H]; () where a later pipeline stage has no use for it
    layers: tuple[Layer, ...]
    norm: Tensor | tuple[()]  # [H]; () on all pipeline stages but the last
    head: Tensor | tuple[()]  # [V, H]; () when tied to embed, and on all pipeline stages but the last


def build(sparse: tuple[bool, ...], leaf: Callable[[str], Any]) -> Params:
    """The tree of a model whose layer i is sparse or dense, each leaf made by `leaf(path)`."""

    def node(kind: type[Any], prefix: str, **given: Any) -> Any:
        names = cast("tuple[str, ...]", kind._fields)
        return kind(**{n: given[n] if n in given else leaf(prefix + n) for n in names})

    def mlp(prefix: str, is_sparse: bool) -> MoE | Dense:
        if not is_sparse:
            return node(Dense, prefix)
        router, experts = node(Router, f"{prefix}router."), node(Experts, f"{prefix}experts.")
        return node(MoE, prefix, router=router, experts=experts)

    def layer(i: int, is_sparse: bool) -> Layer:
        at = f"layers.{i}."
        return node(Layer, at, attn=node(Attention, f"{at}attn."), mlp=mlp(f"{at}mlp.", is_sparse))

    return node(Params, "", layers=tuple(layer(i, s) for i, s in enumerate(sparse)))


def sample_tensor(params: Params) -> Tensor:
    """A plain tensor that every tree has: its device and dtype are the model's."""
    return params.layers[0].attn.q


def is_weight(node: object) -> bool:
    """Whether this node is one parameter: a tensor or a packed matrix."""
    return isinstance(node, (Tensor, MXFP4, NVFP4))


def named(params: Any) -> dict[str, Weight]:
    """Every parameter by its accessor path ("layers.3.attn.q"), packed matrices whole."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(params, is_leaf=is_weight)
    paths = [".".join(_word(entry) for entry in accessor) for accessor in accessors]
    return dict(zip(paths, cast("list[Weight]", leaves), strict=True))


def from_named(sparse: tuple[bool, ...], values: Mapping[str, Weight]) -> Params:
    """The inverse of `named`; a path that `values` lacks becomes `()`."""
    return build(sparse, lambda path: values.get(path, ()))


def _word(entry: Any) -> str:
    return str(getattr(entry, "field", entry.entry))


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with `fn` applied to every tensor, codes and scales included."""
    return cast("Tree", optree.tree_map(cast("Callable[..., Any]", fn), cast("Any", tree)))


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, codes and scales included."""
    return cast("list[Tensor]", optree.tree_leaves(tree))
