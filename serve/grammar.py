"""Constraints on what is generated: tool choice and structured output, enforced over the whole framing of a turn.

| tool_choice | what may come after any number of messages to self                                  |
|-------------|-------------------------------------------------------------------------------------|
| auto        | calls, or the answer, which matches `final` if given                                |
| none        | the answer, which matches `final` if given                                          |
| required    | calls of any tool                                                                   |
| named       | calls of that tool                                                                  |

Where there are calls there is at least one, and without `parallel_tool_calls` exactly one. With auto, no `final`, and
calls in any number there is nothing to enforce, and no constraint. Arguments of calls match the tool's schema; with
auto, a schema that no grammar can express is enforced in its parameters' names and kinds only.

Commentary may come beside messages to self unless there is a `final` (to clients it is part of the answer's text) or a
tool is named: a model that would rather call another writes that call there.

Where calls or a `final` must come, half of the token budget at most, and all of it but ROOM, goes to what comes before.
"""

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue

from llguidance import LLMatcher

from muse_fn.serve.grammar_calls import CallGrammar, Tool, call_grammar, declared, loosened
from muse_fn.serve.grammar_cursor import Body, Cursor, Plan
from muse_fn.serve.grammar_guard import Vetoes
from muse_fn.serve.grammar_rules import FIELDS, grammar_of, literal, whole
from muse_fn.serve.grammar_schema import dumped
from muse_fn.serve.grammar_trial import Fault, Slow, TooSlow, Trials
from muse_fn.serve.grammar_vocabulary import Vocabulary
from muse_fn.serve.jobs import Constraint
from muse_fn.serve.turns import Final, Named, ToolChoice
from muse_fn.tokenizer import Json, Tokenizer

KEPT = 64  # compiled framings
ROOM = 128  # tokens of the budget that reasoning never takes from what must come
WORKERS = 2  # one request's grammars may take long; another's are tried meanwhile
START, MESSAGE, END_OF_MESSAGE, END_OF_TURN = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"


@dataclass(frozen=True)
class Framing:
    """What a turn must look like, from the generation prompt `<|start|>assistant` on."""

    tools: Json = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    final: Final | None = None

    @property
    def is_free(self) -> bool:
        """Whether there is nothing to enforce."""
        one_at_most = not self.parallel_tool_calls and bool(self.tools)
        return self.tool_choice == "auto" and self.final is None and not one_at_most


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A compiled framing. Any thread may begin cursors."""

    plan: Plan

    def begin(self, budget: int | None = None) -> Constraint:
        """A fresh cursor at the start of the generated text, of `budget` tokens at most."""
        if budget is None or not self.plan.late_headers:
            return Cursor(self.plan)
        return Cursor(self.plan, max(0, min(budget // 2, budget - ROOM)))


class Grammars:
    """Compiles constraints for one tokenizer under a model of `vocab_size` ids; one per server.

    `seconds` bound the trial of a request's grammar (twice as many if it has 128 tools), `size` its bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, seconds: float = 5.0, size: int = 1 << 20) -> None:
        """ValueError for a tokenizer without an end token."""
        self._vocabulary, self._size = Vocabulary(tokenizer, vocab_size), size
        self._vetoes = Vetoes(self._vocabulary)
        self._trials = tuple(Trials(self._vocabulary, seconds) for _ in range(WORKERS))
        self._idle: LifoQueue[Trials] = LifoQueue()  # the last in is the first out: the others may never start
        for trials in self._trials:
            self._idle.put(trials)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammar")
        self._known: OrderedDict[str, Blueprint] = OrderedDict()
        self._lock = threading.Lock()

    async def build(self, framing: Framing) -> Blueprint | None:
        """None where there is nothing to enforce. ValueError naming the field for what cannot be honoured."""
        if framing.is_free:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, framing)

    async def build_plain(self, final: Final) -> Blueprint:
        """For text without framing: all of it matches the rule, then an end token comes."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile_plain, final)

    async def warm(self) -> None:
        """Starts a worker now instead of at the first request that needs one."""
        await self.build_plain(Final("choice", ["warm"]))

    async def close(self) -> None:
        """Ends the worker process and refuses everything after."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """`close` without an event loop."""
        for trials in self._trials:
            trials.close()
        self._threads.shutdown(cancel_futures=True)

    def compile(self, framing: Framing) -> Blueprint | None:
        """`build` without an event loop."""
        if framing.is_free:
            return None
        key = self._checked_key(framing)
        return self._remembered(key) or self._keep(key, self._framed(framing))

    def compile_plain(self, final: Final) -> Blueprint:
        """`build_plain` without an event loop."""
        key = self._checked_key(final)
        if known := self._remembered(key):
            return known
        ends = self._vocabulary.bits(self._vocabulary.stops)
        (matcher,) = self._compiled([(FIELDS[final.rule], _grammar(final))])
        body = Body(ends, matcher, guard=final.rule in ("json_schema", "json_object"))
        return self._keep(key, Plan(self._vocabulary, self._vetoes, plain=body))

    def _framed(self, framing: Framing) -> Plan:
        start, message, eom, eot = self._controls()
        bits, final = self._vocabulary.bits, framing.final
        tools = _callable(framing)
        strict = framing.tool_choice != "auto"
        grammars = [(f"{tool.where}.parameters", _call_grammar(tool, strict)) for tool in tools]
        answers = framing.tool_choice in ("auto", "none")
        asked = [(where, grammar.grammar) for where, grammar in grammars]
        if answers and final is not None:
            asked.append((FIELDS[final.rule], _grammar(final)))
        matchers = self._compiled(asked)
        ends = bits((eom, eot) if framing.parallel_tool_calls else (eot,))
        bodies = {b"self": Body(bits((eom,)), is_preamble=True)}
        if final is None and not isinstance(framing.tool_choice, Named):
            bodies[b"commentary"] = Body(bits((eom,)), is_preamble=True)
        before = list(bodies)
        for tool, (_, grammar), matcher in zip(tools, grammars, matchers, strict=False):
            bodies[tool.name.encode()] = Body(ends, matcher, guard=True, texts=grammar.texts, calls=True)
        behind_call = list(bodies)
        if answers:
            is_json = final is not None and final.rule in ("json_schema", "json_object")
            bodies[b"user"] = Body(bits((eot,)), None if final is None else matchers[-1], guard=is_json)
        musts = [name for name in bodies if name not in before]
        calls = [name for name in musts if name in behind_call]
        assert musts, f"{framing.tool_choice=}"
        is_bounded = final is not None or not answers
        return Plan(
            self._vocabulary,
            self._vetoes,
            headers=self._headers(list(bodies), list(bodies), behind_call),
            late_headers=self._headers(musts, musts, calls or musts) if is_bounded else (),
            bodies=bodies,
            message=bits((message,)),
            start=bits((start,)),
            closers=frozenset((eom,)),
            end=bits((eot,)),
        )

    def _headers(self, first: list[bytes], *later: list[bytes]) -> tuple[LLMatcher, ...]:
        """Headers to these recipients at the very start, then others behind `<|start|>`."""

        def header(role: str, names: list[bytes]) -> LLMatcher:
            texts = (literal(f"{role} to={name.decode()}") for name in names)
            return self._vocabulary.matcher(whole(lark_grammar=f"start: HEADER\nHEADER: {' | '.join(texts)}"))

        return header("", first), *(header("assistant", names) for names in later)

    def _controls(self) -> tuple[int, int, int, int]:
        names, vocabulary = (START, MESSAGE, END_OF_MESSAGE, END_OF_TURN), self._vocabulary
        start, message, eom, eot = map(vocabulary.tokenizer.control_id, names)
        if max(start, message, eom, eot) >= vocabulary.size:
            raise ValueError(f"{vocabulary.tokenizer.source}: {', '.join(names)} must have ids below {vocabulary.size}")
        return start, message, eom, eot

    def _compiled(self, asked: list[tuple[str, str]]) -> list[LLMatcher]:
        """Matchers of grammars, each with the field it came from; tried together elsewhere first."""
        if (size := sum(len(grammar.encode()) for _, grammar in asked)) > self._size:
            raise ValueError(f"{asked[-1][0]}: the grammars of the request have {size} bytes, more than {self._size}")
        try:
            self._try(asked)
        except Fault as fault:
            fields = dict.fromkeys(where for where, _ in asked)
            where = " or ".join(list(fields)[:4]) if fault.index is None else asked[fault.index][0]
            raise (TooSlow if isinstance(fault, Slow) else ValueError)(f"{where}: {fault}") from None
        return [self._vocabulary.matcher(grammar) for _, grammar in asked]

    def _try(self, asked: list[tuple[str, str]]) -> None:
        if not asked:
            return
        trials = self._idle.get()
        try:
            trials.run([grammar for _, grammar in asked])
        finally:
            self._idle.put(trials)

    def _checked_key(self, asked: Framing | Final) -> str:
        key = _key(asked)
        if (size := len(key.encode())) > self._size:
            where = FIELDS[asked.rule] if isinstance(asked, Final) else "tools, response_format"
            raise ValueError(f"{where}: {size} bytes of rules are more than the {self._size} that a request may have")
        return key

    def _remembered(self, key: str) -> Blueprint | None:
        with self._lock:
            if known := self._known.get(key):
                self._known.move_to_end(key)
            return known

    def _keep(self, key: str, plan: Plan) -> Blueprint:
        made = Blueprint(plan)
        with self._lock:
            self._known[key] = made
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made


def _key(asked: Framing | Final) -> str:
    final = asked if isinstance(asked, Final) else asked.final
    rule: Json = None if final is None else [final.rule, final.value]
    if isinstance(asked, Final):
        return dumped(rule, FIELDS[asked.rule])
    choice: Json = list(asked.tool_choice) if isinstance(asked.tool_choice, Named) else asked.tool_choice
    tools = dumped(asked.tools, "tools")
    return json.dumps(
        [tools, dumped(choice, "tool_choice"), asked.parallel_tool_calls, dumped(rule, "response_format")]
    )


def _callable(framing: Framing) -> tuple[Tool, ...]:
    """The tools that may be called. ValueError if a call is asked for and there is nothing to be called."""
    choice = framing.tool_choice
    if choice == "none":
        return ()
    tools = declared(framing.tools)
    if isinstance(choice, Named):
        named = tuple(tool for tool in tools if tool.name == choice.name)
        if not named:
            names: Iterable[str] = sorted(tool.name for tool in tools)
            raise ValueError(f"tool_choice: no tool is named {choice.name!r}; declared: {', '.join(names) or 'none'}")
        return named
    if choice == "required" and not tools:
        raise ValueError("tool_choice: 'required' needs tools, and none are declared")
    return tools


def _call_grammar(tool: Tool, strict: bool) -> CallGrammar:
    """Where the model may call as it likes, a schema that cannot be enforced is no reason to refuse the request."""
    try:
        return call_grammar(tool)
    except RecursionError:
        raise ValueError(f"{tool.where}.parameters: is nested too deeply") from None
    except ValueError:
        if strict:
            raise
    return call_grammar(loosened(tool))


def _grammar(final: Final) -> str:
    try:
        return grammar_of(final)
    except RecursionError:
        raise ValueError(f"{FIELDS[final.rule]}: is nested too deeply") from None
