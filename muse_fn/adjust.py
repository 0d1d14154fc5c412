"""What a request changes in its logits before they are drawn from: penalties, biases, and which ids are allowed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muse_fn.sample import log_probability
from muse_fn.sharding.collectives import psum, stacked
from muse_fn.sharding.mesh import ONE, STAGE, Mesh


class Seen(NamedTuple):
    """What penalties need of one row: ids that occur in its prompt or answer, how often in the answer, and the factors.

    Off: presence 0, frequency 0, repetition 1.
    """

    ids: NDArray[np.int64]  # [E], each once
    counts: NDArray[np.int64]  # [E], of the answer alone
    presence: float
    frequency: float
    repetition: float


class Bias(NamedTuple):
    """Numbers added to the logits of some ids of one row."""

    ids: NDArray[np.int64]  # [E], each once
    values: NDArray[np.float32]  # [E]


def penalised(logits_BV: Tensor, rows: Sequence[Seen | None], mesh: Mesh = ONE) -> Tensor:
    """float32 [B, V] less what was seen: repetition divides positive and multiplies negative logits, then presence is
    taken once and frequency per occurrence in the answer. On a mesh each rank gives its share."""
    given = [(row, seen) for row, seen in enumerate(rows) if seen is not None and len(seen.ids)]
    if not given:
        return logits_BV
    factors = [[seen.presence, seen.frequency, seen.repetition] for _, seen in given for _ in seen.ids]
    place, own = _places([(row, seen.ids) for row, seen in given], logits_BV, mesh)
    counts = torch.from_numpy(np.concatenate([seen.counts for _, seen in given])).to(logits_BV.device)[own]
    presence, frequency, repetition = torch.tensor(factors, device=logits_BV.device)[own].unbind(-1)
    z = logits_BV[place]
    z = torch.where(z > 0, z / repetition, z * repetition) - frequency * counts - presence * (counts > 0)
    return logits_BV.index_put(place, z)


def biased(logits_BV: Tensor, rows: Sequence[Bias | None], mesh: Mesh = ONE) -> Tensor:
    """float32 [B, V] plus each row's bias. On a mesh each rank gives its share."""
    given = [(row, bias) for row, bias in enumerate(rows) if bias is not None and len(bias.ids)]
    if not given:
        return logits_BV
    place, own = _places([(row, bias.ids) for row, bias in given], logits_BV, mesh)
    values = torch.from_numpy(np.concatenate([bias.values for _, bias in given])).to(logits_BV.device)[own]
    return logits_BV.index_put(place, logits_BV[place] + values)


def _places(
    listed: Sequence[tuple[int, NDArray[np.int64]]], logits_BV: Tensor, mesh: Mesh
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where the ids of these rows are in this rank's share, and which of all the ids are there, bool."""
    width, device = logits_BV.shape[-1], logits_BV.device
    row = torch.from_numpy(np.concatenate([np.full(len(ids), row) for row, ids in listed])).to(device)
    column = torch.from_numpy(np.concatenate([ids for _, ids in listed])).to(device) - mesh.index(STAGE) * width
    own = (column >= 0) & (column < width)
    return (row[own], column[own]), own


def unpacked(masks: Sequence[NDArray[np.int32] | None], vocab_size: int) -> NDArray[np.bool_]:
    """bool [B, V] of masks with 32 ids to an int32, id 0 the lowest bit of the first; None allows all, and so does
    nothing beyond the vocabulary."""
    found = np.ones((len(masks), vocab_size), np.bool_)
    for row, mask in enumerate(masks):
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
            found[row] = False
            found[row, : len(bits)] = bits
    return found


class Likely(NamedTuple):
    """Of each row: the log-probability and rank of the token that was chosen, and the likeliest ids."""

    chosen_B: Tensor  # float32, natural
    rank_B: Tensor  # int64, 1 for the likeliest
    ids_BK: Tensor  # int64
    top_BK: Tensor  # float32


def likely(
    logits_BV: Tensor, chosen_B: Tensor, top: int, mesh: Mesh = ONE, *, allowed_V: Tensor | None = None
) -> Likely:
    """Natural log-probabilities of the whole distribution, at temperature 1 and without filters.

    Ids that are False in `allowed_V` (those without a token) are not listed among the likeliest, but have their share.
    On a mesh each rank gives its share of the logits, and all get the same.
    """
    width = logits_BV.shape[-1]
    start = mesh.index(STAGE) * width
    chosen_lp = log_probability(logits_BV, chosen_B, mesh).clamp_max(0.0)  # rounding may leave it above
    local = chosen_B - start
    here = (local >= 0) & (local < width)
    own = torch.where(here, logits_BV.gather(-1, torch.where(here, local, 0)[:, None])[:, 0], 0.0)
    own = psum(own, mesh, STAGE)
    rank = psum((logits_BV > own[:, None]).sum(-1), mesh, STAGE) + 1
    shown = logits_BV if allowed_V is None else logits_BV.masked_fill(~allowed_V[start : start + width], -torch.inf)
    value, ids = shown.topk(min(top, width), -1)
    values = stacked(value, mesh, STAGE).transpose(0, 1).flatten(1)
    ids = stacked(ids + start, mesh, STAGE).transpose(0, 1).flatten(1)
    value, place = values.topk(min(top, values.shape[-1]), -1)
    return Likely(chosen_lp, rank, ids.gather(-1, place), (value + (chosen_lp - own)[:, None]).clamp_max(0.0))
