"""Predictions are their formula, better devices are faster, and the figures of the released model are known."""

from dataclasses import replace
from math import isclose, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.devices import DEVICES, GIB, POSITIVE, SHARES, assumptions, rates
from muse_fn.floors import Step, decode_step, prefill_step
from muse_fn.footprint import (
    blocks_of,
)
from muse_fn.plan import GAPS, Plan, Setup, bytes_of, compare, plan, predict
from muse_fn.port import applies, beside
from muse_fn.sharding.mesh import STAGE, Mesh, MeshError, parse_mesh
from muse_fn.sharding.rules import problems_of_mesh
from tests.planned import MODEL, RELEASED, meshes

GAUDI = assumptions("gaudi2", 8)


def gaudi(mesh: str, **changes: float) -> Plan:
    setup = Setup(RELEASED, parse_mesh(mesh))
    return plan(setup, "gaudi2", assumptions("gaudi2", setup.mesh.ranks, changes))


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.sampled_from([decode_step(16, 2048), prefill_step(4096, 0)]))
@settings(deadline=None, max_examples=20)
def test_a_prediction_is_its_formula(read: float, product: float, step: Step) -> None:
    changes = {"host_us": 50, "read_share": read, "product_share": product, "layer_us": 7}
    setup, given = Setup(RELEASED, Mesh(2, 4, squeeze="split")), rates(gaudi("ep=2,tp=4", **changes).assumptions)
    found = predict(setup, step, given)
    for name, work in found.slowest.items():
        compute = work.flops / (432e12 * product) + work.float32_flops / 54e12
        assert found.seconds[name] == pytest.approx(max(work.bytes / (2e12 * read), compute))
    assert found.seconds[GAPS] == pytest.approx(62 * 7e-6)
    times = sum(row.times for row in found.collectives)
    sent = sum(row.times * row.bytes for row in found.collectives)
    assert times == (1 + 4 * 62 + 2 if step.new == 1 else 1 + 8 * 62 + 1 + 2), "a prompt is divided by tokens"
    assert found.seconds["collectives"] == pytest.approx(times * 16e-6 + sent / 262.5e9)
    assert found.seconds["host"] == pytest.approx(50e-6)
    assert found.total == pytest.approx(sum(found.seconds.values()))
    assert found.tokens_per_second == pytest.approx(step.tokens / found.total)


@given(meshes(), st.sampled_from(POSITIVE), st.integers(1, 20))
@settings(deadline=None)
def test_a_better_device_is_never_slower(mesh: Mesh, name: str, batch: int) -> None:
    setup, step = Setup(MODEL, mesh, context=9), decode_step(batch, 9)
    rows = assumptions("h200", mesh.ranks)
    doubled = 2 * next(row.value for row in rows if row.name == name)
    better = assumptions("h200", mesh.ranks, {name: min(1.0, doubled) if name in SHARES else doubled})
    assert predict(setup, step, rates(better)).total <= predict(setup, step, rates(rows)).total


def test_stages_take_turns() -> None:
    """The components of a pipeline take as long as those of one stage; what is sent comes on top."""
    one, four = (
        predict(Setup(RELEASED, Mesh(2, 4, pp)), decode_step(4, 2048), rates(assumptions("h200", 8 * pp)))
        for pp in (1, 4)
    )
    for name in ("attention", "experts", "head", "router", GAPS):
        assert one.seconds[name] == pytest.approx(four.seconds[name])
    assert four.seconds["collectives"] > one.seconds["collectives"]


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_assumption_has_a_unit_and_a_source_and_can_be_replaced(device: str) -> None:
    rows = assumptions(device, 2, ram=8 * GIB)
    assert len({row.name for row in rows}) == len(rows) == len(rates(rows))
    assert all(row.unit and len(row.source) > 8 for row in rows)
    given = {row.name: row.value / 2 if row.name in SHARES else row.value + 1 for row in rows}
    changed = assumptions(device, 2, given, ram=8 * GIB)
    assert {row.name: row.value for row in changed} == given
    assert all(
        row.source.startswith("given") and old.source in row.source for old, row in zip(rows, changed, strict=True)
    )
    before, after = rates(rows), rates(changed)
    assert all(a != b for a, b in zip(before, after, strict=True)), "each one reaches the arithmetic"
    assert (before.memory == 4 * GIB) == (device == "cpu"), "the ranks of a CPU share its memory"


@pytest.mark.parametrize("device", ["gaudi2", "cpu"])
def test_where_no_step_was_fitted_the_record_says_so(device: str) -> None:
    """Full rates and no gaps, and what the H200 showed beside them."""
    shown = {row.name: row.value for row in assumptions("h200")}
    rows = {row.name: row for row in assumptions(device, ram=8 * GIB)}
    assert {name: rows[name].value for name in (*SHARES, "layer_us")} == {**dict.fromkeys(SHARES, 1.0), "layer_us": 0}
    for name in (*SHARES, "layer_us"):
        assert rows[name].source.startswith("fitted on no measured step")
        assert f"{shown[name]:g}" in rows[name].source
        assert shown[name] != rows[name].value


def test_bad_assumptions_are_all_named() -> None:
    with pytest.raises(ValueError, match="device is 'tpu': must be one of gaudi2, h200, cpu"):
        assumptions("tpu")
    changes = {"warp": 9.0, "network_gb_s": 0.0, "host_us": -1.0, "collective_us": float("nan"), "read_share": 1.01}
    changes["product_share"] = 0.0
    with pytest.raises(ValueError, match="'warp'") as found:
        assumptions("h200", 1, changes)
    assert [name for name in changes if name not in str(found.value)] == []
    assert "reserve_gib" in str(found.value)
    assert "read_share is 1.01: must be a number above 0 and at most 1" in str(found.value)
    assert "product_share is 0.0: must be a number above 0 and at most 1" in str(found.value)
    assert "host_us is -1.0: must be a number of at least 0;" in str(found.value)


@pytest.mark.parametrize(
    ("mesh", "gib", "floor"), [("ep=2,tp=4", 65.97, 223.9), ("ep=2,tp=4,squeeze=split", 59.19, 106.4)]
)
def test_the_released_model_on_eight_gaudi2(mesh: str, gib: float, floor: float) -> None:
    found = gaudi(mesh)
    (stage,) = found.memory
    assert (stage.kv.windowed, stage.kv.unwindowed) == (8_192, 31_744)
    assert round(stage.total / GIB, 2) == gib
    assert round(sum(found.layer.mean.matrices.values()) / 1e6, 1) == floor
    assert found.layer.mean.vectors == 2 * (3 * 8192 + 2 * 4096) + 4 * (2 * 8192 + 256)  # 0.13 MB, apart
    assert found.decode[0].touched.mean == 4
    assert found.layer.mean.matrices["router"] == 4 * 256 * 8192
    assert [step.step.batch for step in found.decode] == [1, 4, 16, 64]
    assert found.prefill is not None
    assert found.prefill.step == prefill_step(4096, 2048) == Step(1, 4096, 2048)


def test_the_public_measurement_is_beside_the_same_layout_whatever_was_asked() -> None:
    found = beside(Setup(RELEASED, Mesh(1, 8, squeeze="split")), GAUDI)
    assert found.measured == 39.7
    assert found.prediction == gaudi("ep=2,tp=4").decode[0]
    assert applies(replace(RELEASED, pad_token_id=200_018), "gaudi2", "quark-mxfp4")
    assert not applies(RELEASED, "h200", "quark-mxfp4")
    assert not applies(RELEASED, "gaudi2", "nvfp4")
    assert not applies(MODEL, "gaudi2", "quark-mxfp4")


def test_a_comparison_has_every_layout_that_fits() -> None:
    found = compare(Setup(RELEASED, Mesh(2, 4)), GAUDI)
    assert {(x.mesh.ep, x.mesh.tp, x.mesh.squeeze) for x in found} == {
        (ep, 8 // ep, squeeze) for ep in (1, 2, 4, 8) for squeeze in ("replicated", "split")
    }
    speeds = {str(x.mesh): x.decode[0].tokens_per_second for x in found}
    assert speeds["ep=8,tp=1"] < speeds["ep=2,tp=4"] < speeds["ep=1,tp=8"], "the fewer groups, the less waiting"
    for layout in found:
        one = plan(Setup(RELEASED, layout.mesh), "gaudi2", GAUDI, (1, 16))
        assert (layout.weights, layout.fit, layout.decode) == (one.largest.total, one.fit, one.decode)
    narrow = replace(MODEL, expert_size=64)  # a block of 32 fits twice, not four times
    meshes = {x.mesh.tp for x in compare(Setup(narrow, Mesh(4, 1), context=9), GAUDI)}
    assert meshes == {1, 2}


@pytest.mark.parametrize(("format", "block"), [("quark-mxfp4", 32), ("nvfp4", 16)])
def test_a_mesh_that_cuts_a_block_of_scales_is_refused(format: str, block: int) -> None:
    config = replace(MODEL, expert_size=2 * block)
    Setup(config, Mesh(1, 2), format, context=9)
    with pytest.raises(MeshError, match=f"cut a block of {block}"):
        Setup(config, Mesh(1, 4), format, context=9)
    assert not problems_of_mesh(config, Mesh(1, 4), blocks_of(config, "bf16"))
    with pytest.raises(ValueError, match=f"multiple of {block}"):
        Setup(replace(MODEL, latent_size=block + 8), Mesh(), format, context=9)


def test_what_cannot_be_planned_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"format is 'int4'.*kv is 'int8'.*context is 0"):
        Setup(MODEL, Mesh(), "int4", "int8", 0)
    with pytest.raises(ValueError, match=r"batch is 0.*chunk is 600: must be 0 to 503"):
        plan(Setup(MODEL, context=9), "cpu", assumptions("cpu"), (0, 1), 600)
    assert plan(Setup(MODEL, context=512), "cpu", assumptions("cpu")).prefill is None


@given(meshes(), st.integers(1, 30))
@settings(deadline=None)
def test_the_layer_s_floor_is_the_whole_step_s(mesh: Mesh, context: int) -> None:
    """Layers alike: a step reads them, the head, the cache and a row of the embedding, and nothing else."""
    config = replace(MODEL, mlp_layer_types=("sparse",) * 5)
    mesh = replace(mesh, pp=1)
    found = plan(Setup(config, mesh, "bf16", context=context), "cpu", assumptions("cpu"), (1,), 0)
    (step,) = found.decode
    layer = sum(found.layer.slowest.matrices.values()) + found.layer.slowest.vectors
    outside = step.slowest["head"].bytes + step.slowest["cache"].bytes + step.slowest["embedding"].bytes
    final_norm = 2 * config.hidden_size
    assert isclose(bytes_of(step.slowest), 5 * layer + outside + final_norm)
    assert prod((config.vocab_size, config.hidden_size, 2)) == step.slowest["head"].bytes * mesh.size(STAGE)
