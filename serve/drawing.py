"""A plan as a picture: memory per card and time per step, stacked by component. Needs matplotlib, which is optional."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from muse_fn.devices import GIB, rates
from muse_fn.floors import CACHE
from muse_fn.plan import GAPS, Layout, Plan, Prediction, fit_of, memory_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
RESERVE = "reserve"
# Colours that stay apart for colour-blind readers (Okabe and Ito's eight, and greys); a component keeps its own.
COLOURS = {
    "attention": "#0072B2",
    "squeeze and expand": "#E69F00",
    "router": "#CC79A7",
    "experts": "#009E73",
    "dense MLP": "#F0E442",
    "norms and gates": "#000000",
    "embedding": "#8C6D46",
    "head": "#D55E00",
    GAPS: "#444444",
    "collectives": "#777777",
    "host": "#BBBBBB",
    RESERVE: "#DDDDDD",
    CACHE: "#56B4E9",
}


class Bar(NamedTuple):
    """One stack: its name, the sizes of its pieces by component, and what is written at its end."""

    name: str
    pieces: Mapping[str, float]
    end: str


def check_drawing(path: Path) -> None:
    """Raises ValueError unless a picture can be drawn to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: must end in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install muse-fn[plot]")


def draw(plan: Plan, layouts: Sequence[Layout], path: Path) -> None:
    """Writes the picture. With layouts, memory and the time of a step are drawn for each of them too."""
    from matplotlib.figure import Figure

    given, context = rates(plan.assumptions), f"at context {plan.setup.context:,}, slowest card, predicted"
    panels = [(_memory_bars(plan, layouts), "GiB per card: weights by component, reserve, and room for the cache")]
    panels.append(([_time_bar(f"batch {x.step.batch}", x) for x in plan.decode], f"ms per decode step {context}"))
    if layouts:
        bars = [_time_bar(str(layout.mesh), layout.decode[0]) for layout in layouts]
        panels.append((bars, f"ms per decode step at batch {layouts[0].decode[0].step.batch} {context}"))
    rows = [len(bars) + 3 for bars, _ in panels]
    figure = Figure(figsize=(13, 1 + 0.33 * sum(rows)), layout="constrained", dpi=120)
    axes = figure.subplots(len(panels), 1, height_ratios=rows)
    for place, (bars, title) in enumerate(panels):
        _stack(axes[place], bars, title)
    axes[0].axvline(given.memory / GIB, color="black", linestyle="--", linewidth=1.2)
    beside = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "fontsize": 9}
    axes[0].annotate(f"memory {given.memory / GIB:,.1f}", (given.memory / GIB, 1), **beside)
    setup = plan.setup
    figure.suptitle(
        f"Built with Muse Spark Open · plan for mesh {setup.mesh} on {plan.device}, experts in {setup.format}, "
        f"cache in {setup.kv}"
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _memory_bars(plan: Plan, layouts: Sequence[Layout]) -> list[Bar]:
    setup, given = plan.setup, rates(plan.assumptions)
    bars: list[Bar] = []
    for mesh in [layout.mesh for layout in layouts] or [setup.mesh]:
        fullest = max(memory_of(replace(setup, mesh=mesh)), key=lambda stage: stage.total)
        fit = fit_of(replace(setup, mesh=mesh), given).windowed
        left = given.memory - given.reserve - fullest.total
        pieces = {name: size / GIB for name, size in fullest.weights.items()}
        pieces |= {RESERVE: given.reserve / GIB, CACHE: max(0.0, left / GIB)}
        held = "any number of" if fit is None else f"{fit:,}"
        room = f"{held} tokens of cache" if left >= 0 else f"does not fit: {-left / GIB:,.2f} GiB too many"
        end = f"{fullest.total / GIB:,.2f} GiB, {room}"
        bars.append(Bar(str(mesh), pieces, end))
    return bars


def _time_bar(name: str, found: Prediction) -> Bar:
    pieces = {part: seconds * 1e3 for part, seconds in found.seconds.items()}
    return Bar(name, pieces, f"{found.total * 1e3:,.1f} ms, {found.tokens_per_second:,.0f} tokens/s")


def _stack(axes: "Axes", bars: Sequence[Bar], title: str) -> None:
    """Horizontal stacks, the first on top, each with its end text; components in the order of their colours."""
    longest = max(sum(bar.pieces.values()) for bar in bars)
    starts = [0.0] * len(bars)
    for name, colour in COLOURS.items():
        widths = [bar.pieces.get(name, 0.0) for bar in bars]
        if any(widths):
            axes.barh(range(len(bars)), widths, left=starts, color=colour, label=name, edgecolor="white", linewidth=0.5)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, (bar, end) in enumerate(zip(bars, starts, strict=True)):
        axes.text(end + longest * 0.008, place, bar.end, va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.4)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
