"""Captured pieces of prompts: the eager step bit for bit, a prompt in pieces as a whole, padding that goes nowhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.buckets import Piece
from muse_fn.capture import CaptureError
from muse_fn.captured_prefill import ReadSteps, capture_reads
from muse_fn.decoder import forward
from muse_fn.kernels.select import REFERENCE, STATIC, Ops, select
from muse_fn.kvcache.cache import KVCache, View, init_cache
from muse_fn.kvcache.layout import layout_of
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.simulated import simulate
from muse_fn.sharding.split import shard
from muse_fn.step import prefill
from tests.models import (
    FULL,
    SEEDS,
    SLIDING,
    SMALL,
    close,
    configs,
    copied,
    fitting_configs,
    on_arrays,
    random_params,
    random_tokens,
    scattered_cache,
    snapshot,
    unchanged,
)

BLOCK = 4


class Prompt(NamedTuple):
    """A prompt, and a cache with scattered blocks for it."""

    params: Params
    tokens: Tensor  # int64 [1, N]
    kv: KVCache
    table_G1N: Tensor

    def view(self, start: int, stop: int) -> View:
        """Of tokens start..stop."""
        return View(self.table_G1N, torch.tensor([start]), torch.tensor([stop - start]))


def prompt(config: Config, seed: int, length: int, dtype: torch.dtype = torch.float32) -> Prompt:
    params = random_params(config, seed, dtype)
    kv, table = scattered_cache(config, 1, length, BLOCK, seed)
    kv = on_arrays(lambda t: t.to(dtype), kv)
    return Prompt(params, random_tokens(config, seed, 1, length), kv, table)


def capture_for(
    given: Prompt, config: Config, *sizes: Piece, strict: bool = True, ops: Ops | None = None
) -> tuple[ReadSteps, KVCache]:
    return capture_reads(given.params, copied(given.kv), config, sizes=sizes, strict=strict, ops=ops)


def same_bits(one: KVCache, other: KVCache) -> None:
    """Raises unless these caches hold the same but for block 0."""
    for x, y in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        assert torch.equal(x[1:].nan_to_num(7.0), y[1:].nan_to_num(7.0))


def blind(ops: Ops) -> Ops:
    """These forms, never told that a step is a prompt's first: as a captured step has them, which cannot know."""

    def untold(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: form(*args[:-1], False)

    return replace(ops, attend=untold(ops.attend), attend_blocks=untold(ops.attend_blocks))


# Of a CPU, and those that a device takes; the latter do not ask whether a step is a prompt's first.
TABLES = {"cpu": None, "static": STATIC, "reference": REFERENCE}
# In bfloat16 a vector's worth of keys and a few of them by themselves get other exponentials from the library: here a
# first step of two keys, in a table that holds sixteen, is not what it is to who knows that there are two.
TWO_KEYS = replace(
    SMALL, hidden_size=6, layers=2, heads=1, kv_heads=1, head_dim=2, latent_size=2, expert_size=4, experts=1, top_k=1,
    window=1, rope_theta=100.0, rms_norm_eps=0.01, post_norm_eps=1e-8, qk_scale_factor=0.5, routed_scaling_factor=1.0,
    soft_cap=0.0, layer_types=(FULL, SLIDING), layer_rope_theta=(0.0, 0.0), mlp_layer_types=("sparse", "sparse"),
)  # fmt: skip


class Sizes(NamedTuple):
    """Of a step that reads a part of a prompt."""

    start: int
    length: int
    pad: int  # tokens up to the piece's
    more: int  # columns likewise


@example(TWO_KEYS, 0, Sizes(0, 2, 0, 2), torch.bfloat16, "cpu", False)
@example(TWO_KEYS, 0, Sizes(0, 2, 0, 2), torch.bfloat16, "static", False)
@given(
    configs(),
    SEEDS,
    st.builds(Sizes, st.integers(0, 5), st.integers(1, 9), st.integers(0, 4), st.integers(0, 2)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([*TABLES]),
    st.booleans(),
)
def test_captured_is_the_padded_step_bit_for_bit(
    config: Config, seed: int, sizes: Sizes, dtype: torch.dtype, table: str, strict: bool
) -> None:
    """At the start of a prompt and behind a piece of it. Eager `prefill` tells the first step's attention that it is
    the first: one form, a CPU's in bfloat16, then has other bits (`kernels/reference.py`), and is not told here."""
    (start, length, pad, more), ops = sizes, TABLES[table]
    given_ = prompt(config, seed, length + 5, dtype)
    piece = Piece(length + pad, given_.table_G1N.shape[2] + more)
    steps, mine = capture_for(given_, config, piece, strict=strict, ops=ops)
    same_bits(mine, given_.kv)  # capture writes into block 0 only
    theirs = copied(given_.kv)
    with torch.inference_mode():
        tells = table == "cpu" and dtype == torch.bfloat16 and not start
        eager = blind(select(torch.device("cpu"))) if tells else ops
        if start:
            args = given_.tokens[:, :start], theirs, given_.view(0, start), config
            _, theirs = prefill(given_.params, *args, ops=ops)
            mine = on_arrays(torch.clone, theirs)
            steps, mine = capture_reads(given_.params, mine, config, sizes=[piece], strict=strict, ops=ops)
        tokens, view = given_.tokens[:, start : start + length], given_.view(start, start + length)
        before = snapshot((tokens, view))
        wide = torch.nn.functional.pad(tokens, (0, pad))
        fit = view._replace(table_GBN=torch.nn.functional.pad(view.table_GBN, (0, more)))
        expected, theirs = prefill(given_.params, wide, theirs, fit, config, checked=True, ops=eager)
        found, mine = steps(tokens, view, mine)
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    same_bits(mine, theirs)
    unchanged((tokens, view), before)


@settings(max_examples=20)
@given(SEEDS, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_prompt_in_pieces_is_the_prompt(seed: int, lengths: list[int]) -> None:
    given_ = prompt(SMALL, seed, sum(lengths))
    columns = given_.table_G1N.shape[2]
    steps, kv = capture_for(given_, SMALL, Piece(9, columns + 1), Piece(4, columns), Piece(1, columns), strict=False)
    expected, start = forward(given_.params, given_.tokens, SMALL), 0
    for length in lengths:
        stop = start + length
        found, kv = steps(given_.tokens[:, start:stop], given_.view(start, stop), kv)
        close(found, expected[:, stop - 1])
        start = stop


@settings(max_examples=6)
@given(st.data(), SEEDS)
@pytest.mark.parametrize("mesh", [Mesh(2, 2, squeeze="split"), Mesh(1, 2, pp=2)])
def test_ranks_read_together(mesh: Mesh, data: st.DataObject, seed: int) -> None:
    """Whole logits from each rank's share of the vocabulary, through collectives inside the step; stages too."""
    config = data.draw(fitting_configs(mesh))
    params, tokens = random_params(config, seed), random_tokens(config, seed, 1, 7)
    expected = forward(params, tokens, config)[:, -1]
    table = 1 + torch.arange(2 * 8).view(8, 1, 2)

    def work(own: Mesh) -> Tensor:
        mine = shard(params, config, own)
        groups = layout_of(config, own).groups
        kv = init_cache(config, 1 + 2 * groups, BLOCK, dtype=torch.float32, mesh=own)
        steps, kv = capture_reads(mine, kv, config, own, sizes=[Piece(8, 3)])
        found, _ = steps(tokens, View(table[:groups], torch.tensor([0]), torch.tensor([7])), kv)
        return found.clone()

    stage = simulate(mesh, work)[-mesh.ep * mesh.tp :]
    close(torch.cat(stage, 1), expected)


def test_what_fits_no_piece_and_a_dead_handle_are_refused() -> None:
    given_ = prompt(SMALL, 0, 12)
    steps, kv = capture_for(given_, SMALL, Piece(4, 3), Piece(8, 2))
    assert steps.piece_for(3, 3) == (4, 3)
    assert steps.piece_for(5, 2) == (8, 2)
    assert steps.piece_for(5, 3) is None
    assert steps.bytes == {Piece(8, 2): None, Piece(4, 3): None}, "a CPU does not say"
    with pytest.raises(ValueError, match=r"tokens is \[1, 5\] with 3 columns: no piece of one prompt holds them"):
        steps(given_.tokens[:, :5], given_.view(0, 5), kv)
    with pytest.raises(ValueError, match=r"tokens is \[2, 3\] with 3 columns"):
        steps(given_.tokens[:, :3].expand(2, -1), given_.view(0, 3), kv)
    with pytest.raises(CaptureError, match=r"kv.k.0 is not the tensor it was when captured"):
        steps(given_.tokens[:, :3], given_.view(0, 3), copied(kv))
    _, after = steps(given_.tokens[:, :3], given_.view(0, 3), kv)
    with pytest.raises(ValueError, match="consumed by an earlier step"):
        steps(given_.tokens[:, :3], given_.view(0, 3), kv)
    assert after.alive


def test_capture_goes_from_the_largest_to_the_smallest_and_tells() -> None:
    told: list[tuple[int, int, str]] = []
    steps, _ = capture_reads(
        random_params(SMALL, 0), init_cache(SMALL, 3, 4), SMALL, chunk=48, max_columns=12,
        progress=lambda done, total, name, seconds: told.append((done, total, name)),
    )  # fmt: skip
    assert [*steps.captured] == [(48, 12), (32, 12), (32, 8)]
    assert told == [(n + 1, 3, str(piece)) for n, piece in enumerate(steps.captured)]
    assert str(Piece(48, 12)) == "48 tokens of a prompt, 12 columns"


def test_a_row_that_is_not_finite_is_told() -> None:
    given_ = prompt(SMALL, 0, 6)
    assert isinstance(given_.params.embed, Tensor)
    embed = given_.params.embed.clone()
    embed[given_.tokens[0, 2]] = torch.nan
    broken = given_._replace(params=given_.params._replace(embed=embed))
    steps, kv = capture_for(broken, SMALL, Piece(8, 2))
    found, kv = steps(given_.tokens, given_.view(0, 6), kv)
    assert not found.isfinite().any()
