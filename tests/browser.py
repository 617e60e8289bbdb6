"""Chromium for the tests of pages: headless, and driven with real mouse and keyboard events.

The browser is spoken to over the pipe of its DevTools protocol (``--remote-debugging-pipe``): JSON ended by a zero
byte, in on descriptor 3 and out on 4. https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
SECONDS = 60.0

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Browser:
    """One page of ``width`` × ``height`` pixels; a context manager."""

    def __init__(self, width: int = 1200, height: int = 900):
        self.width, self.height = width, height
        self.errors: list[str] = []
        """What the page's scripts raised, and what its content policy refused."""
        self._count = 0
        self._read = b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (commands, self._out), (self._in, answers) = os.pipe(), os.pipe()
        silent = os.open(os.devnull, os.O_WRONLY)
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (silent, silent, commands, answers)]
        self._process = os.posix_spawn(
            str(CHROMIUM), [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._profile.name}"], os.environ, setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(theirs, start=1)],
        )  # fmt: skip
        for end in (silent, commands, answers, *theirs):
            os.close(end)
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=self.width, height=self.height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The result of one command. Raises RuntimeError with what the browser answers instead."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": arguments}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._hear(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, fragment: str = "", dark: bool = False) -> None:
        """Load a file and wait until its scripts have run."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.as_uri() + fragment)
        deadline = time.monotonic() + SECONDS
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **arguments: Any) -> None:
        """``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel`` at this place of the window."""
        held = {"button": "left", "clickCount": 1} if kind in ("mousePressed", "mouseReleased") else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held, **arguments)

    def click(self, x: float, y: float) -> None:
        """Press and release."""
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def key(self, key: str) -> None:
        """Press and release a key, by the name that the page gets."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of the first such element in the window, which is scrolled to it."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            ready = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "Chromium does not answer"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])
