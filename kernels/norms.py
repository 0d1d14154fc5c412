"""The RMS norms, the residual gate and rotary position: elementwise equations, all in float32.

Source of the formulas: the published model as implemented in transformers 5.24. Inputs of any float dtype, outputs
float32; the matrix product that follows rounds once, to its weight's dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RESIDUAL_GATE_FLOOR = 1e-3


def plain_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, without a weight."""
    # The published model spells this norm pow(mean + eps, -0.5), the other two rsqrt: on a CPU the bits are the same.
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps)


class Gain(NamedTuple):
    """The factor of a norm, float32: 1 + weight of a centred or input-scaled one, the final norm's weight itself."""

    factor: Tensor


def gain(weight: Tensor) -> Gain:
    """1 + weight, the weight near 0."""
    return Gain(1.0 + weight.float())


def centred_norm(x: Tensor, weight: Tensor | Gain, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight); the weight as the checkpoint has it, or worked out."""
    (factor,) = weight if isinstance(weight, Gain) else gain(weight)
    return F.rms_norm(x.float(), x.shape[-1:], factor, eps)


def input_scaled_norm(x: Tensor, weight: Tensor | Gain, eps: float) -> Tensor:
    """y / rms(y) with y = x * (1 + weight): the scale acts before the mean square, so only its shape counts."""
    (factor,) = weight if isinstance(weight, Gain) else gain(weight)
    return F.rms_norm(x.float() * factor, x.shape[-1:], eps=eps)


class Mix(NamedTuple):
    """A residual gate worked out: how much of the stream stays and how much of the branch joins it, float32."""

    alpha: Tensor
    beta: Tensor


def mix(gate: Tensor, temperature: float) -> Mix:
    """beta = sigmoid(gate / temperature), alpha² + beta² = 1."""
    w = gate.float() / temperature
    beta = torch.sigmoid(w)
    # 1 - beta² as sigmoid(-w) (1 + beta): exact where beta is near 1.
    alpha = torch.sqrt((torch.sigmoid(-w) * (1 + beta)).clamp_min(RESIDUAL_GATE_FLOOR))
    return Mix(alpha, beta)


def residual_gate(residual: Tensor, branch: Tensor, gate: Tensor | Mix, temperature: float = 1.0) -> Tensor:
    """alpha * residual + beta * branch per channel; the gate as the checkpoint has it with its temperature, or worked
    out."""
    alpha, beta = gate if isinstance(gate, Mix) else mix(gate, temperature)
    return alpha * residual.float() + beta * branch.float()


class Rotary(NamedTuple):
    """Angles of a step: cos and sin, float32 [B, T, 1, D]."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [D]: by how much the pair of each channel turns from one position to the next."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return (theta**exponents).reciprocal().repeat(2)


def rotary_at(pos_BT: Tensor, frequencies_D: Tensor) -> Rotary:
    """The angles at these positions, each one float32 product."""
    angles = pos_BT[..., None, None] * frequencies_D
    return Rotary(angles.cos(), angles.sin())


def rotary_angles(pos_BT: Tensor, head_dim: int, theta: float) -> Rotary:
    """The angle of pair (j, j + D/2) at position p is p * theta^(-2j/D)."""
    return rotary_at(pos_BT, rotary_frequencies(head_dim, theta, pos_BT.device))


def rotate(x_BTND: Tensor, rotary: Rotary) -> Tensor:
    """Rotates pairs (j, j + D/2) of every head; the checkpoint's rows are stored for this pairing."""
    low, high = x_BTND.chunk(2, -1)
    return x_BTND * rotary.cos + torch.cat([-high, low], -1) * rotary.sin
