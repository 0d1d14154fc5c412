"""What is written is read back the same, opened by transformers, and there as a whole or not at all."""

import json
import struct
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, quantise_mxfp4, quantise_nvfp4
from muse_fn.load import load, save
from muse_fn.params.checkpoint import open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.init import init_params
from muse_fn.params.quantise import quantise_experts
from muse_fn.params.tree import Params, map_tensors, named, tensors
from muse_fn.params.write import LAYOUTS, write_checkpoint
from tests import oracle
from tests.tiny_checkpoint import EXPERTS, FILE, INDEX, TINY, equal, params_of, write

MIXED = Config.from_json({**TINY.to_json(), "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]})
TIED = Config.from_json({**TINY.to_json(), "tie_word_embeddings": True})
FORMATS = list(LAYOUTS)


def expected(params: Params, format: str, config: Config) -> dict[str, Weight]:
    """What a format makes of plain float32 parameters, said without the writer."""
    inner = [i for i in range(1, config.layers - 1) if config.is_sparse(i)]
    values: dict[str, Weight] = {}
    for path, weight in named(params).items():
        assert isinstance(weight, Tensor)
        packed = any(path in (f"layers.{i}.mlp.experts.gate_up", f"layers.{i}.mlp.experts.down") for i in inner)
        if "router" in path or "residual_gate" in path or format == "float32":
            values[path] = weight
        elif packed and format == "quark-mxfp4":
            values[path] = quantise_mxfp4(weight)
        elif packed and format == "nvfp4":
            values[path] = quantise_nvfp4(weight, 2 if path.endswith("gate_up") else 1)
        else:
            values[path] = weight.bfloat16()
    return values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", [TINY, MIXED, TIED], ids=["sparse", "mixed", "tied"])
def test_each_format_reads_back_as_what_it_means(tmp_path: Path, format: str, config: Config) -> None:
    params = params_of(config)
    save(tmp_path / "out", params, config, format=format)
    model = load(tmp_path / "out", dtype=None)
    assert model.config == config
    assert equal(named(model.params), expected(params, format, config))


@pytest.mark.parametrize("format", FORMATS)
def test_saving_again_changes_no_byte(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", format, shard_bytes=20_000)
    write_checkpoint(tmp_path / "b", load(tmp_path / "a", dtype=None).params, TINY, format, shard_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    assert INDEX in files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.parametrize("source", ["quark-mxfp4", "nvfp4"])
@pytest.mark.parametrize("target", FORMATS)
def test_packed_parameters_in_every_format(tmp_path: Path, source: str, target: str) -> None:
    """Unpacked for the plain formats, kept for their own, unpacked and packed again for the other."""
    write(tmp_path / "source", source)
    packed = load(tmp_path / "source", dtype=None).params
    save(tmp_path / "target", packed, TINY, format=target)
    found = named(load(tmp_path / "target", dtype=None).params)
    for path, weight in named(packed).items():
        if isinstance(weight, Tensor):
            continue
        if source == target:
            want: Weight = weight
        elif target in ("float32", "bf16"):
            want = dequantise(weight, torch.float32 if target == "float32" else torch.bfloat16)
        else:
            plain = dequantise(weight, torch.float32)
            parts = 2 if path.endswith("gate_up") else 1
            want = quantise_nvfp4(plain, parts) if target == "nvfp4" else quantise_mxfp4(plain)
        assert equal(found[path], want), path


def test_memory_order_does_not_matter(tmp_path: Path) -> None:
    params = params_of(TINY)
    turned = map_tensors(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, params)
    assert any(not tensor.is_contiguous() for tensor in tensors(turned))
    for format in FORMATS:
        save(tmp_path / f"{format}-a", params, TINY, format=format)
        save(tmp_path / f"{format}-b", turned, TINY, format=format)
        assert (tmp_path / f"{format}-a" / FILE).read_bytes() == (tmp_path / f"{format}-b" / FILE).read_bytes()


def test_parameters_that_need_gradients_can_be_saved(tmp_path: Path) -> None:
    params = map_tensors(lambda t: t.requires_grad_(), params_of(TINY))
    for format in FORMATS:
        save(tmp_path / format, params, TINY, format=format)


# Layout


def stored(folder: Path, file: str = FILE) -> dict[str, tuple[str, list[int]]]:
    with safe_open(folder / file, framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}
    return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}


def test_quark_layout(tmp_path: Path) -> None:
    found = stored(write(tmp_path, "quark-mxfp4"))
    e, f, m = TINY.experts, TINY.expert_size, TINY.latent_size
    for layer, packed in ((0, False), (1, True), (2, True), (3, False)):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        assert f"{at}gate_up_proj" not in found
        for expert in range(e):
            for name, rows, width in (("gate_proj", f, m), ("up_proj", f, m), ("down_proj", m, f)):
                want = ("U8", [rows, width // 2]) if packed else ("BF16", [rows, width])
                assert found[f"{at}{expert}.{name}.weight"] == want
                scale = found.get(f"{at}{expert}.{name}.weight_scale")
                assert scale == (("U8", [rows, width // 32]) if packed else None)
    quant = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert quant["quant_method"] == "quark"
    assert quant["export"] == {"kv_cache_group": [], "pack_method": "reorder"}
    assert quant["global_quant_config"]["weight"]["scale_format"] == "e8m0"
    assert {"layer_quant_config", "layer_type_quant_config"} <= set(quant)
    assert "model.language_model.layers.0.mlp.experts" in quant["exclude"]
    assert "model.language_model.layers.3.mlp.experts" in quant["exclude"]
    # A reader that finds an excluded name below a layer's experts leaves all of them unpacked.
    assert not [name for name in quant["exclude"] if "layers.1.mlp.experts" in name or "*.mlp.experts" in name]


def test_nvfp4_layout(tmp_path: Path) -> None:
    found = stored(write(tmp_path, "nvfp4"))
    e, f, m = TINY.experts, TINY.expert_size, TINY.latent_size
    want = {
        "gate_up_proj": ("U8", [e, 2 * f, m // 2]),
        "gate_up_proj_weight_scale": ("F8_E4M3", [e, 2 * f, m // 16]),
        "gate_up_proj_weight_scale_2": ("F32", [e, 2]),
        "gate_up_proj_input_scale": ("F32", [e, 2]),
        "down_proj": ("U8", [e, m, f // 2]),
        "down_proj_weight_scale": ("F8_E4M3", [e, m, f // 16]),
        "down_proj_weight_scale_2": ("F32", [e]),
        "down_proj_input_scale": ("F32", [e]),
        "post_expert_norm.weight": ("BF16", [m]),
    }
    assert {n.removeprefix(EXPERTS): t for n, t in found.items() if n.startswith(EXPERTS)} == want
    with safe_open(tmp_path / FILE, framework="pt") as handle:
        assert handle.get_tensor(f"{EXPERTS}gate_up_proj_input_scale").unique().tolist() == [1.0]
    first = "model.language_model.layers.0.mlp.experts."
    assert found[f"{first}gate_up_proj"] == ("BF16", [e, 2 * f, m])
    assert f"{first}gate_up_proj_weight_scale" not in found
    quant = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules", "quant_algo"} <= set(quant)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == quant


@pytest.mark.parametrize("format", FORMATS)
def test_names_dtypes_and_notice_of_the_rest(tmp_path: Path, format: str) -> None:
    found = stored(write(tmp_path, format))
    plain = "F32" if format == "float32" else "BF16"
    at = "model.language_model.layers.1."
    assert found["lm_head.weight"] == (plain, [TINY.vocab_size, TINY.hidden_size])
    for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "post_attention_residual_gate.gate"):
        assert found[at + name][0] == "F32"
    with safe_open(tmp_path / FILE, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "notice": "Built with Muse Spark Open"}
    whole: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert whole["architectures"] == ["MuseSparkForConditionalGeneration"]
    assert (whole["model_type"], whole["dtype"]) == ("muse_spark", "float32" if plain == "F32" else "bfloat16")
    assert whole["audio_config"]["out_hidden_size"] == TINY.hidden_size


def test_tensors_are_aligned(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4", shard_bytes=20_000)
    for file in tmp_path.glob("*.safetensors"):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                width = {"F32": 4, "BF16": 2}.get(entry["dtype"], 1)
                assert (8 + length + entry["data_offsets"][0]) % width == 0, name


def test_shards_keep_to_their_size(tmp_path: Path) -> None:
    write(tmp_path, "bf16", shard_bytes=20_000)
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert [file.name for file in shards] == sorted(set(index["weight_map"].values()))
    assert not (tmp_path / FILE).exists()
    data = 0
    for file in shards:
        sizes = [2 if dtype == "BF16" else 4 for dtype, _ in stored(tmp_path, file.name).values()]
        shapes = [torch.Size(shape).numel() for _, shape in stored(tmp_path, file.name).values()]
        size = sum(a * b for a, b in zip(sizes, shapes, strict=True))
        assert size <= 20_000 or len(shapes) == 1
        data += size
    assert data == index["metadata"]["total_size"]


# transformers


@pytest.mark.parametrize("format", ["float32", "bf16"])
@pytest.mark.parametrize("config", [TINY, MIXED, TIED], ids=["sparse", "mixed", "tied"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "from packed"])
def test_transformers_opens_it(tmp_path: Path, format: str, config: Config, packed: bool) -> None:
    params = params_of(config)
    params = quantise_experts(params, config) if packed else params
    write_checkpoint(tmp_path, params, config, format, shard_bytes=50_000)
    opened: Any = oracle.MuseSparkForConditionalGeneration.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    model, report = opened
    towers = ("model.vision", "model.audio")
    assert [name for name in report["missing_keys"] if not name.startswith(towers)] == []
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    theirs = model.state_dict()
    values = named(load(tmp_path, dtype=None).params)
    for plan in open_checkpoint(tmp_path).plans:
        ours = values[plan.leaf.path]
        assert isinstance(ours, Tensor)
        assert torch.equal(ours, theirs[plan.leaf.name]), plan.leaf.name
        assert ours.dtype == theirs[plan.leaf.name].dtype
    embed, head = (theirs[n] for n in ("model.language_model.embed_tokens.weight", "lm_head.weight"))
    assert torch.equal(embed, head) == config.tie_word_embeddings


# All or nothing


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model", "bf16")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    bad = params_of(TINY)
    tensors(named(bad)["layers.2.mlp.experts.down"])[0][0, 0, 0] = float("nan")
    for place in ("model", "new"):
        with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj: .* not finite"):
            save(tmp_path / place, bad, TINY, format="quark-mxfp4")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr("os.fsync", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "model", params_of(TINY), TINY)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


def test_a_mapped_checkpoint_survives_being_replaced(tmp_path: Path) -> None:
    write(tmp_path, "float32")
    model = load(tmp_path)
    want = map_tensors(torch.clone, model.params)
    # The new one is made of the mapped parameters themselves.
    save(tmp_path, map_tensors(lambda t: t + 1, model.params), TINY, format="float32")
    assert equal(model.params, want)
    assert equal(load(tmp_path).params, map_tensors(lambda t: t + 1, want))
    save(tmp_path, model.params, TINY, format="float32")
    assert equal(load(tmp_path).params, want)


def test_other_files_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "m", "nvfp4", shard_bytes=20_000)
    (tmp_path / "m" / "chat_template.jinja").write_text("template")
    (tmp_path / "m" / "more").mkdir()
    (tmp_path / "m" / "more" / "note").write_text("note")
    (tmp_path / "m" / "l4_200k_base").symlink_to("more/note")
    write(tmp_path / "m", "bf16")
    left = sorted(entry.name for entry in (tmp_path / "m").iterdir())
    assert left == sorted(["chat_template.jinja", "config.json", "l4_200k_base", FILE, "more"])
    assert (tmp_path / "m" / "l4_200k_base").read_text() == "note"
    assert (tmp_path / "m" / "l4_200k_base").is_symlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_shards_of_any_name_are_replaced(tmp_path: Path) -> None:
    write(tmp_path / "m", "bf16")
    (tmp_path / "m" / FILE).rename(tmp_path / "m" / "part.safetensors")
    names = dict.fromkeys(stored(tmp_path / "m", "part.safetensors"), "part.safetensors")
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": names}))
    assert load(tmp_path / "m").config == TINY
    write(tmp_path / "m", "bf16")
    assert sorted(entry.name for entry in (tmp_path / "m").iterdir()) == ["config.json", FILE]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "bf16")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "real").config == TINY


@pytest.mark.parametrize("config", [None, "{}", '{"model_type": "llama"}', "not JSON"])
def test_a_foreign_folder_is_refused(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if config:
        (tmp_path / "config.json").write_text(config)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    with pytest.raises(ValueError, match="no Muse Spark checkpoint") as error:
        write(tmp_path, "bf16")
    assert str(tmp_path) in str(error.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    with pytest.raises(ValueError, match=r"thesis\.txt: exists and is no folder"):
        write(tmp_path / "thesis.txt", "bf16")


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    narrow = Config.from_json({**TINY.to_json(), "moe_intermediate_size": 24})
    for format, block in (("quark-mxfp4", 32), ("nvfp4", 16)):
        with pytest.raises(ValueError, match=rf"multiple of {block} inputs: layers\.\*\.mlp\.experts\.down has 24"):
            save(tmp_path / "x", params_of(narrow), narrow, format=format)
    with pytest.raises(ValueError, match="format is 'gguf': must be one of float32, bf16, quark-mxfp4, nvfp4"):
        save(tmp_path / "x", params_of(TINY), TINY, format="gguf")
    with pytest.raises(ValueError, match=r"embed: shape is \[40, 32\], the config asks for \[41, 32\]"):
        save(tmp_path / "x", params_of(TINY), Config.from_json({**TINY.to_json(), "vocab_size": 41}))
    with pytest.raises(ValueError, match=r"head: shape is \[40, 32\], the config asks for none"):
        save(tmp_path / "x", params_of(TINY), TIED)
    assert list(tmp_path.iterdir()) == []


# Any config


@st.composite
def cases(draw: st.DrawFn) -> tuple[Config, str, int]:
    layers = draw(st.integers(1, 5))
    kinds = tuple(draw(st.lists(st.sampled_from(["sparse", "dense"]), min_size=layers, max_size=layers)))
    sliding = draw(st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=layers, max_size=layers))
    format = draw(st.sampled_from(FORMATS))
    step = {"quark-mxfp4": 32, "nvfp4": 16}.get(format, 1)
    kv_heads = draw(st.integers(1, 3))
    config = Config(
        vocab_size=draw(st.integers(1, 40)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 40)),
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        latent_size=step * draw(st.integers(1, 3)),
        expert_size=step * draw(st.integers(1, 3)),
        experts=draw(st.integers(1, 4)),
        top_k=1,
        mlp_layer_types=cast("Any", kinds),
        layer_types=cast("Any", tuple(sliding)),
        tie_word_embeddings=draw(st.booleans()),
    )
    return config, format, draw(st.sampled_from([1, 3000, 10**9]))


@given(cases())
def test_any_config_round_trips(tmp_path_factory: pytest.TempPathFactory, case: tuple[Config, str, int]) -> None:
    config, format, shard_bytes = case
    folder = tmp_path_factory.mktemp("any") / "out"
    params = init_params(config)
    write_checkpoint(folder, params, config, format, shard_bytes)
    model = load(folder, dtype=None)
    assert model.config == config
    assert equal(named(model.params), expected(params, format, config))
    packed = [weight for weight in named(model.params).values() if isinstance(weight, (MXFP4, NVFP4))]
    inner = [i for i in range(1, config.layers - 1) if config.is_sparse(i)]
    assert len(packed) == (2 * len(inner) if format in ("quark-mxfp4", "nvfp4") else 0)
