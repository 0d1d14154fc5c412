"""What must hold of a pool of blocks at all times, checked from scratch.

It goes over everything, so it is for tests and for finding out what went wrong, not for every step.
"""

from collections import Counter
from collections.abc import Iterator

from muse_fn.kvcache.blocks import MUTE, Block, Pool, Row
from muse_fn.kvcache.ints import Ints, part, size, unpack
from muse_fn.kvcache.prefix import NO_SALT, ROOT, Key


def check_integrity(pool: Pool) -> None:
    """Raises AssertionError with every problem found."""
    problems = [*_states(pool), *_rows(pool), *_nodes(pool), *_contents(pool)]
    if problems:
        raise AssertionError("; ".join(problems))


def _states(pool: Pool) -> Iterator[str]:
    """Each block is in one state, and the order of the cached ones is that in which they were left."""
    free, known, every = _all(pool.free), set(pool.blocks), set(range(1, pool.num_blocks))
    yield from (f"block {block} is free twice" for block, times in sorted(Counter(free).items()) if times > 1)
    yield from (f"block {block} is free and not free" for block in sorted(known & {*free}))
    yield from (f"block {block} is lost" for block in sorted(every - known - {*free}))
    yield from (f"block {block} is not of this pool" for block in sorted((known | {*free}) - every))
    idle = sorted((block, record.since) for block, record in pool.blocks.items() if not record.holders)
    flat = _all(pool.left)[2 * pool.past :]
    left = [*zip(flat[::2], flat[1::2], strict=True)]
    for block, since in idle:
        if left.count((block, since)) != 1:
            yield f"block {block} is cached since {since}, which is {left.count((block, since))} times in the order"
    if pool.cached != len(idle):
        yield f"{len(idle)} blocks are cached, the pool says {pool.cached}"
    for block, record in sorted(pool.blocks.items()):
        if record.holders and record.since:
            yield f"block {block} is held and yet cached since {record.since}"
        if not record.holders and record.node == ROOT:
            yield f"block {block} is held by nobody and not in the index, and yet not free"


def _rows(pool: Pool) -> Iterator[str]:
    """Tables have the shape that a row says, and blocks as many holders as tables they are in."""
    holders, unfilled = Counter[int](), Counter[int]()
    for name, row in pool.rows.items():
        yield from (f"sequence {name!r}: {problem}" for problem in _row(pool, row))
        for group, table in enumerate(row.tables):
            entries = _all(table)[row.lows[group] :]
            holders.update(entries)
            unfilled.update(entries[max(0, row.filled // pool.block_size - row.lows[group]) :])
            others = [block for block in entries if block in pool.blocks and pool.blocks[block].group != group]
            yield from (f"sequence {name!r}: block {block} is not of group {group}" for block in others)
    for block in sorted({*holders, *pool.blocks}):
        known = pool.blocks.get(block, Block(0, 0, None)).holders
        if known != holders[block]:
            yield f"block {block} is in {holders[block]} tables, its record says {known}"
        if unfilled[block] and holders[block] > 1:
            yield f"block {block} is shared and not filled"
        if unfilled[block] and block in pool.blocks and pool.blocks[block].node != ROOT:
            yield f"block {block} is in the index and not filled"


def _row(pool: Pool, row: Row) -> Iterator[str]:
    lengths = {size(table) for table in row.tables}
    if len(row.tables) != len(pool.windows) or len(row.lows) != len(pool.windows) or len(lengths) != 1:
        yield f"{len(row.tables)} tables of lengths {lengths}"
    if not 0 <= row.filled <= min(size(row.tokens), max(lengths) * pool.block_size):
        yield f"{row.filled} positions filled of {size(row.tokens)} tokens and {max(lengths)} blocks"
    for group, (table, low) in enumerate(zip(row.tables, row.lows, strict=True)):
        entries = _all(table)
        if any(entries[:low]) or not all(entries[low:]):
            yield f"table {group} is given up below {low} and is {entries}"
    if row.node not in (MUTE, _path(pool, row)[-1]):
        yield f"it stands at node {row.node}, which is not what it filled"


def _nodes(pool: Pool) -> Iterator[str]:
    """The tree and its reverse say the same, and every node is there for its uses and no others."""
    nodes, children = pool.prefixes.nodes, pool.prefixes.children
    if {record.key: node for node, record in nodes.items()} != dict(children.items()):
        yield "the keys of the nodes are not those of the children"
    uses = Counter(record.key.parent for record in nodes.values())
    uses.update(row.node for row in pool.rows.values())
    uses.update(record.node for record in pool.blocks.values())
    for node in sorted({*uses, *nodes} - {ROOT, MUTE}):
        if node not in nodes or nodes[node].uses != uses[node]:
            yield f"node {node} has {uses[node]} uses, its record says {nodes.get(node)}"
    named = {
        (node, group): block for node, record in nodes.items() for group, block in enumerate(record.blocks) if block
    }
    known = {(record.node, record.group): block for block, record in pool.blocks.items() if record.node != ROOT}
    if named != known:
        yield f"blocks of nodes and groups are {named}, their records say {known}"


def _contents(pool: Pool) -> Iterator[str]:
    """A block that a row has and the index knows holds what the row filled."""
    for name, row in pool.rows.items():
        path = _path(pool, row)[1:]
        for table in row.tables:
            for number, (block, node) in enumerate(zip(_all(table), path, strict=False)):
                if block in pool.blocks and pool.blocks[block].node not in (ROOT, node):
                    yield f"block {block} at {number} of sequence {name!r} is in the index with other content"


def _all(ints: Ints) -> list[int]:
    return unpack(part(ints, 0, size(ints)))


def _path(pool: Pool, row: Row) -> list[int | None]:
    """The nodes of what a row filled, from ROOT on; None where the index has none. Keys of nodes are unique, so another
    node is other content."""
    path: list[int | None] = [ROOT]
    for number in range(row.filled // pool.block_size):
        parent, tokens = path[-1], part(row.tokens, number * pool.block_size, (number + 1) * pool.block_size)
        known = None if parent is None else Key(parent, tokens, row.salts.get(number, NO_SALT))
        path.append(None if known is None else pool.prefixes.children.get(known))
    return path
