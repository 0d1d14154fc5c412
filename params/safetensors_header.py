"""The header of one safetensors file, read and verified without touching the data behind it.

    8 bytes   L, little endian
    L bytes   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__": str -> str
    the rest  data; offsets count from here, and tensors fill it without a gap

Source: the published description of the format.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeGuard, cast

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U8", "I8", "BOOL"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
MAX_HEADER = 100_000_000  # bytes; other readers of the format refuse more as well


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of one file, as the header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, counted from the start of the file
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.file.name}: {shown(self.name)}"


def shown(name: str) -> str:
    """A name from a file, safe to print: escaped where it is not plain text, cut where it is long."""
    name = name if name.isprintable() else ascii(name)
    return name if len(name) <= 200 else name[:200] + "…"


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. ValueError if it is none or if any object in it has a key twice, all such keys named."""
    twice: list[str] = []

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            seen: set[str] = set()
            twice.extend(shown(key) for key, _ in pairs if key in seen or seen.add(key))
        return unique

    try:
        found: object = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, not {type(found).__name__}")
    if twice:
        raise ValueError(f"names appear twice: {', '.join(twice)}")
    return cast("dict[str, Any]", found)


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; ValueError or OSError if it does not, or is not worth reading."""
    if path.exists() and not path.is_file():
        raise ValueError("no regular file")
    if path.stat().st_size > MAX_HEADER:
        raise ValueError(f"has {path.stat().st_size} bytes: at most {MAX_HEADER} are read")
    return parse_object(path.read_bytes())


def read_header(path: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a file by name, and everything that is wrong with it as sentences. Reads the header only."""
    try:
        raw, size = _read_raw(path)
        entries = parse_object(raw)
    except OSError as error:
        return {}, [f"{path.name}: cannot be read ({error.strerror})"]
    except ValueError as error:
        return {}, [f"{path.name}: header {error}"]
    tensors: dict[str, Stored] = {}
    problems = _problems_of_metadata(path, entries.pop("__metadata__", {}))
    for name, entry in entries.items():
        problem = _problem_of_entry(entry)
        if problem:
            problems.append(f"{path.name}: {shown(name)}: {problem}")
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(cast("list[int]", entry["shape"]))
        tensors[name] = Stored(name, path, entry["dtype"], shape, 8 + len(raw) + begin, end - begin)
    # Without the entries that are wrong in themselves, neighbours would look like gaps.
    return tensors, problems or _problems_of_layout(path, tensors.values(), 8 + len(raw), size)


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The JSON bytes of the header and the size of the file; ValueError continues the words "file: header …"."""
    status = path.stat()
    if not S_ISREG(status.st_mode):  # asked before opening: to open a pipe would wait for ever
        raise ValueError(f"cannot be read: this is {'a folder' if S_ISDIR(status.st_mode) else 'no regular file'}")
    size = status.st_size
    if size < 8:
        raise ValueError(f"is cut: the file has {size} bytes, the length of the header alone takes 8")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER:
            raise ValueError(f"of {length} bytes: at most {MAX_HEADER} are allowed (is this a safetensors file?)")
        if length > size - 8:
            raise ValueError(f"of {length} bytes is longer than the file, which has {size}")
        return file.read(length), size


def _problems_of_metadata(path: Path, found: object) -> list[str]:
    if isinstance(found, dict) and all(isinstance(value, str) for value in cast("dict[str, Any]", found).values()):
        return []
    return [f"{path.name}: __metadata__: must map words to strings"]


def _problem_of_entry(entry: Any) -> str:
    """What is wrong with one tensor's description; empty if nothing is."""
    if not isinstance(entry, dict):
        return "its header entry must be an object"
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = (cast("Any", fields.get(key)) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"dtype is {shown(repr(dtype))}: must be one of {', '.join(BITS)}"
    if not _are_sizes(shape):
        return f"shape is {shown(repr(shape))}: must be a list of whole numbers from 0 on"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets is {shown(repr(offsets))}: must be [begin, end]"
    bits = prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"{dtype} {shape} takes {bits / 8:.15g} bytes, data_offsets hold {offsets[1] - offsets[0]}"
    return ""


def _are_sizes(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(n) is int and n >= 0 for n in cast("list[Any]", found))


def _problems_of_layout(path: Path, tensors: Iterable[Stored], start: int, size: int) -> list[str]:
    """Overlaps, gaps and a wrong end, walking through the file by offset."""
    problems: list[str] = []
    last, at = "the header", start
    for tensor in sorted(tensors, key=lambda t: (t.start, t.size)):
        if tensor.start < at:
            problems.append(f"{tensor}: overlaps {last} by {at - tensor.start} bytes")
        if tensor.start > at:
            problems.append(f"{tensor}: begins {tensor.start - at} bytes after the end of {last}; gaps are not allowed")
        if tensor.start + tensor.size > size:
            problems.append(f"{tensor}: ends at byte {tensor.start + tensor.size}, the file is cut at {size}")
        if tensor.start + tensor.size >= at:
            last, at = shown(tensor.name), tensor.start + tensor.size
    if at < size:
        problems.append(f"{path.name}: {size - at} bytes follow the last tensor, {last}")
    return problems


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON of a file that holds these tensors (dtype, shape) in this order, its data aligned to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
