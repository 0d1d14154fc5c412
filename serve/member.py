"""What a process is in a command on a mesh: alone, the launcher of the ranks, or one of the ranks.

A rank that a launcher started holds one end of a connection to it, its line. Reports go up the line; down it comes one
permission to begin, once all ranks have loaded. Its end means that the launcher is gone, and the rank goes as well.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from muse_fn.footprint import blocks_of as blocks_of_format
from muse_fn.load import Model, blocks_of, format_of, open_random, tokenizer_of
from muse_fn.params.checkpoint import open_checkpoint
from muse_fn.params.config import Config
from muse_fn.params.quantise import check_widths
from muse_fn.params.tree import Params
from muse_fn.serve.options import (
    EMBEDDED,
    Dtype,
    Quantize,
    check_device,
    err,
    load_or_make,
    load_with_bar,
    open_model,
    show_banner,
)
from muse_fn.sharding.collectives import ALONE, PeerError, Place, group_place, join
from muse_fn.sharding.mesh import ONE, Mesh, MeshError, parse_mesh
from muse_fn.sharding.rules import check_mesh, problems_of_mesh

LINE = "MUSE_FN_LINE"  # number of the file that is a rank's end of its line
PAUSE = 10.0  # seconds: torchrun ends all ranks as soon as one has ended, and the first is to have its say


class RankError(RuntimeError):
    """A rank that this process started has failed; the message names the rank and the first cause."""


class Line:
    """A rank's end. Losing the other end ends the process at once, whatever it is doing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._begin = threading.Event()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def progress(self, done: int, total: int, what: str) -> None:
        """Reports how much of this rank's share is loaded."""
        self._send({"progress": [done, total, what]})

    def loaded(self) -> None:
        """Reports that this rank is ready, and waits until all are: only then is the terminal free for answers."""
        self._send({"loaded": True})
        self._begin.wait()

    def failed(self, error: Exception) -> None:
        """Reports why this rank ends."""
        expected = isinstance(error, EXPECTED)
        self._send(
            {
                "error": str(error) if expected else f"{type(error).__name__}: {error}",
                "is_peer": isinstance(error, PeerError),
                "time": time.monotonic(),
                "trace": "" if expected else "".join(traceback.format_exception(error)),
                "is_told": not isinstance(error, BrokenPipeError),
            }
        )

    def _send(self, report: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(report).encode())
        except OSError:  # the launcher is gone: the listener ends this process
            return

    def _listen(self) -> None:
        try:
            while True:
                self._connection.recv_bytes()
                self._begin.set()
        except (EOFError, OSError):
            os._exit(1)


EXPECTED = (ValueError, OSError, PeerError, RankError)  # told in a sentence; other kinds of error with their traceback


@lru_cache(maxsize=1)
def line() -> Line | None:
    """The line to the launcher; None in a process that no launcher started. Call it early: it is also the lifeline."""
    number = os.environ.pop(LINE, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return Line(Connection(int(number)))


def tell(error: Exception) -> bool:
    """Says why this process fails, once: up the line, or on standard error. False for errors that need a traceback."""
    if (launcher := line()) is not None:
        launcher.failed(error)
        return True
    if not isinstance(error, EXPECTED):
        return False
    rank, ranks = _place_to_speak_from()
    if isinstance(error, MeshError) and rank > 0:  # every rank finds the same, and the first says it
        time.sleep(PAUSE)
        return True
    where = f"rank {rank} of {ranks}: " if ranks > 1 and not isinstance(error, MeshError) else ""
    err.print(f"error: {where}{error}", markup=False, style="red", soft_wrap=True)
    return True


def _place_to_speak_from() -> Place:
    try:
        return group_place() or ALONE
    except MeshError:  # that may be the very error to be told
        return ALONE


def open_on_mesh(
    text: str | None,
    path: Path | None,
    device: str,
    dtype: Dtype,
    quantize: Quantize,
    quiet: bool,
    is_random: bool = False,
) -> tuple[Model, Mesh]:
    """The model and the mesh of a command with `--mesh text`; a rank's own share, and its mesh joined.

    In the process that is to launch the ranks the model has no parameters and the mesh no link: whatever follows from
    config and tokenizer can be checked before a rank is started. Raises MeshError, before that or before joining, for
    a mesh that does not fit the model or the number of processes. `is_random` makes parameters instead of reading them.
    """
    mesh = ONE if text is None else parse_mesh(text)
    if (group_place() or ALONE).world == 1 and mesh.ranks == 1:
        return open_model(path, device, dtype, quantize, quiet, is_random), mesh
    launcher = line()
    if launcher is None:  # the launcher of this rank, if it has one, did all this
        if not quiet and is_speaker(mesh):
            show_banner()
        head = (open_sizes if is_random else open_headers)(path or EMBEDDED, mesh, quantize)
        if group_place() is None:
            check_cards(device, mesh)
            return head, mesh
    device = own_device(device)
    mesh = join(mesh, device)
    if launcher is None:
        is_quiet = quiet or not is_speaker(mesh)
        return load_with_bar(path, device, dtype, quantize, is_quiet, mesh, is_random=is_random), mesh
    model = load_or_make(path, device, dtype, quantize, mesh, launcher.progress, is_random)
    launcher.loaded()
    return model, mesh


def needs_launch(mesh: Mesh) -> bool:
    """Whether the ranks of this mesh are yet to be started."""
    return mesh.ranks > 1 and mesh.link is None


def is_speaker(mesh: Mesh) -> bool:
    """Whether this process is the one that prints and writes what all ranks find."""
    return (group_place() or ALONE if mesh.link is None else mesh).rank == 0


@contextmanager
def speaking() -> Generator[None]:
    """Prints what all ranks found. Of a reader that has gone, as `head` does, the launcher hears it here: the error
    itself ends a command without a word."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        if (launcher := line()) is not None:
            launcher.failed(error)
        raise


def open_headers(path: Path, mesh: Mesh, quantize: Quantize) -> Model:
    """A model without parameters, from the headers of its files. Raises MeshError unless the mesh fits."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if quantize == Quantize.mxfp4:
        check_widths(config, quantize.value)
    blocks = blocks_of(checkpoint, quantize.value)
    check_mesh(config, mesh, blocks)
    check_processes(config, mesh, blocks)
    return Model(config, Params((), (), (), ()), tokenizer_of(checkpoint.folder))


def open_sizes(path: Path, mesh: Mesh, quantize: Quantize) -> Model:
    """`open_headers` for random parameters: nothing but config and tokenizer is read."""
    packed = quantize != Quantize.none
    head = open_random(path, mesh, packed=packed)
    check_processes(head.config, mesh, blocks_of_format(head.config, format_of(packed)))
    return head


def check_processes(config: Config, mesh: Mesh, blocks: dict[str, int]) -> None:
    """Raises MeshError if this process is one of another number than the mesh has ranks; lists those it has."""
    place = group_place()
    world = mesh.ranks if place is None else place.world
    if world == mesh.ranks:
        return
    layouts = [Mesh(ep=ep, tp=world // ep) for ep in range(1, world + 1) if world % ep == 0]
    fitting = [str(m) for m in layouts if not problems_of_mesh(config, m, blocks)]
    raise MeshError(
        f"mesh {mesh} has {mesh.ranks} ranks, and {world} processes were started: start {mesh.ranks}"
        + (f", or give a mesh of {world}: {'; '.join(fitting)}" if fitting else "")
    )


def own_device(device: str) -> str:
    """The device of this rank: on cuda the card that its place on this machine names."""
    kind, colon, _ = device.partition(":")
    if kind == "cuda":
        if colon:
            raise ValueError(f"--device {device}: on a mesh every rank has a card of its own: must be cuda")
        device = f"cuda:{os.environ.get('LOCAL_RANK', os.environ['RANK'])}"
    check_device(device)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def check_cards(device: str, mesh: Mesh) -> None:
    """Raises ValueError unless this machine has a device for every rank; takes no memory on any card."""
    if device.partition(":")[0] != "cuda":
        check_device(device)
    elif ":" in device:
        raise ValueError(f"--device {device}: on a mesh every rank has a card of its own: must be cuda")
    elif (cards := torch.cuda.device_count()) < mesh.ranks:
        raise ValueError(f"--device {device}: mesh {mesh} needs {mesh.ranks} cards, {cards} are here")
