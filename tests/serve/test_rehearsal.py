"""Steps that a server runs before it is ready."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.batch import Runner, open_batch
from muse_fn.serve.rehearsal import FEWEST, lengths, rehearse, steps
from muse_fn.serve.steps import Orders
from tests.models import SMALL, random_params


@given(st.integers(1, 5000))
def test_any_number_of_rows_is_compiled_as_one_of_them(most: int) -> None:
    """Kernels know a number of rows by itself if it is small, else by the power of two above and by 16 dividing it."""
    taken = lengths(most)
    assert set(taken) <= set(range(1, most + 1))
    kinds = {((n - 1).bit_length(), n % 16 == 0) for n in taken}
    assert {((n - 1).bit_length(), n % 16 == 0) for n in range(1, most + 1)} == kinds
    assert set(range(1, min(most, FEWEST) + 1)) <= set(taken)


def test_nothing_but_the_block_that_belongs_to_nobody_changes() -> None:
    config = SMALL
    runner = Runner(random_params(config, 0), config, chunk=24)
    batch = open_batch(runner, 9, 8)
    with torch.inference_mode():
        for arena in (*batch.kv.k, *batch.kv.v):
            arena.fill_(3.0)
        told = list[tuple[int, int]]()
        kv = rehearse(runner, batch.kv, 5, 8, None, lambda done, total, what, seconds: told.append((done, total)))
    count = len(list(steps(runner, 5, 8)))
    assert told == [(n + 1, count) for n in range(count)]
    for arena in (*kv.k, *kv.v):
        assert (arena[1:] == 3.0).all()
        assert (arena[0] != 3.0).any(), "what was read was written there"


def test_every_kind_of_step_is_run() -> None:
    config = SMALL
    runner = Runner(random_params(config, 0), config, chunk=24)
    every: list[Orders] = list(steps(runner, 5, 8))
    reads = [(share.start, len(share.tokens)) for orders in every if len(orders.reads) == 1 for share in orders.reads]
    assert {(start, length) for start in (0, 24) for length in lengths(24)} == set(reads)
    assert {len(orders.decodes) for orders in every} - {0} == set(range(1, 6))
    together = {tuple(len(share.tokens) for share in orders.reads) for orders in every if len(orders.reads) > 1}
    assert together == {(3,) * count for count in range(2, 6)}
    assert len({rule.sampling for orders in every for rule in orders.rules}) == 3
