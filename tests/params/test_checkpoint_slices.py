"""A rank reads its slices and nothing else, whatever the format: the same bits as cutting what one rank reads."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.load import load, share_of
from muse_fn.params.checkpoint import CheckpointError, open_checkpoint, planned_bytes
from muse_fn.params.config import Config
from muse_fn.params.formats import FORMATS, Format
from muse_fn.params.read import Progress, read_params
from muse_fn.params.schema import Leaf, leaves, sparse_layers
from muse_fn.params.slicing import Part, Range, Share, everything, take
from muse_fn.params.tree import Params, from_named, named, tensors
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.split import shard, unshard
from tests.models import SEEDS
from tests.stored_as import label, watched, write_as
from tests.tiny_checkpoint import EXPERTS, FILE, LAYER, TINY, edit_tensors, equal, write

# Layers 1 and 2 are packed; a stage of two has one of them. A quarter of the width is one block of 32.
CONFIG = replace(TINY, heads=8, experts=8, expert_size=128, mlp_layer_types=("sparse", "sparse", "sparse", "dense"))
MESHES = [
    Mesh(1, 2),
    Mesh(2, 1),
    Mesh(2, 2),
    Mesh(2, 4),
    Mesh(4, 2),
    Mesh(8, 1),
    Mesh(1, 2, pp=2),
    Mesh(2, 2, squeeze="split"),
]
EIGHT = Mesh(2, 4)
GATE_UP, DOWN = "layers.1.mlp.experts.gate_up", "layers.1.mlp.experts.down"


@pytest.fixture(scope="module", params=FORMATS, ids=label)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one of the formats."""
    form: Format = request.param
    return write_as(tmp_path_factory.mktemp(label(form)), form, CONFIG)


def views(mesh: Mesh) -> Iterator[Mesh]:
    return (mesh.at(rank) for rank in range(mesh.ranks))


def in_file(tensor: Tensor, file: Path) -> bool:
    """Whether this memory is the mapped file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return any(low <= tensor.data_ptr() < high for low, high in ranges)


# The same bits


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_reads_what_cutting_the_whole_would_give(folder: Path, mesh: Mesh) -> None:
    whole = load(folder, dtype=None).params
    found = [load(folder, dtype=None, mesh=view).params for view in views(mesh)]
    for view, params in zip(views(mesh), found, strict=True):
        assert equal(params, shard(whole, CONFIG, view)), f"{view.rank=}"
    assert equal(unshard(found, CONFIG, mesh), whole)


def test_the_formats_of_the_table_are_really_different(folder: Path) -> None:
    """Otherwise the test above would read plain tensors seven times."""
    form = next(plan.format for plan in open_checkpoint(folder).plans if plan.leaf.path == DOWN)
    assert label(form) in str(folder)
    down = named(load(folder, dtype=None, mesh=EIGHT.at(3)).params)[DOWN]
    assert len(tensors(down)) == {"plain": 1, "mxfp4": 2, "nvfp4": 3}[form.node]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Config, Mesh]:
    """A mesh and a config that fits it."""
    ep, tp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stage, layers = ep * tp, draw(st.integers(pp, 4))
    kv_heads = draw(st.sampled_from([n for n in (1, stage, 2 * stage) if n % stage == 0 or stage % n == 0]))
    config = Config(
        vocab_size=stage * draw(st.integers(1, 3)),
        hidden_size=stage * draw(st.integers(1, 4)),
        intermediate_size=stage * draw(st.integers(1, 3)),
        layers=layers,
        heads=kv_heads * stage,
        kv_heads=kv_heads,
        head_dim=2,
        latent_size=32 * stage,
        expert_size=32 * tp * draw(st.integers(1, 2)),
        experts=ep * draw(st.integers(1, 3)),
        top_k=1,
        window=4,
        max_positions=64,
        tie_word_embeddings=draw(st.booleans()),
        mlp_layer_types=tuple(draw(st.sampled_from(["sparse", "dense"])) for _ in range(layers)),
    )
    return config, Mesh(ep, tp, pp, draw(st.sampled_from(["replicated", "split"])))


@given(layout=layouts(), form=st.sampled_from(FORMATS), seed=SEEDS)
def test_any_layout_of_any_format(layout: tuple[Config, Mesh], form: Format, seed: int) -> None:
    config, mesh = layout
    with TemporaryDirectory() as name:
        path = write_as(Path(name), form, config, seed)
        whole = load(path, dtype=None).params
        found = [load(path, dtype=None, mesh=view).params for view in views(mesh)]
        assert all(equal(p, shard(whole, config, v)) for p, v in zip(found, views(mesh), strict=True))
        assert equal(unshard(found, config, mesh), whole)


@st.composite
def parts(draw: st.DrawFn, leaf: Leaf) -> Part | None:
    """Any part at all, not only those of a mesh: several ranges in each dimension, or nothing."""
    if draw(st.integers(0, 9)) == 0:
        return None

    def ranges(size: int, unit: int) -> tuple[Range, ...]:
        ends = sorted(draw(st.sets(st.integers(0, size // unit), min_size=2, max_size=6)))
        pairs = zip(ends[0::2], ends[1::2], strict=False)
        return tuple((unit * start, unit * stop) for start, stop in pairs)

    units = [1] * (len(leaf.shape) - 1) + [32 if leaf.row.each else 1]
    return tuple(ranges(size, unit) for size, unit in zip(leaf.shape, units, strict=True))


@settings(max_examples=10)
@given(data=st.data())
def test_any_part_of_any_parameter(folder: Path, data: st.DataObject) -> None:
    chosen = {leaf.path: data.draw(parts(leaf)) for leaf in leaves(CONFIG)}
    checkpoint = open_checkpoint(folder)
    share = Share(lambda leaf: chosen[leaf.path], lambda leaf: leaf.path, sparse_layers(CONFIG))
    whole = named(read_params(checkpoint))
    cut = {path: take(whole[path], part) for path, part in chosen.items() if part is not None}
    with pytest.MonkeyPatch.context() as patch, watched(patch) as watch:
        found = read_params(checkpoint, share=share)
    assert equal(found, from_named(sparse_layers(CONFIG), cut))
    assert watch.bytes == planned_bytes(checkpoint, share)


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 2, pp=2)], ids=str)
def test_packing_a_slice_is_the_slice_of_what_is_packed(tmp_path: Path, mesh: Mesh) -> None:
    write(tmp_path, "bf16", CONFIG)
    whole = load(tmp_path, dtype=None, quantize="mxfp4").params
    found = [load(tmp_path, dtype=None, mesh=view, quantize="mxfp4").params for view in views(mesh)]
    assert all(equal(p, shard(whole, CONFIG, v)) for p, v in zip(found, views(mesh), strict=True))
    assert equal(unshard(found, CONFIG, mesh), whole)


def test_one_expert_of_a_wider_dtype_widens_it_on_every_rank(tmp_path: Path) -> None:
    write_as(tmp_path, FORMATS[1], CONFIG)
    name = f"{EXPERTS}6.up_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: t[name].float() + 1e-6}))
    whole = load(tmp_path, dtype=None).params
    for view in views(EIGHT):
        params = load(tmp_path, dtype=None, mesh=view).params
        assert equal(params, shard(whole, CONFIG, view))
        assert tensors(named(params)[GATE_UP])[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_at_odd_addresses_are_copied_to_even_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    write_as(tmp_path / "even", FORMATS[0], CONFIG)
    raw = (tmp_path / "even" / FILE).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text((tmp_path / "even" / "config.json").read_text())
    (tmp_path / "odd" / FILE).write_bytes((end - 8 + 3).to_bytes(8, "little") + raw[8:end] + b"   " + raw[end:])
    for view in views(Mesh(2, 2)):
        found = load(tmp_path / "odd", dtype=dtype, mesh=view).params
        assert equal(found, load(tmp_path / "even", dtype=dtype, mesh=view).params)
        assert all(t.data_ptr() % t.element_size() == 0 for t in tensors(found))


# What is read


def text_tensors(path: Path) -> dict[str, bool]:
    """Every tensor of the text decoder by name, and whether readers use it."""
    checkpoint = open_checkpoint(path)
    used = {piece.stored.name for plan in checkpoint.plans for piece in plan.pieces}
    return {name: name in used for name in checkpoint.stored}


def test_every_byte_is_read_by_some_rank_and_none_twice_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    seen = dict.fromkeys(checkpoint.stored, 0)
    covered = {name: torch.zeros(stored.shape, dtype=torch.bool) for name, stored in checkpoint.stored.items()}
    for view in views(EIGHT):
        with watched(monkeypatch) as watch:
            load(folder, dtype=None, mesh=view)
        planned = planned_bytes(checkpoint, share_of(CONFIG, view))
        assert planned <= watch.bytes <= 1.02 * planned
        assert watch.bytes < checkpoint.bytes / 2
        for name in watch.names():
            times = torch.from_numpy(watch.times(checkpoint.stored[name]))
            assert times.max() == 1, f"{view.rank=} {name=}"
            covered[name] |= times == 1
            seen[name] += 1
    used = text_tensors(folder)
    assert {name for name, mask in covered.items() if bool(mask.all())} == {
        name for name, is_used in used.items() if is_used
    }
    assert not any(bool(covered[name].any()) for name, is_used in used.items() if not is_used)
    replicated = [f"{LAYER}input_layernorm.weight", f"{LAYER}mlp.gate.weight", f"{LAYER}mlp.pre_expert_proj.weight"]
    assert [seen[name] for name in replicated] == [EIGHT.ranks] * 3


def test_some_formats_have_tensors_that_nobody_reads(tmp_path: Path) -> None:
    """Otherwise the test above would say nothing about them."""
    unused = [
        sum(not used for used in text_tensors(write_as(tmp_path / str(n), f, CONFIG)).values())
        for n, f in enumerate(FORMATS)
    ]
    assert unused == [0, 0, 0, 2 * 2, 2 * 8 * 3, 0, 2 * 8 * 3]


def listener() -> tuple[list[tuple[int, int, str]], Progress]:
    """What progress said, and what to give it."""
    told: list[tuple[int, int, str]] = []
    return told, lambda done, total, what: told.append((done, total, what))


def test_what_a_rank_plans_and_tells_is_what_it_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    assert planned_bytes(checkpoint, everything(CONFIG)) == checkpoint.bytes
    for view in (*views(EIGHT), *views(Mesh(1, 2, pp=2))):
        told, tell = listener()
        with watched(monkeypatch) as watch:
            params = load(folder, dtype=None, mesh=view, progress=tell).params
        planned = planned_bytes(checkpoint, share_of(CONFIG, view))
        assert told[-1][:2] == (planned, planned) == (watch.bytes, watch.bytes)
        assert [done for done, _, _ in told] == sorted({done for done, _, _ in told})
        assert sum(t.numel() * t.element_size() for t in tensors(params)) == planned


def test_files_without_a_slice_for_a_rank_stay_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "quark-mxfp4", CONFIG, shard_bytes=20_000)
    checkpoint = open_checkpoint(tmp_path)
    for view in views(Mesh(8, 1)):
        with watched(monkeypatch) as watch:
            load(tmp_path, dtype=None, mesh=view)
        own = f".experts.{view.rank}."
        experts = {name for name in watch.names() if ".experts." in name and ".weight_scale" in name}
        assert experts
        assert all(own in name for name in experts)
        others = {stored.file.name for stored in checkpoint.stored.values()} - watch.files()
        assert len(others) >= 10, "files of other ranks' experts alone"


def test_a_part_that_is_one_stretch_of_the_file_is_mapped(tmp_path: Path) -> None:
    write(tmp_path, "bf16", CONFIG)
    found = named(load(tmp_path, dtype=torch.bfloat16, mesh=EIGHT.at(5)).params)
    cut = ["attn.q", "attn.k", "attn.v", "attn.gate", "attn_norm", "mlp.squeeze", "mlp.experts.norm"]
    for path in [*(f"layers.1.{name}" for name in cut), "embed", "head", "layers.3.mlp.gate"]:
        assert in_file(tensors(found[path])[0], tmp_path / FILE), path
    for path in ("layers.1.attn.o", "layers.1.mlp.experts.down", "layers.1.mlp.experts.gate_up", "layers.3.mlp.down"):
        (tensor,) = tensors(found[path])
        assert not in_file(tensor, tmp_path / FILE), path
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 2, f"{path} keeps more than its part"
    experts = named(load(tmp_path, dtype=torch.bfloat16, mesh=Mesh(8, 1).at(5)).params)[GATE_UP]
    assert in_file(tensors(experts)[0], tmp_path / FILE)


# What is said


def refused_by(path: Path, mesh: Mesh, match: str) -> list[int]:
    """The ranks that refuse, all in these words and no other."""
    said: dict[int, str] = {}
    for view in views(mesh):
        try:
            load(path, mesh=view)
        except CheckpointError as error:
            said[view.rank] = str(error)
    assert all(match in text and text.count("\n") == 1 for text in said.values()), said
    return list(said)


def test_bad_values_are_named_by_the_ranks_that_read_them(tmp_path: Path) -> None:
    write_as(tmp_path / "quark", FORMATS[2], CONFIG)
    name = f"{EXPERTS}5.down_proj.weight_scale"
    edit_tensors(tmp_path / "quark", lambda t: t[name][3, 2].fill_(255))  # the third block: tp index 2, ep index 1
    assert refused_by(tmp_path / "quark", EIGHT, f"{name}: scale byte 255") == [6]
    assert refused_by(tmp_path / "quark", Mesh(1, 2), f"{name}: scale byte 255") == [1]
    write_as(tmp_path / "nvfp4", FORMATS[3], CONFIG)
    name = f"{EXPERTS}gate_up_proj_weight_scale"
    edit_tensors(tmp_path / "nvfp4", lambda t: t[name].view(torch.uint8)[1, 128 + 40, 0].fill_(0x7F))  # up, row 40
    assert refused_by(tmp_path / "nvfp4", EIGHT, f"{name}: holds E4M3 NaN scales") == [1]
    edit_tensors(tmp_path / "nvfp4", lambda t: t[name].view(torch.uint8)[1, 128 + 40, 0].fill_(1))
    name = f"{EXPERTS}gate_up_proj_weight_scale_2"
    edit_tensors(tmp_path / "nvfp4", lambda t: t[name][6, 1].fill_(float("inf")))
    assert refused_by(tmp_path / "nvfp4", EIGHT, f"{name}: holds a scale that is not finite") == [4, 5, 6, 7]


@pytest.mark.parametrize(("mesh", "ranks"), [(EIGHT, [3]), (Mesh(1, 2, pp=2), [2]), (Mesh(1, 2), [0])], ids=str)
def test_a_stored_copy_of_a_tied_head_is_compared_slice_by_slice(tmp_path: Path, mesh: Mesh, ranks: list[int]) -> None:
    """It is read by the ranks that have the head: those of the last stage."""
    tied = Config.from_json({**CONFIG.to_json(), "tie_word_embeddings": True})
    write(tmp_path, "bf16", tied)
    assert refused_by(tmp_path, mesh, "") == []
    whole: Params = load(tmp_path, dtype=None).params
    assert all(equal(load(tmp_path, dtype=None, mesh=v).params, shard(whole, tied, v)) for v in views(mesh))
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"][17].add_(1))  # row 17 of 40
    assert refused_by(tmp_path, mesh, "lm_head.weight: differs from the embedding") == ranks
