"""The page: what it is as a file, and what it does in a headless Chromium against a real server."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from muse_fn.serve import chat_api, state_api
from muse_fn.serve.app import make_app
from muse_fn.serve.jobs import Done, Job
from muse_fn.serve.page import ROUTES, page
from tests.serve import browser
from tests.serve.browser import Browser, browsing
from tests.serve.loopback import PATIENCE, answers, calls, comments, serving, thinks
from tests.serve.script import ScriptedEngine, make_service, nano

NASTY = "<script>document.title='cracked'</script><img src=x onerror=\"document.title='cracked'\">&lt;b&gt;"
SIZES = {"light": (1280, 800, False), "dark": (1280, 800, True), "phone": (360, 740, False)}
DONE = "document.querySelector('.turn:last-child .retry')"
KEY = "secret"

CHROMIUM = browser.found()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no Chromium here; looked for {', '.join(browser.NAMES)} on PATH"
)


def test_the_page_is_open_and_its_policy_strict() -> None:
    app = make_app(make_service(ScriptedEngine(), keys=(KEY,)), routes=ROUTES)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            async with asyncio.timeout(PATIENCE):
                return await client.get("/")

    response = asyncio.run(run())
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[kind])
    assert response.headers["x-content-type-options"] == "nosniff"
    assert KEY not in response.text


def test_the_page_needs_nothing_else() -> None:
    text, _ = page()
    assert "Built with Muse Spark Open" in text
    addresses = [one for one in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if one != "http://www.w3.org"]
    assert addresses == []
    assert re.findall(r"<(?:link|script|img|iframe)\b[^>]*\b(?:src|href)=\"(?!data:)", text) == []
    assert re.findall(r"\son\w+=\"", text) == []
    assert "style=" not in text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "cookie"):
        assert sink not in text, sink


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def address(engine: ScriptedEngine) -> Iterator[str]:
    routes = (*ROUTES, *chat_api.ROUTES, *state_api.ROUTES)
    with serving(make_app(make_service(engine), routes=routes)) as url:
        yield url


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browsing(CHROMIUM, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def tab(chromium: Browser, engine: ScriptedEngine, address: str) -> Iterator[Browser]:
    """The page, freshly loaded; at the end nothing may have gone wrong in it."""
    engine.script, engine.cached = answers("Hello"), 0
    engine.jobs.clear()
    chromium.size(*SIZES["light"][:2])
    chromium.open(f"{address}/")
    chromium.wait("document.getElementById('load').textContent")
    yield chromium
    assert chromium.complaints() == []
    assert "cracked" not in chromium.run("document.title")


def send(tab: Browser, text: str) -> None:
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text, "Enter")


def prompt_of(job: Job) -> str:
    return nano()[1].decode(job.ids)


@needs_chromium
def test_a_message_is_sent_and_answered_with_folded_reasoning(tab: Browser, engine: ScriptedEngine) -> None:
    engine.script, engine.cached = [*thinks("Let me see."), *answers("Hello é — you")], 24
    send(tab, "Hi there")
    tab.wait(DONE)
    assert tab.run("document.querySelector('.user').textContent") == "Hi there"
    assert tab.run("document.querySelector('.turn:last-child > div > .text').textContent") == "Hello é — you"
    assert tab.run("document.querySelector('details').open") is False
    assert tab.run("document.querySelector('details > .text').checkVisibility()") is False
    assert tab.run("document.querySelector('details > .text').textContent") == "Let me see."
    assert "Hi there" in prompt_of(engine.jobs[-1])
    numbers = tab.run("document.querySelector('.numbers').textContent")
    assert f"{len(engine.script)} tokens" in numbers
    assert f"{round(2400 / len(engine.jobs[-1].ids))} % cached" in numbers
    tab.run("document.querySelector('summary').click()")
    assert tab.run("document.querySelector('details > .text').checkVisibility()") is True


@needs_chromium
def test_the_conversation_goes_on_and_begins_anew(tab: Browser, engine: ScriptedEngine) -> None:
    send(tab, "First")
    tab.wait(DONE)
    send(tab, "Second")
    tab.wait(f"document.querySelectorAll('.turn').length == 4 && {DONE}")
    prompt = prompt_of(engine.jobs[-1])
    assert [word in prompt for word in ("First", "Hello", "Second")] == [True] * 3
    tab.run("document.querySelector('.turn:last-child .retry').click()")
    tab.wait(f"document.querySelectorAll('.turn').length == 4 && {DONE}")
    assert engine.jobs[-1].ids == engine.jobs[-2].ids
    tab.run("document.getElementById('new').click()")
    assert tab.run("document.querySelectorAll('.turn').length") == 0
    send(tab, "Third")
    tab.wait(DONE)
    assert "First" not in prompt_of(engine.jobs[-1])


@needs_chromium
def test_markup_stays_text_wherever_it_comes_from(tab: Browser, engine: ScriptedEngine) -> None:
    name = "get_weather"
    engine.script = [*thinks(NASTY), *comments(NASTY), *calls(name, place=NASTY)]
    tab.run("document.getElementById('example').click()")
    send(tab, NASTY)
    tab.wait(DONE)
    places = (".user .text", "details > .text", ".turn:last-child > div > .text")
    assert [tab.run(f"document.querySelector({json.dumps(place)}).textContent") for place in places] == [NASTY] * 3
    assert json.loads(tab.run("document.querySelector('.call pre').textContent")) == {"place": NASTY}
    assert tab.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0


@needs_chromium
def test_a_tool_call_is_shown_and_its_result_goes_back(tab: Browser, engine: ScriptedEngine) -> None:
    engine.script = [*thinks("Hm"), *calls("get_weather", place="Oslo")]
    tab.run("document.getElementById('example').click()")
    send(tab, "Weather?")
    tab.wait(DONE)
    assert "get_weather" in prompt_of(engine.jobs[-1])
    assert tab.run("document.querySelector('.call h3').textContent") == "Tool call get_weather"
    assert json.loads(tab.run("document.querySelector('.call pre').textContent")) == {"place": "Oslo"}
    assert tab.run("document.activeElement === document.querySelector('.call textarea')") is True
    engine.script = answers("Four degrees.")
    tab.type("4 °C & <i>")
    tab.run("document.querySelector('#log .main').click()")
    tab.wait(f"document.querySelectorAll('.turn').length == 3 && {DONE}")
    assert '<tool_output name="get_weather">\n4 °C & <i>\n</tool_output>' in prompt_of(engine.jobs[-1])
    assert tab.run("document.querySelector('.turn:last-child > div > .text').textContent") == "Four degrees."


@needs_chromium
@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_keeps_what_was_said_and_ends_the_work(tab: Browser, engine: ScriptedEngine, how: str) -> None:
    before, never = engine.cancels, asyncio.Event()
    engine.script = [*answers("Hello, I go on")[:-1], never]
    send(tab, "Hi")
    tab.wait(
        "document.querySelector('.turn:last-child .text')?.textContent && document.body.innerText.includes('go o')"
    )
    if how == "button":
        tab.run("document.getElementById('stop').click()")
    else:
        tab.type("", "Escape")
    tab.wait(DONE)
    assert tab.run("document.querySelector('.turn:last-child').textContent").count("Stopped.") == 1
    assert tab.run("document.getElementById('stop').hidden") is True
    engine.script = answers("Again")
    send(tab, "And now?")
    tab.wait(f"document.querySelectorAll('.turn').length == 4 && {DONE}")
    assert "Hello, I go o" in prompt_of(engine.jobs[-1])
    assert engine.cancels == before + 1


@needs_chromium
def test_failures_are_told_as_text(tab: Browser, engine: ScriptedEngine) -> None:
    engine.script = [*answers("Hello")[:-1], Done("error", "broken <b>badly</b>")]
    send(tab, "Hi")
    tab.wait(DONE)
    assert "broken <b>badly</b>" in tab.run("document.querySelector('.alert').textContent")
    tab.run("document.getElementById('temperature').value = '3'")
    send(tab, "Hi")
    tab.wait("document.querySelectorAll('.alert').length == 2")
    assert "Temperature" in tab.run("document.querySelectorAll('.alert')[1].textContent")
    tab.run("document.getElementById('temperature').value = '1'; document.getElementById('tools').value = '{'")
    send(tab, "Hi")
    tab.wait("document.querySelectorAll('.alert').length == 3")
    assert "tools" in tab.run("document.querySelectorAll('.alert')[2].textContent")
    assert tab.run("document.getElementById('tools').getAttribute('aria-invalid')") == "true"


@needs_chromium
def test_a_key_is_asked_for_and_used(chromium: Browser, engine: ScriptedEngine) -> None:
    engine.script = answers("Hello")
    routes = (*ROUTES, *chat_api.ROUTES, *state_api.ROUTES)
    with serving(make_app(make_service(engine, keys=(KEY,)), routes=routes)) as url:
        chromium.open(f"{url}/")
        chromium.wait("document.getElementById('model').textContent == 'needs an API key'")
        send(chromium, "Hi")
        chromium.wait("document.querySelector('.alert')?.textContent.startsWith('401')")
        assert chromium.run("document.activeElement.id") == "key"
        chromium.type(KEY, "Tab")
        chromium.wait("document.getElementById('model').textContent == 'nano'")
        chromium.run("document.querySelector('.retry').click()")
        chromium.wait("document.body.innerText.includes('Hello')")
        assert KEY not in chromium.run("document.documentElement.outerHTML + JSON.stringify([{...localStorage}])")
        chromium.open("about:blank")


LUMINANCE = """(() => {
  const channel = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgb = (c) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data; };
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const c = getComputedStyle(node).backgroundColor; if (rgb(c)[3] == 255) return c; } return 'white'; };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((n) => n.nodeType == 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.closest('script, style, .skip')) continue;
    const [a, b] = [getComputedStyle(node).color, behind(node)].map((c) => light(rgb(c))).sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.push([node.textContent.slice(0, 40), (a + .05) / (b + .05)]);
  }
  return found;
})()"""


@needs_chromium
@pytest.mark.parametrize("look", SIZES)
def test_it_can_be_read_and_used_at_any_size(tab: Browser, engine: ScriptedEngine, look: str, tmp_path: Path) -> None:
    """Nothing is cut off sideways, the licence's words are in sight, text has contrast, every control has a name."""
    width, height, dark = SIZES[look]
    tab.size(width, height, dark=dark)
    engine.script = [*thinks("word " * 20), *comments("word" * 30), *calls("get_weather", place="x" * 120)]
    tab.run("document.getElementById('example').click()")
    send(tab, "long" * 40)
    tab.wait(DONE)
    for opened in (False, True):
        tab.run(f"openSettings({json.dumps(opened)})")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth") is True
        assert tab.run("[...document.querySelectorAll('#log, main, aside')].every(n => n.scrollWidth <= n.clientWidth)")
        assert tab.run(LUMINANCE) == []
        if not (opened and look == "phone"):
            assert tab.run(IN_SIGHT) == "Built with Muse Spark Open"
        nodes: list[Any] = tab.call("Accessibility.getFullAXTree")["nodes"]
        controls = [node for node in nodes if node.get("role", {}).get("value") in ("button", "textbox", "combobox",
                                                                                "spinbutton", "checkbox")]  # fmt: skip
        assert len(controls) >= (18 if opened else 6)
        assert [node for node in controls if not node.get("name", {}).get("value")] == []
    tab.shoot(tmp_path / f"{look}.png")
    assert (tmp_path / f"{look}.png").stat().st_size > 10_000


IN_SIGHT = """(() => {
  const { left, top, right, bottom } = document.getElementById('banner').getBoundingClientRect();
  const inside = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
  return inside && document.elementFromPoint((left + right) / 2, (top + bottom) / 2).textContent;
})()"""
