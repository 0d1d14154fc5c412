"""Random parameters: of the shapes of a checkpoint's shares, the same wherever ranks hold the same, of the size that
the config says; and what cannot be made is said before anything is."""

import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.decoder import forward
from muse_fn.kernels.packed import MXFP4, Weight, dequantise
from muse_fn.load import free_memory, load, load_random, open_random
from muse_fn.params.checkpoint import CheckpointError
from muse_fn.params.config import Config, ConfigError
from muse_fn.params.init import init_params
from muse_fn.params.quantise import is_packable
from muse_fn.params.schema import Leaf, leaves
from muse_fn.params.tree import map_tensors, named, tensors
from muse_fn.random_weights import bytes_made, random_params
from muse_fn.sharding.mesh import Mesh, MeshError
from muse_fn.sharding.rules import holds
from muse_fn.sharding.split import local_path, part_of, shard
from tests.models import MORE_MESHES, SEEDS, fitting_configs
from tests.tiny_checkpoint import TINY, equal, write

NANO = Path(__file__).parent.parent.parent / "muse_fn" / "nano"
WIDE = replace(TINY, vocab_size=64, heads=8, experts=8, expert_size=128)
LAYOUTS = (Mesh(), Mesh(2, 2), Mesh(1, 4), Mesh(8, 1), Mesh(2, 2, squeeze="split"), Mesh(1, 2, pp=2))
MESHES = st.sampled_from(MORE_MESHES)


def nothing(leaf: Leaf) -> bool:
    return False


def everything(leaf: Leaf) -> bool:
    return bool(leaf.row.each)


def kinds(tree: object) -> dict[str, list[Any]]:
    """Of each parameter: what node it is, and of its tensors shape, dtype and device."""
    return {path: [type(w), *((t.shape, t.dtype, t.device) for t in tensors(w))] for path, w in named(tree).items()}


def written(folder: Path, config: Config, tokenizer: bool = False) -> Path:
    """A folder with a config, a file of weights that is none, and a tokenizer if asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    if tokenizer:
        shutil.copy(NANO / "tokenizer.json", folder)
    return folder


@settings(deadline=None)
@given(st.data())
def test_shares_have_the_shapes_of_a_whole_trees_shares(data: st.DataObject) -> None:
    layout = data.draw(MESHES)
    config = data.draw(fitting_configs(layout))
    mesh = layout.at(data.draw(st.integers(0, layout.ranks - 1)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    made = random_params(config, mesh, is_packed=nothing, dtype=dtype)
    assert kinds(made) == kinds(shard(init_params(config, dtype=dtype), config, mesh))
    assert sum(t.nbytes for t in tensors(made)) == bytes_made(config, mesh, is_packed=nothing, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("form", "packed"), [("quark-mxfp4", True), ("bf16", False)])
def test_it_is_like_what_is_loaded(tmp_path: Path, layout: Mesh, form: str, packed: bool) -> None:
    write(tmp_path, form, WIDE)
    for rank in range(layout.ranks):
        mesh = layout.at(rank)
        made, read = load_random(tmp_path, mesh=mesh, packed=packed), load(tmp_path, dtype=None, mesh=mesh)
        assert kinds(made.params) == kinds(read.params)
        assert (made.config, made.tokenizer) == (WIDE, None)
    assert any(isinstance(w, MXFP4) for w in named(load_random(tmp_path, packed=packed).params).values()) == packed


@settings(deadline=None)
@given(st.sampled_from(LAYOUTS), st.data())
def test_ranks_agree_exactly_where_they_hold_the_same(layout: Mesh, data: st.DataObject) -> None:
    one, two = (layout.at(data.draw(st.integers(0, layout.ranks - 1))) for _ in "ab")
    packed = partial(is_packable, config=WIDE)
    first, second = (named(random_params(WIDE, mesh, is_packed=packed)) for mesh in (one, two))
    for leaf in leaves(WIDE):
        if not (holds(leaf, WIDE, one) and holds(leaf, WIDE, two)):
            continue
        ours, theirs = (
            tree[local_path(leaf.path, leaf.layer, WIDE, mesh)] for tree, mesh in ((first, one), (second, two))
        )
        is_same = part_of(leaf, WIDE, one) == part_of(leaf, WIDE, two)
        assert equal((ours,), (theirs,)) == (is_same or leaf.row.init != "normal"), leaf.path


@settings(deadline=None)
@given(SEEDS, SEEDS)
def test_values_are_a_function_of_the_seed(one: int, two: int) -> None:
    first, second = (random_params(WIDE, is_packed=everything, seed=seed) for seed in (one, two))
    assert equal(first, random_params(WIDE, is_packed=everything, seed=one))
    assert equal(first, second) == (one == two)


def exact(weight: Weight) -> torch.Tensor:
    return dequantise(weight, torch.float32).double()


@settings(deadline=None, max_examples=20)
@given(st.floats(1e-4, 10.0), SEEDS)
def test_values_have_the_size_that_the_config_says(deviation: float, seed: int) -> None:
    config = replace(WIDE, initializer_range=deviation)
    values = named(random_params(config, is_packed=everything, seed=seed))
    seen = set[type]()
    for leaf in leaves(config):
        weight = exact(values[leaf.path])
        if leaf.row.init != "normal":
            assert torch.equal(weight, torch.full_like(weight, float(leaf.row.init == "ones")))
        elif leaf.size >= 1 << 14:  # the deviation of a deviation is then below 0.8 %
            seen.add(type(values[leaf.path]))
            assert weight.std().item() == pytest.approx(deviation, rel=0.05)
            assert abs(weight.mean().item()) < 0.05 * deviation
    assert MXFP4 in seen


def test_progress_counts_the_bytes_that_are_held() -> None:
    told = list[tuple[int, int, str]]()
    mesh, packed = Mesh(2, 2).at(3), partial(is_packable, config=WIDE)

    def note(done: int, total: int, what: str) -> None:
        told.append((done, total, what))

    made = random_params(WIDE, mesh, is_packed=packed, progress=note)
    total = sum(t.nbytes for t in tensors(made))
    assert [entry[2] for entry in told] == [leaf.path for leaf in leaves(WIDE)]
    assert [entry[0] for entry in told] == sorted({entry[0] for entry in told})
    assert {entry[1] for entry in told} == {told[-1][0]} == {total} == {bytes_made(WIDE, mesh, is_packed=packed)}


def test_a_random_model_has_finite_logits() -> None:
    params = random_params(WIDE, is_packed=partial(is_packable, config=WIDE))
    logits = forward(params, torch.arange(24).view(2, 12), WIDE)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
    half = map_tensors(lambda t: t.float() if t.dtype == torch.bfloat16 else t, params)
    assert torch.isfinite(forward(half, torch.arange(24).view(2, 12), WIDE)).all()


@pytest.mark.parametrize("deviation", [0.0, -0.02, 1e-40, 1e40])
def test_a_size_that_nothing_can_have(deviation: float) -> None:
    with pytest.raises(ValueError, match=r"^initializer_range is \S+: random weights need 1e-30 to 1e\+30$"):
        random_params(replace(WIDE, initializer_range=deviation), is_packed=nothing)


def test_blocks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.down has 16 inputs on a rank: .* multiple of 32"):
        random_params(WIDE, Mesh(tp=8), is_packed=everything)


# From the folder


def test_nothing_but_config_and_tokenizer_is_read(tmp_path: Path) -> None:
    config = replace(WIDE, vocab_size=2048)
    model = load_random(written(tmp_path, config, tokenizer=True), dtype=torch.float32)
    assert model.config == config
    assert model.tokenizer is not None
    assert len(model.tokenizer) < config.vocab_size
    assert {t.dtype for t in tensors(model.params)} == {torch.float32, torch.uint8}
    assert {t.dtype for t in tensors(load_random(tmp_path, dtype=None).params)} == {
        torch.bfloat16,
        torch.float32,
        torch.uint8,
    }
    assert equal(
        open_random(tmp_path).params, load_random(tmp_path).params._replace(embed=(), layers=(), norm=(), head=())
    )


def test_a_folder_that_load_refuses_is_refused_alike(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text('{"num_hidden_layers": 0}')
    (empty := tmp_path / "empty").mkdir()
    for path, kind, told in (
        (tmp_path / "none", CheckpointError, "no such folder"),
        (file, CheckpointError, "not a folder"),
        (empty, ConfigError, "cannot be read"),
        (broken, ConfigError, "layers is 0: must be a whole number from 1"),
    ):
        with pytest.raises(kind, match=told) as ours:
            load_random(path)
        if path != file:
            with pytest.raises(kind) as theirs:
                load(path)
            assert str(ours.value) == str(theirs.value)


def test_widths_that_cannot_be_packed_or_parted(tmp_path: Path) -> None:
    narrow = written(tmp_path / "narrow", replace(WIDE, expert_size=48))
    with pytest.raises(ValueError, match=r"mxfp4 needs a multiple of 32 inputs: layers.*down has 48 inputs"):
        load_random(narrow)
    load_random(narrow, packed=False)
    wide = written(tmp_path / "wide", WIDE)
    with pytest.raises(MeshError, match=r"tp is 8: 16 inputs of layers\.1\.mlp\.experts\.down"):
        load_random(wide, mesh=Mesh(tp=8))
    load_random(wide, mesh=Mesh(tp=8), packed=False)
    with pytest.raises(MeshError, match="ep is 3: experts is 8"):
        load_random(wide, mesh=Mesh(ep=3), packed=False)


def test_more_than_the_device_has_is_refused_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_made(WIDE, is_packed=partial(is_packable, config=WIDE))
    free = [needed - 1]

    def known(device: torch.device) -> int:
        return free[0]

    monkeypatch.setattr(sys.modules[load.__module__], "free_memory", known)
    with pytest.raises(ValueError, match=r"the parameters of a rank take 0\.00 GiB: cpu has 0\.00 GiB free"):
        load_random(written(tmp_path, WIDE))
    free[0] = needed
    assert sum(t.nbytes for t in tensors(load_random(tmp_path).params)) == needed


def test_what_a_cpu_has_to_give_is_known_on_linux() -> None:
    found = free_memory(torch.device("cpu"))
    assert found is None or 0 < found < math.inf
    assert free_memory(torch.device("meta")) is None
