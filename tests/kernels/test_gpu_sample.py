"""The Triton draw, in Triton's interpreter: the random bits of muse_fn/sample.py, and what it needs of each row."""

import math
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_fn import sample as plain
from muse_fn.kernels import gpu_sample
from muse_fn.kernels.gpu_sample import BLOCK
from tests.models import SEEDS, close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, where numbers overflow
KEYS = st.integers(0, 2**64 - 1)
STARTS = st.sampled_from([0, 1, 2, 7, BLOCK, 25256, 3 * 25257, 2**31 - 2 * BLOCK - 1])
COUNTS = st.sampled_from([1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1])
INT32 = st.integers(-(2**31), 2**31 - 1)


@triton.jit
def words_kernel(keys, counters, out):  # pyright: ignore
    k0 = tl.load(keys).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    at = tl.arange(0, 4)
    w0, w1 = gpu_sample.threefry(k0, k1, tl.load(counters + at).to(tl.uint32, bitcast=True))  # pyright: ignore
    tl.store(out + at, w0.to(tl.int32, bitcast=True))
    tl.store(out + 4 + at, w1.to(tl.int32, bitcast=True))


@given(st.lists(INT32, min_size=2, max_size=2), st.lists(INT32, min_size=4, max_size=4))
def test_random_words_are_bit_equal(keys: list[int], counters: list[int]) -> None:
    """Sums wrap, and shifts do not copy the sign."""
    k, c = torch.tensor(keys, dtype=torch.int32), torch.tensor(counters, dtype=torch.int32)
    out = torch.empty(2, 4, dtype=torch.int32)
    words_kernel[(1,)](k, c, out)
    assert torch.equal(out, torch.stack(plain.threefry(k[0], k[1], torch.zeros_like(c), c)))


@given(st.lists(KEYS, min_size=1, max_size=2), COUNTS, STARTS)
def test_noise_of_every_id(seeds: list[int], count: int, start: int) -> None:
    keys = torch.stack([plain.key(seed) for seed in seeds])
    found, expected = gpu_sample.gumbel(keys, count, start), plain.gumbel(keys, count, start)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(gpu_sample.gumbel(keys[None], count, start)[0], found)


def test_noise_of_an_id_depends_on_no_other() -> None:
    keys = plain.key(5)[None]
    whole = gpu_sample.gumbel(keys, 2 * BLOCK + 9)
    assert torch.equal(gpu_sample.gumbel(keys, BLOCK + 3, 5), whole[:, 5 : BLOCK + 8])
    assert gpu_sample.gumbel(keys, 0).shape == (1, 0)
    assert gpu_sample.gumbel(keys[:0], 3).shape == (0, 3)


def random_logits(seed: int, rows: int, width: int) -> Tensor:
    return 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


class Found(NamedTuple):
    """What blocks left, compared."""

    value_B: Tensor
    id_B: Tensor
    bad_B: Tensor


def compared(parts: Tensor) -> Found:
    """Of what is left by one rank, [2 or 3, B, blocks]: the largest value of each row and the lowest id that has it."""
    value, ids = parts[0].view(torch.float32), parts[1]
    top = value.amax(-1)
    return Found(top, torch.where(value == top[:, None], ids, 2**31 - 1).amin(-1).long(), parts[-1].amax(-1) > 0)


def largest(logits: Tensor, start: int = 0, allowed: Tensor | None = None) -> Found:
    return compared(gpu_sample.tops(logits, start, allowed))


def draw(logits: Tensor, temperature: Tensor, keys: Tensor, pos: Tensor, start: int = 0, allowed: Tensor | None = None,
         top: Tensor | None = None) -> Found:  # fmt: skip
    """The largest sums; logits are counted from these tops, or from the largest of each row."""
    tops = gpu_sample.tops(logits, start, allowed)
    if top is not None:
        tops[0] = top[:, None].view(torch.int32)
    return compared(gpu_sample.draw(logits, tops[None], temperature, keys, pos, start, allowed))


def check_largest(logits: Tensor, start: int, allowed: Tensor | None) -> None:
    """Against torch's max, whose ids are the lowest."""
    found = largest(logits, start, allowed)
    masked = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
    bad = ~logits.isfinite().all(-1)
    assert torch.equal(found.bad_B, bad)
    value, ids = masked.max(-1)
    assert torch.equal(found.value_B[~bad], value[~bad])
    assert torch.equal(found.id_B[~bad], ids[~bad] + start)


MASKS = st.sampled_from(["none", "for all rows", "for each row"])


def mask_of(kind: str, seed: int, rows: int, width: int) -> Tensor | None:
    if kind == "none":
        return None
    shape = (width,) if kind == "for all rows" else (rows, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@given(SEEDS, st.integers(1, 3), COUNTS, STARTS, MASKS)
def test_the_largest_logit_and_its_lowest_id(seed: int, rows: int, width: int, start: int, kind: str) -> None:
    """Whole numbers: many are equal."""
    logits, allowed = random_logits(seed, rows, width).round(), mask_of(kind, seed, rows, width)
    check_largest(logits, start, allowed)


@settings(max_examples=10)
@given(SEEDS, st.integers(1, 3), COUNTS, STARTS, MASKS, st.booleans())
def test_the_draw_has_the_bits_of_the_plain_one_given_its_noise(
    seed: int, rows: int, width: int, start: int, kind: str, has_top: bool
) -> None:
    logits, allowed = random_logits(seed, rows, width), mask_of(kind, seed, rows, width)
    if allowed is not None:
        allowed[..., width // 2] = True
    temperature = torch.tensor([0.7, 0.0, 100.0])[:rows]
    keys, pos = torch.stack([plain.key(seed + i) for i in range(rows)]), torch.arange(rows) * 1000 + 2**31 - 1500
    masked = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
    top = masked.amax(-1) + (3.0 if has_top else 0.0)
    found = draw(logits, temperature, keys, pos, start, allowed, top if has_top else None)
    noise = gpu_sample.gumbel(plain.fold_in(keys, pos), width, start)
    drawn = (masked - top[:, None]) / torch.where(temperature > 0, temperature, 1.0)[:, None] + noise
    value, ids = drawn.max(-1)
    assert torch.equal(found.value_B, value)
    assert torch.equal(found.id_B, ids + start)


@settings(max_examples=10)
@given(SEEDS, st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 0.7, 1.0, 100.0]), min_size=1, max_size=4), MASKS)
def test_tokens_are_those_of_the_plain_draw(seed: int, temperatures: list[float], kind: str) -> None:
    """The noise differs in its last bits, which decide one draw in a million."""
    rows, width = len(temperatures), BLOCK + 100
    logits, allowed = random_logits(seed, rows, width), mask_of(kind, seed, rows, width)
    asked = [plain.Sampling(temperature=t, seed=seed + i) for i, t in enumerate(temperatures)]
    how, pos = plain.draws(asked, width), torch.arange(rows)
    tops = gpu_sample.tops(logits, 0, allowed)[None]
    drawn = gpu_sample.draw(logits, tops, how.temperature_B, how.key_B, pos, 0, allowed)[None]
    tokens = gpu_sample.tokens(tops, drawn, how.temperature_B)
    expected = plain.sample(logits, how, pos, allowed_V=allowed, filtered=False)
    masked = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
    scale = torch.where(how.temperature_B > 0, how.temperature_B, 1.0)[:, None]
    sums = (masked - masked.amax(-1, keepdim=True)) / scale + plain.gumbel(plain.fold_in(how.key_B, pos), width)
    near = sums.gather(1, tokens[:, None]) > sums.gather(1, expected[:, None]) - 1e-5
    assert ((tokens == expected) | near[:, 0]).all()
    assert ((tokens == expected) | (how.temperature_B > 0)).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-45])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    """Numbers below the normal ones too: they are neither 0 nor flushed to it."""
    logits, keys = random_logits(0, 2, 300), torch.stack([plain.key(i) for i in range(2)])
    found = draw(logits, torch.full((2,), temperature), keys, torch.arange(2))
    assert torch.equal(found.id_B, logits.argmax(-1))


@settings(max_examples=5)
@given(SEEDS, st.integers(2, 3), st.sampled_from([5, 6, BLOCK, BLOCK + 1]))
def test_shares_of_the_vocabulary_draw_what_the_whole_draws(seed: int, ranks: int, each: int) -> None:
    """Rows that are greedy, drawn, of equal logits, not finite in one share, and not going."""
    logits = random_logits(seed, 5, ranks * each)
    logits[2], logits[3, seed % (ranks * each)] = 1.0, math.nan
    keys, pos = torch.stack([plain.key(seed + n) for n in range(5)]), torch.arange(5)
    temperature, going = torch.tensor([0.0, 0.5, 0.0, 1.0, 1.0]), torch.tensor([True] * 4 + [False])

    def drawn_from(shares: list[Tensor]) -> Tensor:
        width = shares[0].shape[1]
        tops = torch.stack([gpu_sample.tops(x, i * width) for i, x in enumerate(shares)])
        parts = [gpu_sample.draw(x, tops, temperature, keys, pos, i * width) for i, x in enumerate(shares)]
        assert torch.equal(gpu_sample.tokens(tops, tops, temperature)[:3], logits.argmax(-1)[:3])
        return gpu_sample.tokens(tops, torch.stack(parts), temperature, going)

    whole = drawn_from([logits])
    assert torch.equal(drawn_from([*logits.split(each, -1)]), whole)
    assert [token < 0 for token in whole.tolist()] == [False, False, False, True, True]
    assert whole[0] == logits[0].argmax()
    assert whole[2] == 0


def test_ranks_may_be_an_expanded_view() -> None:
    logits, one = random_logits(0, 2, BLOCK + 9), torch.ones(2)
    tops = gpu_sample.tops(logits)
    repeated = tops.expand(4, *tops.shape)
    assert torch.equal(gpu_sample.tokens(repeated, repeated, 0 * one), logits.argmax(-1))


@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, BLOCK + 4])
def test_what_is_not_finite_is_found_where_it_is_not_allowed_too(wrong: float, place: int) -> None:
    logits, allowed = random_logits(0, 3, BLOCK + 5), torch.ones(BLOCK + 5, dtype=torch.bool)
    logits[1, place], allowed[place] = wrong, False
    one, keys = torch.ones(3), torch.stack([plain.key(i) for i in range(3)])
    for mask in (None, allowed):
        tops = gpu_sample.tops(logits, 0, mask)[None]
        drawn = gpu_sample.draw(logits, tops, one, keys, torch.arange(3), 0, mask)[None]
        for temperature in (one, 0 * one):
            found = gpu_sample.tokens(tops, drawn, temperature)
            assert [token < 0 for token in found.tolist()] == [False, True, False]
            assert (found < BLOCK + 5).all()


def test_a_share_without_an_allowed_id_loses() -> None:
    logits, nothing = random_logits(0, 1, 9), torch.zeros(9, dtype=torch.bool)
    first = largest(logits, 9, nothing)
    found = draw(logits, torch.ones(1), plain.key(1)[None], torch.ones(1).long(), 9, nothing, torch.ones(1))
    assert first.value_B.item() == found.value_B.item() == -math.inf
    assert first.id_B.item() == found.id_B.item() == 9
    assert not first.bad_B.item()


def test_logits_and_masks_may_be_parts_of_wider_rows() -> None:
    logits, keys, pos = random_logits(0, 3, 40), torch.stack([plain.key(i) for i in range(3)]), torch.arange(3)
    allowed = torch.rand(3, 40) < 0.7
    wanted = logits[:, 3:23].contiguous(), allowed[:, 3:23].contiguous()
    expected = draw(wanted[0], torch.ones(3), keys, pos, 3, wanted[1])
    for part, mask in (
        (logits[:, 3:23], allowed[:, 3:23]),
        (logits.T.contiguous().T[:, 3:23], allowed.T.contiguous().T[:, 3:23]),
    ):
        found = draw(part, torch.ones(3), keys, pos, 3, mask)
        assert torch.equal(found.value_B, expected.value_B)
        assert torch.equal(found.id_B, expected.id_B)
        assert torch.equal(gpu_sample.tops(part, 3, mask), gpu_sample.tops(wanted[0], 3, wanted[1]))


def test_no_rows_draw_nothing() -> None:
    nothing = torch.empty(0, 9)
    tops = gpu_sample.tops(nothing)[None]
    drawn = gpu_sample.draw(nothing, tops, torch.empty(0), torch.empty(0, 2).int(), torch.empty(0).long())[None]
    assert gpu_sample.tokens(tops, drawn, torch.empty(0)).shape == (0,)


def test_what_the_forms_cannot_take_is_said() -> None:
    logits = torch.zeros(2, 9)
    assert gpu_sample.why_not(logits) == ""
    assert gpu_sample.why_not(logits, torch.ones(9).bool()) == gpu_sample.why_not(logits, torch.ones(2, 9).bool()) == ""
    refused = [
        (gpu_sample.why_not(logits.bfloat16()), "torch.bfloat16"),
        (gpu_sample.why_not(logits[0]), "[9]"),
        (gpu_sample.why_not(logits[:, :0]), "[2, 0]"),
        (gpu_sample.why_not(torch.zeros(1, 1).expand(1, 2**20 + 1)), "1048577"),
        (gpu_sample.why_not(logits, torch.ones(9)), "torch.float32"),
        (gpu_sample.why_not(logits, torch.ones(8).bool()), "[8]"),
    ]
    for reason, part in refused:
        assert part in reason


def test_a_card_of_eight() -> None:
    logits, keys = random_logits(0, 2, 25256), torch.stack([plain.key(i) for i in range(2)])
    pos, temperature = torch.tensor([5, 6]), torch.tensor([1.0, 0.5])
    found = draw(logits, temperature, keys, pos, 3 * 25256)
    check_largest(logits, 3 * 25256, None)
    noise = plain.gumbel(plain.fold_in(keys, pos), 25256, 3 * 25256)
    close(found.value_B, ((logits - logits.amax(-1, keepdim=True)) / temperature[:, None] + noise).amax(-1), 1e-6)
