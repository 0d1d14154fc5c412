"""The least work of one step on one card: bytes of memory to read, operations, and collectives between cards.

A floor, not a simulation: activations, rows written to the cache and the unpacking of four-bit experts cost nothing
here. A product of [rows, in] by [out, in] takes 2 * rows * in * out operations.
"""

from collections import Counter
from typing import NamedTuple

from muse_fn.footprint import FLOAT32_BYTES, MODEL_BYTES, Held, held, kv_bytes
from muse_fn.params.config import Config
from muse_fn.params.quantise import is_packable
from muse_fn.params.schema import leaves
from muse_fn.sharding.division import is_divided
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.rules import stage_layers
from muse_fn.touched import Touched, touched

CACHE = "cache"
WORK = (
    "attention",
    CACHE,
    "squeeze and expand",
    "router",
    "experts",
    "dense MLP",
    "norms and gates",
    "embedding",
    "head",
)
# Bytes that ranks tell each other of each row to draw its token, without filters: the largest logit; then value and id
# of the greedy and of the drawn choice, and whether the row is finite.
LARGEST, CHOICES = 4, 20


class Step(NamedTuple):
    """What a step computes. Every row of the batch has `past` tokens in the cache and adds `new`."""

    batch: int
    new: int
    past: int

    @property
    def tokens(self) -> int:
        """Rows of each matrix product but the head's, which takes one per sequence."""
        return self.batch * self.new


def decode_step(batch: int, context: int) -> Step:
    """One token for each sequence; it attends to `context` tokens, itself the last of them."""
    return Step(batch, 1, context - 1)


def prefill_step(chunk: int, context: int) -> Step:
    """`chunk` tokens of one prompt, `context` tokens of which are already in the cache."""
    return Step(1, chunk, context)


class Work(NamedTuple):
    """Bytes to read and operations on one card; operations in float32 are counted apart."""

    bytes: float
    flops: float
    float32_flops: float = 0.0


class Collective(NamedTuple):
    """One kind of exchange in a step: how often, and the bytes one rank sends each time."""

    name: str
    times: int
    bytes: float


def expert_groups(config: Config, mesh: Mesh, step: Step) -> Touched:
    """How many of its experts a card reads in one layer of this step."""
    return touched(config.experts, config.top_k, mesh.ep, step.tokens)


def work_of_stage(config: Config, mesh: Mesh, format: str, kv: str, step: Step, experts: float) -> dict[str, Work]:
    """Work of this rank's stage by component, when it reads `experts` of its experts in every layer."""
    found: dict[str, Work] = {}
    for item in held(config, mesh, format):
        if item.component in ("embedding", "head"):
            continue
        _add(found, item.component, _work_of(item, config, step, experts, mesh))
    if mesh.is_first:
        row = config.hidden_size * MODEL_BYTES
        found["embedding"] = Work(step.tokens * row / mesh.size(STAGE), 0)
    if mesh.is_last:
        table = "embed" if config.tie_word_embeddings else "head"
        head = next(item for item in held(config, mesh, format) if item.leaf.path == table)
        found["head"] = Work(head.bytes, 2 * step.batch * head.size)
    found[CACHE] = work_of_cache(config, mesh, kv, step)
    return {name: found[name] for name in WORK if name in found}


def _add(found: dict[str, Work], name: str, work: Work) -> None:
    found[name] = Work(*(a + b for a, b in zip(found.get(name, Work(0, 0)), work, strict=True)))


def _work_of(item: Held, config: Config, step: Step, experts: float, mesh: Mesh) -> Work:
    """One parameter: matrices are read once and multiply every token, vectors are read once."""
    if item.component == "experts":
        # The routes of all tokens that fall on this card, on average: R/ep of each token's.
        routes = step.tokens * config.top_k / mesh.ep
        local = item.shape[0]
        return Work(item.bytes * experts / local, 2 * routes * item.size / local)
    if item.component == "norms and gates":
        return Work(item.bytes, 0)
    flops = 2 * _tokens_of(item, step, mesh) * item.size
    return Work(item.bytes, 0, flops) if item.leaf.row.dtype == "float32" else Work(item.bytes, flops)


def _tokens_of(item: Held, step: Step, mesh: Mesh) -> float:
    """How many tokens a rank multiplies by a matrix: of a divided step its own, where it has the whole matrix."""
    is_whole = item.component == "router" or (item.component == "squeeze and expand" and mesh.squeeze == "replicated")
    return step.tokens / mesh.size(STAGE) if is_whole and is_divided(step.tokens, mesh) else step.tokens


def work_of_cache(config: Config, mesh: Mesh, dtype: str, step: Step) -> Work:
    """Reading the cache once and attending: two products over the keys each query sees, for this rank's heads."""
    own = stage_layers(config.layers, mesh)
    sliding = sum(config.is_sliding(i) for i in own)
    each = kv_bytes(config, mesh, dtype).unwindowed / len(own)
    heads = config.heads // mesh.size(STAGE)
    kinds = ((len(own) - sliding, None), (sliding, config.window))
    read = sum(n * each * step.batch * keys_read(step, window) for n, window in kinds)
    seen = sum(n * step.batch * keys_seen(step, window) for n, window in kinds)
    return Work(read, 4 * heads * config.head_dim * seen)


def keys_read(step: Step, window: int | None) -> int:
    """Different keys that a sequence's queries of this step see, in a layer with this window (None: no window)."""
    past = step.past if window is None else min(step.past, window - 1)
    return past + step.new


def keys_seen(step: Step, window: int | None) -> int:
    """The sum over a sequence's queries of the keys each sees: query i sees min(window, past + i + 1)."""
    first, last = step.past + 1, step.past + step.new
    if window is None or last <= window:
        return (first + last) * step.new // 2
    if first >= window:
        return window * step.new
    growing = window - first
    return (first + window - 1) * growing // 2 + window * (step.new - growing)


class Layer(NamedTuple):
    """Bytes that one layer of a step reads on one card, by component."""

    number: int
    matrices: dict[str, float]
    vectors: int  # norms, residual gates and the router's bias


def layer_floor(config: Config, mesh: Mesh, format: str, experts: float) -> Layer:
    """The parameters of one typical layer: the first whose experts are packed, else the first of them all."""
    inner = [leaf.layer for leaf in leaves(config) if is_packable(leaf, config)]
    number = inner[0] if inner and inner[0] is not None else 0
    found = Counter[str]()
    for item in held(config, _stage_of(number, config, mesh), format):
        if item.leaf.layer == number:
            share = experts / item.shape[0] if item.component == "experts" else 1.0
            found[item.component] += item.bytes * share  # pyright: ignore[reportArgumentType]
    vectors = found.pop("norms and gates", 0)
    return Layer(number, dict(found), vectors)


def _stage_of(layer: int, config: Config, mesh: Mesh) -> Mesh:
    return next(
        view
        for view in (mesh.at(stage * mesh.size(STAGE)) for stage in range(mesh.pp))
        if layer in stage_layers(config.layers, view)
    )


def collectives(config: Config, mesh: Mesh, step: Step) -> list[Collective]:
    """All exchanges of a step on its way through every stage, and of the draw; kinds that do not occur are left out.

    Bytes are what one rank sends in a ring of n: (n-1)/n of the tensor for a sum of which each keeps a part and for a
    swap, (n-1)/n of the result for a gather, and 2(n-1)/n of the tensor for a sum that all keep whole. The draw's are
    small.
    """
    n = mesh.size(STAGE)
    layers = _of_divided_layers if is_divided(step.tokens, mesh) else _of_layers
    found = [
        *layers(config, mesh, step.tokens),
        Collective("largest logits: gather", 1, (n - 1) * step.batch * LARGEST),
        Collective("choices: gather", 1, (n - 1) * step.batch * CHOICES),
    ]
    between = [
        Collective("stage to stage", mesh.pp - 1, step.tokens * config.hidden_size * FLOAT32_BYTES),
        Collective("logits to all stages", 1, step.batch * config.vocab_size * FLOAT32_BYTES // n),
    ]
    return [row for row in (found if n > 1 else []) + (between if mesh.pp > 1 else []) if row.times]


class Sent(NamedTuple):
    """What a layer's exchanges are counted by: how many layers there are, and bytes of all tokens in one exchange."""

    sparse: int
    dense: int
    split: int  # sparse layers whose squeeze and expand are split
    float32: float  # the stream
    hidden: float  # the stream in the model's dtype
    latent: float  # squeezed tokens
    logits: float  # of the router
    rows: float  # of all routes


def _sent(config: Config, mesh: Mesh, tokens: int) -> Sent:
    once = (mesh.size(STAGE) - 1) / mesh.size(STAGE) * tokens
    sparse = sum(kind == "sparse" for kind in config.mlp_layer_types)
    return Sent(
        sparse,
        config.layers - sparse,
        sparse if mesh.squeeze == "split" else 0,
        once * config.hidden_size * FLOAT32_BYTES,
        once * config.hidden_size * MODEL_BYTES,
        once * config.latent_size * MODEL_BYTES,
        once * config.experts * FLOAT32_BYTES,
        once * config.top_k * config.latent_size * FLOAT32_BYTES,
    )


def _of_layers(config: Config, mesh: Mesh, tokens: int) -> list[Collective]:
    sent = _sent(config, mesh, tokens)
    return [
        Collective("embedding: sum", 1, 2 * sent.hidden),
        Collective("attention output: sum", config.layers, 2 * sent.float32),
        Collective("squeeze: gather", sent.split, sent.latent),
        Collective("expert rows: sum", sent.sparse, 2 * sent.rows),
        Collective("expand: gather", sent.split, sent.hidden),
        Collective("dense output: sum", sent.dense, 2 * sent.float32),
    ]


def _of_divided_layers(config: Config, mesh: Mesh, tokens: int) -> list[Collective]:
    """See sharding/division.py."""
    sent = _sent(config, mesh, tokens)
    return [
        Collective("embedding: scatter", 1, sent.hidden),
        Collective("attention input: gather", config.layers, sent.hidden),
        Collective("attention output: scatter", config.layers, sent.float32),
        Collective("router logits: gather", sent.sparse, sent.logits),
        Collective("squeeze input: gather", sent.split, sent.hidden),
        Collective("squeeze: gather", sent.sparse, sent.latent),
        Collective("expert rows: scatter", sent.sparse, sent.rows),
        Collective("expand input: gather", sent.split, sent.latent),
        Collective("expand: swap", sent.split, sent.hidden / mesh.size(STAGE)),
        Collective("dense input: gather", sent.dense, sent.hidden),
        Collective("dense output: scatter", sent.dense, sent.float32),
        Collective("stream: gather", mesh.pp, sent.float32),
    ]
