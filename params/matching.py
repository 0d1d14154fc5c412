"""Tensors of a checkpoint against the rows of the schema: which stored tensor fills which part of which parameter.

Works on headers alone. Everything that does not fit is a sentence that names file and tensor; nothing is guessed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from muse_fn.params import slicing
from muse_fn.params.config import Config
from muse_fn.params.formats import (
    PLAIN,
    Format,
    Part,
    Role,
    Shape,
    Spelling,
    allowed_shapes,
    detect,
    formats_of,
    present,
)
from muse_fn.params.safetensors_header import BITS, Stored
from muse_fn.params.schema import ROWS, Leaf, leaves, shape_of
from muse_fn.params.towers import PREFIXES as TOWER_PREFIXES

# Beside the towers, tensors that this decoder has no use for: other readers skip them too.
LEFTOVERS = (
    "rotary_emb",
    "num_tokens_per_expert",
    ".mlp.norm_weight",
    "embed_norm.weight",
    ".self_attn.q_scale",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
)

STACKED, EACH = formats_of("stacked"), formats_of("each")

Index = tuple[int | slice, ...]
Found = dict[str, tuple[Format, dict[str, Stored]]]  # name of a matrix -> its format and its tensors by suffix


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor and the place in a parameter that it fills."""

    part: Part
    stored: Stored
    at: Index  # () is the whole

    def place(self, shape: Shape) -> tuple[slicing.Range, ...]:
        """The rectangle that it fills in the node's tensor of this shape."""
        ends = [(at, at + 1) if isinstance(at, int) else (at.start, at.stop) for at in self.at]
        return (*ends, *((0, size) for size in shape[len(ends) :]))


class Slice(NamedTuple):
    """What is read of one stored tensor in one go, and its place in the tensor that receives it."""

    piece: Piece
    read: slicing.Slices  # of the stored tensor
    target: slicing.Slices

    @property
    def shape(self) -> Shape:
        """Of the place that it fills; the stored tensor may lack dimensions of 1."""
        return tuple(side.stop - side.start for side in self.target)

    @property
    def bytes(self) -> int:
        """Stored bytes."""
        return prod(self.shape) * BITS[self.piece.stored.dtype] // 8


@dataclass(frozen=True)
class LeafPlan:
    """Where a parameter comes from: its format, and the pieces that together are all of it."""

    leaf: Leaf
    format: Format
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Stored bytes to be read."""
        return sum(piece.stored.size for piece in self.pieces)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The tensors that its node is made of."""
        return tuple(dict.fromkeys(piece.part.role for piece in self.pieces))

    def bytes_of(self, part: slicing.Part) -> int:
        """Stored bytes to be read for a part of the parameter."""
        return sum(one.bytes for role in self.roles for one in self.slices(role, part))

    def part(self, role: Role, part: slicing.Part) -> slicing.Part:
        """What a part of the parameter is in one tensor of its node."""
        match role:
            case "codes":
                return slicing.divided(part, 2)
            case "scales":
                return slicing.divided(part, self.format.block)
            case "global_scale":
                return slicing.factors(part, self.leaf.matrices)
            case "values" | "ignored":
                return part

    def slices(self, role: Role, part: slicing.Part) -> Iterator[Slice]:
        """The slices of stored tensors that together fill one tensor of the node of this part, each byte once."""
        own = self.part(role, part)
        shape = slicing.shape_of_part(self.part(role, slicing.whole(self.leaf.shape)))
        for piece in (piece for piece in self.pieces if piece.part.role == role):
            for read, target in slicing.overlaps(own, piece.place(shape)):
                yield Slice(piece, _of_stored(piece.stored.shape, read, piece.place(shape)), target)


def _of_stored(shape: Shape, read: slicing.Slices, place: tuple[slicing.Range, ...]) -> slicing.Slices:
    """Slices of a piece's rectangle as slices of its tensor, which has the same dimensions but for those of 1."""
    wide = iter([side for side, (start, stop) in zip(read, place, strict=True) if stop - start != 1])
    return tuple(slice(0, 1) if size == 1 else next(wide) for size in shape)


@dataclass
class Match:
    """The result for a whole checkpoint."""

    plans: list[LeafPlan] = field(default_factory=list["LeafPlan"])
    head_copy: LeafPlan | None = None  # a tied head that is stored nevertheless; must equal the embedding
    claimed: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Matrix:
    """One name of the checkpoint, before its suffix, and what it stands for."""

    base: str
    shape: Shape
    matrices: int
    expert: int | None = None
    order: int = 0  # among the matrices joined by rows

    def at(self, part: Part) -> Index:
        """The place of a part in the parameter's node."""
        if self.expert is None:
            return ()
        if part.role == "global_scale":
            return (self.expert, self.order)
        rows = self.shape[0]
        return (self.expert, slice(self.order * rows, (self.order + 1) * rows))


def match(config: Config, stored: Mapping[str, Stored]) -> tuple[Match, tuple[str, ...]]:
    """Every parameter of this config found in these tensors, and the names that are skipped on purpose."""
    result = Match()
    for leaf in leaves(config):
        plan = _match_leaf(leaf, stored, result)
        if plan:
            result.plans.append(plan)
    if config.tie_word_embeddings:
        row = next(row for row in ROWS if row.where == "untied")
        head = Leaf(row, None, row.path, row.name, shape_of(row, config))
        result.head_copy = _match_leaf(head, stored, result) if head.name in stored else None
    rest = [tensor for name, tensor in stored.items() if name not in result.claimed]
    skipped = tuple(t.name for t in rest if t.name.startswith(TOWER_PREFIXES) or any(w in t.name for w in LEFTOVERS))
    unknown = {t.name for t in rest}.difference(skipped)
    result.problems += [f"{stored[name]}: unknown tensor" for name in sorted(unknown)]
    return result, skipped


def _match_leaf(leaf: Leaf, stored: Mapping[str, Stored], result: Match) -> LeafPlan | None:
    spellings = (
        (matrices_of(leaf, "stacked"), STACKED if leaf.row.each else (PLAIN,)),
        (matrices_of(leaf, "each"), EACH),
    )
    used: list[tuple[list[Matrix], Found]] = []
    for matrices, rows in spellings:
        tensors = {m.base: t for m in matrices if (t := present(m.base, rows, stored))}
        if tensors:
            used.append((matrices, {base: (detect(t, rows), t) for base, t in tensors.items()}))
            result.claimed.update(tensor.name for t in tensors.values() for tensor in t.values())
    if len(used) != 1:
        result.problems.append(_problem_of_spelling(leaf, [found for _, found in used]))
        return None
    ((matrices, found),) = used
    form = Counter(form for form, _ in found.values()).most_common(1)[0][0]
    pieces, problems = _match_matrices(leaf, form, matrices, found)
    result.problems += problems
    return None if problems else LeafPlan(leaf, form, tuple(pieces))


def matrices_of(leaf: Leaf, spelling: Spelling) -> list[Matrix]:
    """The names that a parameter has in a spelling; none one by one if it has no experts."""
    if spelling == "stacked":
        return [Matrix(leaf.name, leaf.shape, leaf.matrices)]
    if not leaf.row.each:
        return []
    experts, rows, columns = leaf.shape
    names = [name.replace("{i}", str(leaf.layer)) for name in leaf.row.each]
    return [
        Matrix(name.replace("{e}", str(expert)), (rows // len(names), columns), 1, expert, order)
        for expert in range(experts)
        for order, name in enumerate(names)
    ]


def _first(found: Found) -> Stored:
    _, tensors = next(iter(found.values()))
    return next(iter(tensors.values()))


def _problem_of_spelling(leaf: Leaf, used: list[Found]) -> str:
    if used:
        return f"{_first(used[0])} and {_first(used[1])}: the same experts are stored stacked and one by one"
    first = matrices_of(leaf, "each")[:1]
    return f"{leaf.name}: missing" + "".join(f" (and so is {matrix.base}.weight)" for matrix in first)


def _match_matrices(leaf: Leaf, form: Format, matrices: list[Matrix], found: Found) -> tuple[list[Piece], list[str]]:
    pieces: list[Piece] = []
    problems: list[str] = []
    if leaf.shape[-1] % form.block:
        need = f"{form.name} scales blocks of {form.block} inputs"
        return [], [f"{_first(found)}: {need}, and {leaf.path} has {leaf.shape[-1]}, no multiple of that"]
    for matrix in matrices:
        own, tensors = found.get(matrix.base, (None, {}))
        if own is None:
            problems.append(f"{matrix.base}{form.parts[0].suffix}: missing")
        elif own is not form:
            first = next(iter(tensors.values()))
            problems.append(f"{first}: is in {own.name}, while most of {leaf.path} is in {form.name}")
        else:
            more, wrong = _match_parts(matrix, form, tensors)
            pieces += more
            problems += wrong
    return pieces, problems


def _match_parts(matrix: Matrix, form: Format, found: Mapping[str, Stored]) -> tuple[list[Piece], list[str]]:
    pieces: list[Piece] = []
    problems: list[str] = []
    for part in form.parts:
        tensor = found.get(part.suffix)
        if tensor is None:
            if part.needed:
                problems.append(f"{matrix.base}{part.suffix}: missing, {form.name} needs it")
            continue
        shapes = allowed_shapes(part, form.block, matrix.shape, matrix.matrices)
        if tensor.dtype not in part.dtypes:
            problems.append(f"{tensor}: dtype is {tensor.dtype}, must be {' or '.join(part.dtypes)} ({form.name})")
        elif tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            problems.append(f"{tensor}: shape is {list(tensor.shape)}, must be {wanted} ({form.name})")
        elif part.role != "ignored":
            pieces.append(Piece(part, tensor, matrix.at(part)))
    # A companion of another format would be dropped in silence.
    alien = [tensor for suffix, tensor in found.items() if suffix not in {part.suffix for part in form.parts}]
    problems += [f"{tensor}: unknown tensor, {form.name} has none of this name" for tensor in alien]
    return pieces, problems
