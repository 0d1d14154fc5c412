"""Decode attention over long contexts with one of eight ranks' geometry, against the device's own copy bandwidth.

    python bench/decode_attention.py [--device cuda] [--context 1048576]

16 query heads on 2 KV heads of 64; 16 global layers with arenas of their own, too large together for any cache of the
device; blocks in random order. The floor is reading every key and value once. The error is the first layer's, relative,
against float64. Prints Markdown.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.capture import capture
from muse_fn.kernels import reference, streamed
from muse_fn.kernels.select import select

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 2, 64, 128


def seconds(fn: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The best of several runs, the device waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    fn()
    best = float("inf")
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        fn()
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Runs and prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 131_072, 1_048_576])
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    device = torch.device(args.device)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = 2 * source.nbytes / seconds(lambda: source.clone(), device)
    print(f"copy bandwidth {copy / 1e12:.3f} TB/s (read and written), torch {torch.__version__}, {args.device}\n")
    columns = ("context", "form", "ms for all layers", "GB read", "TB/s", "of copy bandwidth", "error")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for context in args.context:
        for row in rows(context, args.layers, device):
            rate = row.floor / row.spent
            told = f"{row.spent * 1e3:.2f} | {row.floor / 1e9:.2f} | {rate / 1e12:.3f} | {rate / copy:.1%}"
            print(f"| {context:,} | {row.name} | {told} | {row.error:.1e} |", flush=True)


class Row(NamedTuple):
    """One form over all layers."""

    name: str
    spent: float  # seconds
    floor: float  # bytes that it must read
    error: float


def rows(context: int, layers: int, device: torch.device) -> Iterator[Row]:
    """Each form, called layer by layer; the selected one as a captured graph too, where the device has graphs."""
    columns, dtype = -(-context // BLOCK), torch.bfloat16
    order = 1 + torch.randperm(columns, device=device)[None]
    shape = (columns + 1, BLOCK, KV_HEADS, HEAD_DIM)
    arenas = [tuple(torch.randn(shape, dtype=dtype, device=device) for _ in "kv") for _ in range(layers)]
    q = torch.randn(1, 1, HEADS, HEAD_DIM, dtype=dtype, device=device)
    places = order, torch.tensor([[context - 1]], device=device), torch.arange(columns * BLOCK, device=device)[None]
    floor = 2 * layers * context * KV_HEADS * HEAD_DIM * dtype.itemsize
    selected = partial(select(device).attend_blocks, window=0, is_start=False)  # type: ignore[call-arg]
    forms: dict[str, Callable[..., Tensor]] = {
        "as selected": selected,
        "streamed": partial(streamed.attend_blocks, window=0),
    }
    if context <= 131_072:  # beyond, it gathers more than is sensible
        forms["reference"] = partial(reference.attend_blocks, window=0)
    exact = float64(q, arenas[0][0], arenas[0][1], order)

    def run(form: Callable[..., Tensor], q: Tensor) -> list[Tensor]:
        return [form(q, k, v, *places) for k, v in arenas]

    for name, form in forms.items():
        error = (form(q, *arenas[0], *places).double() - exact).norm() / exact.norm()
        yield Row(name, seconds(partial(run, form, q), device), floor, error.item())
        if form is selected and device.type == "cuda":
            step = capture(partial(run, form), [q])
            error = (step(q)[0].double() - exact).norm() / exact.norm()
            yield Row(f"{name}, captured", seconds(partial(step, q), device), floor, error.item())


def float64(q: Tensor, k_arena: Tensor, v_arena: Tensor, order: Tensor) -> Tensor:
    """The equation over all blocks in this order, in double precision."""
    k, v = (arena[order[0]].flatten(0, 1).double() for arena in (k_arena, v_arena))
    scores = torch.einsum("kgd,skd->kgs", q.double().view(KV_HEADS, -1, HEAD_DIM), k) * HEAD_DIM**-0.5
    return torch.einsum("kgs,skd->kgd", scores.softmax(-1), v).reshape(q.shape)


if __name__ == "__main__":
    main()
