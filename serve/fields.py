"""Reading parts of a request body that no schema has checked: every error is a sentence that begins with the path."""

from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeAlias

from muse_fn.tokenizer import Json

Object: TypeAlias = dict[str, Json]


def within(path: str, field: str) -> str:
    """The path of a field of an object; the body itself has none."""
    return f"{path}.{field}" if path else field


def merged(first: Object, **more: Json) -> Object:
    """A copy with more fields."""
    return {**first, **more}


def refuse(path: str, problem: str) -> NoReturn:
    """ValueError `path: problem`."""
    raise ValueError(f"{path}: {problem}")


def found(value: Json) -> str:
    """A value as an error shows it: short, and in ASCII."""
    text = ascii(value) if isinstance(value, str | int | float) else "null" if value is None else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}…"


def object_at(value: Json, path: str) -> Object:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        refuse(path, f"must be an object, found {found(value)}")
    return value


def list_at(value: Json, path: str) -> list[Json]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        refuse(path, f"must be a list, found {found(value)}")
    return value


def text_at(entry: Object, field: str, path: str) -> str:
    """A field, which must be a string, perhaps empty."""
    value = entry.get(field)
    if not isinstance(value, str):
        refuse(within(path, field), f"must be a string, found {found(value)}")
    return value


def name_at(entry: Object, field: str, path: str, limit: int = 256) -> str:
    """A field, which must be a string of 1 to `limit` characters."""
    value = entry.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        size = f" of {len(value)} characters" if isinstance(value, str) else ""
        refuse(within(path, field), f"must be a string of 1 to {limit} characters, found {found(value)}{size}")
    return value


def optional_text(entry: Object, field: str, path: str) -> str | None:
    """A field that may be absent or null, else a string."""
    return None if entry.get(field) is None else text_at(entry, field, path)


def flag_at(entry: Object, field: str, path: str, default: bool) -> bool:
    """A field that may be absent or null, else true or false."""
    value = entry.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(within(path, field), f"must be true or false, found {found(value)}")
    return value


def one_of(entry: Object, field: str, path: str, allowed: Iterable[str], default: str | None = None) -> str:
    """A field with a closed list of values; null and absence are the default, if there is one."""
    value = entry.get(field)
    value = default if value is None else value
    listed = tuple(allowed)
    if not isinstance(value, str) or value not in listed:
        refuse(within(path, field), f"must be one of {', '.join(map(repr, listed))}, found {found(value)}")
    return value


def unknown_fields(entry: Mapping[str, Json], known: Iterable[str], path: str) -> tuple[str, ...]:
    """Paths of the fields of an object that are not among the known and not null."""
    names = frozenset(known)
    return tuple(within(path, name) for name, value in entry.items() if name not in names and value is not None)


def told_unknown(paths: Iterable[str], strict: bool) -> tuple[str, ...]:
    """A warning for each path of an unknown field. ValueError for the first of them where the server is strict."""
    told = tuple(f"{path}: unknown field, ignored" for path in paths)
    if told and strict:
        raise ValueError("; ".join(told[:8]))
    return told
