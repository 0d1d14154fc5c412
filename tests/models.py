"""Small random models and the pieces that property tests share. Every check here raises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kvcache.cache import KVCache, blocks_for, init_cache
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config, LayerType
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.tree import Params, from_named, map_tensors, tensors
from muse_fn.sharding.mesh import STAGE, Mesh

SEEDS = st.integers(0, 2**31 - 1)
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

SMALL = Config(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=20,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=4,
    latent_size=12,
    expert_size=8,
    experts=5,
    top_k=2,
    window=4,
    max_positions=4096,
    layer_types=(SLIDING, FULL, SLIDING),
    layer_rope_theta=(1e4, 0.0, 1e4),
    rope_theta=1e4,
    mlp_layer_types=("sparse", "sparse", "dense"),
)


@st.composite
def configs(draw: st.DrawFn, max_layers: int = 3, **fixed: Any) -> Config:
    """Configs of every shape that the equations allow, small; `fixed` fields are kept."""
    layers = fixed.pop("layers", None) or draw(st.integers(1, max_layers))
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))

    def each(*values: object) -> tuple[Any, ...]:
        return tuple(draw(st.lists(st.sampled_from(values), min_size=layers, max_size=layers)))

    drawn: dict[str, Any] = {
        "hidden_size": draw(st.integers(3, 20)),
        "layers": layers,
        "heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 4)),
        "latent_size": draw(st.integers(2, 12)),
        # An expert of width 1 to 3 gives a row whose norm is near its sign: rounding decides it, not the equations.
        "expert_size": draw(st.integers(4, 10)),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "window": draw(st.integers(1, 6)),
        "rope_theta": draw(st.sampled_from([100.0, 5e5])),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-2])),
        "post_norm_eps": draw(st.sampled_from([1e-8, 1e-2])),
        "qk_scale_factor": draw(st.sampled_from([0.5, 5.4730064863875])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "soft_cap": draw(st.sampled_from([0.0, 5.0, 20.0])),
        "layer_types": each(SLIDING, FULL),
        "layer_rope_theta": each(0.0, 5e5),
        "mlp_layer_types": each("sparse", "sparse", "dense"),
    }
    return replace(SMALL, **{**drawn, **fixed})


def random_params(config: Config, seed: int, dtype: torch.dtype = torch.float32) -> Params:
    """No parameter constant, every branch felt: activations of order 1, a branch 5 to 20 % of the stream (residual
    gates of -0.9 to -0.5), router logits of order 2 so that scores are far apart, vocabulary logits of order 5."""
    draw = torch.Generator().manual_seed(seed)

    def value(leaf: Leaf) -> Tensor:
        x = torch.randn(leaf.shape, generator=draw)
        match leaf.path.rpartition(".")[2]:
            case "attn_residual_gate" | "mlp_residual_gate":
                x = -0.7 + 0.2 * x.clamp(-1, 1)
            case "norm" | "attn_norm" | "mlp_norm" | "mlp_post_norm" | "squeeze_norm":
                x = 0.2 * x + (leaf.row.init == "ones")
            case "bias":
                x = 0.3 * x
            case "weight":
                x = 12 * x / leaf.shape[-1] ** 0.5
            case "head":
                x = 30 * x / leaf.shape[-1] ** 0.5
            case "embed":
                pass
            case _:
                x = x / leaf.shape[-1] ** 0.5
        return x if leaf.row.dtype == "float32" else x.to(dtype)

    return from_named(sparse_layers(config), {leaf.path: value(leaf) for leaf in leaves(config)})


def random_tokens(config: Config, seed: int, *shape: int) -> Tensor:
    """int64 ids of the vocabulary."""
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Raises unless found is within tolerance * max(1, max |expected|) of expected everywhere, in the same shape."""
    assert found.shape == expected.shape, f"{found.shape=} {expected.shape=}"
    error = (found.double() - expected.double()).abs().max().item()
    limit = tolerance * max(1.0, expected.double().abs().max().item())
    assert error <= limit, f"{error=:.3g} above {limit=:.3g}"


def far(found: Tensor, expected: Tensor, tolerance: float = 1e-3) -> None:
    """Raises unless the two differ somewhere by more than tolerance."""
    error = (found.double() - expected.double()).abs().max().item()
    assert error > tolerance, f"{error=:.3g} not above {tolerance=:.3g}"


def snapshot(tree: Any) -> list[Tensor]:
    """Copies of all tensors of a tree."""
    return tensors(map_tensors(torch.clone, tree))


def unchanged(tree: Any, before: list[Tensor]) -> None:
    """Raises unless every tensor of the tree is bit-equal to its copy."""
    now = tensors(tree)
    assert len(now) == len(before)
    for x, y in zip(now, before, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def scattered_cache(config: Config, batch: int, positions: int, block: int, seed: int) -> tuple[KVCache, Tensor]:
    """A cache and tables [G, B, N] for `batch` sequences whose blocks lie in random order between unused ones, all full
    of NaN: what is not written must not be read."""
    draw = torch.Generator().manual_seed(seed)
    groups, each = layout_of(config).groups, blocks_for(positions, block)
    free = 1 + torch.randperm(groups * batch * each + 3, generator=draw)
    kv = on_arrays(lambda t: torch.full_like(t, torch.nan), init_cache(config, 1 + len(free), block))
    return kv, free[: groups * batch * each].view(groups, batch, each)


def on_arrays(fn: Callable[[Tensor], Tensor], kv: KVCache) -> KVCache:
    """A living cache with `fn` of every array of this one."""
    return KVCache(tuple(fn(t) for t in kv.k), tuple(fn(t) for t in kv.v), torch.tensor(True))


def copied(kv: KVCache) -> KVCache:
    """A living cache of its own with the same content."""
    return on_arrays(torch.clone, kv)


@st.composite
def fitting_configs(draw: st.DrawFn, mesh: Mesh, max_layers: int = 3) -> Config:
    """Configs that this mesh can hold, with fewer, as many and more KV heads than ranks."""
    ranks, layers = mesh.size(STAGE), draw(st.integers(mesh.pp, max(mesh.pp, max_layers)))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, ranks, 2 * ranks) if ranks % n == 0 or n % ranks == 0]))
    widths = ranks if mesh.squeeze == "split" else 1
    return draw(
        configs(
            layers=layers,
            kv_heads=kv_heads,
            heads=max(kv_heads, ranks) * draw(st.integers(1, 2)),
            vocab_size=ranks * draw(st.integers(2, 9)),
            intermediate_size=ranks * draw(st.integers(1, 5)),
            experts=(experts := mesh.ep * draw(st.integers(1, 3))),
            top_k=draw(st.integers(1, experts)),
            expert_size=mesh.tp * draw(st.integers(-(-4 // mesh.tp), 8)),
            hidden_size=16 if widths > 1 else draw(st.integers(8, 20)),
            latent_size=16 if widths > 1 else draw(st.integers(4, 12)),
        )
    )


MESHES = (
    Mesh(),
    Mesh(1, 2),
    Mesh(2, 1),
    Mesh(2, 2),
    Mesh(2, 4),
    Mesh(4, 2),
    Mesh(8, 1),
    Mesh(1, 2, pp=2),
)
MORE_MESHES = (*MESHES, Mesh(2, 4, squeeze="split"), Mesh(2, 2, pp=3, squeeze="split"), Mesh(1, 1, pp=3))
