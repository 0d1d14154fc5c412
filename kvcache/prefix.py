"""The prefix index: which filled blocks hold the keys and values of which beginning of a sequence.

The index is a tree. A node stands for one full block of tokens after a certain beginning, which is its parent node; it
names for each window group the block that holds them, or none. Two beginnings meet in a node only if they have the same
tokens one by one and the same salts of the same kinds: the digest narrows a lookup down, the comparison decides. A node
whose blocks are gone stays while something hangs on it, because a sliding group needs only the blocks of its window.
Nothing here is ever iterated over to decide something, so the answers are the same in every process.
"""

from __future__ import annotations  # the maps of rpds take type arguments only on paper

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from rpds import HashTrieMap

from muse_fn.kvcache.ints import Ints, part

ROOT = 0  # the beginning of every sequence: it has no record


class Salt(NamedTuple):
    """Something other than tokens that the keys and values depend on, from position `at` on.

    The kind keeps name spaces apart: the cache salt "X" is not the adapter "X". A medium is a salt at its first
    position.
    """

    kind: str
    value: str | bytes
    at: int = 0


Salts: TypeAlias = "HashTrieMap[int, frozenset[Salt]]"  # by the number of the block that they start in
NO_SALT: frozenset[Salt] = frozenset()


def by_block(salts: Iterable[tuple[str, str | bytes] | tuple[str, str | bytes, int]], block_size: int) -> Salts:
    """Salts in the order in which the blocks of a sequence meet them; their own order does not matter.

    Raises ValueError with every salt that is not a (kind, value) or (kind, value, position).
    """
    found: dict[int, frozenset[Salt]] = {}
    wrong: list[str] = []
    for each in salts:
        match each:
            case (str(kind), str(value) | bytes(value)):
                salt = Salt(kind, value)
            case (str(kind), str(value) | bytes(value), int(at)) if at >= 0:
                salt = Salt(kind, value, at)
            case _:
                wrong.append(repr(each))
                continue
        number = salt.at // block_size
        found[number] = found.get(number, NO_SALT) | {salt}
    if wrong:
        raise ValueError(f"a salt is (kind, value) or (kind, value, position), text and text or bytes: {wrong}")
    return HashTrieMap(found)


class Key(NamedTuple):
    """What a node stands for."""

    parent: int
    tokens: bytes  # of one block, packed
    salts: frozenset[Salt]  # that start in this block; those before it are the parent's

    def __hash__(self) -> int:
        return digest(self)


def digest(key: Key) -> int:
    """Narrows a lookup down to a few candidates, which are then compared whole. Any function is right, a good one is
    fast."""
    return hash((key.parent, key.tokens, key.salts))


class Node(NamedTuple):
    """One block of tokens after a certain beginning."""

    key: Key
    blocks: tuple[int, ...]  # of each group; 0: none
    uses: int  # blocks, children and sequences that stand here; at 0 the node goes


class Index(NamedTuple):
    """The tree of nodes. Numbers of nodes are never used twice."""

    nodes: HashTrieMap[int, Node] = HashTrieMap({})
    children: HashTrieMap[Key, int] = HashTrieMap({})
    following: int = ROOT + 1


class Hit(NamedTuple):
    """The longest usable beginning of a sequence."""

    node: int
    depth: int  # in blocks
    blocks: tuple[tuple[int, ...], ...]  # of each group: those that are needed, the last ones of the beginning


def first_seen(window: int, positions: int, block_size: int) -> int:
    """The first block that the query at position `positions` sees in a layer of this window: it sees the positions
    j > positions - window, and all of them if the window is 0."""
    return max(0, positions - window + 1) // block_size if window else 0


def find(index: Index, tokens: Ints, salts: Salts, limit: int, windows: tuple[int, ...], block_size: int) -> Hit:
    """The longest beginning of at most `limit` blocks for which each group has all blocks that the next query sees."""
    path, columns, depth = [ROOT], list[tuple[int, ...]](), 0
    runs = [0] * len(windows)
    for number in range(limit):
        content = part(tokens, number * block_size, (number + 1) * block_size)
        node = index.children.get(Key(path[-1], content, salts.get(number, NO_SALT)))
        if node is None:
            break
        path.append(node)
        columns.append(index.nodes[node].blocks)
        runs = [run + 1 if block else 0 for run, block in zip(runs, columns[-1], strict=True)]
        end = number + 1
        needs = [end - first_seen(window, end * block_size, block_size) for window in windows]
        if all(run >= need for run, need in zip(runs, needs, strict=True)):
            depth = end
        elif any(run < end for run, window in zip(runs, windows, strict=True) if window == 0):
            break
    firsts = [first_seen(window, depth * block_size, block_size) for window in windows]
    blocks = tuple(tuple(column[group] for column in columns[first:depth]) for group, first in enumerate(firsts))
    return Hit(path[depth], depth, blocks)


def enter(
    index: Index, parent: int, tokens: bytes, salts: frozenset[Salt], blocks: tuple[int, ...]
) -> tuple[Index, int, list[int]]:
    """A sequence that stands at `parent` has filled its next block and now stands at the node of it.

    `blocks` are those of each group, 0 where the sequence has none. Returns that node and the groups in which it named
    no block before and now names the one given; elsewhere the older one stays.
    """
    key = Key(parent, tokens, salts)
    node = index.children.get(key)
    if node is None:
        node, taken = index.following, [group for group, block in enumerate(blocks) if block]
        new = Node(key, blocks, len(taken) + 1)  # the parent loses a sequence and gains a child
        return Index(index.nodes.insert(node, new), index.children.insert(key, node), node + 1), node, taken
    old = index.nodes[node]
    taken = [group for group, block in enumerate(blocks) if block and not old.blocks[group]]
    merged = tuple(known or block for known, block in zip(old.blocks, blocks, strict=True))
    nodes = index.nodes.insert(node, Node(old.key, merged, old.uses + len(taken) + 1))
    return leave(index._replace(nodes=nodes), parent), node, taken


def stand(index: Index, node: int) -> Index:
    """A sequence begins at a node, which therefore stays."""
    if node == ROOT:
        return index
    old = index.nodes[node]
    return index._replace(nodes=index.nodes.insert(node, old._replace(uses=old.uses + 1)))


def leave(index: Index, node: int) -> Index:
    """One use of a node less; nodes without any use go, up the tree."""
    nodes, children = index.nodes, index.children
    while node != ROOT:
        old = nodes[node]
        if old.uses > 1:
            nodes = nodes.insert(node, old._replace(uses=old.uses - 1))
            break
        nodes, children, node = nodes.remove(node), children.remove(old.key), old.key.parent
    return Index(nodes, children, index.following)


def forget(index: Index, node: int, group: int) -> Index:
    """The node no longer names a block for this group."""
    key, blocks, uses = index.nodes[node]
    if uses == 1:
        return leave(index, node)
    fewer = Node(key, (*blocks[:group], 0, *blocks[group + 1 :]), uses - 1)
    return Index(index.nodes.insert(node, fewer), index.children, index.following)
