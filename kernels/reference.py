"""The plain-PyTorch meaning of each operation. Every other form is compared with these.

They use no data-dependent control flow, so they run under vmap, grad and capture alike. Letters: params/config.py.
"""

import torch
import torch.nn.functional as F
from einops import einsum, repeat
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, logical_shape

FP8_MAX = 240.0  # of e4m3 where an exponent is reserved, as on Gaudi 2; other devices hold up to 448
SCORE_BYTES = 20  # that `attend` takes at once for each query, key and head: scores and their softmax, masked or not
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a float of so many bytes


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., in] times w [out, in] transposed -> [..., out].

    A tensor weight sets the dtype: x is rounded to it and the result has it. A packed weight is dequantised to x's.
    With a wider `dtype` a form that sums in it need not round the result, which then has it.
    """
    w = dequantise(w, x.dtype) if isinstance(w, (MXFP4, NVFP4)) else w
    return F.linear(x.to(w.dtype), w).to(dtype or w.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), element by element."""
    return torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), element by element."""
    return F.silu(x)


def visible(q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    """bool [B, T, S]: key j is seen from query i when 0 <= j <= i, and i - j < window unless window is 0."""
    i, j = q_pos_BT.unsqueeze(-1), k_pos_BS.unsqueeze(-2)
    seen = (j >= 0) & (j <= i)
    return seen & (j > i - window) if window else seen  # never [T, S] of int64


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """Grouped-query attention over positioned keys -> [B, T, N, D] in q's dtype; softmax in float32.

    Scores are scaled by D^-0.5; query head n reads KV head n // (N / K). Positions are int64 and need no order; a key
    at position -1 is an empty place. A query that sees no key gets finite, meaningless values. `is_start` promises that
    query i and key i are at position i, or padding: a faster form may then leave the positions unread, and with them
    the keys behind the queries, which changes last bits. A captured step does not know it, so no form that a graph
    holds on a device may have other bits for it; one for a CPU has, in bfloat16 (`kernels/cpu.py`).
    """
    del is_start
    # One product per query head, as the published model: with the heads of a group in one, sums differ in the last bit.
    group = q_BTND.shape[2] // k_BSKD.shape[2]
    k, v = (repeat(x, "b s k d -> b (k g) s d", g=group) for x in (k_BSKD, v_BSKD))
    scores = q_BTND.transpose(1, 2) @ k.mT * q_BTND.shape[-1] ** -0.5
    hidden = ~visible(q_pos_BT, k_pos_BS, window).unsqueeze(1)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    p = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    return (p @ v).transpose(1, 2)


def rows_of(arena: Tensor, blocks_BC: Tensor, pos_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, K, D]: the rows of these blocks of an arena [blocks, block, K, D], zeros where the position is -1,
    whatever lies there."""
    raw = arena.view(torch.uint8) if arena.dtype == torch.float8_e4m3fn else arena  # float8 has no index_select
    # index_select copies whole blocks; indexing with the table goes element by element, four times slower on a CPU.
    rows = raw.index_select(0, blocks_BC.flatten()).view(arena.dtype).view(*pos_BS.shape, *arena.shape[2:])
    rows = rows.to(dtype)
    # Their bits and all ones, or none: masked_fill goes element by element on a CPU, this by whole registers.
    bits = rows.view(BITS[dtype.itemsize])
    return bits.bitwise_and_(-(pos_BS >= 0).to(bits.dtype)[..., None, None]).view(dtype)


def write_rows(arena: Tensor, rows_RKD: Tensor, place_R: Tensor) -> None:
    """Stores rows at these rows of a flattened arena, where it lies; float8 rounded and clamped to ±FP8_MAX."""
    if arena.dtype == torch.float8_e4m3fn:
        # index_copy has no float8 form: the bytes are copied. Beyond the largest number e4m3 has only NaN.
        rows_RKD = rows_RKD.float().clamp(-FP8_MAX, FP8_MAX).to(arena.dtype).view(torch.uint8)
        arena = arena.view(torch.uint8)
    arena.flatten(0, 1).index_copy_(0, place_R, rows_RKD.to(arena.dtype))


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
    """`attend` over the keys that these blocks of the arenas hold, C * block = S of them."""
    k, v = (rows_of(arena, blocks_BC, k_pos_BS, q_BTND.dtype) for arena in (k_arena, v_arena))
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
    """One row per route: expert e of route (t, r) applied to token t -> [T, R, M], not normed, weighted or summed.

    gate_up is [E, 2F, M] with the gate rows first, down [E, M, F]; they are experts `first` to `first` + E - 1. A route
    to any other (another rank has it) gets a row of exact zeros. The result has `dtype`, u's unless given; a form that
    sums in it need not round. `arranged` is u as `pieces.Chosen` has it, for the forms that want it.
    """
    del arranged
    idx_TR = idx_TR - first
    here_TR = (idx_TR >= 0) & (idx_TR < logical_shape(down_EMF)[0])
    gate_up, down = (_of_experts(w, torch.where(here_TR, idx_TR, 0), u_TM.dtype) for w in (gate_up_EFM, down_EMF))
    gate, up = einsum(u_TM, gate_up, "t m, t r f m -> t r f").chunk(2, -1)
    rows = einsum(F.silu(gate) * up, down, "t r f, t r m f -> t r m")
    return torch.where(here_TR.unsqueeze(-1), rows, 0.0).to(dtype or u_TM.dtype)


def _of_experts(w: Weight, idx_TR: Tensor, dtype: torch.dtype) -> Tensor:
    """[E, out, in] -> the matrices of the chosen experts [T, R, out, in]."""
    chosen = type(w)(*(part[idx_TR] for part in w)) if isinstance(w, (MXFP4, NVFP4)) else w[idx_TR]
    return dequantise(chosen, dtype)
