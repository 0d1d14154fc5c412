"""What bench/cards.py says of its measurements: a table of each layout, and a drawing of all."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from muse_fn.plan import Prediction, bytes_of

GIB = 2**30
COLUMNS = (
    "step",
    "ms",
    "tokens/s",
    "ms without collectives",
    "collectives, ms (plan)",
    "us each (plan)",
    "experts read, mean / slowest (plan)",
    "GB (plan)",
    "floor, ms",
    "of the floor",
    "plan, ms",
    "measured / plan",
)
PARTS = (("floor", "#3465a4"), ("collectives", "#f57900"), ("the rest", "#bbbbbb"))
LEFT, WIDTH = 200, 500  # of the bars in the drawing, in pixels


class Experts(NamedTuple):
    """How many of its experts a card read in a layer, on average over layers."""

    mean: float  # over cards
    slowest: float  # of the card that read most in each layer


class Line(NamedTuple):
    """One step, measured. Of times and floors the largest over ranks."""

    name: str
    tokens: int
    seconds: float
    alone: float  # seconds of the same step without communication
    floor: float  # seconds
    bytes: float | None  # that the floor of a decode step reads; None: the floor is of products
    experts: Experts | None
    plan: Prediction


class NoRoom(NamedTuple):
    """A step that was not run, since it does not fit into the memory of a card."""

    name: str
    parameters: int
    cache: int
    margin: float
    memory: float

    @property
    def is_true(self) -> bool:
        """Whether it does not fit."""
        return self.parameters + self.cache + self.margin > self.memory

    def __str__(self) -> str:
        parts = (("parameters", self.parameters), ("cache", self.cache), ("margin", self.margin))
        counted = " + ".join(f"{size / GIB:,.3f} GiB of {name}" for name, size in parts)
        return f"does not fit: {counted} are more than the {self.memory / GIB:,.3f} GiB of a card"


def heading() -> str:
    """The head of a table."""
    return f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def row(line: Line | NoRoom) -> str:
    """A line of the table."""
    if isinstance(line, NoRoom):
        return f"| {line.name} | {line} |{' |' * (len(COLUMNS) - 2)}"
    plan, lost = line.plan, line.seconds - line.alone
    planned, count = plan.seconds.get("collectives", 0.0), sum(kind.times for kind in plan.collectives)
    cells = [
        line.name,
        f"{line.seconds * 1e3:.3f}",
        f"{line.tokens / line.seconds:,.1f}",
        f"{line.alone * 1e3:.3f}",
        f"{lost * 1e3:.3f} ({planned * 1e3:.3f})" if count else "",
        f"{lost / count * 1e6:.1f} ({planned / count * 1e6:.1f})" if count else "",
    ]
    read = line.experts
    cells.append(f"{read.mean:.1f} / {read.slowest:.1f} ({plan.touched.slowest:.1f})" if read else "")
    cells.append("" if line.bytes is None else f"{line.bytes / 1e9:.3f} ({bytes_of(plan.slowest) / 1e9:.3f})")
    cells += [f"{line.floor * 1e3:.3f}", f"{line.seconds / line.floor:.2f} x"]
    cells += [f"{plan.total * 1e3:.3f}", f"{line.seconds / plan.total:.2f}"]
    return f"| {' | '.join(cells)} |"


def parts_of(line: Line) -> tuple[float, float, float]:
    """Seconds of the floor, of the collectives, and the rest; what noise made negative is 0."""
    lost = max(0.0, line.seconds - line.alone)
    return line.floor, lost, max(0.0, line.seconds - line.floor - lost)


def plot(layouts: dict[str, list[Line]]) -> str:
    """An SVG drawing: of each step a group of bars, one for each layout, as long as it took, in parts.

    Groups have scales of their own, as a prompt takes some forty times as long as a token.
    """
    names = dict.fromkeys(line.name for lines in layouts.values() for line in lines)
    drawn, y = [*_legend()], 50
    for name in names:
        group = {layout: line for layout, lines in layouts.items() for line in lines if line.name == name}
        longest = max(sum(parts_of(line)) for line in group.values())
        drawn.append(f'<text x="10" y="{y + 15}" font-weight="bold">{name}</text>')
        y += 24
        for layout, line in group.items():
            drawn += _bar(layout, line, y, WIDTH / longest)
            y += 24
        y += 10
    size = f'width="960" height="{y + 6}" font-family="sans-serif" font-size="13"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *drawn, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for n, (name, colour) in enumerate(PARTS):
        yield f'<rect x="{LEFT + 120 * n}" y="14" width="14" height="14" fill="{colour}"/>'
        yield f'<text x="{LEFT + 20 + 120 * n}" y="26">{name}</text>'
    yield f'<text x="{LEFT + 120 * len(PARTS)}" y="26">milliseconds; each group has a scale of its own</text>'


def _bar(label: str, line: Line, y: int, scale: float) -> Sequence[str]:
    drawn, x = [f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{label}</text>'], float(LEFT)
    for seconds, (_, colour) in zip(parts_of(line), PARTS, strict=True):
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="20" fill="{colour}"/>')
        x += seconds * scale
    parts = " + ".join(f"{seconds * 1e3:.2f}" for seconds in parts_of(line))
    return [*drawn, f'<text x="{x + 8:.1f}" y="{y + 15}">{line.seconds * 1e3:.2f} = {parts}</text>']
