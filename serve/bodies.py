"""The raw body of a request to a checked model: every way in which it can be wrong is a `BadRequest`."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from math import isfinite
from typing import NoReturn, ParamSpec, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from muse_fn.serve.errors import BadRequest, Gone, quoted
from muse_fn.serve.service import Limits, Service
from muse_fn.tokenizer import Json

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
P = ParamSpec("P")
LARGE = 32 * 1024  # bytes, characters or ids from which on work goes to a thread
LISTED = 8  # problems named in one message
RATE = 16 * 1024  # bytes a second: what a body may be slower than for `limits.stall` seconds in all
DIGITS = 400  # of a whole number; a float has at most 309 before its point
logger = logging.getLogger("muse_fn.serve")


async def parse(service: Service, request: Request, model: type[M]) -> M:
    """The body as a `model`. BadRequest (400, 408, 413, 415) says what is wrong and where; Gone if nobody is there.

    Fields that the model does not know are kept aside, see `warnings_of`; a strict server refuses them.
    """
    _check_headers(request)
    raw = await _read(request, service.limits)
    found = await off_loop(len(raw), _checked, raw, service.limits, model)
    unknown = warnings_of(found)
    if unknown and service.strict:
        raise BadRequest("; ".join(unknown), unknown[0].partition(":")[0])
    if unknown:
        logger.warning("request has unknown fields", extra={"fields": len(unknown)})
    return found


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the work returns; done in a thread if `size` is large, so that other requests do not wait for it."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def warnings_of(model: BaseModel) -> list[str]:
    """One sentence for each field that was given and is not known, inner models included."""
    paths = list(_unknown(model, ""))
    told = [f"{path}: unknown field, ignored" for path in paths[:LISTED]]
    return [*told, f"and {len(paths) - LISTED} more unknown fields"] if len(paths) > LISTED else told


def load_json(raw: bytes, limits: Limits) -> Json:
    """Strict JSON: UTF-8 without a byte order mark, no duplicate keys, no NaN or infinity, numbers of a sane length,
    no half of a surrogate pair, bounded depth. Raises BadRequest."""
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise BadRequest("body: begins with a byte order mark; must be UTF-8 without one")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"body: byte 0x{raw[error.start]:02x} at {error.start} is not UTF-8") from None
    try:
        value = cast(
            "Json",
            json.loads(
                text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
            ),
        )
    except RecursionError:
        raise BadRequest(f"body: nested deeper than {limits.depth}") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"body: is not JSON: {error.msg} at character {error.pos}") from None
    _check_depth(value, limits.depth)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _check_headers(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        found = quoted(kind.strip()) if kind.strip() else "none"
        raise BadRequest(f"content-type: must be application/json, found {found}", "content-type", status=415)
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if charset not in ("", "utf-8", "utf8"):
        raise BadRequest(f"content-type: charset must be utf-8, found {quoted(charset)}", "content-type", status=415)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"content-encoding: must be absent, found {quoted(encoding)}; send the body as it is"
        raise BadRequest(message, "content-encoding", status=415)


async def _read(request: Request, limits: Limits) -> bytes:
    """The whole body, counted while it comes in.

    A client that sends nothing for `limits.stall` seconds is refused, and so is one that sends a little now and then:
    after so long, RATE is the least.
    """
    too_large = BadRequest(f"body: larger than the limit of {limits.body} bytes", status=413)
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise BadRequest("content-length: must be a whole number", "content-length")
    if len(declared) > 18 or int(declared) > limits.body:
        raise too_large
    parts: list[bytes] = []
    size, began = 0, time.monotonic()
    stream = request.stream()
    while True:
        left = began + limits.stall + size / RATE - time.monotonic()
        try:
            part = await asyncio.wait_for(anext(stream, None), min(left, limits.stall))
        except TimeoutError:
            slow = f"nothing came for {limits.stall:g} seconds" if left > limits.stall else "came too slowly"
            raise BadRequest(f"body: {slow}", status=408) from None
        except ClientDisconnect:
            raise Gone from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > limits.body:
            raise too_large
        parts.append(part)


def _checked(raw: bytes, limits: Limits, model: type[M]) -> M:
    value = load_json(raw, limits)
    if not isinstance(value, dict):
        raise BadRequest(f"body: must be a JSON object, found {quoted(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> BadRequest:
    details = error.errors(include_url=False, include_context=False)
    told = list(dict.fromkeys(_sentence(detail) for detail in details))
    more = [f"and {len(told) - LISTED} more"] if len(told) > LISTED else []
    return BadRequest("; ".join(told[:LISTED] + more), told[0].partition(":")[0])


def _sentence(detail: ErrorDetails) -> str:
    path, said = _path(detail["loc"]), detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{path}: {said}" if detail["loc"] else said
    if detail["type"] == "missing":
        return f"{path}: is required"
    return f"{path}: {said.replace('Input should', 'must', 1)}, found {quoted(detail['input'])}"


def _path(places: tuple[int | str, ...]) -> str:
    """`a.b[3]`. Names of union members, which pydantic mixes in, are told by their brackets or being types."""
    text = ""
    for place in places:
        if isinstance(place, int):
            text += f"[{place}]"
        elif not text or (
            place.isascii()
            and (place.isidentifier() or place.isdigit())
            and place not in ("str", "int", "float", "bool")
        ):
            shown = place if place.isascii() and len(place) <= 60 else quoted(place)
            text += f".{shown}" if text else shown
    return text or "body"


def _object(pairs: list[tuple[str, Json]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadRequest(
            f"body: the key {quoted(twice)} appears twice in one object", twice if twice.isascii() else None
        )
    return found


def _constant(text: str) -> NoReturn:
    raise BadRequest(f"body: {text} is not JSON; numbers must be finite")


def _float(text: str) -> float:
    if len(text) > 2 * DIGITS or not isfinite(value := float(text)):
        raise BadRequest(f"body: the number {quoted(text)} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise BadRequest(f"body: a whole number of {len(text)} digits is out of range")
    return int(text)


def _check_depth(value: Json, depth: int) -> None:
    level = [value]
    for _ in range(depth):
        level = [inner for item in level for inner in _inside(item) if isinstance(inner, list | dict)]
        if not level:
            return
    raise BadRequest(f"body: nested deeper than {depth}")


def _inside(value: Json) -> list[Json]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []


def _check_surrogates(value: Json) -> None:
    waiting: list[tuple[str, Json]] = [("", value)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, str):
            _check_whole(item, path or "body")
        elif isinstance(item, list):
            waiting += [(f"{path}[{index}]", inner) for index, inner in enumerate(item)]
        elif isinstance(item, dict):
            for key in item:
                _check_whole(key, f"{path}: a key" if path else "body: a key")
            waiting += [(f"{path}.{key}" if path else key, inner) for key, inner in item.items()]


def _check_whole(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise BadRequest(f"{path}: half of a surrogate pair ({half}) is not text", path.partition(":")[0]) from None


def _unknown(model: BaseModel, path: str) -> Iterator[str]:
    for name in model.model_extra or {}:
        yield path + (name if name.isascii() and len(name) <= 60 else quoted(name))
    for name in type(model).model_fields:
        inner = getattr(model, name)
        if isinstance(inner, BaseModel):
            yield from _unknown(inner, f"{path}{name}.")
