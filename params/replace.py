"""A folder that appears complete or not at all, in the place of an older one if there is one."""

import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from muse_fn.params.checkpoint import INDEX, SINGLE, weight_map
from muse_fn.params.config import ConfigError, read_json
from muse_fn.params.quantization import HF_QUANT

# What a new checkpoint brings itself; any other file of an older one is kept.
REPLACED = ("config.json", HF_QUANT, INDEX, SINGLE, "model-*-of-*.safetensors")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new folder beside `path` to fill, which takes its name at the end of the `with` block.

    After an exception it is gone and `path` is as before. Files of an older checkpoint are unlinked, never written to,
    so that whoever has them mapped keeps their content. Raises ValueError if `path` is something else.
    """
    path = path.resolve()  # a link to a folder stays a link
    _check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    new.mkdir()
    try:
        yield new
        _keep_other_files(path, new)
        _swap(path, new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _check_target(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path}: exists and is no folder")
    if any(path.iterdir()) and not _is_checkpoint(path):
        raise ValueError(f"{path}: holds something that is no Muse Spark checkpoint; choose a new or empty folder")


def _is_checkpoint(path: Path) -> bool:
    try:
        return str(read_json(path).get("model_type", "")).startswith("muse_spark")
    except ConfigError:
        return False


def _shards(old: Path) -> set[str]:
    """Files of the older checkpoint's index, whatever they are called."""
    try:
        return set(weight_map(old).values())
    except (OSError, ValueError):
        return set()


def _keep_other_files(old: Path, new: Path) -> None:
    shards = _shards(old)
    for entry in old.iterdir() if old.exists() else ():
        if entry.name in shards or any(fnmatch(entry.name, pattern) for pattern in REPLACED):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _swap(path: Path, new: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    old = new.with_suffix(".old")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)
