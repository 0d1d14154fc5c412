"""Damaged checkpoints: each is refused before any tensor exists, and the message names file and tensor."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from muse_fn.load import load
from muse_fn.params import read
from muse_fn.params.checkpoint import CheckpointError, open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.safetensors_header import header_bytes, read_header
from muse_fn.params.schema import leaves
from tests.damage import DOWN, EMBED, GATE, HEAD, NORM, UP, all_of, config, drop, put
from tests.damaged_checkpoints import CASES, VALUES
from tests.tiny_checkpoint import EXPERTS, FILE, TINY, edit_json, edit_tensors, write


def build(folder: Path, kind: str) -> Path:
    return write(folder, "bf16", shard_bytes=20_000) if kind == "sharded" else write(folder, kind)


@pytest.fixture
def no_tensors(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, any attempt to open a file for its tensors or to allocate one is a failure of the test."""

    def forbid(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a tensor was read or allocated")

    def arm() -> None:
        monkeypatch.setattr(read, "safe_open", forbid)
        for name in ("empty", "zeros", "ones", "full", "tensor", "stack", "cat", "from_numpy", "frombuffer"):
            monkeypatch.setattr(torch, name, forbid)

    return arm


@pytest.mark.parametrize("case", CASES)
def test_damage_is_refused_by_name(tmp_path: Path, case: str, no_tensors: Callable[[], None]) -> None:
    kind, damage, words = CASES[case]
    folder = build(tmp_path / "model", kind)
    damage(folder)
    no_tensors()
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert str(folder) in message.splitlines()[0]
    assert [word for word in words if word not in message] == [], message
    assert len(message.splitlines()) <= 52


def test_the_spy_sees_a_read(tmp_path: Path, no_tensors: Callable[[], None]) -> None:
    folder = build(tmp_path, "quark-mxfp4")
    no_tensors()
    with pytest.raises(AssertionError, match="a tensor was read"):
        load(folder)


@pytest.mark.parametrize("kind", ["bf16", "sharded", "quark-mxfp4", "nvfp4"])
def test_what_the_damage_is_done_to_is_sound(tmp_path: Path, kind: str) -> None:
    assert open_checkpoint(build(tmp_path, kind)).config == TINY


# Values


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, case: str) -> None:
    kind, damage, words = VALUES[case]
    damage(build(tmp_path, kind))
    open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert [word for word in words if word not in str(error.value)] == [], error.value
    assert len(str(error.value).splitlines()) == 2, "only the damaged tensor is named"


def test_large_scales_beside_small_codes_are_read(tmp_path: Path) -> None:
    build(tmp_path, "quark-mxfp4")
    for scale, byte in ((254, 0x3B), (253, 0x5D), (252, 0x77)):  # 1.5 and -1.5; 3 and -3; 6 and 6
        all_of(put(f"{UP}_scale", lambda t, s=scale: t.fill_(s)), put(UP, lambda t, b=byte: t.fill_(b)))(tmp_path)
        assert load(tmp_path).config == TINY


def test_a_divisor_of_zero_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "nvfp4")

    def respell(stored: dict[str, Tensor]) -> None:
        codes, scales = stored.pop(f"{EXPERTS}down_proj"), stored.pop(f"{EXPERTS}down_proj_weight_scale")
        del stored[f"{EXPERTS}down_proj_weight_scale_2"], stored[f"{EXPERTS}down_proj_input_scale"]
        for e in range(TINY.experts):
            stored[f"{EXPERTS}{e}.down_proj.weight_packed"] = codes[e].clone()
            stored[f"{EXPERTS}{e}.down_proj.weight_scale"] = scales[e].clone()
            stored[f"{EXPERTS}{e}.down_proj.weight_global_scale"] = torch.tensor([float(e)])

    edit_tensors(tmp_path, respell)
    for file in ("config.json", "hf_quant_config.json"):
        edit_json(tmp_path, lambda c: c.pop("quantization_config", None), file)
    (tmp_path / "hf_quant_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"0\.down_proj\.weight_global_scale: holds a scale that is not finite"):
        load(tmp_path)


# All at once, and at size


def test_all_problems_are_listed_together(tmp_path: Path) -> None:
    build(tmp_path, "quark-mxfp4")
    all_of(drop(NORM, f"{UP}_scale"), put("stray", torch.clone, HEAD), put(EMBED, lambda t: t[:3]))(tmp_path)
    config(lambda c: c["quantization_config"].update(quant_method="awq"))(tmp_path)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    for word in (NORM, f"{UP}_scale", "stray", EMBED, "awq"):
        assert word in str(error.value)
    build(tmp_path / "values", "quark-mxfp4")
    nan = [put(f"{name}_scale", lambda t: t.fill_(255)) for name in (GATE, UP, DOWN)]
    all_of(*nan)(tmp_path / "values")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "values")
    assert len(str(error.value).splitlines()) == 4


def test_problems_of_several_files_are_listed_together(tmp_path: Path) -> None:
    build(tmp_path, "sharded")
    first, second, third = sorted(tmp_path.glob("*.safetensors"))[:3]
    first.write_bytes(b"")
    second.unlink()
    third.write_bytes(third.read_bytes() + b"x")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert [file.name in str(error.value) for file in (first, second, third)] == [True] * 3


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    save_file({NORM: torch.zeros(TINY.hidden_size)}, tmp_path / FILE)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path, TINY)
    missing = len(list(leaves(TINY))) - 1
    assert str(error.value).splitlines()[-1].strip() == f"… and {missing - 50} more"


def test_names_from_files_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    save_file({"\x1b[2J\n" + "x" * 5000: torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path, Config.from_json({**TINY.to_json(), "num_hidden_layers": 1} | RESET))
    assert "\x1b" not in str(error.value)
    assert "\\x1b[2J\\n" in str(error.value)
    assert len(str(error.value)) < 5000


RESET = {"layer_types": None, "layer_rope_theta": None, "mlp_layer_types": None}


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    build(tmp_path / "model", "bf16")
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.safetensors file"):
        load(tmp_path / "model" / "config.json")


def test_refusing_a_huge_checkpoint_takes_no_memory(tmp_path: Path) -> None:
    """The files are 16 GB of holes; one wrong norm must be found without touching them."""
    big = Config(layers=2, experts=32, vocab_size=10_000, bos_token_id=None, eos_token_id=())
    tensors = {leaf.name: ("F32", leaf.shape) for leaf in leaves(big)}
    tensors[NORM] = ("F32", (1,))
    content = header_bytes(tensors, {})
    size = sum(4 * torch.Size(shape).numel() for _, shape in tensors.values())
    assert size > 12e9
    with (tmp_path / FILE).open("wb") as file:
        file.write(content)
        file.truncate(len(content) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_header(tmp_path / FILE)[1] == []
    with pytest.raises(CheckpointError, match=NORM):
        open_checkpoint(tmp_path, big)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "kilobytes"
