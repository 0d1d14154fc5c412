"""Functions that count as one operation, although their form on this device is many: who watches sees only the whole.

A device does some of them in one launch where their CPU form sorts, counts and looks at values on the host. Only
functions whose device form is planned or there may be marked so.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Watcher(Protocol):
    """Who wants to know which operations run."""

    def enter(self, name: str, args: tuple[Any, ...]) -> None:
        """One operation begins; what it does inside is nobody's business."""
        ...

    def leave(self, result: Any) -> None:
        """It has ended with this result."""
        ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)  # of this thread; none inside an operation


def watcher() -> Watcher | None:
    """Who watches the operations of this thread; None inside of one that counts as one."""
    return _watcher.get()


@contextmanager
def watching(who: Watcher | None) -> Generator[None]:
    """Lets `who` watch this thread's operations."""
    token = _watcher.set(who)
    try:
        yield
    finally:
        _watcher.reset(token)


def one_op(fn: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function, one operation to whoever watches. It must write to none of its arguments."""
    name = getattr(fn, "__qualname__", type(fn).__name__)

    @wraps(fn)
    def whole(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        who = watcher()
        if who is None:
            return fn(*args, **kwargs)
        who.enter(name, (*args, *kwargs.values()))
        with watching(None):
            result = fn(*args, **kwargs)
        who.leave(result)
        return result

    return whole
