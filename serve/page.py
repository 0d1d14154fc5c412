"""The page at `/`: a chat in one file, which asks this server's own API and loads nothing from anywhere."""

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from muse_fn.serve.routes import Route
from muse_fn.serve.service import Service

RULES = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # no text becomes markup, whatever the script does
    "trusted-types 'none'",
)


async def show_page(service: Service, request: Request) -> Response:
    """The page. It holds no secret: the key is the user's to give."""
    text, policy = page()
    return Response(text, headers={"content-security-policy": policy}, media_type="text/html")


@cache
def page() -> tuple[str, str]:
    """The page's text, and the policy that allows its own script and style by their hashes and nothing else."""
    text = (files("muse_fn.serve") / "page.html").read_text(encoding="utf-8")
    allowed = [f"{kind}-src {_hashes(text, kind)}" for kind in ("script", "style")]
    return text, "; ".join((*RULES, *allowed))


def _hashes(text: str, kind: str) -> str:
    """Source: Content Security Policy Level 3, hash sources: of the element's text as it stands."""
    found = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    digests = [base64.b64encode(sha256(inner.encode()).digest()).decode() for inner in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


ROUTES = (Route("/", "GET", show_page, None, "A page to chat with the model.", is_open=True),)
