"""CPU forms: each touched expert's weights are read once, attention keeps a bounded workspace.

On processors with matrix units (AMX) oneDNN packs the right factor of a bfloat16 product on every call and reads the
left one as it lies. With few rows the weight is the factor worth not packing, so it stands on the left: W xᵀ instead of
x Wᵀ, at 1.4 times the read rate. Without such units x Wᵀ is the faster one, twice as fast for a single row.

float32 without a cache keeps the operations of the published implementation and their order instead. It is the dtype of
comparison, and the residual gates amplify the last bit: in nine layers at initial scale a fused softmax moves the
logits by 4e-4.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels import cpu_long, reference
from muse_fn.kernels.one_op import one_op
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise, logical_shape

WORKSPACE = 64 << 20  # bytes that attention keeps for one tile of queries, whatever the context length
GATHERED = 64 << 20  # bytes of gathered keys and values from which a context is read in tiles
MASK_BYTES = 8  # that the fused form takes for each query and key: the mask, what it is made of, and its float form
WEIGHT_ROWS = 32  # up to here reading an expert's weights costs more than its rows
PADDING = 1.6  # one product over all experts instead of two for each touched: worth this much more work
LONG = 1 << 16  # keys from which float32 attention is tiled too: plain operations move every score through memory
FEW_ROWS = 64  # up to here W xᵀ and its transposition back cost less than x Wᵀ


@lru_cache
def has_matrix_units() -> bool:
    """Whether this processor has tile products of bfloat16, which decides the order of factors."""
    found = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, and all that says it
    return bool(found and found())


def _left(w: Tensor, x: Tensor) -> Tensor:
    """W xᵀ for few rows x [T, in] in bfloat16 -> [out, T], by the order of factors that is faster here."""
    if not has_matrix_units():
        return F.linear(x, w).t()
    return torch.mv(w, x[0]).unsqueeze(1) if len(x) == 1 else F.linear(w, x)


def linear(x: Tensor, w: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """reference.linear with the weight on the left when the rows are few and bfloat16."""
    rows = x.numel() // x.shape[-1]
    if not isinstance(w, Tensor) or w.dtype != torch.bfloat16 or rows > FEW_ROWS:
        return reference.linear(x, w, dtype)
    x = x.to(w.dtype)
    return _left(w, x.flatten(0, -2)).t().to(dtype or w.dtype).contiguous().view(*x.shape[:-1], len(w))


def attend(
    q_BTND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    q_pos_BT: Tensor,
    k_pos_BS: Tensor,
    window: int,
    is_start: bool = False,
) -> Tensor:
    """reference.attend in tiles of queries: its own operations in float32, PyTorch's fused attention otherwise."""
    length = q_BTND.shape[1]
    exact = q_BTND.dtype == torch.float32
    if is_start and not exact and 1 < length <= k_pos_BS.shape[1] and not 0 < window < length:
        # The mask is the triangle, which the fused form need not read and half of which it need not compute. Its bits
        # are not those over all keys: the library's exponentials of a vector and of what is left of one differ.
        q, k, v = (x.transpose(1, 2) for x in (q_BTND.contiguous(), k_BSKD[:, :length], v_BSKD[:, :length]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    own_form = reference.attend if k_pos_BS.shape[1] == length else grouped
    form, width = (own_form, reference.SCORE_BYTES * q_BTND.shape[2]) if exact else (_fused, MASK_BYTES)
    rows = max(1, WORKSPACE // (width * k_pos_BS.numel()))
    if rows >= length:
        return form(q_BTND, k_BSKD, v_BSKD, q_pos_BT, k_pos_BS, window)
    tiles = zip(q_BTND.split(rows, 1), q_pos_BT.split(rows, 1), strict=True)
    return torch.cat([form(q, k_BSKD, v_BSKD, pos, k_pos_BS, window) for q, pos in tiles], 1)


def grouped(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    """reference.attend in float32 with the heads of a group as rows of one product: no key is copied once per head."""
    batch, length, _, head_dim = q_BTND.shape
    q_KBRD = q_BTND.unflatten(2, (k_BSKD.shape[2], -1)).permute(2, 0, 3, 1, 4).flatten(2, 3)  # rows R: group, query
    hidden_B1TS = torch.where(reference.visible(q_pos_BT, k_pos_BS, window), 0.0, torch.finfo(torch.float32).min)[
        :, None
    ]
    found: list[Tensor] = []
    for q, k, v in zip(q_KBRD.unbind(), k_BSKD.unbind(2), v_BSKD.unbind(2), strict=True):
        scores = q.bmm(k.mT).mul_(head_dim**-0.5).unflatten(1, (-1, length)).add_(hidden_B1TS)
        found.append(torch.softmax(scores, -1).flatten(1, 2).bmm(v).unflatten(1, (-1, length)))
    return torch.stack(found).permute(1, 3, 0, 2, 4).reshape(batch, length, -1, head_dim)


def _fused(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    q_BTND = q_BTND.contiguous()  # in any other order PyTorch leaves its fused form, silently
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    mask = reference.visible(q_pos_BT, k_pos_BS, window).unsqueeze(1)
    if q.shape[2] == 1:  # one query: the heads of a group stand as rows, so that its keys are read once
        rows = q_BTND.view(q.shape[0], k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(rows, k, v, mask).reshape(q_BTND.shape)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


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
    """reference.attend_blocks; a context too long to be gathered at once, or to be worth it, is read in tiles."""
    _, _, kv_heads, head_dim = k_arena.shape
    gathered = 2 * k_pos_BS.numel() * kv_heads * head_dim * q_BTND.element_size()
    if gathered > GATHERED or (q_BTND.dtype == torch.float32 and k_pos_BS.shape[1] >= LONG):
        return cpu_long.attend_blocks(q_BTND, k_arena, v_arena, blocks_BC, q_pos_BT, k_pos_BS, window)
    k, v = (reference.rows_of(arena, blocks_BC, k_pos_BS, q_BTND.dtype) for arena in (k_arena, v_arena))
    return attend(q_BTND, k, v, q_pos_BT, k_pos_BS, window, is_start)


@one_op  # on a device one launch: here routes are sorted and counted on the host
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
    """reference.expert_rows with the routes sorted by expert: one pair of products per touched expert, or for all."""
    del arranged
    return _expert_rows(u_TM, idx_TR - first, gate_up_EFM, down_EMF).to(dtype or u_TM.dtype)


def _expert_rows(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    if len(u_TM) == 1 and u_TM.dtype == torch.bfloat16:
        return _one_token(u_TM, idx_TR[0].tolist(), gate_up_EFM, down_EMF)
    routes, experts = idx_TR.flatten(), logical_shape(down_EMF)[0]
    (here,) = torch.where((routes >= 0) & (routes < experts))
    if len(here) < len(routes):  # some experts are on other ranks: work on the others' routes alone
        out = u_TM.new_zeros(len(routes), u_TM.shape[-1])
        if len(here):
            own = _expert_rows(u_TM[here // idx_TR.shape[-1]], routes[here, None], gate_up_EFM, down_EMF)
            out.index_copy_(0, here, own.squeeze(1))
        return out.unflatten(0, idx_TR.shape)
    order = routes.argsort(stable=True)
    counts = torch.bincount(routes, minlength=experts)
    rows, sizes = u_TM.index_select(0, order // idx_TR.shape[-1]), counts.tolist()
    place = torch.arange(len(order), device=order.device)  # where each row's result will be
    if isinstance(gate_up_EFM, Tensor) and isinstance(down_EMF, Tensor) and _even(sizes, u_TM, gate_up_EFM, down_EMF):
        expert = routes[order]
        place = place - (counts.cumsum(0) - counts)[expert] + expert * max(sizes)
        padded = u_TM.new_zeros(len(sizes) * max(sizes), u_TM.shape[-1]).index_copy(0, place, rows)
        out = _all_experts(padded.unflatten(0, (len(sizes), -1)), gate_up_EFM, down_EMF).flatten(0, 1)
    else:
        split = enumerate(rows.split(sizes))
        out = torch.cat([_expert(x, _pick(gate_up_EFM, e), _pick(down_EMF, e)) for e, x in split if sizes[e]])
    back = torch.empty_like(order).scatter_(0, order, place)
    return out.index_select(0, back).unflatten(0, idx_TR.shape)


def _one_token(u_1M: Tensor, experts: list[int], gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """[1, R, M]: no two routes share an expert, so there is nothing to sort; what is elementwise runs once for all."""
    out = u_1M.new_zeros(1, len(experts), u_1M.shape[-1])
    here = [(place, e) for place, e in enumerate(experts) if 0 <= e < logical_shape(down_EMF)[0]]
    if not here:
        return out
    both = torch.cat([_left(dequantise(_pick(gate_up_EFM, e), u_1M.dtype), u_1M) for _, e in here], 1)
    gate, up = both.t().chunk(2, -1)
    for (place, e), x in zip(here, (F.silu(gate) * up).split(1), strict=True):
        out[0, place] = _left(dequantise(_pick(down_EMF, e), u_1M.dtype), x)[:, 0]
    return out


def _even(sizes: list[int], *operands: Tensor) -> bool:
    """Whether one product over all experts, padded to the longest, costs little more than one for each touched."""
    padded = len(sizes) * max(*sizes, WEIGHT_ROWS)
    if not has_matrix_units():  # a product over all experts is no faster per row there
        return False
    costs_little = padded <= PADDING * sum(max(n, WEIGHT_ROWS) for n in sizes if n)
    return costs_little and all(x.dtype == torch.bfloat16 for x in operands)


def _all_experts(x_ECM: Tensor, gate_up_EFM: Tensor, down_EMF: Tensor) -> Tensor:
    gate, up = torch.bmm(gate_up_EFM, x_ECM.mT).chunk(2, 1)
    return torch.bmm(down_EMF, F.silu(gate) * up).mT


def _expert(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    gate_up, down = dequantise(gate_up, x.dtype), dequantise(down, x.dtype)
    if x.dtype == torch.float32:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
    if not has_matrix_units():
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
    gate, up = _left(gate_up, x).chunk(2)
    return (down @ (F.silu(gate) * up)).t()


def _pick(w: Weight, expert: int) -> Weight:
    return type(w)(*(part[expert] for part in w)) if isinstance(w, (MXFP4, NVFP4)) else w[expert]
