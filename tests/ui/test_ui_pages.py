import importlib.util
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from retrain.ui.server import VIEWS
from tests.ui.addresses import HOME, NASTY, OTHERS, TRAINED
from tests.ui.conftest import retrain
from tests.ui.hostile import VISIBLE
from tests.ui.watch import Watched

PAGES = TRAINED | OTHERS | {f"hostile {name}": path for name, path in NASTY.items()}
INERT = """() => [window.hacked, ({}).polluted,
  document.querySelectorAll('main script, main img, main svg[onload]').length,
  [...document.querySelectorAll('a[href]')].some((each) => /^(javascript|data):/i.test(each.href))]"""
AXE = importlib.util.find_spec("axe_playwright_python")
AXE_PAGES = {*TRAINED, "rollouts of math_rl", "hostile notes", "hostile tokens"}
VIOLATIONS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map((each) =>
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


def test_every_kind_of_page_is_opened_here():
    for addresses in (TRAINED, NASTY, OTHERS):
        assert set(VIEWS) <= {path[1:].partition("/")[0] for path in addresses.values()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_its_texts_are_inert_and_it_needs_no_scrolling_sideways(page, name):
    page.open(PAGES[name])
    assert page.page.evaluate(INERT) == [None, None, 0, False]
    assert len(page.text()) > 20  # what is not recorded is said
    assert name.startswith("hostile") or page.page.locator("#main h1").count() == 1
    assert name in OTHERS or page.page.locator(".state.wrong").count() == 0, page.text()
    if name.startswith("hostile"):
        assert any(text in page.page.content().replace("&lt;", "<").replace("&gt;", ">") for text in VISIBLE)
    page.page.set_viewport_size({"width": 400, "height": 800})
    page.settle()
    width, room, wide = page.page.evaluate(WIDE)
    assert width <= room, f"{width} px wide: {wide}"


@pytest.mark.skipif(AXE is None, reason="no axe-playwright-python here: make test-ui")
@pytest.mark.parametrize("name", sorted(AXE_PAGES))
def test_axe_finds_nothing(page, name):
    source = (Path(AXE.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    found = []
    page.open(PAGES[name]).page.evaluate(source)
    for scheme in ("light", "dark"):
        page.page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {each}" for each in page.page.evaluate(VIOLATIONS)]
        if name == "campaigns":
            page.press("?")
            found += [f"{scheme}, help: {each}" for each in page.page.evaluate(VIOLATIONS)]
            page.press("?")
        if name == "watch":
            page.click(page.page.get_by_role("button", name="why?").first)
            found += [f"{scheme}, why: {each}" for each in page.page.evaluate(VIOLATIONS)]
            page.page.keyboard.press("Escape")
    assert not found, "\n".join(found)


def test_every_rate_stands_with_its_count_and_its_interval(page):
    page.open(f"/problems{HOME}")
    rates = page.page.locator(".matrixtable .proportion").all_inner_texts()
    assert len(rates) == 2 * 2 + 2 * 2 * 100
    assert all(re.fullmatch(r"\d+% \d+–\d+%, n \d+", each) for each in rates), rates[:8]
    page.open(f"/rollouts{HOME}")
    assert re.search(r"\d+% \d+–\d+%, n 64 correct$", page.text("h1 + p"))


def test_what_is_not_there_is_said(context, server):
    nowhere = ("/nothing", "/campaign/nowhere", "/metrics", "/rollouts/logs/quickstart/runs/none", "/metrics/../../etc")
    for address in nowhere:
        watched = Watched(context.new_page(), server).open(address)
        assert len(watched.text()) > 20
        assert not any("script raised" in each for each in watched.wrong)
        watched.page.close()


# What the copy that ``retrain ui --bundle`` writes is opened with from the file system.
COPIED = [
    *("campaigns", "campaign", "watch", "problems", "prompt", "rollouts", "tokens", "timeline", "lora"),
    *("compared", "notes", "hostile campaign", "hostile metrics of a run", "hostile tokens", "hostile notes"),
]


@pytest.fixture(scope="module")
def copy(logs, hostile, tmp_path_factory):
    out = tmp_path_factory.mktemp("copy") / "page"
    retrain("ui", str(logs), str(hostile), "--bundle", str(out), XDG_CACHE_HOME=str(out.parent / "cache"))
    return (out / "index.html").as_uri()


@pytest.mark.parametrize("name", COPIED)
def test_a_page_of_the_copy(context, copy, name):
    watched = Watched(context.new_page(), copy.rpartition("/")[0]).open(f"{copy}#{PAGES[name]}")
    assert watched.page.locator("#main h1").count() == 1
    assert watched.page.locator(".state.wrong").count() == 0, watched.text(".state.wrong")
    assert watched.text(".live").startswith("copy of ")
    assert watched.page.evaluate("() => window.hacked") is None
    watched.fine().page.close()


def test_the_pages_of_a_copy_lead_to_each_other(context, copy):
    watched = Watched(context.new_page(), copy.rpartition("/")[0]).open(copy)
    watched.click(watched.page.locator(f"a.open[href='#/campaign{quote(HOME)}']"))
    titles = watched.page.locator("nav[aria-label=views] a").all_inner_texts()
    for title in titles:
        watched.click(watched.page.locator("nav[aria-label=views] a", has_text=title).first)
        assert watched.text("nav[aria-label=views] a[aria-current]") == title
        assert watched.page.locator(".state.wrong").count() == 0, f"{title}: {watched.text('.state.wrong')}"
    watched.page.go_back()
    watched.settle()
    assert watched.text("nav[aria-label=views] a[aria-current]") == titles[-2]
    watched.fine().page.close()
