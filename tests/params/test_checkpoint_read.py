"""Every published way to store a model is read into the same tree, byte for byte where the tree keeps bytes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, quantise_mxfp4, quantise_nvfp4
from muse_fn.load import load
from muse_fn.params.checkpoint import CheckpointError, open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.quantise import quantise_experts
from muse_fn.params.read import open_files, read_params
from muse_fn.params.tree import MoE, named, tensors
from tests import oracle
from tests.tiny_checkpoint import (
    EXPERTS,
    FILE,
    INDEX,
    TINY,
    Tensors,
    edit_json,
    edit_tensors,
    equal,
    params_of,
    raw_bytes,
    write,
    write_raw,
)

E, F, M = TINY.experts, TINY.expert_size, TINY.latent_size
GATE_UP, DOWN = "layers.1.mlp.experts.gate_up", "layers.1.mlp.experts.down"


def unstack(tensors: Tensors, layer: int) -> None:
    """Replaces the stacked plain experts of a layer by one tensor per expert and matrix."""
    at = f"model.language_model.layers.{layer}.mlp.experts."
    gate_up, down = tensors.pop(f"{at}gate_up_proj"), tensors.pop(f"{at}down_proj")
    for e in range(E):
        tensors[f"{at}{e}.gate_proj.weight"] = gate_up[e, :F]
        tensors[f"{at}{e}.up_proj.weight"] = gate_up[e, F:]
        tensors[f"{at}{e}.down_proj.weight"] = down[e]


# Plain


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_plain_tensors_take_the_dtype_asked_for(tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None) -> None:
    write(tmp_path, "float32")
    edit_tensors(tmp_path, lambda t: t.update({n: v.to(stored) for n, v in t.items()}))
    raw = load_file(tmp_path / FILE)
    params = load(tmp_path, dtype=asked).params
    assert isinstance(params.embed, Tensor)
    assert params.embed.dtype == (asked or stored)
    assert torch.equal(params.embed, raw["model.language_model.embed_tokens.weight"].to(asked or stored))
    layer = params.layers[2]
    assert isinstance(layer.mlp, MoE)
    for tensor in (layer.mlp.router.weight, layer.mlp.router.bias, layer.attn_residual_gate, layer.mlp_residual_gate):
        assert tensor.dtype == torch.float32


def test_experts_one_by_one_are_stacked_gate_first(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    want = load(tmp_path, dtype=None).params
    edit_tensors(tmp_path, lambda t: [unstack(t, layer) for layer in (0, 2)])  # the other layers stay stacked
    assert equal(load(tmp_path, dtype=None).params, want)


def test_experts_of_several_dtypes_take_one_that_holds_all(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    edit_tensors(tmp_path, lambda t: unstack(t, 1))
    name = f"{EXPERTS}2.up_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: t[name].float() + 1e-6}))
    found = named(load(tmp_path, dtype=None).params)[GATE_UP]
    assert isinstance(found, Tensor)
    assert found.dtype == torch.float32
    assert torch.equal(found[2, F:], load_file(tmp_path / FILE)[name])


def test_a_parameter_that_is_one_stored_tensor_is_the_mapped_file(tmp_path: Path) -> None:
    write(tmp_path, "float32")
    before = (tmp_path / FILE).read_bytes()
    params = load(tmp_path, dtype=torch.float32).params
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / FILE) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    for path, weight in named(params).items():
        (tensor,) = tensors(weight)
        assert any(low <= tensor.data_ptr() < high for low, high in ranges), f"{path} was copied"
    assert isinstance(params.embed, Tensor)
    params.embed.zero_()  # copy-on-write: the file must not follow
    assert (tmp_path / FILE).read_bytes() == before


def test_a_tensor_at_an_odd_address_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "even", "float32")
    write(tmp_path / "odd", "float32")
    want = load(tmp_path / "even").params
    raw = (tmp_path / "even" / FILE).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    write_raw(tmp_path / "odd" / FILE, raw[8:end] + b"   ", raw[end:])
    found = load(tmp_path / "odd").params
    assert equal(found, want)
    assert all(t.data_ptr() % t.element_size() == 0 for t in tensors(found))


# Packed


def test_quark_bytes_are_kept(tmp_path: Path) -> None:
    write(tmp_path, "quark-mxfp4")
    random = torch.Generator().manual_seed(3)
    fresh: Tensors = {}

    def randomise(stored: Tensors) -> None:
        for name, tensor in stored.items():
            if tensor.dtype == torch.uint8:
                high = 250 if name.endswith("_scale") else 256
                fresh[name] = torch.randint(0, high, tensor.shape, generator=random).to(torch.uint8)
        stored.update(fresh)

    edit_tensors(tmp_path, randomise)
    values = named(load(tmp_path).params)
    gate_up, down = values[GATE_UP], values[DOWN]
    assert isinstance(gate_up, MXFP4)
    assert isinstance(down, MXFP4)
    assert len(fresh) == 2 * E * 3 * 2
    for e in range(E):
        for suffix, stacked in ((".weight", gate_up.codes), (".weight_scale", gate_up.scales)):
            assert torch.equal(stacked[e, :F], fresh[f"{EXPERTS}{e}.gate_proj{suffix}"])
            assert torch.equal(stacked[e, F:], fresh[f"{EXPERTS}{e}.up_proj{suffix}"])
        assert torch.equal(down.codes[e], fresh[f"{EXPERTS}{e}.down_proj.weight"])
        assert torch.equal(down.scales[e], fresh[f"{EXPERTS}{e}.down_proj.weight_scale"])
    assert isinstance(values["layers.0.mlp.experts.down"], Tensor)


def test_stacked_nvfp4_keeps_gate_and_up_factors_apart(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4")
    name = f"{EXPERTS}gate_up_proj"
    edit_tensors(tmp_path, lambda t: t[f"{name}_weight_scale_2"].copy_(torch.tensor([[0.5, 2.0]] * E)))
    raw = load_file(tmp_path / FILE)
    found = named(load(tmp_path).params)
    gate_up, down = found[GATE_UP], found[DOWN]
    assert isinstance(gate_up, NVFP4)
    assert isinstance(down, NVFP4)
    assert torch.equal(gate_up.codes, raw[name])
    assert torch.equal(raw_bytes(gate_up.scales), raw_bytes(raw[f"{name}_weight_scale"]))
    assert gate_up.global_scale.tolist() == [[0.5, 2.0]] * E
    assert down.global_scale.shape == (E, 1)
    assert torch.equal(down.global_scale[:, 0], raw[f"{EXPERTS}down_proj_weight_scale_2"])


Convention = Callable[[str, Tensor], Tensors]


def _modelopt(name: str, w: Tensor) -> Tensors:
    q = quantise_nvfp4(w)
    names = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
    return dict(zip([name + n for n in names], [q.codes, q.scales, q.global_scale[0], torch.tensor(7.0)], strict=True))


def _compressed_nvfp4(name: str, w: Tensor) -> Tensors:
    q = quantise_nvfp4(w)
    names = (".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale")
    divisor = q.global_scale.reciprocal()
    return dict(zip([name + n for n in names], [q.codes, q.scales, divisor, torch.tensor([7.0])], strict=True))


def _quark(name: str, w: Tensor) -> Tensors:
    q = quantise_mxfp4(w)
    return {f"{name}.weight": q.codes, f"{name}.weight_scale": q.scales}


def _compressed_mxfp4(name: str, w: Tensor) -> Tensors:
    q = quantise_mxfp4(w)
    return {f"{name}.weight_packed": q.codes, f"{name}.weight_scale": q.scales}


@pytest.mark.parametrize(
    ("convention", "quantise", "ulps"),
    [
        (_quark, quantise_mxfp4, 0),
        (_compressed_mxfp4, quantise_mxfp4, 0),
        (_modelopt, quantise_nvfp4, 0),
        (_compressed_nvfp4, quantise_nvfp4, 2),  # the reciprocal of a rounded reciprocal, then one rounded product
    ],
)
def test_conventions_give_the_same_floats(
    tmp_path: Path, convention: Convention, quantise: Callable[[Tensor], Weight], ulps: int
) -> None:
    """One weight in each convention, gate and up differing by a factor of 4."""
    write(tmp_path, "float32")
    plain = load_file(tmp_path / FILE)
    gate_up = plain[f"{EXPERTS}gate_up_proj"]
    gate_up[:, :F] *= 4

    def convert(stored: Tensors) -> None:
        stored[f"{EXPERTS}gate_up_proj"] = gate_up
        unstack(stored, 1)
        for name in [n for n in stored if n.startswith(EXPERTS) and n.endswith("_proj.weight")]:
            stored.update(convention(name.removesuffix(".weight"), stored.pop(name)))

    edit_tensors(tmp_path, convert)
    found = named(load(tmp_path).params)
    want = torch.stack([torch.cat([dequantise(quantise(m), torch.float32) for m in one.chunk(2)]) for one in gate_up])
    got = dequantise(found[GATE_UP], torch.float32)
    assert ((got - want).abs() <= ulps * torch.finfo(torch.float32).eps * want.abs()).all()
    assert (want != 0).any()
    down = [dequantise(quantise(one), torch.float32) for one in plain[f"{EXPERTS}down_proj"]]
    torch.testing.assert_close(dequantise(found[DOWN], torch.float32), torch.stack(down), rtol=3e-7, atol=0)


def test_a_layer_may_have_its_own_format(tmp_path: Path) -> None:
    write(tmp_path / "quark", "quark-mxfp4")
    write(tmp_path / "nvfp4", "nvfp4")
    nvfp4 = load_file(tmp_path / "nvfp4" / FILE)
    at = "model.language_model.layers.2.mlp.experts."

    def swap(stored: Tensors) -> None:
        for name in [n for n in stored if n.startswith(at)]:
            del stored[name]
        stored.update({n: t for n, t in nvfp4.items() if n.startswith(at)})

    edit_tensors(tmp_path / "quark", swap)
    edit_json(tmp_path / "quark", lambda c: c.pop("quantization_config"))
    found = named(load(tmp_path / "quark").params)
    kinds = [type(found[f"layers.{i}.mlp.experts.down"]) for i in range(4)]
    assert kinds == [Tensor, MXFP4, NVFP4, Tensor]


def test_experts_are_packed_while_reading(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    want = quantise_experts(load(tmp_path, dtype=None).params, TINY)
    found = load(tmp_path, dtype=None, quantize="mxfp4").params
    assert equal(found, want)
    kinds = [type(named(found)[f"layers.{i}.mlp.experts.gate_up"]) for i in range(4)]
    assert kinds == [Tensor, MXFP4, MXFP4, Tensor]
    one = named(load(tmp_path, dtype=None).params)[GATE_UP]
    assert isinstance(one, Tensor)
    assert equal(named(found)[GATE_UP], quantise_mxfp4(one))
    with pytest.raises(ValueError, match="quantize is 'int8'"):
        load(tmp_path, quantize="int8")


def test_packing_while_reading_names_what_it_cannot_pack(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    edit_tensors(tmp_path, lambda t: t[f"{EXPERTS}down_proj"][2].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj: .* not finite"):
        load(tmp_path, quantize="mxfp4")
    narrow = Config.from_json({**TINY.to_json(), "moe_intermediate_size": 24})
    write(tmp_path / "narrow", "bf16", narrow)
    with pytest.raises(ValueError, match=r"multiple of 32 inputs: layers\.\*\.mlp\.experts\.down has 24"):
        load(tmp_path / "narrow", quantize="mxfp4")
    assert load(tmp_path / "narrow").config == narrow


# Folders


def test_the_index_decides_which_files_count(tmp_path: Path) -> None:
    write(tmp_path, "bf16", shard_bytes=20_000)
    want = read_params(open_checkpoint(tmp_path))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    save_file({"model.language_model.norm.weight": torch.zeros(TINY.hidden_size)}, tmp_path / "old.safetensors")
    (tmp_path / FILE).write_bytes(b"not a checkpoint")
    assert equal(read_params(open_checkpoint(tmp_path)), want)


def test_one_file_with_its_config_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    want = load(tmp_path).params
    (tmp_path / FILE).rename(tmp_path / "weights.safetensors")
    assert equal(load(tmp_path / "weights.safetensors").params, want)
    config = Config.from_json(tmp_path)
    (tmp_path / "config.json").unlink()
    assert equal(read_params(open_checkpoint(tmp_path / "weights.safetensors", config), torch.float32), want)


def test_links_of_the_download_cache_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", "bf16", shard_bytes=20_000)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, file in enumerate(sorted((tmp_path / "real").iterdir())):
        file.rename(blobs / str(n))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(n))
    assert load(snapshot).config == TINY


def test_towers_and_leftovers_are_skipped_and_named(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    extra = [
        "model.vision_tower.ln_pre.weight",
        "model.vision_adapter.fc1.weight",
        "model.vision_projection.weight",
        "model.audio_tower.norm.weight",
        "model.language_model.rotary_emb.inv_freq",
        "model.language_model.layers.1.mlp.num_tokens_per_expert",
        "model.language_model.layers.1.mlp.norm_weight",
        "model.language_model.embed_norm.weight",
        "model.language_model.layers.1.self_attn.k_scale",
    ]
    edit_tensors(tmp_path, lambda t: t.update({name: torch.ones(2) for name in extra}))
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.skipped) == sorted(extra)
    assert equal(read_params(checkpoint), load(write(tmp_path / "again", "bf16"), dtype=None).params)


def test_a_tied_head_may_be_absent_or_equal(tmp_path: Path) -> None:
    tied = Config.from_json({**TINY.to_json(), "tie_word_embeddings": True})
    write(tmp_path, "bf16", tied)
    assert load(tmp_path).params.head == ()
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        load(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop("lm_head.weight"))
    assert load(tmp_path).params.head == ()


# What is told, and what is read


def test_progress_counts_stored_bytes(tmp_path: Path) -> None:
    write(tmp_path, "quark-mxfp4")
    seen: list[tuple[int, int, str]] = []
    load(tmp_path, progress=lambda done, total, what: seen.append((done, total, what)))
    checkpoint = open_checkpoint(tmp_path)
    assert [what for _, _, what in seen] == [plan.leaf.path for plan in checkpoint.plans]
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == seen[-1][1] == checkpoint.bytes == sum(t.size for t in checkpoint.stored.values())


def test_a_slice_of_a_stored_tensor_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4")
    stored = open_checkpoint(tmp_path).stored[f"{EXPERTS}down_proj"]
    with open_files() as read:
        whole, part = read(stored, ()), read(stored, (slice(1, 3), slice(8, 16), slice(0, 4)))
        assert torch.equal(part, whole[1:3, 8:16, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_saved_by_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = oracle.build(0, mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"])
    folder = oracle.save(model, tmp_path, dtype)
    theirs = oracle.reopen(folder, dtype).state_dict()
    checkpoint = open_checkpoint(folder)
    ours = named(load(folder, dtype=None).params)
    assert len(ours) == len(checkpoint.plans) == len([n for n in theirs if n.startswith(("model.language", "lm_head"))])
    for plan in checkpoint.plans:
        tensor = ours[plan.leaf.path]
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == theirs[plan.leaf.name].dtype
        assert torch.equal(tensor, theirs[plan.leaf.name])
    towers = [name for name in theirs if "vision" in name or "audio" in name]
    assert len(checkpoint.skipped) == len(towers) > 20


def test_a_bad_config_is_named(tmp_path: Path) -> None:
    write(tmp_path, "bf16")
    edit_json(tmp_path, lambda c: c["text_config"].update(num_hidden_layers=0))
    with pytest.raises(ValueError, match=r"layers is 0") as error:
        load(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load(write(tmp_path, "bf16")).tokenizer is None


def test_params_of_the_tests_differ_everywhere() -> None:
    values = [t for t in tensors(params_of(TINY)) if t.numel() > 1]
    assert len({t.flatten()[0].item() for t in values}) == len(values)
    assert all(t.unique().numel() > 1 for t in values)


def test_index_lists_every_tensor_once(tmp_path: Path) -> None:
    write(tmp_path, "bf16", shard_bytes=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    checkpoint = open_checkpoint(tmp_path)
    assert index["weight_map"] == {name: tensor.file.name for name, tensor in checkpoint.stored.items()}
