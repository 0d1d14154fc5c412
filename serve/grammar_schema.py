"""JSON Schemas as a grammar can enforce them: what cannot be enforced is refused by name, never passed over.

Keywords follow draft 2020-12; those that only describe are dropped. References are local pointers. Every check here is
linear in the schema, apart from following references, which is refused where it would not end.
"""

import json
from collections.abc import Iterator
from urllib.parse import quote, unquote

from muse_fn.tokenizer import Json

ENFORCED = frozenset(
    "type enum const anyOf oneOf allOf $ref properties required additionalProperties patternProperties minProperties "
    "maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength pattern format minimum "
    "maximum exclusiveMinimum exclusiveMaximum multipleOf $defs definitions".split()
)
DESCRIBING = frozenset(
    "title description default examples example $schema $comment deprecated readOnly writeOnly contentMediaType "
    "contentEncoding discriminator".split()
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems")
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_LENGTH = 1 << 20  # of what a schema may count


def checked(schema: Json, where: str) -> Json:
    """The schema without what only describes; an object, true or false. ValueError listing every fault with its path.

    Unlike the result of compiling, it says so of each keyword that is unknown or not supported, of references that lead
    nowhere or only to themselves, and of text that has no UTF-8 form.
    """
    faults: list[str] = []
    if isinstance(schema, dict):  # inside, it would move what references mean; here all of them are local
        schema = {word: value for word, value in schema.items() if word != "$id"}
    cleaned = _cleaned(schema, where, faults)
    if not faults:
        faults += _lost_references(cleaned, where)
    if faults:
        raise ValueError("; ".join(faults[:10]) + (f"; and {len(faults) - 10} more" if len(faults) > 10 else ""))
    return cleaned


def dumped(value: Json, where: str) -> str:
    """JSON text. ValueError naming `where` for numbers that JSON has not and for half of a surrogate pair."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: half of a surrogate pair is not text") from None
    except ValueError:
        raise ValueError(f"{where}: a number in it is not finite") from None
    return text


def resolved(reference: str, root: Json) -> Json:
    """What a local pointer (`#/$defs/x`) leads to. ValueError where there is nothing, or no pointer."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"$ref {reference!r} is no local pointer such as '#/$defs/x'")
    node = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and len(key) < 7 and int(key) < len(node):
            node = node[int(key)]
        else:
            raise ValueError(f"$ref {reference!r} leads nowhere")
    if not isinstance(node, dict | bool):
        raise ValueError(f"$ref {reference!r} leads to no schema")
    return node


def part(root: Json, keys: tuple[str, ...], schema: Json) -> Json:
    """A schema inside of another as a schema of its own: its references still lead where they led."""
    if not any(isinstance(node, dict) and "$ref" in node for node in subschemas(schema)):
        return schema
    pointer = "/".join(quote(key.replace("~", "~0").replace("/", "~1"), safe="~") for key in ("$defs", "root", *keys))
    return {"$ref": f"#/{pointer}", "$defs": {"root": _moved(root)}}


def subschemas(schema: Json) -> Iterator[Json]:
    """A schema and all schemas inside of it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [inner for _, inner in _children(node)]


def literals(schema: Json) -> Iterator[str]:
    """Every text that an answer may have to spell: strings in const and enum, and names of properties."""
    for node in subschemas(schema):
        if isinstance(node, dict):
            yield from _strings([node.get("const"), node.get("enum"), node.get("required")])
            properties = node.get("properties")
            yield from properties if isinstance(properties, dict) else ()


def _strings(value: Json) -> Iterator[str]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += [*node, *node.values()]


def _children(node: Json) -> Iterator[tuple[tuple[str, ...], Json]]:
    if not isinstance(node, dict):
        return
    for word in _MAPS:
        if isinstance(inner := node.get(word), dict):
            yield from (((word, key), value) for key, value in inner.items())
    for word in (*_LISTS, *_SINGLE):
        if isinstance(inner := node.get(word), list):
            yield from (((word, str(index)), value) for index, value in enumerate(inner))
        elif word in node and word in _SINGLE:
            yield (word,), node[word]


def _moved(node: Json) -> Json:
    """A copy of a schema whose root lies at #/$defs/root."""
    if not isinstance(node, dict):
        return node
    copy = dict(node)
    for word in _MAPS:
        if isinstance(inner := node.get(word), dict):
            copy[word] = {key: _moved(value) for key, value in inner.items()}
    for word in (*_LISTS, *_SINGLE):
        if isinstance(inner := node.get(word), list):
            copy[word] = [_moved(value) for value in inner]
        elif word in node:
            copy[word] = _moved(inner)
    if isinstance(reference := node.get("$ref"), str):
        copy["$ref"] = "#/$defs/root" + reference[1:]
    return copy


def _cleaned(node: Json, path: str, faults: list[str]) -> Json:
    if isinstance(node, bool):
        return node
    if not isinstance(node, dict):
        faults.append(f"{path}: must be a schema (an object, true or false), found {type(node).__name__}")
        return True
    copy: dict[str, Json] = {}
    for word, value in node.items():
        if word in DESCRIBING:
            continue
        if word not in ENFORCED:
            faults.append(f"{path}: the keyword {word!r} is not supported")
            continue
        copy[word] = _keyword(word, value, path, faults)
    return copy


def _keyword(word: str, value: Json, path: str, faults: list[str]) -> Json:
    if word in _MAPS:
        if isinstance(value, dict):
            return {key: _cleaned(inner, f"{path}.{word}.{key}", faults) for key, inner in value.items()}
        faults.append(f"{path}.{word}: must be an object, found {type(value).__name__}")
    elif word in _LISTS or (word == "items" and isinstance(value, list)):
        if isinstance(value, list):
            return [_cleaned(inner, f"{path}.{word}[{index}]", faults) for index, inner in enumerate(value)]
        faults.append(f"{path}.{word}: must be a list, found {type(value).__name__}")
    elif word in _SINGLE:
        return _cleaned(value, f"{path}.{word}", faults)
    elif word == "$ref" and not isinstance(value, str):
        faults.append(f"{path}.$ref: must be a string, found {type(value).__name__}")
    elif word in _LENGTHS:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
            faults.append(f"{path}.{word}: must be a whole number from 0, found {value!r}")
        elif value > MAX_LENGTH:
            faults.append(f"{path}.{word}: {value} is more than the {MAX_LENGTH} that can be counted")
    return value


def _lost_references(root: Json, where: str) -> list[str]:
    """Faults of references: without a target, or in a circle that adds nothing (`{"$ref": "#"}`, also over anyOf)."""
    faults: list[str] = []
    done: set[int] = set()
    for start in subschemas(root):
        try:
            if not _ends(start, root, done):
                faults.append(f"{where}: a $ref leads back to itself with nothing in between")
                break
        except ValueError as error:
            faults.append(f"{where}: {error}")
    return list(dict.fromkeys(faults))


def _ends(start: Json, root: Json, done: set[int]) -> bool:
    """Whether following $ref, anyOf, oneOf and allOf from here ends; depth first, without recursion."""
    open_: set[int] = set()
    waiting: list[tuple[Json, bool]] = [(start, False)]
    while waiting:
        node, leaving = waiting.pop()
        if leaving:
            open_.discard(id(node))
            done.add(id(node))
            continue
        if not isinstance(node, dict) or id(node) in done:
            continue
        if id(node) in open_:
            return False
        open_.add(id(node))
        waiting.append((node, True))
        for word in _IN_PLACE:
            inner = node.get(word)
            waiting += [(item, False) for item in inner] if isinstance(inner, list) else []
        if isinstance(reference := node.get("$ref"), str):
            waiting.append((resolved(reference, root), False))
    return True
