"""Loading on a mesh, from the front door: one rank's slice at full width, sizes that do not fit, other devices."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muse_fn.load import blocks_of, load, share_of
from muse_fn.params.checkpoint import CheckpointError, open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.formats import FORMATS
from muse_fn.params.matching import matrices_of
from muse_fn.params.quantise import is_packable
from muse_fn.params.safetensors_header import header_bytes, read_header
from muse_fn.params.schema import leaves
from muse_fn.params.tree import named, tensors
from muse_fn.sharding.mesh import Mesh, MeshError
from tests.stored_as import label, unread, write_as
from tests.tiny_checkpoint import FILE, TINY, Tensors, edit_tensors, equal, write

WIDE = replace(TINY, heads=8, experts=8, expert_size=64)
QUARK = FORMATS[2]


def test_one_rank_is_the_mesh_of_one(tmp_path: Path) -> None:
    write(tmp_path, "bf16", WIDE)
    assert equal(load(tmp_path, mesh=Mesh()).params, load(tmp_path).params)


def test_a_rank_keeps_the_config_of_the_whole_model(tmp_path: Path) -> None:
    write(tmp_path, "bf16", WIDE)
    for mesh in (Mesh(2, 4).at(3), Mesh(pp=2).at(1)):
        model = load(tmp_path, mesh=mesh)
        assert model.config == WIDE
        assert len(model.params.layers) == WIDE.layers // mesh.pp


def test_a_stage_has_only_its_layers(tmp_path: Path) -> None:
    write(tmp_path, "quark-mxfp4", WIDE)
    whole = load(tmp_path).params
    first, last = (load(tmp_path, mesh=Mesh(pp=2).at(rank)).params for rank in (0, 1))
    assert equal(first.layers, whole.layers[:2])
    assert equal(last.layers, whole.layers[2:])
    assert (first.norm, first.head, last.embed) == ((), (), ())
    packed = [len(tensors(layer.mlp)) > len(tensors(whole.layers[0].mlp)) for layer in (*first.layers, *last.layers)]
    assert packed == [False, True, True, False], "counted by the model's layers, not by the stage's"
    made = load(write(tmp_path / "plain", "bf16", WIDE), mesh=Mesh(pp=2).at(1), quantize="mxfp4").params
    assert [len(tensors(layer.mlp)) for layer in made.layers] == [len(tensors(layer.mlp)) for layer in last.layers]


# What does not fit is said before anything is read


@pytest.mark.parametrize("form", FORMATS, ids=label)
@pytest.mark.parametrize("ep", [3, 5])
def test_experts_that_do_not_divide(tmp_path: Path, form: Any, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_as(tmp_path, form, WIDE)
    with unread(monkeypatch), pytest.raises(MeshError, match=rf"ep is {ep}: experts is 8, so ep must be 1, 2, 4 or 8"):
        load(tmp_path, mesh=Mesh(ep=ep))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("width", [48, 40])
def test_an_expert_width_that_blocks_do_not_divide(
    tmp_path: Path, width: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed already, the last block short; or to be packed while loading."""
    config = replace(WIDE, expert_size=width)
    write(tmp_path / "plain", "bf16", config)
    need = rf"mxfp4 needs a multiple of 32 inputs: layers\.\*\.mlp\.experts\.down has {width} inputs"
    with unread(monkeypatch), pytest.raises(ValueError, match=need):
        load(tmp_path / "plain", mesh=Mesh(tp=tp), quantize="mxfp4")
    load(tmp_path / "plain", mesh=Mesh(tp=tp))
    write_as(tmp_path / "packed", QUARK, WIDE)

    def narrow(stored: Tensors) -> None:
        for name, tensor in stored.items():
            rows, columns = (tensor.shape[0], tensor.shape[-1]) if tensor.dtype == torch.uint8 else (0, 0)
            if "down_proj.weight" in name and rows:
                stored[name] = tensor[:, : 2 if "scale" in name else width // 2]
            elif rows:
                stored[name] = tensor[:width, :columns]

    edit_tensors(tmp_path / "packed", narrow)
    (tmp_path / "packed" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    need = rf"down_proj.*blocks of 32 inputs, and layers\.1\.mlp\.experts\.down has {width}, no multiple of that"
    with unread(monkeypatch), pytest.raises(CheckpointError, match=need):
        load(tmp_path / "packed", mesh=Mesh(tp=tp))


@pytest.mark.parametrize("form", FORMATS, ids=label)
def test_a_slice_that_would_cut_a_block(tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 inputs on 4 ranks are 16 each: half a block of 32, one of 16, and no matter if plain."""
    write_as(tmp_path, form, WIDE)
    assert set(blocks_of(open_checkpoint(tmp_path)).values()) == ({form.block} if form.node != "plain" else set())
    need = r"tp is 4: 16 inputs of layers\.1\.mlp\.experts\.down on each rank cut a block of 32.*tp must be 1 or 2"
    load(tmp_path, mesh=Mesh(tp=2))
    if form.block == 32:
        with unread(monkeypatch), pytest.raises(MeshError, match=need):
            load(tmp_path, mesh=Mesh(tp=4).at(3))
    else:
        load(tmp_path, mesh=Mesh(tp=4).at(3))
    if form.node == "plain":
        with unread(monkeypatch), pytest.raises(MeshError, match=need):
            load(tmp_path, mesh=Mesh(tp=4), quantize="mxfp4")


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "quark-mxfp4", WIDE)
    with unread(monkeypatch), pytest.raises(MeshError) as error:
        load(tmp_path, mesh=Mesh(ep=3, tp=4))
    for word in ("ep is 3: experts is 8", "ep*tp is 12: vocab is 40", "heads is 8", "cut a block of 32"):
        assert word in str(error.value)


# Another device


@contextmanager
def largest_on_the_host(path: Path) -> Generator[list[int]]:
    """Bytes of every tensor made in host memory that is no view of the mapped file."""
    sizes = [0]

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor) and t.device.type == "cpu"}
            if isinstance(out, Tensor) and out.device.type == "cpu" and out.untyped_storage().data_ptr() not in known:
                maps = [line.split()[0].split("-") for line in _maps() if str(path) in line]
                if not any(int(low, 16) <= out.data_ptr() < int(high, 16) for low, high in maps):
                    sizes.append(out.untyped_storage().nbytes())
            return out

    with Note():
        yield sizes


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


@pytest.mark.parametrize("form", [f for f in FORMATS if f.node == "plain"], ids=label)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 2).at(3)], ids=str)
def test_another_device_takes_one_slice_at_a_time(tmp_path: Path, form: Any, mesh: Mesh) -> None:
    """On "meta" nothing is copied, so that whatever was made on the host is seen."""
    write_as(tmp_path, form, WIDE)
    share = share_of(WIDE, mesh)
    slices = [
        one.bytes
        for plan in open_checkpoint(tmp_path).plans
        if (part := share.part(plan.leaf)) is not None
        for one in plan.slices("values", part)
    ]
    with largest_on_the_host(tmp_path) as sizes:
        params = load(tmp_path, "meta", dtype=torch.float32, mesh=mesh).params
    assert {t.device.type for t in tensors(params)} == {"meta"}
    assert max(sizes) <= max(slices)
    assert {p: t.shape for p, t in _plain(params)} == {p: t.shape for p, t in _plain(load(tmp_path, mesh=mesh).params)}


def _plain(params: object) -> list[tuple[str, Tensor]]:
    return [(path, weight) for path, weight in named(params).items() if isinstance(weight, Tensor)]


# One rank of eight at full width

FULL = Config(
    vocab_size=256,
    hidden_size=8192,
    intermediate_size=64,
    layers=3,
    heads=128,
    kv_heads=16,
    head_dim=64,
    latent_size=4096,
    expert_size=4096,
    experts=256,
    mlp_layer_types=("dense", "sparse", "dense"),
    eos_token_id=(2,),
    bos_token_id=1,
)
EDGES = (0, 1023, 1024, 2047, 2048, 4095)  # rows of gate and up: rank 1 of 4 has 1024..2047
CODES = (0, 511, 512, 1023, 1024, 2047)  # bytes of a row of down: rank 1 of 4 has 512..1023
SCALES = (0, 31, 32, 63, 64, 127)  # scales of a row of down: rank 1 of 4 has 32..63
RANK = 5  # of (2, 4): experts 128..255, the second quarter of the width
LIMIT = 4 * 2**30

PROGRAM = """
import json, resource, sys, torch
from muse_fn import Mesh, load
found = load(sys.argv[1], dtype=None, mesh=Mesh(ep=2, tp=4).at(int(sys.argv[2]))).params.layers[1].mlp.experts
held = {}
for name, node in (("gate_up", found.gate_up), ("down", found.down)):
    for role, tensor in zip(("codes", "scales"), node):
        at = tensor.nonzero()
        held[f"{name}.{role}"] = [list(tensor.shape), [[*i, tensor[tuple(i)].item()] for i in at.tolist()]]
print(json.dumps({"held": held, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def write_full(folder: Path) -> None:
    """The published sizes in one sparse file, all zeros but for the marks."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for leaf in leaves(FULL):
        if not is_packable(leaf, FULL):
            entries[leaf.name] = ("F32" if leaf.row.dtype == "float32" else "BF16", leaf.shape)
            continue
        for matrix in matrices_of(leaf, "each"):
            rows, columns = matrix.shape
            entries[f"{matrix.base}.weight"] = ("U8", (rows, columns // 2))
            entries[f"{matrix.base}.weight_scale"] = ("U8", (rows, columns // 32))
    header = header_bytes(entries, {})
    (folder / "config.json").write_text(json.dumps(FULL.to_json()))
    size = {"F32": 4, "BF16": 2, "U8": 1}
    with (folder / FILE).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size[d] * torch.Size(shape).numel() for d, shape in entries.values()))


def mark(folder: Path) -> dict[str, list[list[int]]]:
    """Writes bytes 1, 2, 3 … at the edges of slices; returns where RANK must find those that are its own."""
    stored, problems = read_header(folder / FILE)
    assert not problems
    own: dict[str, list[list[int]]] = {"gate_up.codes": [], "gate_up.scales": [], "down.codes": [], "down.scales": []}
    value = 0
    with (folder / FILE).open("r+b") as file:
        for expert in (0, 127, 128, 200, 255):
            for matrix in ("gate", "up", "down"):
                for role, suffix in (("codes", "weight"), ("scales", "weight_scale")):
                    tensor = stored[f"model.language_model.layers.1.mlp.experts.{expert}.{matrix}_proj.{suffix}"]
                    last = tensor.shape[1] - 1
                    columns = CODES if role == "codes" else SCALES
                    edges = [(0, c) for c in columns] if matrix == "down" else [(r, last) for r in EDGES]
                    for (row, column), index in zip(edges, range(6), strict=True):
                        value = value % 250 + 1
                        file.seek(tensor.start + row * tensor.shape[1] + column)
                        file.write(bytes([value]))
                        if expert < 128 or index not in (2, 3):  # the second and third edge lie around its quarter
                            continue
                        if matrix == "down":
                            own[f"down.{role}"].append([expert - 128, 0, column - columns[2], value])
                        else:
                            up = 1024 if matrix == "up" else 0
                            own[f"gate_up.{role}"].append([expert - 128, up + row - 1024, last, value])
    return {name: sorted(places) for name, places in own.items()}


def test_one_rank_of_a_full_width_layer_fits_in_little_memory(tmp_path: Path) -> None:
    """The layer has 6.8 GB of experts; one rank of eight keeps 0.86 GB of them. The peak counts all: the interpreter,
    the tensors, and the pages of the mapped file that were touched, which the system could take back."""
    write_full(tmp_path)
    own = mark(tmp_path)
    file = (tmp_path / FILE).stat()
    assert file.st_size > 7e9
    assert file.st_blocks * 512 < 20e6, "needs a file system with sparse files"
    run = [sys.executable, "-c", PROGRAM, str(tmp_path), str(RANK)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    shapes = {name: shape for name, (shape, _) in said["held"].items()}
    assert shapes == {
        "gate_up.codes": [128, 2048, 2048],
        "gate_up.scales": [128, 2048, 128],
        "down.codes": [128, 4096, 512],
        "down.scales": [128, 4096, 32],
    }
    assert {name: sorted(places) for name, (_, places) in said["held"].items()} == own
    assert all(len(places) >= 6 for places in own.values())
    print(f"peak {said['peak'] / 2**30:.2f} GiB, limit {LIMIT / 2**30:.0f} GiB")
    assert said["peak"] < LIMIT
