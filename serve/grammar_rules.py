"""A rule for the final answer as a grammar of the llguidance library, in its JSON form."""

import json

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
    """A pattern as a literal of a Lark grammar, in which `/` and line breaks are escaped.

    \\d, \\w and \\s are the ASCII ones wherever that allows less: what comes out matches under the rules of Python,
    JavaScript and JSON Schema alike, and under any version of Unicode.
    """
    found, position, in_class, negated = list[str](), 0, 0, False
    while position < len(pattern):
        char, after = pattern[position], pattern[position + 1 : position + 2]
        position += 1
        if char == "\\" and after:
            position += 1
            found.append(_escape(after, in_class > 0, in_class > 0 and negated))
            continue
        if char == "[":
            negated = after == "^" if not in_class else negated or after == "^"
            in_class += 1
        elif char == "]" and in_class and not _opens_class(pattern, position - 1):
            in_class -= 1
        found.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(char, char))
    return f"/{''.join(found)}/"


def literal(text: str) -> str:
    """Ordinary text as a literal of a Lark grammar; a regular expression, which can spell every character."""
    spelled = (c if c.isalnum() or c == " " else f"\\x{{{ord(c):x}}}" for c in text)
    return f"/(?:{''.join(spelled)})/"


def _opens_class(pattern: str, at: int) -> bool:
    """Whether the `]` at this place stands first in its class, where it means itself."""
    return pattern[at - 1] == "[" or (pattern[at - 1] == "^" and pattern[at - 2 : at - 1] == "[")


def _escape(char: str, in_class: bool, negated: bool) -> str:
    if negated:  # a class that excludes excludes as much as any dialect means
        return {"s": r"\s\x1c-\x1f"}.get(char, {"\n": r"\n", "\r": r"\r"}.get(char, f"\\{char}"))
    spelled = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}.get(char)
    if spelled is not None:
        return spelled if in_class else f"[{spelled}]"
    if char == "S":
        return r"[^\s\x1c-\x1f]"
    return {"\n": r"\n", "\r": r"\r"}.get(char, f"\\{char}")


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
    """A value as an error shows it: short."""
    return ascii(value)[:60] if isinstance(value, str | int | float | None) else type(value).__name__
