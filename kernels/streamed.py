"""Attention over a context of any length in a bounded workspace: tiles of keys, with a running maximum and sum.

Source: online softmax (Milakov and Gimelshein, 2018). Only sizes decide what is done, never values, so a captured step
can hold it.
"""

import torch
from torch import Tensor

from muse_fn.kernels.reference import rows_of

WORKSPACE = 64 << 20  # bytes that all tensors of one tile take together, whatever the context length
QUERIES = 64  # rows of a tile of queries; more read the context fewer times, and leave fewer keys to a tile
FEWEST_KEYS = 256  # below this a tile costs more than its work


def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
) -> Tensor:
    """reference.attend_blocks in float32 tiles -> [B, T, N, D] in q's dtype."""
    block = k_arena.shape[1]
    batch, queries, columns = tile_sizes(tuple(q_BTND.shape), k_arena.shape[2], block)
    found: list[Tensor] = []
    for b in range(0, len(q_BTND), batch):
        rows = slice(b, b + batch)
        context = (k_arena, v_arena, blocks_BC[rows], k_pos_BS[rows])
        tiles = zip(q_BTND[rows].split(queries, 1), q_pos_BT[rows].split(queries, 1), strict=True)
        found.append(torch.cat([_tile(q, pos, context, window, columns) for q, pos in tiles], 1))
    return torch.cat(found).to(q_BTND.dtype)


def tile_sizes(shape: tuple[int, ...], kv_heads: int, block: int) -> tuple[int, int, int]:
    """Sequences, queries and block columns of a tile for q [B, T, N, D], so that it takes at most WORKSPACE bytes.

    Per key of a tile: its rows of K and V twice (gathered, in float32), and for each query and head a score, its
    exponential and a mask, with one more for what the operations themselves need. A single block of a single sequence
    and query is the least, even if it is larger.
    """
    batch, queries, heads, head_dim = shape

    def keys(b: int, t: int) -> int:
        return WORKSPACE // (4 * b * (4 * kv_heads * head_dim + 4 * heads * t))

    t, b = min(queries, QUERIES), batch
    least = max(FEWEST_KEYS, block)
    while b > 1 and keys(b, t) < least:
        b = -(-b // 2)
    while t > 1 and keys(b, t) < least:
        t = -(-t // 2)
    return b, t, max(1, keys(b, t) // block)


def hidden(q_pos_BT: Tensor, k_pos_BS: Tensor, window: int, group: int) -> Tensor:
    """bool [B, 1, group * T, S]: the opposite of reference.visible in as few passes as it takes."""
    i = q_pos_BT.int().repeat(1, group).unsqueeze(-1)
    nowhere = torch.iinfo(torch.int32).max  # an empty place lies behind every query
    j = torch.where(k_pos_BS < 0, nowhere, k_pos_BS).int().unsqueeze(1)
    hidden = j > i
    return (hidden | (j <= i - window) if window else hidden).unsqueeze(1)


Context = tuple[Tensor, Tensor, Tensor, Tensor]  # K and V arenas, blocks [B, C], positions [B, S]


def _tile(q_BTND: Tensor, q_pos_BT: Tensor, context: Context, window: int, columns: int) -> Tensor:
    """All keys for one tile of queries -> float32 [B, T, N, D]."""
    k_arena, v_arena, blocks_BC, k_pos_BS = context
    batch, queries, heads, head_dim = q_BTND.shape
    kv_heads, block = k_arena.shape[2], k_arena.shape[1]
    # The heads of a group stand as rows beside each other, so that its keys are read once.
    q = q_BTND.float().mul(head_dim**-0.5).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    total = q.new_zeros(*q.shape[:3], 1)
    out, top = torch.zeros_like(q), torch.full_like(total, torch.finfo(torch.float32).min)
    for start in range(0, blocks_BC.shape[1], columns):
        blocks, pos = blocks_BC[:, start : start + columns], k_pos_BS[:, start * block : (start + columns) * block]
        k, v = (rows_of(arena, blocks, pos, torch.float32).transpose(1, 2) for arena in (k_arena, v_arena))
        scores = (q @ k.mT).masked_fill_(hidden(q_pos_BT, pos, window, heads // kv_heads), -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        p = scores.sub_(higher).exp_()
        shrink = (top - higher).exp()
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v, higher
    out = out / total.clamp_min(torch.finfo(torch.float32).tiny)  # a query that sees nothing gets zeros
    return out.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, head_dim)
