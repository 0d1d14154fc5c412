"""Small checkpoints in every row of the table of formats, and a watch on what is read of them."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from muse_fn.params import read as reading
from muse_fn.params.config import Config
from muse_fn.params.formats import Format, allowed_shapes
from muse_fn.params.matching import matrices_of
from muse_fn.params.quantise import is_packable, to_node
from muse_fn.params.read import ReadTensor
from muse_fn.params.safetensors_header import Stored
from muse_fn.params.schema import leaves
from muse_fn.params.slicing import Slices
from muse_fn.params.tree import Params, named
from tests.tiny_checkpoint import Tensors, edit_tensors, params_of, write


def label(form: Format) -> str:
    """A name for a row of the table."""
    return f"{form.name}-{form.spelling}".replace(" ", "-")


def experts_as(form: Format, params: Params, config: Config) -> tuple[Tensors, set[str]]:
    """The tensors of all experts that this row of the table may hold, and the stacked plain names they replace.

    Reciprocals and tensors that readers ignore are included.
    """
    made: Tensors = {}
    replaced: set[str] = set()
    for leaf in leaves(config):
        if not leaf.row.each or not (form.node == "plain" or is_packable(leaf, config)):
            continue
        replaced.add(leaf.name)
        node = to_node(leaf, named(params)[leaf.path], form.node, torch.bfloat16)
        fields = {"values": node} if isinstance(node, Tensor) else node._asdict()
        for matrix in matrices_of(leaf, form.spelling):
            for part in form.parts:
                shape = allowed_shapes(part, form.block, matrix.shape, matrix.matrices)[0]
                value = torch.full(shape, 7.0) if part.role == "ignored" else fields[part.role][matrix.at(part)]
                value = value.reciprocal() if part.divides else value
                made[matrix.base + part.suffix] = value.reshape(shape).clone()
    return made, replaced


def write_as(folder: Path, form: Format, config: Config, seed: int = 0) -> Path:
    """A checkpoint of random parameters, its experts in this format: all if it is plain, else the inner ones."""
    made, replaced = experts_as(form, params_of(config, seed), config)

    def repack(stored: Tensors) -> None:
        for name in replaced:
            del stored[name]
        stored.update(made)

    write(folder, "bf16", config)
    edit_tensors(folder, repack)
    return folder


class Watch:
    """Every slice that was read, by tensor."""

    def __init__(self) -> None:
        self.seen: list[tuple[Stored, Slices]] = []

    @property
    def bytes(self) -> int:
        """Of all slices together, a byte that was read twice counting twice."""
        return sum(int(self.times(stored, [at]).sum()) * _size(stored) for stored, at in self.seen)

    def names(self) -> set[str]:
        """Of the tensors that were read, in part at least."""
        return {stored.name for stored, _ in self.seen}

    def files(self) -> set[str]:
        """That were opened."""
        return {stored.file.name for stored, _ in self.seen}

    def times(
        self, stored: Stored, slices: list[Slices] | None = None
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """How often each element was read."""
        counts = np.zeros(stored.shape, dtype=np.int64)
        for at in [at for other, at in self.seen if other.name == stored.name] if slices is None else slices:
            counts[at] += 1
        return counts


def _size(stored: Stored) -> int:
    return stored.size // max(1, int(np.prod(stored.shape)))


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Generator[Watch]:
    """Records what is read while this lasts, at the one function that reads."""
    watch = Watch()
    original = reading.open_files

    @contextmanager
    def open_files() -> Generator[ReadTensor]:
        with original() as read:

            def note(stored: Stored, slices: Slices) -> Tensor:
                watch.seen.append((stored, slices))
                return read(stored, slices)

            yield note

    with patch.context() as during:
        during.setattr(reading, "open_files", open_files)
        yield watch


@contextmanager
def unread(patch: pytest.MonkeyPatch) -> Generator[None]:
    """Fails if a tensor is read, or a file opened for reading tensors, while this lasts."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was about to be read")

    with patch.context() as during:
        during.setattr(reading, "open_files", refuse)
        during.setattr(reading, "safe_open", refuse)
        yield
