"""Buckets: few, every size finds one, and what is padded is bounded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.buckets import SHORTEST, SPARE, Bucket, Piece, buckets, piece_for, pieces, sizes, smallest

MAXIMA = st.integers(1, 20_000)


@given(MAXIMA, st.integers(1, 5))
def test_sizes_are_powers_of_two_and_the_maximum(maximum: int, thinning: int) -> None:
    found = sizes(maximum, thinning)
    assert found[-1] == maximum
    assert list(found) == sorted(set(found))
    assert all(n & (n - 1) == 0 for n in found[:-1])
    assert all(larger <= smaller << thinning for smaller, larger in itertools.pairwise(found))
    if thinning == 1:
        assert found[0] == 1


@given(st.integers(1, 600), MAXIMA, st.integers(1, 80))
def test_there_are_few_and_the_largest_comes_first(max_batch: int, max_columns: int, most: int) -> None:
    found = buckets(max_batch, max_columns, most)
    assert len(found) == len(set(found)) <= max(most, max_batch.bit_length() + 1)
    assert found[0] == Bucket(max_batch, max_columns)
    assert all((a.batch, a.columns) > (b.batch, b.columns) for a, b in itertools.pairwise(found))


@given(st.integers(1, 300), st.integers(1, 3000), st.data())
def test_every_size_fits_and_none_smaller_would_do(max_batch: int, max_columns: int, data: st.DataObject) -> None:
    known = buckets(max_batch, max_columns)
    batch, columns = data.draw(st.integers(1, max_batch)), data.draw(st.integers(1, max_columns))
    found = smallest(known, batch, columns)
    assert batch <= found.batch < max(2 * batch, 2)
    assert columns <= found.columns
    for other in known:
        if other.batch >= batch and other.columns >= columns:
            assert found.batch <= other.batch
            assert found.columns <= other.columns


@given(st.integers(1, 9000), st.integers(1, 3000), st.sampled_from([1, 16, 128]), st.integers(1, 80))
def test_pieces_are_few_the_largest_first_and_of_no_more_tokens_than_their_blocks(
    chunk: int, max_columns: int, block_size: int, most: int
) -> None:
    found = pieces(chunk, max_columns, block_size, most)
    assert len(found) == len(set(found)) <= max(most, chunk.bit_length() + 1)
    assert all(a > b for a, b in itertools.pairwise(found))
    least = min(SHORTEST, chunk, max_columns * block_size)
    assert all(least <= p.tokens <= min(chunk, p.columns * block_size) for p in found)
    if chunk <= max_columns * block_size:
        assert found[0] == Piece(chunk, max_columns)


@given(st.integers(1, 9000), st.integers(1, 3000), st.data())
def test_a_piece_is_found_unless_it_were_mostly_padding(chunk: int, max_columns: int, data: st.DataObject) -> None:
    """Whatever fits the longest sequence: up to the least power of two, if that is no more than the chunk."""
    known = pieces(chunk, max_columns, 128)
    tokens = data.draw(st.integers(1, min(chunk, 128 * max_columns)))
    columns = data.draw(st.integers(-(-tokens // 128), max_columns))
    wanted = min(chunk, max(min(SHORTEST, chunk), 1 << (tokens - 1).bit_length()))
    found = piece_for(known, tokens, columns)
    if wanted > 128 * max_columns or wanted - tokens > SPARE:
        assert found is None
    else:
        assert found is not None
        assert found.tokens == wanted
        assert found.columns >= columns


def test_by_hand() -> None:
    assert sizes(1) == (1,)
    assert sizes(6) == (1, 2, 4, 6)
    assert sizes(8) == (1, 2, 4, 8)
    assert sizes(64, 2) == (1, 4, 16, 64)
    assert sizes(100, 2) == (2, 8, 32, 100)
    assert buckets(2, 3) == ((2, 3), (2, 2), (2, 1), (1, 3), (1, 2), (1, 1))
    assert str(Bucket(8, 64)) == "batch 8, 64 columns"
    assert len(buckets(256, 8192)) <= 64
    assert pieces(100, 4, 32) == ((100, 4), (64, 4), (64, 2), (32, 4), (32, 2), (32, 1))
    assert pieces(3, 1, 16) == ((3, 1),)
    assert pieces(64, 1, 16) == ((16, 1),)
    assert str(Piece(512, 32)) == "512 tokens of a prompt, 32 columns"
    assert [p.tokens for p in pieces(4096, 8192, 128)][::3] == [4096, 2048, 1024, 512, 256, 256, 128, 64, 32, 32]
    assert piece_for([], 1, 1) is None


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch is 0: must be at least 1\nmax_columns is -1"):
        buckets(0, -1)
    with pytest.raises(ValueError, match=r"chunk is 0: must be at least 1\nblock_size is 0"):
        pieces(0, 1, 0)
    with pytest.raises(ValueError, match="batch 3, 9 columns fits no captured step: the largest is batch 4, 8 columns"):
        smallest(buckets(4, 8), 3, 9)
