"""A headless Chromium driven through a pipe by the DevTools protocol: no port, no driver, no package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
)
# Chromium reads commands from descriptor 3 and writes answers to 4, whatever else is open here.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 60.0  # seconds until a browser that does not answer fails the test


def found() -> str | None:
    """Where a Chromium is installed, if one is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._last = read, write, b"", 0
        self.events = list[dict[str, Any]]()
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Events that come before it are kept."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            message = self._next(until)
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        """Loads a page and waits until its scripts have run."""
        self.events.clear()
        gone = self.call("Page.navigate", url=url)
        assert "errorText" not in gone, f"{url}: {gone['errorText']}"
        loader = gone["loaderId"]
        until = time.monotonic() + PATIENCE
        while not any(_is_load(event, loader) for event in self.events):
            self.events.append(self._next(until))

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise when it is kept."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, f"{script}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        loop = f"const look = () => {{ const is = ({script}); is ? done(is) : setTimeout(look, 10); }}; look();"
        return self.run(f"new Promise((done) => {{ {loop} }})")

    def type(self, text: str, key: str = "") -> None:
        """Text into what has the focus, then perhaps a key such as Enter or Escape."""
        self.call("Input.insertText", text=text)
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        for kind in ("keyDown", "keyUp") if key else ():
            more = {"text": "\r"} if (kind, key) == ("keyDown", "Enter") else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, and which colours the user likes."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def shoot(self, file: Path) -> None:
        """What the window shows, as a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors that the page's script threw or the browser logged since the page was opened."""
        self.run("0")
        thrown = [e["params"]["exceptionDetails"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        return [str(one) for one in thrown] + [one["text"] for one in logged if one["level"] == "error"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser was silent for {PATIENCE:g} seconds"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _is_load(event: dict[str, Any], loader: str) -> bool:
    """Whether an event says that the document of this loader is complete: a page left behind may still have some."""
    told = event.get("params", {})
    return event.get("method") == "Page.lifecycleEvent" and (told["name"], told["loaderId"]) == ("load", loader)


@contextmanager
def browsing(chromium: str, profile: Path) -> Generator[Browser]:
    """A browser with an empty profile, ended with everything that it started."""
    ours, theirs = os.pipe(), os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1])]
    arguments = [sys.executable, "-c", LAUNCH, *map(str, high), chromium, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        arguments, pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for end in (*high, ours[0], theirs[1]):
        os.close(end)
    try:
        browser = Browser(theirs[0], ours[1])
        yield browser
        browser._session = None  # pyright: ignore[reportPrivateUsage]
        browser.call("Browser.close")
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(ours[1])
        os.close(theirs[0])
