"""Ranks that are processes, over the loopback interface: collectives, the embedded model, and a rank that is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muse_fn.sharding.collectives import join
from muse_fn.sharding.mesh import AXES, ONE, Mesh, MeshError
from muse_fn.sharding.simulated import simulate
from tests import ranks
from tests.models import close


def test_every_collective_over_every_subset_of_the_axes_has_the_bits_of_the_simulated_one(tmp_path: Path) -> None:
    mesh = Mesh(pp=2, ep=2, tp=2)
    expected = simulate(mesh, ranks.collectives)
    assert len(expected[0]) > 100
    for found, wanted in zip(ranks.run(ranks.collectives, mesh, tmp_path), expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            assert x.dtype == wanted[name].dtype, name
            assert torch.equal(x, wanted[name]), name


def test_eight_ranks_answer_as_one(tmp_path: Path) -> None:
    expected = ranks.embedded(ONE)
    first, *others = ranks.run(ranks.embedded, Mesh(ep=2, tp=4), tmp_path)
    close(first["logits"], expected["logits"], 1e-5)
    assert first["greedy"] == expected["greedy"]
    assert first["sampled"] == expected["sampled"] != expected["greedy"]
    assert first["score"][1:] == pytest.approx(expected["score"][1:], rel=1e-5, abs=1e-5)
    for other in others:
        assert torch.equal(other.pop("logits"), first["logits"])
        assert other == {name: value for name, value in first.items() if name != "logits"}


def test_who_misses_a_rank_says_so(tmp_path: Path) -> None:
    first, second, third = ranks.run(ranks.lost, Mesh(ep=3), tmp_path)
    assert "rank 0 lost one of ranks (0, 1, 2)" in first
    assert "rank 1 lost one of ranks (0, 1, 2)" in second
    assert third is None


@pytest.mark.parametrize(
    ("task", "by_sockets"),
    [(ranks.told, True), (ranks.told_from_afar, False), (ranks.told_without_a_folder, False)],
)
def test_what_rank_0_tells_all_hear(
    task: Callable[[Mesh], tuple[list[bytes], bool]], by_sockets: bool, tmp_path: Path
) -> None:
    for heard in ranks.run(task, Mesh(ep=3), tmp_path):
        assert heard == (ranks.TOLD, by_sockets)


def test_a_socket_needs_a_path_that_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (deep := tmp_path / ("deep" * 30)).mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    for heard in ranks.run(ranks.told, Mesh(ep=2), tmp_path):
        assert heard == (ranks.TOLD, False)


def test_who_goes_while_others_tell_or_listen_is_missed(tmp_path: Path) -> None:
    first, _, third = ranks.run(ranks.unheard, Mesh(ep=3), tmp_path)
    assert third is None
    assert "rank 0 lost another rank" in first
    (tmp_path / "silent").mkdir()
    first, *others = ranks.run(ranks.silent, Mesh(ep=3), tmp_path / "silent")
    assert first is None
    assert [other[:18] for other in others] == ["rank 1 lost rank 0", "rank 2 lost rank 0"]


def test_who_hangs_is_missed_though_words_would_fit_into_its_socket(tmp_path: Path) -> None:
    first, _ = ranks.run(ranks.hung, Mesh(ep=2), tmp_path)
    assert first == "rank 0 lost another rank (TimeoutError)"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
def test_who_has_left_has_no_threads_that_would_outlive_the_interpreter(tmp_path: Path) -> None:
    for before, after, said in ranks.run(ranks.left, Mesh(pp=2, ep=2), tmp_path):
        assert before
        assert after == set()
        assert len(said) == 3
        assert all("has left its mesh" in text for text in said)


@pytest.mark.parametrize(
    ("world", "told"), [(None, "RANK and WORLD_SIZE are not set: start 4"), ("3", "3 processes were started")]
)
def test_joining_needs_as_many_processes_as_ranks(
    monkeypatch: pytest.MonkeyPatch, world: str | None, told: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(MeshError, match=told):
        join(Mesh(ep=2, tp=2))


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two': must be a whole number from 1 to 4096"]),
        ({"WORLD_SIZE": "", "RANK": ""}, ["WORLD_SIZE is ''", "RANK is '': must be a whole number from 0 to 4095"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'"]),
        ({"RANK": "2"}, ["RANK is '2': must be a whole number from 0 to 1"]),
        ({"RANK": "-1"}, ["RANK is '-1'"]),
        ({"RANK": "²"}, ["RANK is '²'"]),
        ({"MASTER_PORT": "abc"}, ["MASTER_PORT is 'abc': must be a whole number from 1 to 65535"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT is not set"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT is '70000'"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set: must be the address of rank 0"]),
    ],
)
def test_an_environment_that_cannot_be_true_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], told: list[str]
) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**good, **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(MeshError) as refused:
        join(Mesh(tp=2))
    assert all(text in str(refused.value) for text in told)


def test_the_subsets_are_all_of_them() -> None:
    assert len(set(ranks.SUBSETS)) == 2 ** len(AXES) - 1
