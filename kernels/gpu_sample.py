"""Triton forms of drawing a token: the noise of a key, and the largest of logits and of logits with noise.

The equations are those of muse_fn/sample.py, the random bits too: Threefry-2x32 with 20 rounds, Gumbel noise, logits
counted from the largest and divided by the temperature. The vocabulary is cut into blocks, each a program; the last one
of a row to finish reads what the others found, so that no order of theirs shows in the result.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Of the types of kernels pyright sees only their plain Python parameters.
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, overlaps

BLOCK = 1024  # ids of a program: 8 a thread, four random pairs
MOST = BLOCK * 1024  # ids of a row
_PARITY = tl.constexpr(0x1BD11BDA)
_NONE = tl.constexpr((1 << 31) - 1)  # an id above all


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << D) | (x1 >> (32 - D))) ^ x0
    return x0, x1


@triton.jit
def threefry(k0, k1, counter):
    """Two words of random bits for each (key, counter below 2^32), all uint32: int32 shifts would copy the sign."""
    k2 = k0 ^ k1 ^ _PARITY
    x0, x1 = k0, counter + k1
    for group in tl.static_range(5):
        if group % 2 == 0:
            x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
        else:
            x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
        x0 = x0 + k1
        x1 = x1 + k2 + (group + 1)
        k0, k1, k2 = k1, k2, k0
    return x0, x1


@triton.jit
def _key(keys, row):
    k0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    return k0, tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)


@triton.jit
def _noise(k0, k1, first_pair, block, WIDTH: tl.constexpr):
    """Gumbel noise of WIDTH ids from 2 * first_pair + block * WIDTH on."""
    pair = first_pair + block * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    w0, w1 = threefry(k0, k1, pair.to(tl.uint32))
    # 23 bits and a half: exact in float32 and never 0 or 1.
    uniform = ((tl.interleave(w0, w1) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _largest(x, ids):
    """The largest value and its lowest id; NaN counts as -inf, and places without an id have _NONE."""
    x = tl.where(x == x, x, -float("inf"))
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, ids, _NONE), 0)


@triton.jit
def _masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK: tl.constexpr):
    """A row's logits at these columns as they are, and with -inf where they are not allowed or not there."""
    x = tl.load(logits + row * stride + cols, here, 0.0)
    kept = here
    if HAS_MASK:
        kept = kept & (tl.load(allowed + row * allowed_stride + cols, here, 0) != 0)
    return x, tl.where(kept, x, -float("inf"))


@triton.jit(do_not_specialize=["first_pair"])
def _gumbel_kernel(
    keys, out, first_pair, COUNT: tl.constexpr, ODD: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inputs_ready(PDL)
    k0, k1 = _key(keys, row)
    cols = block * WIDTH - ODD + tl.arange(0, WIDTH)
    noise = _noise(k0, k1, first_pair, block, WIDTH)
    tl.store(out + row * COUNT + cols, noise, (cols >= 0) & (cols < COUNT))


@triton.jit
def _blocks_kernel(
    logits,
    allowed,
    values,
    ids,
    bad,
    arrived,
    stride,
    allowed_stride,
    HAS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of each block, its column, and whether one is not finite."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH + tl.arange(0, WIDTH)
    here = cols < COLUMNS
    inputs_ready(PDL)
    x, kept = _masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK)
    value, first = _largest(kept, tl.where(here, cols, _NONE))
    at = row * tl.num_programs(1) + block
    tl.store(values + at, value)
    tl.store(ids + at, first)
    tl.store(bad + at, tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0))
    if block == 0:
        tl.store(arrived + row, 0)


@triton.jit
def _found(values, ids, row, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """The largest value of a row and its lowest id from those of its COUNT blocks, past the first-level cache."""
    b = tl.arange(0, BLOCKS)
    value = tl.load(values + row * COUNT + b, b < COUNT, -float("inf"), cache_modifier=".cg")
    return _largest(value, tl.load(ids + row * COUNT + b, b < COUNT, _NONE, cache_modifier=".cg"))


@triton.jit
def _whole_row(values, ids, bad, top_out, id_out, bad_out, row, start, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    top, first = _found(values, ids, row, COUNT, BLOCKS)
    b = tl.arange(0, BLOCKS)
    wrong = tl.max(tl.load(bad + row * COUNT + b, b < COUNT, 0), 0)
    tl.store(top_out + row, top)
    tl.store(id_out + row, first.to(tl.int64) + start)
    tl.store(bad_out + row, wrong != 0)


@triton.jit(do_not_specialize=["start"])
def _rows_kernel(
    values,
    ids,
    bad,
    top_out,
    id_out,
    bad_out,
    start,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    inputs_ready(PDL)
    row = tl.program_id(0).to(tl.int64)
    _whole_row(values, ids, bad, top_out, id_out, bad_out, row, start, COUNT, BLOCKS)


@triton.jit(do_not_specialize=["first_pair"])
def _draw_kernel(
    logits,
    allowed,
    values,
    ids,
    bad,
    arrived,
    drawn_values,
    drawn_ids,
    temperature,
    keys,
    pos,
    tops,
    top_out,
    id_out,
    bad_out,
    drawn_out,
    drawn_id_out,
    stride,
    allowed_stride,
    first_pair,
    HAS_MASK: tl.constexpr,
    HAS_TOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ODD: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH - ODD + tl.arange(0, WIDTH)
    here = (cols >= 0) & (cols < COLUMNS)
    inputs_ready(PDL)
    _, x = _masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK)
    if HAS_TOPS:
        top = tl.load(tops + row)
    else:
        top, _ = _found(values, ids, row, COUNT, BLOCKS)
    t = tl.load(temperature + row)
    k0, k1 = _key(keys, row)
    k0, k1 = threefry(k0, k1, tl.load(pos + row).to(tl.uint32))
    # From the maximum down, so that the smallest temperature overflows to -inf and never to +inf.
    x = tl.div_rn(x - top, tl.where(t > 0, t, 1.0)) + _noise(k0, k1, first_pair, block, WIDTH)
    value, first = _largest(x, tl.where(here, cols, _NONE))
    tl.store(drawn_values + row * COUNT + block, value)
    tl.store(drawn_ids + row * COUNT + block, first)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == COUNT - 1:
        tl.debug_barrier()
        start = 2 * first_pair + ODD
        _whole_row(values, ids, bad, top_out, id_out, bad_out, row, start, COUNT, BLOCKS)
        value, first = _found(drawn_values, drawn_ids, row, COUNT, BLOCKS)
        tl.store(drawn_out + row, value)
        tl.store(drawn_id_out + row, first.to(tl.int64) + start)


def gumbel(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """float32 [..., count]: standard Gumbel noise of each key int32 [..., 2], for ids from `start` on."""
    rows = keys.reshape(-1, 2).contiguous()
    out = torch.empty(*keys.shape[:-1], count, dtype=torch.float32, device=keys.device)
    if out.numel():
        grid = len(rows), triton.cdiv(count + start % 2, BLOCK)
        constants = {"COUNT": count, "ODD": start % 2, "WIDTH": BLOCK}
        _gumbel_kernel[grid](rows, out, start // 2, **constants, **_launch(keys.device))
    return out


class Largest(NamedTuple):
    """Of each row of logits."""

    value_B: Tensor  # float32, the largest logit among those allowed
    id_B: Tensor  # int64, the lowest id that has it
    bad_B: Tensor  # bool, whether any logit is not finite, allowed or not; then the others say nothing


class Drawn(NamedTuple):
    """Of each row of logits, and of its scaled logits with noise."""

    largest: Largest
    value_B: Tensor  # float32, the largest sum of scaled logit and noise
    id_B: Tensor  # int64, the lowest id that has it


def largest(logits_BV: Tensor, start: int = 0, allowed: Tensor | None = None) -> Largest:
    """The largest of each row of float32 logits [B, V], in two launches; the first column is id `start`.

    Ids that are False in `allowed` (bool [V] or [B, V], of these columns) count as -inf.
    """
    first, found = _Blocks.of(logits_BV, start, allowed), _largest_of(logits_BV)
    if len(logits_BV):
        first.launch()
        _rows_kernel[(len(logits_BV),)](
            *(first.values, first.ids, first.bad, *found, start),
            **first.counts,
            **{**_launch(logits_BV.device), "num_warps": 1},
        )
    return found


def draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    key_B: Tensor,
    pos_B: Tensor,
    start: int = 0,
    allowed: Tensor | None = None,
    top_B: Tensor | None = None,
) -> Drawn:
    """The largest of float32 logits [B, V] and the largest of (logit - top) / temperature + noise, in two launches.

    Keys int32 [B, 2] are folded with the positions, integers [B]; a temperature of 0 counts as 1. `top_B`, float32, is
    what logits are counted from where these columns are not the whole row: the largest that any rank has; otherwise it
    is the row's own. `start` and `allowed` as of `largest`.
    """
    first, found = _Blocks.of(logits_BV, start, allowed), _largest_of(logits_BV)
    drawn = Drawn(found, torch.empty_like(found.value_B), torch.empty_like(found.id_B))
    if len(logits_BV):
        first.launch()
        _draw_kernel[first.grid](
            *(first.logits, first.allowed, first.values, first.ids, first.bad, first.arrived),
            *(torch.empty_like(first.values), torch.empty_like(first.ids)),
            *(temperature_B.contiguous(), key_B.contiguous(), pos_B.contiguous()),
            *(None if top_B is None else top_B.contiguous(), *found, drawn.value_B, drawn.id_B),
            *(*first.strides, start // 2),
            **{**first.constants, **first.counts, "HAS_TOPS": top_B is not None, "ODD": start % 2},
            **_launch(logits_BV.device),
        )
    return drawn


def why_not(logits_BV: Tensor, allowed: Tensor | None = None) -> str:
    """Why `largest` and `draw` cannot take these; "" if they can."""
    shape = list(logits_BV.shape)
    if logits_BV.dtype != torch.float32 or len(shape) != 2 or not 0 < shape[1] <= MOST:
        return f"logits are {logits_BV.dtype} {shape}: must be torch.float32 [B, V], V from 1 to {MOST}"
    if allowed is not None and (allowed.dtype != torch.bool or list(allowed.shape) not in (shape, shape[1:])):
        return f"allowed is {allowed.dtype} {list(allowed.shape)}: must be torch.bool {shape[1:]} or {shape}"
    return ""


class _Blocks(NamedTuple):
    """The first launch, and what it writes: [B, blocks] each."""

    logits: Tensor
    allowed: Tensor | None
    values: Tensor
    ids: Tensor
    bad: Tensor
    arrived: Tensor  # [B], set to 0
    strides: tuple[int, int]
    constants: dict[str, Any]
    counts: dict[str, Any]

    @staticmethod
    def of(logits_BV: Tensor, start: int, allowed: Tensor | None) -> "_Blocks":
        logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
        rows, columns = logits_BV.shape
        if allowed is not None:
            allowed = allowed.expand(rows, columns)
            allowed = allowed if allowed.stride(1) == 1 else allowed.contiguous()
        # One block more where the pairs of ids begin within this share's first.
        count = triton.cdiv(columns + start % 2, BLOCK)
        ids, bad = (torch.empty(rows, count, dtype=torch.int32, device=logits_BV.device) for _ in range(2))
        return _Blocks(
            *(logits_BV, allowed, torch.empty_like(ids, dtype=torch.float32), ids, bad, ids.new_empty(rows)),
            (logits_BV.stride(0), 0 if allowed is None else allowed.stride(0)),
            {"HAS_MASK": allowed is not None, "COLUMNS": columns, "WIDTH": BLOCK},
            {"COUNT": count, "BLOCKS": triton.next_power_of_2(count)},
        )

    @property
    def grid(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def launch(self) -> None:
        _blocks_kernel[self.grid](*self[:6], *self.strides, **self.constants, **_launch(self.logits.device))


def _largest_of(logits_BV: Tensor) -> Largest:
    each = (torch.float32, torch.int64, torch.bool)
    return Largest(*(torch.empty(len(logits_BV), dtype=dtype, device=logits_BV.device) for dtype in each))


def _launch(device: torch.device) -> dict[str, Any]:
    early = overlaps(device)
    return {"PDL": early, "launch_pdl": early, "num_warps": 4}


_OF_LOGITS = {"logits": "*fp32", "allowed": "*i1", "values": "*fp32", "ids": "*i32", "bad": "*i32", "arrived": "*i32"}
_OF_ROW = {"top_out": "*fp32", "id_out": "*i64", "bad_out": "*i1"}
_STRIDES = {"stride": "i32", "allowed_stride": "i32"}
_SHARE = {"COLUMNS": 25256, "WIDTH": BLOCK, "PDL": True}
_COUNTS = {"COUNT": 25, "BLOCKS": 32}
_OPTIONS = {"num_warps": 4, "launch_pdl": True}
_OF_DRAW = {
    **_OF_LOGITS,
    **{"drawn_values": "*fp32", "drawn_ids": "*i32", "temperature": "*fp32", "keys": "*i32", "pos": "*i64"},
    **{"tops": "*fp32", **_OF_ROW, "drawn_out": "*fp32", "drawn_id_out": "*i64", **_STRIDES, "first_pair": "i32"},
}
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    (
        _gumbel_kernel,
        {"keys": "*i32", "out": "*fp32", "first_pair": "i32"},
        {"COUNT": 25256, "ODD": 0, "WIDTH": BLOCK, "PDL": True},
        _OPTIONS,
    ),
    (_blocks_kernel, {**_OF_LOGITS, **_STRIDES}, {"HAS_MASK": True, **_SHARE}, _OPTIONS),
    (
        _rows_kernel,
        {"values": "*fp32", "ids": "*i32", "bad": "*i32", **_OF_ROW, "start": "i32"},
        {**_COUNTS, "PDL": True},
        {**_OPTIONS, "num_warps": 1},
    ),
    *(
        (
            _draw_kernel,
            _OF_DRAW,
            {"HAS_MASK": True, "HAS_TOPS": has_tops, "ODD": 0, **_SHARE, **_COUNTS},
            _OPTIONS,
        )
        for has_tops in (False, True)
    ),
]
