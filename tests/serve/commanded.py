"""`muse-fn serve` as a process of its own on a free port of the loopback interface, with every wait bounded."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.processes import children

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 240.0  # seconds: a guard against hanging
ADDRESS = re.compile(r" on (https?://\S+) ")
HELLO = [{"role": "user", "content": "What is 3 + 4?"}]


@dataclass
class Command:
    """The process, and what it has said on standard error."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list[str])
    lines: "queue.Queue[str | None]" = field(default_factory=queue.Queue)

    def listen(self) -> None:
        """In a thread: takes what is said, so that the process never waits for its reader."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.said.append(line)
            self.lines.put(line)
        self.lines.put(None)

    def address(self) -> str:
        """Where it listens, as soon as it does."""
        until = time.monotonic() + PATIENCE
        while (line := self.lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
            if found := ADDRESS.search(line):
                return found.group(1)
        raise AssertionError(f"it has ended: {self.text}")

    def ends(self) -> int:
        """Its exit code, as soon as it has ended and all that it said is there."""
        code = self.process.wait(PATIENCE)
        while self.lines.get(timeout=PATIENCE) is not None:
            pass
        return code

    @property
    def text(self) -> str:
        return "".join(self.said)


@contextmanager
def commanded(
    *words: str, environment: dict[str, str] | None = None, program: tuple[str, ...] = ("-m", "muse_fn.serve")
) -> Generator[Command]:
    """`muse-fn serve` with these words; killed at the latest here, with all that it started."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    command = Command(process)
    listener = threading.Thread(target=command.listen, daemon=True)
    listener.start()
    try:
        yield command
    finally:
        below = children(process.pid) if process.poll() is None else []
        for pid in (process.pid, *below) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE)
        listener.join(PATIENCE)
        assert process.stderr
        process.stderr.close()


def chat(url: str, **body: Any) -> dict[str, Any]:
    """A whole answer, the likeliest unless the body says otherwise: servers draw seeds of their own."""
    response = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": HELLO, "temperature": 0, **body}, timeout=PATIENCE
    )
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: dict[str, Any]) -> str:
    """What an answer says."""
    return str(answer["choices"][0]["message"]["content"])


def status_of(url: str) -> int:
    """Of a GET."""
    return httpx.get(url, timeout=PATIENCE).status_code
