"""Triton forms of what a decode step does before its layers and after its head: one launch for each of its pieces.

Their meaning: `locate_next` of kvcache/cache.py, and `embedding`, `rotary_of`, `capped` and `advanced` of
kernels/around.py.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Of the types of kernels pyright sees only their plain Python parameters.
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, options
from muse_fn.kernels.norms import Rotary, rotary_frequencies

PLACES = 2048  # positions of the context that a program of `locate_next` writes
BLOCK = 1024  # elements of a program of any other: 8 a thread
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Read(NamedTuple):
    """What the groups of one window read."""

    blocks_GBC: Tensor  # int64
    pos_BS: Tensor  # int64, alike for all of them


@triton.jit
def _context(
    table, blocks, pos, is_first, tile, past, end, width, columns, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    WITHIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE columns of one row's context in one group: their blocks, and for the first group their positions."""
    oldest = tl.maximum(past - WINDOW + 1, 0) if WINDOW else past * 0
    first = tl.minimum(oldest // SIZE, width - columns)
    c = tile * TILE + tl.arange(0, TILE)
    tl.store(blocks + c, tl.load(table + first + c, c < columns, 0), c < columns)
    if is_first:
        i = tl.arange(0, WITHIN)[None, :]
        p = (first + c)[:, None] * SIZE + i
        seen = (p >= oldest) & (p < end)
        tl.store(pos + c[:, None] * SIZE + i, tl.where(seen, p, -1), (c < columns)[:, None] & (i < SIZE))


@triton.jit(do_not_specialize=["batch", "width", "columns", "most"])
def _locate_kernel(
    table, past, count, count_out, write, blocks, pos, blocks_seen, pos_seen, batch, width, columns, most,
    GROUPS: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr,
    WITHIN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first WHOLE groups keep everything, the others see `columns` columns of the table's `width`."""
    tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    inputs_ready(PDL)
    old = tl.load(past + row)
    column = tl.minimum(old // SIZE, width - 1)
    g = tl.arange(0, EVERY)
    own = tl.load(table + (g * batch + row) * width + column, g < GROUPS, 1)
    has_room = (tl.min(own, 0) > 0) & (old // SIZE < width) & (old < most)
    new = tl.where(has_room, tl.load(count + row), 0)
    line = group * batch + row
    table += line * width
    if tile == 0:
        place = tl.load(table + column) * SIZE
        tl.store(write + line, tl.where(new > 0, place, 0) + old % SIZE)
        if group == 0:
            tl.store(count_out + row, new)
    if group < WHOLE:
        _context(table, blocks + line * width, pos + row * width * SIZE, group == 0, tile, old, old + new, width,
                 width, 0, SIZE, WITHIN, TILE)  # fmt: skip
    else:
        blocks_seen += (line - WHOLE * batch) * columns
        _context(table, blocks_seen, pos_seen + row * columns * SIZE, group == WHOLE, tile, old, old + new, width,
                 columns, WINDOW, SIZE, WITHIN, TILE)  # fmt: skip


@triton.jit(do_not_specialize=["first", "count"])
def _embedding_kernel(table, ids, out, first, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    inputs_ready(PDL)
    at = tl.load(ids + row).to(tl.int64) - first
    here = (at >= 0) & (at < count)
    x = tl.load(table + tl.where(here, at, 0) * WIDTH + cols, inside & here, 0.0)
    tl.store(out + row * WIDTH + cols, x, inside)


@triton.jit(do_not_specialize=["count"])
def _rotary_kernel(
    pos, frequencies, cos, sin, count, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inputs_ready(PDL)  # the first time frequencies are worked out just before
    by = tl.load(frequencies + d, d < D, 0.0)
    angle = tl.load(pos + row, row < count, 0).to(tl.float32)[:, None] * by[None, :]
    at, here = row[:, None] * D + d[None, :], (row < count)[:, None] & (d < D)[None, :]
    tl.store(cos + at, tl.cos(angle), here)
    tl.store(sin + at, tl.sin(angle), here)


@triton.jit(do_not_specialize=["rows", "stride"])
def _advance_kernel(past, count, tokens, past_out, going, rows, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inputs_ready(PDL)
    new = tl.load(count + row, row < rows, 0)
    tl.store(past_out + row, tl.load(past + row, row < rows, 0) + new, row < rows)
    token = tl.load(tokens + row.to(tl.int64) * stride, row < rows, -1)
    tl.store(going + row, (new > 0) & (token >= 0), row < rows)


@triton.jit
def _tanh(x):
    """Relative error below 2^-21, near 0 too: there by its series, elsewhere from an exponential at most 1."""
    e, s = tl.exp(-2.0 * tl.abs(x)), x * x
    far = tl.div_rn(1.0 - e, 1.0 + e)
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(s < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["count"])
def _capped_kernel(z, out, count, multiplier, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inputs_ready(PDL)
    x = tl.load(z + at, at < count, 0.0).to(tl.float32) * multiplier
    if CAPPED:
        x = _tanh(tl.div_rn(x, cap)) * cap
    tl.store(out + at, x, at < count)


def locate_next(
    table_GBN: Tensor, past_B: Tensor, count_B: Tensor, windows: tuple[int, ...], block_size: int, most: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The counts that are left, and of each group the three tensors of its `Places`; all int64."""
    groups, batch, width = table_GBN.shape
    whole, window = windows.count(0), max(windows)
    columns = min(width, (window + block_size - 2) // block_size + 1)
    tile = triton.next_power_of_2(min(width, max(1, PLACES // triton.next_power_of_2(block_size))))
    count, write = torch.empty_like(past_B), past_B.new_empty(groups, batch)
    found = [
        Read(past_B.new_empty(n, batch, c), past_B.new_empty(batch, c * block_size))
        for n, c in ((whole, width), (groups - whole, columns))
    ]
    _locate_kernel[triton.cdiv(width if whole else columns, tile), groups, batch](
        *(table_GBN.contiguous(), past_B.contiguous(), count_B.contiguous(), count, write, *found[0], *found[1]),
        *(batch, width, columns, most),
        **{"GROUPS": groups, "EVERY": triton.next_power_of_2(groups), "WHOLE": whole, "WINDOW": window},
        **{"SIZE": block_size, "WITHIN": triton.next_power_of_2(block_size), "TILE": tile, **options(past_B.device)},
    )
    read = [(blocks, context.pos_BS) for context in found for blocks in context.blocks_GBC.unbind()]
    return count, [(rows, *of_group) for rows, of_group in zip(write.unbind(), read, strict=True)]


def why_not_locate(table_GBN: Tensor, windows: tuple[int, ...]) -> str:
    """Why `locate_next` cannot take these; "" if it can."""
    if 0 in table_GBN.shape or table_GBN.dtype != torch.int64:
        return f"tables are {table_GBN.dtype} {list(table_GBN.shape)}: must be torch.int64, none of its sizes 0"
    if len({*windows} - {0}) > 1 or sorted(windows) != [*windows]:
        return f"windows are {windows}: must be zeros, then one other number"
    return ""


def embedding(table_VH: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """`around.embedding`: ids [...] -> [..., H]; zeros for an id that is not among the table's."""
    out = torch.empty(*ids.shape, table_VH.shape[1], dtype=table_VH.dtype, device=ids.device)
    if out.numel():
        count, width = table_VH.shape
        _embedding_kernel[ids.numel(), triton.cdiv(width, BLOCK)](
            table_VH, ids.contiguous(), out, first, count, WIDTH=width, BLOCK=BLOCK, **options(ids.device)
        )
    return out


def why_not_embedding(table_VH: Tensor) -> str:
    """Why `embedding` cannot take this table; "" if it can."""
    fits = table_VH.dtype in FLOATS and table_VH.is_contiguous()
    return "" if fits else f"the table is {table_VH.dtype} with strides {table_VH.stride()}: must be floats, contiguous"


def capped(z: Tensor, multiplier: float, cap: float) -> Tensor:
    """`around.capped`: any floats [...] -> float32 [...]."""
    out = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    if out.numel():
        _capped_kernel[(triton.cdiv(z.numel(), BLOCK),)](
            *(z.contiguous(), out, z.numel(), float(multiplier), float(cap)),
            **{"CAPPED": cap != 0, "BLOCK": BLOCK, **options(z.device)},
        )
    return out


def rotary(pos_BT: Tensor, head_dim: int, theta: float) -> Rotary:
    """`around.rotary_of`: integers [B, T]; the frequencies are kept."""
    by, pos = frequencies(head_dim, theta, pos_BT.device), pos_BT.contiguous()
    cos, sin = (torch.empty(*pos.shape, 1, head_dim, dtype=torch.float32, device=pos.device) for _ in "cs")
    if cos.numel():
        width = triton.next_power_of_2(head_dim)
        rows = max(1, BLOCK // width)
        constants = {"D": head_dim, "WIDTH": width, "ROWS": rows, **options(pos.device)}
        _rotary_kernel[(triton.cdiv(pos.numel(), rows),)](pos, by, cos, sin, pos.numel(), **constants)
    return Rotary(cos, sin)


def advanced(past_B: Tensor, count_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    """`around.advanced`: int64 [B] each."""
    past, going = torch.empty_like(past_B), torch.empty(past_B.shape, dtype=torch.bool, device=past_B.device)
    if rows := past_B.numel():
        _advance_kernel[(triton.cdiv(rows, BLOCK),)](
            *(past_B.contiguous(), count_B.contiguous(), tokens_B, past, going, rows, tokens_B.stride(0)),
            **{"BLOCK": BLOCK, **options(past_B.device)},
        )
    return past, going


@lru_cache
def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """`norms.rotary_frequencies`, worked out once: a captured step was run before its capture."""
    with torch.inference_mode(False):
        return rotary_frequencies(head_dim, theta, device)


_OPTIONS = {"num_warps": 4, "launch_pdl": True}
_OF_LOCATE = {
    **dict.fromkeys(
        ("table", "past", "count", "count_out", "write", "blocks", "pos", "blocks_seen", "pos_seen"), "*i64"
    ),
    **dict.fromkeys(("batch", "width", "columns", "most"), "i32"),
}
_GROUPS = {"GROUPS": 4, "EVERY": 4, "WHOLE": 1, "WINDOW": 2048, "PDL": True}
_OF_EMBEDDING = {"table": "*bf16", "ids": "*i64", "out": "*bf16", "first": "i32", "count": "i32"}
_OF_ROTARY = {"pos": "*i64", **dict.fromkeys(("frequencies", "cos", "sin"), "*fp32"), "count": "i32"}
_OF_ADVANCE = {
    **dict.fromkeys(("past", "count", "tokens", "past_out"), "*i64"),
    **{"going": "*i1", "rows": "i32", "stride": "i32"},
}
_OF_CAPPED = {"z": "*bf16", "out": "*fp32", "count": "i32", "multiplier": "fp32", "cap": "fp32"}
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    *(
        (_locate_kernel, _OF_LOCATE, {**_GROUPS, "SIZE": size, "WITHIN": size, "TILE": PLACES // size}, _OPTIONS)
        for size in (16, 128)
    ),
    (_embedding_kernel, _OF_EMBEDDING, {"WIDTH": 8192, "BLOCK": BLOCK, "PDL": True}, _OPTIONS),
    (_rotary_kernel, _OF_ROTARY, {"D": 64, "WIDTH": 64, "ROWS": BLOCK // 64, "PDL": True}, _OPTIONS),
    (_advance_kernel, _OF_ADVANCE, {"BLOCK": BLOCK, "PDL": True}, _OPTIONS),
    *(
        (_capped_kernel, {**_OF_CAPPED, "z": z}, {"CAPPED": True, "BLOCK": BLOCK, "PDL": True}, _OPTIONS)
        for z in ("*bf16", "*fp32")
    ),
]
