"""The events of one job on their way from the engine to who asked for it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from muse_fn.serve.jobs import Done, Finish, JobEvent, Reading


class JobStream:
    """See jobs.Stream. Progress of reading is kept in its newest form only, so what is unread is bounded by the job's
    tokens, a few numbers each."""

    def __init__(self, cancel: Callable[[Finish], None]) -> None:
        self._cancel, self._events, self._more = cancel, deque[JobEvent](), asyncio.Event()

    def push(self, event: JobEvent) -> None:
        """One more event."""
        if isinstance(event, Reading) and self._events and isinstance(self._events[-1], Reading):
            self._events.pop()
        self._events.append(event)
        self._more.set()

    def cancel(self, finish: Finish = "abort") -> None:
        """See jobs.Stream."""
        self._cancel(finish)

    async def __aiter__(self) -> AsyncIterator[JobEvent]:
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, Done):
                    return
            self._more.clear()
            await self._more.wait()
