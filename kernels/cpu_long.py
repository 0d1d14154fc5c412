"""Attention over a context too long to be gathered at once, on a CPU: PyTorch's fused kernel on tiles of keys that all
queries see, plain tiles for the few at an edge, merged by the logarithms of their sums.
"""

import torch
from torch import Tensor

from muse_fn.kernels import streamed
from muse_fn.kernels.one_op import one_op
from muse_fn.kernels.reference import rows_of

KEYS = 4096  # keys of a tile; one that only some queries see costs as much as many that all see
BLOCK_BYTES = 32 << 20  # of keys and values gathered at once


@one_op
def attend_blocks(
    q_BTND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
) -> Tensor:
    """reference.attend_blocks in float32 -> [B, T, N, D] in q's dtype, one sequence after the other."""
    found = [
        _one(q, k_arena, v_arena, blocks, q_pos, k_pos, window)
        for q, blocks, q_pos, k_pos in zip(q_BTND, blocks_BC, q_pos_BT, k_pos_BS, strict=True)
    ]
    return torch.stack(found).to(q_BTND.dtype)


def _one(
    q_TND: Tensor, k_arena: Tensor, v_arena: Tensor, blocks_C: Tensor, q_pos_T: Tensor, k_pos_S: Tensor, window: int
) -> Tensor:
    """One sequence -> float32 [T, N, D]."""
    block = k_arena.shape[1]
    columns = max(1, KEYS // block)
    length, heads, head_dim = q_TND.shape
    total, out = torch.full((heads, length, 1), -torch.inf), torch.zeros(heads, length, head_dim)
    first, last = int(q_pos_T.min()), int(q_pos_T.max())
    for start in range(0, len(blocks_C), columns):
        blocks, pos = blocks_C[start : start + columns], k_pos_S[start * block : (start + columns) * block]
        oldest, newest = int(pos.min()), int(pos.max())
        if newest < 0 or oldest > last or (window and newest <= first - window):
            continue
        all_seen = oldest >= 0 and newest <= first and not (window and oldest <= last - window)
        k, v = (rows_of(arena, blocks[None], pos[None], torch.float32)[0] for arena in (k_arena, v_arena))
        part, sums = (_seen if all_seen else _masked)(q_TND, k, v, q_pos_T, pos, window)
        total, out = _merge(total, out, sums, part)
    return out.transpose(0, 1)


def _merge(a: Tensor, out_a: Tensor, b: Tensor, out_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of an attention with the logarithms of their sums, -inf where nothing was seen."""
    both = torch.logaddexp(a, b)
    safe = torch.where(both == -torch.inf, 0.0, both)
    return both, out_a * (a - safe).exp() + out_b * (b - safe).exp()


def _seen(
    q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, q_pos: Tensor, k_pos: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """All queries see all keys -> [N, T, D] and the logarithm of the sum [N, T, 1]."""
    del q_pos, k_pos, window
    heads, kv_heads = q_TND.shape[1], k_SKD.shape[1]
    # The heads of a group stand as rows, so that its keys are read once.
    q = q_TND.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)[None]
    k, v = (x.transpose(0, 1)[None] for x in (k_SKD, v_SKD))
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out[0].reshape(heads, len(q_TND), -1), sums[0].reshape(heads, len(q_TND), 1)


def _masked(
    q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, q_pos: Tensor, k_pos: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """As `_seen`, each query seeing what it may."""
    heads, group = q_TND.shape[1], q_TND.shape[1] // k_SKD.shape[1]
    parts: list[Tensor] = []
    sums: list[Tensor] = []
    rows = max(1, BLOCK_BYTES // (16 * heads * len(k_pos)))
    for q, at in zip(q_TND.split(rows), q_pos.split(rows), strict=True):
        k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_SKD, v_SKD))
        scores = q.float().transpose(0, 1) @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(streamed.hidden(at[None], k_pos[None], window, 1)[0], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        sums.append(total)
        parts.append((scores - torch.where(total == -torch.inf, 0.0, total)).exp() @ v)
    return torch.cat(parts, 1), torch.cat(sums, 1)
