"""The raw strings that a schema allows, as a terminal of a Lark grammar: what a tool call writes without quotes."""

import re

from muse_fn.serve.atem import INVOKE_END, PARAMETER_END
from muse_fn.serve.grammar_rules import literal, regex
from muse_fn.serve.grammar_schema import dumped, resolved
from muse_fn.tokenizer import Json

ANY = "/(?s:.*)/"
UNTAGGED = f"~/(?s:.*)({'|'.join(map(re.escape, (PARAMETER_END, INVOKE_END)))})(?s:.*)/".replace("/atem", r"\/atem")
_DAY = r"(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[0-9]{{3}}[1-9]-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,15}){0,3}"  # no two hyphens: they mark encoded names
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,8}}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,32}}){{0,4}}@{_LABEL}(?:\.{_LABEL}){{1,4}}",
}


def language(schema: Json, root: Json, where: str) -> str | None:
    """A Lark expression for the strings that a schema allows and a tool call can write; None if there are none.

    ValueError, naming the keyword, for what cannot be expressed.
    """
    terms = _terms(schema, root, where)
    return None if terms is None else " & ".join([ANY, *terms, UNTAGGED])


def _terms(node: Json, root: Json, where: str) -> list[str] | None:
    """Expressions that all must match; None if no string can. The schema's references end: that has been checked."""
    if not isinstance(node, dict):
        return [] if node else None
    kinds = node.get("type", "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return None
    terms = _own(node, where)
    branches: list[list[str] | None] = []
    if isinstance(reference := node.get("$ref"), str):
        branches.append(_terms(resolved(reference, root), root, where))
    if isinstance(every := node.get("allOf"), list):
        branches += [_terms(inner, root, where) for inner in every]
    for word in ("anyOf", "oneOf"):
        if isinstance(some := node.get(word), list):
            branches.append(_either([_terms(inner, root, where) for inner in some], word, where))
    for branch in branches:
        terms = None if terms is None or branch is None else terms + branch
    return terms


def _either(options: list[list[str] | None], word: str, where: str) -> list[str] | None:
    able = [terms for terms in options if terms is not None]
    if word == "oneOf" and len(able) > 1:
        raise ValueError(f"{where}.oneOf: more than one branch allows strings; use anyOf")
    if not able:
        return None
    return [] if not all(able) else ["(" + " | ".join("(" + " & ".join(terms) + ")" for terms in able) + ")"]


def _own(node: dict[str, Json], where: str) -> list[str] | None:
    terms: list[str] = []
    for listed in (node.get("enum"), [node["const"]] if "const" in node else None):
        if listed is None:
            continue
        texts = [item for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
        if spelled := [text for text in texts if PARAMETER_END in text or INVOKE_END in text]:
            raise ValueError(f"{where}: {spelled[0][:64]!r} spells a closing tag: a tool call has no way to write that")
        if not texts:
            return None
        dumped([*texts], where)
        terms.append("(" + " | ".join(map(literal, texts)) + ")")
    low, high = node.get("minLength", 0), node.get("maxLength")
    if low or high is not None:
        assert isinstance(low, int | float)
        assert high is None or isinstance(high, int | float)
        if high is not None and low > high:
            return None
        terms.append(f"/(?s:.{{{int(low)},{'' if high is None else int(high)}}})/")
    if "pattern" in node:
        terms.append(_found(node["pattern"], f"{where}.pattern"))
    if "format" in node:
        name = node["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ValueError(f"{where}.format: must be one of {', '.join(FORMATS)}, found {name!r}")
        terms.append(regex(f"(?:{FORMATS[name]})"))
    return terms


def _found(pattern: Json, where: str) -> str:
    """Texts in which a pattern is found somewhere, as schemas mean it."""
    if not isinstance(pattern, str):
        raise ValueError(f"{where}: must be a string, found {type(pattern).__name__}")
    dumped(pattern, where)
    if re.search(r"\(\?[a-zA-Z-]+[:)]", pattern):
        raise ValueError(f"{where}: flags inside of a pattern are not supported")
    pieces: list[str] = []
    for option in _options(pattern):
        core, front, back = option, ANY, ANY
        if core.startswith("^"):
            core, front = core[1:], ""
        if core.endswith("$") and not (len(core) - len(core[:-1].rstrip("\\"))) % 2 == 0:
            core, back = core[:-1], ""
        pieces.append("(" + " ".join(filter(None, (front, regex(f"(?:{core})"), back))) + ")")
    return "(" + " | ".join(pieces) + ")"


def _options(pattern: str) -> list[str]:
    """A pattern cut at the bars that stand in no group and no class."""
    cuts, depth, in_class, position = [-1], 0, False, 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            position += pattern[position + 1 : position + 2] == "^"
            position += pattern[position + 1 : position + 2] == "]"
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            cuts.append(position)
        position += 1
    return [pattern[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(pattern)], strict=True)]
