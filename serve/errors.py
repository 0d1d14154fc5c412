"""What went wrong with a request, as a value, and its two wire formats: OpenAI's and Anthropic's."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.responses import JSONResponse

from muse_fn.serve.jobs import NO_TOKEN, Refused
from muse_fn.tokenizer import Json

_FIELD = re.compile(r"([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)(?::| is | has | must )")
_OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Problem(NamedTuple):
    """An answer that is an error. `param` is the path of the first field that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds


class BadRequest(ValueError):
    """The client's mistake: a sentence, the path of the first wrong field, and a status from 400 to 499."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Failed(Exception):
    """The server's failure after a request was accepted: the engine says why."""


class Gone(Exception):
    """The client has closed the connection: there is nobody to answer."""


def problem_of(error: BaseException) -> Problem:
    """What is told to the client. Of errors that nobody foresaw only that there was one."""
    if isinstance(error, BadRequest):
        return Problem(error.status, str(error), error.param, error.code)
    if isinstance(error, Refused):
        code = "queue_full" if error.status == 429 else "unavailable"
        return Problem(error.status, str(error), code=code, retry_after=error.retry_after)
    if isinstance(error, Failed) and str(error) == NO_TOKEN:
        return Problem(400, NO_TOKEN)
    if isinstance(error, Failed):
        return Problem(500, str(error) or "the engine failed", code="engine_error")
    if isinstance(error, ValueError):
        found = _FIELD.match(str(error))
        return Problem(400, str(error), found.group(1) if found else None)
    return Problem(500, "the server failed; its log says more", code="internal_error")


def openai_shape(problem: Problem) -> dict[str, Json]:
    """`{"error": {...}}` as the OpenAI API has it."""
    kind = _OPENAI.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    body: Json = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
    return {"error": body}


def anthropic_shape(problem: Problem) -> dict[str, Json]:
    """`{"type": "error", "error": {...}}` as the Anthropic API has it."""
    kind = _ANTHROPIC.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def shape(path: str, problem: Problem) -> dict[str, Json]:
    """The error in the format of the API that this path belongs to."""
    return (anthropic_shape if path.startswith("/v1/messages") else openai_shape)(problem)


def answer(path: str, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The whole response, with Retry-After where the client may try again."""
    told = dict(headers or {})
    if problem.retry_after is not None:
        told["retry-after"] = str(problem.retry_after)
    if problem.status == 401:
        told["www-authenticate"] = "Bearer"
    return JSONResponse(shape(path, problem), problem.status, told)


def quoted(value: object, limit: int = 60) -> str:
    """A value as an error shows it: short, in ASCII, containers by their type only."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return ascii(value if len(value) <= limit else f"{value[:limit]}...")
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**limit):
        return repr(value)
    names = {"int": "a huge number", "dict": "an object", "list": "a list"}
    return names.get(type(value).__name__, type(value).__name__)
