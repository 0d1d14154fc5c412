"""The check of a pool finds every kind of damage, and all of it at once."""

from collections.abc import Callable
from typing import Any

import pytest
from rpds import HashTrieMap

from muse_fn.kvcache.blocks import Pool, admit, extend, fill, finish, new_pool
from muse_fn.kvcache.integrity import check_integrity
from muse_fn.kvcache.ints import EMPTY, append, pack, size, unpack, write
from muse_fn.kvcache.prefix import Key, Node


def busy() -> Pool:
    """Blocks of 2, windows 0 and 3; "a" and "b" share 4 positions and part, "c" has left."""
    pool = new_pool(30, 2, [0, 3])
    for name, tokens in (("c", [9, 9, 9, 9]), ("a", [1, 2, 3, 4, 5, 6, 7]), ("b", [1, 2, 3, 4, 8, 8, 8])):
        pool, _ = admit(pool, name, tokens)
        grown = extend(pool, name, len(tokens))
        assert isinstance(grown, Pool)
        pool = fill(grown, name, len(tokens))
    return finish(pool, "c")


def free(pool: Pool) -> list[int]:
    return unpack(b"".join((*pool.free.full, pool.free.tail)))


def block(pool: Pool, of: int, **change: Any) -> Pool:
    return pool._replace(blocks=pool.blocks.insert(of, pool.blocks[of]._replace(**change)))


def row(pool: Pool, name: str, **change: Any) -> Pool:
    return pool._replace(rows=pool.rows.insert(name, pool.rows[name]._replace(**change)))


def entry(pool: Pool, name: str, group: int, number: int) -> int:
    table = pool.rows[name].tables[group]
    return unpack(table.tail)[number]


def put(pool: Pool, name: str, group: int, number: int, value: int) -> Pool:
    tables = [*pool.rows[name].tables]
    tables[group] = write(tables[group], number, pack([value]))
    return row(pool, name, tables=tuple(tables))


def nodes(pool: Pool, changed: "HashTrieMap[int, Node]") -> Pool:
    return pool._replace(prefixes=pool.prefixes._replace(nodes=changed))


def used(pool: Pool) -> int:
    """The last block of "a", not in the index and not full."""
    return entry(pool, "a", 0, 3)


def shared(pool: Pool) -> int:
    return entry(pool, "a", 0, 0)


def renamed(pool: Pool) -> Pool:
    """The tree says that a block which "a" has holds other tokens."""
    node = pool.blocks[shared(pool)].node
    old, new = pool.prefixes.nodes[node].key, Key(0, pack([5, 5]), frozenset())
    children = pool.prefixes.children.remove(old).insert(new, node)
    changed = pool.prefixes.nodes.insert(node, pool.prefixes.nodes[node]._replace(key=new))
    return pool._replace(prefixes=pool.prefixes._replace(nodes=changed, children=children))


def cached(pool: Pool) -> int:
    return max(block for block, record in pool.blocks.items() if not record.holders)


DAMAGE: dict[str, Callable[[Pool], Pool]] = {
    "is free twice": lambda pool: pool._replace(free=append(pool.free, pack(free(pool)[:1]))),
    "is free and not free": lambda pool: pool._replace(free=append(pool.free, pack([used(pool)]))),
    "is lost": lambda pool: pool._replace(free=append(EMPTY, pack(free(pool)[1:]))),
    "block 0 is not of this pool": lambda pool: pool._replace(free=append(pool.free, pack([0]))),
    "block 30 is not of this pool": lambda pool: pool._replace(free=append(pool.free, pack([30]))),
    "which is 0 times in the order": lambda pool: pool._replace(past=pool.past + 1),
    "which is 2 times in the order": lambda pool: pool._replace(left=append(pool.left, pool.left.tail[:8])),
    "blocks are cached, the pool says 99": lambda pool: pool._replace(cached=99),
    "yet cached since 5": lambda pool: block(pool, used(pool), since=5),
    "not in the index, and yet not free": lambda pool: block(pool, cached(pool), node=0),
    "is not of group 0": lambda pool: block(pool, used(pool), group=1),
    "its record says 7": lambda pool: block(pool, used(pool), holders=7),
    "is shared and not filled": lambda pool: put(pool, "b", 0, 3, used(pool)),
    "is in the index and not filled": lambda pool: block(pool, used(pool), node=pool.blocks[shared(pool)].node),
    "tables of lengths": lambda pool: row(pool, "a", tables=(EMPTY, pool.rows["a"].tables[1])),
    "positions filled of 7 tokens": lambda pool: row(pool, "a", filled=8),
    "is given up below 0": lambda pool: put(pool, "a", 0, 0, 0),
    "is given up below 2": lambda pool: put(pool, "a", 1, 0, 3),
    "it stands at node": lambda pool: row(pool, "a", node=pool.rows["b"].node),
    "the keys of the nodes": lambda pool: pool._replace(
        prefixes=pool.prefixes._replace(children=pool.prefixes.children.remove(next(iter(pool.prefixes.children))))
    ),
    "uses, its record says": lambda pool: nodes(
        pool, pool.prefixes.nodes.insert(1, pool.prefixes.nodes[1]._replace(uses=50))
    ),
    "uses, its record says None": lambda pool: nodes(pool, pool.prefixes.nodes.remove(pool.rows["a"].node)),
    "blocks of nodes and groups": lambda pool: nodes(
        pool, pool.prefixes.nodes.insert(1, pool.prefixes.nodes[1]._replace(blocks=(0, 0)))
    ),
    "is in the index with other content": renamed,
}


def test_a_sound_pool_passes() -> None:
    pool = busy()
    check_integrity(pool)
    assert pool.cached
    assert pool.blocks[shared(pool)].holders == 2
    assert pool.blocks[used(pool)].node == 0
    assert size(pool.free)


@pytest.mark.parametrize("problem", DAMAGE)
def test_damage_is_found(problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_integrity(DAMAGE[problem](busy()))


def test_all_problems_are_told() -> None:
    pool = block(busy()._replace(cached=99), used(busy()), holders=7)
    with pytest.raises(AssertionError, match=r"its record says 7") as error:
        check_integrity(pool)
    assert "the pool says 99" in str(error.value)
