"""Which mesh axes split which word of the schema, and whether a model fits a mesh.

A layout is a table of words; a word that is not in it is whole on every rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from muse_fn.params.config import Config
from muse_fn.params.schema import Leaf, dims_of, leaves, sizes
from muse_fn.sharding.mesh import STAGE, Axes, Mesh, MeshError

RULES: dict[str, Axes] = {
    "vocab": STAGE,
    "heads": STAGE,
    "kv_heads": STAGE,  # with more ranks than KV heads, neighbours hold the same one
    "dense_inner": STAGE,
    "experts": ("ep",),
    "inner": ("tp",),
}
SPLIT_SQUEEZE: dict[str, Axes] = {"squeezed": STAGE, "expanded": STAGE}
REPEATED = frozenset({"kv_heads"})
WHOLE_EXPERTS = frozenset({"layers.*.mlp.router.weight", "layers.*.mlp.router.bias"})  # each rank routes


def rules_of(mesh: Mesh) -> Mapping[str, Axes]:
    """The table of this mesh's layout."""
    return RULES if mesh.squeeze == "replicated" else {**RULES, **SPLIT_SQUEEZE}


def axes_of(path: str, word: str, mesh: Mesh) -> Axes:
    """The mesh axes that split this word in the parameters of this row."""
    return () if path in WHOLE_EXPERTS else rules_of(mesh).get(word, ())


def stage_layers(layers: int, mesh: Mesh, stage: int | None = None) -> range:
    """The layers of a pipeline stage (default: this rank's): consecutive, the first stages one longer if need be.

    The last stage has the head to compute, so it is never the longer one.
    """
    at = mesh.index(("pp",)) if stage is None else stage
    each, more = divmod(layers, mesh.pp)
    start = at * each + min(at, more)
    return range(start, start + each + (at < more))


def holds(leaf: Leaf, config: Config, mesh: Mesh) -> bool:
    """Whether this rank's stage has the parameter: the first embeds, the last has the head (tied: the table too)."""
    if leaf.layer is not None:
        return leaf.layer in stage_layers(config.layers, mesh)
    if leaf.path == "embed":
        return mesh.is_first or (mesh.is_last and config.tie_word_embeddings)
    return mesh.is_last


def check_mesh(config: Config, mesh: Mesh, blocks: Mapping[str, int] | None = None) -> None:
    """Raises MeshError with every reason why the mesh cannot hold a model of this config, and the meshes that can.

    `blocks` gives, for parameters by path, how many elements of the last dimension share a scale and stay together.
    """
    problems = problems_of_mesh(config, mesh, blocks or {})
    if not problems:
        return
    lines = [f"mesh {mesh} does not fit this model:", *problems, *_allowed(config, mesh, blocks or {})]
    raise MeshError("\n  ".join(lines))


def _allowed(config: Config, mesh: Mesh, blocks: Mapping[str, int]) -> list[str]:
    """What would fit in place of this mesh, in a sentence: as many ranks in a stage, or else the most below that."""

    def fitting(ranks: int) -> str:
        return "; ".join(str(m) for m in _layouts(ranks, mesh) if not problems_of_mesh(config, m, blocks))

    ranks = mesh.size(STAGE)
    if same := fitting(ranks):
        return [f"with {mesh.ranks} ranks these fit: {same}"]
    # Heads are split over all ranks of a stage: other numbers cannot fit.
    fewer = (found for n in reversed(_divisors(config.heads)) if n < ranks and (found := fitting(n)))
    if most := next(fewer, ""):
        return [f"no ep and tp of {ranks} ranks fit; the largest smaller ones are {most}"]
    return []


def _layouts(ranks: int, like: Mesh) -> list[Mesh]:
    """All ep and tp of that many ranks, other things being equal."""
    eps = (ep for ep in range(1, ranks + 1) if ranks % ep == 0)
    return [replace(like, ep=ep, tp=ranks // ep, rank=0, link=None) for ep in eps]


def problems_of_mesh(config: Config, mesh: Mesh, blocks: Mapping[str, int]) -> list[str]:
    """Every reason, one sentence for each word of the schema that does not divide."""
    problems = list(_problems_of_words(config, mesh))
    if mesh.pp > config.layers:
        problems.append(f"pp is {mesh.pp}: the model has {config.layers} layers, so pp must be 1 to {config.layers}")
    tp = mesh.tp
    for path, block in blocks.items():
        width = config.expert_size
        if _splits_inner(path) and width % tp == 0 and width // tp % block:
            good = [n for n in _divisors(width) if width // n % block == 0]
            shown = f"tp must be {_listed(good)}" if good else "no tp can split it"
            problems.append(
                f"tp is {tp}: {width // tp} inputs of {path} on each rank cut a block of {block} that shares a scale; "
                f"expert_size is {width}, so {shown}"
            )
            break
    return problems


def _splits_inner(path: str) -> bool:
    return path.endswith("experts.down")


@lru_cache(maxsize=64)
def _words(config: Config) -> tuple[tuple[str, str], ...]:
    """Every row that this config has, by path, with every word of its dimensions."""
    rows = {leaf.row.path: leaf.row for leaf in leaves(config)}
    return tuple((path, word) for path, row in rows.items() for words in dims_of(row) for word in words)


@lru_cache(maxsize=256)
def _problems_of_words(config: Config, mesh: Mesh) -> tuple[str, ...]:
    size, found = sizes(config), dict[str, None]()
    for path, word in _words(config):
        axes = axes_of(path, word, mesh)
        ranks = mesh.size(axes)
        if size[word] % ranks == 0 or (word in REPEATED and ranks % size[word] == 0):
            continue
        good = _divisors(size[word])
        also = f", or a multiple of {size[word]}" if word in REPEATED else ""
        name = "*".join(axes)
        found[f"{name} is {ranks}: {word} is {size[word]}, so {name} must be {_listed(good)}{also}"] = None
    return tuple(found)


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, min(size, 4096) + 1) if size % n == 0]


def _listed(values: list[int]) -> str:
    shown = [str(value) for value in values[:12]] + (["…"] if len(values) > 12 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
