"""Names and shapes of the vision and audio tensors of a published checkpoint.

This version runs text only; the table is here so that a checkpoint's towers are verified and counted, and so that the
issue that runs them finds their names in one place. Source: the published checkpoints of Muse Spark Open.
"""

from math import prod
from typing import Any, cast

Shapes = dict[str, tuple[int, ...]]

# Values of the released model, used for keys that a config leaves out (transformers does so for its defaults).
VISION: dict[str, Any] = {
    "patch_size": 14,
    "patch_temporal": 2,
    "pos_emb_height": 32,
    "pos_emb_width": 32,
    "num_hidden_layers": 50,
    "hidden_size": 1536,
    "intermediate_size": 8960,
}
AUDIO: dict[str, Any] = {
    "patch_sizes": (16, 6, 5, 4),
    "hidden_sizes": (256, 512, 1024, 2048),
    "depths": (2, 2, 2, 2),
    "mlp_ratio": 4.0,
    "conv_kernel_size": 7,
    "out_hidden_size": 8192,
}
PROJECTOR: dict[str, Any] = {"out_hidden_size": 6144, "projector_hidden_size": 4096}
PREFIXES = ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection.", "model.audio_tower.")


def tower_shapes(whole: dict[str, Any], text_hidden: int) -> Shapes:
    """Every tower tensor of a parsed config.json by name; none for towers whose sub-config is absent or null."""
    shapes: Shapes = {}
    if isinstance(whole.get("vision_config"), dict):
        shapes |= _vision({**VISION, **cast("dict[str, Any]", whole["vision_config"])})
        shapes |= _projector({**PROJECTOR, **whole}, text_hidden)
    if isinstance(whole.get("audio_config"), dict):
        shapes |= _audio({**AUDIO, **cast("dict[str, Any]", whole["audio_config"])})
    return shapes


def parameters(shapes: Shapes) -> int:
    """Number of parameters of a set of tensors."""
    return sum(prod(shape) for shape in shapes.values())


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _vision(c: dict[str, Any]) -> Shapes:
    at, h, inner = "model.vision_tower.", c["hidden_size"], c["intermediate_size"]
    shapes: Shapes = {
        f"{at}patch_embedder.patch_embedding.weight": (h, 3 * c["patch_temporal"] * c["patch_size"] ** 2),
        f"{at}patch_embedder.position_embedding_table.weight": (c["pos_emb_height"] * c["pos_emb_width"], h),
        **_affine(f"{at}ln_pre", h),
        **_affine(f"{at}ln_post", h),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"{at}layers.{i}."
        shapes |= _affine(f"{layer}norm1", h) | _affine(f"{layer}norm2", h)
        for part in ("q_proj", "k_proj", "v_proj", "proj"):
            shapes |= _affine(f"{layer}attn.{part}", h, h)
        shapes |= _affine(f"{layer}mlp.fc1", inner, h) | _affine(f"{layer}mlp.fc2", h, inner)
    return shapes


def _projector(c: dict[str, Any], text_hidden: int) -> Shapes:
    return {
        "model.vision_adapter.fc1.weight": (c["projector_hidden_size"], c["out_hidden_size"]),
        "model.vision_adapter.fc2.weight": (c["projector_hidden_size"], c["projector_hidden_size"]),
        "model.vision_projection.weight": (text_hidden, c["projector_hidden_size"]),
    }


def _audio(c: dict[str, Any]) -> Shapes:
    at, shapes, width_in = "model.audio_tower.", cast("Shapes", {}), 1
    for s, (width, patch, depth) in enumerate(zip(c["hidden_sizes"], c["patch_sizes"], c["depths"], strict=True)):
        layer, inner = f"{at}layers.{s}.", int(width * c["mlp_ratio"])
        shapes |= _affine(f"{layer}patch_embedder.proj", width, width_in * patch)
        shapes[f"{layer}patch_embedder.norm.weight"] = (width,)
        for b in range(depth):
            block = f"{layer}conv_blocks.{b}."
            shapes |= _affine(f"{block}conv", width, 1, c["conv_kernel_size"])
            shapes[f"{block}norm.weight"] = (width,)
            shapes |= _affine(f"{block}mlp.fc1", inner, width) | _affine(f"{block}mlp.fc2", width, inner)
        width_in = width
    out = c["out_hidden_size"]
    return {
        **shapes,
        f"{at}norm.weight": (width_in,),
        **_affine(f"{at}proj", out, width_in),
        f"{at}post_proj_norm.weight": (out,),
    }
