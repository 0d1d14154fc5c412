"""The benchmark of several cards, as processes over the loopback interface, at sizes that say nothing about speed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).parent.parent.parent / "bench"
SIZES = "--tiny --layers 3 --batches 1 2 --context 256 512 --chunk 256".split()
PATIENCE = 300  # seconds until a run that hangs is ended
OTHERS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import cards
right = cards.greedy_captured

def wrong(model, mesh):
    found = right(model, mesh)
    found[2][-1] ^= mesh.rank  # of rank 1 alone
    return found

cards.greedy_captured = wrong
cards.main()
"""
SECONDS = st.floats(1e-6, 10.0)


def run(ranks: int, *args: str, program: Path = BENCH / "cards.py") -> subprocess.CompletedProcess[str]:
    """The benchmark under torchrun."""
    together = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *together, "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(program), *args], capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment
    )


def cells_of(text: str, name: str) -> list[list[str]]:
    """The cells of all lines of this name, without it."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in cells[1:]] for cells in lines]


def numbers(cell: str) -> list[float]:
    """What a cell says in numbers."""
    return [float(word.replace(",", "")) for word in re.findall(r"-?[\d,]*\d(?:\.\d+)?", cell)]


def test_two_ranks_measure_every_layout(tmp_path: Path) -> None:
    done = run(2, *SIZES, "--layouts", "ep=2", "ep=2,tp=2", "--save", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.count("# 2 cards as one mesh") == 1, "one rank prints"
    assert "left out: ep=2,tp=2." in text
    meshes = ["ep=2,tp=1,squeeze=split", "ep=2,tp=1"]
    for mesh in meshes:
        assert f"- {mesh}, eager, experts packed: equal on all 2 ranks, 4 prompts, 24 tokens each" in text
        assert f"- {mesh}, captured, experts packed: equal on all 2 ranks, 4 prompts, 24 tokens each" in text
        assert f"## {mesh}, 3 layers" in text
    held = [numbers(line) for line in text.splitlines() if line.startswith("Parameters of a card")]
    assert len(held) == len(meshes)
    assert all(least == most == planned for least, most, planned in held)
    assert held[0] < held[1], "split squeeze and expand take less"

    names = [f"decode, batch {b}, context {c}" for b, c in ((1, 256), (2, 256), (1, 512))]
    for name in [*names, "prefill of 256 tokens"]:
        rows = cells_of(text, name)
        assert len(rows) == len(meshes)
        for cells in rows:
            (ms,), (alone,), (lost, _) = map(numbers, (cells[0], cells[2], cells[3]))
            assert ms > 0
            assert lost == pytest.approx(ms - alone, abs=2e-3)
    for cells in cells_of(text, names[0]):
        mean, slowest, planned = numbers(cells[5])
        assert mean == 2.0, "a token takes 4 experts, of both ranks together, if these agree about it"
        assert 2.0 <= slowest <= 4.0
        assert 2.0 <= planned <= 4.0

    (kept,), (drawing,) = tmp_path.glob("*-cards.md"), tmp_path.glob("*-cards.svg")
    assert kept.read_text().startswith(text.rstrip("\n"))
    assert drawing.name in kept.read_text()
    drawn = [x.tag.rpartition("}")[2] for x in ElementTree.fromstring(drawing.read_text()).iter()]
    assert drawn.count("rect") == 1 + 3 + 3 * len(meshes) * (len(names) + 1), "ground, legend, parts of bars"


def test_what_does_not_fit_is_told_and_left_out() -> None:
    """By count: the plan keeps 1 GiB of a CPU's memory for everything else."""
    done = run(2, *SIZES, "--squeeze", "split", "--layouts", "tp=2", "--memory", "1.0041")
    assert done.returncode == 0, done.stderr
    (one,), (two,) = (cells_of(done.stdout, f"decode, batch {n}, context 256") for n in (1, 2))
    assert numbers(one[0])[0] > 0
    assert numbers(one[5]) == [4.0, 4.0, 4.0], "each rank has its part of every expert"
    told = "does not fit: 0.003 GiB of parameters + 0.001 GiB of cache + 1.000 GiB of margin"
    assert two[0] == f"{told} are more than the 1.004 GiB of a card"
    done = run(1, *SIZES, "--squeeze", "split", "--layouts", "tp=1", "--memory", "0.5")
    assert done.returncode == 0, done.stderr
    assert "Not measured, it does not fit: " in done.stdout
    assert "| step |" not in done.stdout


def test_other_tokens_than_those_of_one_rank_end_the_run(tmp_path: Path) -> None:
    program = tmp_path / "others.py"
    program.write_text(OTHERS)
    kept = ("--save", "--folder", str(tmp_path))
    done = run(2, str(BENCH), *SIZES, "--squeeze", "split", "--layouts", "ep=2", *kept, program=program)
    assert done.returncode == 1
    assert [*tmp_path.iterdir()] == [program]
    assert "- ep=2,tp=1,squeeze=split, eager, experts packed: equal on all 2 ranks" in done.stdout
    assert "- ep=2,tp=1,squeeze=split, captured, experts packed: DIFFERENT, prompts on each rank: [0, 1]" in done.stdout
    assert "| step |" not in done.stdout


def test_it_wants_torchrun() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(BENCH / "cards.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)
    assert done.returncode == 1
    assert "start this benchmark with torchrun" in done.stderr


def loaded(name: str) -> Any:
    """A file of the benchmarks, which are no package."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REPORT: Any = loaded("cards_report")


@given(floor=SECONDS, more=SECONDS, lost=SECONDS)
def test_the_parts_of_a_bar_are_the_whole_time(floor: float, more: float, lost: float) -> None:
    line = REPORT.Line("", 1, floor + more + lost, floor + more, floor, None, None, None)
    assert REPORT.parts_of(line) == pytest.approx((floor, lost, more), rel=1e-6, abs=1e-9)


@given(seconds=SECONDS, alone=SECONDS, floor=SECONDS)
def test_noise_makes_no_part_negative(seconds: float, alone: float, floor: float) -> None:
    parts = REPORT.parts_of(REPORT.Line("", 1, seconds, alone, floor, None, None, None))
    assert min(parts) >= 0
    assert sum(parts) >= seconds - 1e-9


@given(st.tuples(*[st.integers(0, 2**40)] * 4))
def test_what_fits_is_a_matter_of_sums(sizes: tuple[int, ...]) -> None:
    room = REPORT.NoRoom("x", *sizes)
    assert room.is_true == (sum(sizes[:3]) > sizes[3])
    assert REPORT.row(room).count("|") == REPORT.heading().partition("\n")[0].count("|")
