"""What the Triton forms share: whether they can run here, and the few things that differ under Triton's interpreter.

A kernel launched with `launch_pdl` may start while the one before it still runs: weights, and what the kernel before
that one wrote, it may read at once, everything else after `inputs_ready`, which each calls once. A program
that reads nothing need not, but one of each launch must: who waits for a launch counts on all before it being done.

Sizes that change from step to step are not specialised: a server would wait for the compiler at each new one.
"""

# pyright: basic
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
WARPS = 4  # of a program, unless said otherwise
OLDEST = (8, 0)  # compute capability from which bfloat16 products exist


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 factors are not rounded. The interpreter knows no bfloat16 products."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 in another dtype, to nearest; the interpreter would cut off what bfloat16 does not hold."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def bound(x):
    """A bound of a loop: the interpreter's numbers are arrays of one element, which its ranges do not take."""
    if INTERPRETED:
        return int(x.handle.data.item())  # an assignment would make an array of it again
    return x


@triton.jit
def inputs_ready(PDL: tl.constexpr):
    """Waits until the kernel before this one is done with what it writes and reads; then lets the next one start.

    So whatever runs before this call may read what the kernel before the previous one wrote, and parameters.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can be launched before the one before is done."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(device: torch.device, **constants: Any) -> dict[str, Any]:
    """With which keywords a kernel is launched on a device: these constants and how it is compiled."""
    pdl = overlaps(device)
    return {"num_warps": WARPS, **constants, "PDL": pdl, "launch_pdl": pdl}


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache
def why_not(device: torch.device) -> str:
    """Why the Triton forms cannot run on this device; "" if they can."""
    if INTERPRETED.value:
        return "" if device.type == "cpu" else "TRITON_INTERPRET is set, which runs them on the CPU"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"there is no CUDA device behind {device}"
    found = torch.cuda.get_device_capability(device)
    return "" if found >= OLDEST else f"compute capability {found[0]}.{found[1]}: needs {OLDEST[0]}.{OLDEST[1]}"


def on_compile(tell: Callable[[str, float], None]) -> None:
    """From now on tells of every kernel that is compiled, and not found in the cache: its name with its constants, and
    how many seconds that took."""

    def heard(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            names = src.fn.arg_names
            constants = ", ".join(f"{names[at[0]]}={value}" for at, value in src.constants.items())
            tell(f"{src.fn.__name__}({constants})", times.total / 1e6)

    triton.knobs.compilation.listener = heard  # pyright: ignore[reportAttributeAccessIssue]
