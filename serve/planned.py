"""A plan as JSON values and as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from muse_fn.devices import GIB, rates
from muse_fn.floors import WORK, Layer
from muse_fn.plan import GAPS, Floor, Layout, Memory, Plan, Prediction, arithmetic_seconds, bytes_of
from muse_fn.port import Beside
from muse_fn.sharding.mesh import Mesh

Row = Sequence[str]
BUSY = (*WORK, GAPS, "collectives", "host")  # what a step's time is spent on


def report(plan: Plan, layouts: Sequence[Layout], port: Beside | None) -> dict[str, Any]:
    """Everything as JSON values: bytes, seconds, tokens and tokens/s, unless an assumption states its unit."""
    setup = plan.setup
    return {
        "built_with": "Muse Spark Open",
        "mesh": str(setup.mesh),
        "ranks": setup.mesh.ranks,
        "device": plan.device,
        "format": setup.format,
        "kv": setup.kv,
        "context": setup.context,
        "memory": [_memory(stage) for stage in plan.memory],
        "weights": plan.largest.total,
        "tokens_that_fit": plan.fit._asdict(),
        "layer": _floor(plan.layer),
        "decode": [_prediction(step) for step in plan.decode],
        "prefill": _prediction(plan.prefill) if plan.prefill else None,
        "assumptions": [row._asdict() for row in plan.assumptions],
        "notes": list(notes(plan)),
        "compare": [_layout(layout) for layout in layouts] or None,
        "port": {
            "measured": port.measured,
            "predicted": port.prediction.tokens_per_second,
            "reasons": list(port.reasons),
        }
        if port
        else None,
    }


def _memory(stage: Memory) -> dict[str, Any]:
    return {
        "ranks": list(stage.ranks),
        "weights": {**stage.weights, "total": stage.total},
        "kv_per_token": stage.kv.windowed,
        "kv_per_token_unwindowed": stage.kv.unwindowed,
        "kv_of_windows_per_sequence": stage.kv.window,
    }


def _floor(floor: Floor) -> dict[str, Any]:
    return {
        "number": floor.mean.number,
        "matrices": {"mean": floor.mean.matrices, "slowest": floor.slowest.matrices},
        "matrices_total": {"mean": matrices(floor.mean), "slowest": matrices(floor.slowest)},
        "vectors": floor.mean.vectors,
    }


def _prediction(found: Prediction) -> dict[str, Any]:
    return {
        **found.step._asdict(),
        "tokens": found.step.tokens,
        "experts": found.touched._asdict(),
        "mean": {name: work._asdict() for name, work in found.mean.items()},
        "slowest": {name: work._asdict() for name, work in found.slowest.items()},
        "collectives": [row._asdict() for row in found.collectives],
        "seconds": {**found.seconds, "total": found.total},
        "tokens_per_second": found.tokens_per_second,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "mesh": str(layout.mesh),
        "weights": layout.weights,
        "tokens_that_fit": layout.fit._asdict(),
        "layer_matrices": {"mean": matrices(layout.layer.mean), "slowest": matrices(layout.layer.slowest)},
        "decode": {step.step.batch: step.tokens_per_second for step in layout.decode},
        "prefill": layout.prefill.tokens_per_second if layout.prefill else None,
    }


def matrices(layer: Layer) -> float:
    """Bytes of a layer's matrices."""
    return sum(layer.matrices.values())


def show(plan: Plan, layouts: Sequence[Layout], port: Beside | None, console: Console) -> None:
    """Prints the plan as tables."""
    setup = plan.setup
    plural = "s" if setup.mesh.ranks > 1 else ""
    console.print(
        f"mesh {setup.mesh}: {setup.mesh.ranks} rank{plural} on {plan.device}; inner experts in {setup.format}, the "
        f"rest in bf16, routers and residual gates in float32; cache in {setup.kv}"
    )
    for table in (_memory_table(plan), _cache_table(plan), _layer_table(plan)):
        console.print(table)
    steps = {f"batch {step.step.batch}": step for step in plan.decode}
    if plan.prefill:
        steps[f"prefill {plan.prefill.step.new:,}"] = plan.prefill
    console.print(_steps_table(plan, steps))
    if any(step.collectives for step in steps.values()):
        console.print(_collectives_table(steps))
    for table in _layout_tables(layouts) if layouts else []:
        console.print(table)
    rows = [(row.name, f"{row.value:,.6g}", row.unit, row.source) for row in plan.assumptions]
    columns = ("name", "value", "unit", "where it comes from")
    console.print(_grid("assumptions (replace one with --assume name=value)", columns, rows, left=(0, 2, 3)))
    for note in notes(plan):
        console.print(f"- {note}", markup=False)
    if port:
        predicted = port.prediction.tokens_per_second
        console.print(
            f"\nThe public Gaudi 2 port measured {port.measured} tokens/s (batch 1, ep=2,tp=4); predicted for the same "
            f"layout: {predicted:.1f}. Why they differ, as far as its report says:"
        )
        for reason in port.reasons:
            console.print(f"- {reason}", markup=False)
        console.print("This program has never run on a Gaudi.")


def notes(plan: Plan) -> list[str]:
    """What a reader must know to use the numbers."""
    given, fit = rates(plan.assumptions), plan.fit
    over = plan.largest.total + given.reserve - given.memory
    kinds = {step.touched.how for step in plan.decode}
    found = [
        "Floors count each byte once: matrices, touched experts, cached keys and values. Activations, rows written to "
        "the cache and the unpacking of four-bit experts are free here.",
        f"Experts are drawn uniformly. A layer waits for the card with most of them ({'; '.join(sorted(kinds))}); "
        "a trained router is less even.",
        "One rate for all products of a dtype, and one share of it that steps reach, whatever their shape; floors "
        "take the whole rates. Nothing overlaps with a collective.",
        "The cache rounds to blocks: a window takes up to two blocks more than its tokens in every sliding group.",
    ]
    if plan.setup.mesh.pp > 1:
        found.append(
            "Stages work one after another here: no second batch and no pieces of a chunk fill the stages that wait."
        )
    if plan.device == "cpu":
        found.append("The rates of a CPU are guesses: measure your machine and give them with --assume.")
    if over > 0:
        found.append(f"DOES NOT FIT: weights and reserve exceed the memory of a card by {over / GIB:.2f} GiB.")
    most = max((step.step.batch for step in plan.decode), default=0) * plan.setup.context
    if over <= 0 and fit.windowed is not None and most > fit.windowed:
        found.append(f"The largest batch needs {most:,} tokens of cache: more than fit, even with windows.")
    return found


def _memory_table(plan: Plan) -> Table:
    given, stage = rates(plan.assumptions), plan.largest
    rows = [(name, f"{size:,}", _gib(size)) for name, size in stage.weights.items()]
    rows.append(("weights", f"{stage.total:,}", _gib(stage.total)))
    rows.append(("memory", "", _gib(given.memory)))
    rows.append(("reserve", "", _gib(given.reserve)))
    rows.append(("left for the cache", "", _gib(given.memory - given.reserve - stage.total)))
    where = f"rank {stage.ranks[0]}" if len(stage.ranks) == 1 else f"ranks {stage.ranks[0]} to {stage.ranks[-1]}"
    if len(plan.memory) > 1:
        others = ", ".join(_gib(other.total) for other in plan.memory)
        where += f", the fullest stage (all stages: {others} GiB)"
    return _grid(f"memory per card, {where}", ("component", "bytes", "GiB"), rows, bold=("weights",))


def _cache_table(plan: Plan) -> Table:
    kv = max((stage.kv for stage in plan.memory), key=lambda kv: kv.unwindowed)
    rows = [
        ("with windows", f"{kv.windowed:,}", f"{kv.window:,}", tokens(plan.fit.windowed)),
        ("without", f"{kv.unwindowed:,}", "", tokens(plan.fit.unwindowed)),
    ]
    return _grid("cache per card", ("sliding layers", "bytes per token", "bytes per sequence", "tokens that fit"), rows)


def tokens(count: int | None) -> str:
    """A number of tokens; None is no bound."""
    return "no bound" if count is None else f"{count:,}"


def _layer_table(plan: Plan) -> Table:
    floor = plan.layer
    rows = [(name, _mega(size), _mega(floor.slowest.matrices[name])) for name, size in floor.mean.matrices.items()]
    rows.append(("matrices", _mega(matrices(floor.mean)), _mega(matrices(floor.slowest))))
    small = f"{floor.mean.vectors / 1e6:.2f}"
    rows.append(("small vectors, not in the sum", small, small))
    title = f"MB that layer {floor.mean.number} reads on one card at batch 1"
    return _grid(title, ("component", "mean card", "slowest card"), rows, bold=("matrices",))


def _steps_table(plan: Plan, steps: Mapping[str, Prediction]) -> Table:
    given, found = rates(plan.assumptions), list(steps.values())
    spent = [name for name in BUSY if any(name in step.seconds for step in found)]
    lines = {
        "experts, mean": [f"{x.touched.mean:.2f}" for x in found],
        "experts, slowest": [f"{x.touched.slowest:.2f}" for x in found],
        "GB, mean card": [f"{bytes_of(x.mean) / 1e9:.2f}" for x in found],
        "GB, slowest card": [f"{bytes_of(x.slowest) / 1e9:.2f}" for x in found],
        "byte floor, ms": [_milli(bytes_of(x.slowest) / given.bandwidth) for x in found],
        "compute floor, ms": [
            _milli(sum(arithmetic_seconds(work, given) for work in x.slowest.values())) for x in found
        ],
        **{f" {name}": [_milli(x.seconds.get(name, 0)) for x in found] for name in spent},
        "predicted, ms": [_milli(x.total) for x in found],
        "tokens/s each": [f"{x.tokens_per_second / x.step.batch:,.1f}" for x in found],
        "tokens/s": [f"{x.tokens_per_second:,.1f}" for x in found],
    }
    rows = [(name, *values) for name, values in lines.items()]
    several = ": the fullest stage, but ms predicted of all stages" if plan.setup.mesh.pp > 1 else ""
    title = f"a step at context {plan.setup.context:,} on one card{several}; predicted ms by component"
    return _grid(title, ("", *steps), rows, bold=("predicted, ms", "tokens/s"))


def _collectives_table(steps: Mapping[str, Prediction]) -> Table:
    found = [step.collectives for step in steps.values()]
    kinds = {(kind.name, kind.times): None for each in found for kind in each}  # long steps have others
    rows = [
        (kind[0], str(kind[1]), *(next((_mega(x.bytes, 3) for x in each if x[:2] == kind), "") for each in found))
        for kind in kinds
    ]
    totals = dict.fromkeys(str(sum(kind.times for kind in each)) for each in found)
    rows.append(("together", " or ".join(totals), *(_mega(sum(x.times * x.bytes for x in e), 3) for e in found)))
    title = "collectives of a step, and MB that one rank sends in each"
    return _grid(title, ("", "times", *steps), rows, bold=("together",))


def _layout_tables(layouts: Sequence[Layout]) -> Iterator[Table]:
    held = [(*_name(x.mesh), _gib(x.weights), tokens(x.fit.windowed), tokens(x.fit.unwindowed)) for x in layouts]
    columns = ("mesh", "squeeze", "weights, GiB", "KV tokens that fit", "without windows")
    yield _grid("layouts: memory per card", columns, held, left=(0, 1))
    speeds = [
        (
            *_name(x.mesh),
            *(_mega(matrices(layer)) for layer in x.layer),
            *(f"{step.tokens_per_second:,.1f}" for step in x.decode),
            *([f"{x.prefill.tokens_per_second:,.0f}"] if x.prefill else []),
        )
        for x in layouts
    ]
    columns = ["mesh", "squeeze", "MB, mean", "slowest", *(f"batch {step.step.batch}" for step in layouts[0].decode)]
    columns += ["prefill"] if layouts[0].prefill else []
    title = f"layouts: MB layer {layouts[0].layer.mean.number} reads at batch 1, and predicted tokens/s"
    yield _grid(title, columns, speeds, left=(0, 1))


def _name(mesh: Mesh) -> tuple[str, str]:
    return str(replace(mesh, squeeze="replicated")), mesh.squeeze


def _grid(
    title: str, columns: Row, rows: Sequence[Row], *, bold: Sequence[str] = (), left: Sequence[int] = (0,)
) -> Table:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in bold else None)
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _mega(size: float, digits: int = 1) -> str:
    return f"{size / 1e6:,.{digits if size >= 1e6 else 3}f}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
