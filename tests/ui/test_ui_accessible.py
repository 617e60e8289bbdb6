"""Pages for everybody: what axe-core finds, light and dark; narrow screens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ui.addresses import NASTY, OTHERS, TRAINED
from tests.ui.watch import Watched

AXE = importlib.util.find_spec("axe_playwright_python")
PAGES = {
    **TRAINED,
    "what others do not record": OTHERS["rollouts of math_rl"],
    "hostile notes": NASTY["notes"],
    "hostile tokens": NASTY["tokens"],
}
RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map((each) =>
  `${each.id} (${each.impact}): ${each.help}: ` + each.nodes.slice(0, 4).map((node) =>
    node.target.join(" ") + " " + (node.any[0] || node.all[0] || node.none[0] || {}).message).join("; "))"""
WIDE = """() => [document.documentElement.scrollWidth, innerWidth,
  [...document.querySelectorAll("body *")].filter((each) => {
  const box = each.getBoundingClientRect();
  if (box.right <= innerWidth + 1 || !each.checkVisibility()) return false;
  if (getComputedStyle(each).position === "absolute") return false;
  for (let at = each; at && at !== document.body; at = at.parentElement) if (at !== each
    && /auto|scroll|hidden|clip/.test(getComputedStyle(at).overflowX)) return false;
  return true;
}).slice(0, 5).map((each) => `${each.tagName}.${each.className}`)]"""


@pytest.fixture(scope="module")
def contexts(browser):
    made = {
        scheme: browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        for scheme in ("light", "dark")
    }
    made["narrow"] = browser.new_context(viewport={"width": 400, "height": 800}, has_touch=True)
    yield made
    for context in made.values():
        context.close()


@pytest.mark.skipif(AXE is None, reason="no axe-playwright-python here: make test-ui")
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(contexts, server, name):
    source = (Path(str(AXE.origin)).parent / "axe.min.js").read_text(encoding="utf-8")
    found = []
    for scheme in ("light", "dark"):
        watched = Watched(contexts[scheme].new_page(), server).open(PAGES[name])
        watched.page.evaluate(source)
        found += [f"{scheme}: {each}" for each in watched.page.evaluate(RUN)]
        if name == "campaigns":
            watched.press("?")
            found += [f"{scheme}, help: {each}" for each in watched.page.evaluate(RUN)]
        if name == "watch":
            watched.page.get_by_role("button", name="why?").first.click()
            watched.settle()
            found += [f"{scheme}, why: {each}" for each in watched.page.evaluate(RUN)]
        watched.fine().page.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", {**TRAINED, **{f"hostile {name}": path for name, path in NASTY.items()}})
def test_a_narrow_screen_needs_no_scrolling_sideways(contexts, server, name):
    path = TRAINED[name] if name in TRAINED else NASTY[name.removeprefix("hostile ")]
    watched = Watched(contexts["narrow"].new_page(), server).open(path)
    width, room, wide = watched.page.evaluate(WIDE)
    assert width <= room, f"{width} px wide: {wide}"
    watched.fine().page.close()
