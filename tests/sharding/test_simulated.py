"""Collectives by axis name on simulated ranks: what they mean, that the order of axes counts, and how they fail."""

import pytest
import torch
from torch import Tensor

from muse_fn.sharding.collectives import broadcast, gather, hand_on, join, psum, psum_scatter, stacked, swapped
from muse_fn.sharding.mesh import AXES, Axes, Mesh, MeshError
from muse_fn.sharding.simulated import SequenceError, simulate

CUBE = Mesh(ep=2, tp=3, pp=2)
SUBSETS: list[Axes] = [("pp",), ("ep",), ("tp",), ("ep", "tp"), ("pp", "tp"), AXES, ()]


def value(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


@pytest.mark.parametrize("axes", SUBSETS, ids=str)
def test_collectives_mean_what_they_say(axes: Axes) -> None:
    groups = [CUBE.at(rank).peers(axes) for rank in range(CUBE.ranks)]
    for rank, found in enumerate(simulate(CUBE, lambda m: psum(value(m.rank), m, axes))):
        assert torch.equal(found, torch.stack([value(peer) for peer in groups[rank]]).sum(0))
    for rank, found in enumerate(simulate(CUBE, lambda m: gather(value(m.rank), m, axes))):
        assert torch.equal(found, torch.cat([value(peer) for peer in groups[rank]], -1))
    for rank, found in enumerate(simulate(CUBE, lambda m: gather(value(m.rank), m, axes, 0))):
        assert torch.equal(found, torch.cat([value(peer) for peer in groups[rank]], 0))
    for rank, found in enumerate(simulate(CUBE, lambda m: stacked(value(m.rank), m, axes))):
        assert torch.equal(found, torch.stack([value(peer) for peer in groups[rank]]))
    for rank, found in enumerate(simulate(CUBE, lambda m: broadcast(value(m.rank), m, axes, m.size(axes) - 1))):
        assert torch.equal(found, value(groups[rank][-1]))


@pytest.mark.parametrize("axes", SUBSETS, ids=str)
def test_a_scattered_sum_is_this_rank_s_rows_of_the_sum(axes: Axes) -> None:
    """With the same bits, numbers whose sum depends on its order among them."""

    def both(m: Mesh) -> tuple[Tensor, Tensor]:
        x = torch.randn(24, 2, generator=torch.Generator().manual_seed(m.rank))
        return psum_scatter(x, m, axes), psum(x, m, axes)

    for rank, (part, total) in enumerate(simulate(CUBE, both)):
        each = 24 // CUBE.size(axes)
        start = each * CUBE.at(rank).index(axes)
        assert torch.equal(part, total[start : start + each])


@pytest.mark.parametrize("axes", SUBSETS, ids=str)
def test_a_swap_gives_this_rank_s_rows_of_each(axes: Axes) -> None:
    def both(m: Mesh) -> tuple[Tensor, Tensor]:
        x = torch.randn(24, 2, generator=torch.Generator().manual_seed(m.rank))
        return swapped(x, m, axes), stacked(x, m, axes)

    for rank, (part, every) in enumerate(simulate(CUBE, both)):
        each = 24 // CUBE.size(axes)
        start = each * CUBE.at(rank).index(axes)
        assert torch.equal(part, every[:, start : start + each])


def test_rows_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="unflatten"):
        simulate(Mesh(tp=3), lambda m: psum_scatter(value(m.rank), m, ("tp",)))


def test_stages_hand_on_to_the_next() -> None:
    def run(m: Mesh) -> Tensor | None:
        x = value(m.rank)
        return hand_on(None if m.is_last else x, m, None if m.is_first else x)

    found = simulate(CUBE, run)
    assert found[:6] == [None] * 6
    for rank in range(6, 12):
        assert torch.equal(torch.as_tensor(found[rank]), value(rank - 6))


def test_no_rank_can_change_what_another_got() -> None:
    def run(m: Mesh) -> list[Tensor]:
        mine = torch.ones(3)
        got = [psum(mine, m, ("tp",)), stacked(mine, m, ("tp",)), broadcast(mine, m, ("tp",), 0)]
        for x in got:
            x += m.rank
        return [mine, *got]

    for rank, (mine, total, each, first) in enumerate(simulate(Mesh(tp=3), run)):
        assert torch.equal(mine, torch.ones(3))
        assert torch.equal(total, torch.full((3,), 3.0 + rank))
        assert torch.equal(each, torch.full((3, 3), 1.0 + rank))
        assert torch.equal(first, torch.full((3,), 1.0 + rank))


def test_what_a_rank_gave_is_its_own_again_after_the_call() -> None:
    """No reader may see what the giver writes into its tensor afterwards."""

    def call(step: int, x: Tensor, m: Mesh) -> Tensor:
        if step % 3 == 0:
            return psum(x, m, ("tp",))
        return stacked(x, m, ("tp",)).sum(0) if step % 3 == 1 else broadcast(x, m, ("tp",), 3)

    def run(m: Mesh) -> list[Tensor]:
        found: list[Tensor] = []
        for step in range(150):
            mine = torch.full((20_000,), float(m.rank))
            found.append(call(step, mine, m))
            mine.fill_(torch.nan)
        return found

    for found in simulate(Mesh(tp=4), run):
        for step, x in enumerate(found):
            assert torch.equal(x, torch.full_like(x, [6.0, 6.0, 3.0][step % 3])), step


def test_the_callers_modes_are_the_ranks_modes() -> None:
    def modes(m: Mesh) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert simulate(Mesh(tp=2), modes) == [(True, False)] * 2
    with torch.no_grad():
        assert simulate(Mesh(tp=2), modes) == [(False, False)] * 2
    with torch.inference_mode():
        assert simulate(Mesh(tp=2), modes) == [(False, True)] * 2


def test_the_first_cause_is_raised_and_nobody_waits_for_ever() -> None:
    def run(m: Mesh) -> Tensor:
        for step in range(5):
            if m.rank == 5 and step == 3:
                raise KeyError("the cause")
            psum(value(m.rank), m, ("ep", "tp"))
        return hand_on(None if m.is_last else value(0), m, None if m.is_first else value(0)) or value(0)

    with pytest.raises(KeyError, match="the cause") as raised:
        simulate(CUBE, run)
    assert raised.value.__notes__ == ["on rank 5 of mesh pp=2,ep=2,tp=3"]


@pytest.mark.parametrize("kind", ["shape", "dtype", "call"])
def test_ranks_that_do_different_things_are_an_error(kind: str) -> None:
    def run(m: Mesh) -> Tensor:
        x = value(0)
        if m.rank == 1:
            x = {"shape": x[:1], "dtype": x.double(), "call": x}[kind]
            return stacked(x, m, ("tp",)) if kind == "call" else psum(x, m, ("tp",))
        return psum(x, m, ("tp",))

    with pytest.raises(SequenceError, match=r"different calls: .*all_sum of torch.float32 \[2, 3\]"):
        simulate(Mesh(tp=2), run)


def test_a_mesh_that_only_describes_cannot_talk() -> None:
    x = value(0)
    assert psum(x, Mesh(), AXES) is x
    assert gather(x, Mesh(2, 2), ("pp",)) is x
    with pytest.raises(MeshError, match=r"ep=2,tp=1 has 2 ranks.*join\(mesh\).*simulate\(mesh, fn\)"):
        psum(x, Mesh(2), ("ep",))


def test_joining_needs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MeshError, match="start 2 processes with torchrun"):
        join(Mesh(tp=2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match="mesh ep=1,tp=2 has 2 ranks, and 4 processes were started"):
        join(Mesh(tp=2))


def test_a_stage_that_gets_another_shape_is_an_error() -> None:
    def run(m: Mesh) -> None:
        hand_on(None if m.is_last else value(0)[:1], m, None if m.is_first else value(0))

    with pytest.raises(SequenceError, match=r"rank 1 expects torch.float32 \[2, 3\] from rank 0, got .*\[1, 3\]"):
        simulate(Mesh(pp=2), run)
