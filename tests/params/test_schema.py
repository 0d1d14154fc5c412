"""The table of parameters against the tree, the published sizes, and transformers' own names and shapes."""

import torch
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration

from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.schema import ROWS, dims_of, leaves, sizes, sparse_layers
from muse_fn.params.tree import build, from_named, named, tensors
from tests.tiny_checkpoint import TINY


def test_rows_and_tree_name_the_same_parameters() -> None:
    for config in (TINY, TINY_MIXED, TINY_TIED):
        paths: list[str] = []
        build(sparse_layers(config), lambda path, paths=paths: paths.append(path))
        absent = {"head"} if config.tie_word_embeddings else set[str]()
        assert set(paths) - absent == {leaf.path for leaf in leaves(config)}


def test_every_dimension_is_a_known_word() -> None:
    known = sizes(Config())
    assert {word for row in ROWS for words in dims_of(row) for word in words} <= set(known)


def test_released_model_has_the_published_size() -> None:
    hidden, width, vocab, kv = 8192, 4096, 202_048, 1024
    attention = 3 * hidden * hidden + 2 * kv * hidden
    mixture = 256 * hidden + 256 + 2 * width * hidden + 256 * 3 * width * width + 2 * width
    total = 62 * (attention + mixture + 5 * hidden) + 2 * vocab * hidden + hidden
    assert sum(leaf.size for leaf in leaves(Config())) == total
    experts = next(leaf for leaf in leaves(Config()) if leaf.path == "layers.0.mlp.experts.gate_up")
    assert experts.shape == (256, 8192, 4096)


def test_names_and_shapes_are_those_of_transformers() -> None:
    for config in (TINY, TINY_MIXED):
        text = config.to_json()
        audio = {"hidden_sizes": [8], "depths": [1], "patch_sizes": [4], "num_hidden_layers": 1}
        whole = MuseSparkConfig(
            text_config=text,
            vision_config={
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 1,
            },
            audio_config={**audio, "out_hidden_size": config.hidden_size},
            out_hidden_size=64,
            projector_hidden_size=8,
        )
        with torch.device("meta"):
            theirs = MuseSparkForConditionalGeneration(whole).state_dict()
        text_part = {
            n: tuple(t.shape) for n, t in theirs.items() if n.startswith(("model.language_model.", "lm_head."))
        }
        assert {leaf.name: leaf.shape for leaf in leaves(config)} == text_part


def test_named_and_from_named_are_inverse() -> None:
    for config in (TINY, TINY_MIXED, TINY_TIED):
        params = init_params(config)
        again = from_named(sparse_layers(config), named(params))
        assert all(a is b for a, b in zip(tensors(params), tensors(again), strict=True))
        assert type(again) is type(params)
        assert again.head == () or not config.tie_word_embeddings


def test_init_is_a_function_of_seed_and_path() -> None:
    params, again, other = init_params(TINY, 1), init_params(TINY, 1), init_params(TINY, 2)
    assert all(torch.equal(a, b) for a, b in zip(tensors(params), tensors(again), strict=True))
    assert not torch.equal(named(params)["embed"], named(other)["embed"])  # type: ignore[arg-type]
    deeper = init_params(Config.from_json({**TINY.to_json(), **DEEPER}), 1)
    assert torch.equal(deeper.layers[1].attn.q, params.layers[1].attn.q)
    half = init_params(TINY, 1, torch.bfloat16)
    assert (tensors(half.embed)[0].dtype, half.layers[0].attn_residual_gate.dtype) == (torch.bfloat16, torch.float32)


TINY_MIXED = Config.from_json({**TINY.to_json(), "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]})
TINY_TIED = Config.from_json({**TINY.to_json(), "tie_word_embeddings": True})
DEEPER = {"num_hidden_layers": 5, "layer_types": None, "layer_rope_theta": None, "mlp_layer_types": None}
