"""A page of a real browser that hears everything which goes wrong in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = os.environ.get("RETRAIN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-sandbox", "--disable-gpu")
SECONDS = 30.0
HELD = "/api/events"
"""A request that stays open."""

# What a page shows, without what goes by the clock: texts, and the state of every control.
SEEN = """() => {
  const main = document.getElementById("main");
  const parts = [], walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const at = walker.currentNode.parentElement;
    if (!at.closest(".chartcard .readout, .chartcard .plot, [hidden]")) parts.push(walker.currentNode.data);
  }
  const words = parts.join(" ").replace(/(changed )?(just now|\\d+ (second|minute|hour|day)s? ago)/g, "")
    .replace(/\\s+/g, " ").trim();
  const name = (each) => each.getAttribute("aria-label") || each.textContent.trim() || each.placeholder || "";
  const values = [...main.querySelectorAll("input, select")].map((each) =>
    [name(each).slice(0, 40), each.type === "checkbox" ? each.checked : each.value]);
  const pressed = [...main.querySelectorAll("[aria-pressed=true]")].map(name);
  const current = [...document.querySelectorAll("[aria-current]")].map((each) => each.innerText.slice(0, 80));
  const charts = [...main.querySelectorAll(".chartcard .plot")].map((each) =>
    each.getAttribute("aria-label") || each.innerText);
  return {heading: [...main.querySelectorAll("h1, h2")].map((each) => each.textContent), words,
     values, pressed, current, charts};
}"""


class Watched:
    """A page at ``base`` with its errors, warnings, dialogs, and requests that failed or went elsewhere."""

    def __init__(self, page: Any, base: str):
        self.page, self.base = page, base
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self._flying: dict[Any, float] = {}
        page.set_default_timeout(1000 * SECONDS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrong.append(f"a script raised {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._request)
        page.on("requestfinished", lambda request: self._flying.pop(request, None))
        page.on("requestfailed", self._failed)
        page.on("response", self._response)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console {message.type}: {message.text} at {message.location.get('url', '')}")

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        self.requests.append(request.url)
        if HELD not in request.url:
            self._flying[request] = time.monotonic()
        if self.base and not request.url.startswith((self.base, "data:", "blob:")):
            self.wrong.append(f"a request to {request.url}")

    def _failed(self, request: Any) -> None:
        self._flying.pop(request, None)
        # A page that goes on takes its own requests back.
        if request.failure != "net::ERR_ABORTED":
            self.wrong.append(f"{request.url} failed: {request.failure}")

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.wrong.append(f"{response.url} answered with status {response.status}")

    def open(self, path: str) -> Watched:
        """Load this address anew, and wait until all of it is drawn."""
        self._flying.clear()
        self.page.goto(path if "://" in path else self.base + path, wait_until="load")
        return self.settle()

    def settle(self, quiet: float = 0.25) -> Watched:
        """Wait until nothing is asked any more and no part of it that is in sight says that it reads."""
        self.page.bring_to_front()  # one that is behind another draws nothing
        deadline, calm = time.monotonic() + SECONDS, None
        while calm is None or time.monotonic() - calm < quiet:
            self.page.wait_for_timeout(40)
            now = time.monotonic()
            busy = self._flying or not self.page.evaluate(
                "() => { const main = document.getElementById('main'); return Boolean(main && main.children.length"
                " && ![...main.querySelectorAll('.spin')].some((each) => each.checkVisibility() &&"
                " each.getBoundingClientRect().top < innerHeight)); }"
            )
            calm = None if busy else calm or now
            assert now < deadline, f"{self.page.url} is still busy with {[each.url for each in self._flying]}"
        return self

    def fine(self) -> Watched:
        assert self.wrong == [], f"{self.path}:\n" + "\n".join(self.wrong)
        return self

    @property
    def path(self) -> str:
        return urlsplit(self.page.url)._replace(scheme="", netloc="").geturl()

    @property
    def query(self) -> dict[str, str]:
        """The query as it stands in the address."""
        return self.page.evaluate("() => Object.fromEntries(new URLSearchParams(location.search))")

    def seen(self) -> dict[str, Any]:
        return self.page.evaluate(SEEN)

    def text(self, selector: str = "#main") -> str:
        return self.page.inner_text(selector)

    def until(self, script: str, what: str, seconds: float = SECONDS) -> Any:
        """The value of the expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.page.evaluate(script)):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s at {self.path}"
            self.page.wait_for_timeout(25)
        return found

    def press(self, *keys: str) -> Watched:
        """These keys one after the other, with time for what each of them starts."""
        for key in keys:
            self.page.keyboard.press(key)
            self.settle(0.3)
        return self

    def click(self, target: Any, **options: Any) -> Watched:
        """Click a locator's element, and wait until all is drawn that this starts."""
        target.click(**options)
        return self.settle()

    def press_button(self, name: str, **options: Any) -> Watched:
        return self.click(self.page.get_by_role("button", name=name, **options))


@contextmanager
def browser_of(playwright: Any) -> Iterator[Any]:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
    try:
        yield browser
    finally:
        browser.close()


def links(page: Any, within: str = "body") -> list[str]:
    """The page's own links, each address once, as they stand."""
    script = f"[...document.querySelectorAll('{within} a[href]')].map((each) => each.getAttribute('href'))"
    found = page.evaluate(script)
    return [each for each in dict.fromkeys(found) if each.startswith("/")]


def shape(href: str) -> tuple[str, ...]:
    """What kind of link it is: its view, whether it is of a run, and which keys its query has."""
    parts = urlsplit(href)
    view, _, place = parts.path[1:].partition("/")
    keys = sorted(pair.partition("=")[0] for pair in parts.query.split("&") if pair)
    return (view, "run" if "/runs/" in place else "", *keys)


AGO = re.compile(r"\b(?:just now|(?:\d+ [a-z]+ )+ago)")


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In what two pictures of a page differ; empty where they are the same. Charts out of sight may not be read yet,
    and how long ago something changed may have gone on."""
    before, after = (json.loads(AGO.sub("ago", json.dumps(seen, ensure_ascii=False))) for seen in (before, after))
    if len(before["charts"]) == len(after["charts"]):
        pairs = list(zip(before.pop("charts"), after.pop("charts"), strict=True))
        before["charts"] = [a for a, b in pairs if "Reading" not in a + b]
        after["charts"] = [b for a, b in pairs if "Reading" not in a + b]
    return "\n".join(f"{key}: {before[key]!r} and {after[key]!r}" for key in before if before[key] != after[key])
