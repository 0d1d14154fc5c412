"""Runs a checkpoint's chat template so that nothing a caller wrote can become a control token.

A mark (a character that occurs nowhere else) is put into the caller's strings wherever a control token could begin,
before the template sees them. After rendering, a control token spelled without a mark was written by the template;
all other text loses its marks again and is encoded as ordinary text. The template comes with the checkpoint and is
trusted to say what the prompt is: its loops, calls and output are paid from a budget, which stops the usual runaway
but bounds neither the memory nor the time of one huge expression.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from muse_fn.tokenizer import Control, Json, Piece, Text, Tokenizer, check_text

MAX_DEPTH = 64  # nesting of what a caller may hand to a template
BUDGET = 64 * 1024 * 1024  # characters that may be written, each joining counted: a dozen times the longest prompt
CALL_PRICE, ITEM_PRICE = 256, 8  # a call or a loop's step in characters, so that the budget is also some seconds
PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

# Names with a space cannot be written in a template, so a template can neither reach nor replace these.
RUN, COUNTED, CHARGED = "muse_fn run", "muse_fn counted", "muse_fn charged"


@dataclass(frozen=True, slots=True)
class Guard:
    """Hides every place of a caller's text where a control token could begin, and shows the text again.

    `begins` finds the first character of any control token when its second one, white space or the end of the text
    follows: cutting, trimming and joining in the template then cannot put a token together. `joints` are the ends
    of tokens that the template's own text begins, such as `eot|>` for a template that writes `'<|' ~ name`, and
    `heads` all beginnings of those.
    """

    mark: str
    begins: re.Pattern[str]
    joints: frozenset[str]
    heads: frozenset[str]
    loose: re.Pattern[str]  # any first character of a control token, spelled or as an HTML entity
    needed: frozenset[frozenset[str]]  # per control token, its characters other than letters, digits and _

    def hide(self, text: str) -> str:
        """The text with marks.

        A text with all that a control token needs beside letters is marked around every such beginning, so that a
        template may also delete, reverse or unescape inside of it.
        """
        spelt = set(html.unescape(text))
        whole = any(needed <= spelt for needed in self.needed)
        hidden = self.loose.sub(rf"{self.mark}\g<0>{self.mark}", text) if whole else text
        hidden = hidden if whole else self.begins.sub(rf"\g<0>{self.mark}", text)
        if not self.joints:
            return hidden
        lead = len(text) - len(text.lstrip())
        return hidden[:lead] + self.mark + hidden[lead:] if self._completes(text[lead:].lower()) else hidden

    def _completes(self, text: str) -> bool:
        """Whether text could go on where the template began a control token."""
        size = 1
        while size <= len(text) and text[:size] in self.heads:
            if text[:size] in self.joints:
                return True
            size += 1
        return 1 < size == len(text) + 1

    def show(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")

    def hide_all(self, value: Json) -> Json:
        """`hide` for every string and key of a JSON value."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list):
            return [self.hide_all(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide_all(item) for key, item in value.items()}
        return value


@dataclass(slots=True)
class _Run:
    """One rendering: its guard, and what is left of its budget."""

    guard: Guard
    left: int

    def pay(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise jinja2.TemplateError(f"the template does not end within the work of {BUDGET} characters")


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled chat template and what `Guard` must know about it; made by `compile_template`."""

    compiled: jinja2.Template
    begins: re.Pattern[str]
    joints: frozenset[str]
    heads: frozenset[str]
    loose: re.Pattern[str]
    needed: frozenset[frozenset[str]]
    taken: frozenset[str]


@lru_cache(maxsize=8)
def compile_template(tokenizer: Tokenizer) -> Template:
    """Compile the folder's chat template. ValueError when it has none or it is not Jinja."""
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.source}: the folder has no chat_template.jinja, so messages cannot be rendered")
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    cast("dict[str, object]", environment.filters).update({"tojson": _tojson, COUNTED: _counted, CHARGED: _charged})
    cast("dict[str, object]", environment.globals)["raise_exception"] = _raise_exception
    try:
        tree = environment.parse(tokenizer.chat_template)
        joints = _joints(_literals(tree), tokenizer.controls)
        code = environment.compile(_Charge().visit(tree).set_environment(environment))
    except (jinja2.TemplateError, RecursionError) as error:
        place = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"chat template of {tokenizer.source}{place}: {error or type(error).__name__}") from None
    return Template(
        compiled=jinja2.Template.from_code(environment, code, environment.make_globals(None)),
        begins=_begins(tokenizer.controls),
        joints=joints,
        heads=frozenset(joint[:size] for joint in joints for size in range(1, len(joint) + 1)),
        loose=_loose(tokenizer.controls),
        needed=frozenset(frozenset(c for c in name if not re.match(r"\w", c)) for name in tokenizer.controls),
        taken=frozenset(chain(tokenizer.chat_template, *tokenizer.controls)),
    )


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Json]],
    given: Mapping[str, Json],
    own: Mapping[str, object],
    now: datetime,
) -> list[Piece]:
    """Run the template: messages (roles checked) and `given` come from the caller and are guarded, `own` is ours.

    ValueError, with the path of the value, for one that is not JSON, nests deeper than MAX_DEPTH or has half of a
    surrogate pair; and for whatever the template refuses or trips over.
    """
    template = compile_template(tokenizer)
    seen = set(template.taken)
    for name, value in {**given, "messages": cast("Json", messages)}.items():
        _check(value, name, seen, MAX_DEPTH)
    guard = Guard(_unused(seen), template.begins, template.joints, template.heads, template.loose, template.needed)
    variables = {name: guard.hide_all(value) for name, value in given.items()} | dict(own)
    variables["messages"] = [
        # A checked role is a word of the protocol, not a caller's text: templates build tokens of it.
        {**cast("dict[str, Json]", guard.hide_all(message)), "role": message["role"]}
        for message in messages
    ]
    run = _Run(guard, BUDGET)
    try:
        text = "".join(template.compiled.generate({**variables, "strftime_now": now.strftime, RUN: run}))
    except Exception as error:  # the template is a foreign program and may fail in any way
        problem = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"chat template: {guard.show(problem)}") from error
    return _pieces(tokenizer, guard, text)


def _pieces(tokenizer: Tokenizer, guard: Guard, text: str) -> list[Piece]:
    shown = [
        piece if isinstance(piece, Control) else Text(guard.show(piece.text)) for piece in tokenizer.split_spelled(text)
    ]
    return [piece for piece in shown if piece != Text("")]


def _check(value: Json, path: str, seen: set[str], depth: int) -> None:
    """Refuse what is not JSON, and note every character in `seen`."""
    if depth < 0:
        raise ValueError(f"{path}: nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_text(value, path)
        seen.update(value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", seen, depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{path}: a key must be a string, found {key!r}")
            check_text(key, f"{path}: key {key!a}")
            seen.update(key)
            _check(item, f"{path}.{key}", seen, depth - 1)
    elif isinstance(value, float) and value - value != 0:
        raise ValueError(f"{path}: {value} is not a JSON number")
    elif value is not None and not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{path}: {type(value).__name__} is not a JSON value")


def _unused(seen: set[str]) -> str:
    for code in chain(*PRIVATE_USE):
        if chr(code) not in seen:
            return chr(code)
    raise ValueError("messages: they use every private-use character; one must be free to mark their text")


def _begins(controls: Iterable[str]) -> re.Pattern[str]:
    pairs: dict[str, set[str]] = {}
    for name in controls:
        if len(name) > 1:
            pairs.setdefault(name[0], set()).add(name[1])
    branches = [
        f"{re.escape(first)}(?=[{''.join(map(re.escape, sorted(seconds)))}\\s]|\\Z)"
        for first, seconds in sorted(pairs.items())
    ]
    return re.compile("|".join(branches) or r"(?!)", re.IGNORECASE)


def _loose(controls: Iterable[str]) -> re.Pattern[str]:
    """Any first character of a control token, and `<` as the entities that a template may turn back into it."""
    firsts = sorted({re.escape(name[0]) for name in controls if len(name) > 1})
    return re.compile("|".join([*firsts, r"&(?:lt|#0*60|#x0*3c);?"]), re.IGNORECASE)


def _literals(tree: nodes.Template) -> list[str]:
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    return found + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def _joints(literals: list[str], controls: Iterable[str]) -> frozenset[str]:
    """What could follow the template's own text to complete a control token which that text begins."""
    starts: dict[str, set[str]] = {}
    for name in controls:
        for cut in range(1, len(name)):
            starts.setdefault(name[:cut], set()).add(name[cut:].lower())
    longest = max(map(len, starts), default=0)
    ends = {text[-size:] for text in literals for size in range(1, min(longest, len(text)) + 1)}
    return frozenset(joint for end in ends for joint in starts.get(end, ()))


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with calls and repetitions paid for."""

    intercepted_binops = frozenset(("*", "**"))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        context[RUN].pay(CALL_PRICE)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and operator == "**":
                context[RUN].pay(abs(one))
            elif isinstance(one, int) and hasattr(other, "__len__"):
                context[RUN].pay(abs(one) * len(other))
        return super().call_binop(context, operator, left, right)


class _Charge(NodeTransformer):
    """Sends every loop, every written value and every joined text through the filters that charge for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through(COUNTED, node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_through(CHARGED, child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through(CHARGED, node)


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[object]) -> list[object]:
    listed = list(items)
    context[RUN].pay(ITEM_PRICE * len(listed))
    return listed


@jinja2.pass_context
def _charged(context: Context, value: object) -> str:
    text = str(value)
    context[RUN].pay(len(text))
    return text


@jinja2.pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text as chat templates expect it: no HTML escapes, other alphabets kept. The whole of it is guarded."""
    guard: Guard = context[RUN].guard
    marked = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    text = guard.show(marked)
    if ensure_ascii:  # only now: an escaped mark could not be taken out again
        text = "".join(char if char < "\x80" else json.dumps(char)[1:-1] for char in text)
    return guard.hide(text)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant spans for training; a prompt just contains its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
