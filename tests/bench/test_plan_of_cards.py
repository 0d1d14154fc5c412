"""The plan against what was measured: every step of the committed reports is within a quarter of its prediction."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from muse_fn.devices import Rates, assumptions, rates
from muse_fn.floors import Step, decode_step, prefill_step
from muse_fn.params.config import Config
from muse_fn.plan import Prediction, Setup, predict
from muse_fn.sharding.mesh import Mesh, parse_mesh

RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"
CARDS, SLICE = RESULTS / "2026-11-30-cards-2.md", RESULTS / "2026-12-01-rank-slice.md"
QUARTER = 1.25  # times as long or as short
WHOLE = Config()
H200 = "h200"


class Measured(NamedTuple):
    """A line of a table."""

    mesh: Mesh
    layers: int
    step: Step
    cells: list[str]

    @property
    def name(self) -> str:
        """For messages of failures."""
        return f"{self.mesh}, {self.cells[0]}"


def number(cell: str, place: int = 0) -> float:
    """What a cell says, without units; `place` chooses among several."""
    return float(re.findall(r"-?[\d,]*\d(?:\.\d+)?", cell)[place].replace(",", ""))


def lines_of(text: str, mesh: Mesh | None = None, layers: int = 62) -> Iterator[Measured]:
    """The steps of a report; what was measured of one mesh stands below a heading with its name."""
    for line in text.splitlines():
        if heading := re.fullmatch(r"## ((?:ep|tp|pp)=\S+), (\d+) layers", line):
            mesh, layers = parse_mesh(heading[1]), int(heading[2])
        elif line.startswith("## "):
            mesh = None
        elif mesh is not None and re.match(r"\| (decode|prefill) *(,|of) ", line):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            sizes = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", cells[0])]
            step = decode_step(*sizes) if line.startswith("| decode") else prefill_step(sizes[0], 0)
            yield Measured(mesh, layers, step, cells)


def given(ranks: int) -> Rates:
    """What the plan assumes."""
    return rates(assumptions(H200, ranks))


@cache
def predicted(mesh: Mesh, layers: int, step: Step) -> Prediction:
    """The plan of a step."""
    config = replace(WHOLE, layers=layers, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    context = step.past + 1 if step.new == 1 else step.new
    return predict(Setup(config, mesh, context=context), step, given(mesh.ranks))


ON_CARDS = [*lines_of(CARDS.read_text())]
TOGETHER = [x for x in ON_CARDS if x.mesh.tp == 2 and x.step.batch == 1]  # no card waits for one that reads more
# A chunk by itself ends when its host has launched it, of which a plan knows nothing.
ON_ONE = [
    line
    for line in lines_of(SLICE.read_text().partition("## ")[0], parse_mesh("ep=2,tp=4,squeeze=split"))
    if not line.cells[0].endswith("by itself")
]


def test_the_reports_are_read_whole() -> None:
    decode, chunk = [decode_step(batch, 2048) for batch in (1, 4, 16, 64)], prefill_step(4096, 0)
    steps = {
        "ep=1,tp=2,squeeze=split": [*decode, chunk],
        "ep=1,tp=2": [*decode, chunk],
        "ep=2,tp=1,squeeze=split": decode,
    }
    assert [(str(line.mesh), line.step) for line in ON_CARDS] == [(m, step) for m in steps for step in steps[m]]
    assert {line.layers for line in ON_CARDS} == {20}
    alone = [*decode, decode_step(1, 131_072), decode_step(1, 1_000_000), chunk, chunk]  # in a row, and captured
    assert [line.step for line in ON_ONE] == alone


@pytest.mark.parametrize("line", ON_CARDS, ids=lambda line: line.name)
def test_a_step_of_two_cards_takes_what_is_planned(line: Measured) -> None:
    plan = predicted(line.mesh, line.layers, line.step)
    assert 1 / QUARTER <= number(line.cells[1]) / (plan.total * 1e3) <= QUARTER


@pytest.mark.parametrize("line", ON_ONE, ids=lambda line: line.name)
def test_a_step_of_one_card_of_eight_takes_what_is_planned(line: Measured) -> None:
    """Without collectives. Its experts were all packed and not those of the slowest card: it has bytes of its own."""
    rate = given(8)
    if line.step.new == 1:
        size = number(line.cells[4]) * 1e9
        seconds = size / (rate.bandwidth * rate.read_share) + line.layers * rate.gaps
    else:
        plan = predicted(line.mesh, line.layers, line.step)
        seconds = plan.total - plan.seconds["collectives"]
    assert 1 / QUARTER <= number(line.cells[1]) / (seconds * 1e3) <= QUARTER


@pytest.mark.parametrize("line", TOGETHER, ids=lambda line: line.name)
def test_collectives_take_what_is_planned(line: Measured) -> None:
    """The small ones of a token and the large ones of a prompt."""
    plan = predicted(line.mesh, line.layers, line.step)
    assert 1 / QUARTER <= number(line.cells[4]) / (plan.seconds["collectives"] * 1e3) <= QUARTER


def test_shares_alone_or_gaps_alone_would_not_do() -> None:
    """Each of these assumptions is needed: without it some line of the reports is further off."""
    without = {"read_share": 1.0, "product_share": 1.0, "layer_us": 0.0}
    config = replace(WHOLE, layers=20, layer_types=(), layer_rope_theta=(), mlp_layer_types=())
    for name, value in without.items():
        rate = rates(assumptions(H200, 2, {name: value}))
        far = [
            number(line.cells[1]) / (predict(Setup(config, line.mesh, context=2048), line.step, rate).total * 1e3)
            for line in ON_CARDS
        ]
        single = [
            number(x.cells[1]) / 1e3 / (number(x.cells[4]) * 1e9 / rate.bandwidth / rate.read_share + 62 * rate.gaps)
            for x in ON_ONE
            if x.step.new == 1
        ]
        assert max(*far, *single) > QUARTER, name


@pytest.mark.parametrize("line", ON_CARDS, ids=lambda line: line.name)
def test_the_report_s_plan_columns_are_the_plan_s(line: Measured) -> None:
    plan = predicted(line.mesh, line.layers, line.step)
    ms, lost, each, whole, off = (line.cells[n] for n in (1, 4, 5, 10, 11))
    collectives, count = plan.seconds["collectives"], sum(row.times for row in plan.collectives)
    assert number(lost, 1) == pytest.approx(collectives * 1e3, abs=6e-4)
    assert number(each, 1) == pytest.approx(collectives / count * 1e6, abs=0.06)
    assert number(whole) == pytest.approx(plan.total * 1e3, abs=6e-4)
    assert number(off) == pytest.approx(number(ms) / (plan.total * 1e3), abs=6e-3)


def test_the_report_s_predictions_for_eight_cards_are_the_plan_s() -> None:
    text = CARDS.read_text().partition("## Eight cards")[2]
    rows = re.findall(r"^\| ((?:ep|tp)=\S+) \|(.*)\|$", text, re.MULTILINE)
    assert [mesh for mesh, _ in rows] == [
        f"{mesh}{squeeze}" for mesh in ("ep=2,tp=4", "ep=1,tp=8", "ep=8,tp=1") for squeeze in (",squeeze=split", "")
    ]
    steps = [*(decode_step(batch, 2048) for batch in (1, 4, 16, 64)), prefill_step(4096, 0)]
    for mesh, cells in rows:
        for step, cell in zip(steps, cells.split("|"), strict=True):
            plan = predicted(parse_mesh(mesh), 62, step)
            ms, speed, share = (number(cell, n) for n in range(3))
            assert ms == pytest.approx(plan.total * 1e3, abs=6e-3)
            assert speed == pytest.approx(plan.tokens_per_second, abs=0.6)
            assert share == pytest.approx(100 * plan.seconds["collectives"] / plan.total, abs=0.6)
