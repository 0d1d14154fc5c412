"""config.json: what is read, what is derived, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import MuseSparkConfig

from muse_fn.params.config import JSON_NAMES, Config, ConfigError

SIZES = st.integers(1, 300)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any config that can be run."""
    layers, kv_heads, top_k = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def each(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=layers, max_size=layers)) if draw(st.booleans()) else ())

    theta = draw(st.sampled_from([1e4, 500_000.0]))
    return Config(
        vocab_size=draw(SIZES),
        hidden_size=draw(SIZES),
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        experts=top_k + draw(st.integers(0, 8)),
        top_k=top_k,
        rope_theta=theta,
        layer_types=each(st.sampled_from(["sliding_attention", "full_attention"])),
        layer_rope_theta=each(st.sampled_from([0.0, theta])),
        mlp_layer_types=each(st.sampled_from(["sparse", "dense"])),
        tie_word_embeddings=draw(st.booleans()),
        eos_token_id=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        bos_token_id=draw(st.none() | st.integers(0, 99)),
        pad_token_id=draw(st.none() | st.integers(0, 99)),
    )


@given(configs())
def test_json_round_trip(config: Config) -> None:
    text = json.loads(json.dumps(config.to_json()))
    assert Config.from_json(text) == config
    assert Config.from_json({"model_type": "muse_spark", "text_config": text}) == config
    assert hash(Config.from_json(text)) == hash(config)


def test_defaults_are_those_of_transformers() -> None:
    theirs = json.loads(MuseSparkConfig().to_json_string(use_diff=False))["text_config"]
    ours = Config()
    assert Config.from_json({"text_config": theirs}) == ours
    assert {key: ours.to_json()[key] for key in JSON_NAMES.values()} == {
        key: theirs[key] for key in JSON_NAMES.values()
    }


def test_absent_fields_take_the_released_values() -> None:
    assert Config.from_json({}) == Config()
    assert Config().layers == 62
    assert Config().layer_types[-4:] == (
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    )


def test_layers_are_counted_from_the_last() -> None:
    config = Config(layers=6)
    assert [config.is_sliding(i) for i in range(6)] == [True, False, True, True, True, False]
    assert [config.has_rotary(i) for i in range(6)] == [True, False, True, True, True, False]


@pytest.mark.parametrize("found", [None, 200_008, [200_001, 200_008]])
def test_stop_ids_are_a_number_a_list_or_none(found: Any) -> None:
    config = Config.from_json({"eos_token_id": found})
    assert config.eos_token_id == {None: (), 200_008: (200_008,)}.get(
        found if not isinstance(found, list) else 0, (200_001, 200_008)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0: must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 2**31}, "from 1 to 2147483647"),
        ({"num_hidden_layers": 10**12}, "layers is 1000000000000: must be a whole number from 1 to 1024"),
        ({"num_local_experts": 10**12}, "experts is 1000000000000"),
        ({"num_key_value_heads": 3}, "heads is 128: must be a multiple of kv_heads 3"),
        ({"num_experts_per_tok": 257}, "top_k is 257: must be at most experts 256"),
        ({"head_dim": 7}, "head_dim is 7: must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0: must be above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"final_logit_softcapping": -1.0}, "soft_cap is -1.0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries: the model has 62 layers"),
        ({"layer_types": ["chunked"] * 62}, "layer_types[61] is 'chunked'"),
        ({"mlp_layer_types": "sparse"}, "mlp_layer_types has 1 entries"),
        ({"layer_rope_theta": [None] * 62}, "layer_rope_theta[0] is None"),
        ({"eos_token_id": ["x"]}, "token id 'x': not a number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_refused_by_name(text: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_json(text)
    assert message in str(error.value)


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_json({"hidden_size": 0, "vocab_size": -1, "rms_norm_eps": "small"})
    assert [word in str(error.value) for word in ("hidden_size", "vocab_size", "rms_norm_eps")] == [True] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 10**5, "not JSON"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        Config.from_json(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        Config.from_json(tmp_path)
