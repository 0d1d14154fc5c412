"""CPU forms: each touched expert's weights are read once, attention keeps a bounded workspace.

oneDNN packs the right factor of a bfloat16 product on every call and reads the left one as it lies. With few rows the
weight is the factor worth not packing, so it stands on the left: W xᵀ instead of x Wᵀ, at 1.4 times the read rate.

float32 keeps the operations of the published implementation and their order instead. It is the dtype of comparison, and
the residual gates amplify the last bit: in nine layers at initial scale a fused softmax moves the logits by 4e-4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise

TILE_BYTES = 64 << 20  # bound on what attention keeps for one tile of queries, whatever the context length
FEW_ROWS = 64  # up to here W xᵀ and its transposition back cost less than x Wᵀ


def linear(x: Tensor, w: Weight) -> Tensor:
    """reference.linear with the weight on the left when the rows are few and bfloat16."""
    rows = x.numel() // x.shape[-1]
    if not isinstance(w, Tensor) or w.dtype != torch.bfloat16 or rows > FEW_ROWS:
        return reference.linear(x, w)
    x = x.to(w.dtype)
    if rows == 1:
        return torch.mv(w, x.flatten()).view(*x.shape[:-1], -1)
    return F.linear(w, x.flatten(0, -2)).t().contiguous().view(*x.shape[:-1], -1)


def attend(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    """reference.attend in tiles of queries: its own operations in float32, PyTorch's fused attention otherwise."""
    exact = q_BTND.dtype == torch.float32
    form, width = (reference.attend, 4 * q_BTND.shape[2]) if exact else (_fused, 1)  # bytes: scores, or a mask
    rows = max(1, TILE_BYTES // (width * k_pos_BS.numel()))
    tiles = zip(q_BTND.split(rows, 1), q_pos_BT.split(rows, 1), strict=True)
    return torch.cat([form(q, k_BSKD, v_BSKD, pos, k_pos_BS, window) for q, pos in tiles], 1)


def _fused(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    q_BTND = q_BTND.contiguous()  # in any other order PyTorch leaves its fused form, silently
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    mask = reference.visible(q_pos_BT, k_pos_BS, window).unsqueeze(1)
    if q.shape[2] == 1:  # one query: the heads of a group stand as rows, so that its keys are read once
        rows = q_BTND.view(q.shape[0], k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(rows, k, v, mask).reshape(q_BTND.shape)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def expert_rows(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """reference.expert_rows with the routes sorted by expert: one pair of products per touched expert."""
    routes = idx_TR.flatten()
    order = routes.argsort(stable=True)
    counts = torch.bincount(routes, minlength=_experts(gate_up_EFM)).tolist()
    rows = u_TM.index_select(0, order // idx_TR.shape[-1]).split(counts)
    outs = [_expert(x, _pick(gate_up_EFM, e), _pick(down_EMF, e)) for e, x in enumerate(rows) if counts[e]]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(outs).index_select(0, back).unflatten(0, idx_TR.shape)


def _expert(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    gate_up, down = dequantise(gate_up, x.dtype), dequantise(down, x.dtype)
    if x.dtype == torch.float32:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
    if len(x) == 1:
        gate, up = torch.mv(gate_up, x[0]).chunk(2)
        return torch.mv(down, F.silu(gate) * up).unsqueeze(0)
    gate, up = F.linear(gate_up, x).chunk(2)
    return (down @ (F.silu(gate) * up)).t()


def _pick(w: Weight, expert: int) -> Weight:
    return type(w)(*(part[expert] for part in w)) if isinstance(w, (MXFP4, NVFP4)) else w[expert]


def _experts(w: Weight) -> int:
    return (w.codes if isinstance(w, (MXFP4, NVFP4)) else w).shape[0]
