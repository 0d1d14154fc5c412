"""Grammars are tried in a process of their own before they are compiled here, so that one that explodes is stopped.

A thread that runs too long cannot be ended, a process can.
"""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

from muse_fn.serve.grammar_vocabulary import Vocabulary

WORKER = Path(__file__).with_name("grammar_worker.py")
START_SECONDS = 60.0
MANY = 128  # so many grammars in one request have twice the time of one
MEMORY = 2 << 30  # bytes of address space of one worker


class Fault(ValueError):
    """Why a grammar cannot be used, and which of those tried it is, if that is known."""

    def __init__(self, why: str, index: int | None = None) -> None:
        super().__init__(why)
        self.index = index


class Slow(Fault):
    """It does not compile within the limits of time and memory."""


class TooSlow(ValueError):
    """`Slow` with the name of the field at fault, as the client is told."""


class Trials:
    """One worker process, started at the first trial and again after it had to be killed. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def run(self, grammars: list[str]) -> None:
        """Fault if one of them does not compile, or not within the limits."""
        with self._lock:
            if self._closed:
                raise Fault("the server is shutting down")
            if self._process is None or self._process.poll() is not None:
                self._start()
            seconds = self._seconds * (1 + len(grammars) / MANY)
            answer = self._ask(grammars, seconds)
        if answer is None:
            raise Slow(f"does not compile within {seconds:.3g} s and {MEMORY >> 20} MiB")
        if answer[1]:
            raise Fault(" ".join(answer[1].replace("<non-verbose/>", "").split())[:300], answer[0])

    @property
    def process_id(self) -> int | None:
        """Of the worker, if there is one."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_busy(self) -> bool:
        """Whether something is being tried."""
        return self._lock.locked()

    def close(self) -> None:
        """Ends the worker. What is being tried fails; so does everything after."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        # -P: the folder of the program is this room, and its files must not shadow the library's.
        command = [sys.executable, "-P", str(WORKER)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # an interrupt from the keyboard is the server's to handle
        )
        about = {**self._vocabulary.described(), "seconds": self._seconds, "memory": MEMORY, "many": MANY}
        if self._ask(about, START_SECONDS) is None:
            raise RuntimeError("the worker that tries grammars did not start")

    def _ask(self, value: object, seconds: float) -> tuple[int, str] | None:
        """The worker's answer; None if it died or was killed for taking too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            self._end()
            return None
        place, fault = json.loads(answer)
        return int(place), str(fault)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
