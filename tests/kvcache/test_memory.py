"""Bytes per token, measured on arrays that were allocated and on blocks that a sequence really holds."""

import pytest
import torch

from muse_fn.batch import blocks_needed
from muse_fn.footprint import kv_bytes
from muse_fn.kvcache.blocks import NoRoom, admit, extend, fill, new_pool, stats
from muse_fn.kvcache.cache import STORAGE, init_cache
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.sharding.mesh import Mesh

RANK = Mesh(2, 4).at(5)


@pytest.mark.parametrize(("kv", "planned"), [("bf16", 8192), ("fp8", 4096), ("float32", 16384)])
@pytest.mark.parametrize("block", [16, 128])
def test_a_card_of_eight_allocates_what_the_plan_says(kv: str, planned: int, block: int) -> None:
    """The released model: real arrays of 9 blocks, so many bytes for each of their positions."""
    made = init_cache(Config(), 9, block, dtype=STORAGE[kv], mesh=RANK)
    allocated = sum(t.untyped_storage().nbytes() for t in (*made.k, *made.v))
    assert allocated / (9 * block) == planned == kv_bytes(Config(), RANK, kv).windowed


@pytest.mark.parametrize("chunk", [512, 4096])
def test_a_long_sequence_holds_that_much_a_token_and_its_windows(chunk: int) -> None:
    """300,000 tokens read in chunks: at the end, and at the worst moment on the way."""
    length, block, config = 300_000, 128, Config()
    made = init_cache(config, 2, block, dtype=torch.bfloat16, mesh=RANK)
    each = sum(t.nbytes for t in (*made.k, *made.v)) // 2
    pool = new_pool(1 + blocks_needed(config, length, chunk, block), block, layout_of(config).windows)
    pool, _ = admit(pool, 0, [0] * length)
    most = 0
    for stop in [*range(chunk, length, chunk), length]:
        wider = extend(pool, 0, stop)
        assert not isinstance(wider, NoRoom)
        pool, most = fill(wider, 0, stop), max(most, stats(wider).used)
    windows = 3 * (2048 // block + 1) * each
    held = stats(pool).used * each
    assert held <= 8192 * (length + block) + windows
    assert held / length < 8192 * 1.03
    assert most * each <= 8192 * (length + block) + windows + 3 * (chunk + block) * 8192
    assert kv_bytes(config, RANK, "bf16").unwindowed * length > 3.7 * held
