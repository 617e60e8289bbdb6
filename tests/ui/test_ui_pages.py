"""Every page opens in a browser, whatever it is asked to show, and nothing goes wrong in it."""

from __future__ import annotations

import pytest

from retrain.ui.server import VIEWS
from tests.ui.addresses import NASTY, OTHERS, TRAINED
from tests.ui.hostile import VISIBLE
from tests.ui.watch import Watched

PAGES = TRAINED | OTHERS | {f"hostile {name}": path for name, path in NASTY.items()}
INERT = """() => [window.hacked, ({}).polluted,
  document.querySelectorAll('main script, main img, main svg[onload]').length,
  [...document.querySelectorAll('a[href]')].some((each) => /^(javascript|data):/i.test(each.href))]"""


def test_every_kind_of_page_is_opened_here():
    for addresses in (TRAINED, NASTY, OTHERS):
        assert set(VIEWS) <= {path[1:].partition("/")[0] for path in addresses.values()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_and_its_texts_are_inert(context, server, name):
    watched = Watched(context.new_page(), server).open(PAGES[name])
    assert watched.page.evaluate(INERT) == [None, None, 0, False]
    assert len(watched.text()) > 20  # what is not recorded is said
    assert name.startswith("hostile") or watched.page.locator("#main h1").count() == 1
    assert name in OTHERS or watched.page.locator(".state.wrong").count() == 0, watched.text()
    if name.startswith("hostile"):
        assert any(text in watched.page.content().replace("&lt;", "<").replace("&gt;", ">") for text in VISIBLE)
    watched.fine().page.close()


def test_what_is_not_there_is_said(context, server):
    nowhere = ("/nothing", "/campaign/nowhere", "/metrics", "/rollouts/logs/quickstart/runs/none", "/metrics/../../etc")
    for address in nowhere:
        watched = Watched(context.new_page(), server).open(address)
        assert len(watched.text()) > 20
        assert not any("script raised" in each for each in watched.wrong)
        watched.page.close()
