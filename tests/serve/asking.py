"""Asks the chat completions route, whole and streamed, and folds a stream into what the whole should be."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, NamedTuple, TypeVar

import httpx

from muse_fn.serve import chat_api
from muse_fn.serve.app import make_app
from muse_fn.serve.service import Service
from tests.serve.script import ScriptedEngine, make_service
from tests.turns import TOOLS

T = TypeVar("T")
Object = dict[str, Any]
PATH = "/v1/chat/completions"
HELLO: list[Object] = [{"role": "user", "content": "Hello"}]
SECONDS = 60.0  # that a test waits at most


class Streamed(NamedTuple):
    """The answer to a request with stream true."""

    status: int
    events: list[Object]  # all but [DONE]
    done: bool  # whether [DONE] came, last
    comments: int


def limited(work: Awaitable[T]) -> T:
    """The result of what must end soon."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, SECONDS)

    return asyncio.run(bounded())


async def send(service: Service, body: Object | bytes, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    kinds = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    transport = httpx.ASGITransport(make_app(service, routes=chat_api.ROUTES))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, content=raw, headers=kinds)


def post(engine: ScriptedEngine | Service, body: Object | bytes, **headers: str) -> httpx.Response:
    """The response as it is."""
    service = make_service(engine) if isinstance(engine, ScriptedEngine) else engine
    return limited(send(service, body, **headers))


def ask(engine: ScriptedEngine | Service, **fields: Any) -> Object:
    """A whole completion, which must succeed."""
    response = post(engine, {"messages": HELLO, **fields}, x_request_id="same")
    assert response.status_code == 200, response.text
    return response.json()


def stream(engine: ScriptedEngine | Service, **fields: Any) -> Streamed:
    """A streamed completion."""
    response = post(engine, {"messages": HELLO, "stream": True, **fields}, x_request_id="same")
    if response.status_code != 200:
        return Streamed(response.status_code, [response.json()], False, 0)
    blocks = [block for block in response.text.split("\n\n") if block]
    told = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    done = bool(told) and told[-1] == "[DONE]"
    events = [json.loads(text) for text in (told[:-1] if done else told)]
    return Streamed(200, events, done, sum(block.startswith(":") for block in blocks))


def refused(engine: ScriptedEngine | Service, **fields: Any) -> Object:
    """The error of a request that must be refused, the same for a stream."""
    response = post(engine, {"messages": HELLO, **fields})
    again = post(engine, {"messages": HELLO, **fields, "stream": True})
    assert 400 <= response.status_code < 500, response.text
    assert (response.status_code, response.json()) == (again.status_code, again.json())
    return {"status": response.status_code, **response.json()["error"]}


def folded(streamed: Streamed) -> list[Object]:
    """The choices that a finished stream amounts to, as the whole has them."""
    assert streamed.done, streamed
    found: dict[int, Object] = {}
    for chunk in streamed.events:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            _fold(found, choice)
    return [_shown(found[index]) for index in sorted(found)]


def _fold(found: dict[int, Object], choice: Object) -> None:
    delta = choice["delta"]
    if choice["index"] not in found:
        assert delta == {"role": "assistant", "content": ""}
        found[choice["index"]] = {"index": choice["index"], "content": "", "reasoning": "", "tool_calls": []}
    into = found[choice["index"]]
    assert "finish_reason" not in into, "a chunk after the end of its choice"
    assert delta.get("reasoning") == delta.get("reasoning_content")
    into["content"] += delta.get("content", "")
    into["reasoning"] += delta.get("reasoning", "")
    for call in delta.get("tool_calls", ()):
        assert call["index"] == len(into["tool_calls"])
        into["tool_calls"].append({name: value for name, value in call.items() if name != "index"})
    if choice["logprobs"] is not None:
        into.setdefault("logprobs", []).extend(choice["logprobs"]["content"])
    into.setdefault("token_ids", []).extend(choice.get("token_ids", ()))
    if choice["finish_reason"] is not None:
        into |= {name: choice.get(name) for name in ("finish_reason", "stop_reason", "damaged_tool_calls")}


def _shown(choice: Object) -> Object:
    calls = choice["tool_calls"]
    message = {"role": "assistant", "content": choice["content"] or (None if calls else ""), "refusal": None}
    message |= dict.fromkeys(("reasoning", "reasoning_content"), choice["reasoning"] or None)
    return _choice(choice, message | ({"tool_calls": calls} if calls else {}), choice.get("logprobs"))


def _choice(choice: Object, message: Object, logprobs: Any) -> Object:
    kept = {name: choice.get(name) for name in ("index", "finish_reason", "stop_reason", "damaged_tool_calls")}
    return {**kept, "token_ids": choice.get("token_ids") or [], "message": message, "logprobs": logprobs or None}


def choices(whole: Object) -> list[Object]:
    """The choices of a whole in the same form as `folded`."""
    return [_choice(c, c["message"], (c["logprobs"] or {}).get("content")) for c in whole["choices"]]


def both(engine: ScriptedEngine | Service, **fields: Any) -> Object:
    """Asks twice, whole and streamed, which must tell the same; returns the whole."""
    whole = ask(engine, **fields)
    streamed = stream(engine, stream_options={"include_usage": True}, **fields)
    assert folded(streamed) == choices(whole)
    assert streamed.events[-1]["usage"] == whole["usage"]
    assert streamed.events[-1]["choices"] == []
    return whole


def answer(ids: list[int], **fields: Any) -> Object:
    """The only choice of a turn with the usual tools, whole and streamed alike."""
    (choice,) = both(ScriptedEngine(ids), tools=TOOLS, **fields)["choices"]
    return choice
