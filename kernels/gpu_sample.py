"""Triton forms of drawing a token: the noise of a key, and the largest of logits and of logits with noise.

The equations are those of muse_fn/sample.py, the random bits too: Threefry-2x32 with 20 rounds, Gumbel noise, logits
counted from the largest and divided by the temperature. The vocabulary is cut into blocks, each a program. What they
find is gathered from all ranks as it is and compared by the launch that needs it: no order of programs or ranks shows.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Of the types of kernels pyright sees only their plain Python parameters.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_fn.kernels.gpu import inputs_ready, options

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
def masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK: tl.constexpr):
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


@triton.jit(do_not_specialize=["start"])
def _tops_kernel(
    logits,
    allowed,
    out,
    start,
    stride,
    allowed_stride,
    plane,
    HAS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of each block, its id, and whether one is not finite."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH + tl.arange(0, WIDTH)
    here = cols < COLUMNS
    inputs_ready(PDL)
    x, kept = masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK)
    bad = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0)
    out += row * tl.num_programs(1) + block
    _leave(out, plane, kept, cols + start, here)
    tl.store(out + 2 * plane, bad)


@triton.jit
def _leave(out, plane, x, ids, here):
    """The largest of x and its lowest id, as a block leaves them for those who compare."""
    value, first = _largest(x, tl.where(here, ids, _NONE))
    tl.store(out, value.to(tl.int32, bitcast=True))
    tl.store(out + plane, first)


@triton.jit
def parts(found, row, rank_stride, COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr):
    """Where the blocks of a row lie, of all ranks, and which of PARTS places there are."""
    i = tl.arange(0, PARTS)
    return found + i // COUNT * rank_stride + row * COUNT + i % COUNT, i < RANKS * COUNT


@triton.jit
def best(at, plane, there):
    """The largest value that these blocks found and its lowest id."""
    value = tl.load(at, there, 0).to(tl.float32, bitcast=True)
    return _largest(tl.where(there, value, -float("inf")), tl.load(at + plane, there, _NONE))


@triton.jit(do_not_specialize=["first_pair"])
def _draw_kernel(
    logits,
    allowed,
    tops,
    temperature,
    keys,
    pos,
    out,
    first_pair,
    stride,
    allowed_stride,
    plane,
    rank_stride,
    HAS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ODD: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest of logits with noise of each block, and its id."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * WIDTH - ODD + tl.arange(0, WIDTH)
    here = (cols >= 0) & (cols < COLUMNS)
    inputs_ready(PDL)
    _, x = masked(logits, allowed, row, stride, allowed_stride, cols, here, HAS_MASK)
    at, there = parts(tops, row, rank_stride, COUNT, RANKS, PARTS)
    top, _ = best(at, plane, there)
    t = tl.load(temperature + row)
    k0, k1 = _key(keys, row)
    k0, k1 = threefry(k0, k1, tl.load(pos + row).to(tl.uint32))
    # From the maximum down, so that the smallest temperature overflows to -inf and never to +inf.
    x = tl.div_rn(x - top, tl.where(t > 0, t, 1.0)) + _noise(k0, k1, first_pair, block, WIDTH)
    _leave(out + row * COUNT + block, plane, x, cols + (2 * first_pair + ODD), here)


@triton.jit
def _tokens_kernel(
    tops,
    drawn,
    temperature,
    going,
    out,
    plane,
    tops_stride,
    drawn_stride,
    HAS_GOING: tl.constexpr,
    COUNT: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    inputs_ready(PDL)
    row = tl.program_id(0).to(tl.int64)
    at, there = parts(tops, row, tops_stride, COUNT, RANKS, PARTS)
    _, greedy = best(at, plane, there)
    bad = tl.max(tl.load(at + 2 * plane, there, 0), 0)
    at, there = parts(drawn, row, drawn_stride, COUNT, RANKS, PARTS)
    _, token = best(at, plane, there)
    token = tl.where(tl.load(temperature + row) > 0, token, greedy)
    if HAS_GOING:
        bad = tl.where(tl.load(going + row) != 0, bad, 1)
    tl.store(out + row, tl.where(bad != 0, -1, token).to(tl.int64))


def gumbel(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """float32 [..., count]: standard Gumbel noise of each key int32 [..., 2], for ids from `start` on."""
    rows = keys.reshape(-1, 2).contiguous()
    out = torch.empty(*keys.shape[:-1], count, dtype=torch.float32, device=keys.device)
    if out.numel():
        grid = len(rows), triton.cdiv(count + start % 2, BLOCK)
        constants = {"COUNT": count, "ODD": start % 2, "WIDTH": BLOCK}
        _gumbel_kernel[grid](rows, out, start // 2, **constants, **options(keys.device))
    return out


def tops(logits_BV: Tensor, start: int = 0, allowed: Tensor | None = None) -> Tensor:
    """int32 [3, B, blocks]: the largest of each block of float32 logits [B, V] as bits, its lowest id, and 1 where a
    logit is not finite, allowed or not; the first column is id `start`.

    Ids that are False in `allowed` (bool [V] or [B, V], of these columns) count as -inf.
    """
    (logits, mask), constants = rows_of(logits_BV, allowed)
    rows, count = len(logits), blocks(logits_BV)
    out = torch.empty(3, rows, count, dtype=torch.int32, device=logits.device)
    if rows:
        _tops_kernel[rows, count](
            *(logits, mask, out, start, logits.stride(0), 0 if mask is None else mask.stride(0), rows * count),
            **constants,
            **options(logits.device),
        )
    return out


def draw(
    logits_BV: Tensor,
    tops_P3BC: Tensor,
    temperature_B: Tensor,
    key_B: Tensor,
    pos_B: Tensor,
    start: int = 0,
    allowed: Tensor | None = None,
) -> Tensor:
    """int32 [2, B, blocks]: the largest of each block of (logit - top) / temperature + noise as bits, its lowest id.

    The top is the largest of the row in `tops` of all P ranks. Keys int32 [B, 2] are folded with the positions,
    integers [B]; a temperature of 0 counts as 1. `start` and `allowed` as of `tops`.
    """
    (logits, mask), constants = rows_of(logits_BV, allowed)
    out = torch.empty(2, *tops_P3BC.shape[2:], dtype=torch.int32, device=logits.device)
    rows, count = out.shape[1:]
    if rows:
        _draw_kernel[rows, count](
            *(logits, mask, tops_P3BC, temperature_B.contiguous(), key_B.contiguous(), pos_B.contiguous(), out),
            *(start // 2, logits.stride(0), 0 if mask is None else mask.stride(0), rows * count, tops_P3BC.stride(0)),
            **{**constants, **_compared(tops_P3BC), "ODD": start % 2, **options(logits.device)},
        )
    return out


def tokens(tops_P3BC: Tensor, drawn_P2BC: Tensor, temperature_B: Tensor, going_B: Tensor | None = None) -> Tensor:
    """int64 [B]: of what all P ranks found the drawn id, or the largest logit's where the temperature is 0; -1 for a
    row that is not finite, or False in `going_B`. Who draws nothing gives `tops` for both."""
    rows, count = tops_P3BC.shape[2:]
    out = torch.empty(rows, dtype=torch.int64, device=tops_P3BC.device)
    if rows:
        _tokens_kernel[(rows,)](
            *(tops_P3BC, drawn_P2BC, temperature_B.contiguous(), None if going_B is None else going_B.contiguous()),
            *(out, rows * count, tops_P3BC.stride(0), drawn_P2BC.stride(0)),
            **{"HAS_GOING": going_B is not None, **_compared(tops_P3BC), **options(out.device), "num_warps": 1},
        )
    return out


def blocks(logits_BV: Tensor) -> int:
    """Into how many blocks a row is cut: enough for one that begins within a pair of ids."""
    return logits_BV.shape[1] // BLOCK + 1


def why_not(logits_BV: Tensor, allowed: Tensor | None = None) -> str:
    """Why `tops` and `draw` cannot take these; "" if they can."""
    shape = list(logits_BV.shape)
    if logits_BV.dtype != torch.float32 or len(shape) != 2 or not 0 < shape[1] <= MOST:
        return f"logits are {logits_BV.dtype} {shape}: must be torch.float32 [B, V], V from 1 to {MOST}"
    if allowed is not None and (allowed.dtype != torch.bool or list(allowed.shape) not in (shape, shape[1:])):
        return f"allowed is {allowed.dtype} {list(allowed.shape)}: must be torch.bool {shape[1:]} or {shape}"
    return ""


def rows_of(logits_BV: Tensor, allowed: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], dict[str, Any]]:
    """Logits and mask with adjacent columns, and what kernels are compiled for."""
    if allowed is not None:
        allowed = allowed.expand(logits_BV.shape)
        allowed = allowed if allowed.stride(1) == 1 else allowed.contiguous()
    logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    constants = {"HAS_MASK": allowed is not None, "COLUMNS": logits_BV.shape[1], "WIDTH": BLOCK}
    return (logits_BV, allowed), constants


def _compared(tops_P3BC: Tensor) -> dict[str, Any]:
    ranks, _, _, count = tops_P3BC.shape
    return {"COUNT": count, "RANKS": ranks, "PARTS": triton.next_power_of_2(ranks * count)}


_STRIDES = dict.fromkeys(("stride", "allowed_stride", "plane"), "i32")
_OF_TOPS = {"logits": "*fp32", "allowed": "*i1", "out": "*i32", "start": "i32", **_STRIDES}
_OF_DRAW = {
    **{"logits": "*fp32", "allowed": "*i1", "tops": "*i32", "temperature": "*fp32", "keys": "*i32", "pos": "*i64"},
    **{"out": "*i32", "first_pair": "i32", **_STRIDES, "rank_stride": "i32"},
}
_OF_TOKENS = {
    **{"tops": "*i32", "drawn": "*i32", "temperature": "*fp32", "going": "*i1", "out": "*i64"},
    **dict.fromkeys(("plane", "tops_stride", "drawn_stride"), "i32"),
}
_SHARE = {"COLUMNS": 25256, "WIDTH": BLOCK, "PDL": True}
_OPTIONS = {"num_warps": 4, "launch_pdl": True}
_COMPARED = {"COUNT": 25, "RANKS": 8, "PARTS": 256}
COMPILED = [  # kernel, types of its arguments, constants, options: as for a card's share of the released model
    (
        _gumbel_kernel,
        {"keys": "*i32", "out": "*fp32", "first_pair": "i32"},
        {"COUNT": 25256, "ODD": 0, "WIDTH": BLOCK, "PDL": True},
        _OPTIONS,
    ),
    (_tops_kernel, _OF_TOPS, {"HAS_MASK": True, **_SHARE}, _OPTIONS),
    (_draw_kernel, _OF_DRAW, {"HAS_MASK": True, "ODD": 0, **_SHARE, **_COMPARED}, _OPTIONS),
    (_tokens_kernel, _OF_TOKENS, {"HAS_GOING": True, **_COMPARED, "PDL": True}, {**_OPTIONS, "num_warps": 1}),
]
