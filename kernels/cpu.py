"""CPU forms: each touched expert's weights are read once, attention keeps a bounded workspace.

float32 keeps the operations of the published implementation and their order. It is the dtype of comparison, and the
residual gates amplify the last bit: in nine layers at initial scale a fused softmax moves the logits by 4e-4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.packed import MXFP4, NVFP4, Weight, dequantise

TILE_BYTES = 64 << 20  # bound on what attention keeps for one tile of queries, whatever the context length


def attend(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    """reference.attend in tiles of queries: its own operations in float32, PyTorch's fused attention otherwise."""
    exact = q_BTND.dtype == torch.float32
    form, width = (reference.attend, 4 * q_BTND.shape[2]) if exact else (_fused, 1)  # bytes: scores, or a mask
    rows = max(1, TILE_BYTES // (width * k_pos_BS.numel()))
    tiles = zip(q_BTND.split(rows, 1), q_pos_BT.split(rows, 1), strict=True)
    return torch.cat([form(q, k_BSKD, v_BSKD, pos, k_pos_BS, window) for q, pos in tiles], 1)


def _fused(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor, window: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    mask = reference.visible(q_pos_BT, k_pos_BS, window).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def expert_rows(u_TM: Tensor, idx_TR: Tensor, gate_up_EFM: Weight, down_EMF: Weight) -> Tensor:
    """reference.expert_rows with the routes sorted by expert: one pair of products per touched expert."""
    routes = idx_TR.flatten()
    order = routes.argsort(stable=True)
    counts = torch.bincount(routes, minlength=_experts(gate_up_EFM)).tolist()
    rows = u_TM[order // idx_TR.shape[-1]].split(counts)
    outs = [_expert(x, _pick(gate_up_EFM, e), _pick(down_EMF, e)) for e, x in enumerate(rows) if counts[e]]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(outs)[back].unflatten(0, idx_TR.shape)


def _expert(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    gate, up = F.linear(x, dequantise(gate_up, x.dtype)).chunk(2, -1)
    return F.linear(F.silu(gate) * up, dequantise(down, x.dtype))


def _pick(w: Weight, expert: int) -> Weight:
    return type(w)(*(part[expert] for part in w)) if isinstance(w, (MXFP4, NVFP4)) else w[expert]


def _experts(w: Weight) -> int:
    return (w.codes if isinstance(w, (MXFP4, NVFP4)) else w).shape[0]
