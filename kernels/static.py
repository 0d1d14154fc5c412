"""Forms for devices that run captured graphs: sizes decide what is done, values never, and workspaces are bounded.

A graph holds addresses and shapes, so nothing may wait for a count on the host. Experts: routes stand in tiles of rows
of one expert; the number of tiles is the most that any routing can need, and a tile that none needs computes rubbish
that nobody reads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels import reference, spans, streamed
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, logical_shape

WORKSPACE = 256 << 20  # bytes that one step of a loop over tiles of routes may take, whatever their number
SHORT = 16 << 20  # bytes gathered for one new token: up to here the reference's few operations are the faster ones
UNPACKING = 24  # bytes per element of an expert's matrix while it is unpacked: indices, values, scaled values
MOST_ROWS = 64  # of a tile; above, a matrix product does not get better


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend in tiles of queries, so that its scores stay within the workspace."""
    rows = max(1, streamed.WORKSPACE // (reference.SCORE_BYTES * q_BTND.shape[2] * k_pos_BS.numel()))
    if rows >= q_BTND.shape[1]:
        return reference.attend(q_BTND, k_BSKD, v_BSKD, q_pos_BT, k_pos_BS, window, is_start)
    tiles = zip(q_BTND.split(rows, 1), q_pos_BT.split(rows, 1), strict=True)
    return torch.cat([reference.attend(q, k_BSKD, v_BSKD, pos, k_pos_BS, window) for q, pos in tiles], 1)


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
    """reference.attend_blocks; a context too long to be gathered at once is read in tiles, one new token by spans.

    The keys that a query of a full context sees come first in it: kvcache/cache.py makes no others.
    """
    heads, head_dim = q_BTND.shape[2:]
    # K and V gathered, and once more for every query head.
    rows = 2 * head_dim * q_BTND.element_size() * (heads + k_arena.shape[2])
    taken = k_pos_BS.numel() * (rows + reference.SCORE_BYTES * heads * q_BTND.shape[1])
    if taken > SHORT and spans.fits(q_BTND, k_arena, window):
        return spans.attend_blocks(q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS)
    if taken > streamed.WORKSPACE:
        return streamed.attend_blocks(q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS, window)
    return reference.attend_blocks(q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS, window, is_start)


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
    """reference.expert_rows without sizes that depend on data, each expert read once per tile of its routes."""
    del arranged
    idx_TR = idx_TR - first
    experts, count = logical_shape(down_EMF)[0], idx_TR.numel()
    here_TR = (idx_TR >= 0) & (idx_TR < experts)
    rows = rows_of_a_tile(count, experts)
    if rows == 1:
        x = u_TM.unsqueeze(1).expand(-1, idx_TR.shape[1], -1).flatten(0, 1).unsqueeze(1)
        out = _tiles(x, torch.where(here_TR, idx_TR, 0).flatten(), gate_up_EFM, down_EMF).squeeze(1)
    else:
        route = torch.where(here_TR, idx_TR, experts).flatten()  # those of other ranks come last
        order = route.argsort(stable=True)
        place, expert_of_tile = _places(route[order], experts, rows)
        padded = u_TM.new_zeros(len(expert_of_tile) * rows + 1, u_TM.shape[-1])  # the last row takes what is not here
        padded = padded.index_copy(0, place, u_TM.index_select(0, order // idx_TR.shape[1]))
        made = _tiles(padded[:-1].unflatten(0, (-1, rows)), expert_of_tile, gate_up_EFM, down_EMF).flatten(0, 1)
        back = torch.empty_like(order).scatter(0, order, place.clamp_max(len(made) - 1))
        out = made.index_select(0, back)
    return torch.where(here_TR.unsqueeze(-1), out.unflatten(0, idx_TR.shape), 0.0).to(dtype or u_TM.dtype)


def rows_of_a_tile(routes: int, experts: int) -> int:
    """A power of two near routes per expert: then there are at most about twice as many tiles as experts. 1 while
    sorting into tiles would not read fewer matrices than taking each route alone."""
    rows = 1
    while rows < MOST_ROWS and 2 * rows * experts <= routes:
        rows *= 2
    return rows


def _places(expert_of_route: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where each of the sorted routes stands among the rows of all tiles (those of no expert here: behind them), int64
    [routes], and the expert of each tile, int64 [tiles]."""
    count = len(expert_of_route)
    tiles = count // rows + min(experts, count)
    sizes = expert_of_route.new_zeros(experts + 1).scatter_add(0, expert_of_route, torch.ones_like(expert_of_route))
    ends = ((sizes[:-1] + rows - 1) // rows).cumsum(0)  # in tiles
    first_row = F.pad(ends, (1, 0))[:-1] * rows
    number = torch.arange(count, device=sizes.device) - (sizes.cumsum(0) - sizes)[expert_of_route]
    real = expert_of_route < experts
    place = torch.where(real, first_row[torch.where(real, expert_of_route, 0)] + number, tiles * rows)
    tile = torch.arange(tiles, device=sizes.device)
    return place, torch.searchsorted(ends, tile, right=True).clamp_max(experts - 1)


def _tiles(x_CTM: Tensor, expert_C: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """Each tile of rows through its expert -> [C, T, M], as many tiles at once as the workspace allows."""
    _, width, latent = logical_shape(gate_up_EFM)
    each = UNPACKING * width * latent + 8 * x_CTM.shape[1] * (width + latent)
    step = max(1, WORKSPACE // each)
    found: list[Tensor] = []
    for x, expert in zip(x_CTM.split(step), expert_C.split(step), strict=True):
        gate, up = (x @ _of_experts(gate_up_EFM, expert, x.dtype).mT).chunk(2, -1)
        found.append((F.silu(gate) * up) @ _of_experts(down_EMF, expert, x.dtype).mT)
    return torch.cat(found)


def _of_experts(w: Weight, expert_C: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(w, (MXFP4, NVFP4)):
        return w.index_select(0, expert_C).to(dtype)
    parts = (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in w)
    chosen = (part.index_select(0, expert_C) for part in parts)
    return dequantise(type(w)(*(x.view(part.dtype) for x, part in zip(chosen, w, strict=True))), dtype)
