"""The prefix index: what meets, what does not, and what remains when blocks go."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.kvcache import prefix
from muse_fn.kvcache.ints import EMPTY, append, pack
from muse_fn.kvcache.prefix import (
    NO_SALT,
    ROOT,
    Hit,
    Index,
    Key,
    Salt,
    by_block,
    enter,
    find,
    first_seen,
    forget,
    leave,
    stand,
)

SALTS = [
    (),
    (("cache_salt", "X"),),
    (("adapter", "X"),),
    (("cache_salt", b"X"),),
    (("cache_salt", "Y"),),
    (("cache_salt", "X"), ("adapter", "X")),
    (("media", "one", 3),),
    (("media", "two", 3),),
    (("media", "one", 2),),
]


def same(key: Key) -> int:
    return 7


def walk(index: Index, tokens: list[int], salts: prefix.Salts, blocks: list[tuple[int, ...]], width: int) -> Index:
    """A sequence fills all full blocks of its tokens and ends there."""
    node = ROOT
    for number, each in enumerate(blocks):
        content = pack(tokens[number * width : (number + 1) * width])
        index, node, _ = enter(index, node, content, salts.get(number, NO_SALT), each)
    return leave(index, node)


def look(index: Index, tokens: list[int], salts: prefix.Salts, windows: tuple[int, ...], width: int) -> Hit:
    return find(index, append(EMPTY, pack(tokens)), salts, len(tokens) // width, windows, width)


@given(st.integers(0, 40), st.integers(0, 12), st.integers(1, 6))
def test_first_seen_is_the_first_block_with_a_visible_position(position: int, window: int, width: int) -> None:
    seen = [j for j in range(position + 1) if window == 0 or j > position - window]
    assert first_seen(window, position, width) == seen[0] // width


@pytest.mark.parametrize("first", SALTS)
@pytest.mark.parametrize("second", SALTS)
@pytest.mark.parametrize("constant", [False, True])
def test_salts_and_kinds_never_meet(
    first: tuple[tuple[str, str]], second: tuple[tuple[str, str]], constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the block in which they begin to differ, everything is shared; from there on nothing."""
    if constant:
        monkeypatch.setattr(prefix, "digest", same)
    tokens, width = [1, 1, 1, 1, 1, 1, 1, 1], 2
    index = walk(Index(), tokens, by_block(first, width), [(1,), (2,), (3,), (4,)], width)
    differ = [salt.at // width for salt in {Salt(*each) for each in first} ^ {Salt(*each) for each in second}]
    expected = min([*differ, 4])
    assert look(index, tokens, by_block(second, width), (0,), width).depth == expected


@given(st.permutations([("a", "1"), ("b", "1"), ("m", b"1", 5), ("m", b"2", 5), ("m", b"1", 0)]))
def test_the_order_of_salts_does_not_matter(salts: list[tuple[str, str]]) -> None:
    assert by_block(salts, 4) == by_block(sorted(salts, key=repr), 4)


def test_bad_salts_are_listed_together() -> None:
    bad = [
        ("kind",),
        ("kind", 3),
        (1, "x"),
        ("kind", "x", -1),
        ("kind", "x", "y"),
        "ab",
        ("ok", "fine"),
        ("k", "v", 1, 2),
    ]
    with pytest.raises(ValueError, match="a salt is") as error:
        by_block(bad, 4)  # pyright: ignore[reportArgumentType]
    assert "fine" not in str(error.value)
    assert all(repr(each) in str(error.value) for each in bad if each != ("ok", "fine"))


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), min_size=1, max_size=6), st.booleans())
def test_the_longest_common_beginning_is_found(texts: list[list[int]], constant: bool) -> None:
    """Also if all digests are equal. Each text's last one is looked for among the others."""
    with pytest.MonkeyPatch.context() as patch:
        if constant:
            patch.setattr(prefix, "digest", same)
        index, none = Index(), by_block((), 2)
        for n, text in enumerate(texts[:-1]):
            index = walk(index, text, none, [(10 * n + c + 1,) for c in range(len(text) // 2)], 2)
        wanted = texts[-1]
        common = [
            max(d for d in range(min(len(text), len(wanted)) // 2 + 1) if text[: 2 * d] == wanted[: 2 * d])
            for text in texts[:-1]
        ]
        hit = look(index, wanted, none, (0,), 2)
        assert hit.depth == max(common, default=0)
        first = [next(n for n, depth in enumerate(common) if depth > c) for c in range(hit.depth)]
        assert hit.blocks == (tuple(10 * n + c + 1 for c, n in enumerate(first)),), "the older block stays"


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), max_size=6), st.randoms(use_true_random=False))
def test_without_uses_nothing_is_left(texts: list[list[int]], draw: Random) -> None:
    index, none = Index(), by_block((), 2)
    for n, text in enumerate(texts):
        index = walk(index, text, none, [(20 * n + 2 * c + 1, 20 * n + 2 * c + 2) for c in range(len(text) // 2)], 2)
    named = [(node, group) for node, record in index.nodes.items() for group in range(2) if record.blocks[group]]
    draw.shuffle(named)
    for node, group in named:
        assert index.nodes
        index = forget(index, node, group)
    assert (len(index.nodes), len(index.children)) == (0, 0)


@pytest.mark.parametrize(
    ("missing", "depth"),
    [
        ([], 6),
        ([(0, 1)], 6),  # given up long ago: the last block is enough for 6 * 2 - 3 < j
        ([(4, 1)], 4),
        ([(5, 1)], 5),
        ([(5, 1), (4, 1)], 4),
        ([(0, 0)], 0),  # the group that keeps everything misses its first
        ([(3, 0)], 3),
        ([(3, 0), (2, 1)], 2),
    ],
)
def test_a_group_needs_what_its_window_sees(missing: list[tuple[int, int]], depth: int) -> None:
    """Blocks of 2, windows 0 and 4: at 2d positions the query sees the blocks d-2 (its second half) and d-1."""
    tokens, none = [*range(12)], by_block((), 2)
    index = walk(Index(), tokens, none, [(2 * c + 1, 2 * c + 2) for c in range(6)], 2)
    nodes = sorted(index.nodes)
    for number, group in missing:
        index = forget(index, nodes[number], group)
    hit = look(index, tokens, none, (0, 4), 2)
    assert hit.depth == depth
    low = max(0, 2 * depth - 3) // 2
    assert hit.blocks == (
        tuple(2 * c + 1 for c in range(depth)),
        tuple(2 * c + 2 for c in range(low, depth)),
    )


def test_inner_nodes_serve_without_blocks() -> None:
    """Sliding groups only: the beginning may be gone, and goes with the last that hangs on it."""
    tokens, none = [*range(8)], by_block((), 2)
    index = walk(Index(), tokens, none, [(1,), (2,), (3,), (4,)], 2)
    nodes = sorted(index.nodes)
    for node in nodes[:3]:
        index = forget(index, node, 0)
    assert look(index, tokens, none, (2,), 2) == Hit(nodes[3], 4, ((4,),))
    assert not forget(index, nodes[3], 0).nodes
    stays = forget(stand(index, nodes[3]), nodes[3], 0)
    assert sorted(stays.nodes) == nodes, "a sequence stands there"
    assert not leave(stays, nodes[3]).nodes


def test_keys_are_equal_by_content_only() -> None:
    key = Key(1, b"1234", NO_SALT)
    assert {key: 1}[Key(1, b"1234", frozenset())] == 1
    assert key not in {Key(2, b"1234", NO_SALT), Key(1, b"1235", NO_SALT), Key(1, b"1234", frozenset({Salt("a", "b")}))}
