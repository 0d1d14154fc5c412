"""Logits -> token, with the random key an input: the same request draws the same tokens alone, in a batch, or resumed.

Random bits are Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in
int32 additions, rotations and exclusive-ors only, so that every device computes the same bits. The draw is Gumbel-max.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muse_fn.filters import keep, keep_by_kernels
from muse_fn.kernels.select import may_differentiate, why_no_numba, why_no_triton
from muse_fn.sharding.collectives import psum, stacked
from muse_fn.sharding.mesh import ONE, STAGE, Mesh

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def key(seed: int) -> Tensor:
    """int32 [2]: the key of a seed, its high and low 32 bits. Seeds beyond 64 bits are reduced modulo 2^64."""
    words = (seed >> 32) & 0xFFFF_FFFF, seed & 0xFFFF_FFFF
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


def fold_in(keys: Tensor, data: Tensor) -> Tensor:
    """A new key per (key, number): int32 [..., 2] and integers [...] -> int32 [..., 2]."""
    data = data.to(torch.int32)
    return torch.stack(threefry(keys[..., 0], keys[..., 1], torch.zeros_like(data), data), -1)


def threefry(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words of random bits for each (key, counter); all arguments int32 and broadcast together."""
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            # >> is arithmetic on int32: the mask drops the copies of the sign.
            x1 = ((x1 << r) | ((x1 >> (32 - r)) & ((1 << r) - 1))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


def gumbel(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """float32 [..., count]: standard Gumbel noise of each key int32 [..., 2], for ids from `start` on."""
    counter = torch.arange(start // 2, (start + count + 1) // 2, dtype=torch.int32, device=keys.device)
    words = threefry(keys[..., :1], keys[..., 1:], torch.zeros_like(counter), counter)
    bits = torch.stack(words, -1).flatten(-2)[..., start % 2 : start % 2 + count]
    # 23 bits and a half: exact in float32 and never 0 or 1.
    uniform = (((bits >> 9) & 0x7F_FFFF).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


@dataclass(frozen=True)
class Sampling:
    """How one request draws. temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off.

    Raises ValueError naming the field for values outside these ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature <= 100, "a number from 0 (greedy) to 100"),
            "top_k": (self.top_k >= -1, "0 or -1 (off), or a number of tokens"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
        }
        for name, (good, allowed) in rules.items():
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}: must be {allowed}")

    @property
    def is_filtered(self) -> bool:
        """Whether any of top_k, top_p and min_p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Draw(NamedTuple):
    """The settings of a batch as tensors, so that a captured step can take them as arguments."""

    temperature_B: Tensor  # float32
    top_k_B: Tensor  # int64, V where off
    top_p_B: Tensor  # float32
    min_p_B: Tensor  # float32
    key_B: Tensor  # int32 [B, 2]


def draws(settings: list[Sampling], vocab_size: int, device: str | torch.device = "cpu") -> Draw:
    """The tensors of a batch of settings."""
    columns = ([s.temperature for s in settings], [s.top_p for s in settings], [s.min_p for s in settings])
    temperature, top_p, min_p = (torch.tensor(c, dtype=torch.float32, device=device) for c in columns)
    top_k = torch.tensor([s.top_k if s.top_k > 0 else vocab_size for s in settings], device=device)
    return Draw(temperature, top_k, top_p, min_p, torch.stack([key(s.seed) for s in settings]).to(device))


def sample(
    logits_BV: Tensor,
    draw: Draw,
    pos_B: Tensor,
    *,
    allowed_V: Tensor | None = None,
    filtered: bool = True,
    greedy: bool = False,
    going_B: Tensor | None = None,
    mesh: Mesh = ONE,
) -> Tensor:
    """The next token of each row: float32 logits [B, V] -> int64 [B], -1 for a row that is not finite or not going.

    `pos_B` is the position the token will take; with the row's seed it fixes the noise. Ids that are False in
    `allowed_V` (bool [V], or [B, V] where rows differ) are never drawn. Temperature acts first, then top_k, then top_p
    on what is left renormalised, then min_p relative to the likeliest. `filtered=False` skips the filters when no row
    uses one, `greedy=True` the noise when no row has a temperature; the result is the same. On a mesh each rank gives
    its share of the logits, and all get the same tokens.
    """
    width = logits_BV.shape[-1]
    start = mesh.index(STAGE) * width
    allowed = None if allowed_V is None else allowed_V[..., start : start + width]
    if not (why_no_triton(logits_BV.device) or (form := _triton_form()).why_not(logits_BV, allowed)):
        # What each rank found in the blocks of its share goes to all.
        tops = drawn = stacked(form.tops(logits_BV, start, allowed), mesh, STAGE)
        if not greedy:
            if filtered:
                limits = draw.top_k_B, draw.top_p_B, draw.min_p_B
                logits_BV, allowed = keep_by_kernels(logits_BV, allowed, tops, draw.temperature_B, limits, mesh), None
            own = form.draw(logits_BV, tops, draw.temperature_B, draw.key_B, pos_B, start, allowed)
            drawn = stacked(own, mesh, STAGE)
        return form.tokens(tops, drawn, draw.temperature_B, going_B)
    if mesh.size(STAGE) == 1 and not (may_differentiate() or why_no_numba()) and logits_BV.is_cpu:
        compiled = _numba_form()
        if not compiled.why_not(logits_BV, allowed, draw, pos_B, going_B):
            return compiled.tokens(logits_BV, allowed, draw, pos_B, going_B, filtered=filtered, greedy=greedy)
    bad_B = ~torch.isfinite(logits_BV).all(-1)
    if going_B is not None:
        bad_B = bad_B | ~going_B
    if allowed is not None:
        logits_BV = logits_BV.masked_fill(~allowed, -torch.inf)
    if greedy:
        choices, bad_B = _largest(logits_BV[None], start, bad_B, mesh)
        return torch.where(bad_B, -1, choices[0])
    temperature = torch.where(draw.temperature_B > 0, draw.temperature_B, 1.0)
    # From the maximum down, so that the smallest temperature overflows to -inf and never to +inf.
    scaled = (logits_BV - stacked(logits_BV.amax(-1, keepdim=True), mesh, STAGE).amax(0)).float() / temperature[:, None]
    scaled = keep(scaled, draw.top_k_B, draw.top_p_B, draw.min_p_B, mesh) if filtered else scaled
    drawn = scaled + gumbel(fold_in(draw.key_B, pos_B), width, start)
    choices, bad_B = _largest(torch.stack([logits_BV, drawn]), start, bad_B, mesh)
    return torch.where(bad_B, -1, torch.where(draw.temperature_B > 0, choices[1], choices[0]))


@lru_cache
def _triton_form() -> Any:
    return import_module("muse_fn.kernels.gpu_sample")


@lru_cache
def _numba_form() -> Any:
    return import_module("muse_fn.kernels.cpu_sample")


def _largest(x_CBV: Tensor, start: int, bad_B: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The lowest id of the largest value of each row, int64 [C, B], and whether the row is bad anywhere, bool [B]."""
    value_CB, id_CB = x_CBV.max(-1)
    if mesh.size(STAGE) == 1:
        return id_CB, bad_B
    mine = torch.cat([value_CB.float().view(torch.int32), (id_CB + start).int(), bad_B[None].int()])
    value, ids, bad = stacked(mine, mesh, STAGE).split([len(value_CB), len(value_CB), 1], 1)
    first = value.contiguous().view(torch.float32).argmax(0, keepdim=True)  # lower ranks have lower ids
    return ids.gather(0, first)[0].long(), bad[:, 0].any(0)


def log_probability(logits_TV: Tensor, ids_T: Tensor, mesh: Mesh = ONE) -> Tensor:
    """float32 [T]: the natural log-probability of one id per row; on a mesh each rank gives its share of the logits."""
    top_T1 = stacked(logits_TV.amax(-1, keepdim=True), mesh, STAGE).amax(0)
    total_T1 = psum((logits_TV - top_T1).exp().sum(-1, keepdim=True), mesh, STAGE)
    local_T1 = (ids_T - mesh.index(STAGE) * logits_TV.shape[-1])[:, None]
    here = (local_T1 >= 0) & (local_T1 < logits_TV.shape[-1])
    own_T1 = torch.where(here, logits_TV.gather(-1, torch.where(here, local_T1, 0)) - top_T1, 0.0)
    return (psum(own_T1, mesh, STAGE) - total_T1.log())[:, 0]
