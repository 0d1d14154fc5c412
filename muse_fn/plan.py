"""What a model takes on a mesh of devices, before there are any: memory, cache, floors, and a predicted speed.

Arithmetic over the schema, the rules of the mesh and a table of assumptions. A prediction is the time to read each
component's bytes or to compute its operations, whichever is longer, added up, and what stands between them on top:

    seconds = sum over components of max(bytes / (bandwidth * read share), operations / (rate * product share))
              + layers * gaps + collectives * latency + bytes sent / network + host time that is not hidden

Shares say how much of a device's best rates the steps of this program reach (products in float32 are taken at their
full rate), gaps what a layer takes however little it reads. Floors have neither.
The steps of a mesh wait for the card with most experts to read, so predictions take that one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muse_fn.devices import Assumption, Rates, rates
from muse_fn.floors import (
    Collective,
    Layer,
    Step,
    Work,
    collectives,
    decode_step,
    expert_groups,
    layer_floor,
    prefill_step,
    work_of_stage,
)
from muse_fn.footprint import FORMATS, KV, KV_DTYPES, Fit, blocks_of, check, kv_bytes, stages, tokens_that_fit, weights
from muse_fn.params.config import Config
from muse_fn.sharding.mesh import ONE, STAGE, Mesh
from muse_fn.sharding.rules import problems_of_mesh
from muse_fn.touched import Touched

CONTEXT, CHUNK = 2048, 4096  # where the model can hold them
MOST = 2**20  # sequences of a batch
GAPS = "between kernels"


@dataclass(frozen=True)
class Setup:
    """What is planned for. Raises MeshError or ValueError naming each field that does not fit."""

    config: Config
    mesh: Mesh = ONE
    format: str = "quark-mxfp4"
    kv: str = "bf16"
    context: int = CONTEXT  # tokens a decode step attends to, and tokens cached before a prefill chunk

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}: must be one of {', '.join(allowed)}"
            for name, value, allowed in (("format", self.format, FORMATS), ("kv", self.kv, KV_DTYPES))
            if value not in allowed
        ]
        if not 1 <= self.context <= self.config.max_positions:
            problems.append(f"context is {self.context}: must be 1 to {self.config.max_positions}, the model's limit")
        if problems:
            raise ValueError("; ".join(problems))
        check(self.config, self.mesh, self.format)


class Prediction(NamedTuple):
    """One step: work of the fullest stage, and seconds by what they are spent on, all stages one after another."""

    step: Step
    touched: Touched
    mean: dict[str, Work]  # a card with an average number of experts to read
    slowest: dict[str, Work]
    collectives: list[Collective]
    seconds: dict[str, float]  # components, then GAPS, "collectives" and "host" if there are any

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences of the step together."""
        return self.step.tokens / self.total


class Memory(NamedTuple):
    """One pipeline stage: bytes of parameters on each of its ranks, by component, and of cache."""

    ranks: range
    weights: dict[str, int]
    kv: KV

    @property
    def total(self) -> int:
        """Bytes of all parameters."""
        return sum(self.weights.values())


class Floor(NamedTuple):
    """Bytes of one typical layer that one token reads, on an average and on the slowest card."""

    mean: Layer
    slowest: Layer


class Plan(NamedTuple):
    """All answers for one setup."""

    setup: Setup
    device: str
    assumptions: tuple[Assumption, ...]
    memory: list[Memory]  # of each stage
    fit: Fit
    layer: Floor
    decode: list[Prediction]
    prefill: Prediction | None

    @property
    def largest(self) -> Memory:
        """The stage whose ranks hold most."""
        return max(self.memory, key=lambda stage: stage.total)


def plan(
    setup: Setup,
    device: str,
    assumed: Sequence[Assumption],
    batches: Iterable[int] = (1, 4, 16, 64),
    chunk: int | None = None,
) -> Plan:
    """Everything about one setup. `chunk` None is 4096 or what the model can hold; 0 plans no prefill.

    Raises ValueError for sizes that the model cannot hold.
    """
    batches, limit = list(batches), setup.config.max_positions - setup.context
    chunk = min(CHUNK, limit) if chunk is None else chunk
    problems = [f"batch is {size}: must be 1 to {MOST}" for size in batches if not 1 <= size <= MOST]
    if not 0 <= chunk <= limit:
        problems.append(f"chunk is {chunk}: must be 0 to {limit}, the positions after {setup.context} of context")
    if problems:
        raise ValueError("; ".join(problems))
    given = rates(assumed)
    return Plan(
        setup,
        device,
        tuple(assumed),
        memory_of(setup),
        fit_of(setup, given),
        floor_of(setup),
        [predict(setup, decode_step(size, setup.context), given) for size in batches],
        predict(setup, prefill_step(chunk, setup.context), given) if chunk else None,
    )


def memory_of(setup: Setup) -> list[Memory]:
    """What the ranks of each stage hold."""
    size = setup.mesh.size(STAGE)
    return [
        Memory(
            range(view.rank, view.rank + size),
            weights(setup.config, view, setup.format),
            kv_bytes(setup.config, view, setup.kv),
        )
        for view in stages(setup.mesh)
    ]


def fit_of(setup: Setup, given: Rates) -> Fit:
    """Tokens of cache beside the parameters and the reserve."""
    room = given.memory - given.reserve
    return tokens_that_fit(setup.config, setup.mesh, setup.format, setup.kv, room, given.sequences)


def floor_of(setup: Setup) -> Floor:
    """The bytes of one layer at batch 1."""
    found = expert_groups(setup.config, setup.mesh, decode_step(1, setup.context))
    mean, slowest = (layer_floor(setup.config, setup.mesh, setup.format, n) for n in (found.mean, found.slowest))
    return Floor(mean, slowest)


def predict(setup: Setup, step: Step, given: Rates) -> Prediction:
    """One step of one kind; see the head of this file for the formula."""
    config, mesh = setup.config, setup.mesh
    found = expert_groups(config, mesh, step)
    mean, slowest = (
        [work_of_stage(config, view, setup.format, setup.kv, step, experts) for view in stages(mesh)]
        for experts in (found.mean, found.slowest)
    )
    exchanges = collectives(config, mesh, step)
    seconds = Counter[str]()
    for work in slowest:
        seconds.update({name: seconds_of(part, given) for name, part in work.items()})  # pyright: ignore[reportArgumentType]
    times: dict[str, float] = dict(seconds)
    if given.gaps:
        times[GAPS] = config.layers * given.gaps
    if exchanges:
        times["collectives"] = sum(row.times * (given.latency + row.bytes / given.network) for row in exchanges)
    if given.overhead:
        times["host"] = given.overhead
    return Prediction(step, found, max(mean, key=bytes_of), max(slowest, key=bytes_of), exchanges, times)


def seconds_of(work: Work, given: Rates) -> float:
    """The time to read or to compute, whichever is longer, at the shares of the rates that steps reach."""
    return max(work.bytes / (given.bandwidth * given.read_share), arithmetic_seconds(work, given, given.product_share))


def arithmetic_seconds(work: Work, given: Rates, share: float = 1.0) -> float:
    """The time to compute, with all operands at hand, products of the model's dtype at a share of their rate."""
    return work.flops / (given.model_flops * share) + work.float32_flops / given.float32_flops


def bytes_of(work: dict[str, Work]) -> float:
    """Bytes that all components read."""
    return sum(part.bytes for part in work.values())


class Layout(NamedTuple):
    """One line of a comparison."""

    mesh: Mesh
    weights: int
    fit: Fit
    layer: Floor
    decode: list[Prediction]
    prefill: Prediction | None


def compare(
    setup: Setup, assumed: Sequence[Assumption], batches: Iterable[int] = (1, 16), chunk: int | None = None
) -> list[Layout]:
    """Every ep x tp with as many ranks, each with squeeze replicated and split, that fits the model."""
    found: list[Layout] = []
    for mesh in layouts(setup):
        one = plan(replace(setup, mesh=mesh), "", assumed, batches, chunk)
        found.append(Layout(mesh, one.largest.total, one.fit, one.layer, one.decode, one.prefill))
    return found


def layouts(setup: Setup) -> list[Mesh]:
    """The meshes of a comparison, from experts alone to inner width alone."""
    ranks, pp = setup.mesh.size(STAGE), setup.mesh.pp
    sizes = [ep for ep in range(ranks, 0, -1) if ranks % ep == 0]
    meshes = [Mesh(ep, ranks // ep, pp, squeeze) for ep in sizes for squeeze in ("replicated", "split")]
    blocks = blocks_of(setup.config, setup.format)
    return [mesh for mesh in meshes if not problems_of_mesh(setup.config, mesh, blocks)]
