"""Forms whose every row has the same bits alone, in any batch, in any chunk and after any cache hit; slower.

A matrix product's last bits depend on its shape: a library sums one row another way than sixty. Here all products of a
kind have one shape, rows padded to ROWS and keys laid out in tiles of KEYS at fixed positions, so that a row's result
depends on nothing but the row and what it sees. For float32 on a CPU; tests hold it to bit equality.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, logical_shape

ROWS = 16
KEYS = 64
WIDTH = 16  # what this does not divide a library may compute in another way for some rows of a tile than for others


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """reference.linear, ROWS rows at a time, inputs padded to a multiple of WIDTH."""
    w = dequantise(w, x.dtype) if isinstance(w, (MXFP4, NVFP4)) else w
    rows = x.to(w.dtype).flatten(0, -2)
    rows, w = _widened(rows), _widened(w)
    found = torch.cat([F.linear(tile, w) for tile in _tiles(rows)])[: len(rows)]
    return found.unflatten(0, x.shape[:-1]).to(dtype or w.dtype)


def _widened(x: Tensor) -> Tensor:
    spare = -x.shape[-1] % WIDTH
    return F.pad(x, (0, spare)) if spare else x


def _tiles(rows: Tensor) -> tuple[Tensor, ...]:
    return F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid; the last few elements of a tensor are computed as all others."""
    return _evenly(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """F.silu likewise."""
    return _evenly(F.silu, x)


def _evenly(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # PyTorch computes what does not fill a vector register by another formula for these two functions.
    flat = x.flatten()
    return fn(F.pad(flat, (0, -len(flat) % KEYS)))[: len(flat)].view(x.shape)


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend; each sequence on its own, its keys laid out by position."""
    del is_start
    length, head_dim = -(-(int(k_pos_BS.max()) + 1) // KEYS) * KEYS, q_BTND.shape[-1]
    # Zeros beside the channels, which are left out again at the end; the scale is that of the heads as they are.
    wide = (_widened(x) for x in (q_BTND * head_dim**-0.5, k_BSKD, v_BSKD))
    found = [_attend_one(q, _laid_out(k, pos, length), _laid_out(v, pos, length), at, pos, length, window)
             for q, k, v, at, pos in zip(*wide, q_pos_BT, k_pos_BS, strict=True)]  # fmt: skip
    return torch.stack(found)[..., :head_dim].to(q_BTND.dtype)


def _laid_out(rows_SKD: Tensor, pos_S: Tensor, length: int) -> Tensor:
    """[length, K, D]: each row at its position, zeros between."""
    place = torch.where(pos_S < 0, length, pos_S)
    return rows_SKD.new_zeros(length + 1, *rows_SKD.shape[1:]).index_copy(0, place, rows_SKD)[:length]


def _attend_one(
    q_TND: Tensor, k_LKD: Tensor, v_LKD: Tensor, q_pos_T: Tensor, k_pos_S: Tensor, length: int, window: int
) -> Tensor:
    """One sequence -> [T, N, D], by tiles of ROWS queries and KEYS keys, with a running maximum and sum."""
    heads, group = q_TND.shape[1], q_TND.shape[1] // k_LKD.shape[1]
    there = torch.zeros(length + 1, dtype=torch.bool).index_fill(0, torch.where(k_pos_S < 0, length, k_pos_S), True)
    key_pos = torch.where(there[:length], torch.arange(length), -1)
    out: list[Tensor] = []
    padded = F.pad(q_TND, (0, 0, 0, 0, 0, -len(q_TND) % ROWS))
    for q, pos in zip(padded.split(ROWS), F.pad(q_pos_T, (0, -len(q_pos_T) % ROWS)).split(ROWS), strict=True):
        done = [
            _attend_head(q[:, n], k_LKD[:, n // group], v_LKD[:, n // group], pos, key_pos, window)
            for n in range(heads)
        ]
        out.append(torch.stack(done, 1))
    return torch.cat(out)[: len(q_TND)]


def _attend_head(q_RD: Tensor, k_LD: Tensor, v_LD: Tensor, q_pos: Tensor, k_pos: Tensor, window: int) -> Tensor:
    total, top = q_RD.new_zeros(ROWS, 1), q_RD.new_full((ROWS, 1), torch.finfo(q_RD.dtype).min)
    out = torch.zeros_like(q_RD)
    # Tiles that a row does not see leave it as it is, bit for bit: its sums are times one, plus zero.
    for k, v, pos in zip(k_LD.split(KEYS), v_LD.split(KEYS), k_pos.split(KEYS), strict=True):
        seen = reference.visible(q_pos[None], pos[None], window)[0]
        if not seen.any():
            continue
        scores = (q_RD @ k.t()).masked_fill(~seen, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        p, shrink = (scores - higher).exp(), (top - higher).exp()
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v, higher
    return out / total.clamp_min(torch.finfo(q_RD.dtype).tiny)


def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend_blocks over `attend`."""
    k, v = (reference.rows_of(arena, blocks_BC, k_pos_BS, q_BTND.dtype) for arena in (k_arena, v_arena))
    return attend(q_BTND, k, v, q_pos_BT, k_pos_BS, window, is_start)


def expert_rows(
    u_TM: Tensor,
    idx_TR: Tensor,
    gate_up_EFM: Weight,
    down_EMF: Weight,
    *,
    first: int = 0,
    dtype: torch.dtype | None = None,
    arranged: Tensor | tuple[()] | None = None,
) -> Tensor:
    """reference.expert_rows, the routes of each expert ROWS at a time."""
    del arranged
    routes = idx_TR.flatten() - first
    out = u_TM.new_zeros(len(routes), u_TM.shape[-1])
    for expert in range(logical_shape(down_EMF)[0]):
        (mine,) = torch.where(routes == expert)
        if len(mine):
            gate_up, down = (_of_expert(w, expert) for w in (gate_up_EFM, down_EMF))
            gate, up = linear(u_TM[mine // idx_TR.shape[-1]], gate_up).chunk(2, -1)
            out[mine] = linear(silu(gate) * up, down)
    return out.unflatten(0, idx_TR.shape).to(dtype or u_TM.dtype)


def _of_expert(w: Weight, expert: int) -> Weight:
    return type(w)(*(part[expert] for part in w)) if isinstance(w, (MXFP4, NVFP4)) else w[expert]
