"""Log records as lines, for people or as JSON. What clients wrote and what the model answered never gets there."""

import json
import logging
import traceback
from types import TracebackType
from typing import Any, TextIO

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TELLING = (OSError, RuntimeError, ImportError, MemoryError, TimeoutError)  # whose messages come from the machine


class Lines(logging.Formatter):
    """`2026-01-02T03:04:05 INFO answered route=/v1/models status=200`, or the same as an object of JSON.

    Of exceptions it shows the type and where it was, and the message only of kinds that do not quote a request.
    """

    def __init__(self, as_json: bool = False) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on further lines, or as a field."""
        more = {name: value for name, value in vars(record).items() if name not in _OWN}
        told: dict[str, Any] = {"time": self.formatTime(record, self.datefmt), "level": record.levelname}
        told |= {"message": record.getMessage(), **more}
        error = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None
        if self.as_json:
            return json.dumps(told | ({"error": error} if error else {}), default=repr)
        fields = "".join(f" {name}={_shown(value)}" for name, value in more.items())
        line = f"{told['time']} {record.levelname} {told['message']}{fields}"
        return f"{line}\n{error}" if error else line

    def formatException(
        self,
        ei: "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]",
    ) -> str:
        """Places and types of an exception and what it came from."""
        parts: list[str] = []
        error = ei[1]
        while error is not None and len(parts) < 8:
            said = f": {error}" if isinstance(error, _TELLING) else ""
            places = "".join(traceback.format_tb(error.__traceback__))
            parts.append(f"{places}{type(error).__name__}{said}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\nfrom\n".join(parts)


def configure(level: int = logging.INFO, as_json: bool = False, to: TextIO | None = None) -> None:
    """Sends the records of the server to `to`, the standard error by default. Replaces what was configured before."""
    handler = logging.StreamHandler(to)
    handler.setFormatter(Lines(as_json))
    logger = logging.getLogger("muse_fn.serve")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
