"""The framing of a turn as a state machine over control tokens; between two of them a body has a grammar of its own.

Control tokens and text never meet in one grammar: what may be written between `<|message|>` and the end of a message is
a mask over ordinary tokens, and the control tokens beside it are added here. Source: the published chat format.

    header --<|message|>--> body --<|eom|>--> <|start|> --> header;  body --<|eot|>--> done

What comes before the part that must come (reasoning, commentary) has a bound in tokens: a model that does not end it by
itself would leave no room for that part. Beyond the bound such a body ends and no other begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from muse_fn.serve.grammar_guard import Guard, Vetoes
from muse_fn.serve.grammar_vocabulary import Vocabulary, allows, reason


class Body(NamedTuple):
    """What one message may say. `matcher` None: any ordinary text. `guard`: whether it is JSON, or has JSON in it."""

    ends: NDArray[np.int32]  # control tokens that may end it
    matcher: LLMatcher | None = None
    guard: bool = False
    texts: frozenset[bytes] | None = None  # see Guard
    calls: bool = False
    is_preamble: bool = False  # comes before the part that must come


@dataclass(frozen=True)
class Plan:
    """A compiled framing; matchers in it are never moved, only copied.

    `headers`: at the very start, behind `<|start|>`, and behind `<|start|>` once there was a call; `late_headers` are
    the same beyond the bound of preambles. `bodies` by recipient. `plain`: there is no framing, all is this body.
    """

    vocabulary: Vocabulary
    vetoes: Vetoes
    headers: tuple[LLMatcher, ...] = ()
    late_headers: tuple[LLMatcher, ...] = ()
    bodies: Mapping[bytes, Body] | None = None
    plain: Body | None = None
    message: NDArray[np.int32] | None = None
    start: NDArray[np.int32] | None = None
    closers: frozenset[int] = frozenset()  # control tokens after which another message begins
    end: NDArray[np.int32] | None = None  # the control token after which none does


class Cursor:
    """Where one sequence stands. See `muse_fn.serve.jobs.Constraint`."""

    def __init__(self, plan: Plan, preamble: int | None = None) -> None:
        """`preamble` tokens at most come before the part that must come; None: any number."""
        self._plan, self._preamble = plan, preamble
        self._place: Literal["header", "body", "between", "done"] = "header"
        self._called = False
        self._text = bytearray()  # of the header
        self._mask: NDArray[np.int32] | None = None
        self._matcher: LLMatcher | None = None
        self._body: Body | None = None
        self._guard: Guard | None = None
        if plan.plain is not None:
            self._enter(plan.plain)
        else:
            self._matcher = (plan.late_headers if self._is_late else plan.headers)[0].deep_copy()

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""
        return self._place == "done"

    def mask(self) -> NDArray[np.int32] | None:
        """The ids that may come next, read-only. ValueError if the grammar is stuck or too much work for one step."""
        if self._mask is None:
            self._mask = self._compute()
            self._mask.setflags(write=False)
        return self._mask

    def push(self, token: int) -> None:
        """The next token. ValueError for one that the mask does not allow."""
        mask = self.mask()
        if mask is None or not allows(mask, token):
            raise ValueError(f"token {token} is not allowed here by the constraint")
        self._mask = None
        if self._preamble is not None:
            self._preamble -= 1
        text = self._plan.vocabulary.texts[token]
        if not text:
            self._control(token)
            return
        if self._matcher is not None and not self._matcher.consume_token(token):
            raise ValueError(f"the grammar engine gave up: {reason(self._matcher)}")
        if self._place == "header":
            self._text += text
        if self._guard is not None:
            self._guard.push(text)

    @property
    def _is_late(self) -> bool:
        return self._preamble is not None and self._preamble <= 0

    def _ends(self) -> NDArray[np.int32]:
        """The control tokens that may end what is being written. When it is late, no more messages follow a call."""
        ends = self._body.ends if self._body is not None else self._plan.message
        assert ends is not None
        if self._is_late and self._body is not None and self._body.calls and self._plan.end is not None:
            return ends & self._plan.end
        return ends

    def _compute(self) -> NDArray[np.int32]:
        plan, none = self._plan, self._plan.vocabulary.bits(())
        if self._place == "done":
            return none
        if self._place == "between":
            return none if plan.start is None else plan.start
        ends = self._ends()
        if self._matcher is None:
            is_over = self._is_late and self._body is not None and self._body.is_preamble
            return ends.copy() if is_over else plan.vocabulary.ordinary | ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: plan.vocabulary.width]
        if self._matcher.is_error():
            raise ValueError(f"the grammar engine gave up: {reason(self._matcher)}")
        may_end = allows(mask, plan.vocabulary.end)
        mask = mask & plan.vocabulary.ordinary
        if may_end and not mask.any():  # the library also says so where nothing at all can follow
            may_end = self._matcher.is_accepting()
        if may_end:
            mask = mask | ends
        if self._guard is not None:
            mask = self._guard.cut(mask)
        if not mask.any():
            raise ValueError("the constraint leaves no token to go on with")
        return mask

    def _control(self, token: int) -> None:
        plan = self._plan
        if self._place == "between":
            self._place, self._text = "header", bytearray()
            headers = plan.late_headers if self._is_late else plan.headers
            self._matcher = headers[2 if self._called else 1].deep_copy()
        elif self._place == "header":
            assert plan.bodies is not None
            self._enter(plan.bodies[bytes(self._text).rpartition(b"to=")[2]])
        elif token in plan.closers:
            self._called = self._called or (self._body is not None and self._body.calls)
            self._place, self._matcher, self._body, self._guard = "between", None, None, None
        else:
            self._place, self._matcher, self._body, self._guard = "done", None, None, None

    def _enter(self, body: Body) -> None:
        self._place, self._body = "body", body
        self._matcher = None if body.matcher is None else body.matcher.deep_copy()
        self._guard = Guard(self._plan.vetoes, body.texts) if body.guard else None
