"""A rule for the final answer as a grammar of the llguidance library, in its JSON form."""

import json
import re

from muse_fn.serve.grammar_schema import checked, dumped
from muse_fn.serve.turns import Final
from muse_fn.tokenizer import Json, check_text

# White space between the parts of JSON, at one place: a line break and its indentation, or a blank.
SPACE = r"(?: |\n {0,32}|\r\n {0,32}|\n\t{0,16})"
MAX_CHOICES = 16_384
FIELDS = {
    "json_schema": "response_format.json_schema.schema",
    "json_object": "response_format",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
}


def grammar_of(final: Final) -> str:
    """The grammar of the whole answer. ValueError naming the field for a rule that cannot be one."""
    where = FIELDS[final.rule]
    if final.rule == "json_schema":
        return whole(json_schema=with_space(checked(final.value, where), where))
    if final.rule == "json_object":
        return whole(json_schema=with_space({"type": "object"}, where))
    if final.rule == "choice":
        return whole(lark_grammar=_choice(final.value, where))
    if not isinstance(final.value, str) or not final.value.strip():
        raise ValueError(f"{where}: must be a non-empty text, found {_found(final.value)}")
    check_text(final.value, where)
    if final.rule == "regex":
        return whole(lark_grammar=f"start: {regex(final.value)}")
    return whole(lark_grammar=final.value)


def whole(**grammar: Json) -> str:
    """One grammar in the library's JSON form."""
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def with_space(schema: Json, where: str) -> Json:
    """A schema with bounded white space. ValueError for what JSON text cannot hold, and for `false`."""
    if schema is False:
        raise ValueError(f"{where}: the schema false allows nothing")
    dumped(schema, where)
    options: dict[str, Json] = {"whitespace_pattern": SPACE}
    return {"x-guidance": options, **(schema if isinstance(schema, dict) else {})}


def regex(pattern: str) -> str:
    """A pattern as a literal of a Lark grammar: `/`, and line breaks, end it."""
    escaped = re.sub(r"(\\.)|(/)|(\n)|(\r)", _escape, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def literal(text: str) -> str:
    """Ordinary text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _escape(match: re.Match[str]) -> str:
    if match[1]:
        return {"\\\n": r"\n", "\\\r": r"\r"}.get(match[1], match[1])
    return r"\/" if match[2] else r"\n" if match[3] else r"\r"


def _choice(value: Json, where: str) -> str:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: must be a non-empty list of strings, found {_found(value)}")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{where}: has {len(value)} choices, more than {MAX_CHOICES}")
    texts: list[str] = []
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise ValueError(f"{where}[{index}]: must be a string, found {_found(text)}")
        check_text(text, f"{where}[{index}]")
        texts.append(text)
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(texts)))


def _found(value: Json) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"{type(value).__name__} of {len(value)}"
