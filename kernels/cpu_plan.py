"""Forms called one after the other in one call, from arguments that were put together before: a plan.

A plan is made from works whose addresses are not known yet: `unknown(n)` stands for the n-th number that the call
gives, and may have an offset added. The call puts each number where it belongs, as a linker does, in memory of its own:
a plan may run on several threads at once. Between two of its forms there is no Python, whose own code and data the
weights of the one before have driven out of the caches.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kernels.cpu_calls import Work, call, compiled
from muse_fn.kernels.cpu_pool import run
from muse_fn.kernels.cpu_scalars import argument, i64
from muse_fn.kernels.cpu_vectors import workspace

MOST_WORDS = 1024
SHIFT = 52  # of an unknown's number: no address or size reaches so far


class Plan(NamedTuple):
    """Words of all works, and which number is to be added to each."""

    words: Tensor  # int64 [W]: how many works; of each its form and where its arguments begin; then all arguments
    which: Tensor  # int64 [W]: the number of an unknown, 0 for none


def unknown(n: int) -> int:
    """The n-th number of a call, from 1 on, as an argument of a work."""
    return n << SHIFT


def planned(works: Sequence[Work]) -> Plan:
    """Works as a plan. Raises ValueError for more arguments than a call has room for."""
    turns, at = [len(works)], 8 * (1 + 2 * len(works))
    for form, whole, real in works:
        turns += compiled(form)[1], at
        at += 8 * (len(whole) + len(real))
    if at > 8 * MOST_WORDS:
        raise ValueError(f"a plan of {at // 8} words: at most {MOST_WORDS}")
    words, which = list(turns), [0] * len(turns)
    for _, whole, real in works:
        words += [number & ((1 << SHIFT) - 1) for number in whole]
        words += struct.unpack(f"{len(real)}q", struct.pack(f"{len(real)}d", *real))
        which += [number >> SHIFT for number in whole] + [0] * len(real)
    return Plan(*(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (words, which)))


def _follow(a):
    """Arguments: 0 words of a plan, 1 which number belongs to each, 2 how many words, 3 zero; then the numbers."""
    count, at = argument(a, 2), workspace(8192)
    words, given, which = i64(at, count), i64(argument(a, 0), count), i64(argument(a, 1), count)
    for n in range(count):
        words[n] = given[n] + argument(a, 3 + which[n])
    for n in range(words[0]):
        run(words[1 + 2 * n], at + words[2 + 2 * n], 0)


def _follow_all(a):
    """Arguments: 0 plans, 1 `_follow`, 2 how many arguments that has each time; then those."""
    for n in range(argument(a, 0)):
        run(argument(a, 1), a + 8 * (3 + n * argument(a, 2)), 0)


def follow(plans: Sequence[Plan], numbers: Sequence[Sequence[int]]) -> None:
    """Runs plans one after the other, each with its numbers for its unknowns, as many for all."""
    given = [
        word
        for plan, own in zip(plans, numbers, strict=True)
        for word in (plan.words.data_ptr(), plan.which.data_ptr(), len(plan.words), 0, *own)
    ]
    call(_follow_all, [len(plans), compiled(_follow)[1], len(given) // len(plans), *given])
