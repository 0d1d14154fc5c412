"""A real server on a port of this machine, in a thread of its own, around a scripted engine."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tests.serve.script import tokens_of

PATIENCE = 60  # seconds until a test that hangs fails


@contextmanager
def serving(app: ASGIApp) -> Generator[str]:
    """The server's address while it runs."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # whoever comes before the server has started waits for it
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    options: dict[str, Any] = {"sockets": [listener]}
    thread = threading.Thread(target=server.run, kwargs=options, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def thinks(text: str) -> list[int]:
    """Tokens of reasoning."""
    return tokens_of(" to=self", "<|message|>", *text, "<|eom|>", "<|start|>", "assistant")


def answers(text: str) -> list[int]:
    """Tokens of an answer, which ends the turn."""
    return tokens_of(" to=user", "<|message|>", *text, "<|eot|>")


def calls(name: str, **values: str) -> list[int]:
    """Tokens of one call, which ends the turn."""
    given = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())
    body = f'<atem:function_calls>\n<atem:invoke name="{name}">\n{given}</atem:invoke>\n</atem:function_calls>'
    return tokens_of(f" to={name}", "<|message|>", *body, "<|eot|>")


def comments(text: str) -> list[int]:
    """Tokens of a commentary."""
    return tokens_of(" to=commentary", "<|message|>", *text, "<|eom|>", "<|start|>", "assistant")
