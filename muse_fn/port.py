"""The one public measurement of this model on Gaudi 2, and what its authors say about where the time goes.

Source of every number here: the public report of the vllm-gaudi port of Muse Spark Open. None was measured by us, and
this program has never run on a Gaudi.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from muse_fn.devices import GIB, Assumption, rates
from muse_fn.floors import decode_step
from muse_fn.params.config import Config
from muse_fn.params.quantise import is_packable
from muse_fn.params.schema import leaves, sizes
from muse_fn.plan import Prediction, Setup, memory_of, predict
from muse_fn.sharding.mesh import Mesh

MESH = Mesh(ep=2, tp=4)
TOKENS_PER_SECOND = 39.7  # one greedy stream, after grouping the decode launches
UNGROUPED_TOKENS_PER_SECOND = 34.5  # the same pod before
LAUNCHES, HOST_MS, DEVICE_MS = 313, 28.7, 14.0  # one step at batch 1, before grouping
STOCK_SLICE_US = 57.0  # the stock operation's unpacking of one touched expert slice, on one card
MEMORY_GIB = 66.0  # weights and runtime on each card


class Beside(NamedTuple):
    """A prediction for the port's own layout, and what is known about the difference."""

    prediction: Prediction
    measured: float  # tokens/s
    reasons: tuple[str, ...]


def applies(config: Config, device: str, format: str) -> bool:
    """Whether the measurement is about this model, in this format, on this device."""
    return (device, format) == ("gaudi2", "quark-mxfp4") and _work(config) == _work(Config())


def _work(config: Config) -> tuple[object, ...]:
    """What of a config decides how much there is to do; token ids and constants do not."""
    return sizes(config), config.top_k, config.window, config.layer_types, config.mlp_layer_types


def beside(setup: Setup, assumed: Sequence[Assumption]) -> Beside:
    """The prediction at batch 1 for the port's layout, whatever the mesh of this setup."""
    own = replace(setup, mesh=MESH)
    found = predict(own, decode_step(1, setup.context), rates(assumed))
    return Beside(found, TOKENS_PER_SECOND, _reasons(own, found))


def _reasons(setup: Setup, found: Prediction) -> tuple[str, ...]:
    packed = len({leaf.layer for leaf in leaves(setup.config) if is_packable(leaf, setup.config)})
    slices = found.touched.slowest * packed
    exchanges = found.seconds.get("collectives", 0) * 1e3
    return (
        f"per step: {found.total * 1e3:.1f} ms predicted, {1e3 / TOKENS_PER_SECOND:.1f} ms measured. The prediction is "
        "a floor plus assumptions, not a forecast of an existing program.",
        f"host: before its decode launches were grouped, a step of the port took {HOST_MS} ms of host time, in "
        f"{LAUNCHES} graph launches, for {DEVICE_MS:g} ms of device work; grouping gave {UNGROUPED_TOKENS_PER_SECOND} "
        f"-> {TOKENS_PER_SECOND} tokens/s. Its host time since then is not published; the prediction takes host_us.",
        f"device: {DEVICE_MS:g} ms in the port, {found.total * 1e3:.1f} ms predicted, which reads every byte once at "
        "the assumed bandwidth and leaves out activations, unpacking and all small operations.",
        f"experts: the stock operation unpacks every touched slice to bf16 in about {STOCK_SLICE_US:g} us: "
        f"{slices * STOCK_SLICE_US / 1e3:.1f} ms a step for the slowest card's {found.touched.slowest:.2f} slices in "
        f"each of {packed} packed layers. The port has kernels of its own for decoding; their time per slice is not "
        "in its report.",
        f"collectives: {sum(row.times for row in found.collectives)} take {exchanges:.1f} ms in the prediction, at a "
        "latency that a third party gives for 4 cards, not 8.",
        f"memory: {memory_of(setup)[0].total / GIB:.2f} GiB of weights per card here, {MEMORY_GIB} GiB of weights and "
        "runtime there.",
    )
