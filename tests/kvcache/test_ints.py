"""Long sequences of integers against lists, at lengths around the size of a chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kvcache.ints import CHUNK, EMPTY, WIDTH, append, pack, part, shorten, size, to_numpy, unpack, write

CHUNKFUL = CHUNK // WIDTH
NEAR = st.sampled_from([0, CHUNKFUL, 2 * CHUNKFUL, 3 * CHUNKFUL]).flatmap(
    lambda at: st.integers(max(0, at - 2), at + 2)
)


def numbered(length: int, offset: int = 0) -> list[int]:
    return [*range(offset, offset + length)]


@given(st.lists(NEAR, max_size=4), st.data())
def test_the_same_as_a_list(lengths: list[int], data: st.DataObject) -> None:
    ints, expected = EMPTY, list[int]()
    for length in lengths:
        more = numbered(length, len(expected))
        ints, expected = append(ints, pack(more)), expected + more
    assert size(ints) == len(expected)
    assert to_numpy(ints).tolist() == expected
    assert ints == append(EMPTY, pack(expected)), "one form for the same entries"
    start, stop = sorted(data.draw(NEAR.map(lambda at: min(at, len(expected)))) for _ in range(2))
    assert unpack(part(ints, start, stop)) == expected[start:stop]
    assert shorten(ints, stop) == append(EMPTY, pack(expected[:stop]))
    new = [-1] * (stop - start)
    assert write(ints, start, pack(new)) == append(EMPTY, pack(expected[:start] + new + expected[stop:]))
    assert to_numpy(ints).tolist() == expected, "none of this changed it"


def test_changes_share_the_rest() -> None:
    ints = append(EMPTY, pack(numbered(1_000_000)))
    assert append(ints, pack([1])).full is ints.full
    changed = write(ints, 500_000, pack([7]))
    assert sum(a is not b for a, b in zip(changed.full, ints.full, strict=True)) == 1


@pytest.mark.parametrize(
    "values", [[1.0], [2**31], [-(2**31) - 1], ["1"], np.array([1.0]), np.array([[1]]), np.array([2**31])]
)
def test_pack_refuses(values: list[int]) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        pack(values)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_lists_and_arrays_pack_alike(values: list[int]) -> None:
    assert pack(values) == pack(np.array(values, np.int64)) == pack(tuple(values))
    assert unpack(pack(values)) == values
