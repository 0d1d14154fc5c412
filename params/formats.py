"""How a parameter can be stored: the one table of formats and spellings, and how to tell which a checkpoint uses.

A parameter is *stacked* (one tensor per matrix, all experts in it) or stored *each* (one tensor per expert and matrix).
Which format it has is read off the tensors that are there, never off the layer number. Source of the rows: the
published BF16, AMD Quark and NVIDIA modelopt layouts, and compressed-tensors' spelling of the same numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from muse_fn.params.safetensors_header import Stored

Spelling = Literal["stacked", "each"]
Node = Literal["plain", "mxfp4", "nvfp4"]
Role = Literal["values", "codes", "scales", "global_scale", "ignored"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One stored tensor of a format: what follows the matrix's name, and what it must be."""

    suffix: str
    role: Role
    dtypes: tuple[str, ...]
    rule: Literal["matrix", "pairs", "blocks", "matrices"]
    needed: bool = True
    divides: bool = False  # stored as the reciprocal of the factor


@dataclass(frozen=True)
class Format:
    """One way to store a matrix."""

    name: str
    node: Node
    spelling: Spelling
    block: int  # inputs per scale
    parts: tuple[Part, ...]


FLOATS = ("BF16", "F16", "F32")
FORMATS = (
    Format("plain", "plain", "stacked", 1, (Part("", "values", FLOATS, "matrix"),)),
    Format("plain", "plain", "each", 1, (Part(".weight", "values", FLOATS, "matrix"),)),
    Format(
        "quark MXFP4",
        "mxfp4",
        "each",
        32,
        (
            Part(".weight", "codes", ("U8",), "pairs"),
            Part(".weight_scale", "scales", ("U8",), "blocks"),
        ),
    ),
    Format(
        "modelopt NVFP4",
        "nvfp4",
        "stacked",
        16,
        (
            Part("", "codes", ("U8",), "pairs"),
            Part("_weight_scale", "scales", ("F8_E4M3",), "blocks"),
            Part("_weight_scale_2", "global_scale", ("F32",), "matrices"),
            Part("_input_scale", "ignored", ("F32",), "matrices", needed=False),
        ),
    ),
    Format(
        "modelopt NVFP4",
        "nvfp4",
        "each",
        16,
        (
            Part(".weight", "codes", ("U8",), "pairs"),
            Part(".weight_scale", "scales", ("F8_E4M3",), "blocks"),
            Part(".weight_scale_2", "global_scale", ("F32",), "matrices"),
            Part(".input_scale", "ignored", ("F32",), "matrices", needed=False),
        ),
    ),
    Format(
        "compressed-tensors MXFP4",
        "mxfp4",
        "each",
        32,
        (
            Part(".weight_packed", "codes", ("U8",), "pairs"),
            Part(".weight_scale", "scales", ("U8",), "blocks"),
        ),
    ),
    Format(
        "compressed-tensors NVFP4",
        "nvfp4",
        "each",
        16,
        (
            Part(".weight_packed", "codes", ("U8",), "pairs"),
            Part(".weight_scale", "scales", ("F8_E4M3",), "blocks"),
            Part(".weight_global_scale", "global_scale", ("F32",), "matrices", divides=True),
            Part(".input_global_scale", "ignored", ("F32",), "matrices", needed=False),
        ),
    ),
)
PLAIN = FORMATS[0]


def formats_of(spelling: Spelling) -> tuple[Format, ...]:
    """The rows of the table with this spelling."""
    return tuple(row for row in FORMATS if row.spelling == spelling)


def allowed_shapes(part: Part, block: int, shape: Shape, matrices: int) -> tuple[Shape, ...]:
    """The shapes a part may have, beside a tensor of logical shape [..., rows, columns] that joins `matrices` by rows.

    A factor per matrix is [experts, matrices], without the second dimension if there is one, and for a single matrix a
    scalar, with or without a dimension of 1.
    """
    lead, width = shape[:-2], shape[-1]
    per_matrix = (*lead, matrices) if matrices > 1 else lead
    rules: dict[str, tuple[Shape, ...]] = {
        "matrix": (shape,),
        "pairs": ((*shape[:-1], width // 2),),
        "blocks": ((*shape[:-1], width // block),),
        "matrices": (per_matrix,) if per_matrix else ((), (1,)),
    }
    return rules[part.rule]


def present(base: str, rows: Iterable[Format], stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors that belong to the matrix called `base` in any of these formats, by suffix."""
    suffixes = dict.fromkeys(part.suffix for row in rows for part in row.parts)
    return {suffix: stored[base + suffix] for suffix in suffixes if base + suffix in stored}


def detect(found: Mapping[str, Stored], rows: Iterable[Format]) -> Format:
    """The format that the tensors of one matrix are in, or the nearest one if they fit none.

    A tensor of the right type counts most, one of a wrong type a little, and one that is missing against the format.
    """

    def score(row: Format) -> int:
        points = 0
        for part in row.parts:
            tensor = found.get(part.suffix)
            if tensor is not None:
                points += 3 if tensor.dtype in part.dtypes else 1
            elif part.needed:
                points -= 1
        return points

    return max(rows, key=score)
