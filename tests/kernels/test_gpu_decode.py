"""One new token of each sequence, from projected rows to gated heads, is what its three pieces make of it."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn.kernels import gpu, gpu_attention, gpu_decode, gpu_merge, gpu_ops, pieces, reference
from muse_fn.kernels.pieces import Context, Projected
from tests.kernels.test_gpu_attention import FLOAT8, TOLERANCE, TYPES, Case, case
from tests.kernels.test_gpu_heads import angles, bits, slices
from tests.models import SEEDS, close

NO_DEVICE = gpu.why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(bool(NO_DEVICE), reason=f"no place to run device kernels: {NO_DEVICE}")

HEADS = st.sampled_from([(1, 1, 16), (8, 2, 8), (3, 2, 6), (2, 3, 4), (4, 2, 32), (16, 1, 16)])
SCALE, EPS = 0.37, 1e-5


def rows_of(drawn: Case, seed: int) -> Projected:
    batch, _, count, width = drawn.q_BTND.shape
    sizes = (count * width, drawn.k_arena.shape[2] * width, drawn.k_arena.shape[2] * width, count * width)
    return Projected(*slices(seed, batch, 1, sizes, drawn.q_BTND.dtype))


def context_of(drawn: Case, window: int, unseen: bool) -> Context:
    """The new position's row, which the first sequence does not see if `unseen`."""
    column = (drawn.k_pos_BS == drawn.q_pos_BT).int().argmax(1)
    size = drawn.k_arena.shape[1]
    block = drawn.blocks_BC.gather(1, (column // size)[:, None])[:, 0]
    k_pos = drawn.k_pos_BS.clone()
    if unseen:
        k_pos[0, column[0]] = -1
    return Context(block * size + column % size, drawn.blocks_BC, drawn.q_pos_BT, k_pos, window)


def expected(rows: Projected, arenas: list[Tensor], at: Context, is_full: bool) -> Tensor:
    """By the plain pieces, attention in float32; writes into the arenas."""
    batch, _, features = rows.q_BTF.shape
    rotary = angles(batch, 1, arenas[0].shape[3], is_full)
    q = pieces.place(*rows[:3], rotary, SCALE, EPS, arenas[0], arenas[1], at.write)
    o = reference.attend_blocks(q.float(), arenas[0], arenas[1], *at[1:5])
    sees = reference.visible(at.q_pos_BT, at.k_pos_BS, at.window).any(-1)
    o = (o * sees[..., None, None]).to(q.dtype)
    return pieces.gated(o, rows.gate_BTF, EPS, q.dtype).view(batch, 1, features)


def check(drawn: Case, seed: int, window: int, is_full: bool, unseen: bool = False) -> None:
    rows, at = rows_of(drawn, seed), context_of(drawn, window, unseen)
    arenas, ours = ([x.clone() for x in (drawn.k_arena, drawn.v_arena)] for _ in "eo")
    dtype, rotary = rows.q_BTF.dtype, angles(len(at.write), 1, drawn.k_arena.shape[3], is_full)
    wanted = expected(rows, arenas, at, is_full)
    assert not gpu_decode.why_not(rows, ours[0], ours[1], at, dtype)
    found = gpu_ops.attend_new(rows, rotary, SCALE, EPS, ours[0], ours[1], at, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    # Heads are normed behind attention, so that what is small there may differ by as much as what is large.
    close(found.float(), wanted.float(), 4 * TOLERANCE[dtype])
    for f, before, e in zip(ours, drawn[1:3], arenas, strict=True):
        new = torch.zeros(f.shape[0] * f.shape[1], dtype=torch.bool).index_fill(0, at.write, True).view(f.shape[:2])
        assert torch.equal(bits(f[~new]), bits(before[~new]))
        close(f[new].float(), e[new].float(), max(TOLERANCE[dtype], 2**-3 if f.dtype == FLOAT8 else 0))


@settings(max_examples=20)
@given(
    SEEDS, st.lists(st.integers(1, 150), min_size=1, max_size=3), st.sampled_from([1, 5, 16, 32]), HEADS, TYPES,
    st.sampled_from([0, 1, 7, 64]), st.integers(0, 3), st.booleans(), st.sampled_from([1, 4, 9]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_any_splits_are_the_pieces(
    seed: int, lengths: list[int], block: int, heads: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype],
    window: int, empty: int, shuffled: bool, processors: int, is_full: bool, unseen: bool,
) -> None:  # fmt: skip
    drawn = case(seed, lengths, 1, block, heads, *types, empty, shuffled)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TILE_BYTES", 1), ("FEWEST_KEYS", 1), ("SCANNED", 32)):
            patch.setattr(gpu_attention, name, value)
        patch.setattr(gpu_merge, "MERGED", 2)
        patch.setattr(gpu_attention, "processors", Mock(return_value=processors))
        check(drawn, seed, window, is_full, unseen)


@pytest.mark.parametrize(("cache", "block"), [(torch.bfloat16, 128), (torch.bfloat16, 16), (FLOAT8, 256)])
@pytest.mark.parametrize("processors", [1, 4, 64])
def test_the_released_shape(cache: torch.dtype, block: int, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "processors", Mock(return_value=processors))
    drawn = case(1, [700, 129], 1, block, (8, 2, 64), torch.bfloat16, cache)
    for window in (0, 256):
        check(drawn, 2, window, is_full=window == 0)


def test_what_is_said_of_others() -> None:
    drawn = case(3, [20], 1, 16, (2, 2, 16), torch.float32, torch.float32)
    rows, at, arenas = rows_of(drawn, 3), context_of(drawn, 0, unseen=False), drawn[1:3]
    assert "bfloat16" in gpu_decode.why_not(rows, *arenas, at, torch.bfloat16)
    assert "float64" in gpu_decode.why_not(rows._replace(gate_BTF=rows.gate_BTF.double()), *arenas, at, torch.float32)
    assert "keys are torch.bfloat16" in gpu_decode.why_not(
        rows._replace(k_BTF=rows.k_BTF.bfloat16()), *arenas, at, torch.float32
    )
    two = Projected(*[torch.cat([x, x], 1) for x in rows])
    assert "2 new tokens" in gpu_decode.why_not(two, *arenas, at, torch.float32)
    assert "no keys" in gpu_decode.why_not(rows, *arenas, at._replace(k_pos_BS=at.k_pos_BS[:, :0]), torch.float32)


def test_a_new_key_that_nobody_sees_harms_nobody() -> None:
    """Neither its values, whatever they are, nor its place: a position below 0 is that of an empty place as well."""
    for position, length in ((3, 3), (3, 0), (-1, 0)):
        drawn = case(5, [8], 1, 8, (1, 1, 16), torch.float32, torch.float32)
        rows = rows_of(drawn, 5)
        rows = rows._replace(v_BTF=torch.full_like(rows.v_BTF, torch.inf) if position >= 0 else rows.v_BTF)
        k_pos = torch.where(torch.arange(8) < length, torch.arange(8), -1)[None]
        at = Context(drawn.blocks_BC[0] * 8 + 3, drawn.blocks_BC, torch.tensor([[position]]), k_pos, 0)
        arenas, ours = ([x.clone() for x in drawn[1:3]] for _ in "eo")
        found = gpu_ops.attend_new(rows, None, SCALE, EPS, ours[0], ours[1], at, torch.float32)
        assert found.isfinite().all()
        close(found, expected(rows, arenas, at, is_full=True).nan_to_num(), 1e-4)


def test_several_new_tokens_go_by_the_pieces() -> None:
    drawn = case(4, [20], 2, 16, (2, 2, 16), torch.float32, torch.float32)
    one = rows_of(drawn, 4)
    rows = Projected(*[torch.cat([x, 2 * x.flip(-1)], 1) for x in one])
    size = drawn.k_arena.shape[1]
    write = drawn.blocks_BC[0, drawn.q_pos_BT[0] // size] * size + drawn.q_pos_BT[0] % size
    at = Context(write, drawn.blocks_BC, drawn.q_pos_BT, drawn.k_pos_BS, 0)
    arenas, ours = ([x.clone() for x in drawn[1:3]] for _ in "eo")
    q = pieces.place(*rows[:3], None, SCALE, EPS, arenas[0], arenas[1], write)
    wanted = pieces.gated(reference.attend_blocks(q, arenas[0], arenas[1], *at[1:5]), rows.gate_BTF, EPS, torch.float32)
    found = gpu_ops.attend_new(rows, None, SCALE, EPS, ours[0], ours[1], at, torch.float32)
    close(found, wanted, 1e-4)
    close(ours[0][drawn.blocks_BC[0]].nan_to_num(), arenas[0][drawn.blocks_BC[0]].nan_to_num())
