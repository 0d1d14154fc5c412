"""What an answer must look like, as the OpenAI-like bodies say it: `response_format` and `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from muse_fn.serve.errors import BadRequest, quoted
from muse_fn.serve.turns import Final, Rule
from muse_fn.tokenizer import Json

RULES: dict[str, Rule] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


def final_of(structured: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None = None) -> Final | None:
    """The one rule that both fields together give, or None. BadRequest names the field for anything else.

    `structured` has one of json (a schema or its text), json_object (true), regex, choice, grammar;
    `response_format` has the type text, json_object, or json_schema with `json_schema.schema` beside it.
    """
    rules = [rule for rule in (_structured(structured), _format(response_format)) if rule is not None]
    if len(rules) > 1:
        raise BadRequest("structured_outputs: cannot be given together with response_format", "structured_outputs")
    return rules[0] if rules else None


def _structured(given: Mapping[str, Any] | None) -> Final | None:
    entries = {key: value for key, value in (given or {}).items() if value is not None}
    if given is None:
        return None
    if len(entries) != 1 or not entries.keys() <= RULES.keys():
        found = ", ".join(quoted(key) for key in list(entries)[:8]) or "nothing"
        _refuse("structured_outputs", f"must have one of {', '.join(RULES)}; found {found}")
    ((key, value),) = entries.items()
    path = f"structured_outputs.{key}"
    if key == "json":
        return Final("json_schema", _schema(value, path))
    if key == "json_object":
        if value is not True:
            _refuse(path, f"must be true or absent, found {quoted(value)}")
        return Final("json_object")
    if key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            _refuse(path, "must be a list of at least one string, none of them empty")
        return Final("choice", cast("Json", value))
    if not isinstance(value, str) or not value:
        _refuse(path, f"must be a string that is not empty, found {quoted(value)}")
    return Final(RULES[key], value)


def _format(given: Mapping[str, Any] | None) -> Final | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Final("json_object")
    if kind != "json_schema":
        _refuse("response_format.type", f"must be text, json_object or json_schema, found {quoted(kind)}")
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        _refuse("response_format.json_schema", "must be an object with the field schema")
    return Final("json_schema", _schema(cast("dict[str, Any]", inner)["schema"], "response_format.json_schema.schema"))


def _schema(value: Any, path: str) -> Json:
    """A schema, or its text; texts nest and repeat keys as they like, which the grammar's compiler judges."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            _refuse(path, "is a string that is not JSON")
    if not isinstance(value, dict | bool):
        _refuse(path, f"must be an object, true or false, found {quoted(value)}")
    return cast("Json", value)


def _refuse(path: str, problem: str) -> NoReturn:
    raise BadRequest(f"{path}: {problem}", path)
