"""Attention of one new token over a full context, by PyTorch's fused kernel on spans of keys, merged by their sums.

The fused kernel takes sequences of different lengths in one array; each span is such a sequence. A long block of an
arena is a span where it lies, so that its keys are read once and never copied; short blocks are gathered first. Source
of the merging: "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST = 64  # keys of a block that is read where it lies; with shorter ones the kernel mostly starts and ends
SPAN = 512  # keys of a span that is gathered
MOST_SPANS = 65_535  # in one call: the kernel's grid has no more
WORKSPACE = 64 << 20  # bytes that gathered keys and values take at once

Spans = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def fits(q_BTND: Tensor, k_arena: Tensor, window: int) -> bool:
    """Whether this is what `attend_blocks` is for, as far as sizes, dtypes and device say."""
    has_kernel = q_BTND.is_cuda and q_BTND.dtype in (torch.bfloat16, torch.float16)
    head_dim = q_BTND.shape[3]
    is_plain = k_arena.dtype in (q_BTND.dtype, torch.float8_e4m3fn) and head_dim % 8 == 0 and head_dim <= 256
    return has_kernel and is_plain and q_BTND.shape[1] == 1 and not window


def fused(
    q_PGKD: Tensor, k_SKD: Tensor, v_SKD: Tensor, start_P: Tensor, used_P: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Attention of each span alone -> [P, G, K, D] in q's dtype and the logarithm of its sum, float32 [K, P, G].

    Span p is rows start_P[p] to start_P[p] + used_P[p] of the keys, both int32, `longest` at most. Of one without keys
    nothing is said. PyTorch's memory-efficient kernel: its tile of queries has 64 rows, the flash kernel's 128, and a
    group of heads fills few of them.
    """
    spans, group = q_PGKD.shape[:2]
    ends_q = torch.arange(0, (spans + 1) * group, group, dtype=torch.int32, device=q_PGKD.device)
    # A length of its own for each span frees its start from the end of the one before.
    starts_k = torch.cat([start_P, start_P[:1]])
    lengths, rest = (ends_q, starts_k, group, longest), (0.0, 0, True)  # no dropout, no mask, but the logarithms
    q, k, v = (x.unsqueeze(0) for x in (q_PGKD.flatten(0, 1), k_SKD, v_SKD))
    forward = torch.ops.aten._efficient_attention_forward
    out, log_sum_PKG = forward(q, k, v, None, *lengths, *rest, seqlen_k=used_P)[:2]
    return out.view(q_PGKD.shape), log_sum_PKG[..., :group].transpose(0, 1)  # padded to whole warps


class _Keys(NamedTuple):
    """Some spans of keys, ready for the kernel."""

    k_SKD: Tensor
    v_SKD: Tensor
    start_P: Tensor


def attend_blocks(
    q_B1ND: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    blocks_BC: Tensor,
    q_pos_B1: Tensor,
    k_pos_BS: Tensor,
    spans: Spans = fused,
) -> Tensor:
    """reference.attend_blocks for one query without a window, if the keys it sees come first in its context.

    A span's result is rounded to q's dtype before it is merged in float32. Beside what is gathered this takes two rows
    like q for every span.
    """
    block, kv_heads, _ = k_arena.shape[1:]
    is_here = k_arena.dtype == q_B1ND.dtype and block >= SHORTEST
    per_span = 1 if is_here else -(-SPAN // block)
    table_BPC = F.pad(blocks_BC, (0, -blocks_BC.shape[1] % per_span)).unflatten(1, (-1, per_span))
    batch, count = table_BPC.shape[:2]
    seen_B1 = ((k_pos_BS >= 0) & (k_pos_BS <= q_pos_B1)).sum(1, keepdim=True)
    span = per_span * block
    used_BP = (seen_B1 - torch.arange(count, device=seen_B1.device) * span).clamp(0, span).int()
    q_BPGKD = q_B1ND.unflatten(2, (kv_heads, -1)).transpose(2, 3).expand(-1, count, -1, -1, -1)
    bytes_of_span = 2 * span * k_arena[0, 0].numel() * q_B1ND.element_size()
    at_once = MOST_SPANS if is_here else min(MOST_SPANS, max(1, WORKSPACE // bytes_of_span))
    found: list[tuple[Tensor, Tensor]] = []
    parts = (x.flatten(0, 1).split(at_once) for x in (q_BPGKD, table_BPC, used_BP))
    for q, table, used in zip(*parts, strict=True):
        keys = _in_place(k_arena, v_arena, table) if is_here else _gathered(k_arena, v_arena, table, q.dtype)
        found.append(spans(q, *keys, used, span))
    out = torch.cat([o for o, _ in found]) if len(found) > 1 else found[0][0]
    log_sum = torch.cat([x for _, x in found], 1)
    return _merged(out.unflatten(0, (batch, count)), log_sum.unflatten(1, (batch, count)), used_BP)


def _in_place(k_arena: Tensor, v_arena: Tensor, table_P1: Tensor) -> _Keys:
    start = (table_P1[:, 0] * k_arena.shape[1]).int()
    return _Keys(k_arena.flatten(0, 1), v_arena.flatten(0, 1), start)


def _gathered(k_arena: Tensor, v_arena: Tensor, table_PC: Tensor, dtype: torch.dtype) -> _Keys:
    def rows(arena: Tensor) -> Tensor:
        raw = arena.view(torch.uint8) if arena.dtype == torch.float8_e4m3fn else arena
        return raw.index_select(0, table_PC.flatten()).view(arena.dtype).flatten(0, 1).to(dtype)

    span = table_PC.shape[1] * k_arena.shape[1]
    start = torch.arange(0, len(table_PC) * span, span, dtype=torch.int32, device=table_PC.device)
    return _Keys(rows(k_arena), rows(v_arena), start)


def _merged(out_BPGKD: Tensor, log_sum_KBPG: Tensor, used_BP: Tensor) -> Tensor:
    """Each span weighted by its share of the whole sum -> [B, 1, N, D]; zeros for a query that sees nothing."""
    nothing_BP = used_BP == 0
    out_BPGKD = out_BPGKD.masked_fill_(nothing_BP[:, :, None, None, None], 0.0)
    log_sum_BGKP = log_sum_KBPG.permute(1, 3, 0, 2).masked_fill(nothing_BP[:, None, None], -torch.inf)
    top = log_sum_BGKP.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    # The weights are rounded before they are summed, so that rounding does not change what they sum to.
    share = (log_sum_BGKP - top).exp().to(out_BPGKD.dtype)
    total = share.float().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    out = (share.unsqueeze(3) @ out_BPGKD.permute(0, 2, 3, 1, 4)).squeeze(3)
    return (out.float() / total).transpose(1, 2).flatten(1, 2).unsqueeze(1).to(out.dtype)
