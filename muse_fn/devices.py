"""What the planner assumes: records of devices, every number with its unit and where it comes from.

Nothing here is measured by the planner itself. Each number can be replaced by name. Rates are what a device does at
best; shares say how much of them whole steps of this program reach.
"""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import NamedTuple

GIB = 2**30


class Assumption(NamedTuple):
    """One number that a prediction rests on."""

    name: str
    value: float
    unit: str
    source: str


class Rates(NamedTuple):
    """The assumptions as the arithmetic takes them: bytes, seconds and operations, per card."""

    memory: float  # bytes
    reserve: float  # bytes
    bandwidth: float  # bytes/s
    read_share: float  # of it, that the reads of whole steps reach
    model_flops: float  # operations/s, products in the model's dtype
    product_share: float  # of it, that the products of whole steps reach
    float32_flops: float  # operations/s
    network: float  # bytes/s, one way
    latency: float  # s for one collective
    gaps: float  # s for one layer, whatever it reads and computes
    overhead: float  # s for one step
    sequences: float


_OVERHEAD = Assumption("host_us", 0.0, "us per step", "assumed: captured steps hide the host entirely")
_SEQUENCES = Assumption("sequences", 4.0, "sequences", "assumed: each holds one window per sliding layer")

# Fitted on bench/results/2026-11-30-cards-2.md (two cards, 20 layers) and 2026-11-30-rank-slice.md (one card, 62), so
# that every line of both, and of 2026-12-01-rank-slice.md, is within 25 % of its prediction. Shares alone cannot do
# that: a layer with fewer bytes, as on one of eight cards, reads them at a lower rate, since its kernels still start
# one after the other.
_FITTED = "fitted on steps measured on one and two cards (bench/results)"


def _whole(name: str, what: str, shown: float) -> Assumption:
    """The share on a device whose record rests on no measured step."""
    return Assumption(
        name, 1.0, what, f"fitted on no measured step: the full rate; on H200 steps reached {shown:g} of it"
    )


_READS, _PRODUCTS = "of bandwidth_gb_s", "of bf16_tflops"
_READ_SHARE = Assumption("read_share", 0.69, _READS, f"{_FITTED}: unpacking four bits, small products, short reads")
_PRODUCT_SHARE = Assumption("product_share", 0.38, _PRODUCTS, f"{_FITTED}: chunks of 4,096, activations included")
_LAYER = Assumption("layer_us", 20.0, "us per layer", f"{_FITTED}: a dozen kernels that wait for one another")
_UNMEASURED = (
    _whole("read_share", _READS, _READ_SHARE.value),
    _whole("product_share", _PRODUCTS, _PRODUCT_SHARE.value),
    Assumption(
        "layer_us", 0.0, "us per layer", f"fitted on no measured step: no gaps; H200 showed {_LAYER.value:g} us"
    ),
)

_GAUDI2 = (
    Assumption("memory_gib", 94.62, "GiB", "visible per card, as the public Gaudi 2 port reports"),
    Assumption("reserve_gib", 13.0, "GiB", "assumed: runtime, captured steps, activations, workspaces"),
    Assumption("bandwidth_gb_s", 2000.0, "GB/s", "assumed: data sheet 2,450; Intel's compiler reckons with 1,945"),
    Assumption("bf16_tflops", 432.0, "TFLOP/s", "data sheet, dense; no product of a real model reaches it"),
    Assumption("float32_tflops", 54.0, "TFLOP/s", "assumed: an eighth of bf16; no public figure is known to us"),
    Assumption("network_gb_s", 262.5, "GB/s each way", "white paper: 21 links of 100 Gbit/s to the 7 cards of a node"),
    Assumption("collective_us", 16.0, "us each", "a third party's figure for a captured all-gather over 4 cards"),
    *_UNMEASURED,
)
_H200 = (
    Assumption("memory_gib", 139.0, "GiB", "what one card shows as its memory, rounded down"),
    Assumption("reserve_gib", 13.0, "GiB", "assumed: runtime, captured steps, activations, workspaces"),
    Assumption("bandwidth_gb_s", 4290.0, "GB/s", "copy bandwidth measured on one card; data sheet 4,800"),
    Assumption("bf16_tflops", 989.0, "TFLOP/s", "data sheet, dense; no product of a real model reaches it"),
    Assumption("float32_tflops", 67.0, "TFLOP/s", "data sheet, float32 without TF32"),
    Assumption("network_gb_s", 300.0, "GB/s each way", "sums of 4,096 tokens measured on two cards; data sheet 450"),
    Assumption("collective_us", 15.0, "us each", "small sums and gathers measured on two cards; more cards: unknown"),
    _READ_SHARE,
    _PRODUCT_SHARE,
    _LAYER,
)
_CPU = (
    Assumption("reserve_gib", 1.0, "GiB", "assumed: interpreter and activations"),
    Assumption("bandwidth_gb_s", 20.0, "GB/s per rank", "assumed, not measured: memory channels differ widely"),
    Assumption("bf16_tflops", 0.1, "TFLOP/s per rank", "assumed, not measured"),
    Assumption("float32_tflops", 0.1, "TFLOP/s per rank", "assumed, not measured"),
    Assumption("network_gb_s", 5.0, "GB/s each way", "assumed: processes of one machine, through its memory"),
    Assumption("collective_us", 50.0, "us each", "assumed: processes of one machine"),
    *_UNMEASURED,
)
DEVICES: dict[str, tuple[Assumption, ...]] = {"gaudi2": _GAUDI2, "h200": _H200, "cpu": _CPU}
SHARES = ("read_share", "product_share")  # above 0, at most 1
POSITIVE = ("bandwidth_gb_s", "bf16_tflops", "float32_tflops", "network_gb_s", *SHARES)


def assumptions(
    device: str, ranks: int = 1, changes: Mapping[str, float] | None = None, *, ram: int | None = None
) -> tuple[Assumption, ...]:
    """The record of a device for a mesh of `ranks`, with some values replaced.

    `ram` is the machine's memory in bytes, which the ranks of a CPU share; None asks the operating system. Raises
    ValueError naming an unknown device and every bad replacement.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}: must be one of {', '.join(DEVICES)}")
    record = [*DEVICES[device], _SEQUENCES, _OVERHEAD]
    if device == "cpu":
        record.insert(0, _shared_memory(machine_memory() if ram is None else ram, ranks))
    changes = changes or {}
    problems = list(_problems({row.name for row in record}, changes))
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(
        row._replace(value=float(changes[row.name]), source=f"given; otherwise {row.value:,g}: {row.source}")
        if row.name in changes
        else row
        for row in record
    )


def _shared_memory(ram: int, ranks: int) -> Assumption:
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    return Assumption("memory_gib", ram / GIB / ranks, "GiB", f"this machine's memory of {ram / GIB:,.1f} GiB{shared}")


def machine_memory() -> int:
    """Bytes of memory of this machine; 16 GiB where the operating system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 * GIB


def _problems(names: set[str], changes: Mapping[str, float]) -> Iterable[str]:
    for name, value in changes.items():
        if name not in names:
            yield f"assumption {name!r} is not known: must be one of {', '.join(sorted(names))}"
        elif not isfinite(value) or value < 0 or (value == 0 and name in POSITIVE) or (value > 1 and name in SHARES):
            least = "above 0" if name in POSITIVE else "of at least 0"
            yield f"assumption {name} is {value}: must be a number {least}{' and at most 1' if name in SHARES else ''}"


def rates(rows: Iterable[Assumption]) -> Rates:
    """The same numbers in bytes, seconds and operations."""
    value = {row.name: row.value for row in rows}
    return Rates(
        memory=value["memory_gib"] * GIB,
        reserve=value["reserve_gib"] * GIB,
        bandwidth=value["bandwidth_gb_s"] * 1e9,
        read_share=value["read_share"],
        model_flops=value["bf16_tflops"] * 1e12,
        product_share=value["product_share"],
        float32_flops=value["float32_tflops"] * 1e12,
        network=value["network_gb_s"] * 1e9,
        latency=value["collective_us"] * 1e-6,
        gaps=value["layer_us"] * 1e-6,
        overhead=value["host_us"] * 1e-6,
        sequences=value["sequences"],
    )
