"""Ranks as processes on this machine, for tests: what each of them does, and what each of them found."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

if __name__ == "__main__":  # started as a rank: `tests` lies beside the rooms
    sys.path[0] = str(Path(__file__).parent.parent)

import muse_fn
from muse_fn.serve.launch import launch
from muse_fn.serve.member import line, tell
from muse_fn.sharding import collectives as collectives_file
from muse_fn.sharding import words as words_file
from muse_fn.sharding.collectives import (
    Distributed,
    PeerError,
    broadcast,
    gather,
    hand_on,
    join,
    leave,
    psum,
    psum_scatter,
    stacked,
    swapped,
    tell_all,
)
from muse_fn.sharding.mesh import AXES, Axes, Mesh, MeshError, parse_mesh

NANO = Path(muse_fn.__file__).parent / "nano"
SUBSETS: list[Axes] = [axes for n in (1, 2, 3) for axes in itertools.combinations(AXES, n)]
PROMPTS = [[1, 2, 3], [5] * 20, [7, 300, 11, 500]]
SETTINGS = {
    "greedy": muse_fn.Settings(max_new_tokens=8),
    "sampled": muse_fn.Settings(8, muse_fn.Sampling(temperature=1.5, top_k=40, top_p=0.9, seed=3)),
}


def collectives(mesh: Mesh) -> dict[str, Tensor]:
    """Every collective over every subset of the axes, on numbers whose sums are exact."""
    found: dict[str, Tensor] = {}
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        x = torch.arange(6).view(3, 2).T.to(dtype) + 10 * mesh.rank
        long = torch.arange(24).view(3, 8).T.to(dtype) + 10 * mesh.rank
        for axes in SUBSETS:
            at = f"{dtype} {axes} "
            found |= {f"{at}psum": psum(x, mesh, axes), f"{at}stacked": stacked(x, mesh, axes)}
            found |= {f"{at}psum_scatter": psum_scatter(long, mesh, axes), f"{at}swapped": swapped(long, mesh, axes)}
            found |= {f"{at}gather {dim}": gather(x, mesh, axes, dim) for dim in (0, 1, -1)}
            found |= {f"{at}broadcast {n}": broadcast(x, mesh, axes, n) for n in range(mesh.size(axes))}
        given = hand_on(None if mesh.is_last else x, mesh, None if mesh.is_first else x)
        found |= {} if given is None else {f"{dtype} hand_on": given}
    return found


def lost(mesh: Mesh) -> str:
    """The last rank goes without a word; what the others find when they miss it."""
    psum(torch.ones(1), mesh, AXES)
    if mesh.rank == mesh.ranks - 1:
        os._exit(0)
    try:
        psum(torch.ones(1), mesh, AXES)
    except PeerError as error:
        return str(error)
    return "nothing"


TOLD = [b"", b"a", bytes(range(256)) * 16_384, b"and more"]


def told(mesh: Mesh) -> tuple[list[bytes], bool]:
    """What rank 0 tells, and whether that went through sockets."""
    heard = [tell_all(words if mesh.rank == 0 else None, mesh) for words in TOLD]
    return heard, isinstance(mesh.link, Distributed) and mesh.link.has_words


def told_from_afar(mesh: Mesh) -> tuple[list[bytes], bool]:
    """The same where the last rank does not see the others' files."""
    far = patch.object(words_file, "_reached", return_value=None)
    with far if mesh.rank == mesh.ranks - 1 else nullcontext():
        return told(mesh)


def unheard(mesh: Mesh) -> str:
    """The last rank goes while rank 0 still tells."""
    return _missed(mesh, mesh.ranks - 1)


def silent(mesh: Mesh) -> str:
    """Rank 0 goes while the others still listen."""
    return _missed(mesh, 0)


def hung(mesh: Mesh) -> str:
    """The last rank stays, but hears nothing any more."""
    with patch.object(collectives_file, "TIMEOUT", timedelta(seconds=3)):
        tell_all(b"first" if mesh.rank == 0 else None, mesh)
    if mesh.rank == mesh.ranks - 1:
        time.sleep(8)
        return ""
    try:
        for _ in range(3):  # of each rank 0 asks at the next whether it was heard
            tell_all(b"a sign" if mesh.rank == 0 else None, mesh)
    except PeerError as error:
        return str(error)
    return "nothing"


def told_without_a_folder(mesh: Mesh) -> tuple[list[bytes], bool]:
    """What rank 0 tells where it may write nothing."""
    with patch("tempfile.TemporaryDirectory", side_effect=PermissionError("read-only")):
        return told(mesh)


def left(mesh: Mesh) -> tuple[set[str], set[str], list[str]]:
    """Threads that serve collectives before and after leaving, the mesh still in hand; what collectives say then. Rank
    0 leaves before the others have heard its last words."""
    collectives(mesh)
    tell_all(b"first" if mesh.rank == 0 else None, mesh)
    if mesh.rank:
        time.sleep(1)
    assert tell_all(b"last" if mesh.rank == 0 else None, mesh) == b"last"
    before, said = _serving(), list[str]()
    leave()
    until = time.monotonic() + 5
    while _serving() and time.monotonic() < until:  # the system lists a thread a moment longer
        time.sleep(0.01)
    x = torch.ones(1)
    for after in (lambda: psum(x, mesh, AXES), lambda: hand_on(x, mesh, x), lambda: tell_all(b"", mesh)):
        try:
            after()
        except MeshError as error:
            said.append(str(error))
    return before, _serving(), said


def _serving() -> set[str]:
    names = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
    return {name for name in names if "gloo" in name}


def _missed(mesh: Mesh, gone: int) -> str:
    tell_all(b"first" if mesh.rank == 0 else None, mesh)
    if mesh.rank == gone:
        os._exit(0)
    try:
        for _ in range(1000):  # some may still fit into the socket
            tell_all(b"more" * 1000 if mesh.rank == 0 else None, mesh)
    except PeerError as error:
        return str(error)
    return "nothing"


def embedded(mesh: Mesh) -> dict[str, Any]:
    """Logits, tokens and scores of the embedded model."""
    model = muse_fn.load(NANO, mesh=mesh)
    tokens = torch.arange(40).view(2, 20) * 7
    with torch.inference_mode():
        found: dict[str, Any] = {"logits": muse_fn.forward(model.params, tokens, model.config, mesh)}
    found |= {name: muse_fn.generate(model, PROMPTS, s, mesh) for name, s in SETTINGS.items()}
    return found | {"score": muse_fn.score(model, PROMPTS[2], mesh)}


EVERY = (collectives, lost, told, told_from_afar, told_without_a_folder, unheard, silent, hung, left, embedded)
TASKS: dict[str, Callable[[Mesh], Any]] = {f.__name__: f for f in EVERY}


def run(task: Callable[[Mesh], Any], mesh: Mesh, folder: Path) -> Iterator[Any]:
    """What a task finds on every rank of a mesh, each a process of its own that joined; None where it never ended."""
    launch([sys.executable, "-W", "error", __file__, task.__name__, str(mesh), str(folder)], mesh.ranks)
    for rank in range(mesh.ranks):
        file = folder / f"{rank}.pt"
        yield torch.load(file, weights_only=False) if file.exists() else None


def main(task: str, mesh: str, folder: str) -> None:
    """A rank's program."""
    line()
    torch.set_num_threads(1)
    try:
        joined = join(parse_mesh(mesh))
        torch.save(TASKS[task](joined), Path(folder) / f"{joined.rank}.pt")
        leave()
    except Exception as error:
        tell(error)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
