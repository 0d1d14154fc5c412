"""Operands of single operations, of the sizes that one of eight cards of the released model has."""

import torch
from torch import Tensor

from muse_fn.kernels.packed import MXFP4, NVFP4

HIDDEN, LATENT, INNER, EXPERTS, TOP_K = 8192, 4096, 1024, 128, 8
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 2, 64, 128
BF16, EPS = torch.bfloat16, 1e-5
CUDA = torch.device("cuda")


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device."""
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def mxfp4(*shape: int, low: int = 116, high: int = 120) -> MXFP4:
    """Random codes, and scales 2^(low - 127) to 2^(high - 127)."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=CUDA)
    scales = torch.randint(low, high + 1, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device=CUDA)
    return MXFP4(codes, scales)


def nvfp4(*shape: int, parts: int = 1) -> NVFP4:
    """Random codes and scales."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=CUDA)
    scales = (torch.rand(*shape[:-1], shape[-1] // 16, device=CUDA) * 400).to(torch.float8_e4m3fn)
    return NVFP4(codes, scales, torch.rand(shape[0], parts, device=CUDA) * 1e-4)


def routes(tokens: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    """Half of each token's experts are here, all different; the others are on another rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(tokens):
        here = torch.randperm(experts, generator=generator)[: TOP_K // 2]
        rows.append(torch.cat([here, torch.full((TOP_K - len(here),), -1)])[torch.randperm(TOP_K, generator=generator)])
    return torch.stack(rows).to(CUDA)
