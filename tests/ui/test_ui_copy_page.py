"""The copy that ``retrain ui --bundle`` writes, opened from the file system: every page, and the links between them."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.ui.addresses import FIRST, HOME, RUNS, SECOND, A, B
from tests.ui.conftest import retrain
from tests.ui.watch import Watched

PAGES = {
    "campaigns": "/", "campaign": f"/campaign{HOME}", "watch": f"/metrics{HOME}", "all": f"/metrics{FIRST}?tab=all",
    "conditions": f"/metrics{HOME}?lines=conditions", "problems": f"/problems{HOME}", "prompt": f"/prompt{HOME}",
    "rollouts": f"/rollouts{FIRST}", "rollout": f"/rollouts{SECOND}?index=2", "tokens": f"/tokens{FIRST}",
    "timeline": f"/timeline{FIRST}", "lora": f"/lora{HOME}", "compare": f"/compare{HOME}?a={A}&b={B}",
    "notes": f"/notes{HOME}",
    "hostile": "/campaign/hostile", "hostile metrics": f"/metrics/hostile/runs/{RUNS[0]}?tab=all",
    "hostile rollouts": "/rollouts/hostile?index=1",
    "hostile tokens": "/tokens/hostile?index=1", "hostile notes": "/notes/hostile",
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(logs, hostile, tmp_path_factory):
    out = tmp_path_factory.mktemp("copy") / "page"
    retrain("ui", str(logs), str(hostile), "--bundle", str(out), XDG_CACHE_HOME=str(out.parent / "cache"))
    return (out / "index.html").as_uri()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_copy(context, copy, name):
    watched = Watched(context.new_page(), copy.rpartition("/")[0]).open(f"{copy}#{PAGES[name]}")
    assert watched.page.locator("#main h1").count() == 1
    assert watched.page.locator(".state.wrong").count() == 0, watched.text(".state.wrong")
    assert watched.text(".live").startswith("copy of ")
    assert watched.page.evaluate("() => window.hacked") is None
    watched.fine().page.close()


def test_the_pages_of_a_copy_lead_to_each_other(context, copy):
    watched = Watched(context.new_page(), copy.rpartition("/")[0]).open(copy)
    watched.page.locator(f"a.open[href='#/campaign{quote(HOME)}']").click()
    watched.settle()
    titles = watched.page.locator("nav[aria-label=views] a").all_inner_texts()
    for title in titles:
        watched.page.locator("nav[aria-label=views] a", has_text=title).first.click()
        watched.settle()
        assert watched.text("nav[aria-label=views] a[aria-current]") == title
        assert watched.page.locator(".state.wrong").count() == 0, f"{title}: {watched.text('.state.wrong')}"
    watched.page.go_back()
    watched.settle()
    assert watched.text("nav[aria-label=views] a[aria-current]") == titles[-2]
    watched.fine().page.close()
